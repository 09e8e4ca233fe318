"""The parts of a training step in time: every moment of a run belongs to one of them.

Code names the part that it belongs to by :func:`step_part`; where parts are nested, time goes to the innermost, but for
evaluations and checkpoints, which are not divided. A :class:`StepTimeline` that is active adds the intervals up. They
tile the run: one begins where the one before it ends.

On a GPU the ends of intervals are CUDA events in the order of the device's work, read when the device has passed them.
So an interval is what the device takes for that part, or idles in it while the host brings nothing, and the host waits
for no event.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

DATA, BACKBONE, HEAD, COMMUNICATION = "data", "backbone", "head", "communication"
OPTIMIZER, EVALUATION, CHECKPOINT, OTHER = "optimizer", "evaluation", "checkpoint", "other"
PARTS = (DATA, BACKBONE, HEAD, COMMUNICATION, OPTIMIZER, EVALUATION, CHECKPOINT, OTHER)
_UNDIVIDED = (EVALUATION, CHECKPOINT)


class Interval(NamedTuple):
    """Seconds from ``start`` to ``end`` of one part; both count from the timeline's beginning."""

    part: str
    start: float
    end: float


@dataclass
class TimeSplit:
    """Seconds of so many whole steps by part."""

    steps: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    def per_step(self) -> dict[str, float] | None:
        """The mean step: its seconds, as "step", and those of its parts, which add up to them; None without a step."""
        if not self.steps:
            return None
        parts = {name: seconds / self.steps for name, seconds in self.seconds.items()}
        return {"step": sum(parts.values()), **parts}


class _Mark(NamedTuple):
    """The moment at which ``part`` begins, and whether it is the end of a step."""

    part: str
    when: Any  # a torch.cuda.Event, or a float
    ends_step: bool


class StepTimeline:
    """Adds up the parts of steps.

    Args:
        device: whose work is measured: by events on a GPU, by the clock elsewhere.

    Attributes:
        kept: intervals are appended to it while it is a list; None: they are added up alone.
        now: seconds that have been added up.
    """

    def __init__(self, device: torch.device) -> None:
        self.kept: list[Interval] | None = None
        self._is_cuda = device.type == "cuda"
        self._owner = threading.get_ident()
        self._spare: list[torch.cuda.Event] = []  # making an event costs more than recording one
        self._part = OTHER
        self._ended, self._open = TimeSplit(), TimeSplit()
        self.now = 0.0
        self._unread = deque[_Mark]()
        self.begin()

    @property
    def part(self) -> str:
        """The part that time goes to now."""
        return self._part

    def begin(self) -> None:
        """Begin the first step now; what was before belongs to none."""
        self._part, self._open = OTHER, TimeSplit()
        self._unread = deque([_Mark(OTHER, self._moment(), False)])

    def enter(self, part: str) -> None:
        """Let time go to ``part`` from now on. Ignored in threads that work beside the step."""
        if part != self._part and self._is_of_step():
            self._part = part
            self._unread.append(_Mark(part, self._moment(), False))

    def end_step(self) -> None:
        """Count a step that ends now."""
        self._unread.append(_Mark(self._part, self._moment(), True))
        self._read_past()

    def take(self) -> TimeSplit:
        """Return the steps that the device has ended since the last call."""
        self._read_past()
        split, self._ended = self._ended, TimeSplit()
        return split

    def synchronize(self) -> None:
        """Wait until the device has passed every mark so far."""
        if self._is_cuda:
            self._unread[-1].when.synchronize()
        self._read_past()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Add up what :func:`step_part` names within."""
        global _timeline
        before, _timeline = _timeline, self
        try:
            yield
        finally:
            _timeline = before

    def _is_of_step(self) -> bool:
        # The autograd engine computes on threads of its own, while the step's waits for it.
        return threading.get_ident() == self._owner or torch._C._current_graph_task_id() != -1

    def _moment(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _read_past(self) -> None:
        """Take in the intervals that are over; the last mark stays as the beginning of the next one."""
        while len(self._unread) > 1 and (not self._is_cuda or self._unread[1].when.query()):
            mark, following = self._unread.popleft(), self._unread[0]
            if self._is_cuda:
                seconds = mark.when.elapsed_time(following.when) / 1000
                self._spare.append(mark.when)
            else:
                seconds = following.when - mark.when
            self._take_in(mark.part, seconds, following.ends_step)

    def _take_in(self, part: str, seconds: float, ends_step: bool) -> None:
        self._open.seconds[part] += seconds
        if self.kept is not None and seconds:
            self.kept.append(Interval(part, self.now, self.now + seconds))
        self.now += seconds
        if ends_step:
            self._ended.steps += 1
            for name, share in self._open.seconds.items():
                self._ended.seconds[name] += share
            self._open = TimeSplit()


_timeline: StepTimeline | None = None


@contextmanager
def step_part(name: str) -> Iterator[None]:
    """Let time go to the part ``name`` of the active timeline, and after that to the part before it."""
    timeline = _timeline
    if timeline is None or timeline.part in _UNDIVIDED:
        yield
        return
    before = timeline.part
    timeline.enter(name)
    try:
        # a profiler that runs while intervals are kept shows them beside its own
        with nullcontext() if timeline.kept is None else torch.profiler.record_function(f"plsc: {name}"):
            yield
    finally:
        timeline.enter(before)


def exchange_after_backward(loss: Tensor) -> None:
    """Let the end of the backward pass of ``loss`` count as communication.

    When the last gradient is computed, the engines of data parallelism wait for the exchanges that are still under way.
    They do so in callbacks of the autograd engine, which run in the order in which they were queued: the one that is
    queued here, before any other gradient is computed, comes first. To be called within :func:`step_part`.
    """
    timeline = _timeline
    if timeline is None or not loss.requires_grad:
        return

    loss.register_hook(lambda _: _queue_callback(lambda: timeline.enter(COMMUNICATION)))


def _queue_callback(callback: Callable[[], None]) -> None:
    """Run ``callback`` at the end of the backward pass under way; torch 2.15 has the function of this name."""
    public = getattr(torch.autograd.graph, "queue_callback", None)
    engine: Any = torch.autograd.Variable._execution_engine
    (public or engine.queue_callback)(callback)
