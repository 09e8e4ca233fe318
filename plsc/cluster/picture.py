"""The picture of a clustering: sizes, the inertia by iteration, and what some clusters hold."""

from pathlib import Path
from typing import Any

import numpy as np

from plsc.embedding.columns import Float64, Int64
from plsc.embedding.embedding_set import EmbeddingSet
from plsc.embedding.sources import open_pictures
from plsc.errors import PlscError
from plsc.files import atomic_write
from plsc.progress import counted

_INK, _GRID, _BAR = "#444444", "#dddddd", "#3f51b5"
_CLUSTERS, _PICTURES = 8, 10  # rows and columns of examples


def draw_report(path: Path, source: EmbeddingSet, labels: Int64, cosines: Float64, history: list[Any]) -> int:
    """Draw the PNG ``path``, and return how many clusters it shows pictures of.

    Args:
        path: of the picture.
        source: the set; pictures come from the data that it was made from, where that is still there.
        labels: (N,) of the set's rows, -1 for none.
        cosines: (N,) of the rows with their centres.
        history: of k-means, as :class:`plsc.cluster.kmeans.State` has it; empty where there was none.
    """
    from matplotlib.figure import Figure  # not pyplot: no backend, no global state

    examples = _examples(source, labels, cosines)
    figure = Figure(figsize=(9.0, 3.2 + 0.95 * len(examples)), dpi=120, layout="constrained")
    top: Any = figure
    if examples:
        parts: Any = figure.subfigures(2, 1, height_ratios=[3.2, 0.95 * len(examples)])
        top, below = parts
        _draw_examples(below, examples)
    axes = top.subplots(1, 2 if history else 1, squeeze=False)[0]
    _draw_sizes(axes[0], np.bincount(labels[labels >= 0]))
    if history:
        _draw_inertia(axes[1], history)
    with atomic_write(path) as tmp_path:
        figure.savefig(tmp_path, format="png")
    return len(examples)


def _draw_sizes(axis: Any, sizes: Int64) -> None:
    high = int(sizes.max(initial=1))
    step = max(1, -(-high // 40))
    axis.hist(sizes, bins=np.arange(0, high + 2 * step, step) - 0.5, color=_BAR, edgecolor="white", linewidth=0.5)
    _frame(axis, f"Sizes of {counted(len(sizes), 'cluster')}", "points in a cluster", "clusters")


def _draw_inertia(axis: Any, history: list[Any]) -> None:
    values = [step["inertia"] for step in history]
    axis.plot(range(1, len(values) + 1), values, color=_BAR, linewidth=2, marker="o", markersize=4)
    axis.xaxis.get_major_locator().set_params(integer=True)
    _frame(axis, "Inertia", "iteration", "sum of squared distances")


def _frame(axis: Any, title: str, xlabel: str, ylabel: str) -> None:
    axis.set_title(title, loc="left", fontsize=10, color=_INK)
    axis.set_xlabel(xlabel, color=_INK)
    axis.set_ylabel(ylabel, color=_INK)
    axis.grid(visible=True, color=_GRID, linewidth=0.7)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def _examples(source: EmbeddingSet, labels: Int64, cosines: Float64) -> list[tuple[str, list[Any]]]:
    """(title, pictures (H, W, 3)) of clusters from the largest to the smallest, those nearest to the centre first."""
    data = source.manifest.get("data")
    try:
        pictures = open_pictures(data) if isinstance(data, str) else None
    except PlscError:  # moved or removed meanwhile
        pictures = None
    sizes = np.bincount(labels[labels >= 0])
    if pictures is None or len(pictures) != len(source):
        return []
    order = np.argsort(-sizes, kind="stable")[: int((sizes > 1).sum())]
    chosen = order[np.unique(np.linspace(0, len(order) - 1, min(_CLUSTERS, len(order))).astype(np.int64))]
    examples = []
    for label in chosen.tolist():
        rows = np.flatnonzero(labels == label)
        nearest = rows[np.argsort(-cosines[rows], kind="stable")][:_PICTURES].tolist()
        shown = [picture for row in nearest if (picture := _picture(pictures, row)) is not None]
        if shown:
            examples.append((f"{label}: {sizes[label]:,}", shown))
    return examples


def _picture(pictures: Any, row: int) -> Any:
    try:
        return pictures.picture(row).permute(1, 2, 0).numpy()
    except PlscError:
        return None


def _draw_examples(figure: Any, examples: list[tuple[str, list[Any]]]) -> None:
    axes = figure.subplots(len(examples), _PICTURES + 1, squeeze=False)
    for row, (title, shown) in zip(axes, examples, strict=True):
        for axis in row:
            axis.axis("off")
        row[0].text(1.0, 0.5, title, ha="right", va="center", fontsize=9, color=_INK, transform=row[0].transAxes)
        for axis, picture in zip(row[1:], shown, strict=False):
            axis.imshow(picture)
    figure.suptitle(
        "Clusters from the largest to the smallest (number: points), nearest to the centre first",
        fontsize=10,
        color=_INK,
        x=0.01,
        ha="left",
    )
