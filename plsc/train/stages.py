"""The course of a training run: its length, the learning rates of its steps, and when it enters each stage."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from plsc import config as configuration
from plsc.config import Config, make_margin
from plsc.errors import UsageError
from plsc.optim.schedules import Factor, advance, schedule, scheduler
from plsc.progress import counted
from plsc.toml_keys import toml_value
from plsc.train.components import TrainComponents, frozen_parts, peak_rates
from plsc.train.state import Position, steps_per_epoch


def enter_stage(components: TrainComponents, index: int) -> None:
    """Put the values of a stage in force, from the next step on; every rank calls.

    Optimizers, gradients' exchange and the data's order stay: rates come from :meth:`StagePlan.rate_factors`.

    Args:
        components: of the run.
        index: of the stage, from 1; 0 is the run before its first stage.
    """
    config = configs_of(components.config)[index]
    components.head.set_margin(make_margin(config.head))
    components.head.set_sample_rate(config.head.sample_rate)
    components.loader.augment = config.data.augment
    components.frozen = frozen_parts(components.frozen_by_stage[index], components.strategy)


def configs_of(config: Config) -> list[Config]:
    """The configurations of the run before its first stage and of each stage."""
    return [config, *configuration.stage_configs(config)]


@dataclass(frozen=True)
class StagePlan:
    """The course of a run through its stages, in steps of its schedule.

    Attributes:
        configs: of the run before its first stage, and of each stage.
        starts: the steps after which they begin, the first 0.
        total: steps of the run.
        per_epoch: steps of an epoch.
    """

    configs: Sequence[Config]
    starts: Sequence[int]
    total: int
    per_epoch: int

    def at(self, step: int) -> int:
        """The index of the stage that holds in the step after ``step`` steps."""
        return sum(step >= start for start in self.starts[1:])

    def described(self) -> list[str]:
        """When each stage begins, and what it changes: "after step 40: head.sample_rate = 0.5"."""
        lines = []
        for start, stage in zip(self.starts[1:], self.configs[0].stage, strict=True):
            changes = configuration.changes_of(stage).items()
            values = ", ".join(f"{name} = {toml_value(value)}" for name, value in changes)
            lines.append(f"after step {start:,}: {values}")
        return lines

    def rate_factors(self, ranks: int) -> tuple[Factor, Factor]:
        """The factors of the run's peak learning rates, of backbone and head, by the number of steps done.

        A stage that gives optim.lr or head_lr has another peak. A course of the rate goes on over stages, until one
        gives a key of the schedule: the next course begins there, and this one ends.
        """
        peaks = [peak_rates(config, ranks) for config in self.configs]
        courses = self._courses()

        def factor(step: int, which: int) -> float:
            start, course = courses[sum(step >= first for first, _ in courses[1:])]
            return course(step - start) * (peaks[self.at(step)][which] / peaks[0][which])

        return (lambda step: factor(step, 0)), (lambda step: factor(step, 1))

    def _courses(self) -> list[tuple[int, Factor]]:
        begins = [True, *(configuration.begins_course(stage) for stage in self.configs[0].stage)]
        first = [index for index, begun in enumerate(begins) if begun]
        ends = [*(self.starts[index] for index in first[1:]), self.total]
        return [
            (self.starts[index], _course(self.configs[index], end - self.starts[index], self.per_epoch))
            for index, end in zip(first, ends, strict=True)
        ]


def plan_stages(components: TrainComponents, position: Position, total: int) -> StagePlan:
    """Plan a run of ``total`` steps, which stands at ``position``.

    Raises:
        UsageError: a stage does not begin after the one before it, or begins at the run's end or later. What the
            configuration alone shows of that was refused when it was read.
    """
    config, per_epoch = components.config, steps_per_epoch(components)
    starts = [0]
    for number, stage in enumerate(config.stage, start=1):
        if "from_step" in stage.values:  # a run that went on with another batch size has taken steps of two sizes
            start = stage.values["from_step"] + position.schedule_step - position.step
        else:
            start = round(stage.values["from_epoch"] * per_epoch)
        if number > 1 and start <= starts[-1]:
            raise UsageError(
                f"stage {number} begins after step {start:,}, not after the one before it (step {starts[-1]:,}); an "
                f"epoch has {counted(per_epoch, 'step')}"
            )
        if start >= total:
            raise UsageError(f"stage {number} begins after step {start:,}, where the run of {total:,} steps is over")
        starts.append(start)
    return StagePlan(configs_of(config), starts, total, per_epoch)


class RunSchedule:
    """Counts a run's steps, and gives each its learning rates and its stage.

    Args:
        components: of the run; its optimizers get the rates, and what a stage changes is set in them.
        position: of the run, moved on by :meth:`advance`.

    Raises:
        UsageError: as :func:`plan_stages`.

    Attributes:
        plan: of the stages.
        rates: the learning rates of the last step: of backbone and head.
    """

    def __init__(self, components: TrainComponents, position: Position) -> None:
        self._components, self._config, self._position = components, components.config, position
        self.plan = plan_stages(components, position, self._total_steps())
        self._stage = self.plan.at(position.schedule_step)
        enter_stage(components, self._stage)
        ranks = components.strategy.data_ranks
        factors = self.plan.rate_factors(ranks)
        optimizers = (components.optimizer, components.head_optimizer)
        self._schedulers = [
            scheduler(each, factor, step=position.schedule_step)
            for each, factor in zip(optimizers, factors, strict=True)
        ]
        self._peaks = list(zip(peak_rates(self._config, ranks), factors, strict=True))
        self.rates = [0.0, 0.0]

    @property
    def last_step(self) -> int:
        """The number of the run's last step. ``step`` and ``schedule_step`` part when the batch size changes."""
        return self._position.step + max(self._total_steps() - self._position.schedule_step, 0)

    @property
    def is_finished(self) -> bool:
        """True when no step is left."""
        return self._position.schedule_step >= self._total_steps()

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
        due, augment = self.plan.at(self._position.schedule_step), self._components.loader.augment
        if due == self._stage:
            return False
        self._stage = due
        self._components.average_statistics()  # what freezes now is each rank's own else, for as long as it is frozen
        enter_stage(self._components, due)
        report(f"stage {due} begins {self.plan.described()[due - 1]}")
        return augment != self._components.loader.augment

    def _total_steps(self) -> int:
        if self._config.steps is not None:
            return self._config.steps
        assert self._config.epochs is not None
        return self._config.epochs * steps_per_epoch(self._components)


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
