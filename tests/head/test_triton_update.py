"""The updates of rows by a Triton kernel, interpreted on the CPU, against the plain path; and whole steps with it."""

import copy
from contextlib import ExitStack
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from reference import Oracle, assert_same_roundings, relative_error
from support.head_problems import everything, filled_state, same

import plsc
from plsc.head.backends.torch_backend import TorchBackend
from plsc.head.backends.triton_update import update_rows
from plsc.head.class_table import Chunk, ClassRows
from plsc.head.low_precision import RowState
from plsc.head.update_rules import AdamWRule, SgdRule, Update, UpdateRule

ROWS, FIRST = 50, 2**33 + 17  # beyond 32 bits
INDEX = {"range": slice(7, 40), "list": torch.tensor([3, 9, 11, 49])}
BF16, F32, I8 = torch.bfloat16, torch.float32, torch.int8
SGD = SgdRule(lr=0.1, momentum=0.9, weight_decay=1e-2, nesterov=False)
NESTEROV = replace(SGD, nesterov=True)
ADAMW = AdamWRule(lr=0.02, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=7)
KINDS = {
    "sgd without momentum": (replace(SGD, momentum=0.0), {}),
    **{f"sgd {dtype}": (SGD, {"momentum": dtype}) for dtype in (F32, BF16, I8)},
    **{f"nesterov {dtype}": (NESTEROV, {"momentum": dtype}) for dtype in (F32, BF16, I8)},
    "adamw float32": (ADAMW, {"first_moment": F32, "second_moment": F32}),
    "adamw bfloat16": (ADAMW, {"first_moment": BF16, "second_moment": BF16}),
    "adamw int8": (ADAMW, {"first_moment": I8, "second_moment": BF16}),
}
LOW = {"sgd": f"sgd {I8}", "adamw": "adamw int8"}


def table(dim: int, dtype: torch.dtype, kind: str, rounding: str = "stochastic") -> tuple:
    """Rows, their 1/norms, and a state that is not zero."""
    weight = torch.randn(ROWS, dim, generator=torch.Generator().manual_seed(dim)).to(dtype)
    return weight, weight.float().norm(dim=1).reciprocal(), filled_state(ROWS, dim, KINDS[kind][1], rounding)


def updated(
    given: tuple,
    index: slice | torch.Tensor,
    gradient: torch.Tensor,
    rule: UpdateRule,
    rounding: str = "stochastic",
    *,
    by_kernel: bool,
    seed: int = 3,
    step: int = 2,
    first: int = FIRST,
    skip: float | None = None,
) -> list[torch.Tensor]:
    """Copies of a table's rows, norms and state after an update by the kernel, or by the plain path."""
    weight, inverse_norm, states = copy.deepcopy(given)  # tensors cross to another process as shared memory
    version = weight._version
    update = update_rows if by_kernel else TorchBackend("for comparison").update
    chunk = Chunk(0, len(gradient), index, ClassRows(weight, inverse_norm))
    skipping = None if skip is None else torch.tensor(skip)
    update(chunk, gradient.clone(), states, Update(rule, 0.5, rounding, seed, step, first, skipping))
    assert weight._version > version
    return numbers((weight, inverse_norm, states))


def numbers(given: tuple) -> list[torch.Tensor]:
    weight, inverse_norm, states = given
    return [weight, inverse_norm, *[t for name, state in states.items() for t in state.tensors(name).values()]]


def both(interpreter, given: tuple, index: slice | torch.Tensor, gradient: torch.Tensor, *rest, **options) -> tuple:
    """By the kernel, and by the plain path."""
    got = interpreter(updated, given, index, gradient, *rest, **options, by_kernel=True)
    return got, updated(given, index, gradient, *rest, **options, by_kernel=False)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
