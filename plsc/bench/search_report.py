"""The searches' results as text and as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from plsc.bench.search_contestants import CONTESTANTS
from plsc.evaluation.plots import COLOURS
from plsc.files import atomic_write

_GRID, _INK = "#d9d9d9", "#333333"
_BLUE, _ORANGE, _GREEN, _PINK, _SKY, _, _GREY = COLOURS
_COLOURS = {
    "plsc": _BLUE,
    "plsc-fp32": _SKY,
    "numpy": _GREY,
    "faiss": _ORANGE,
    "faiss-tuned": _PINK,
    "usearch": _GREEN,
}


def search_table(rows: Sequence[Mapping[str, Any]], ratios: Sequence[Mapping[str, Any]]) -> str:
    """The rows by batch, aligned, and how ours compare with the best of the others."""
    width = max(len(row["label"]) for row in rows)
    first = rows[0]
    lines = [
        f"{first['rows']:,} rows x {first['dim']}, {first['threads']} thread{'s' * (first['threads'] > 1)}, "
        f"the ten best, medians of {first['rounds']} round{'s' * (first['rounds'] > 1)}:"
    ]
    for batch in dict.fromkeys(row["batch"] for row in rows):
        lines += [
            "",
            f"  {f'batches of {batch}':<{width}}  {'queries/s':>10} {'p50 ms':>9} {'p99 ms':>9} "
            f"{'recall@10':>10} {'MiB':>7}",
        ]
        lines += [_line(row, width) for row in rows if row["batch"] == batch]
        lines += [
            f"  {CONTESTANTS[ratio['ours']].label}: {ratio['times']:.2f} times the best of the others "
            f"({CONTESTANTS[ratio['best_other']].label})"
            for ratio in ratios
            if ratio["batch"] == batch
        ]
    return "\n".join(lines)


def _line(row: Mapping[str, Any], width: int) -> str:
    start = f"  {row['label']:<{width}}"
    if row["failed"]:
        return f"{start}  {row['note']}"
    return (
        f"{start}  {row['qps']:>10,.0f} {row['p50_ms']:>9,.2f} {row['p99_ms']:>9,.2f} {row['recall']:>10.4f} "
        f"{row['memory_mib']:>7,.0f}  {row['note']}".rstrip()
    )


def draw_searches(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Queries per second over the batch, a line per contestant, both axes logarithmic; whiskers to the extreme
    rounds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.6, 5.2), dpi=120, layout="constrained")
    axes = figure.subplots()
    for name in dict.fromkeys(row["contestant"] for row in rows):
        _plot(axes, name, [row for row in rows if row["contestant"] == name and not row["failed"]])
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    batches = sorted({row["batch"] for row in rows})
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_xlabel("queries in a search")
    axes.set_ylabel("queries per second")
    first = rows[0]
    title = f"Exact search for the ten best of {first['rows']:,} x {first['dim']}, {first['threads']} CPU threads"
    axes.set_title(title, loc="left", fontsize=11, color=_INK)
    axes.grid(visible=True, color=_GRID, linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower left", ncols=2, frameon=False, fontsize=10)
    with atomic_write(path) as tmp_path:
        figure.savefig(tmp_path, format=path.suffix[1:])


def _plot(axes: Any, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    if not rows:
        return
    rates = [row["qps"] for row in rows]
    extremes = [
        [row["qps"] - row["qps_low"] for row in rows],
        [row["qps_high"] - row["qps"] for row in rows],
    ]
    ours = CONTESTANTS[name].ours
    axes.errorbar(
        [row["batch"] for row in rows],
        rates,
        yerr=extremes,
        label=rows[0]["label"],
        color=_COLOURS[name],
        linewidth=2,
        marker="o" if ours else "s",
        markersize=6,
        capsize=3,
        elinewidth=1,
    )
