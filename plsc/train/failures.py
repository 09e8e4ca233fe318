"""Failures of ranks, signals, and slow ranks: reported once for all ranks, obeyed between two steps."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from statistics import median_low
from types import FrameType
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from plsc.errors import PlscError
from plsc.parallel import Mesh
from plsc.parallel.collectives import await_farewell, farewell
from plsc.parallel.launch import STOP_SIGNALS
from plsc.parallel.rank_monitor import Hang, RankMonitor
from plsc.parallel.rendezvous import agent_keeps_store
from plsc.progress import flush, note_from_handler

# In which the rank that failed first reports and ends, and the launcher notices that and ends the others. Only a loaded
# machine takes long; a rank that ended by itself before the reporting one would be taken to have spoken.
_REPORT_SECONDS = 10.0
_LAUNCHER_SECONDS = 2.0  # the same, for a rank that the launcher has told to end already
_LOOK_SECONDS = 0.2  # between two looks whether it has: a thousand ranks ask one store
_REPORTED = "plsc/reported"  # key of the store through which the ranks met
# A terminal and Slurm send a signal to every process of a run, and the launcher passes it on to its ranks once more.
_SAME_SIGNAL_SECONDS = 1.0
_AGENT_SECONDS = 1.0  # between two looks at the launcher
_ALWAYS = timedelta(days=365)
_terminated = threading.Event()  # a SIGTERM came while a run went on
SLOW = 1.3  # times the median of all ranks, from which a rank is reported
PERIOD_SECONDS = 20.0  # over which ranks are compared: one slow batch is no slow rank
REPEAT_SECONDS = 600.0  # between two lines about the same rank
LATE_SECONDS = 30.0  # without progress, after which the log names the ranks that the others wait for


class LostRankError(PlscError):
    """Another rank of the run has ended."""


class HangingRankError(PlscError):
    """Ranks of the run do not come to where the others wait."""


class Interrupted(PlscError):
    """The run was asked to stop, and has saved its state."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + number  # as a shell reports it: 130 after SIGINT, 143 after SIGTERM, 138 after SIGUSR1


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


