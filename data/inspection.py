"""Inspection of a data set: broken images, duplicates and empty classes; statistics of images per class."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from plsc.data.codec import decode_image
from plsc.data.dataset import EncodedDataset, ImageDataset
from plsc.data.loader import map_in_workers, report_killed_workers
from plsc.errors import DataError
from plsc.files import atomic_write
from plsc.progress import Progress, counted

MAX_LISTED = 100
_CHUNK = 64
_DIGEST_BYTES = 16


# Digests of the content of some consecutive images, uint64 (n, 2), and the broken ones' errors by index.
_Chunk = tuple[NDArray[np.uint64], dict[int, str]]


@report_killed_workers()
def check(dataset: ImageDataset, *, workers: int = 0, quiet: bool = False) -> dict[str, Any]:
    """Decode every image of ``dataset`` and compare their contents.

    Args:
        dataset: the images; those it left out on opening count as broken.
        workers: processes that decode; 0 decodes in this one.
        quiet: print no progress.

    Returns:
        ``source``, ``images``, ``classes``, ``broken`` (a count), ``broken_images`` (the first 100:
        ``{"key", "why"}``), ``duplicates`` (the number of images with the same bytes as an earlier one),
        ``duplicates_across_classes`` (those of them whose earlier image is of another class), ``duplicate_images`` (the
        first 100: ``{"key", "same_as"}``), ``empty_classes``, ``files_left_out`` (numbers of files
        that are no pictures, or not read here, by suffix).
    """
    digests = np.zeros((len(dataset), 2), dtype=np.uint64)
    broken: dict[int, str] = {}
    progress = Progress("check", len(dataset), quiet=quiet)
    chunks = [range(start, min(start + _CHUNK, len(dataset))) for start in range(0, len(dataset), _CHUNK)]
    for chunk, (found, faults) in zip(chunks, map_in_workers(_Inspector(dataset), chunks, workers), strict=True):
        digests[chunk] = found
        broken |= faults
        progress.advance(len(chunk))
    progress.finish()
    counts = np.bincount(dataset.labels, minlength=dataset.num_classes)
    unused = [dataset.class_names[int(label)] for label in np.flatnonzero(counts == 0)]
    reasons = dataset.skipped | {dataset.key(index): why for index, why in broken.items()}
    return {
        "source": dataset.source,
        "images": len(dataset) + len(dataset.skipped),
        "classes": dataset.num_classes,
        "broken": len(reasons),
        "broken_images": [{"key": key, "why": why} for key, why in list(reasons.items())[:MAX_LISTED]],
        **_duplicates(dataset, digests, np.array(sorted(broken), dtype=np.int64)),
        "empty_classes": [*dataset.empty_classes, *unused],
        "files_left_out": dataset.left_out,
    }


class _Inspector(Dataset[_Chunk]):
    """Inspects the images of a range: a map from range to report, for torch's DataLoader."""

    def __init__(self, dataset: ImageDataset) -> None:
        self.dataset = dataset

    def __getitem__(self, indices: range) -> _Chunk:
        digests = np.zeros((len(indices), 2), dtype=np.uint64)
        broken: dict[int, str] = {}
        for row, index in enumerate(indices):
            try:
                digests[row] = np.frombuffer(_digest(self.dataset, index), dtype=np.uint64)
            except DataError as error:
                broken[index] = str(error)
        return digests, broken


def _digest(dataset: ImageDataset, index: int) -> bytes:
    """Hash the stored bytes, or the pixels if none are stored; :class:`DataError` if the image does not decode."""
    if isinstance(dataset, EncodedDataset):
        content = dataset.encoded(index)
        decode_image(content, f"image {dataset.key(index)} of {dataset.source}")
    else:
        content = dataset.image(index).numpy().tobytes()
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()


def _duplicates(dataset: ImageDataset, digests: NDArray[np.uint64], broken: NDArray[np.int64]) -> dict[str, Any]:
    """Find images with the bytes of an earlier one; broken images do not count."""
    intact = np.delete(np.arange(len(digests)), broken)
    _, first, content = np.unique(digests[intact], axis=0, return_index=True, return_inverse=True)
    originals = intact[first[content.reshape(-1)]]
    later, earlier = intact[originals != intact], originals[originals != intact]
    return {
        "duplicates": len(later),
        "duplicates_across_classes": int(np.sum(dataset.labels[later] != dataset.labels[earlier])),
        "duplicate_images": [
            {"key": dataset.key(int(image)), "same_as": dataset.key(int(original))}
            for image, original in zip(later[:MAX_LISTED], earlier, strict=False)
        ],
    }


