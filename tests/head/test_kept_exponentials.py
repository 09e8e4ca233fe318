"""Steps whose second pass takes the exponentials that the first one kept: against the oracle, and what keeps none."""

import os
import weakref
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import Oracle, relative_error
from support.head_problems import (
    LIMIT,
    ONE,
    assert_equal_steps,
    dense_steps,
    make_head,
    make_problem,
    sharded_steps,
)

import plsc
from plsc.errors import UsageError
from plsc.head.backends.kept_exponentials import KeptExponentials, KeptSecondPass, kept_classes
from plsc.head.backends.self_check import Shard, check_passes, check_update
from plsc.head.backends.triton_backend import TritonBackend
from plsc.head.update_rules import SgdRule, UpdateKind
from plsc.parallel import Mesh

ARC = Oracle("arcface", parameters={"m": 0.5})
ALL = 1 << 20  # bytes: more than any problem here takes
CLASSES, BATCH = 53, 16


def kept_steps(mesh: Mesh, *arguments: Any, **options: Any) -> tuple[list, set[bool]]:
    """:func:`sharded_steps`, and for which chunks of second passes exponentials had been kept."""
    kept, whole = set(), KeptSecondPass.gradient

    def noted(self, chunk):
        gradient = whole(self, chunk)
        kept.add(gradient is not None)
        return gradient

    with patch.object(KeptSecondPass, "gradient", noted):
        return sharded_steps(mesh, *arguments, backend="torch", chunk_classes=8, **options), kept


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
@pytest.mark.parametrize(
    ("world", "sizes", "head_ranks"), [(1, [16], None), (3, [9, 0, 7], None), (2, [8, 8], 1)], ids=str
)
def test_steps_are_the_oracles(ranks, dtype, world, sizes, head_ranks):
    problem = make_problem(CLASSES, BATCH, extreme=True)
    problem = (problem[0].to(dtype).double(), problem[1].to(dtype).double(), problem[2])
    groups = {} if head_ranks is None else {"head_ranks": head_ranks}
    options = {"weight_dtype": dtype, "momentum_dtype": dtype, "exponentials_memory": ALL, **groups}
    got = ranks(world, kept_steps, plsc.ArcFace(), problem, sizes, 4, **options)
    assert [kept for _, kept in got] == [{True}] * world
    assert_equal_steps([steps for steps, _ in got], dense_steps(ARC, problem, 4), problem[0], LIMIT[dtype])


@settings(max_examples=30)
@given(st.integers(0, CLASSES * BATCH * 8 + 100), st.integers(1, 60), st.integers(1, 60))
def test_any_part_may_be_kept_and_chunks_may_differ(memory, first, second):
    """A chunk of pass 2 is taken by exponentials only where all of it was kept; the gradient is one."""
    head, inputs = passed(memory, first)
    gradient = torch.cat([each.clone() for _, each in head.backend.second_pass(replace(inputs, chunk_size=second))])
    _, want = passed(0, CLASSES)
    (whole,) = head.backend.second_pass(want)
    assert not want.exponentials
    assert relative_error(gradient, whole[1]) < 1e-13
    held = sum(len(kept.weights) for kept in inputs.exponentials)
    assert held == kept_classes(memory, BATCH * 8, CLASSES, first)
    assert held * BATCH * 8 <= memory
    assert held in (0, CLASSES) or held % first == 0


def passed(memory: int, chunk: int) -> tuple[plsc.ShardedHead, Any]:
    """A float64 head behind a forward and backward, and the inputs of pass 2."""
    problem = make_problem(CLASSES, BATCH)
    head = make_head(ONE, problem, exponentials_memory=memory, chunk_classes=chunk)
    plsc.HeadSGD(head)
    head(problem[1].clone().requires_grad_(), problem[2]).backward()
    return head, head.softmax._pass_inputs(head.softmax.pending.batches, None)


@pytest.mark.parametrize("sample_rate", [1.0, 0.4])
@pytest.mark.parametrize("update", ["fused", "autograd"])
def test_accumulated_and_sampled_steps_are_those_without(sample_rate, update):
    """Batches that wait together are summed; of sampled classes each has others, and the scores are made again."""
    assert_same(accumulated(ALL, sample_rate, update), accumulated(0, sample_rate, update))


