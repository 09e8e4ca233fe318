"""Reports of :func:`plsc.evaluation.evaluate`: a table for the terminal, ROC curves, histograms of scores."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from plsc.errors import UsageError
from plsc.evaluation.roc import FARS
from plsc.evaluation.search import FPIRS, RECALLS
from plsc.files import atomic_write
from plsc.progress import printable

_NONE = "–"
_PROBES = ("mated", "non_mated")


def results_table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Format :func:`plsc.evaluation.evaluate`'s ``results`` as a table: a column per set, a dash for None.

    A row for which no set has a value is left out.
    """
    return aligned(results_rows(results))


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Lines of columns, the first to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for label, *cells in rows:
        aligned = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        lines.append("  ".join([label.ljust(widths[0]), *aligned]).rstrip())
    return "\n".join(lines)


def groups_table(name: str, found: Mapping[str, Any]) -> str:
    """Format what :func:`plsc.evaluation.groups.group_rates` found of the set ``name``."""
    return f"{groups_title(name, found)}\n{aligned(groups_rows(found))}"


def groups_title(name: str, found: Mapping[str, Any]) -> str:
    """Say at which threshold the groups of the set ``name`` are judged."""
    left_out = found["identities_left_out"]
    others = f"; {left_out:,} identities without a group are left out" if left_out else ""
    return (
        f"{printable(name)} by group, at the cosine of {found['threshold']:.4f}, which holds a false-match rate of "
        f"{found['far']:g} over the set{others}"
    )


