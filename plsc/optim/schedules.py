"""Learning-rate schedules as pure functions of the step: a run resumed at any step needs no other state."""

import math
import warnings
from collections.abc import Callable, Sequence

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

Factor = Callable[[int], float]


def constant(progress: float) -> float:
    """The peak rate throughout."""
    return 1.0


def polynomial(progress: float, power: float = 1.0, final: float = 0.0) -> float:
    """From 1 to ``final`` as (1 − progress)^power."""
    return final + (1 - final) * math.pow(1 - progress, power)


def cosine(progress: float, final: float = 0.0) -> float:
    """From 1 to ``final`` along half a cosine (Loshchilov and Hutter, SGDR, equation 5, without restarts)."""
    return final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2


def warm_up(step: int, steps: int) -> float:
    """The linear rise to 1 over ``steps``: step 0 has 1/steps already, not a wasted 0."""
    return min((step + 1) / steps, 1.0) if steps > 0 else 1.0


def schedule(
    name: str,
    *,
    total_steps: int,
    warmup_steps: int = 0,
    power: float = 1.0,
    final: float = 0.0,
    milestones: Sequence[int] = (),
    gamma: float = 0.1,
) -> Factor:
    """The factor of the peak learning rate at each step, counted from 0.

    Args:
        name: constant, polynomial, cosine or step.
        total_steps: the step at which polynomial and cosine arrive at ``final``; later steps stay there.
        warmup_steps: steps of linear warm-up; polynomial and cosine fall over the rest.
        power: polynomial's exponent.
        final: polynomial's and cosine's last factor.
        milestones: step: the steps from which another ``gamma`` counts.
        gamma: step: the factor of each milestone.

    Raises:
        ValueError: ``name`` is none of these.
    """
    falls: dict[str, Callable[[float], float]] = {
        "constant": constant,
        "polynomial": lambda progress: polynomial(progress, power, final),
        "cosine": lambda progress: cosine(progress, final),
    }
    if name not in falls and name != "step":
        raise ValueError(f"there is no schedule {name!r}; it is one of {', '.join([*falls, 'step'])}")

    def factor(step: int) -> float:
        if step < warmup_steps:
            return warm_up(step, warmup_steps)
        if name == "step":
            return gamma ** sum(step >= milestone for milestone in milestones)
        progress = (step - warmup_steps) / max(total_steps - warmup_steps, 1)
        return falls[name](min(progress, 1.0))

    return factor


def scheduler(optimizer: Optimizer, factor: Factor, *, step: int = 0) -> LambdaLR:
    """A torch scheduler that gives every parameter group its ``lr`` times ``factor``, standing at ``step``.

    The groups' present ``lr`` is the peak. Call ``advance`` after each step.
    """
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return LambdaLR(optimizer, factor, last_epoch=step - 1)


def advance(schedulers: Sequence[LambdaLR]) -> None:
    """Move every scheduler on by one step, also where the optimizer skipped its own (a non-finite loss)."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
        for each in schedulers:
            each.step()
