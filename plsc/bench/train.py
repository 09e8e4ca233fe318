"""Comparison of training loops: backbone and head together, each loop in fresh ranks, in turn; medians and ratios."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from plsc.bench.harness import environment, median, processor_name
from plsc.bench.head_baselines import partial_fc_version
from plsc.bench.ranks import Result, measure_on_ranks
from plsc.bench.train_baselines import LOOPS, NEEDS_PEER, TrainBenchConfig, check_arcface_torch
from plsc.errors import UsageError
from plsc.models import names
from plsc.progress import Progress
from plsc.sizes import available_bytes

_WORKER = "plsc.bench.train_worker"
_MEMORY_SHARE = 0.85  # of what is available now, for all ranks together
_FIGURES = ("cpu_s", "wall_s", "memory_mib", "peak_mib", "loss")
RATIO_FIGURES = ("wall_s", "cpu_s", "memory_mib")


@dataclass(frozen=True)
class TrainComparison:
    """Request of a comparison; ``batch`` is per rank, ``limit`` is the seconds that one turn may take.

    Raises:
        UsageError: an unknown loop or backbone, a wrong ``arcface_torch`` folder, or a number out of range.
    """

    implementations: Sequence[str]
    backbone: str = "iresnet18"
    classes: int = 10_000
    batch: int = 8
    image_size: int = 112
    dim: int = 512
    nproc: int = 2
    threads: int = 1
    rounds: int = 2
    steps: int = 3
    device: str = "cpu"
    precision: str = "fp32"
    arcface_torch: Path | None = None
    limit: float = 300.0

    def __post_init__(self) -> None:
        if unknown := [name for name in self.implementations if name not in LOOPS]:
            raise UsageError(f"--contestants {unknown[0]}: there is no such loop; choose from {', '.join(LOOPS)}")
        if self.backbone not in names():
            raise UsageError(f"--backbone {self.backbone}: choose from {', '.join(names())}")
        if self.arcface_torch is not None or NEEDS_PEER in self.implementations:
            check_arcface_torch(self.arcface_torch)
        for name in ("classes", "batch", "image_size", "dim", "nproc", "threads", "rounds", "steps"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name.replace('_', '-')} {getattr(self, name)}: it must be at least 1")
        if not self.limit > 0:
            raise UsageError(f"--limit {self.limit}: it must be more than 0 seconds")

    def config(self, name: str) -> TrainBenchConfig:
        """Return one measurement of it."""
        memory = available_bytes() if self.device == "cpu" else None
        return TrainBenchConfig(
            name,
            self.backbone,
            self.classes,
            self.batch,
            self.image_size,
            self.dim,
            self.nproc,
            self.threads,
            self.steps,
            self.device,
            self.precision,
            None if self.arcface_torch is None else str(self.arcface_torch.absolute()),
            None if memory is None else int(memory * _MEMORY_SHARE / self.nproc),
        )


def compare_training(comparison: TrainComparison, *, quiet: bool = False) -> dict[str, Any]:
    """Measure every loop in turn, ``comparison.rounds`` times over.

    Turns alternate so that a change of the machine's load meets all loops alike.

    Returns:
        ``rows``, one per loop (see :func:`result_row`), and ``ratios`` (see :func:`training_ratios`).
    """
    total = comparison.rounds * len(comparison.implementations)
    progress = Progress("measuring", total, "starts", interval=2.0, quiet=quiet)
    rounds: dict[str, list[Result]] = {name: [] for name in comparison.implementations}
    for _ in range(comparison.rounds):
        for name, results in rounds.items():
            if not any("reason" in result for result in results):
                task = comparison.config(name).as_dict()
                results.append(measure_on_ranks(_WORKER, task, comparison.nproc, comparison.threads, comparison.limit))
            progress.advance(note=name)
    progress.finish()
    rows = [result_row(comparison, name, results) for name, results in rounds.items()]
    return {"rows": rows, "ratios": training_ratios(rounds)}


def result_row(comparison: TrainComparison, name: str, results: Sequence[Result]) -> dict[str, Any]:
    """Return a loop's row: environment, sizes, and medians over the rounds; None where a figure is missing.

    ``images_per_second`` is over all ranks, with the extreme rounds as ``…_low`` and ``…_high``; ``cpu_s`` and
    ``wall_s`` are seconds per step and rank; ``memory_mib`` is the peak per rank above the libraries, ``peak_mib`` the
    peak with them; ``note`` is a remark, or the reason of a failure.
    """
    row: dict[str, Any] = environment(processor_name() if comparison.device == "cpu" else None) | {
        "kind": comparison.device,
        "contestant": name,
        "label": LOOPS[name].label,
    }
    sizes = ("backbone", "classes", "image_size", "batch", "nproc", "threads", "dim", "precision", "rounds", "steps")
    row |= {key: getattr(comparison, key) for key in sizes}
    failed = next((result["reason"] for result in results if "reason" in result), None)
    good = [] if failed is not None else results
    rates = [comparison.batch * comparison.nproc / result["wall_s"] for result in good]
    row |= {"images_per_second": median(rates)}
    row |= {"images_per_second_low": min(rates, default=None), "images_per_second_high": max(rates, default=None)}
    row |= {key: median([result[key] for result in good]) for key in _FIGURES}
    note = failed or ""
    if not note and name == NEEDS_PEER:
        note = _peer_version(check_arcface_torch(comparison.arcface_torch))
    return row | {"failed": failed is not None, "note": note}


def _peer_version(folder: Path) -> str:
    digest = sha256((folder / "backbones" / "iresnet.py").read_bytes()).hexdigest()[:12]
    return f"{partial_fc_version(folder)}, iresnet.py {digest}"


def training_ratios(rounds: Mapping[str, Sequence[Result]]) -> list[dict[str, Any]]:
    """Return how many times as much each baseline took as each of our loops: the median of the rounds' quotients."""
    measured = [name for name, results in rounds.items() if not any("reason" in result for result in results)]
    ratios = []
    for own in (name for name in measured if LOOPS[name].ours):
        for baseline in (name for name in measured if not LOOPS[name].ours):
            pairs = list(zip(rounds[own], rounds[baseline], strict=True))
            times = {key: median([b[key] / o[key] for o, b in pairs if o[key] > 0]) for key in RATIO_FIGURES}
            ratios.append({"ours": own, "peer": baseline, **times})
    return ratios
