"""AdamW's update of rows by a Triton kernel, interpreted on the CPU: against torch's in float64, and the plain path."""

import copy

import pytest
import torch
from reference import Oracle, assert_same_roundings, relative_error

import plsc
from plsc.head.backends.torch_backend import TorchBackend
from plsc.head.backends.triton_update import update_rows
from plsc.head.class_table import Chunk, ClassRows
from plsc.head.low_precision import RoundingBits, RowState
from plsc.head.update_rules import AdamWRule, Update

ROWS, FIRST = 50, 2**33 + 17  # beyond 32 bits
INDEX = {"range": slice(7, 40), "list": torch.tensor([3, 9, 11, 49])}
RULE = AdamWRule(lr=0.02, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=7)


def table(dim: int, dtype: torch.dtype, first_dtype: torch.dtype, second_dtype: torch.dtype, rounding: str) -> tuple:
    """Rows, their 1/norms, and moments that are not zero."""
    generator = torch.Generator().manual_seed(dim)
    weight = torch.randn(ROWS, dim, generator=generator).to(dtype)
    first = torch.randn(ROWS, dim, generator=generator) / 10
    moments = {"first_moment": (first, first_dtype), "second_moment": (first.square() * 3, second_dtype)}
    states = {}
    for name, (values, state_dtype) in moments.items():
        states[name] = RowState(ROWS, dim, state_dtype, weight.device, rounding)
        states[name].write(slice(0, ROWS), values, RoundingBits.draw(0, 0, torch.arange(ROWS), dim))
    return weight, weight.float().norm(dim=1).reciprocal(), states


def updated(
    given: tuple,
    index: slice | torch.Tensor,
    gradient: torch.Tensor,
    rounding: str = "stochastic",
    rule: AdamWRule = RULE,
    seed: int = 3,
    step: int = 2,
    first: int = FIRST,
    *,
    by_kernel: bool,
    skip: float | None = None,
) -> tuple:
    """Copies of a table's rows and moments after an update by the kernel, or by the plain path."""
    weight, inverse_norm, states = copy.deepcopy(given)  # tensors cross to another process as shared memory
    version = weight._version
    update = update_rows if by_kernel else TorchBackend("for comparison").update
    chunk = Chunk(0, len(gradient), index, ClassRows(weight, inverse_norm))
    skipping = None if skip is None else torch.tensor(skip)
    update(chunk, gradient.clone(), states, Update(rule, 0.5, rounding, seed, step, first, skipping))
    assert weight._version > version
    return weight, inverse_norm, states


def numbers(given: tuple) -> list[torch.Tensor]:
    weight, inverse_norm, states = given
    return [weight, inverse_norm, *[t for name, state in states.items() for t in state.tensors(name).values()]]


MOMENTS = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.int8, torch.bfloat16),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
@pytest.mark.parametrize("rows", list(INDEX))
def test_update_is_the_plain_paths(interpreter, dtype, moments, rounding, rows):
    given, index = table(24, dtype, *moments, rounding), INDEX[rows]
    gradient = torch.randn(len(given[0][index]), 24)
    got = interpreter(updated, given, index, gradient, rounding, by_kernel=True)
    expected = updated(given, index, gradient, rounding, by_kernel=False)
    (weight, inverse_norm, *state), (other, _, *others) = numbers(got), numbers(expected)
    for mine, theirs in zip((weight, *state), (other, *others), strict=True):
        assert_same_roundings(mine, theirs)
    torch.testing.assert_close(inverse_norm, weight.double().norm(dim=1).reciprocal().float(), rtol=1e-6, atol=0)
    rest = torch.ones(ROWS, dtype=torch.bool)
    rest[index] = False
    for before, after in zip(numbers(given), numbers(got), strict=True):
        assert torch.equal(before[rest], after[rest])


@pytest.mark.parametrize("dim", [1, 3, 700, 1024])
def test_any_width(interpreter, dim):
    given, index = table(dim, torch.bfloat16, torch.int8, torch.bfloat16, "stochastic"), INDEX["range"]
    gradient = torch.randn(33, dim)
    got = interpreter(updated, given, index, gradient, by_kernel=True)
    expected = updated(given, index, gradient, by_kernel=False)
    # sums over a row may differ in their last place, and very rarely lead to the other neighbour
    for name, state in expected[2].items():
        assert (got[2][name].values != state.values).float().mean() < 1e-3
    assert (got[0] != expected[0]).float().mean() < 1e-3
    assert relative_error(got[0], expected[0]) < 1e-4


@pytest.mark.parametrize("first", [0, 2**31 - 20, 2**32 - 20, 2**40])
@pytest.mark.parametrize(("seed", "step"), [(0, 1), (2**31 + 3, 10**6)])
def test_bits_are_those_of_random_bits(interpreter, first, seed, step):
    """Half of all roundings would differ, were the bits others."""
    given = table(16, torch.bfloat16, torch.int8, torch.bfloat16, "stochastic")
    options = {"seed": seed, "step": step, "first": first}
    gradient = torch.randn(33, 16)
    got = interpreter(updated, given, INDEX["range"], gradient, by_kernel=True, **options)
    expected = updated(given, INDEX["range"], gradient, by_kernel=False, **options)
    assert_same_roundings(got[0], expected[0])
    for name, state in expected[2].items():
        assert_same_roundings(got[2][name].values, state.values)


