"""The verdict of all ranks on a step, which the device obeys at once and the host reads later.

A host that asks whether a step is finite before it enqueues the update leaves the device idle from the end of
backward() to the first launch of the update. So updates take the verdict as a number on the device and keep everything
as it was where it says so; the host reads it while the device computes, to count the updates that went through. On a
CPU, where reading costs nothing, the host decides.
"""

import math
import time

import torch
from torch import Tensor

from plsc.errors import PlscError

_POLL_SECONDS = 2e-4


class Verdict:
    """Numbers that end a step, the same on every rank, the first of which tells whether it is to change nothing.

    Making one begins the copy to the host, in the order of the device's work, and waits for nothing.

    Args:
        numbers: (n,) floating point on the device that computes. The step is skipped where the first is not 0.
        limit: seconds that the device may take to come to them once they are asked for.

    Attributes:
        flag: float32 scalar on the device, 0 where the step goes through; torch's ``found_inf``.
    """

    def __init__(self, numbers: Tensor, limit: float = math.inf) -> None:
        self.flag = numbers[0].float()
        self._limit = limit
        self._event: torch.cuda.Event | None = None
        self._on_host = numbers
        if numbers.is_cuda:
            self._on_host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._on_host.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    @staticmethod
    def host_decides(device: torch.device) -> bool:
        """Return whether the host reads verdicts before it enqueues updates: where computation is not asynchronous."""
        return device.type == "cpu"

    def numbers(self) -> list[float]:
        """The numbers; waits until the device has come to them.

        Raises:
            PlscError: it has not in time; a collective before them waits for a rank that does not come.
        """
        if self._event is not None:
            self._wait_for(self._event)
            self._event = None
        values: list[float] = self._on_host.tolist()
        return values

    def _wait_for(self, event: torch.cuda.Event) -> None:
        deadline = time.monotonic() + self._limit
        while not event.query():
            if time.monotonic() > deadline:
                raise PlscError(
                    f"the GPU did not end a step within {self._limit:g} s, perhaps because another rank hangs: "
                    "plsc doctor examines the machines; --resume auto goes on from the last checkpoint"
                )
            time.sleep(_POLL_SECONDS)
        event.synchronize()  # over by now: profilers show the step's one wait under this name

    @property
    def skipped(self) -> bool:
        """Whether the step changes nothing; waits as :meth:`numbers` does."""
        return self.numbers()[0] != 0


class UpdateCounter:
    """Counts the updates that went through. The last one's verdict is read when the next begins, or count is asked."""

    def __init__(self) -> None:
        self._settled = 0
        self._last: Verdict | None = None

    def begin(self, verdict: Verdict) -> int:
        """The number, from 1, of an update that is enqueued now; it counts if ``verdict`` lets it through."""
        number = self.count + 1
        self._last = verdict
        return number

    @property
    def count(self) -> int:
        """The updates so far; waits for the last one's verdict."""
        if self._last is not None:
            self._settled += not self._last.skipped
            self._last = None
        return self._settled

    @count.setter
    def count(self, value: int) -> None:
        self._settled, self._last = value, None


def step_unless(optimizer: torch.optim.Optimizer, verdict: Verdict) -> None:
    """Step a torch optimizer unless ``verdict`` skips the step; every state stays as it was then, bit for bit.

    torch's fused optimizers obey the device's flag, as they obey a GradScaler's. Before others the host waits for it.
    """
    if verdict.host_decides(verdict.flag.device) or not getattr(optimizer, "_step_supports_amp_scaling", False):
        if not verdict.skipped:
            optimizer.step()
        return
    optimizer.found_inf = verdict.flag  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del optimizer.found_inf  # type: ignore[attr-defined]
