"""Images per class: the figures, a histogram as text, and one as a picture."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plsc.data.dataset import ImageDataset
from plsc.files import atomic_write

_BAR = 40
_BINS = ((1, 1), (2, 2), (3, 4), (5, 9), (10, 19), (20, 49), (50, 99), (100, 199), (200, 499), (500, 999))


def stats(dataset: ImageDataset) -> dict[str, Any]:
    """Figures about images per class.

    Returns ``source``, ``images``, ``classes``, ``images_per_class`` (``min``, ``median``, ``mean``, ``max``),
    ``single_image_classes``, ``largest_class``, ``left_out``, and ``histogram``: classes by number of images,
    as a list of ``{"from", "to", "classes"}``.
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
        "histogram": _histogram(counts),
    }


def _histogram(counts: NDArray[np.int64]) -> list[dict[str, int]]:
    bins = list(_BINS)
    while bins[-1][1] < counts.max():
        bins.append((bins[-1][1] + 1, bins[-1][1] * 10 + 9))
    rows = [(low, high, int(np.sum((counts >= low) & (counts <= high)))) for low, high in bins]
    filled = [number for number, (_, _, classes) in enumerate(rows) if classes]
    kept = rows[filled[0] : filled[-1] + 1]
    return [{"from": low, "to": high, "classes": classes} for low, high, classes in kept]


def stats_text(figures: dict[str, Any]) -> str:
    """The figures of :func:`stats` for people: a summary and a histogram in text."""
    per_class = figures["images_per_class"]
    lines = [
        f"{figures['source']}: {figures['images']:,} images of {figures['classes']:,} classes",
        f"images per class: {per_class['min']:,} to {per_class['max']:,}, "
        f"median {per_class['median']:,.0f}, mean {per_class['mean']:,.1f}",
        "",
        f"{'images':>12}  {'classes':>12}",
    ]
    most = max(row["classes"] for row in figures["histogram"])
    for row in figures["histogram"]:
        bar = "█" * round(_BAR * row["classes"] / most) or ("▏" if row["classes"] else "")
        lines.append(f"{_span(row):>12}  {row['classes']:>12,}  {bar}".rstrip())
    if figures["single_image_classes"]:
        lines += ["", f"{figures['single_image_classes']:,} classes have a single image"]
    return "\n".join(lines)


def _span(row: dict[str, int]) -> str:
    return f"{row['from']:,}" if row["from"] == row["to"] else f"{row['from']:,}–{row['to']:,}"


def stats_plot(figures: dict[str, Any], path: Path) -> None:
    """Draw the histogram of :func:`stats` into ``path``, a PNG or SVG by its suffix."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows, per_class = figures["histogram"], figures["images_per_class"]
    figure = Figure(figsize=(8.4, 4.4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    bars = axes.bar(range(len(rows)), [row["classes"] for row in rows], width=0.82, color="#3b6fb6")
    axes.bar_label(bars, labels=[f"{row['classes']:,}" if row["classes"] else "" for row in rows], padding=2)
    axes.set_xticks(range(len(rows)), [_span(row) for row in rows])
    margin = 0.6 + max(0, 6 - len(rows)) / 2  # few bars stay slender
    axes.set_xlim(-margin, len(rows) - 1 + margin)
    axes.set_xlabel("images per class")
    axes.set_ylabel("classes")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(length=0)
    axes.margins(y=0.12)
    axes.set_title(f"{figures['images']:,} images of {figures['classes']:,} classes", loc="left", pad=22)
    axes.annotate(
        f"{per_class['min']:,} to {per_class['max']:,} images per class, "
        f"median {per_class['median']:,.0f}, mean {per_class['mean']:,.1f}",
        (0, 1),
        xycoords="axes fraction",
        xytext=(0, 8),
        textcoords="offset points",
        color="#555555",
    )
    with atomic_write(path) as tmp_path:
        figure.savefig(tmp_path, format=path.suffix.lstrip(".").lower() or "png")