def report_and_end(error: PlscError, report: Callable[[PlscError], None]) -> NoReturn:
    """Report an error of a run of several ranks on the reporting one, tell the others so, and end this process."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of the launcher, which ends all ranks when one has failed
    report(error)
    with contextlib.suppress(RuntimeError, ValueError):  # the process that keeps the store has ended
        dist.distributed_c10d._get_default_store().set(_REPORTED, "")
    _end_at_once(error.exit_code)


def wait_for_reporter() -> None:
    """Stay a moment: when one rank ends, the launcher ends all others, the reporting one too.

    Ends this process soon after that has reported, where the launcher's SIGTERM came while the run still went on.
    """
    with contextlib.suppress(RuntimeError, ValueError):  # the process that keeps the store has ended
        store, deadline = dist.distributed_c10d._get_default_store(), time.monotonic() + _REPORT_SECONDS
        while not store.check([_REPORTED]):  # its wait() would keep RankWatch's thread from the store meanwhile
            if time.monotonic() > deadline:
                return
            time.sleep(_LOOK_SECONDS)
        time.sleep(_LAUNCHER_SECONDS if _terminated.is_set() else _REPORT_SECONDS)
        if _terminated.is_set():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)


def end_after_reporter(error: PlscError) -> NoReturn:
    """End this process with the exit code of ``error`` once the reporting rank has had the time to report."""
    if isinstance(error, Interrupted):
        _terminated.clear()  # the signal asked the run to stop, and was not the launcher's
    wait_for_reporter()
    _end_at_once(error.exit_code)


def _end_at_once(code: int) -> NoReturn:
    """End this process without the interpreter's own end.

    At that the thread of :class:`RankWatch` would abort the process if it came out of gloo meanwhile, because the other
    ranks have ended.
    """
    try:
        flush()
    finally:
        os._exit(code)


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
    return _lost_rank(mesh, None)


def _lost_rank(mesh: Mesh, lost: int | None) -> LostRankError:
    """The error that names the first rank that was found to have ended, here (``lost``) or on any rank."""
    name = "" if lost is None else str(lost)
    with contextlib.suppress(RuntimeError, ValueError):  # the process that keeps the store has ended
        store = dist.distributed_c10d._get_default_store()
        if name or store.check(["plsc/lost"]):
            name = store.compare_set("plsc/lost", "", name).decode()
    other = f"rank {name}" if name else "another rank"
    return LostRankError(f"rank {mesh.rank} lost touch with {other}; --resume auto goes on from the last checkpoint")


class RankWatch:
    """Notices at once when the rank before this one, around the ring of all ranks, ends without a farewell.

    A GPU that waits in a collective for a rank that has died waits until NCCL's time-out, and NCCL then ends the
    process without a line that tells a user what to do. A thread here waits for the farewell over gloo instead. The
    rank that failed has reported before it ended, if it could; if it could not, ``report`` is called with the error
    that names it, on one rank, and the process ends, wherever its main thread waits.

    Within ``with RankWatch(mesh, report):`` the ranks are watched; leaving it without an error is the farewell.

    Args:
        mesh: the ranks.
        report: prints the error's line.
    """

    def __init__(self, mesh: Mesh, report: Callable[[LostRankError], None]) -> None:
        self._mesh, self._report = mesh, report
        self._left, self._ends_well = threading.Event(), False
        self._thread = threading.Thread(target=self._watch, name="plsc-rank-watch", daemon=True)

    def __enter__(self) -> "RankWatch":
        if self._mesh.world_size > 1:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._ends_well = kind is None
        self._left.set()
        if self._mesh.world_size > 1 and self._ends_well:
            with contextlib.suppress(RuntimeError):  # the next rank has ended, after all collectives
                farewell(self._mesh)
            self._thread.join(_REPORT_SECONDS)

    def _watch(self) -> None:
        try:
            await_farewell(self._mesh, _ALWAYS)
            return
        except RuntimeError:
            if self._ends_well:
                return
        lost = _lost_rank(self._mesh, (self._mesh.rank - 1) % self._mesh.world_size)
        if self._left.is_set():  # the main thread has noticed too, and ends by itself
            return
        if is_reporting_rank(self._mesh):
            self._report(lost)
        elif self._left.wait(2 * _REPORT_SECONDS):
            return
        os._exit(lost.exit_code)


def stop_with_agent() -> None:
    """Ask this process to stop, as by SIGTERM, when the launcher that has started it has ended without ending it.

    A rank that went on alone would write into a run that somebody resumes elsewhere.
    """
    if not agent_keeps_store():  # the parent may be a shell that is free to end
        return
    agent = os.getppid()

    def watch() -> None:
        while os.getppid() == agent:
            time.sleep(_AGENT_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="plsc-agent-watch", daemon=True).start()


def monitor_ranks(
    mesh: Mesh, limit: float, log: Callable[[str], None], report: Callable[[HangingRankError], None]
) -> RankMonitor | None:
    """Watch, until the monitor's end(), that some rank makes progress; None where there is one rank.

    Where none does for ``limit`` seconds, one rank names those that the others wait for and ends its process, wherever
    its main thread waits; the others follow. The log names them sooner.

    Args:
        mesh: the ranks.
        limit: seconds.
        log: takes a line for the run's log, on whichever rank tells first.
        report: prints the error's line.
    """
    if mesh.world_size == 1:
        return None

    def end(hang: Hang) -> None:
        error = HangingRankError(f"{hang.line}; --resume auto goes on from the last checkpoint")
        for line in (f"ended: {error}", *hang.stacks):
            log(line)
        if is_reporting_rank(mesh):
            report(error)
        os._exit(error.exit_code)

    def leave() -> None:
        time.sleep(2 * _REPORT_SECONDS)
        os._exit(HangingRankError.exit_code)

    def tell(hang: Hang) -> None:
        for line in (f"waiting: {hang.line}", *hang.stacks):
            log(line)

    store = PrefixStore("plsc/monitor", dist.distributed_c10d._get_default_store())
    late = min(LATE_SECONDS, limit / 2)
    return RankMonitor(limit, end, store=store, leave=leave, on_late=tell, late=late)


class StopRequest:
    """SIGINT, SIGTERM and SIGUSR1 as a request to stop after the present step, which all ranks then agree on.

    Within ``with StopRequest() as stop:``, ``stop.signal`` is the number of the signal that came, else 0. A second
    signal, unless it is SIGUSR1, ends the process as it always would.

    Args:
        tell: say at once on standard error that a signal came, as a step may take long.
    """

    def __init__(self, *, tell: bool = False) -> None:
        self.signal, self._tell = 0, tell
        self._came = 0.0
        self._before: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> "StopRequest":
        try:
            self._before = {number: signal.signal(number, self._note) for number in STOP_SIGNALS}
        except ValueError:  # not the main thread, where alone Python lets handlers be set
            self._before = {}
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM:
            _terminated.set()
        if not self.signal:
            self.signal, self._came = number, time.monotonic()
            if self._tell:
                again = "" if number == signal.SIGUSR1 else "; a second one ends it at once, without"
                name = signal.Signals(number).name
                note_from_handler(f"train: {name}: the run ends after the steps under way, with a checkpoint{again}")
        elif number != signal.SIGUSR1 and time.monotonic() - self._came > _SAME_SIGNAL_SECONDS:
            self._restore()
            signal.raise_signal(number)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}


class SlowRanks:
    """Compares what ranks take for their own part of a step, and reports those that are slow.

    A rank that is done waits in the next exchange of gradients or embeddings, and so for the slowest. What it takes
    without the time in exchanges is its own.

    Args:
        report: takes a line.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._since = time.monotonic()
        self._seconds: list[dict[str, float]] = []
        self._reported: dict[int, float] = {}

    def add(self, ranks: Sequence[Mapping[str, float]]) -> None:
        """Take in the seconds that each rank has spent since the last call, by the part of the step."""
        self._seconds = [
            {name: total.get(name, 0.0) + seconds for name, seconds in parts.items()}
            for total, parts in zip(self._seconds or [{}] * len(ranks), ranks, strict=True)
        ]
        now = time.monotonic()
        if now - self._since >= PERIOD_SECONDS:
            for rank, line in slow_ranks(self._seconds).items():
                if now - self._reported.get(rank, -REPEAT_SECONDS) >= REPEAT_SECONDS:
                    self._reported[rank] = now
                    self._report(line)
            self._seconds, self._since = [], now


def slow_ranks(ranks: Sequence[Mapping[str, float]]) -> dict[int, str]:
    """Find the ranks that take much longer than the median, and say by how much and in which part.

    Args:
        ranks: seconds by part of each, exchanges left out.

    Returns:
        ``{3: "rank 3 takes 1.8 times the median of all ranks, mostly in data (11.2 s compared with 1.0 s)"}``. The
        median of an even number is the lower of the two in the middle: of two ranks, the faster one.
    """
    totals = [sum(parts.values()) for parts in ranks]
    middle = median_low(totals)
    found = {}
    for rank, total in enumerate(totals):
        if middle <= 0 or total < SLOW * middle:
            continue
        usual = {name: median_low([parts[name] for parts in ranks]) for name in ranks[rank]}
        worst = max(usual, key=lambda name: ranks[rank][name] - usual[name])
        found[rank] = (
            f"rank {rank} takes {total / middle:.1f} times the median of all ranks, mostly in {worst} "
            f"({ranks[rank][worst]:.1f} s compared with {usual[worst]:.1f} s)"
        )
    return found
