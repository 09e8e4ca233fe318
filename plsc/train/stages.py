"""The course of a training run: its length, the learning rates of its steps, and when it enters each stage."""

from collections.abc import Callable
from functools import partial

from plsc.config import Config, begins_course, changes_of, class_tables, make_margin, stage_configs
from plsc.errors import UsageError
from plsc.optim.schedules import Factor, advance, schedule, scheduler
from plsc.progress import counted
from plsc.toml_keys import toml_value
from plsc.train.components import TrainComponents
from plsc.train.feature import overriding
from plsc.train.state import Position, steps_per_epoch
from plsc.train.tables import peak_rates


class RunSchedule:
    """Counts a run's steps, and gives each its learning rates and its stage.

    Args:
        components: of the run; its optimizers get the rates, and what a stage changes is set in them.
        position: of the run, moved on by :meth:`advance`.

    Raises:
        UsageError: a stage does not begin after the one before it, or begins at the run's end or later. What the
            configuration alone shows of that was refused when it was read.

    Attributes:
        rates: the learning rates of the last step: of the backbone, and of each class table.
    """

    def __init__(self, components: TrainComponents, position: Position) -> None:
        self._components, self._config, self._position = components, components.config, position
        self._configs = stage_configs(self._config)
        self._per_epoch = steps_per_epoch(components)
        self._starts = self._stage_starts()  # in steps of the schedule, the first 0
        self._stage = self._stage_at(position.schedule_step)
        self._enter(self._stage)
        optimizers = [components.optimizer, *components.head_optimizers]
        peaks = [self._peak_rates(config) for config in self._configs]
        courses = self._courses()
        factors = [
            partial(self._factor, courses, [peak[which] / peaks[0][which] for peak in peaks])
            for which in range(len(optimizers))
        ]
        self._schedulers = [
            scheduler(optimizer, factor, step=position.schedule_step)
            for optimizer, factor in zip(optimizers, factors, strict=True)
        ]
        self._peaks = list(zip(peaks[0], factors, strict=True))
        self.rates = [0.0] * len(optimizers)

    @property
    def last_step(self) -> int:
        """The number of the run's last step. ``step`` and ``schedule_step`` part when the batch size changes."""
        return self._position.step + max(self._total_steps - self._position.schedule_step, 0)

    @property
    def is_finished(self) -> bool:
        """True when no step is left."""
        return self._position.schedule_step >= self._total_steps

    def described(self) -> list[str]:
        """When each stage begins, and what it changes: "after step 40: head.sample_rate = 0.5"."""
        lines = []
        for start, stage in zip(self._starts[1:], self._config.stage, strict=True):
            values = ", ".join(f"{name} = {toml_value(value)}" for name, value in changes_of(stage).items())
            lines.append(f"after step {start:,}: {values}")
        return lines

    def advance(self) -> None:
        """Count a step, and move the learning rates on."""
        self.rates = [peak * factor(self._position.schedule_step) for peak, factor in self._peaks]
        self._position.step += 1
        self._position.schedule_step += 1
        self._position.accuracy = None
        advance(self._schedulers)

    def enter_due_stage(self, report: Callable[[str], None]) -> bool:
        """Enter the stage that the next step belongs to, with a line to ``report``; every rank calls.

        Returns:
            True where that changes the augmentation.
        """
        due, augment = self._stage_at(self._position.schedule_step), self._components.loader.augment
        if due == self._stage:
            return False
        self._stage = due
        self._components.average_statistics()  # what freezes now is each rank's own else, for as long as it is frozen
        self._enter(due)
        report(f"stage {due} begins {self.described()[due - 1]}")
        return augment != self._components.loader.augment

    def _enter(self, stage: int) -> None:
        """Put the values of a stage in force, from the next step on; 0 is the run before its first stage.

        Optimizers, gradients' exchange and the data's order stay.
        """
        components, config = self._components, self._configs[stage]
        for table, of in zip(components.tables, class_tables(config), strict=True):
            table.head.set_margin(make_margin(of.config.head))
            table.head.set_sample_rate(of.config.head.sample_rate)
        components.loader.augment = config.data.augment
        for enter_stage in overriding(components.features.values(), "enter_stage"):
            enter_stage(components, stage)

    def _peak_rates(self, config: Config) -> list[float]:
        """The peak rates of backbone and class tables in a stage."""
        ranks = self._components.strategy.data_ranks
        of_tables = [peak_rates(table.config, ranks)[1] for table in class_tables(config)]
        return [peak_rates(config, ranks)[0], *of_tables]

    @property
    def _total_steps(self) -> int:
        if self._config.steps is not None:
            return self._config.steps
        assert self._config.epochs is not None
        return self._config.epochs * steps_per_epoch(self._components)

    def _stage_at(self, step: int) -> int:
        """The index of the stage that holds in the step after ``step`` steps."""
        return sum(step >= start for start in self._starts[1:])

    def _stage_starts(self) -> list[int]:
        """The steps after which the run and its stages begin."""
        position, total, starts = self._position, self._total_steps, [0]
        for number, stage in enumerate(self._config.stage, start=1):
            if "from_step" in stage.values:  # a run that went on with another batch size has taken steps of two sizes
                start = stage.values["from_step"] + position.schedule_step - position.step
            else:
                start = round(stage.values["from_epoch"] * self._per_epoch)
            if number > 1 and start <= starts[-1]:
                raise UsageError(
                    f"stage {number} begins after step {start:,}, not after the one before it (step {starts[-1]:,}); "
                    f"an epoch has {counted(self._per_epoch, 'step')}"
                )
            if start >= total:
                raise UsageError(
                    f"stage {number} begins after step {start:,}, where the run of {total:,} steps is over"
                )
            starts.append(start)
        return starts

    def _courses(self) -> list[tuple[int, Factor]]:
        """The courses of the rate with the steps after which they begin.

        A course goes on over stages, until one gives a key of the schedule: the next begins there, and this one ends.
        """
        begins = [True, *(begins_course(stage) for stage in self._config.stage)]
        first = [index for index, begun in enumerate(begins) if begun]
        ends = [*(self._starts[index] for index in first[1:]), self._total_steps]
        return [
            (self._starts[index], _course(self._configs[index], end - self._starts[index], self._per_epoch))
            for index, end in zip(first, ends, strict=True)
        ]

    def _factor(self, courses: list[tuple[int, Factor]], scales: list[float], step: int) -> float:
        """The factor of the run's peak rate after ``step`` steps; a stage that gives another peak scales the course."""
        start, course = courses[sum(step >= first for first, _ in courses[1:])]
        return course(step - start) * scales[self._stage_at(step)]


def _course(config: Config, steps: int, per_epoch: int) -> Factor:
    optim = config.optim
    warmup = optim.warmup_steps
    if warmup is None:
        warmup = round((optim.warmup_epochs or 0.0) * per_epoch)
    return schedule(
        optim.schedule,
        total_steps=steps,
        warmup_steps=warmup,
        power=optim.power,
        min_lr_ratio=optim.min_lr_ratio,
        gamma=optim.gamma,
        milestones=[round(milestone * per_epoch) for milestone in optim.milestones],
    )
