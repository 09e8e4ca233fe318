"""The comparison's results: as text, as CSV, as a picture."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from plsc.bench.contestants import CONTESTANTS, FLOOR
from plsc.evaluation.plots import COLOURS
from plsc.files import atomic_write

Row = Mapping[str, Any]
_GRID, _INK = "#d9d9d9", "#333333"
_BLUE, _ORANGE, _GREEN, _PINK, _SKY, _, _GREY = COLOURS
_COLOURS = {
    FLOOR: "#888888",
    "plsc": _BLUE,
    "plsc-no-momentum": _SKY,
    "plsc-fp32": _GREEN,
    "partial-fc": _ORANGE,
    "dense": _GREY,
    "linear-cross-entropy": _PINK,
}


def table(rows: Sequence[Row]) -> str:
    """The rows by size, aligned."""
    width = max(len(row["label"]) for row in rows)
    lines = []
    for size in _sizes(rows):
        classes, batch = size
        here = [row for row in rows if (row["classes"], row["batch_per_rank"]) == size]
        first = here[0]
        lines += [
            "",
            f"{classes:,} classes x {first['dim']}, {batch} samples on each of {first['nproc']} ranks, "
            f"{first['threads']} thread{'s' * (first['threads'] > 1)} each; per step and rank:",
            f"  {'':<{width}}  {'CPU s':>9} {'wall ms':>9} {'MiB':>9} {'of floor':>9}",
        ]
        lines += [_line(row, width) for row in here]
    return "\n".join(lines[1:])


def _line(row: Row, width: int) -> str:
    start = f"  {row['label']:<{width}}"
    if row["failed"]:
        return f"{start}  {row['note']}"
    wall = f"{row['wall_s'] * 1000:>9,.1f}"
    if row["contestant"] == FLOOR:
        rates = f"{row['product_gflops']:,.0f} GFLOP/s in {row['note']}, copy {row['copy_gb_s']:,.1f} GB/s a rank"
        cpu = "" if row["cpu_s"] is None else f"{row['cpu_s']:.3f}"
        return f"{start}  {cpu:>9} {wall} {'':>9} {'100%':>9}  {rates}"
    share = "" if row["floor_share"] is None else f"{row['floor_share']:.0%}"
    return f"{start}  {row['cpu_s']:>9.3f} {wall} {row['memory_mib']:>9,.0f} {share:>9}"


def ratio_lines(ratios: Sequence[Row], rows: Sequence[Row]) -> str:
    """What peers took over what ours took: our first exact head beside all, our first sampled one beside its like."""
    labels = {row["contestant"]: row["label"] for row in rows}
    shown = _leading(list(labels))
    width = max((len(labels[ratio["peer"]]) for ratio in ratios), default=0)
    lines = []
    for ratio in ratios:
        if ratio["ours"] in shown and CONTESTANTS[ratio["ours"]].sampled <= CONTESTANTS[ratio["peer"]].sampled:
            times = ", ".join(
                f"{text} {ratio[key]:.2f}x"
                for key, text in (("cpu_s", "CPU"), ("wall_s", "wall"), ("memory_mib", "memory"))
                if ratio[key] is not None
            )
            lines.append(
                f"  {ratio['classes']:>11,}  {labels[ratio['peer']]:<{width}}  over  {labels[ratio['ours']]}: {times}"
            )
    return "\n".join(["peer / ours, medians of the rounds:", *lines]) if lines else ""


def _leading(names: Sequence[str]) -> set[str]:
    ours = [name for name in names if name != FLOOR and CONTESTANTS[name].ours]
    kinds = ([name for name in ours if CONTESTANTS[name].sampled == sampled] for sampled in (False, True))
    return {kind[0] for kind in kinds if kind}


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """Every row with every field; an empty cell where a contestant has no such figure."""
    with atomic_write(path) as tmp_path, tmp_path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Time and memory over the number of classes, a line per contestant, both axes logarithmic; a pair per batch."""
    from matplotlib.figure import Figure

    batches = sorted({row["batch_per_rank"] for row in rows})
    figure = Figure(figsize=(11, 1.2 + 4.4 * len(batches)), dpi=120, layout="constrained")
    panels = figure.subplots(len(batches), 2, squeeze=False)
    names = list(dict.fromkeys(row["contestant"] for row in rows))
    for batch, (time_axes, memory_axes) in zip(batches, panels, strict=True):
        here = [row for row in rows if row["batch_per_rank"] == batch]
        if here[0]["kind"] == "cpu":  # other programs do not lengthen it
            _panel(time_axes, here, names, "cpu_s", 1000, "CPU milliseconds per step and rank")
        else:
            _panel(time_axes, here, names, "wall_s", 1000, "milliseconds per step")
        _panel(memory_axes, here, names, "memory_mib", 1, "MiB per rank at the peak, above the libraries'")
        time_axes.set_title(
            f"{batch} samples a rank, {here[0]['nproc']} ranks, D = {here[0]['dim']}",
            loc="left",
            fontsize=11,
            color=_INK,
        )
    lines, texts = panels[0][0].get_legend_handles_labels()
    figure.legend(lines, texts, loc="outside upper left", ncols=3, frameon=False, fontsize=10)
    with atomic_write(path) as tmp_path:
        figure.savefig(tmp_path, format=path.suffix[1:])


def _panel(axes: Any, rows: Sequence[Row], names: Sequence[str], key: str, factor: float, what: str) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    for name in names:
        mine = [row for row in rows if row["contestant"] == name]
        points = [(row["classes"], row[key] * factor) for row in mine if row[key]]
        axes.plot(*zip(*points, strict=True) if points else ([], []), label=mine[0]["label"], **_style(name))
    axes.set_xscale("log")
    axes.set_yscale("log")
    plain = FuncFormatter(_short)
    axes.xaxis.set_major_formatter(plain)
    axes.yaxis.set_major_formatter(plain)
    ticks = sorted({row["classes"] for row in rows})
    axes.set_xticks(ticks)
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("classes")
    axes.set_ylabel(what)
    axes.grid(visible=True, color=_GRID, linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)


def _style(name: str) -> dict[str, Any]:
    """A colour per kind of head; ours have discs, peers squares; the sampled ones are dashed and hollow."""
    if name == FLOOR:
        return {"color": _COLOURS[name], "linestyle": ":", "linewidth": 2}
    who = CONTESTANTS[name]
    colour = _COLOURS[name.removesuffix("-sampled")]
    return {
        "color": colour,
        "linewidth": 2,
        "linestyle": "--" if who.sampled else "-",
        "markersize": 6,
        "marker": "o" if who.ours else "s",
        "markerfacecolor": "white" if who.sampled else colour,
    }


def _short(value: float, _: int) -> str:
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def _sizes(rows: Sequence[Row]) -> list[tuple[int, int]]:
    return list(dict.fromkeys((row["classes"], row["batch_per_rank"]) for row in rows))
