"""What the head notices, refuses, keeps and resumes."""

from unittest.mock import patch

import numpy as np
import pytest
import torch
from reference import Oracle
from support.head_problems import LOW, ONE, everything, same

import plsc
from plsc.errors import LabelError, UsageError
from plsc.head import global_batch
from plsc.head.backends.torch_backend import backward_through_normalize
from plsc.head.class_table import class_range
from plsc.optim import GradScaler, HeadState, clip_grad_norm_
from plsc.parallel import Mesh


def some_batch(seed: int = 0, batch: int = 6, dim: int = 16, classes: int = 23) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, dim, generator=generator), torch.randint(classes, (batch,), generator=generator)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("classes", [1, 3, 10, 101])
def test_ranges_cover_all_classes_once(classes, world):
    ranges = [class_range(classes, rank, world) for rank in range(world)]
    assert [c for first, stop in ranges for c in range(first, stop)] == list(range(classes))
    assert max(b - a for a, b in ranges) - min(b - a for a, b in ranges) <= 1


def initial_weight(mesh, classes):
    return plsc.ShardedHead(8, classes, mesh, seed=5).weight.detach()


def test_first_weights_do_not_depend_on_the_world_and_differ_between_classes(ranks):
    whole = initial_weight(ONE, 2500)
    for world in (2, 3):
        assert torch.equal(torch.cat(ranks(world, initial_weight, 2500)), whole)
    assert len(whole.unique(dim=0)) == 2500
    assert whole.std() == pytest.approx(0.01, rel=0.05)


def step_with_sizes(mesh, label, given, on_gpu):
    """The loss where rank 1 has ``label`` and sizes are ``given``, the weights, and whether a step skipped them."""
    head = plsc.ShardedHead(16, 23, mesh)
    optimizer = plsc.HeadSGD(head, lr=0.1)
    before = head.weight.detach().clone()
    x, y = some_batch(batch=4 + mesh.rank)
    if mesh.rank == 1:
        y[2] = label
    with patch.object(global_batch, "is_read_late", lambda labels: on_gpu):
        try:
            loss = head(x, y, [4, 5] if given else None)
        except LabelError as error:
            return str(error)
    loss.backward()
    optimizer.step()
    return loss.item(), head.weight.detach(), optimizer.skipped and torch.equal(head.weight, before)


def test_sizes_that_are_given_save_the_exchange_and_change_nothing(ranks):
    told, asked = ranks(2, step_with_sizes, 3, True, False), ranks(2, step_with_sizes, 3, False, False)
    for (loss, weight, skipped), (other_loss, other_weight, _) in zip(told, asked, strict=True):
        assert loss == other_loss
        assert torch.equal(weight, other_weight)
        assert not skipped


@pytest.mark.parametrize("label", [23, -1])
def test_with_sizes_a_label_out_of_range_on_a_gpu_updates_nothing_on_any_rank(ranks, label):
    for loss, _, skipped in ranks(2, step_with_sizes, label, True, True):
        assert np.isnan(loss)
        assert skipped


@pytest.mark.parametrize("sizes", [[7], [8, 8], []])
def test_sizes_that_are_not_those_of_the_ranks_are_refused(sizes):
    refusal = rf"sizes must be every rank's number of samples.* sizes \[{str(sizes)[1:-1]}\]"
    with pytest.raises(UsageError, match=refusal):
        plsc.ShardedHead(16, 23)(*some_batch(batch=8), sizes)
    with pytest.raises(LabelError, match="rank 0: label 23 lies outside"):
        plsc.ShardedHead(16, 23)(some_batch(batch=1)[0], torch.tensor([23]), [1])


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (torch.randn(4, 15), torch.zeros(4, dtype=torch.long)),
        (torch.randn(4, 16), torch.zeros(3, dtype=torch.long)),
        (torch.randn(4, 16), torch.zeros(4, 101, dtype=torch.long)),
        (torch.randn(4, 16), torch.zeros(4)),
        (torch.zeros(4, 16, dtype=torch.long), torch.zeros(4, dtype=torch.long)),
        (torch.randn(0, 16), torch.zeros(0, dtype=torch.long)),
    ],
)
def test_misshapen_input_is_refused(x, y):
    given = [f"{name} {str(each.dtype)[6:]} {tuple(each.shape)}" for name, each in (("embeddings", x), ("labels", y))]
    with pytest.raises(UsageError) as error:
        plsc.ShardedHead(16, 23)(x, y)
    assert not len(x) or str(error.value).endswith(f", not {' with '.join(given)}")


