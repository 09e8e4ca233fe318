"""Frozen rows keep their bits, and the others learn as the dense float64 oracle says, in whose softmax all are."""

import numpy as np
import pytest
import torch
from reference import Oracle, relative_error
from support.head_problems import DECAY, LOW, LR, MOMENTUM, ONE, batch_of, everything, make_head, make_problem, same

import plsc
from plsc.errors import DataError, UsageError

ARC = plsc.ArcFace(s=16.0, m=0.3)
ORACLE = Oracle("arcface", s=16.0, parameters={"m": 0.3})
FROZEN = [0, 1, 2, 19, 20, 40, 52]


def steps(mesh, problem, sizes, kind, frozen, options):
    """The classes here, and the table, norms and state at the start, after 2 steps, and of frozen rows after 4.

    They are frozen for the last two alone: state has momentum by then, which must neither move nor decay.
    """
    head = make_head(mesh, problem, ARC, frozen_rows=frozen, **options)
    held, head.softmax.table.kept = head.softmax.table.kept, None
    adam = {"lr": 0.01, "weight_decay": 0.1}
    sgd = {"lr": LR, "momentum": MOMENTUM, "weight_decay": DECAY}
    optimizer = plsc.HeadAdamW(head, **adam) if kind == "adamw" else plsc.HeadSGD(head, **sgd)
    found = []
    for step in range(4):
        if step == 2:
            head.softmax.table.kept = held
            found.append(snapshot(head, optimizer))
        x, y = batch_of(problem, step, mesh, sizes)
        x = x.to(head.weight.dtype).requires_grad_()
        head(x, y).backward()
        optimizer.step()
    found.append(snapshot(head, optimizer))
    return head.class_range, *found


def snapshot(head, optimizer):
    optimizer.make_replicas_equal()
    state = [shard.blocks[0].local.clone() for shard in optimizer.sharded_state().values()]
    return [head.weight.detach().clone(), head.inverse_norms().clone(), *state]


@pytest.mark.parametrize(
    ("world", "kind", "options"),
    [
        (1, "sgd", {"weight_dtype": torch.float32, "momentum_dtype": torch.float32}),
        (2, "sgd", {**LOW}),
        (3, "adamw", {"centers": 2, **LOW, "placement": "host"}),
        (2, "adamw", {"sample_rate": 0.5}),
        (2, "sgd", {"placement": "mmap", "sample_rate": 0.3, **LOW}),
    ],
    ids=["float32", "int8", "AdamW of 2 centres", "sampled", "mapped"],
)
def test_frozen_rows_keep_their_bits(ranks, tmp_path, world, kind, options):
    if options.get("placement") == "mmap":
        options = {**options, "placement": f"mmap:{tmp_path / 'table'}"}
    centers = options.get("centers", 1)
    problem = make_problem(centers=centers)
    sizes = {1: [12], 2: [9, 3], 3: [7, 0, 5]}[world]
    for (first, stop), before, after in ranks(world, steps, problem, sizes, kind, FROZEN, options):
        mask = torch.zeros(53, dtype=torch.bool)
        mask[FROZEN] = True
        mask = mask[first:stop].repeat_interleave(centers)
        assert same([table[mask] for table in before], [table[mask] for table in after])
        moved = (before[0] != after[0]).any(1)
        assert moved[~mask].sum() > 0.25 * len(mask)


def test_replicas_that_are_averaged_keep_frozen_rows(ranks):
    options = {**LOW, "averaging_period": 2}
    for _, before, after in ranks(3, steps, make_problem(), [5, 3, 4], "sgd", "0:20", options, head_ranks=1):
        assert same([table[:20] for table in before], [table[:20] for table in after])
        assert not torch.equal(before[0][20:], after[0][20:])


