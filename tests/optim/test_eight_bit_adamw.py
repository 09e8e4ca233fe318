"""AdamW with moments in 8 bits against torch's in float32, its memory counted, its rows cut as ranks cut them."""

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plsc.errors import UsageError
from plsc.optim.backbone_optimizers import Hyperparameters, make_backbone_optimizer
from plsc.optim.eight_bit_adamw import EightBitAdamW, block_size

SHAPES = {"matrix": (6, 512), "kernel": (5, 64, 3, 3), "narrow": (4, 3, 3, 3), "vector": (640,), "nothing": (0, 256)}
VALUES = Hyperparameters(0.01, weight_decay=0.1, betas=(0.8, 0.95), eps=1e-6, state_dtype="int8")


def weights_of(shapes: Sequence[tuple[int, ...]]) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape, generator=seeded(index))) for index, shape in enumerate(shapes)]


def seeded(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def step(optimizer: torch.optim.Optimizer, weights: Sequence[Tensor], number: int) -> None:
    """A step by gradients whose sizes differ from number to number by four orders of magnitude."""
    for index, weight in enumerate(weights):
        source = seeded(1000 * number + index)
        sizes = 10 ** torch.empty(weight.shape).uniform_(-4, 0, generator=source)
        weight.grad = torch.randn(weight.shape, generator=source) * sizes
    optimizer.step()


def eight_bit(weights: Sequence[Tensor]) -> torch.optim.Optimizer:
    return make_backbone_optimizer("adamw", [{"params": list(weights)}], VALUES)


def float32(weights: Sequence[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(weights, VALUES.lr, betas=VALUES.betas, eps=VALUES.eps, weight_decay=VALUES.weight_decay)


def test_rows_decide_on_the_blocks() -> None:
    sizes = {name: block_size(shape) for name, shape in SHAPES.items()}
    assert sizes == {"matrix": 256, "kernel": 64, "narrow": None, "vector": None, "nothing": 256}
    assert block_size((7, 384)) == 128


def test_bytes_per_weight() -> None:
    for name, shape in SHAPES.items():
        (weight,) = weights_of([shape])
        state = eight_bit([weight]).state[weight]
        taken = sum(value.nbytes for key, value in state.items() if key != "step")
        size = block_size(shape)
        assert taken == weight.numel() * (8 if size is None else 2 + 8 / size), name


def test_the_first_step_is_that_of_float32_moments() -> None:
    """The update sees moments before they are rounded."""
    found = []
    for make in (eight_bit, float32):
        weights = weights_of(list(SHAPES.values()))
        step(make(weights), weights, 1)
        found.append(weights)
    for own, other in zip(*found, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-6, atol=1e-7)


def test_kept_moments_are_those_of_float32_but_for_their_rounding() -> None:
    """Of ten steps, an error is at most half the distance of two codes, 0.9 / 64 of a block's largest number."""
    weights, others = (weights_of([SHAPES["matrix"], SHAPES["kernel"]]) for _ in range(2))
    own, plain = eight_bit(weights), float32(others)
    for number in range(1, 11):
        step(own, weights, number)
        step(plain, others, number)
    maps = dict(zip(("exp_avg", "exp_avg_sq"), own._maps(torch.device("cpu")), strict=True))
    for weight, other in zip(weights, others, strict=True):
        size = block_size(weight.shape)
        for name, values in maps.items():
            codes, scale = own.state[weight][name].view(-1, size), own.state[weight][f"{name}_scale"].view(-1, 1)
            exact = plain.state[other][name].view(-1, size)
            decay = VALUES.betas[name == "exp_avg_sq"]
            bound = 0.5 * 0.9 / 64 / (1 - decay) * exact.abs().amax(1, keepdim=True) * 1.5
            assert ((values[codes.int()] * scale - exact).abs() <= bound).all(), name


def fitted(make: Callable[[Sequence[Tensor]], torch.optim.Optimizer]) -> float:
    """The loss of a small regression after 30 steps."""
    generator = seeded(0)
    x, hidden = torch.randn(128, 64, generator=generator), torch.randn(64, 16, generator=generator)
    y = torch.tanh(x @ hidden)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 16))
    optimizer = make(list(net.parameters()))
    for _ in range(30):
        loss = (net(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def test_it_learns_as_float32_does() -> None:
    plain = fitted(float32)
    assert plain < 0.1
    assert fitted(eight_bit) == pytest.approx(plain, rel=0.15)


@pytest.mark.parametrize("cuts", [(3, 3), (0, 6), (1, 5), (2, 2, 2)])
def test_ranks_that_hold_rows_step_as_one_does(cuts: tuple[int, ...]) -> None:
    whole = nn.Parameter(torch.randn(6, 512, generator=seeded(0)))
    parts = [nn.Parameter(part.clone()) for part in whole.detach().split(cuts)]
    one, several = eight_bit([whole]), [eight_bit([part]) for part in parts]
    for number in range(4):
        whole.grad = torch.randn(6, 512, generator=seeded(10 + number))
        for part, gradient in zip(parts, whole.grad.split(cuts), strict=True):
            part.grad = gradient.clone()
        for optimizer in (one, *several):
            optimizer.step()
    assert torch.equal(torch.cat(list(parts)), whole)
    for name in ("exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale"):
        joined = torch.cat([optimizer.state[part][name] for optimizer, part in zip(several, parts, strict=True)])
        assert torch.equal(joined, one.state[whole][name]), name


def test_channels_last_changes_nothing() -> None:
    plain, other = weights_of([SHAPES["kernel"]])[0], weights_of([SHAPES["kernel"]])[0]
    other.data = other.data.to(memory_format=torch.channels_last)
    strides = other.stride()
    for weight in (plain, other):
        optimizer = eight_bit([weight])
        for number in range(3):
            step(optimizer, [weight], number)
    assert torch.equal(plain, other)
    assert other.stride() == strides != plain.stride()


def test_state_is_saved_and_loaded_bit_for_bit(tmp_path: Any) -> None:
    weights = weights_of(list(SHAPES.values()))
    optimizer = eight_bit(weights)
    step(optimizer, weights, 1)
    torch.save([optimizer.state_dict(), list(weights)], tmp_path / "state")
    state, stored = torch.load(tmp_path / "state", weights_only=True)
    copies = [nn.Parameter(weight.detach()) for weight in stored]
    other = eight_bit(copies)
    other.load_state_dict(state)
    for number in (2, 3):
        step(optimizer, weights, number)
        step(other, copies, number)
    for weight, copied in zip(weights, copies, strict=True):
        assert torch.equal(weight, copied)
        for name, value in optimizer.state[weight].items():
            assert value.dtype == other.state[copied][name].dtype
            assert torch.equal(value, other.state[copied][name]), name


def test_weights_without_a_gradient_stay() -> None:
    weights = weights_of([SHAPES["matrix"], SHAPES["matrix"]])
    optimizer, before = eight_bit(weights), weights[1].detach().clone()
    weights[0].grad = torch.ones_like(weights[0])
    optimizer.step()
    assert torch.equal(weights[1], before)
    assert not optimizer.state[weights[1]]["exp_avg_scale"].any()


@pytest.mark.parametrize("value", [0.0, 1e-30, 1e30])
def test_gradients_of_any_size_leave_finite_weights(value: float) -> None:
    weight = nn.Parameter(torch.ones(2, 256))
    optimizer = eight_bit([weight])
    for _ in range(3):
        weight.grad = torch.full_like(weight, value) if value < 1 else torch.full_like(weight, math.sqrt(value))
        optimizer.step()
    assert weight.isfinite().all()


@pytest.mark.exhaustive
@pytest.mark.slow
def test_one_compiled_update_serves_all_shapes() -> None:
    from torch._dynamo.utils import counters

    found, shapes = [], [(6, 512), (5, 64, 3, 3), (3, 384), (640,), (1, 4, 128)]
    counters.clear()
    for compiled in (False, True):
        weights = weights_of(shapes)
        optimizer = EightBitAdamW([{"params": weights}], 0.01, weight_decay=0.1, compiled=compiled)
        for number in range(3):
            optimizer.param_groups[0]["lr"] = 0.01 / (1 + number)
            step(optimizer, weights, number)
        found.append(weights)
    assert counters["stats"]["unique_graphs"] == 1
    for own, other in zip(*found, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)


def test_a_missing_torchao_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from plsc.optim import eight_bit_adamw

    eight_bit_adamw._update.cache_clear()
    monkeypatch.setitem(sys.modules, "torchao.optim.subclass_8bit", None)
    with pytest.raises(UsageError, match=r"^torchao is not installed .*: pip install plsc-torch\[torchao\]$"):
        eight_bit(weights_of([SHAPES["matrix"]]))
