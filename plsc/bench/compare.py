"""The comparison of class heads: sizes, rounds in which the contestants alternate, medians, ratios."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plsc.bench.circumstances import circumstances, processor
from plsc.bench.contestants import CONTESTANTS, FLOOR, NEED_PARTIAL_FC, label, missing
from plsc.bench.memory import available_bytes
from plsc.bench.peers import check_partial_fc, partial_fc_version
from plsc.bench.processes import measured
from plsc.bench.setting import Setting
from plsc.errors import UsageError
from plsc.progress import Progress

MEASURES = ("cpu_s", "wall_s", "memory_mib")
_FIGURES = (*MEASURES, "peak_mib", "loss", "product_gflops", "copy_gb_s")
_SHARE_OF_MEMORY = 0.85  # of what is available now


@dataclass(frozen=True)
class Comparison:
    """What to compare; ``batches`` are per rank, ``limit`` is the seconds that one turn of one contestant may take.

    Raises :class:`UsageError` for an unknown contestant, a peer's folder that is wrong, or a number out of range.
    """

    contestants: Sequence[str]
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
        if unknown := [name for name in self.contestants if name not in (*CONTESTANTS, FLOOR)]:
            raise UsageError(f"no contestant {unknown[0]!r}; it is one of {', '.join([*CONTESTANTS, FLOOR])}")
        if self.partial_fc is not None or any(name in NEED_PARTIAL_FC for name in self.contestants):
            check_partial_fc(self.partial_fc)
        whole = {"classes": min(self.classes), "batch": min(self.batches)}
        whole |= {name: getattr(self, name) for name in ("dim", "nproc", "threads", "rounds", "steps")}
        for name, value in whole.items():
            if value < 1:
                raise UsageError(f"--{name} {value}: it must be at least 1")
        if not 0 < self.sample_rate < 1:
            raise UsageError(f"--sample-rate {self.sample_rate}: it is a share between 0 and 1")
        if not self.limit > 0:
            raise UsageError(f"--limit {self.limit}: it must be more than 0 seconds")

    def setting(self, contestant: str, classes: int, batch: int) -> Setting:
        """One measurement of it."""
        memory = available_bytes() if self.device == "cpu" else None
        return Setting(
            contestant,
            classes,
            batch,
            self.dim,
            self.nproc,
            self.threads,
            self.steps,
            self.device,
            self.sample_rate,
            None if self.partial_fc is None else str(self.partial_fc.absolute()),
            None if memory is None else int(memory * _SHARE_OF_MEMORY / self.nproc),
        )


def compare(comparison: Comparison, *, quiet: bool = False) -> dict[str, Any]:
    """Run every contestant at every size, all of them in turn and that ``comparison.rounds`` times over.

    Returns:
        ``rows``, one per contestant and size, as :func:`row_of` makes them, and ``ratios``, as :func:`ratios_of`.
    """
    ascending, batches = sorted(set(comparison.classes)), sorted(set(comparison.batches))
    sizes = [(classes, batch) for batch in batches for classes in ascending]
    total = len(sizes) * comparison.rounds * len(comparison.contestants)
    progress = Progress("measuring", total, "starts", interval=2.0, quiet=quiet)
    rows, ratios = [], []
    too_large: set[tuple[str, int]] = set()  # contestants that failed at fewer classes and this batch
    for classes, batch in sizes:
        rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in comparison.contestants}
        for _ in range(comparison.rounds):
            for name in comparison.contestants:
                rounds[name].append(_once(comparison, name, classes, batch, rounds[name], too_large))
                progress.advance(note=f"{name} at {classes:,}")
        too_large |= {(name, batch) for name, taken in rounds.items() if "reason" in taken[-1]}
        here = {name: row_of(comparison, name, classes, batch, taken) for name, taken in rounds.items()}
        rows += list(here.values())
        ratios += ratios_of(comparison, classes, batch, rounds)
    progress.finish()
    return {"rows": _with_floor_share(rows), "ratios": ratios}


def _once(
    comparison: Comparison,
    name: str,
    classes: int,
    batch: int,
    before: list[dict[str, Any]],
    too_large: set[tuple[str, int]],
) -> dict[str, Any]:
    if before and "reason" in before[-1]:
        return before[-1]
    if (reason := missing(name)) is not None:
        return {"reason": reason}
    if (name, batch) in too_large:
        return {"reason": "failed with fewer classes already"}
    return measured(comparison.setting(name, classes, batch), comparison.limit)


def row_of(comparison: Comparison, name: str, classes: int, batch: int, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """A contestant's row: where and how it was measured, and the medians over the rounds; None where there is none.

    ``kind`` is "cpu" or "cuda"; ``cpu_s`` and ``wall_s`` are seconds per step and rank, ``cpu_s_low`` and
    ``cpu_s_high`` the extreme rounds, ``memory_mib`` the peak per rank above the libraries, ``peak_mib`` the peak with
    them, ``floor_share`` the floor's time over this one's; ``note`` says what is particular, or why it failed.
    """
    sizes = {name: getattr(comparison, name) for name in ("nproc", "threads", "dim", "rounds", "steps")}
    row: dict[str, Any] = circumstances(processor() if comparison.device == "cpu" else None) | {
        "kind": comparison.device,
        "contestant": name,
        "label": label(name, comparison.sample_rate),
        "classes": classes,
        "batch_per_rank": batch,
        **sizes,
    }
    failed = next((taken["reason"] for taken in rounds if "reason" in taken), None)
    good = [] if failed is not None else rounds
    for key in _FIGURES:
        row[key] = _median([taken[key] for taken in good if taken.get(key) is not None])
    cpu = [taken["cpu_s"] for taken in good if taken.get("cpu_s") is not None]
    row |= {"cpu_s_low": min(cpu, default=None), "cpu_s_high": max(cpu, default=None), "floor_share": None}
    note = good[0].get("note", "") if good else ""
    if good and name in NEED_PARTIAL_FC:
        note = partial_fc_version(check_partial_fc(comparison.partial_fc))
    return row | {"failed": failed is not None, "note": failed or note}


def ratios_of(
    comparison: Comparison, classes: int, batch: int, rounds: dict[str, list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """How many times as much each peer took as each head of ours: the median of the rounds' quotients."""
    ok = [name for name in comparison.contestants if name != FLOOR and not any("reason" in r for r in rounds[name])]
    ratios = []
    for own in (name for name in ok if CONTESTANTS[name].ours):
        for peer in (name for name in ok if not CONTESTANTS[name].ours):
            times = {
                key: _median([p[key] / o[key] for o, p in zip(rounds[own], rounds[peer], strict=True) if o[key] > 0])
                for key in MEASURES
            }
            ratios.append({"classes": classes, "batch_per_rank": batch, "ours": own, "peer": peer, **times})
    return ratios


def _with_floor_share(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Exact contestants' share of the product rate: the floor's time over theirs (CPU seconds on a CPU)."""
    floors = {(r["classes"], r["batch_per_rank"]): r for r in rows if r["contestant"] == FLOOR}
    for row in rows:
        floor = floors.get((row["classes"], row["batch_per_rank"]))
        name, key = row["contestant"], "cpu_s" if row["kind"] == "cpu" else "wall_s"
        if floor and floor[key] and row[key] and name != FLOOR and not CONTESTANTS[name].sampled:
            row["floor_share"] = floor[key] / row[key]
    return rows


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None
