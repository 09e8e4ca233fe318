"""Learning-rate schedules as pure functions of the step: a run resumed at any step needs no other state.

A new schedule is a function here, entered into SCHEDULES; configurations then take its name.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

Factor = Callable[[int], float]


@dataclass(frozen=True)
class ScheduleOptions:
    """Options of all schedules; each reads those that it needs. Steps are counted from 0, warm-up included.

    Attributes:
        total_steps: the step at which polynomial and cosine reach ``min_lr_ratio``; later steps stay there.
        warmup_steps: steps of linear warm-up; polynomial and cosine fall over the rest.
        power: polynomial's exponent.
        min_lr_ratio: polynomial's and cosine's last factor.
        milestones: the steps at which the step schedule multiplies by ``gamma``.
        gamma: the factor of each milestone.
    """

    total_steps: int
    warmup_steps: int = 0
    power: float = 1.0
    min_lr_ratio: float = 0.0
    milestones: Sequence[int] = ()
    gamma: float = 0.1

    def progress(self, step: int) -> float:
        """Return the share, 0 to 1, of the steps after the warm-up that lie before ``step``."""
        return min((step - self.warmup_steps) / max(self.total_steps - self.warmup_steps, 1), 1.0)


def constant(step: int, options: ScheduleOptions) -> float:
    """Stay at the peak rate."""
    return 1.0


def polynomial(step: int, options: ScheduleOptions) -> float:
    """Fall from 1 to ``min_lr_ratio`` as (1 − progress)^power."""
    return options.min_lr_ratio + (1 - options.min_lr_ratio) * math.pow(1 - options.progress(step), options.power)


def cosine(step: int, options: ScheduleOptions) -> float:
    """Fall from 1 to ``min_lr_ratio`` along half a cosine (SGDR, Loshchilov and Hutter, equation 5, no restarts)."""
    half = (1 + math.cos(math.pi * options.progress(step))) / 2
    return options.min_lr_ratio + (1 - options.min_lr_ratio) * half


def multistep(step: int, options: ScheduleOptions) -> float:
    """Multiply by ``gamma`` at each milestone (torch's MultiStepLR)."""
    return options.gamma ** sum(step >= milestone for milestone in options.milestones)


SCHEDULES: dict[str, Callable[[int, ScheduleOptions], float]] = {
    "constant": constant,
    "polynomial": polynomial,
    "cosine": cosine,
    "step": multistep,
}


def warm_up(step: int, steps: int) -> float:
    """Rise linearly to 1 over ``steps``; step 0 has 1/steps already, not a wasted 0."""
    return min((step + 1) / steps, 1.0) if steps > 0 else 1.0


def schedule(name: str, **options: Any) -> Factor:
    """Return the factor of the peak learning rate at each step, counted from 0.

    Args:
        name: a key of SCHEDULES.
        **options: those of :class:`ScheduleOptions`.

    Raises:
        ValueError: ``name`` is none of these.
    """
    if name not in SCHEDULES:
        raise ValueError(f"there is no schedule {name!r}; it is one of {', '.join(SCHEDULES)}")
    decay, chosen = SCHEDULES[name], ScheduleOptions(**options)

    def factor(step: int) -> float:
        return warm_up(step, chosen.warmup_steps) if step < chosen.warmup_steps else decay(step, chosen)

    return factor


LR_SCALINGS = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}  # exponents of the batch size


def scaled_lr(lr: float, batch: int, scaling: str, base_batch: int) -> float:
    """Return the peak learning rate of a global batch, from ``lr``, which suits ``base_batch``.

    Args:
        lr: tuned at ``base_batch``.
        batch: samples of a step, over all ranks and micro-batches.
        scaling: "linear", lr · batch / base_batch, which keeps the sum of an epoch's steps (Goyal et al., 2017, section
            2.1, with a warm-up); "sqrt", lr · √(batch / base_batch), which keeps the variance of a step (Krizhevsky,
            2014, section 5; You et al., ICLR 2020, take it for LAMB); or "none".
        base_batch: samples.
    """
    return lr * math.pow(batch / base_batch, LR_SCALINGS[scaling])


def scheduler(optimizer: Optimizer, factor: Factor, *, step: int = 0) -> LambdaLR:
    """Return a torch scheduler that gives every parameter group its ``lr`` times ``factor``, starting at ``step``.

    The groups' present ``lr`` is the peak. Call ``advance`` after each step.
    """
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return LambdaLR(optimizer, factor, last_epoch=step - 1)


def advance(schedulers: Sequence[LambdaLR]) -> None:
    """Advance every scheduler by one step, also where the optimizer skipped its own (a non-finite loss)."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
        for each in schedulers:
            each.step()