@pytest.mark.parametrize("rows", list(INDEX))
def test_update_is_the_plain_paths(interpreter, dtype, kind, rounding, rows):
    given, index = table(24, dtype, kind, rounding), INDEX[rows]
    gradient = torch.randn(len(given[0][index]), 24)
    got, expected = both(interpreter, given, index, gradient, KINDS[kind][0], rounding)
    for mine, theirs in zip((got[0], *got[2:]), (expected[0], *expected[2:]), strict=True):
        assert_same_roundings(mine, theirs)
    torch.testing.assert_close(got[1], got[0].double().norm(dim=1).reciprocal().float(), rtol=1e-6, atol=0)
    rest = torch.ones(ROWS, dtype=torch.bool)
    rest[index] = False
    for before, after in zip(numbers(given), got, strict=True):
        assert torch.equal(before[rest], after[rest])


@pytest.mark.parametrize("dim", [1, 3, 64, 700, 1024])
@pytest.mark.parametrize("name", ["sgd", pytest.param("adamw", marks=pytest.mark.exhaustive)])
def test_any_width(interpreter, dim, name):
    given, rule = table(dim, BF16, LOW[name]), KINDS[LOW[name]][0]
    got, expected = both(interpreter, given, INDEX["range"], torch.randn(33, dim), rule)
    # sums over a row may differ in their last place, and very rarely lead to the other neighbour
    for mine, theirs in zip(got, expected, strict=True):
        if mine.dim() == 2:
            assert (mine != theirs).float().mean() < 1e-3
    assert relative_error(got[0], expected[0]) < 1e-4


@pytest.mark.parametrize("first", [0, 2**31 - 20, 2**32 - 20, 2**40])
@pytest.mark.parametrize(("seed", "step"), [(0, 1), (2**31 + 3, 10**6)])
@pytest.mark.parametrize("name", LOW)
def test_bits_are_those_of_random_bits(interpreter, name, first, seed, step):
    """Half of all roundings would differ, were the bits others."""
    given, options = table(16, BF16, LOW[name]), {"seed": seed, "step": step, "first": first}
    got, expected = both(interpreter, given, INDEX["range"], torch.randn(33, 16), KINDS[LOW[name]][0], **options)
    for mine, theirs in zip(got, expected, strict=True):
        if mine.dim() == 2:
            assert_same_roundings(mine, theirs)


@pytest.mark.parametrize("rows", list(INDEX))
def test_a_skipped_update_leaves_every_bit(interpreter, rows):
    given, index = table(24, BF16, LOW["adamw"]), INDEX[rows]
    gradient = torch.full((len(given[0][index]), 24), torch.nan)
    assert same(numbers(given), interpreter(updated, given, index, gradient, ADAMW, by_kernel=True, skip=1.0))
    gradient = torch.randn(gradient.shape)
    assert same(
        *(interpreter(updated, given, index, gradient, ADAMW, by_kernel=True, skip=flag) for flag in (0.0, None))
    )


@pytest.mark.parametrize("step", [1, 3, 10**6])
@pytest.mark.parametrize("beta1", [0.0, 0.3, 0.9])
def test_adamw_at_any_step_and_decay_of_the_moments(interpreter, step, beta1):
    """1 − β₂ᵗ spans 1e-3 to 1: taken of a float32 β₂, it would be off in the fifth digit."""
    rule = AdamWRule(lr=1e-2, beta1=beta1, beta2=0.999, eps=1e-6, weight_decay=0.0, step=step)
    got, expected = both(interpreter, table(24, F32, "adamw float32"), INDEX["range"], torch.randn(33, 24), rule)
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-6, atol=1e-7)


