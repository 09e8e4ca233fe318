"""Results as a plain-text table for the terminal."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from plsc.evaluation.roc import FARS


def results_table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """A column per set of :func:`plsc.evaluation.evaluate`'s ``results``, a dash for what it cannot give."""
    rows = [["", *results]]
    rows += [[words, *(cell(result) for result in results.values())] for words, cell in _measures().items()]
    return "\n".join(_aligned(rows))


def _measures() -> dict[str, Callable[[Mapping[str, Any]], str]]:
    """What each row says, and how it is read from a set's result. Shares are in percent."""
    rates = {f"TAR at FAR {far}, %": lambda result, far=far: percent(result["tar@far"][far]) for far in FARS}
    return {
        "images": lambda result: _count(result["images"]),
        "identities": lambda result: _count(result["identities"]),
        "accuracy, %": _accuracy,
        "area under ROC, %": lambda result: percent(result["auc"]),
        "equal error rate, %": lambda result: percent(result["eer"]),
        **rates,
        "from impostor pairs": lambda result: _count(result["impostor_pairs"]),
        "rank-1, %": lambda result: percent(result["rank1"]),
        "rank-5, %": lambda result: percent(result["rank5"]),
    }


def _accuracy(result: Mapping[str, Any]) -> str:
    if result["accuracy"] is None:
        return percent(None)
    return f"{percent(result['accuracy'])} ± {100 * result['accuracy_std']:.2f}"


def percent(value: float | None) -> str:
    """``0.98765`` as ``98.77``; a dash for None. Only 1 reads ``100.00``, and only 0 ``0.00``."""
    if value is None:
        return "–"
    text = f"{100 * value:.2f}"
    if text == "100.00" and value < 1:
        return "99.99"
    return "<0.01" if text == "0.00" and value > 0 else text


def _count(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    aligned = [
        [cell.ljust(width) if place == 0 else cell.rjust(width) for place, (cell, width) in enumerate(pairs)]
        for pairs in (list(zip(row, widths, strict=True)) for row in rows)
    ]
    return ["  ".join(cells).rstrip() for cells in aligned]
