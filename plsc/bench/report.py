"""Tables and pictures of the benchmarks' results."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from plsc.bench.comparison import ROOFLINE, is_ours, is_sampled
from plsc.bench.serve import BARE, BARE_AT_BATCH, BATCHED, UNBATCHED
from plsc.evaluation.report import COLOURS
from plsc.files import atomic_write
from plsc.progress import counted

Row = Mapping[str, Any]
_GRID, _INK = "#d9d9d9", "#333333"
_BLUE, _ORANGE, _GREEN, _PINK, _SKY, _YELLOW, _GREY = COLOURS
_CONTESTANT_COLOURS = {
    ROOFLINE: "#888888",
    "plsc": _BLUE,
    "plsc-fp32": _SKY,
    **dict.fromkeys(("plsc-no-momentum", "plsc-int8"), _GREEN),
    **dict.fromkeys(("partial-fc", "arcface-torch", "faiss"), _ORANGE),
    **dict.fromkeys(("dense", "plain", "numpy"), _GREY),
    **dict.fromkeys(("linear-cross-entropy", "faiss-tuned"), _PINK),
    "usearch": _YELLOW,
    BATCHED: _BLUE,
    UNBATCHED: _ORANGE,
    BARE: _GREY,
    BARE_AT_BATCH: _GREEN,
}
_SERVED = (BATCHED, UNBATCHED)


# Tables -------------------------------------------------------------------------------------------------------------


def head_table(rows: Sequence[Row], ratios: Sequence[Row]) -> str:
    """Return the rows by size, aligned, and what the baselines took over what our heads took."""
    columns = f"{'CPU s':>9} {'wall ms':>9} {'MiB':>9} {'roofline':>9}"
    lines = []
    for classes, batch in dict.fromkeys((row["classes"], row["batch_per_rank"]) for row in rows):
        at_size = [row for row in rows if (row["classes"], row["batch_per_rank"]) == (classes, batch)]
        size = f"{classes:,} classes x {rows[0]['dim']}, {batch} samples"
        lines += [
            f"{size} on each of {_ranks(rows[0])}; per step and rank:",
            *_lines(at_size, "", columns, _head_figures),
            "",
        ]
    # of ours the first exact head is compared with all baselines, the first sampled one with those that sample
    ours = [row["contestant"] for row in rows if is_ours(row["contestant"])]
    leading = [next((name for name in ours if is_sampled(name) == sampled), "") for sampled in (False, True)]
    shown = [
        ratio for ratio in ratios if ratio["ours"] in leading and is_sampled(ratio["ours"]) <= is_sampled(ratio["peer"])
    ]
    return "\n".join([*lines, *_ratio_lines(shown, rows)]).rstrip()


def unit_table(rows: Sequence[Row], ratios: Sequence[Row]) -> str:
    """Return the heads by size and unit, aligned, in milliseconds of processor time, with their floors."""
    columns = f"{'head ms':>9} {'products':>9} {'share':>6} {'bytes':>8} {'of both':>8}"
    lines = []
    for classes, batch in dict.fromkeys((row["classes"], row["batch_per_rank"]) for row in rows):
        at_size = [
            {**row, "label": f"{row['unit']:<12} {row['label']}"}
            for row in rows
            if (row["classes"], row["batch_per_rank"]) == (classes, batch)
        ]
        size = f"{classes:,} classes x {rows[0]['dim']}, {batch} samples on each of {_ranks(rows[0])}"
        lines += [f"{size}; CPU time per step and rank:", *_lines(at_size, "", columns, _unit_figures), ""]
    return "\n".join(lines).rstrip()


def train_table(rows: Sequence[Row], ratios: Sequence[Row]) -> str:
    """Return the rows, aligned, and what the baselines took over what our loops took."""
    first = rows[0]
    title = (
        f"{first['backbone']} in {first['precision']}, {first['classes']:,} classes x {first['dim']}, "
        f"{counted(first['batch'], 'image')} of {first['image_size']} px on each of {_ranks(first)}; "
        f"medians of {counted(first['rounds'], 'round')}:"
    )
    columns = f"{'images/s':>9} {'wall ms':>9} {'CPU s':>9} {'MiB':>9}"
    ratio_lines = _ratio_lines(ratios, rows)
    return "\n".join([title, *_lines(rows, "", columns, _train_figures), *([""] if ratio_lines else []), *ratio_lines])


def variant_table(rows: Sequence[Row], ratios: Sequence[Row]) -> str:
    """Return the rows, aligned; a figure that this device has not is "-"."""
    first = rows[0]
    title = (
        f"{first['backbone']}, {first['classes']:,} classes x {first['dim']}, {counted(first['batch'], 'image')} of "
        f"{first['image_size']} px; medians of {counted(first['rounds'], 'round')}:"
    )
    columns = (
        f"{'images/s':>9} {'ms':>9} {'x fp32':>7} {'MFU':>6} {'launches':>9} {'kernels':>8} {'idle':>5} {'MiB':>8}"
    )
    return "\n".join([title, *_lines(rows, "", columns, _variant_figures)])


def search_table(rows: Sequence[Row], ratios: Sequence[Row]) -> str:
    """Return the rows by batch, aligned, and how ours compare with the best baseline."""
    first, labels = rows[0], _labels(rows)
    lines = [
        f"{first['rows']:,} rows x {first['dim']}, {counted(first['threads'], 'thread')}, "
        f"the ten best, medians of {counted(first['rounds'], 'round')}:"
    ]
    columns = f"{'queries/s':>10} {'p50 ms':>9} {'p99 ms':>9} {'recall@10':>10} {'MiB':>7}"
    for batch in dict.fromkeys(row["batch"] for row in rows):
        at_batch = [row for row in rows if row["batch"] == batch]
        lines += ["", *_lines(at_batch, f"batches of {batch}", columns, _search_figures)]
        lines += [
            f"  {labels[ratio['ours']]}: {ratio['times']:.2f} times the best of the others "
            f"({labels[ratio['best_other']]})"
            for ratio in ratios
            if ratio["batch"] == batch
        ]
    return "\n".join(lines)


def cluster_table(rows: Sequence[Row], ratios: Sequence[Row]) -> str:
    """Return the rows, aligned, and how ours compare with each baseline."""
    first, labels = rows[0], _labels(rows)
    columns = f"{'CPU s':>9} {'wall s':>9} {'MiB':>7} {'inertia':>12} {'iterations':>10}"
    title = f"{first['rows']:,} x {first['dim']}, k = {first['k']:,}, {counted(first['threads'], 'thread')}"
    lines = _lines(rows, title, columns, _cluster_figures)
    for ratio in ratios:
        lines.append(
            f"  {labels[ratio['other']]} takes {ratio['cpu_times']:.2f} times the CPU time of {labels[ratio['ours']]}, "
            f"whose inertia is {ratio['inertia_ratio']:.5f} of its"
        )
    return "\n".join(lines)


def loading_table(rows: Sequence[Row], ratios: Sequence[Row]) -> str:
    """Return the rows by number of loader processes, aligned, and how ours compare with the best baseline."""
    first, labels = rows[0], _labels(rows)
    lines = [
        f"{counted(first['images'], 'JPEG')} of 112 px, {counted(first['passes'], 'pass', 'passes')} in batches of "
        f"{first['batch']}, decoded by {first['decoder']}; medians of {counted(first['rounds'], 'round')}:"
    ]
    columns = f"{'images/CPU s':>12} {'images/s':>9} {'of decoding':>11}"
    for workers in dict.fromkeys(row["workers"] for row in rows):
        at_once = [row for row in rows if row["workers"] == workers]
        title = counted(workers, "loader process", "loader processes") if workers else "in this process"
        lines += ["", *_lines(at_once, title, columns, _loading_figures)]
        lines += [
            f"  {labels[ratio['ours']]}: {ratio['times']:.2f} times {labels[ratio['best_other']]}"
            for ratio in ratios
            if ratio["workers"] == workers
        ]
    return "\n".join(lines)


def serve_table(rows: Sequence[Row], ratios: Sequence[Row]) -> str:
    """Return the rows by number of callers, aligned, and how batching compares."""
    first = rows[0]
    lines = [
        f"{first['rows']:,} people x {first['dim']}, {first['threads']} threads, callers on the same machine, "
        f"medians of {counted(first['rounds'], 'round')}:"
    ]
    columns = f"{'searches/s':>10} {'p50 ms':>9} {'p99 ms':>9} {'batch':>7}"
    for ratio in ratios:
        clients = int(ratio["clients"])
        at_once = [row for row in rows if row["clients"] == clients]
        lines += [
            "",
            *_lines(at_once, f"{clients} callers", columns, _serve_figures),
            f"  batching: {ratio['times_unbatched']:.2f} times the unbatched rate; "
            f"{ratio['share_of_bare_at_batch']:.0%} of the store alone in the same batches, "
            f"{ratio['share_of_bare']:.0%} with all callers in one",
        ]
    return "\n".join(lines)


def _lines(rows: Sequence[Row], title: str, columns: str, figures: Callable[[Row], str]) -> list[str]:
    """The heads of the columns, and a line per row: its label, and its figures or the reason why it has none."""
    width = max(len(row["label"]) for row in rows)
    texts = (row["note"] if row.get("failed") else figures(row) for row in rows)
    lines = (f"  {row['label']:<{width}}  {text}".rstrip() for row, text in zip(rows, texts, strict=True))
    return [f"  {title:<{width}}  {columns}", *lines]


def _head_figures(row: Row) -> str:
    wall = f"{row['wall_s'] * 1000:>9,.1f}"
    if row["contestant"] == ROOFLINE:
        rates = f"{row['product_gflops']:,.0f} GFLOP/s in {row['note']}, copy {row['copy_gb_s']:,.1f} GB/s a rank"
        cpu = "" if row["cpu_s"] is None else f"{row['cpu_s']:.3f}"
        return f"{cpu:>9} {wall} {'':>9} {'100%':>9}  {rates}"
    share = "" if row["floor_share"] is None else f"{row['floor_share']:.0%}"
    return f"{row['cpu_s']:>9.3f} {wall} {row['memory_mib']:>9,.0f} {share:>9}"


def _unit_figures(row: Row) -> str:
    head, products, moved = (row[key] * 1000 for key in ("cpu_s", "products_s", "bytes_s"))
    shares = f"{row['floor_share']:>6.0%} {moved:>8,.0f} {row['both_share']:>8.0%}"
    rate = f"{row['product_gflops']:,.0f} GFLOP/s in {row['product_dtype']}, copy {row['copy_gb_s']:,.1f} GB/s"
    return f"{head:>9,.0f} {products:>9,.0f} {shares}  {rate}"


def _train_figures(row: Row) -> str:
    rate, wall = f"{row['images_per_second']:>9,.1f}", f"{row['wall_s'] * 1000:>9,.1f}"
    return f"{rate} {wall} {row['cpu_s']:>9.3f} {row['memory_mib']:>9,.0f}"


def _variant_figures(row: Row) -> str:
    def shown(name: str, form: str) -> str:
        return "-" if row[name] is None else format(row[name], form)

    counts = f"{shown('launches', ',.0f'):>9} {shown('kernels', ',.0f'):>8} {shown('idle_share', '.0%'):>5}"
    rate = f"{row['images_per_second']:>9,.1f} {row['wall_s'] * 1000:>9,.1f} {shown('of_base', '.2f'):>7}"
    return f"{rate} {shown('mfu', '.1%'):>6} {counts} {row['memory_mib']:>8,.0f}"


def _search_figures(row: Row) -> str:
    return f"{_rates(row)} {row['recall']:>10.4f} {row['memory_mib']:>7,.0f}  {row['note']}"


def _cluster_figures(row: Row) -> str:
    sizes = f"{row['memory_mib']:>7,.0f} {row['inertia']:>12,.1f} {row['iterations']:>10.0f}"
    return f"{row['cpu_s']:>9,.1f} {row['wall_s']:>9,.1f} {sizes}"


def _loading_figures(row: Row) -> str:
    share = "" if row["decode_share"] is None else f"{row['decode_share']:.0%}"
    return f"{row['images_per_cpu_s']:>12,.0f} {row['images_per_s']:>9,.0f} {share:>11}"


def _serve_figures(row: Row) -> str:
    return f"{_rates(row)} {row['mean_batch']:>7,.1f}"


def _rates(row: Row) -> str:
    return f"{row['qps']:>10,.0f} {row['p50_ms']:>9,.2f} {row['p99_ms']:>9,.2f}"


def _ratio_lines(ratios: Sequence[Row], rows: Sequence[Row]) -> list[str]:
    labels = _labels(rows)
    width = max((len(labels[ratio["peer"]]) for ratio in ratios), default=0)
    lines = []
    for ratio in ratios:
        figures = (("cpu_s", "CPU"), ("wall_s", "wall"), ("memory_mib", "memory"))
        times = ", ".join(f"{text} {ratio[key]:.2f}x" for key, text in figures if ratio[key] is not None)
        pair = f"{labels[ratio['peer']]:<{width}}  over  {labels[ratio['ours']]}"
        lines.append(f"  {ratio['classes']:>11,}  {pair}: {times}")
    return ["baseline / ours, medians of the rounds:", *lines] if lines else []


def _labels(rows: Sequence[Row]) -> dict[str, str]:
    return {row["contestant"]: row["label"] for row in rows}


def _ranks(row: Row) -> str:
    return f"{counted(row['nproc'], 'rank')}, {counted(row['threads'], 'thread')} each"


# Pictures -----------------------------------------------------------------------------------------------------------


def draw_heads(rows: Sequence[Row], path: Path) -> None:
    """Draw time and memory over the number of classes, a pair of panels per batch, all axes logarithmic."""
    batches = sorted({row["batch_per_rank"] for row in rows})
    figure = _figure(11, 1.2 + 4.4 * len(batches))
    panels = figure.subplots(len(batches), 2, squeeze=False)
    first = rows[0]
    # of a CPU processor time is shown, which other programs do not lengthen
    key, of = ("cpu_s", "CPU seconds") if first["kind"] == "cpu" else ("wall_s", "seconds")
    for batch, (time_axes, memory_axes) in zip(batches, panels, strict=True):
        at_batch = [row for row in rows if row["batch_per_rank"] == batch]
        _panel(time_axes, at_batch, "classes", key, f"{of} per step and rank")
        _panel(memory_axes, at_batch, "classes", "memory_mib", "MiB per rank at the peak, above the libraries'")
        _title(time_axes, f"{batch} samples a rank, {counted(first['nproc'], 'rank')}, D = {first['dim']}")
    _save(figure, path, panels[0][0])


def draw_training(rows: Sequence[Row], path: Path) -> None:
    """Draw a bar per loop of images per second, with error bars to the extreme rounds, and of memory."""
    measured = [row for row in rows if not row["failed"]][::-1]
    figure = _figure(9.6, 1.6 + 0.5 * max(len(measured), 1))
    rates, memories = figure.subplots(1, 2, sharey=True)
    labels = [row["label"] for row in measured]
    colours = [_CONTESTANT_COLOURS.get(row["contestant"], _INK) for row in measured]
    errors = _errors(measured, "images_per_second")
    rates.barh(labels, [row["images_per_second"] for row in measured], xerr=errors, color=colours, capsize=3)
    memories.barh(labels, [row["memory_mib"] for row in measured], color=colours)
    first = rows[0]
    _title(rates, f"Images per second: {first['backbone']}, {first['classes']:,} classes, {_ranks(first)}")
    _title(memories, "MiB per rank at the peak, above the libraries'")
    for axes in (rates, memories):
        _frame(axes)
        axes.set_axisbelow(True)
        axes.grid(visible=False, axis="y")
    _save(figure, path)


def draw_searches(rows: Sequence[Row], path: Path) -> None:
    """Draw queries per second over the batch, both axes logarithmic, with error bars to the extreme rounds."""
    figure = _figure(7.6, 5.2)
    axes = figure.subplots()
    _panel(axes, rows, "batch", "qps", "queries per second", "queries in a search")
    first = rows[0]
    _title(axes, f"Exact search for the ten best of {first['rows']:,} x {first['dim']}, {first['threads']} CPU threads")
    _save(figure, path, axes)


def draw_clusterings(rows: Sequence[Row], path: Path) -> None:
    """Draw a bar of CPU seconds for each."""
    measured = [row for row in rows if not row["failed"]]
    figure = _figure(7.6, 1.4 + 0.6 * len(measured))
    axes = figure.subplots()
    colours = [_CONTESTANT_COLOURS.get(row["contestant"], _INK) for row in measured]
    axes.barh([row["label"] for row in measured], [row["cpu_s"] for row in measured], color=colours, height=0.6)
    axes.invert_yaxis()
    axes.set_xlabel("CPU seconds")
    first = rows[0]
    _title(axes, f"k-means of {first['rows']:,} x {first['dim']} points, {first['k']:,} centres")
    _frame(axes)
    _save(figure, path)


def draw_loading(rows: Sequence[Row], path: Path) -> None:
    """Draw a bar per loader and number of loader processes of images per second of processor time."""
    measured = [row for row in rows if not row["failed"]][::-1]
    figure = _figure(8.6, 1.4 + 0.4 * len(measured))
    axes = figure.subplots()
    labels = [f"{row['label']}, {row['workers']} processes" for row in measured]
    colours = [_BLUE if is_ours(row["contestant"]) else _GREY for row in measured]
    errors = _errors(measured, "images_per_cpu_s")
    axes.barh(labels, [row["images_per_cpu_s"] for row in measured], xerr=errors, color=colours, capsize=3)
    _title(axes, "Images per CPU second")
    _frame(axes)
    _save(figure, path)


def draw_serving(rows: Sequence[Row], path: Path) -> None:
    """Draw searches per second and latency over the number of callers, with error bars to the extreme rounds."""
    figure = _figure(9.6, 4.4)
    rates, latencies = figure.subplots(1, 2)
    callers = "callers at once (for the store alone: queries at once)"
    served = [row for row in rows if row["contestant"] in _SERVED]
    _panel(rates, rows, "clients", "qps", "searches per second", callers)
    _panel(latencies, served, "clients", "p99_ms", "milliseconds", callers, linestyle=":")
    _panel(latencies, served, "clients", "p50_ms", "milliseconds", callers)
    first = rows[0]
    _title(rates, f"{first['rows']:,} people x {first['dim']}, {first['threads']} cores")
    _title(latencies, "Milliseconds to the answer: median, and (dotted) 99%")
    _save(figure, path, rates)


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure  # not pyplot: no backend, no global state

    return Figure(figsize=(width, height), dpi=120, layout="constrained")


def _panel(
    axes: Any, rows: Sequence[Row], over: str, key: str, ylabel: str, xlabel: str | None = None, **style: Any
) -> None:
    """Draw a line per contestant of ``key`` over ``over``, with error bars where rows have the extreme rounds."""
    for name, label in _labels(rows).items():
        points = [row for row in rows if row["contestant"] == name and row[key]]
        x, y = ([row[column] for row in points] for column in (over, key))
        axes.errorbar(x, y, yerr=_errors(points, key), label=label, capsize=3, **{**_style(name), **style})
    ticks = sorted({row[over] for row in rows})
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(ticks, [_short(tick) for tick in ticks])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: _short(value))
    axes.set_xlabel(over if xlabel is None else xlabel)
    axes.set_ylabel(ylabel)
    _frame(axes)


def _errors(rows: Sequence[Row], key: str) -> list[list[float]] | None:
    """Distances to the lowest and the highest round; None where rows have none."""
    if not rows or f"{key}_low" not in rows[0]:
        return None
    return [[row[key] - row[f"{key}_low"] for row in rows], [row[f"{key}_high"] - row[key] for row in rows]]


def _style(name: str) -> dict[str, Any]:
    """A colour per kind; ours have discs, others squares; sampled heads are dashed and hollow, the roofline dotted."""
    colour = _CONTESTANT_COLOURS.get(name.removesuffix("-sampled"), _INK)
    return {
        "color": colour,
        "linewidth": 2,
        "linestyle": ":" if name == ROOFLINE else "--" if is_sampled(name) else "-",
        "marker": "" if name == ROOFLINE else "o" if is_ours(name) or name in _SERVED else "s",
        "markersize": 6,
        "markerfacecolor": "white" if is_sampled(name) else colour,
    }


def _short(value: float) -> str:
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def _title(axes: Any, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=10, color=_INK)


def _frame(axes: Any) -> None:
    axes.grid(visible=True, color=_GRID, linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)


def _save(figure: Any, path: Path, labelled: Any = None) -> None:
    """Write the picture, with a legend of the lines of the axes ``labelled``."""
    if labelled is not None:
        lines, texts = labelled.get_legend_handles_labels()
        figure.legend(lines, texts, loc="outside lower left", ncols=3, frameon=False, fontsize=10)
    with atomic_write(path) as tmp_path:
        figure.savefig(tmp_path, format=path.suffix[1:])