def far_update(name: str, row: int, dim: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Rows around element 2³¹ of a table whose memory is asked for but, for the most part, never touched."""
    rule, dtypes = KINDS[LOW[name]]
    around, states = slice(row - 2, row + 2), {}
    weight, inverse_norm = torch.empty(row + 2, dim, dtype=BF16), torch.empty(row + 2)
    weight[around], inverse_norm[around] = 1.0, dim**-0.5
    for table_name, dtype in dtypes.items():
        scale = torch.empty(row + 2) if dtype == I8 else None
        states[table_name] = RowState.over(torch.empty(row + 2, dim, dtype=dtype), scale, "stochastic")
        for values in states[table_name].tensors("").values():
            values[around] = 0
    before = weight[around].clone()
    gradient = torch.randn(2, dim, generator=torch.Generator().manual_seed(0))
    chunk = Chunk(0, 2, torch.tensor([row - 1, row]), ClassRows(weight, inverse_norm))
    update_rows(chunk, gradient, states, Update(rule, 1.0, "stochastic", 0, 1, 0))
    return before, [weight[around].clone(), inverse_norm[around].clone(), *[s.values[around] for s in states.values()]]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", LOW)
def test_rows_beyond_element_2_to_the_31(interpreter, name):
    before, (weight, inverse_norm, first, *second) = interpreter(far_update, name, 2**31 // 512, 512)
    for row in (1, 2):
        assert not torch.equal(weight[row], before[row])
        assert inverse_norm[row] == pytest.approx(1 / weight[row].float().norm().item(), rel=1e-5)
        assert first[row].abs().max() == 127
        assert all((values[row] > 0).float().mean() > 0.99 for values in second)
    for neighbour in (0, 3):
        assert torch.equal(weight[neighbour], before[neighbour])
        assert not any(values[neighbour].any() for values in (first, *second))


OPTIMIZERS = {
    "sgd": lambda head: plsc.HeadSGD(head, lr=0.1, momentum=0.9, weight_decay=1e-2),
    "adamw": lambda head: plsc.HeadAdamW(head, lr=1e-2, weight_decay=0.1),
}


def steps(name: str, dtype: torch.dtype, state: torch.dtype, count: int, **options: object) -> dict:
    """Some steps of a head over made-up data: the last loss and gradient, and the rows after them."""
    generator = torch.Generator().manual_seed(1)
    head = plsc.ShardedHead(32, 53, weight_dtype=dtype, momentum_dtype=state, chunk_classes=32, **options)
    with torch.no_grad():
        head.weight.copy_(torch.randn(head.weight.shape, generator=generator))
    initial = head.weight.detach().clone()
    optimizer = OPTIMIZERS[name](head)
    x, y = torch.randn(9, 32, generator=generator), torch.randint(53, (9,), generator=generator)
    for _ in range(count):
        mine = x.clone().requires_grad_()
        loss = head(mine, y)
        loss.backward()
        optimizer.step()
    return {
        "x": x,
        "y": y,
        "initial": initial,
        "loss": loss.detach(),
        "gradient": mine.grad,
        "weight": head.weight.detach(),
        "norms": head.inverse_norms() * head.weight.detach().norm(dim=1, dtype=torch.float32),
        "updater": optimizer._updater.__name__,
    }


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_agree_with_the_oracle(interpreter, name):
    got = interpreter(steps, name, F32, F32, 3)
    assert got["updater"] == "update_rows"
    weight, x = got["initial"].double().requires_grad_(), got["x"].double().requires_grad_()
    optimizer = {
        "sgd": lambda: torch.optim.SGD([weight], lr=0.1, momentum=0.9, weight_decay=1e-2),
        "adamw": lambda: torch.optim.AdamW([weight], lr=1e-2, weight_decay=0.1),
    }[name]()
    for _ in range(3):
        optimizer.zero_grad()
        x.grad = None
        loss = Oracle("arcface", parameters={"m": 0.5}).loss(x, got["y"], weight)
        loss.backward()
        optimizer.step()
    assert relative_error(got["loss"], loss) < 2e-6
    assert relative_error(got["gradient"], x.grad) < 5e-5
    initial = got["initial"].double()
    assert relative_error(got["weight"].double() - initial, weight - initial) < 1e-4
    torch.testing.assert_close(got["norms"], torch.ones(53))


@pytest.mark.parametrize("sample_rate", [1.0, 0.3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_low_precision_steps_agree_with_those_without_kernels(interpreter, name, sample_rate):
    kinds = (name, BF16, I8, 3)
    got, expected = interpreter(steps, *kinds, sample_rate=sample_rate), steps(*kinds, sample_rate=sample_rate)
    assert got["updater"] == "update_rows"
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
                (triton_update, "rule_arguments"),
            )
        }
        steps("sgd", F32, F32, 1, **options)
    return [name for name, function in watched.items() if function.called]


def test_heads_take_the_kernels_where_they_can(interpreter):
    assert interpreter(path_taken) == ["first_pass", "second_pass", "rule_arguments"]
    assert interpreter(path_taken, centers=3) == ["first_pass", "second_pass", "rule_arguments"]
    assert interpreter(path_taken, margin=plsc.ArcFace(s=100.0)) == ["rule_arguments"]  # needs a maximum taken off
    assert interpreter(path_taken, margin=plsc.CurricularFace()) == ["rule_arguments"]


def norms_found_again(dtype: torch.dtype) -> bool:
    """Whether norms that steps left are those that would be taken of the stored rows, bit for bit."""
    head = plsc.ShardedHead(512, 300, weight_dtype=dtype, momentum_dtype=I8)
    optimizer = plsc.HeadSGD(head, lr=0.1, momentum=0.9)
    for _ in range(2):
        head(torch.randn(4, 512), torch.randint(300, (4,))).backward()
        optimizer.step()
    left = head.inverse_norms().clone()
    with torch.no_grad():
        head.weight.mul_(1)  # noticed: norms are taken again
    return torch.equal(left, head.inverse_norms())


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_resumed_run_finds_the_norms_that_its_updates_left(interpreter, dtype):
    assert interpreter(norms_found_again, dtype)
    assert norms_found_again(dtype)


def skipped_step() -> bool:
    head = plsc.ShardedHead(16, 23, weight_dtype=BF16, momentum_dtype=I8)
    optimizer = plsc.HeadSGD(head, lr=0.1, momentum=0.9)
    x, y = torch.randn(6, 16), torch.randint(23, (6,))
    head(x.requires_grad_(), y).backward()
    optimizer.step()
    before = everything(head, optimizer)
    head(x, y).backward()
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.step()
    return optimizer.skipped and same(everything(head, optimizer), before)


def test_a_found_inf_step_leaves_every_bit(interpreter):
    assert interpreter(skipped_step)


def placed(placement: str, sample_rate: float) -> list[torch.Tensor]:
    """Weights, norms and momentum after two steps of a head whose rows are copied to compute with them, or not."""
    generator = torch.Generator().manual_seed(0)
    head = plsc.ShardedHead(
        32,
        50,
        placement=placement,
        weight_dtype=BF16,
        momentum_dtype=I8,
        chunk_classes=16,
        sample_rate=sample_rate,
        fp32_precision="ieee",
    )
    optimizer = plsc.HeadSGD(head, lr=0.1, momentum=0.9)
    for _ in range(2):
        head(torch.randn(6, 32, generator=generator), torch.arange(6) * 8).backward()
        optimizer.step()
    return everything(head, optimizer)


@pytest.mark.slow
@pytest.mark.parametrize("sample_rate", [1.0, 0.3])
def test_rows_in_a_file_take_the_same_steps(interpreter, tmp_path, sample_rate):
    resident = interpreter(placed, "device", sample_rate)
    copied = interpreter(placed, f"mmap:{tmp_path / 'rows'}", sample_rate)
    for mine, theirs in zip(copied, resident, strict=True):
        assert (mine != theirs).float().mean() < 1e-2  # sums over classes group otherwise
        assert relative_error(mine, theirs) < 1e-3
