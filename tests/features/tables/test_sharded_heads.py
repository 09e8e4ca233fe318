"""Several class tables over one backbone: steps equal those of separate dense heads in float64."""

import pytest
import torch
from reference import MultiLabelOracle, Oracle, relative_error
from support.head_problems import HIGH, LR, ONE, make_problem

import plsc
from plsc.errors import UsageError
from plsc.optim import GradScaler, clip_grad_norm_
from plsc.parallel.collectives import all_gather_rows, all_reduce_sum

WIDTH, CLIP = 24, 0.5
WEIGHTS = {"faces": 1.0, "scenes": 0.5, "letters": 2.0}
CLASSES = {"faces": 53, "scenes": 31, "letters": 17}
SAMPLES = {"faces": 12, "scenes": 7, "letters": 4}
ORACLES = {
    "faces": Oracle("arcface", s=16.0, parameters={"m": 0.3}),
    "scenes": MultiLabelOracle(Oracle("cosface", s=16.0, parameters={"m": 0.2}), "kept"),
    "letters": Oracle("softmax", s=16.0),
}


def problem(name):
    """(Rows, inputs of the trunk, labels) of a table; "scenes" has three labels a sample."""
    weight, x, y = make_problem(CLASSES[name], SAMPLES[name], WIDTH, seed=len(name))
    if name == "scenes":
        y = torch.stack([y, (y + 3) % 31, (y + 7) % 31], 1)
        y[1, 1:] = -1
    return weight, x, y


def trunk():
    return torch.eye(WIDTH, dtype=torch.float64) + 0.1 * make_problem(WIDTH, 1, WIDTH)[0]


def shares(count, world):
    """Samples of each rank; the last one has none."""
    return [count] if world == 1 else [count - 2 * (world - 2), *[2] * (world - 2), 0]


def sharded(mesh, steps):
    options = {
        "faces": {"margin": plsc.ArcFace(s=16.0, m=0.3)},
        "scenes": {"margin": plsc.CosFace(s=16.0, m=0.2), "positives": "kept", "placement": "host"},
        "letters": {"margin": plsc.Softmax(s=16.0)},
    }
    heads = {name: plsc.ShardedHead(WIDTH, CLASSES[name], mesh, **HIGH, **own) for name, own in options.items()}
    for name, head in heads.items():
        with torch.no_grad():
            head.weight.copy_(problem(name)[0][slice(*head.class_range)])
    together = plsc.ShardedHeads(heads, {"scenes": 0.5, "letters": 2.0})
    optimizers = [plsc.HeadSGD(head, LR, momentum=0.9, weight_decay=5e-4) for head in heads.values()]
    net = trunk().requires_grad_()
    backbone, scaler = torch.optim.SGD([net], LR), GradScaler(mesh, enabled=False)
    found = []
    for _ in range(steps):
        batches = {}
        for name in reversed(heads):  # heads exchange in their own order
            _, x, y = problem(name)
            sizes = shares(len(x), mesh.world_size)
            batches[name] = (x.split(sizes)[mesh.rank] @ net, y.split(sizes)[mesh.rank])
        loss = together(batches)
        loss.backward()
        net.grad = all_reduce_sum(net.grad, mesh) / mesh.world_size
        norm = clip_grad_norm_([net], CLIP, optimizers)
        scaler.unscale_all(backbone, optimizers)
        scaler.step_both(backbone, optimizers)
        net.grad = None
        tables = {name: all_gather_rows(head.weight.detach(), mesh).clone() for name, head in heads.items()}
        found.append((loss.detach(), norm.detach(), net.detach().clone(), tables))
    return found


def dense(steps):
    net = trunk().requires_grad_()
    rows = {name: problem(name)[0].clone().requires_grad_() for name in CLASSES}
    backbone = torch.optim.SGD([net], LR)
    tables = torch.optim.SGD(list(rows.values()), LR, momentum=0.9, weight_decay=5e-4)
    found = []
    for _ in range(steps):
        losses = {name: ORACLES[name].loss(problem(name)[1] @ net, problem(name)[2], rows[name]) for name in rows}
        loss = sum(WEIGHTS[name] * each for name, each in losses.items())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_([net, *rows.values()], CLIP)
        backbone.step()
        tables.step()
        backbone.zero_grad()
        tables.zero_grad()
        found.append((loss.detach(), norm, net.detach().clone(), {n: w.detach().clone() for n, w in rows.items()}))
    return found


@pytest.mark.parametrize("world", [1, 2, 3])
def test_tables_over_one_trunk_step_as_separate_dense_heads_do(ranks, world):
    got, want = ranks(world, sharded, 3), dense(3)
    for step, (loss, norm, net, tables) in enumerate(want):
        for rank in got:
            assert relative_error(rank[step][0], loss) < 1e-11
            assert relative_error(rank[step][1], norm) < 1e-6  # torch adds 1e-6 to a norm, and so does ours
            assert relative_error(rank[step][2] - trunk(), net - trunk()) < 1e-9
            for name, rows in tables.items():
                assert relative_error(rank[step][3][name] - problem(name)[0], rows - problem(name)[0]) < 1e-9


def test_a_table_without_a_batch_has_no_loss_and_does_not_move():
    heads = {name: plsc.ShardedHead(8, 5, ONE, **HIGH, seed=seed) for seed, name in enumerate(("a", "b"))}
    together = plsc.ShardedHeads(heads)
    optimizers = [plsc.HeadSGD(head, LR) for head in heads.values()]
    before = {name: head.weight.detach().clone() for name, head in heads.items()}
    x, y = torch.randn(4, 8, dtype=torch.float64), torch.tensor([0, 1, 2, 4])
    assert set(together.losses({"b": (x, y)})) == {"b"}
    together({"b": (x, y)}, sizes={"b": [4]}).backward()
    for optimizer in optimizers:
        optimizer.step()
    assert torch.equal(heads["a"].weight, before["a"])
    assert not torch.equal(heads["b"].weight, before["b"])


def test_what_is_no_set_of_tables_is_refused():
    a, wide = plsc.ShardedHead(8, 5), plsc.ShardedHead(16, 5)
    for heads, weights, message in (
        ({}, None, "at least one head"),
        ({"a": a, "b": wide}, None, "have one width, not 8 and 16"),
        ({"a": a}, {"c": 1.0}, "there is no table 'c'"),
        ({"a": a}, {"a": 0.0}, "has to be positive"),
        ({"train": a}, None, "cannot have this name"),
    ):
        with pytest.raises(UsageError, match=message):
            plsc.ShardedHeads(heads, weights)
    together = plsc.ShardedHeads({"a": a})
    with pytest.raises(UsageError, match="there is no table 'b'"):
        together({"b": (torch.randn(1, 8), torch.tensor([0]))})
    with pytest.raises(UsageError, match="no table has a batch"):
        together({})