def refused_shape(mesh):
    x = torch.randn(4, 16 if mesh.rank == 0 else 15)
    with pytest.raises(UsageError) as error:
        plsc.ShardedHead(16, 23, mesh)(x, torch.zeros(4, dtype=torch.long))
    return str(error.value)


def test_every_rank_tells_what_came_to_the_one_that_is_wrong(ranks):
    given = "embeddings float32 (4, 15) with labels int64 (4,)"
    assert ranks(2, refused_shape) == [f"rank 1: embeddings must be (b, 16) and floating point, not {given}"] * 2


def test_rows_written_from_outside_are_noticed():
    x, y = some_batch()
    head, other = plsc.ShardedHead(16, 23), plsc.ShardedHead(16, 23, seed=9)
    head(x, y)
    other(x, y)
    with torch.no_grad():
        head.weight.copy_(other.weight * 7)
    assert torch.allclose(head(x, y), other(x, y))
    head.load_state_dict(plsc.ShardedHead(16, 23, seed=3).state_dict())
    assert torch.allclose(head(x, y), plsc.ShardedHead(16, 23, seed=3)(x, y))


def test_writing_between_loss_and_step_is_refused():
    head = plsc.ShardedHead(16, 23)
    optimizer = plsc.HeadSGD(head, lr=0.1)
    head(*some_batch()).backward()
    with torch.no_grad():
        head.weight.mul_(2)
    with pytest.raises(plsc.PlscError, match="written to"):
        optimizer.step()


@pytest.mark.parametrize("options", [{}, LOW], ids=["f32", "bf16+int8"])
@pytest.mark.parametrize("poison", ["embedding", "gradient"])
def test_a_step_that_is_not_finite_changes_no_bit(options, poison):
    head = plsc.ShardedHead(16, 23, **options)
    optimizer = plsc.HeadSGD(head, lr=0.1, momentum=0.9)
    x, y = some_batch()
    head(x, y).backward()
    optimizer.step()
    before = everything(head, optimizer)
    if poison == "embedding":
        x[3, 3] = float("nan")
    (head(x, y) * (float("inf") if poison == "gradient" else 1)).backward()
    optimizer.step()
    assert optimizer.skipped
    assert same(before, everything(head, optimizer))
    assert optimizer.steps == 1


def test_evaluation_leaves_nothing_to_step_on():
    head = plsc.ShardedHead(16, 23)
    optimizer = plsc.HeadSGD(head, lr=0.1)
    x, y = some_batch()
    before = head.weight.detach().clone()
    with torch.no_grad():
        head(x, y)
    head.eval()
    x.requires_grad_()
    head(x, y).backward()
    assert x.grad.abs().sum() > 0
    optimizer.step()
    assert torch.equal(head.weight, before)


@pytest.mark.parametrize("margin", [plsc.ArcFace(), plsc.CurricularFace(rate=0.0)])
def test_micro_batches_equal_one_large_batch(margin):
    x, y = some_batch(batch=12)
    results = []
    for parts in (1, 3):
        head = plsc.ShardedHead(16, 23, margin=margin, weight_dtype=torch.float64, momentum_dtype=torch.float64)
        optimizer = plsc.HeadSGD(head, lr=0.5, momentum=0.9, weight_decay=0.1)
        for part_x, part_y in zip(x.double().chunk(parts), y.chunk(parts), strict=True):
            (head(part_x, part_y) / parts).backward()
        optimizer.step()
        results.append(head.weight.detach())
    assert torch.allclose(results[0], results[1], rtol=0, atol=1e-13)


