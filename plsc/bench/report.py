"""Tables and pictures of the benchmarks' results."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from plsc.bench import head_baselines as heads
from plsc.bench import search as searches
from plsc.bench.head_baselines import ROOFLINE
from plsc.bench.serve import BARE, BARE_AT_BATCH, BATCHED, LABELS, UNBATCHED
from plsc.evaluation.report import COLOURS
from plsc.files import atomic_write
from plsc.progress import counted

Row = Mapping[str, Any]
_GRID, _INK = "#d9d9d9", "#333333"
_BLUE, _ORANGE, _GREEN, _PINK, _SKY, _, _GREY = COLOURS
_HEAD_COLOURS = {
    ROOFLINE: "#888888",
    "plsc": _BLUE,
    "plsc-no-momentum": _SKY,
    "plsc-fp32": _GREEN,
    "partial-fc": _ORANGE,
    "dense": _GREY,
    "linear-cross-entropy": _PINK,
}
_SEARCH_COLOURS = {
    "plsc": _BLUE,
    "plsc-fp32": _SKY,
    "numpy": _GREY,
    "faiss": _ORANGE,
    "faiss-tuned": _PINK,
    "usearch": _GREEN,
}
_TRAIN_COLOURS = {"plsc": _BLUE, "plsc-fp32": _SKY, "arcface-torch": _ORANGE, "plain": _GREY}
_SERVE_COLOURS = {BATCHED: _BLUE, UNBATCHED: _ORANGE, BARE: _GREY, BARE_AT_BATCH: _GREEN}
_SERVED = (BATCHED, UNBATCHED)


# Class heads --------------------------------------------------------------------------------------------------------


def head_table(rows: Sequence[Row], ratios: Sequence[Row]) -> str:
    """Return the rows by size, aligned, and what the baselines took over what our heads took."""
    width = max(len(row["label"]) for row in rows)
    lines = []
    for size in dict.fromkeys(map(_head_size, rows)):
        at_size = [row for row in rows if _head_size(row) == size]
        first = at_size[0]
        lines += [
            f"{first['classes']:,} classes x {first['dim']}, {first['batch_per_rank']} samples on each of "
            f"{counted(first['nproc'], 'rank')}, {counted(first['threads'], 'thread')} each; per step and rank:",
            f"  {'':<{width}}  {'CPU s':>9} {'wall ms':>9} {'MiB':>9} {'roofline':>9}",
            *(_head_line(row, width) for row in at_size),
            "",
        ]
    return "\n".join([*lines, *_head_ratio_lines(ratios, rows)]).rstrip()


def _head_size(row: Row) -> tuple[int, int]:
    return row["classes"], row["batch_per_rank"]


def _head_line(row: Row, width: int) -> str:
    start = f"  {row['label']:<{width}}"
    if row["failed"]:
        return f"{start}  {row['note']}"
    wall = f"{row['wall_s'] * 1000:>9,.1f}"
    if row["contestant"] == ROOFLINE:
        rates = f"{row['product_gflops']:,.0f} GFLOP/s in {row['note']}, copy {row['copy_gb_s']:,.1f} GB/s a rank"
        cpu = "" if row["cpu_s"] is None else f"{row['cpu_s']:.3f}"
        return f"{start}  {cpu:>9} {wall} {'':>9} {'100%':>9}  {rates}"
    share = "" if row["floor_share"] is None else f"{row['floor_share']:.0%}"
    return f"{start}  {row['cpu_s']:>9.3f} {wall} {row['memory_mib']:>9,.0f} {share:>9}"


def _head_ratio_lines(ratios: Sequence[Row], rows: Sequence[Row]) -> list[str]:
    """Our first exact head beside all baselines, our first sampled one beside the sampled ones."""
    labels = {row["contestant"]: row["label"] for row in rows}
    leading = _leading_heads(list(labels))
    width = max((len(labels[ratio["peer"]]) for ratio in ratios), default=0)
    lines = []
    for ratio in ratios:
        own, baseline = (heads.IMPLEMENTATIONS[ratio[key]] for key in ("ours", "peer"))
        if ratio["ours"] in leading and own.sampled <= baseline.sampled:
            times = ", ".join(
                f"{text} {ratio[key]:.2f}x"
                for key, text in (("cpu_s", "CPU"), ("wall_s", "wall"), ("memory_mib", "memory"))
                if ratio[key] is not None
            )
            pair = f"{labels[ratio['peer']]:<{width}}  over  {labels[ratio['ours']]}"
            lines.append(f"  {ratio['classes']:>11,}  {pair}: {times}")
    return ["baseline / ours, medians of the rounds:", *lines] if lines else []


def _leading_heads(names: Sequence[str]) -> set[str]:
    ours = [name for name in names if name != ROOFLINE and heads.IMPLEMENTATIONS[name].ours]
    kinds = ([name for name in ours if heads.IMPLEMENTATIONS[name].sampled == flag] for flag in (False, True))
    return {kind[0] for kind in kinds if kind}


def draw_heads(rows: Sequence[Row], path: Path) -> None:
    """Draw time and memory over the number of classes, a pair of panels per batch, all axes logarithmic."""
    batches = sorted({row["batch_per_rank"] for row in rows})
    figure = _figure(11, 1.2 + 4.4 * len(batches))
    panels = figure.subplots(len(batches), 2, squeeze=False)
    for batch, (time_axes, memory_axes) in zip(batches, panels, strict=True):
        at_batch = [row for row in rows if row["batch_per_rank"] == batch]
        first = at_batch[0]
        if first["kind"] == "cpu":  # of a CPU processor time is shown, which other programs do not lengthen
            _head_panel(time_axes, at_batch, "cpu_s", 1000, "CPU milliseconds per step and rank")
        else:
            _head_panel(time_axes, at_batch, "wall_s", 1000, "milliseconds per step")
        _head_panel(memory_axes, at_batch, "memory_mib", 1, "MiB per rank at the peak, above the libraries'")
        _title(time_axes, f"{batch} samples a rank, {counted(first['nproc'], 'rank')}, D = {first['dim']}")
    lines, texts = panels[0][0].get_legend_handles_labels()
    figure.legend(lines, texts, loc="outside upper left", ncols=3, frameon=False, fontsize=10)
    _save(figure, path)


def _head_panel(axes: Any, rows: Sequence[Row], key: str, factor: float, ylabel: str) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    for name in dict.fromkeys(row["contestant"] for row in rows):
        own_rows = [row for row in rows if row["contestant"] == name]
        points = [(row["classes"], row[key] * factor) for row in own_rows if row[key]]
        axes.plot(*zip(*points, strict=True) if points else ([], []), label=own_rows[0]["label"], **_head_style(name))
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(_short))
    axes.yaxis.set_major_formatter(FuncFormatter(_short))
    axes.set_xticks(sorted({row["classes"] for row in rows}))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("classes")
    axes.set_ylabel(ylabel)
    _frame(axes)


def _head_style(name: str) -> dict[str, Any]:
    """A colour per kind of head; ours have discs, baselines squares; sampled ones are dashed and hollow."""
    if name == ROOFLINE:
        return {"color": _HEAD_COLOURS[name], "linestyle": ":", "linewidth": 2}
    head = heads.IMPLEMENTATIONS[name]
    colour = _HEAD_COLOURS[name.removesuffix("-sampled")]
    return {
        "color": colour,
        "linewidth": 2,
        "linestyle": "--" if head.sampled else "-",
        "markersize": 6,
        "marker": "o" if head.ours else "s",
        "markerfacecolor": "white" if head.sampled else colour,
    }


def _short(value: float, _: int) -> str:
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


# Training loops -----------------------------------------------------------------------------------------------------


def train_table(rows: Sequence[Row], ratios: Sequence[Row]) -> str:
    """Return the rows, aligned, and what the baselines took over what our first loop took."""
    first = rows[0]
    width = max(len(row["label"]) for row in rows)
    lines = [
        f"{first['backbone']} in {first['precision']}, {first['classes']:,} classes x {first['dim']}, "
        f"{counted(first['batch'], 'image')} of {first['image_size']} px on each of {counted(first['nproc'], 'rank')}, "
        f"{counted(first['threads'], 'thread')} each; medians of {counted(first['rounds'], 'round')}:",
        f"  {'':<{width}}  {'images/s':>9} {'wall ms':>9} {'CPU s':>9} {'MiB':>9}",
        *(_train_line(row, width) for row in rows),
    ]
    labels = {row["contestant"]: row["label"] for row in rows}
    if ratios:
        lines += ["", "baseline / ours, medians of the rounds:"]
    for ratio in ratios:
        times = [("wall_s", "wall"), ("cpu_s", "CPU"), ("memory_mib", "memory")]
        text = ", ".join(f"{name} {ratio[key]:.2f}x" for key, name in times if ratio[key] is not None)
        lines.append(f"  {labels[ratio['peer']]}  over  {labels[ratio['ours']]}: {text}")
    return "\n".join(lines)


def _train_line(row: Row, width: int) -> str:
    start = f"  {row['label']:<{width}}"
    if row["failed"]:
        return f"{start}  {row['note']}"
    rate, wall = f"{row['images_per_second']:>9,.1f}", f"{row['wall_s'] * 1000:>9,.1f}"
    return f"{start}  {rate} {wall} {row['cpu_s']:>9.3f} {row['memory_mib']:>9,.0f}"


def draw_training(rows: Sequence[Row], path: Path) -> None:
    """Draw a bar per loop of images per second, with error bars to the extreme rounds, and of memory."""
    measured = [row for row in rows if not row["failed"]][::-1]
    figure = _figure(9.6, 1.6 + 0.5 * max(len(measured), 1))
    rates, memories = figure.subplots(1, 2, sharey=True)
    labels = [row["label"] for row in measured]
    colours = [_TRAIN_COLOURS[row["contestant"]] for row in measured]
    values = [row["images_per_second"] for row in measured]
    errors = [
        [row["images_per_second"] - row["images_per_second_low"] for row in measured],
        [row["images_per_second_high"] - row["images_per_second"] for row in measured],
    ]
    rates.barh(labels, values, xerr=errors, color=colours, capsize=3)
    memories.barh(labels, [row["memory_mib"] for row in measured], color=colours)
    _title(rates, "Images per second, all ranks")
    _title(memories, "MiB per rank at the peak, above the libraries'")
    for axes in (rates, memories):
        _frame(axes)
        axes.set_axisbelow(True)
        axes.grid(visible=False, axis="y")
    first = rows[0]
    ranks = counted(first["nproc"], "rank")
    figure.suptitle(
        f"{first['backbone']}, {first['classes']:,} classes, {first['batch']} images on each of {ranks}, "
        f"{first['precision']}",
        x=0.01,
        ha="left",
        fontsize=11,
        color=_INK,
    )
    _save(figure, path)


# Searches -----------------------------------------------------------------------------------------------------------


def search_table(rows: Sequence[Row], ratios: Sequence[Row]) -> str:
    """Return the rows by batch, aligned, and how ours compare with the best baseline."""
    width = max(len(row["label"]) for row in rows)
    first = rows[0]
    lines = [
        f"{first['rows']:,} rows x {first['dim']}, {counted(first['threads'], 'thread')}, "
        f"the ten best, medians of {counted(first['rounds'], 'round')}:"
    ]
    for batch in dict.fromkeys(row["batch"] for row in rows):
        columns = f"{'queries/s':>10} {'p50 ms':>9} {'p99 ms':>9} {'recall@10':>10} {'MiB':>7}"
        lines += ["", f"  {f'batches of {batch}':<{width}}  {columns}"]
        lines += [_search_line(row, width) for row in rows if row["batch"] == batch]
        lines += [
            f"  {searches.IMPLEMENTATIONS[ratio['ours']].label}: {ratio['times']:.2f} times the best of the others "
            f"({searches.IMPLEMENTATIONS[ratio['best_other']].label})"
            for ratio in ratios
            if ratio["batch"] == batch
        ]
    return "\n".join(lines)


def _search_line(row: Row, width: int) -> str:
    start = f"  {row['label']:<{width}}"
    if row["failed"]:
        return f"{start}  {row['note']}"
    return (
        f"{start}  {row['qps']:>10,.0f} {row['p50_ms']:>9,.2f} {row['p99_ms']:>9,.2f} {row['recall']:>10.4f} "
        f"{row['memory_mib']:>7,.0f}  {row['note']}".rstrip()
    )


def draw_searches(rows: Sequence[Row], path: Path) -> None:
    """Draw queries per second over the batch, both axes logarithmic, with error bars to the extreme rounds."""
    figure = _figure(7.6, 5.2)
    axes = figure.subplots()
    for name in dict.fromkeys(row["contestant"] for row in rows):
        if measured := [row for row in rows if row["contestant"] == name and not row["failed"]]:
            marker = "o" if searches.IMPLEMENTATIONS[name].ours else "s"
            label = measured[0]["label"]
            _draw_rates(axes, measured, "batch", label=label, color=_SEARCH_COLOURS[name], marker=marker)
    _rate_axes(axes, sorted({row["batch"] for row in rows}), "queries in a search")
    axes.set_ylabel("queries per second")
    first = rows[0]
    _title(axes, f"Exact search for the ten best of {first['rows']:,} x {first['dim']}, {first['threads']} CPU threads")
    figure.legend(loc="outside lower left", ncols=2, frameon=False, fontsize=10)
    _save(figure, path)


# Service ------------------------------------------------------------------------------------------------------------


def serve_table(rows: Sequence[Row], ratios: Sequence[Row]) -> str:
    """Return the rows by number of callers, aligned, and how batching compares."""
    first = rows[0]
    width = max(len(row["label"]) for row in rows)
    lines = [
        f"{first['rows']:,} people x {first['dim']}, {first['threads']} threads, callers on the same machine, "
        f"medians of {counted(first['rounds'], 'round')}:"
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


def draw_serving(rows: Sequence[Row], path: Path) -> None:
    """Draw searches per second and latency over the number of callers, with error bars to the extreme rounds."""
    figure = _figure(9.6, 4.4)
    rates, latencies = figure.subplots(1, 2)
    for name, label in LABELS.items():
        own_rows = [row for row in rows if row["contestant"] == name]
        served = name in _SERVED
        style = {"marker": "o", "linestyle": "-"} if served else {"marker": "s", "linestyle": "--"}
        _draw_rates(rates, own_rows, "clients", label=label, color=_SERVE_COLOURS[name], **style)
        for key, linestyle in (("p50_ms", "-"), ("p99_ms", ":")) if served else ():
            clients, values = [row["clients"] for row in own_rows], [row[key] for row in own_rows]
            latencies.plot(clients, values, color=_SERVE_COLOURS[name], marker="o", linewidth=2, linestyle=linestyle)
    first = rows[0]
    sizes = f"{first['rows']:,} people x {first['dim']}, {first['threads']} cores"
    _title(rates, f"Searches per second, {sizes}")
    _title(latencies, "Milliseconds to the answer: median, and (dotted) 99%")
    for axes in (rates, latencies):
        clients = sorted({row["clients"] for row in rows})
        _rate_axes(axes, clients, "callers at once (for the store alone: queries at once)")
    figure.legend(*rates.get_legend_handles_labels(), loc="outside lower left", ncols=2, frameon=False, fontsize=10)
    _save(figure, path)


# What they share ----------------------------------------------------------------------------------------------------


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure  # not pyplot: no backend, no global state

    return Figure(figsize=(width, height), dpi=120, layout="constrained")


def _title(axes: Any, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=10, color=_INK)


def _frame(axes: Any) -> None:
    axes.grid(visible=True, color=_GRID, linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_rates(axes: Any, rows: Sequence[Row], over: str, **style: Any) -> None:
    """Draw a line of ``qps`` with error bars from ``qps_low`` to ``qps_high``."""
    rates = [row["qps"] for row in rows]
    errors = [[row["qps"] - row["qps_low"] for row in rows], [row["qps_high"] - row["qps"] for row in rows]]
    axes.errorbar(
        [row[over] for row in rows], rates, yerr=errors, linewidth=2, markersize=6, capsize=3, elinewidth=1, **style
    )


def _rate_axes(axes: Any, ticks: Sequence[int], xlabel: str) -> None:
    from matplotlib.ticker import LogLocator

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_xlabel(xlabel)
    _frame(axes)


def _save(figure: Any, path: Path) -> None:
    with atomic_write(path) as tmp_path:
        figure.savefig(tmp_path, format=path.suffix[1:])
