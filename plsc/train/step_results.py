"""Results of a run's steps, read after the steps that follow are enqueued, and what follows from one that failed."""

import contextlib
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from plsc.config import Config
from plsc.errors import PlscError
from plsc.train.kept_batches import KeptBatches
from plsc.train.metrics import StepMeter
from plsc.train.state import Position
from plsc.train.step import EnqueuedStep, MicroBatch, StepResult


@dataclass(frozen=True)
class _UnreadStep:
    """A step whose result is not read yet: what it learned from, and its learning rates."""

    number: int
    enqueued: EnqueuedStep
    group: Sequence[MicroBatch]
    rates: Sequence[float]


class StepResults:
    """Reads what enqueued steps have given, counts the skipped ones, and ends the run that skips too many.

    Reading waits for the device; a step that is read one step late has mostly been computed by then.

    Args:
        config: of the run: ``non_finite``, ``max_skipped_steps`` and the precision.
        position: of the run, which counts skipped steps.
        kept: takes the batches of steps that were not finite.
        report: takes a line.
        before_end: called before the run is given up, on every rank; its PlscError is passed over.

    Attributes:
        last_loss: of the last step that was learned from; None before the first.
        meter: means over the steps since its last reset.
    """

    def __init__(
        self,
        config: Config,
        position: Position,
        kept: KeptBatches,
        report: Callable[[str], None],
        before_end: Callable[[], None],
    ) -> None:
        self.last_loss: float | None = None
        self.meter = StepMeter()
        self._config, self._position, self._kept = config, position, kept
        self._report, self._before_end = report, before_end
        self._unread: deque[_UnreadStep] = deque()
        self._skipped_in_a_row = 0

    def add(self, enqueued: EnqueuedStep, group: Sequence[MicroBatch], rates: Sequence[float]) -> None:
        """Take in the step that the position has just counted; ``rates`` are those of backbone and head."""
        self._unread.append(_UnreadStep(self._position.step, enqueued, group, rates))

    def read(self, keep: int = 0) -> StepResult | None:
        """Read the results of all steps but the ``keep`` newest; the last one that was read.

        Raises:
            PlscError: a step was not finite and ``non_finite`` is "stop", or too many in a row were not.
        """
        result = None
        while len(self._unread) > keep:
            step = self._unread.popleft()
            result = step.enqueued.result()
            self._take_in(step, result)
            self.meter.update(result)
        return result

    def _take_in(self, step: _UnreadStep, result: StepResult) -> None:
        """Count a step as learned from, or as skipped; keep the batch then, and give up where that is asked for."""
        if not result.skipped:
            self.last_loss, self._skipped_in_a_row = result.loss, 0
            return
        self._position.skipped += 1
        self._skipped_in_a_row += 1
        is_overflow = self._config.precision == "fp16" and math.isfinite(result.loss)
        if not is_overflow:
            self._keep(step, result)
        if self._skipped_in_a_row >= self._config.max_skipped_steps:
            self._give_up(
                f"loss or gradients were not finite for {self._skipped_in_a_row} steps in a row, up to step "
                f"{step.number:,} (learning rate {step.rates[0]:.3g}); lower optim.lr, lengthen the "
                'warm-up, set optim.clip_norm = 5, or compute with precision = "bf16" or "fp32"'
            )

    def _keep(self, step: _UnreadStep, result: StepResult) -> None:
        """Keep the batch of a step that was not finite; give up if non_finite says so."""
        kept = self._kept.keep(step.number, step.group, result, step.rates)
        if kept is not None:
            self._report(f"step {step.number:,} was not finite (loss {result.loss:g}); its batch is kept in {kept}")
        if self._config.non_finite == "stop":
            self._give_up(
                f"loss or gradients of step {step.number:,} were not finite (loss {result.loss:g}); its batch is in "
                f'{self._kept.folder}; non_finite = "skip" leaves such steps out'
            )

    def _give_up(self, why: str) -> NoReturn:
        with contextlib.suppress(PlscError):
            self._before_end()
        raise PlscError(f"{why}; --resume auto goes on from the last checkpoint")