def test_sampled_micro_batches_add_their_own_gradients():
    """Each micro-batch's softmax holds its own sample of classes; the step is the sum of both gradients."""
    x, y = some_batch(batch=8)
    head = plsc.ShardedHead(16, 23, sample_rate=0.4, weight_dtype=torch.float64, momentum_dtype=None)
    start = head.weight.detach().clone()
    optimizer = plsc.HeadSGD(head, lr=1.0)
    head(x[:4].double(), y[:4]).backward()
    head(x[4:].double(), y[4:]).backward()
    expected = torch.zeros_like(start)
    for pending in head.softmax.pending.batches:
        for chunk, gradient in head.softmax.gradient_chunks([pending]):
            expected[chunk.index] += backward_through_normalize(gradient, chunk)
    optimizer.step()
    assert torch.allclose(head.weight.detach(), start - expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["sgd", "nesterov", "adamw"])
def test_optimizers_equal_torchs(kind):
    def make(update: str) -> tuple[plsc.ShardedHead, torch.optim.Optimizer]:
        head = plsc.ShardedHead(16, 23, weight_dtype=torch.float64, momentum_dtype=torch.float64, update=update)
        if kind == "adamw":
            options = {"lr": 0.01, "weight_decay": 0.1}
            return head, (
                plsc.HeadAdamW(head, **options) if update == "fused" else torch.optim.AdamW([head.weight], **options)
            )
        options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": kind == "nesterov"}
        return head, (plsc.HeadSGD(head, **options) if update == "fused" else torch.optim.SGD([head.weight], **options))

    pairs = [make("fused"), make("autograd")]
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10) for _, optimizer in pairs]
    for step in range(5):
        x, y = some_batch(step)
        for (head, optimizer), schedule in zip(pairs, schedules, strict=True):
            optimizer.zero_grad()
            head(x.double(), y).backward()
            optimizer.step()
            schedule.step()
    assert torch.allclose(pairs[0][0].weight, pairs[1][0].weight, rtol=0, atol=1e-13)


def clipped(mesh, max_norm, both):
    head = plsc.ShardedHead(16, 23, mesh, weight_dtype=torch.float64, momentum_dtype=None)
    net = torch.nn.Linear(16, 16, bias=False).double()
    torch.nn.init.eye_(net.weight)
    x, y = some_batch(batch=4)
    head(net(x.double()), y).backward()  # every rank has the same samples, and so the average gradient
    optimizer = plsc.HeadSGD(head, lr=1.0)
    start = head.weight.detach().clone()
    norm = clip_grad_norm_(net.parameters(), max_norm, optimizer if both else None)
    optimizer.step()
    return norm, net.weight.grad, head.weight.detach() - start


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize(("world", "head_ranks"), [(3, 0), (2, 1), (4, 2)])
def test_clipping_bounds_the_norm_over_backbone_and_shards(ranks, world, head_ranks, both):
    """Every shard counts once, on however many replicas it lies."""
    got = ranks(world, clipped, 0.5, both, head_ranks=head_ranks)
    alone = clipped(ONE, 0.5, both)
    for norm, gradient, _ in got:
        assert norm.item() == pytest.approx(alone[0].item())
        assert torch.allclose(gradient, alone[1])
    shards = head_ranks or world
    for first in range(0, world, shards):
        table = torch.cat([g[2] for g in got[first : first + shards]])
        assert torch.allclose(table, alone[2], atol=1e-12)
    total = alone[1].square().sum() + (table.square().sum() if both else 0)
    assert total.sqrt().item() == pytest.approx(0.5, rel=1e-4)


