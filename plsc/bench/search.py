"""The comparison of exact searches: fresh processes that take turns, medians over the rounds, ratios."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plsc.bench.circumstances import circumstances, processor
from plsc.bench.search_contestants import CONTESTANTS, missing
from plsc.bench.search_data import QUERIES, SearchData, make_search_data
from plsc.errors import UsageError
from plsc.files import write_json
from plsc.progress import Progress

_FIGURES = ("qps", "p50_ms", "p99_ms")


@dataclass(frozen=True)
class SearchComparison:
    """What to compare; ``seconds`` are those of a batch size in a turn, ``limit`` those that a turn may take in all.

    Raises :class:`UsageError` for an unknown contestant or a number out of range.
    """

    contestants: Sequence[str] = tuple(CONTESTANTS)
    rows: int = 200_000
    dim: int = 512
    batches: Sequence[int] = (1, 32, 256)
    threads: int = 2
    rounds: int = 3
    seconds: float = 1.0
    limit: float = 300.0

    def __post_init__(self) -> None:
        if unknown := [name for name in self.contestants if name not in CONTESTANTS]:
            raise UsageError(f"no contestant {unknown[0]!r}; it is one of {', '.join(CONTESTANTS)}")
        for name in ("rows", "dim", "threads", "rounds"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name} {getattr(self, name)}: it must be at least 1")
        for batch in self.batches:
            if not 1 <= batch <= QUERIES:
                raise UsageError(f"--batch {batch}: it lies between 1 and {QUERIES}")
        for name in ("seconds", "limit"):
            if not getattr(self, name) > 0:
                raise UsageError(f"--{name} {getattr(self, name)}: it must be more than 0")


def compare_searches(comparison: SearchComparison, *, quiet: bool = False) -> dict[str, Any]:
    """Let every contestant take its turn, ``comparison.rounds`` times over.

    Returns ``rows``, one per contestant and batch (see :func:`row_of`), and ``ratios``: for every batch how many times
    the queries per second of the best other contestant ours answers, the median over the rounds.
    """
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in comparison.contestants}
    total = comparison.rounds * len(turns)
    progress = Progress("measuring", total, "turns", interval=2.0, quiet=quiet)
    with tempfile.TemporaryDirectory(prefix="plsc-search-") as folder:
        data = make_search_data(Path(folder), comparison.rows, comparison.dim)
        for _ in range(comparison.rounds):
            for name, taken in turns.items():
                taken.append(taken[-1] if taken and "reason" in taken[-1] else _turn(comparison, name, data))
                progress.advance(note=name)
    progress.finish()
    rows = [row_of(comparison, name, batch, taken) for batch in comparison.batches for name, taken in turns.items()]
    return {"rows": rows, "ratios": ratios_of(comparison, turns)}


def _turn(comparison: SearchComparison, name: str, data: SearchData) -> dict[str, Any]:
    """A turn's figures, or {"reason"}."""
    if (reason := missing(name)) is not None:
        return {"reason": reason}
    task, result = data.folder / "task.json", data.folder / "result.json"
    result.unlink(missing_ok=True)
    write_json(
        task,
        {
            "contestant": name,
            "data": str(data.folder),
            "batches": list(comparison.batches),
            "threads": comparison.threads,
            "seconds": comparison.seconds,
        },
    )
    environment = {
        **os.environ,
        **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(comparison.threads)),
    }
    try:
        done = subprocess.run(
            [sys.executable, "-m", "plsc.bench.search_worker", str(task), str(result)],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=comparison.limit,
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        return {"reason": f"took longer than {comparison.limit:g} s"}
    if done.returncode or not result.exists():
        lines = done.stderr.strip().splitlines()
        return {"reason": lines[-1][:200] if lines else f"ended with {done.returncode}"}
    figures: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return figures


def row_of(comparison: SearchComparison, name: str, batch: int, turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A contestant's row at a batch: circumstances, sizes, medians over the rounds; None where it failed.

    ``qps`` are queries per second, ``qps_low`` and ``qps_high`` the extreme rounds, ``p50_ms`` and ``p99_ms`` of a
    search of the batch, ``recall`` the share of the ten true rows found, ``memory_mib`` the peak above the libraries.
    """
    row: dict[str, Any] = circumstances(processor()) | {
        "contestant": name,
        "label": CONTESTANTS[name].label,
        "rows": comparison.rows,
        "dim": comparison.dim,
        "batch": batch,
        "threads": comparison.threads,
        "rounds": comparison.rounds,
    }
    failed = next((turn["reason"] for turn in turns if "reason" in turn), None)
    good = [] if failed is not None else list(turns)
    here = [turn["batches"][str(batch)] for turn in good]
    for key in _FIGURES:
        row[key] = _median([figures[key] for figures in here])
    rates = [figures["qps"] for figures in here]
    row |= {"qps_low": min(rates, default=None), "qps_high": max(rates, default=None)}
    for key in ("recall", "memory_mib", "build_s"):
        row[key] = _median([turn[key] for turn in good])
    return row | {"failed": failed is not None, "note": failed or (here[-1]["note"] if here else "")}


def ratios_of(comparison: SearchComparison, turns: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """For every head of ours and batch: how many times the best other contestant's rate, round by round."""
    good = {name: taken for name, taken in turns.items() if not any("reason" in turn for turn in taken)}
    others = [name for name in good if not CONTESTANTS[name].ours]
    ratios = []
    for batch in comparison.batches if others else ():
        rates = {name: [turn["batches"][str(batch)]["qps"] for turn in taken] for name, taken in good.items()}
        best = max(others, key=lambda name: statistics.median(rates[name]))
        for own in (name for name in good if CONTESTANTS[name].ours):
            quotients = [mine / max(rates[name][n] for name in others) for n, mine in enumerate(rates[own])]
            ratios.append({"batch": batch, "ours": own, "best_other": best, "times": statistics.median(quotients)})
    return ratios


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None
