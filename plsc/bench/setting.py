"""What a contestant is measured on."""

from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Setting:
    """One measurement: a contestant at a size, on the ranks of this machine.

    ``batch`` is per rank; ``threads`` are the CPU threads of a rank; ``device`` is "cpu" or "cuda"; ``partial_fc`` is
    the folder that holds the peer's partial_fc_v2.py; ``memory_bytes`` is what a rank on a CPU may allocate.
    """

    contestant: str
    classes: int
    batch: int
    dim: int = 512
    nproc: int = 2
    threads: int = 1
    steps: int = 3
    device: str = "cpu"
    sample_rate: float = 0.1
    partial_fc: str | None = None
    memory_bytes: int | None = None

    @property
    def global_batch(self) -> int:
        """Samples of all ranks."""
        return self.batch * self.nproc

    def smaller(self, classes: int) -> "Setting":
        """The same with at most this many classes."""
        return replace(self, classes=min(self.classes, classes))

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)