@pytest.mark.parametrize("frozen", ["all", "3:30", "file"])
def test_other_rows_learn_as_if_all_did(ranks, tmp_path, frozen):
    problem = make_problem()
    rows = {"all": range(53), "3:30": range(3, 30), "file": FROZEN}[frozen]
    np.save(tmp_path / "classes.npy", np.array(list(rows), dtype=np.int32))
    value = str(tmp_path / "classes.npy") if frozen == "file" else frozen
    got = ranks(2, trained, problem, [9, 3], value)
    weight = problem[0].clone().requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    norms = []
    for step in range(3):
        x, y = batch_of(problem, step, ONE, [12])
        optimizer.zero_grad()
        loss = ORACLE.loss(x, y, weight)
        loss.backward()
        weight.grad[list(rows)] = 0
        norms.append(weight.grad.norm())
        optimizer.step()
        with torch.no_grad():
            weight[list(rows)] = problem[0][list(rows)]  # of its weight decay
    table = torch.cat([rank[0] for rank in got])
    assert torch.equal(table[list(rows)], problem[0][list(rows)])
    assert relative_error(table, weight) < 1e-11
    for _, losses, rank_norms in got:
        assert relative_error(losses[-1], loss) < 1e-11
        assert relative_error(torch.stack(rank_norms), torch.stack(norms)) < 1e-10


def trained(mesh, problem, sizes, frozen):
    head = make_head(mesh, problem, ARC, frozen_rows=frozen)
    optimizer = plsc.HeadSGD(head, lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    losses, norms = [], []
    for step in range(3):
        x, y = batch_of(problem, step, mesh, sizes)
        loss = head(x.requires_grad_(), y)
        loss.backward()
        norms.append(optimizer.gradient_norm())
        optimizer.step()
        losses.append(loss.detach())
    return head.weight.detach().clone(), losses, norms


@pytest.mark.parametrize(
    ("value", "error", "said"),
    [
        ("5:12", UsageError, "no range of the head's 11 classes"),
        ("none.npy", UsageError, "there is no frozen_rows = none.npy"),
        ([1, 11], UsageError, "class 11, which lies outside"),
        ([0.5], UsageError, "a list of them"),
        ("bad.npy", DataError, "is no .npy file"),
    ],
)
def test_what_is_refused(tmp_path, monkeypatch, value, error, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.npy").write_bytes(b"no array")
    with pytest.raises(error, match=said):
        plsc.ShardedHead(8, 11, frozen_rows=value)
    with pytest.raises(UsageError, match='give update="fused"'):
        plsc.ShardedHead(8, 11, frozen_rows="all", update="autograd")


def interpreted(frozen):
    """The table, norms and momentum of a head whose passes and updates are Triton's, before and after two steps."""
    head = plsc.ShardedHead(32, 50, **LOW, chunk_classes=16, frozen_rows=frozen)
    optimizer = plsc.HeadSGD(head, lr=0.1, momentum=0.9, weight_decay=0.1)
    assert head.backend.name == "triton"
    generator, before = torch.Generator().manual_seed(0), everything(head, optimizer)
    for _ in range(2):
        head(torch.randn(6, 32, generator=generator), torch.arange(6) * 8).backward()
        optimizer.step()
    return before, everything(head, optimizer)


@pytest.mark.exhaustive
def test_tritons_updates_leave_frozen_rows(interpreter):
    before, after = interpreter(interpreted, "10:30")
    _, free = interpreter(interpreted, None)
    for old, new, expected in zip(before, after, free, strict=True):
        assert torch.equal(new[10:30], old[10:30])
        assert relative_error(new[30:], expected[30:]) < 2e-2  # in the second step others' rows are not what they were
        assert not torch.equal(new[30:], old[30:])


def test_a_table_that_no_step_changes_keeps_no_exponentials():
    problem = make_problem(53, 16)
    head = make_head(ONE, problem, exponentials_memory="1MiB", frozen_rows="all")
    head(problem[1].clone().requires_grad_(), problem[2]).backward()
    assert [each.exponentials for each in head.softmax.pending.batches] == [None]