def accumulated(memory: int, sample_rate: float, update: str) -> list[torch.Tensor]:
    """Two steps, of two batches and of one: losses, gradients and the table."""
    problem, found = make_problem(CLASSES, 2 * BATCH), []
    options = {"sample_rate": sample_rate, "update": update, "chunk_classes": 8}  # the union has more than each of them
    head = make_head(ONE, problem, exponentials_memory=memory, **options)
    optimizer = (
        plsc.HeadSGD(head, lr=0.2, momentum=0.9)
        if update == "fused"
        else torch.optim.SGD(head.parameters(), 0.2, momentum=0.9)
    )
    for batches in (2, 1):
        optimizer.zero_grad()
        for number in range(batches):
            x = problem[1][number::2].clone().requires_grad_()
            loss = head(x, problem[2][number::2]) * (0.5 + number)
            loss.backward()
            found += [loss.detach(), x.grad]
        optimizer.step()
    return [*found, head.weight.detach().clone()]


def assert_same(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    assert len(got) == len(want)
    assert all(relative_error(one, other) < 1e-12 for one, other in zip(got, want, strict=True))


def test_the_gradients_norm_is_that_without():
    norms = []
    for memory in (ALL, 0):
        head, _ = passed(memory, 8)
        optimizer = plsc.HeadSGD(head)
        norms.append(float(optimizer.gradient_norm()))
    assert norms[0] == pytest.approx(norms[1], rel=1e-12)


def test_a_loss_without_weight_moves_nothing():
    """Its scale is 0, by which the pull of its targets is divided."""
    problem = make_problem(CLASSES, BATCH)
    head = make_head(ONE, problem, exponentials_memory=ALL)
    optimizer = plsc.HeadSGD(head, lr=0.2)
    (head(problem[1].clone().requires_grad_(), problem[2]) * 0.0).backward()
    optimizer.step()
    assert torch.equal(head.weight.detach(), problem[0])


def rows_gradient(memory: int, dtype: torch.dtype) -> torch.Tensor:
    """That of many rows by many samples, as pass 2 gives it, in float64."""
    problem = tuple(each.bfloat16().double() if each.is_floating_point() else each for each in make_problem(400, 64))
    options = {"weight_dtype": dtype, "momentum_dtype": None, "backend": "torch"}
    head = make_head(ONE, problem, exponentials_memory=memory, **options)
    plsc.HeadSGD(head, momentum=0.0)
    head(problem[1].clone().requires_grad_(), problem[2]).backward()
    return torch.cat([each.double() for _, each in head.softmax.gradient_chunks(head.softmax.pending.batches)])


def test_bfloat16_rounds_once_more():
    """Both factors of the product are rounded, as without; here the samples' is not exact before."""
    want = rows_gradient(0, torch.float64)
    without, kept = (relative_error(rows_gradient(memory, torch.bfloat16), want) for memory in (0, ALL))
    assert without < kept < 2 * without < 1e-2


@pytest.mark.parametrize(
    ("batch", "options", "kept"),
    [
        (16, {}, CLASSES),
        (16, {"exponentials_memory": 0}, 0),
        (16, {"exponentials_memory": None}, 0),
        (16, {"exponentials_memory": "1KiB"}, 8),
        (15, {}, 0),
        (16, {"centers": 2}, 0),
        (16, {"margin": plsc.CurricularFace()}, 0),
        (16, {"margin": plsc.ArcFace(s=800.0)}, 0),  # needs a maximum taken off
        (16, {"negative_filter": 0.5}, 0),
    ],
    ids=str,
)
def test_what_is_kept_waits_for_the_update_alone(batch, options, kept):
    options = {"exponentials_memory": ALL, "chunk_classes": 8, **options}
    problem = make_problem(CLASSES, batch, centers=options.get("centers", 1))
    head = make_head(ONE, problem, options.pop("margin", None), **options)
    optimizer = plsc.HeadSGD(head, lr=0.1)
    head(problem[1].clone().requires_grad_(), problem[2]).backward()
    (waiting,) = head.softmax.pending.batches
    assert (0 if waiting.exponentials is None else len(waiting.exponentials.weights)) == kept
    optimizer.step()
    assert not head.softmax.pending.batches
    head.eval()
    with patch.object(KeptExponentials, "fitting", side_effect=AssertionError("an evaluation keeps nothing")):
        head(problem[1].clone().requires_grad_(), problem[2]).backward()


@pytest.mark.parametrize("update", ["fused", "autograd"])
def test_a_loss_that_lives_on_holds_no_exponentials(update):
    """A loop has its last loss while the next batch's forward runs: memory would hold two batches' exponentials."""
    problem, made = make_problem(CLASSES, BATCH), []
    head = make_head(ONE, problem, exponentials_memory=ALL, update=update)
    optimizer = plsc.HeadSGD(head) if update == "fused" else torch.optim.SGD(head.parameters(), 0.1)
    fitting = KeptExponentials.fitting

    def noted(*arguments):
        kept = fitting(*arguments)
        made.append(weakref.ref(kept.weights))
        return kept

    with patch.object(KeptExponentials, "fitting", noted):
        loss = head(problem[1].clone().requires_grad_(), problem[2])
    loss.backward()
    optimizer.step()
    assert loss.grad_fn is not None
    assert [each() for each in made] == [None]


@pytest.mark.parametrize("amount", ["8 apples", "", "-1GB", -5, 1.5, True])
def test_what_is_no_amount_is_refused(amount):
    with pytest.raises(UsageError, match="exponentials_memory"):
        plsc.ShardedHead(8, 10, exponentials_memory=amount)


# Triton's kernels ----------------------------------------------------------------------------------------------------


def deviations(dtype: torch.dtype, listed: bool, memory: int) -> list[str]:
    """Of passes with stored weights, whose exponentials are kept."""
    from plsc.head.backends import HeadShape, select_backend

    shard = Shard(torch.device("cpu"), dtype, 64, classes=75, batch=24, chunk=32, listed=listed)
    backend = select_backend(HeadShape(shard.device, dtype, 64, 1, plsc.ArcFace()), "triton")
    assert isinstance(backend, TritonBackend)
    backend = backend.in_shape(stored=True)
    backend.exponentials_memory = memory
    return [str(each) for each in check_passes(backend, shard) if not each.ok]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("listed", "memory"), [(False, ALL), (True, ALL), (False, 4000)])