_BAR = 40
_BINS = ((1, 1), (2, 2), (3, 4), (5, 9), (10, 19), (20, 49), (50, 99), (100, 199), (200, 499), (500, 999))


def stats(dataset: ImageDataset) -> dict[str, Any]:
    """Compute statistics of images per class.

    Returns:
        ``source``, ``images``, ``classes``, ``images_per_class`` (``min``, ``median``, ``mean``, ``max``),
        ``single_image_classes``, ``largest_class``, ``left_out``, ``files_left_out`` (as :func:`check`), and
        ``histogram``: classes by number of images, as a list of ``{"from", "to", "classes"}``.
    """
    counts = np.bincount(dataset.labels, minlength=dataset.num_classes)
    return {
        "source": dataset.source,
        "images": len(dataset),
        "classes": dataset.num_classes,
        "images_per_class": {
            "min": int(counts.min()),
            "median": float(np.median(counts)),
            "mean": float(counts.mean()),
            "max": int(counts.max()),
        },
        "single_image_classes": int(np.sum(counts == 1)),
        "largest_class": dataset.class_names[int(counts.argmax())],
        "left_out": len(dataset.skipped),
        "files_left_out": dataset.left_out,
        "histogram": _histogram(counts),
    }


def _histogram(counts: NDArray[np.int64]) -> list[dict[str, int]]:
    bins = list(_BINS)
    while bins[-1][1] < counts.max():
        bins.append((bins[-1][1] + 1, bins[-1][1] * 10 + 9))
    rows = [{"from": a, "to": b, "classes": int(np.sum((counts >= a) & (counts <= b)))} for a, b in bins]
    filled = [number for number, row in enumerate(rows) if row["classes"]]
    return rows[filled[0] : filled[-1] + 1]


def stats_lines(result: dict[str, Any]) -> list[str]:
    """Format the result of :func:`stats` as a summary and a histogram in text."""
    per_class = result["images_per_class"]
    lines = [
        f"{result['source']}: {_size(result)}",
        "images per class: {min:,} to {max:,}, median {median:,.0f}, mean {mean:,.1f}".format(**per_class),
        "",
        f"{'images':>12}  {'classes':>12}",
    ]
    most = max(row["classes"] for row in result["histogram"])
    for row in result["histogram"]:
        bar = "█" * round(_BAR * row["classes"] / most) or ("▏" if row["classes"] else "")
        lines.append(f"{_format_range(row):>12}  {row['classes']:>12,}  {bar}".rstrip())
    if result["single_image_classes"]:
        lines += ["", f"{counted(result['single_image_classes'], 'class')} of a single image"]
    return lines


def _size(result: dict[str, Any]) -> str:
    return f"{counted(result['images'], 'image')} of {counted(result['classes'], 'class')}"


def _format_range(row: dict[str, int]) -> str:
    return f"{row['from']:,}" if row["from"] == row["to"] else f"{row['from']:,}–{row['to']:,}"


def stats_plot(result: dict[str, Any], path: Path) -> None:
    """Draw the histogram of :func:`stats` into ``path``, a PNG or SVG by its suffix."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows, per_class = result["histogram"], result["images_per_class"]
    figure = Figure(figsize=(8.4, 4.4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    bars = axes.bar(range(len(rows)), [row["classes"] for row in rows], width=0.82, color="#3b6fb6")
    axes.bar_label(bars, labels=[f"{row['classes']:,}" if row["classes"] else "" for row in rows], padding=2)
    axes.set_xticks(range(len(rows)), [_format_range(row) for row in rows])
    margin = 0.6 + max(0, 6 - len(rows)) / 2  # keeps the bars of a short histogram narrow
    axes.set_xlim(-margin, len(rows) - 1 + margin)
    axes.set_xlabel("images per class")
    axes.set_ylabel("classes")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(length=0)
    axes.margins(y=0.12)
    axes.set_title(_size(result), loc="left", pad=22)
    axes.annotate(
        "{min:,} to {max:,} images per class, median {median:,.0f}, mean {mean:,.1f}".format(**per_class),
        (0, 1),
        xycoords="axes fraction",
        xytext=(0, 8),
        textcoords="offset points",
        color="#555555",
    )
    with atomic_write(path) as tmp_path:
        figure.savefig(tmp_path, format=path.suffix.lstrip(".").lower() or "png")
