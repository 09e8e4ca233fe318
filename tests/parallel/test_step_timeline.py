"""Attribution of a run's time to the parts of a step, with a clock that moves when the test says so."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from plsc.parallel import step_timeline
from plsc.parallel.step_timeline import (
    BACKBONE,
    CHECKPOINT,
    COMMUNICATION,
    DATA,
    EVALUATION,
    HEAD,
    OPTIMIZER,
    OTHER,
    PARTS,
    Interval,
    StepTimeline,
    exchange_after_backward,
    step_part,
)


class Clock:
    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(step_timeline, "time", made)
    return made


@pytest.fixture
def timeline(clock: Clock) -> Iterator[StepTimeline]:
    made = StepTimeline(torch.device("cpu"))
    with made.active():
        yield made


def seconds(**parts: float) -> dict[str, float]:
    return {**dict.fromkeys(PARTS, 0.0), **parts}


def test_time_goes_to_the_innermost_part(timeline: StepTimeline, clock: Clock) -> None:
    clock.now += 1
    with step_part(BACKBONE):
        clock.now += 2
        with step_part(HEAD):
            clock.now += 4
            with step_part(COMMUNICATION):
                clock.now += 8
            clock.now += 16
        clock.now += 32
    clock.now += 64
    timeline.end_step()
    split = timeline.take()
    assert split.seconds == seconds(backbone=34.0, head=20.0, communication=8.0, other=65.0)
    assert split.per_step() == {"step": 127.0, **split.seconds}
    assert timeline.take().per_step() is None


def test_the_mean_is_over_whole_steps(timeline: StepTimeline, clock: Clock) -> None:
    for length in (1, 3):
        with step_part(DATA):
            clock.now += length
        with step_part(OPTIMIZER):
            clock.now += 1
            timeline.end_step()
            clock.now += 10  # of the next step
    split = timeline.take()
    assert (split.steps, split.seconds) == (2, seconds(data=4.0, optimizer=12.0))
    timeline.end_step()
    assert timeline.take().per_step() == {"step": 10.0, **seconds(optimizer=10.0)}


@pytest.mark.parametrize("whole", [EVALUATION, CHECKPOINT])
def test_evaluations_and_checkpoints_are_not_divided(timeline: StepTimeline, clock: Clock, whole: str) -> None:
    with step_part(whole), step_part(COMMUNICATION):
        clock.now += 3
    timeline.end_step()
    assert timeline.take().seconds == seconds(**{whole: 3.0})


def test_an_error_ends_the_part(timeline: StepTimeline, clock: Clock) -> None:
    def fail() -> None:
        with step_part(HEAD):
            clock.now += 1
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        fail()
    assert timeline.part == OTHER


def test_threads_beside_the_step_count_for_nothing(timeline: StepTimeline, clock: Clock) -> None:
    def work() -> None:
        with step_part(CHECKPOINT):
            clock.now += 5

    with step_part(BACKBONE):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    timeline.end_step()
    assert timeline.take().seconds == seconds(backbone=5.0)


class _Tick(torch.autograd.Function):
    """A layer whose backward pass takes 2 seconds, and after which an exchange of 4 seconds is still under way."""

    clock: Clock

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        def finalize() -> None:
            _Tick.clock.now += 4

        _Tick.clock.now += 2
        torch.autograd.Variable._execution_engine.queue_callback(finalize)  # type: ignore[attr-defined]
        return gradient


def test_what_follows_the_last_gradient_is_communication(timeline: StepTimeline, clock: Clock) -> None:
    _Tick.clock = clock
    x = torch.ones((), requires_grad=True)
    with step_part(BACKBONE):
        loss: torch.Tensor = _Tick.apply(x) * 2
        exchange_after_backward(loss)
        loss.backward()
    clock.now += 1
    timeline.end_step()
    assert timeline.take().seconds == seconds(backbone=2.0, communication=4.0, other=1.0)


def test_a_loss_without_a_gradient_is_left_alone(timeline: StepTimeline) -> None:
    exchange_after_backward(torch.ones(()))


def test_kept_intervals_tile_the_time(timeline: StepTimeline, clock: Clock) -> None:
    clock.now += 1
    timeline.enter(DATA)
    timeline.end_step()
    timeline.kept = []
    for name in (BACKBONE, HEAD, BACKBONE, OPTIMIZER):
        clock.now += 2
        timeline.enter(name)
    timeline.end_step()
    timeline.synchronize()
    assert timeline.kept == [
        Interval(DATA, 1.0, 3.0),
        Interval(BACKBONE, 3.0, 5.0),
        Interval(HEAD, 5.0, 7.0),
        Interval(BACKBONE, 7.0, 9.0),
    ]


class _Event:
    """A CUDA event that the device passes when ``passed`` is as far, and which may not be asked for its time before."""

    passed = 0.0

    def __init__(self, enable_timing: bool) -> None:
        self.time = 0.0

    def record(self) -> None:
        self.time = _EventClock.now

    def query(self) -> bool:
        return self.time <= _Event.passed

    def elapsed_time(self, other: "_Event") -> float:
        assert self.query()
        assert other.query()
        return 1000 * (other.time - self.time)

    def synchronize(self) -> None:
        raise AssertionError("the host waits for the device")


class _EventClock:
    now = 0.0


def test_events_are_read_when_the_device_has_passed_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    timeline = StepTimeline(torch.device("cuda", 0))
    with timeline.active():
        for step in range(4):
            with step_part(HEAD):
                _EventClock.now += 3
            _EventClock.now += 1
            timeline.end_step()
            if step == 1:
                assert timeline.take().steps == 0  # the device has not come to anything yet
                _Event.passed = 5.5  # within the second step
                assert (first := timeline.take()).steps == 1
                assert first.seconds == seconds(head=3.0, other=1.0)
        _Event.passed = 99.0
        rest = timeline.take()
    assert (rest.steps, rest.seconds) == (3, seconds(head=9.0, other=3.0))
