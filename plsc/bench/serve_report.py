"""The service's figures as text and as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from plsc.bench.serve import BARE, BARE_AT_BATCH, BATCHED, LABELS, UNBATCHED
from plsc.evaluation.plots import COLOURS
from plsc.files import atomic_write

_COLOURS = {BATCHED: COLOURS[0], UNBATCHED: COLOURS[1], BARE: COLOURS[-1], BARE_AT_BATCH: COLOURS[2]}
_SERVED = (BATCHED, UNBATCHED)


def serve_table(rows: Sequence[Mapping[str, Any]], ratios: Sequence[Mapping[str, float]]) -> str:
    """The rows by number of callers, aligned, and how batching compares."""
    first = rows[0]
    width = max(len(row["label"]) for row in rows)
    lines = [
        f"{first['rows']:,} persons x {first['dim']}, {first['threads']} threads, callers on the same machine, "
        f"medians of {first['rounds']} round{'s' * (first['rounds'] > 1)}:"
    ]
    for ratio in ratios:
        clients = int(ratio["clients"])
        lines += ["", f"  {f'{clients} callers':<{width}}  {'searches/s':>10} {'p50 ms':>9} {'p99 ms':>9} {'batch':>7}"]
        lines += [
            f"  {row['label']:<{width}}  {row['qps']:>10,.0f} {row['p50_ms']:>9,.2f} {row['p99_ms']:>9,.2f} "
            f"{row['mean_batch']:>7,.1f}"
            for row in rows
            if row["clients"] == clients
        ]
        lines.append(
            f"  batching: {ratio['times_unbatched']:.2f} times the unbatched rate; "
            f"{ratio['share_of_bare_at_batch']:.0%} of the store alone in the same batches, "
            f"{ratio['share_of_bare']:.0%} with all callers in one"
        )
    return "\n".join(lines)


def draw_serving(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Searches per second, and what callers wait, over their number; whiskers to the extreme rounds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 4.4), dpi=120, layout="constrained")
    rates, waits = figure.subplots(1, 2)
    for name in LABELS:
        here = [row for row in rows if row["contestant"] == name]
        _plot(rates, name, here)
        if name in _SERVED:
            clients = [row["clients"] for row in here]
            waits.plot(clients, [row["p50_ms"] for row in here], color=_COLOURS[name], marker="o", linewidth=2)
            waits.plot(clients, [row["p99_ms"] for row in here], color=_COLOURS[name], marker="o", linestyle=":")
    first = rows[0]
    rates.set_title(
        f"Searches per second, {first['rows']:,} persons x {first['dim']}, {first['threads']} cores",
        loc="left",
        fontsize=10,
    )
    waits.set_title("Milliseconds to the answer: median, and (dotted) 99%", loc="left", fontsize=10)
    for axes in (rates, waits):
        _frame(axes, sorted({row["clients"] for row in rows}))
    figure.legend(*rates.get_legend_handles_labels(), loc="outside lower left", ncols=2, frameon=False, fontsize=10)
    with atomic_write(path) as tmp_path:
        figure.savefig(tmp_path, format=path.suffix[1:])


def _plot(axes: Any, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    rates = [row["qps"] for row in rows]
    extremes = [[row["qps"] - row["qps_low"] for row in rows], [row["qps_high"] - row["qps"] for row in rows]]
    axes.errorbar(
        [row["clients"] for row in rows],
        rates,
        yerr=extremes,
        label=LABELS[name],
        color=_COLOURS[name],
        linewidth=2,
        marker="o" if name in _SERVED else "s",
        markersize=6,
        capsize=3,
        elinewidth=1,
        linestyle="-" if name in _SERVED else "--",
    )


def _frame(axes: Any, clients: Sequence[int]) -> None:
    from matplotlib.ticker import LogLocator

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(clients, [str(count) for count in clients])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_xlabel("callers at once (for the store alone: queries at once)")
    axes.grid(visible=True, color="#d9d9d9", linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