def squared_gradient(mesh: Mesh, table: torch.Tensor, x: torch.Tensor, y: torch.Tensor, options: dict) -> float:
    """‖∂loss/∂W‖² by the head's optimizer."""
    head = plsc.ShardedHead(table.shape[1], len(table) // options.get("centers", 1), mesh, **options)
    with torch.no_grad():
        first, stop = (each * head.centers for each in head.class_range)
        head.weight.copy_(table[first:stop])
    optimizer = plsc.HeadSGD(head)
    head(x.chunk(mesh.world_size)[mesh.rank], y.chunk(mesh.world_size)[mesh.rank]).backward()
    before = head.weight.detach().clone(), head.inverse_norms().clone()
    norm = optimizer.gradient_norm()
    assert torch.equal(head.weight, before[0])
    assert torch.equal(head.inverse_norms(), before[1])
    return norm.square().item()


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize(
    ("dtype", "options", "error"),
    [
        (torch.float64, {}, 1e-12),
        (torch.float64, {"centers": 3}, 1e-12),
        (torch.float64, {"sample_rate": 1e-9}, 1e-12),  # positives alone
        (torch.float32, {}, 1e-5),
        (torch.float32, {"backend": "torch"}, 1e-5),
        (torch.bfloat16, {"backend": "torch"}, 2e-2),
    ],
)
@pytest.mark.parametrize("near", [0.0, 3e-3])
def test_the_gradients_norm_is_that_of_the_dense_gradient(ranks, world, dtype, options, error, near):
    """Also where an embedding lies ``near`` its class, and so the gradient by the unit row along the row."""
    generator = torch.Generator().manual_seed(2)
    y, centers = torch.tensor([3, 8, 8, 1, 21, 0]), options.get("centers", 1)
    table = torch.randn(23 * centers, 32, generator=generator).to(dtype)
    x = torch.randn(6, 32, generator=generator).to(dtype)
    if near:
        x = 7 * table[y * centers] + near * x
    weight = table.double().requires_grad_()
    sampled = torch.zeros(23, dtype=torch.bool).index_fill_(0, y, value=True) if "sample_rate" in options else None
    Oracle("arcface", parameters={"m": 0.5}).loss(x.double(), y, weight, centers, sampled).backward()
    given = {"weight_dtype": dtype, "momentum_dtype": dtype, **options}
    for got in ranks(world, squared_gradient, table, x.to(torch.promote_types(dtype, torch.float32)), y, given):
        assert got == pytest.approx(weight.grad.square().sum().item(), rel=error)


def scaled_steps(mesh, overflow_rank):
    head = plsc.ShardedHead(16, 23, mesh, momentum_dtype=None)
    net = torch.nn.Linear(16, 16, bias=False)
    torch.nn.init.eye_(net.weight)
    optimizers = torch.optim.SGD(net.parameters(), lr=0.1), plsc.HeadSGD(head, lr=0.1)
    scaler = GradScaler(mesh, init_scale=1024.0)
    x, y = some_batch(mesh.rank)
    start = net.weight.detach().clone(), head.weight.detach().clone()
    scaler.scale(head(net(x), y)).backward()
    if mesh.rank == overflow_rank:
        net.weight.grad[0, 0] = float("inf")
    scaler.unscale_all(*optimizers)
    stepped = not scaler.step_both(*optimizers).skipped
    scaler.update()
    return stepped, scaler.get_scale(), net.weight.detach() - start[0], head.weight.detach() - start[1]


@pytest.mark.parametrize(("world", "head_ranks"), [(2, 0), (4, 2)])
def test_an_overflow_on_one_rank_skips_every_step(ranks, world, head_ranks):
    for stepped, scale, net, table in ranks(world, scaled_steps, world - 1, head_ranks=head_ranks):
        assert (stepped, scale) == (False, 512.0)
        assert not net.any()
        assert not table.any()


@pytest.mark.parametrize(("world", "head_ranks"), [(2, 0), (4, 2)])
def test_the_scale_cancels_out(ranks, world, head_ranks):
    scaled, plain = (ranks(world, *what, head_ranks=head_ranks) for what in ((scaled_steps, None), (plain_step,)))
    for (stepped, scale, net, table), unscaled in zip(scaled, plain, strict=True):
        assert (stepped, scale) == (True, 1024.0)
        assert net.any()
        assert torch.allclose(table, unscaled, rtol=1e-4, atol=1e-8)


KINDS = {
    "sgd": (plsc.HeadSGD, {"momentum": 0.9}, {}),
    "adamw, int8, statistics, sub-centres": (
        plsc.HeadAdamW,
        {},
        {"momentum_dtype": "int8", "weight_dtype": "bfloat16", "margin": plsc.CurricularFace(), "centers": 2},
    ),
}


def steps_of_a_state(mesh, folder, kind, steps, first):
    """The losses of ``steps`` after those of the state in ``folder``, where there is one; saves the state."""
    from torch.distributed import checkpoint

    optimizer_kind, values, options = KINDS[kind]
    head = plsc.ShardedHead(16, 23, mesh, **{"margin": plsc.CosFace(s=16.0, m=0.1), **options})
    optimizer = optimizer_kind(head, lr=0.2 if first == 0 else 0.7, **values)
    states, group = {"head": HeadState(optimizer)}, mesh.group
    alone = {"no_dist": True} if group is None else {"process_group": group}
    if first:
        checkpoint.load(states, checkpoint_id=folder / str(first), **alone)
    losses = []
    for step in range(first, first + steps):
        x, y = (part.tensor_split(mesh.world_size)[mesh.rank] for part in some_batch(step))
        loss = head(x.requires_grad_(), y)
        loss.backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.5
        losses.append(loss.item())
    checkpoint.save(states, checkpoint_id=folder / str(first + steps), **alone)
    return losses


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_goes_on_at_any_number_of_ranks(ranks, tmp_path, kind):
    expected = ranks(1, steps_of_a_state, tmp_path / "whole", kind, 6, 0)[0]
    found = ranks(3, steps_of_a_state, tmp_path, kind, 2, 0)[0]
    found += ranks(2, steps_of_a_state, tmp_path, kind, 2, 2)[0]
    found += ranks(1, steps_of_a_state, tmp_path, kind, 2, 4)[0]
    assert found == pytest.approx(expected, rel=1e-3 if "int8" in kind else 1e-5)
    assert found[2] != pytest.approx(found[0], rel=1e-2)


def plain_step(mesh):
    head = plsc.ShardedHead(16, 23, mesh, momentum_dtype=None)
    start = head.weight.detach().clone()
    head(*some_batch(mesh.rank)).backward()
    plsc.HeadSGD(head, lr=0.1).step()
    return head.weight.detach() - start


def test_torchs_own_scaler_works_too():
    head = plsc.ShardedHead(16, 23, momentum_dtype=None)
    net = torch.nn.Linear(16, 16)
    optimizers = torch.optim.SGD(net.parameters(), lr=0.1), plsc.HeadSGD(head, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    x, y = some_batch()
    start = head.weight.detach().clone()
    loss = head(net(x), y)
    scaler.scale(loss).backward()
    gradient = (
        torch.cat(
            [
                backward_through_normalize(g, chunk)
                for chunk, g in head.softmax.gradient_chunks(head.softmax.pending.batches)
            ]
        )
        / 256
    )
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert torch.allclose(head.weight.detach(), start - 0.1 * gradient, atol=1e-5)


def test_ten_million_classes_on_64_ranks_need_no_memory():
    heads = [plsc.ShardedHead(512, 10_000_000, Mesh(rank, 64, rank, torch.device("meta"))) for rank in range(64)]
    assert sum(h.weight.shape[0] for h in heads) == 10_000_000
    assert all(h.weight.device.type == "meta" for h in heads)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_embeddings_under_autocast(dtype):
    x, y = some_batch()
    head = plsc.ShardedHead(16, 23)
    expected = head(x.to(dtype), y)
    inputs = x.to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = head(inputs, y)
    assert torch.equal(loss, expected)
    loss.backward()
    assert inputs.grad.dtype == dtype
