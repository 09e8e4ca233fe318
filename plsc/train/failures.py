"""Failures and signals of a run on many ranks: shared with all ranks, reported once, obeyed between two steps."""

import signal
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import TypeVar

import torch
import torch.distributed as dist

from plsc.errors import PlscError
from plsc.parallel import Mesh
from plsc.parallel.collectives import all_gather_object

T = TypeVar("T")
SIGNALS = (signal.SIGINT, signal.SIGTERM)
# In which the rank that failed first reports and ends, and the launcher notices that and ends the others. Only a loaded
# machine takes long; a rank that ended by itself before the reporting one would be taken to have spoken.
_REPORT_SECONDS = 10.0


class LostRankError(PlscError):
    """Another rank of the run has ended."""


class Interrupted(PlscError):
    """The run was asked to stop, and has saved its state."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + number  # as a shell reports it: 130 after SIGINT, 143 after SIGTERM


def raise_on_all_ranks(mesh: Mesh, function: Callable[[], T]) -> T:
    """Call ``function()`` on every rank; where it fails on any, raise the first rank's failure on all.

    No rank is left waiting in a collective for one that has failed. Only failures that a person can fix (PlscError,
    OSError) are shared; any other exception is a defect and propagates on its rank.

    Args:
        mesh: the ranks; all of them call.
        function: holds no collective.

    Returns:
        This rank's result.
    """
    results: list[T] = []
    failure: PlscError | OSError | None = None
    try:
        results.append(function())
    except (PlscError, OSError) as error:
        failure = error
    for shared in all_gather_object(failure, mesh):
        if shared is not None:
            raise shared
    return results[0]


def is_reporting_rank(mesh: Mesh) -> bool:
    """Return True on the first rank that asks: it reports the failure, the others end quietly.

    Asks the store through which the ranks met, because no collective works any more.
    """
    if mesh.world_size == 1:
        return True
    try:
        store = dist.distributed_c10d._get_default_store()
        return bool(store.add("plsc/failures", 1) == 1)
    except (RuntimeError, ValueError):  # the process that keeps the store has ended, after reporting
        return False


def wait_for_reporter() -> None:
    """Stay a moment: when one rank ends, the launcher ends all others, the reporting one too."""
    time.sleep(_REPORT_SECONDS)


def as_lost_rank(error: RuntimeError, mesh: Mesh) -> LostRankError | None:
    """Translate an error of a collective; None for errors of other kinds.

    gloo and NCCL raise RuntimeErrors when a peer is gone. Waits a moment: the rank that failed should say why.
    """
    text = str(error)
    signs = ("Connection closed by peer", "Connection reset", "Broken pipe", "Timed out", "gloo", "NCCL")
    is_of_network = isinstance(error, dist.DistError) or any(sign in text for sign in signs)
    if mesh.world_size == 1 or not is_of_network or isinstance(error, torch.cuda.OutOfMemoryError):
        return None
    wait_for_reporter()
    return LostRankError(
        f"rank {mesh.rank} lost touch with another rank; --resume auto goes on from the last checkpoint"
    )


class StopRequest:
    """SIGTERM and SIGINT as a request to stop after the present step, which all ranks then agree on.

    Within ``with StopRequest() as stop:``, ``stop.signal`` is the number of the signal that came, else 0. A second
    signal is not caught: it ends the process as it always would.
    """

    def __init__(self) -> None:
        self.signal = 0
        self._before: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> "StopRequest":
        try:
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        except ValueError:  # not the main thread, where alone Python lets handlers be set
            self._before = {}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
