"""The stages of a training run: when each begins, how the run enters it, and the learning rates of them all."""

from collections.abc import Sequence
from dataclasses import dataclass

from plsc import config as configuration
from plsc.config import Config, make_margin
from plsc.errors import UsageError
from plsc.optim.schedules import Factor, schedule
from plsc.progress import counted
from plsc.strict_toml import toml_value
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