def test_passes_by_kernels_agree_with_float64(interpreter, dtype, listed, memory):
    assert interpreter(deviations, dtype, listed, memory) == []


def update_deviations(dtype: torch.dtype, state: torch.dtype, listed: bool) -> list[str]:
    """Of the update by gradients that are times 1/norms already."""
    backend = TritonBackend("test", dim=64, with_passes=False)
    kind = UpdateKind(SgdRule(0.1, 0.9, 5e-4, nesterov=False), {"momentum": state}, "stochastic")
    shard = Shard(torch.device("cpu"), dtype, 64, classes=120, batch=8, listed=listed)
    return [str(each) for each in check_update(backend, shard, kind, is_by_rows=True) if not each.ok]


@pytest.mark.parametrize(("dtype", "state"), [(torch.float32, torch.float32), (torch.bfloat16, torch.int8)])
def test_the_update_takes_gradients_by_rows(interpreter, dtype, state):
    assert interpreter(update_deviations, dtype, state, listed=True) == []


def interpreted_steps(memory: int) -> list[torch.Tensor]:
    """Steps in which the kernel updates by what was kept of the first chunks, and by unit rows behind them."""
    from plsc.head.backends import triton_backend

    ways: list[bool] = []
    whole = triton_backend.update_rows

    def noted(*arguments, **options):
        ways.append(options.get("is_by_rows", False))
        return whole(*arguments, **options)

    problem = make_problem(CLASSES, BATCH)
    with patch.dict(os.environ, {"PLSC_HEAD_SHAPE": "stored"}), ExitStack() as patches:
        if memory:
            patches.enter_context(patch.object(triton_backend, "update_rows", noted))
        options = {"weight_dtype": "float32", "momentum_dtype": "float32", "chunk_classes": 32}
        head = make_head(ONE, problem, exponentials_memory=memory, **options)
        optimizer = plsc.HeadSGD(head, lr=0.2, momentum=0.9)
        for _ in range(2):
            head(problem[1].float().requires_grad_(), problem[2]).backward()
            optimizer.step()
    assert ways == ([True, False] * 2 if memory else [])
    return [head.weight.detach().clone(), head.inverse_norms().clone()]


def test_steps_by_kernels_are_those_without(interpreter):
    got, want = interpreter(interpreted_steps, 32 * BATCH * 4), interpreter(interpreted_steps, 0)
    assert relative_error(got[0], want[0]) < 1e-6
    assert relative_error(got[1], want[1]) < 1e-6