@pytest.mark.parametrize("rows", list(INDEX))
def test_a_skipped_update_leaves_every_bit(interpreter, rows):
    given, index = table(24, torch.bfloat16, torch.int8, torch.bfloat16, "stochastic"), INDEX[rows]
    gradient = torch.full((len(given[0][index]), 24), torch.nan)
    for before, after in zip(
        numbers(given), numbers(interpreter(updated, given, index, gradient, by_kernel=True, skip=1.0)), strict=True
    ):
        assert torch.equal(before, after)
    gradient = torch.randn(gradient.shape)
    told, untold = (interpreter(updated, given, index, gradient, by_kernel=True, skip=skip) for skip in (0.0, None))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(numbers(told), numbers(untold), strict=True))


@pytest.mark.parametrize("step", [1, 3, 10**6])
@pytest.mark.parametrize("beta1", [0.0, 0.3, 0.9])
def test_rule_at_any_step_and_decay_of_the_moments(interpreter, step, beta1):
    """1 − β₂ᵗ spans 1e-3 to 1: taken of a float32 β₂, it would be off in the fifth digit."""
    rule = AdamWRule(lr=1e-2, beta1=beta1, beta2=0.999, eps=1e-6, weight_decay=0.0, step=step)
    given = table(24, torch.float32, torch.float32, torch.float32, "stochastic")
    gradient = torch.randn(33, 24)
    got = interpreter(updated, given, INDEX["range"], gradient, rule=rule, by_kernel=True)
    expected = updated(given, INDEX["range"], gradient, rule=rule, by_kernel=False)
    for mine, theirs in zip(numbers(got), numbers(expected), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-6, atol=1e-7)


def far_update(row: int, dim: int) -> tuple:
    """Rows around element 2³¹ of a table whose memory is asked for but, for the most part, never touched."""
    around, index = slice(row - 2, row + 2), torch.tensor([row - 1, row])
    weight, inverse_norm = torch.empty(row + 2, dim, dtype=torch.bfloat16), torch.empty(row + 2)
    first = RowState.over(torch.empty(row + 2, dim, dtype=torch.int8), torch.empty(row + 2), "stochastic")
    second = RowState.over(torch.empty(row + 2, dim, dtype=torch.bfloat16), None, "stochastic")
    weight[around], inverse_norm[around], first.values[around], second.values[around] = 1.0, dim**-0.5, 0, 0.0
    before = weight[around].clone()
    gradient = torch.randn(2, dim, generator=torch.Generator().manual_seed(0))
    chunk = Chunk(0, 2, index, ClassRows(weight, inverse_norm))
    states = {"first_moment": first, "second_moment": second}
    update_rows(chunk, gradient, states, Update(RULE, 1.0, "stochastic", 0, 1, 0))
    return before, weight[around].clone(), first.values[around].clone(), second.values[around].clone()


def test_rows_beyond_element_2_to_the_31(interpreter):
    dim = 512
    before, weight, first, second = interpreter(far_update, 2**31 // dim, dim)
    for row in (1, 2):
        assert (weight[row] != before[row]).float().mean() > 0.9
        assert first[row].abs().max() == 127
        assert (second[row] > 0).float().mean() > 0.99
    for neighbour in (0, 3):
        assert torch.equal(weight[neighbour], before[neighbour])
        assert first[neighbour].abs().max() == second[neighbour].abs().max() == 0


def steps(dtype: torch.dtype, state: torch.dtype, count: int, sample_rate: float = 1.0) -> dict:
    """Some steps of a head over made-up data: the rows before and after them, and how they were updated."""
    generator = torch.Generator().manual_seed(1)
    head = plsc.ShardedHead(24, 53, weight_dtype=dtype, momentum_dtype=state, chunk_classes=32, sample_rate=sample_rate)
    with torch.no_grad():
        head.weight.copy_(torch.randn(53, 24, generator=generator))
    initial = head.weight.detach().clone()
    optimizer = plsc.HeadAdamW(head, lr=1e-2, weight_decay=0.1)
    x, y = torch.randn(9, 24, generator=generator), torch.randint(53, (9,), generator=generator)
    for _ in range(count):
        head(x.clone().requires_grad_(), y).backward()
        optimizer.step()
    return {
        "x": x,
        "y": y,
        "initial": initial,
        "weight": head.weight.detach(),
        "norms": head.inverse_norms() * head.weight.detach().norm(dim=1, dtype=torch.float32),
        "updater": optimizer._updater.__name__,
    }


def test_steps_agree_with_torchs_adamw_in_float64(interpreter):
    got = interpreter(steps, torch.float32, torch.float32, 3)
    assert got["updater"] == "update_rows"
    weight = got["initial"].double().requires_grad_()
    optimizer = torch.optim.AdamW([weight], lr=1e-2, weight_decay=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        Oracle("arcface", parameters={"m": 0.5}).loss(got["x"].double(), got["y"], weight).backward()
        optimizer.step()
    initial = got["initial"].double()
    assert relative_error(got["weight"].double() - initial, weight - initial) < 1e-4
    torch.testing.assert_close(got["norms"], torch.ones(53))


@pytest.mark.parametrize("sample_rate", [1.0, 0.3])
def test_low_precision_steps_agree_with_those_without_kernels(interpreter, sample_rate):
    kinds = (torch.bfloat16, torch.int8, 3, sample_rate)
    got, expected = interpreter(steps, *kinds), steps(*kinds)
    assert got["updater"] == "update_rows"
    assert expected["updater"] == "update"
    initial = expected["initial"].float()
    assert relative_error(got["weight"].float() - initial, expected["weight"].float() - initial) < 5e-2
    untouched = (expected["weight"] == expected["initial"]).all(1)
    assert torch.equal(untouched, (got["weight"] == expected["initial"]).all(1))
    assert untouched.any() == (sample_rate < 1)