def groups_rows(found: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the rows of :func:`groups_table`."""
    rows: list[tuple[str, ...]] = [
        ("group", "identities", "images", "FMR, %", "different pairs", "FNMR, %", "same pairs")
    ]
    for group, each in found["groups"].items():
        counts = _count(each["identities"]), _count(each["images"])
        false_matches = percent(each["fmr"]), _count(each["impostor_pairs"])
        rows.append((printable(group), *counts, *false_matches, percent(each["fnmr"]), _count(each["genuine_pairs"])))
    return rows


def results_rows(results: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return the rows of :func:`results_table`: the names of the sets, then a label and a text for each set."""
    columns = [["", *_LABELS], *([printable(name), *_cells(result)] for name, result in results.items())]
    return [row for row in zip(*columns, strict=True) if set(row[1:]) != {_NONE}]


_LABELS = (
    *("images", "identities", "accuracy, %", "threshold, cosine", "area under ROC, %", "equal error rate, %"),
    *(f"TAR at FAR {far}, %" for far in FARS),
    *(f"cosine at FAR {far}" for far in FARS),
    *("from impostor pairs", "rank-1, %", "rank-5, %"),
    *(f"Recall@{k}, %" for k in RECALLS),
    *("mAP@R, %", "R-precision, %"),
)


def _cells(result: Mapping[str, Any]) -> list[str]:
    """Return the values of a set, in the order of the labels. Shares are in percent."""
    accuracy, cosine, found = result["accuracy"], result["threshold_cosine"], result["retrieval"]
    cosines = result.get("cosine@far", {})  # of two models
    return [
        *(_count(result[name]) for name in ("images", "identities")),
        percent(accuracy) if accuracy is None else f"{percent(accuracy)} ± {100 * result['accuracy_std']:.2f}",
        _cosine(cosine),
        *(percent(result[name]) for name in ("auc", "eer")),
        *(percent(result["tar@far"][far]) for far in FARS),
        *(_cosine(cosines.get(far)) for far in FARS),
        _count(result["impostor_pairs"]),
        *(percent(result[name]) for name in ("rank1", "rank5")),
        *(percent(found[f"recall@{k}"]) for k in RECALLS),
        *(percent(found[name]) for name in ("map@r", "r_precision")),
    ]


def probe_line(name: str, found: Mapping[str, Any]) -> str:
    """Format what :func:`plsc.evaluation.probe.probe` found of the set ``name``."""
    method = f"logistic regression, C {found.get('c', 0):g}"
    if found["probe"] == "knn":
        method = f"{found['neighbours']} nearest neighbours, temperature {found['temperature']:g}"
    learned = f"{found['train_images']:,} images of {found['classes']:,} classes"
    return (
        f"{printable(name)}: top-1 {percent(found['top1'])}%, top-5 {percent(found['top5'])}% "
        f"of {found['images']:,} images ({method}, by {learned})"
    )


def searches_table(found: Mapping[str, Any]) -> str:
    """Format what :func:`plsc.evaluation.one_to_many.identification_errors` found."""
    rows: list[tuple[str, ...]] = [("", "%", "95% interval", "threshold, cosine", "false positives")]
    for name, point in found["fnir@fpir"].items():
        value = point or dict.fromkeys(("fnir", "interval", "threshold", "false_positives"))
        figures = percent(value["fnir"]), _range(value["interval"])
        rows.append((f"FNIR at FPIR {name}", *figures, _cosine(value["threshold"]), _count(value["false_positives"])))
    ranks = {name: found[name] for name in found["intervals"]}
    rows += [
        (f"rank-{name[4:]}", percent(share), _range(found["intervals"][name]), _NONE, _NONE)
        for name, share in ranks.items()
    ]
    counts = {name: f"{found[f'{name}_probes']:,} probes of {found[f'{name}_persons']:,}" for name in _PROBES}
    return (
        f"{aligned(rows)}\ngallery: {found['persons']:,} persons, {found['faces']:,} faces; "
        f"mated: {counts['mated']}; non-mated: {counts['non_mated']}; found: among the {found['rank']} best"
    )


def sizes_table(predicted: Mapping[str, Mapping[str, Any]]) -> str:
    """Format what :func:`plsc.evaluation.larger_galleries.predict_thresholds` found: a row per size of the gallery."""
    rows: list[tuple[str, ...]] = [("predicted cosine for persons", *(f"FPIR {name}" for name in FPIRS))]
    for size, points in predicted.items():
        rows.append((f"{int(size):,}", *(_predicted(point) for point in points.values())))
    return aligned(rows)


def _predicted(point: Mapping[str, Any] | None) -> str:
    if point is None:
        return _NONE
    low, high = point["interval"]
    return f"{point['threshold']:.4f} ({low:.4f} to {high:.4f})"


def _range(interval: Sequence[float] | None) -> str:
    return _NONE if interval is None else " to ".join(map(percent, interval))


def percent(value: float | None) -> str:
    """Format ``0.98765`` as ``98.77``, None as a dash. Only 1 becomes ``100.00``, and only 0 ``0.00``."""
    if value is None:
        return _NONE
    text = f"{100 * value:.2f}"
    if text == "100.00" and value < 1:
        return "99.99"
    return "<0.01" if text == "0.00" and value > 0 else text


def _cosine(value: float | None) -> str:
    return _NONE if value is None else f"{value:.4f}"


def _count(value: int | None) -> str:
    return _NONE if value is None else f"{value:,}"


FORMATS = (".png", ".svg", ".pdf")
# Distinguishable with most kinds of colour blindness (after Okabe and Ito).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#444444")
_GRID, _INK = "#d9d9d9", "#333333"


def roc_figure(
    results: Mapping[str, Mapping[str, Any]], target: Path | IO[bytes], *, image_format: str = "svg"
) -> None:
    """Draw a ROC curve per set: TAR over logarithmic FAR. Sets without a curve are left out.

    Args:
        results: of :func:`plsc.evaluation.evaluate` with ``curves=True``.
        target: a .png, .svg or .pdf path, or an open binary file.
        image_format: of an open file.

    Raises:
        UsageError: another suffix, or no set has a curve.
    """
    drawn = {name: result for name, result in results.items() if result.get("roc")}
    if not drawn:
        raise UsageError(
            "no set has same pairs and ten different ones: there is no ROC curve to draw; leave --plot out"
        )
    figure, axes = canvas(1)
    for number, (name, result) in enumerate(drawn.items()):
        curve = result["roc"]
        axes[0].plot(
            curve["far"],
            curve["tar"],
            color=COLOURS[number % len(COLOURS)],
            linewidth=2,
            clip_on=False,
            linestyle=("-", "--", ":")[number // len(COLOURS) % 3],
            label=f"{name}   AUC {result['auc']:.4f}",
        )
    axes[0].set_xscale("log")
    axes[0].set_xlim(min(result["roc"]["far"][0] for result in drawn.values()), 1.0)
    lowest = min(value for result in drawn.values() for value in result["roc"]["tar"])
    axes[0].set_ylim(max(int(lowest * 10) / 10 - 0.1, 0.0), 1.0)
    axes[0].set_xlabel("false accept rate (share of different pairs accepted)")
    axes[0].set_ylabel("true accept rate (share of same pairs)")
    columns = max(min(len(drawn), 75 // (max(map(len, drawn)) + 16)), 1)
    figure.legend(loc="outside upper left", ncols=columns, frameon=False, fontsize=10)
    _save(figure, target, image_format)


def score_figure(results: Mapping[str, Mapping[str, Any]], target: Path | IO[bytes]) -> None:
    """Draw each set's histogram of cosines, same pairs against different ones, on a common axis.

    Each kind is scaled to its own number of pairs.

    Args:
        results: of :func:`plsc.evaluation.evaluate` with ``curves=True``.
        target: a .png, .svg or .pdf path, or an open binary file, which gets SVG.

    Raises:
        UsageError: another suffix, or no set has scores.
    """
    drawn = {name: result for name, result in results.items() if result.get("scores")}
    if not drawn:
        raise UsageError("no set has pairs: there is no histogram of scores to draw; leave --histogram out")
    figure, axes = canvas(len(drawn))
    for axis, (name, result) in zip(axes, drawn.items(), strict=True):
        _draw_scores(axis, result)
        above_legend = 24 if len(name) > 22 else 6  # in points; a short name stands beside the legend
        axis.set_title(name, loc="left", fontsize=11, color=_INK, pad=above_legend)
    ranges = [_visible_range(result["scores"]) for result in drawn.values()]
    axes[-1].set_xlim(min(low for low, _ in ranges), max(high for _, high in ranges))
    axes[-1].set_xlabel("cosine of the two embeddings")
    _save(figure, target)


def check_target(path: Path) -> None:
    """Raise :class:`UsageError` if no figure can be written to ``path``: by its suffix, or without its folder."""
    if path.suffix.lower() not in FORMATS:
        raise UsageError(f"cannot draw into {path}: its name must end in {', '.join(FORMATS)}")
    if not path.parent.is_dir():
        raise UsageError(f"cannot draw into {path}: there is no folder {path.parent}; make it first")


def _draw_scores(axis: Any, result: Mapping[str, Any]) -> None:
    scores = _merge_bins(result["scores"])
    for kind, colour in (("different", COLOURS[1]), ("same", COLOURS[0])):
        total = sum(scores[kind])
        if not total:
            continue
        shares = [100 * count / total for count in scores[kind]]
        axis.stairs(shares, scores["edges"], fill=True, color=colour, alpha=0.35, linewidth=0)
        axis.stairs(shares, scores["edges"], color=colour, linewidth=1.6, label=f"{kind} ({total:,})")
    cosine = result.get("threshold_cosine")
    if cosine is not None:
        axis.axvline(cosine, color=_INK, linewidth=1, linestyle=(0, (4, 3)), label=f"threshold {cosine:.2f}")
    axis.set_ylim(bottom=0)
    axis.set_ylabel("% of pairs")
    axis.legend(loc="lower right", bbox_to_anchor=(1.0, 0.98), ncols=3, frameon=False, fontsize=9)


def _merge_bins(scores: Mapping[str, Any]) -> Mapping[str, Any]:
    """Merge neighbouring bins until each kind has some 30 pairs in a bin: fewer are only noise."""
    filled = [[count for count in scores[kind] if count] for kind in ("same", "different")]
    rough = any(counts and sum(counts) < 30 * len(counts) for counts in filled)
    if not rough or len(scores["same"]) % 2 or len(scores["same"]) <= 25:
        return scores
    same, different = (np.reshape(scores[kind], (-1, 2)).sum(axis=1).tolist() for kind in ("same", "different"))
    return _merge_bins({"edges": scores["edges"][::2], "same": same, "different": different})


def _visible_range(scores: Mapping[str, Any]) -> tuple[float, float]:
    """Return the range of cosines that holds all but stray pairs, with a margin."""
    limits = {kind: 0.0002 * sum(scores[kind]) for kind in ("same", "different")}
    counts = zip(scores["edges"], scores["same"], scores["different"], strict=False)
    shown = [edge for edge, same, other in counts if same > limits["same"] or other > limits["different"]]
    return max(min(shown, default=-1.0) - 0.04, -1.0), min(max(shown, default=1.0) + 0.05, 1.0)


def canvas(rows: int) -> tuple[Any, list[Any]]:
    """Create a figure without a window; return it and its axes from top to bottom."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.4 if rows == 1 else 2.7 * rows), layout="constrained")
    axes = list(figure.subplots(rows, 1, squeeze=False, sharex=True)[:, 0])
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.spines[["left", "bottom"]].set_color("#999999")
        axis.tick_params(colors=_INK, labelsize=9)
        axis.xaxis.label.set_color(_INK)
        axis.yaxis.label.set_color(_INK)
        axis.grid(True, which="major", color=_GRID, linewidth=0.7)
        axis.set_axisbelow(True)
    return figure, axes


def _save(figure: Any, target: Path | IO[bytes], image_format: str = "svg") -> None:
    if not isinstance(target, Path):
        figure.savefig(target, format=image_format, dpi=160)
        return
    check_target(target)
    with atomic_write(target) as tmp_path:
        figure.savefig(tmp_path, format=target.suffix[1:].lower(), dpi=160)
