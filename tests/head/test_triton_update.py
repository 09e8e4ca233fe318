"""SGD's update of rows by a Triton kernel, interpreted on the CPU, against the plain path; and whole steps with it."""

import copy
from contextlib import ExitStack
from unittest.mock import patch

import pytest
import torch
from reference import Oracle, assert_same_roundings, relative_error

import plsc
from plsc.head.backends.torch_backend import backward_through_normalize
from plsc.head.backends.triton_update import update_rows
from plsc.head.class_table import Chunk, ClassRows
from plsc.head.low_precision import RoundingBits, RowState, store
from plsc.head.update_rules import SgdRule, Update

ROWS, SEED, STEP = 50, 3, 2
FIRST = 2**33 + 17  # beyond 32 bits
INDEX = {"range": slice(7, 40), "list": torch.tensor([3, 9, 11, 49])}


def table(dim: int, dtype: torch.dtype, state_dtype: torch.dtype | None) -> tuple:
    """Rows, their 1/norms, and a state that is not zero."""
    generator = torch.Generator().manual_seed(dim)
    weight = torch.randn(ROWS, dim, generator=generator).to(dtype)
    state = None
    if state_dtype is not None:
        state = RowState(ROWS, dim, state_dtype, weight.device)
        values = torch.randn(ROWS, dim, generator=generator) / 10
        state.write(slice(0, ROWS), values, RoundingBits.draw(0, 0, torch.arange(ROWS), dim))
    return weight, weight.float().norm(dim=1).reciprocal(), state


def by_kernel(
    given: tuple,
    index: slice | torch.Tensor,
    gradient: torch.Tensor,
    *,
    nesterov: bool,
    rounding: str,
    seed: int = SEED,
    step: int = STEP,
    first: int = FIRST,
) -> tuple:
    weight, inverse_norm, state = copy.deepcopy(given)  # tensors cross to another process as shared memory
    version = weight._version
    rule = SgdRule(lr=0.1, momentum=0.9, weight_decay=1e-2, nesterov=nesterov)
    chunk = Chunk(0, len(gradient), index, ClassRows(weight, inverse_norm))
    states = {"momentum": state} if state is not None else {}
    update_rows(chunk, gradient, states, Update(rule, 0.5, rounding, seed, step, first))
    assert weight._version > version
    return weight, inverse_norm, state


