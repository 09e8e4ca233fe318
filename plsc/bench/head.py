"""Comparison of class heads: every head in fresh ranks of its own, in turn, at every size; medians and ratios."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plsc.bench.harness import environment, median, processor_name
from plsc.bench.head_baselines import (
    IMPLEMENTATIONS,
    NEED_PARTIAL_FC,
    ROOFLINE,
    BenchConfig,
    check_partial_fc,
    label,
    partial_fc_version,
    unavailable,
)
from plsc.bench.ranks import Result, measure_on_ranks
from plsc.errors import UsageError
from plsc.progress import Progress
from plsc.sizes import available_bytes

RATIO_FIGURES = ("cpu_s", "wall_s", "memory_mib")
_FIGURES = (*RATIO_FIGURES, "peak_mib", "loss", "product_gflops", "copy_gb_s")
_WORKER = "plsc.bench.head_worker"
_MEMORY_SHARE = 0.85  # of what is available now, for all ranks together


@dataclass(frozen=True)
class HeadComparison:
    """Request of a comparison; ``batches`` are per rank, ``limit`` is the seconds that one turn may take.

    Raises:
        UsageError: an unknown implementation, a wrong ``partial_fc`` folder, or a number out of range.
    """

    implementations: Sequence[str]
    classes: Sequence[int]
    batches: Sequence[int]
    dim: int = 512
    nproc: int = 2
    threads: int = 1
    rounds: int = 3
    steps: int = 3
    device: str = "cpu"
    sample_rate: float = 0.1
    partial_fc: Path | None = None
    limit: float = 300.0

    def __post_init__(self) -> None:
        known = [*IMPLEMENTATIONS, ROOFLINE]
        if unknown := [name for name in self.implementations if name not in known]:
            raise UsageError(f"--contestants {unknown[0]}: there is no such head; choose from {', '.join(known)}")
        if self.partial_fc is not None or any(name in NEED_PARTIAL_FC for name in self.implementations):
            check_partial_fc(self.partial_fc)
        counts = {"classes": min(self.classes), "batch": min(self.batches)}
        counts |= {name: getattr(self, name) for name in ("dim", "nproc", "threads", "rounds", "steps")}
        for name, value in counts.items():
            if value < 1:
                raise UsageError(f"--{name} {value}: it must be at least 1")
        if not 0 < self.sample_rate < 1:
            raise UsageError(f"--sample-rate {self.sample_rate}: it must lie between 0 and 1")
        if not self.limit > 0:
            raise UsageError(f"--limit {self.limit}: it must be more than 0 seconds")

    def config(self, name: str, classes: int, batch: int) -> BenchConfig:
        """Return one measurement of it."""
        memory = available_bytes() if self.device == "cpu" else None
        return BenchConfig(
            name,
            classes,
            batch,
            self.dim,
            self.nproc,
            self.threads,
            self.steps,
            self.device,
            self.sample_rate,
            None if self.partial_fc is None else str(self.partial_fc.absolute()),
            None if memory is None else int(memory * _MEMORY_SHARE / self.nproc),
        )


def compare_heads(comparison: HeadComparison, *, quiet: bool = False) -> dict[str, Any]:
    """Measure every head at every size, all in turn, ``comparison.rounds`` times over.

    Turns alternate so that a change of the machine's load meets all heads alike.

    Returns:
        ``rows``, one per head and size (see :func:`result_row`), and ``ratios`` (see :func:`head_ratios`).
    """
    ascending, batches = sorted(set(comparison.classes)), sorted(set(comparison.batches))
    sizes = [(classes, batch) for batch in batches for classes in ascending]
    total = len(sizes) * comparison.rounds * len(comparison.implementations)
    progress = Progress("measuring", total, "starts", interval=2.0, quiet=quiet)
    rows, ratios = [], []
    too_large: set[tuple[str, int]] = set()  # (head, batch) that failed with fewer classes already
    for classes, batch in sizes:
        rounds: dict[str, list[Result]] = {name: [] for name in comparison.implementations}
        for _ in range(comparison.rounds):
            for name, results in rounds.items():
                results.append(_turn(comparison, name, classes, batch, results, too_large))
                progress.advance(note=f"{name} at {classes:,}")
        too_large |= {(name, batch) for name, results in rounds.items() if "reason" in results[-1]}
        rows += [result_row(comparison, name, classes, batch, results) for name, results in rounds.items()]
        ratios += head_ratios(comparison, classes, batch, rounds)
    progress.finish()
    return {"rows": _with_roofline_share(rows), "ratios": ratios}


def _turn(
    comparison: HeadComparison,
    name: str,
    classes: int,
    batch: int,
    earlier: Sequence[Result],
    too_large: set[tuple[str, int]],
) -> Result:
    """Measure once, unless an earlier round or a smaller size failed already."""
    if earlier and "reason" in earlier[-1]:
        return earlier[-1]
    if (reason := unavailable(name)) is not None:
        return {"reason": reason}
    if (name, batch) in too_large:
        return {"reason": "failed with fewer classes already"}
    config = comparison.config(name, classes, batch)
    return measure_on_ranks(_WORKER, config.as_dict(), config.nproc, config.threads, comparison.limit)


# Rows and ratios ----------------------------------------------------------------------------------------------------


def result_row(
    comparison: HeadComparison, name: str, classes: int, batch: int, results: Sequence[Result]
) -> dict[str, Any]:
    """Return a head's row: environment, sizes, and medians over the rounds; None where a figure is missing.

    ``kind`` is "cpu" or "cuda"; ``cpu_s`` and ``wall_s`` are seconds per step and rank, ``cpu_s_low`` and
    ``cpu_s_high`` the extreme rounds; ``memory_mib`` the peak per rank above the libraries, ``peak_mib`` the peak with
    them; ``floor_share`` the roofline's time over this one's; ``note`` is a remark, or the reason of a failure.
    """
    row: dict[str, Any] = environment(processor_name() if comparison.device == "cpu" else None) | {
        "kind": comparison.device,
        "contestant": name,
        "label": label(name, comparison.sample_rate),
        "classes": classes,
        "batch_per_rank": batch,
    }
    row |= {key: getattr(comparison, key) for key in ("nproc", "threads", "dim", "rounds", "steps")}
    failed = next((result["reason"] for result in results if "reason" in result), None)
    good = [] if failed is not None else results
    values = {key: [result[key] for result in good if result.get(key) is not None] for key in _FIGURES}
    row |= {key: median(values[key]) for key in _FIGURES}
    cpu = values["cpu_s"]
    row |= {"cpu_s_low": min(cpu, default=None), "cpu_s_high": max(cpu, default=None), "floor_share": None}
    note = good[0].get("note", "") if good else ""
    if good and name in NEED_PARTIAL_FC:
        note = partial_fc_version(check_partial_fc(comparison.partial_fc))
    return row | {"failed": failed is not None, "note": failed or note}


def head_ratios(
    comparison: HeadComparison, classes: int, batch: int, rounds: Mapping[str, Sequence[Result]]
) -> list[dict[str, Any]]:
    """Return how many times as much each baseline took as each of our heads: the median of the rounds' quotients."""
    measured = [
        name
        for name in comparison.implementations
        if name != ROOFLINE and not any("reason" in result for result in rounds[name])
    ]
    ratios = []
    for own in (name for name in measured if IMPLEMENTATIONS[name].ours):
        for baseline in (name for name in measured if not IMPLEMENTATIONS[name].ours):
            pairs = list(zip(rounds[own], rounds[baseline], strict=True))
            times = {key: median([b[key] / o[key] for o, b in pairs if o[key] > 0]) for key in RATIO_FIGURES}
            ratios.append({"classes": classes, "batch_per_rank": batch, "ours": own, "peer": baseline, **times})
    return ratios


def _with_roofline_share(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Fill in ``floor_share`` of the exact heads: the roofline's time over theirs (CPU seconds on a CPU)."""
    rooflines = {(row["classes"], row["batch_per_rank"]): row for row in rows if row["contestant"] == ROOFLINE}
    for row in rows:
        roofline = rooflines.get((row["classes"], row["batch_per_rank"]))
        name, key = row["contestant"], "cpu_s" if row["kind"] == "cpu" else "wall_s"
        if roofline and roofline[key] and row[key] and name != ROOFLINE and not IMPLEMENTATIONS[name].sampled:
            row["floor_share"] = roofline[key] / row[key]
    return rows
