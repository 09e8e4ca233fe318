"""Schedules: their shapes, their ends, and their life inside torch's scheduler."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plsc.optim.schedules import advance, schedule, scheduler

NAMES = ("constant", "polynomial", "cosine", "step")


def test_values_by_hand() -> None:
    linear = schedule("polynomial", total_steps=10, warmup_steps=2)
    assert [linear(step) for step in (0, 1, 2, 6, 10, 99)] == [0.5, 1.0, 1.0, 0.5, 0.0, 0.0]
    squared = schedule("polynomial", total_steps=4, power=2.0, min_lr_ratio=0.1)
    assert squared(2) == pytest.approx(0.1 + 0.9 * 0.25)
    half = schedule("cosine", total_steps=8)
    assert [half(step) for step in (0, 4, 8)] == pytest.approx([1.0, 0.5, 0.0])
    stairs = schedule("step", total_steps=9, milestones=(3, 6), gamma=0.5)
    assert [stairs(step) for step in (0, 2, 3, 5, 6, 100)] == [1, 1, 0.5, 0.5, 0.25, 0.25]
    assert schedule("constant", total_steps=5)(3) == 1


@given(st.sampled_from(NAMES), st.integers(1, 300), st.integers(0, 350), st.floats(0, 1), st.floats(0.1, 5))
def test_rises_once_then_falls_within_bounds(name: str, total: int, warmup: int, final: float, power: float) -> None:
    factor = schedule(name, total_steps=total, warmup_steps=warmup, min_lr_ratio=final, power=power, milestones=(5, 9))
    values = [factor(step) for step in range(total + warmup + 2)]
    assert all(0 <= value <= 1 for value in values)
    assert values[:warmup] == sorted(values[:warmup])
    rest = values[warmup:]
    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(rest))


def test_unknown_name() -> None:
    with pytest.raises(ValueError, match="there is no schedule 'linear'; it is one of constant"):
        schedule("linear", total_steps=3)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_standing_at_any_step_equals_having_walked_there(kind: type[torch.optim.Optimizer]) -> None:
    def make(step: int) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
        optimizer = kind([torch.nn.Parameter(torch.ones(2))], lr=0.3)  # type: ignore[call-arg]
        return optimizer, scheduler(optimizer, schedule("cosine", total_steps=9, warmup_steps=3), step=step)

    walked, walking = make(0)
    for step in range(12):
        stood, _ = make(step)
        assert walked.param_groups[0]["lr"] == stood.param_groups[0]["lr"]
        advance([walking])