def by_plain_path(
    given: tuple,
    index: slice | torch.Tensor,
    gradient: torch.Tensor,
    *,
    nesterov: bool,
    rounding: str,
    seed: int = SEED,
    step: int = STEP,
    first: int = FIRST,
) -> tuple:
    """plsc.HeadSGD's own arithmetic, by its parts."""
    weight, inverse_norm, state = given
    if state is not None:
        state.rounding = rounding
    chunk = Chunk(0, len(gradient), index, ClassRows(weight, inverse_norm))
    g = backward_through_normalize(gradient.clone(), chunk) * 0.5
    bits = RoundingBits.draw(seed, step, torch.arange(ROWS)[index] + first, weight.shape[1])
    w = weight[index].float()
    move = g + 1e-2 * w
    if state is not None:
        buffer = state.read(index, torch.float32) * 0.9 + move
        state.write(index, buffer, bits)
        move = move + 0.9 * buffer if nesterov else buffer
    store(weight, index, w - 0.1 * move, bits.low, rounding)
    inverse_norm[index] = weight[index].float().norm(dim=1).reciprocal()
    return weight, inverse_norm, state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("state_dtype", [None, torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
@pytest.mark.parametrize("rows", list(INDEX))
def test_update_is_the_plain_paths(interpreter, dtype, state_dtype, nesterov, rounding, rows):
    if nesterov and state_dtype is None:
        return
    given, index = table(24, dtype, state_dtype), INDEX[rows]
    gradient = torch.randn(len(given[0][index]), 24)
    got = interpreter(by_kernel, given, index, gradient, nesterov=nesterov, rounding=rounding)
    expected = by_plain_path(copy.deepcopy(given), index, gradient, nesterov=nesterov, rounding=rounding)
    (weight, inverse_norm, *state), (other, _, *others) = numbers(got), numbers(expected)
    for mine, theirs in zip((weight, *state), (other, *others), strict=True):
        assert_same_roundings(mine, theirs)
    torch.testing.assert_close(inverse_norm, weight.double().norm(dim=1).reciprocal().float(), rtol=1e-6, atol=0)
    rest = torch.ones(ROWS, dtype=torch.bool)
    rest[index] = False
    for before, after in zip(numbers(given), numbers(got), strict=True):
        assert torch.equal(before[rest], after[rest])


def numbers(given: tuple) -> list[torch.Tensor]:
    weight, inverse_norm, state = given
    return [weight, inverse_norm, *(state.tensors("m").values() if state is not None else ())]


@pytest.mark.parametrize("dim", [1, 3, 64, 700, 1024])
def test_any_width(interpreter, dim):
    given, index = table(dim, torch.bfloat16, torch.int8), INDEX["range"]
    gradient = torch.randn(33, dim)
    got = interpreter(by_kernel, given, index, gradient, nesterov=False, rounding="stochastic")
    expected = by_plain_path(copy.deepcopy(given), index, gradient, nesterov=False, rounding="stochastic")
    # sums over a row may differ in their last place, and very rarely lead to the other neighbour
    assert (got[0] != expected[0]).float().mean() < 1e-3
    assert (got[2].values != expected[2].values).float().mean() < 1e-3
    assert relative_error(got[0], expected[0]) < 1e-4


@pytest.mark.parametrize("first", [0, 2**31 - 20, 2**32 - 20, 2**40])
@pytest.mark.parametrize(("seed", "step"), [(0, 1), (2**31 + 3, 10**6)])
def test_bits_are_those_of_random_bits(interpreter, first, seed, step):
    """Half of all roundings would differ, were the bits others."""
    given, index, gradient = table(16, torch.bfloat16, torch.int8), INDEX["range"], torch.randn(33, 16)
    options = {"nesterov": False, "rounding": "stochastic", "seed": seed, "step": step, "first": first}
    got = interpreter(by_kernel, given, index, gradient, **options)
    expected = by_plain_path(copy.deepcopy(given), index, gradient, **options)
    assert_same_roundings(got[0], expected[0])
    assert_same_roundings(got[2].values, expected[2].values)


def far_update(row: int, dim: int) -> tuple:
    """Rows around element 2³¹ of a table whose memory is asked for but, for the most part, never touched."""
    weight = torch.empty(row + 2, dim, dtype=torch.bfloat16)
    state = RowState(1, dim, torch.int8, weight.device)
    state.values, state.scale = torch.empty(row + 2, dim, dtype=torch.int8), torch.empty(row + 2)
    inverse_norm = torch.empty(row + 2)
    around = slice(row - 2, row + 2)
    weight[around], inverse_norm[around], state.values[around], state.scale[around] = 1.0, dim**-0.5, 0, 0.0
    before = weight[around].clone()
    index = torch.tensor([row - 1, row])
    gradient = torch.randn(2, dim, generator=torch.Generator().manual_seed(0))
    rule = SgdRule(lr=0.1, momentum=0.9, weight_decay=0.0, nesterov=False)
    chunk = Chunk(0, 2, index, ClassRows(weight, inverse_norm))
    update_rows(chunk, gradient, {"momentum": state}, Update(rule, 1.0, "stochastic", 0, 1, 0))
    return before, weight[around].clone(), state.values[around].clone(), inverse_norm[around].clone()


def test_rows_beyond_element_2_to_the_31(interpreter):
    dim = 512
    before, weight, state, inverse_norm = interpreter(far_update, 2**31 // dim, dim)
    for row in (1, 2):
        assert not torch.equal(weight[row], before[row])
        assert inverse_norm[row] == pytest.approx(1 / weight[row].float().norm().item(), rel=1e-5)
        assert state[row].abs().max() == 127
    for neighbour in (0, 3):
        assert torch.equal(weight[neighbour], before[neighbour])
        assert state[neighbour].abs().max() == 0


def steps(dtype: torch.dtype, state: torch.dtype | None, count: int, **options: object) -> dict:
    """Some steps of a head over made-up data: the last loss and gradient, and the rows after them."""
    generator = torch.Generator().manual_seed(1)
    head = plsc.ShardedHead(32, 53, weight_dtype=dtype, momentum_dtype=state, chunk_classes=32, **options)
    with torch.no_grad():
        head.weight.copy_(torch.randn(head.weight.shape, generator=generator))
    initial = head.weight.detach().clone()
    optimizer = plsc.HeadSGD(head, lr=0.1, momentum=0.9 if state is not None else 0.0, weight_decay=1e-2)
    x, y = torch.randn(9, 32, generator=generator), torch.randint(53, (9,), generator=generator)
    for _ in range(count):
        mine = x.clone().requires_grad_()
        loss = head(mine, y)
        loss.backward()
        optimizer.step()
    norms = head.inverse_norms() * head.weight.detach().norm(dim=1, dtype=torch.float32)
    return {
        "x": x,
        "y": y,
        "initial": initial,
        "loss": loss.detach(),
        "gradient": mine.grad,
        "weight": head.weight.detach(),
        "norms": norms,
    }


def test_steps_agree_with_the_oracle(interpreter):
    got = interpreter(steps, torch.float32, torch.float32, 2)
    weight = got["initial"].double().requires_grad_()
    x = got["x"].double().requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, weight_decay=1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        x.grad = None
        loss = Oracle("arcface", parameters={"m": 0.5}).loss(x, got["y"], weight)
        loss.backward()
        optimizer.step()
    assert relative_error(got["loss"], loss) < 1e-6
    assert relative_error(got["gradient"], x.grad) < 2e-5
    assert relative_error(got["weight"], weight) < 2e-5
    torch.testing.assert_close(got["norms"], torch.ones(53))


@pytest.mark.parametrize("sample_rate", [1.0, 0.3])
def test_low_precision_steps_agree_with_those_without_kernels(interpreter, sample_rate):
    kinds = (torch.bfloat16, torch.int8, 3)
    got, expected = interpreter(steps, *kinds, sample_rate=sample_rate), steps(*kinds, sample_rate=sample_rate)
    assert relative_error(got["loss"], expected["loss"]) < 5e-3
    assert relative_error(got["gradient"], expected["gradient"]) < 2e-2
    initial = expected["initial"]
    assert relative_error(got["weight"] - initial.float(), expected["weight"] - initial.float()) < 5e-2
    untouched = (expected["weight"] == initial).all(1)
    assert torch.equal(untouched, (got["weight"] == initial).all(1))
    assert untouched.any() == (sample_rate < 1)


def path_taken(**options: object) -> list[str]:
    """Which kernels a step of such a head calls."""
    from plsc.head.backends import triton_passes, triton_update

    with ExitStack() as patches:
        watched = {
            name: patches.enter_context(patch.object(module, name, wraps=getattr(module, name)))
            for module, name in (
                (triton_passes, "first_pass"),
                (triton_passes, "second_pass"),
                (triton_passes, "update_pass"),
                (triton_update, "rule_arguments"),
            )
        }
        steps(torch.float32, torch.float32, 1, **options)
    return [name for name, function in watched.items() if function.called]


def test_heads_take_the_kernels_where_they_can(interpreter):
    assert interpreter(path_taken) == ["first_pass", "update_pass"]
    assert interpreter(path_taken, centers=3) == ["first_pass", "update_pass"]
    assert interpreter(path_taken, margin=plsc.ArcFace(s=100.0)) == ["rule_arguments"]  # needs a maximum taken off
    assert interpreter(path_taken, margin=plsc.CurricularFace()) == ["rule_arguments"]


def norms_found_again(dtype: torch.dtype) -> bool:
    """Whether norms that steps left are those that would be taken of the stored rows, bit for bit."""
    head = plsc.ShardedHead(512, 300, weight_dtype=dtype, momentum_dtype=torch.int8)
    optimizer = plsc.HeadSGD(head, lr=0.1, momentum=0.9)
    for _ in range(2):
        head(torch.randn(4, 512), torch.randint(300, (4,))).backward()
        optimizer.step()
    left = head.inverse_norms().clone()
    with torch.no_grad():
        head.weight.mul_(1)  # noticed: norms are taken again
    return torch.equal(left, head.inverse_norms())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_run_finds_the_norms_that_its_updates_left(interpreter, dtype):
    assert interpreter(norms_found_again, dtype)
    assert norms_found_again(dtype)


def skipped_step() -> bool:
    head = plsc.ShardedHead(16, 23, weight_dtype=torch.bfloat16, momentum_dtype=torch.int8)
    optimizer = plsc.HeadSGD(head, lr=0.1, momentum=0.9)
    x, y = torch.randn(6, 16), torch.randint(23, (6,))
    head(x.requires_grad_(), y).backward()
    optimizer.step()
    everything = (
        head.weight.detach(),
        head.inverse_norms(),
        *[s.blocks[0].local for s in optimizer.sharded_state().values()],
    )
    before = [tensor.clone() for tensor in everything]
    head(x, y).backward()
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.step()
    return optimizer.skipped and all(torch.equal(a, b) for a, b in zip(everything, before, strict=True))


def test_a_found_inf_step_leaves_every_bit(interpreter):
    assert interpreter(skipped_step)
