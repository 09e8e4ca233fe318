"""Loss, gradients and steps of the sharded head against the dense float64 oracle."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import Oracle, relative_error

import plsc
from plsc.parallel import Mesh
from plsc.parallel.collectives import all_gather_rows

MARGINS = {
    "softmax": (plsc.Softmax(), Oracle("softmax")),
    "sphereface": (plsc.SphereFace(m=1.7), Oracle("sphereface", parameters={"m": 1.7})),
    "cosface": (plsc.CosFace(m=0.4), Oracle("cosface", parameters={"m": 0.4})),
    "arcface": (plsc.ArcFace(m=0.5), Oracle("arcface", parameters={"m": 0.5})),
    "arcface_straight_through": (
        plsc.ArcFace(m=0.5, gradient="straight_through"),
        Oracle("arcface", gradient="straight_through", parameters={"m": 0.5}),
    ),
    "arcface_s100": (plsc.ArcFace(s=100.0, m=0.5), Oracle("arcface", s=100.0, parameters={"m": 0.5})),
    "combined": (plsc.Combined(m2=0.3, m3=0.2), Oracle("combined", parameters={"m1": 1, "m2": 0.3, "m3": 0.2})),
    "combined_m1": (
        plsc.Combined(m1=1.35, m2=0.3, m3=0.1),
        Oracle("combined", parameters={"m1": 1.35, "m2": 0.3, "m3": 0.1}),
    ),
    "adaface": (plsc.AdaFace(), Oracle("adaface")),
    "magface": (plsc.MagFace(), Oracle("magface")),
    "curricularface": (plsc.CurricularFace(), Oracle("curricularface")),
    "elasticface": (plsc.ElasticFace(std=0.0), Oracle("arcface", parameters={"m": 0.5})),
    "elasticface_cos": (plsc.ElasticFace(m=0.35, std=0.0, base="cos"), Oracle("cosface", parameters={"m": 0.35})),
}
LIMIT = {torch.float64: 1e-11, torch.float32: 2e-5}
LR, MOMENTUM, DECAY = 0.2, 0.9, 5e-4


def make_problem(
    classes: int, batch: int, dim: int = 24, centers: int = 1, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights (C·K, D), embeddings (B, D) of very different norms, labels with repeats; some cosines near ±1."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(classes * centers, dim, generator=generator, dtype=torch.float64)
    x = torch.randn(batch, dim, generator=generator, dtype=torch.float64)
    x *= torch.logspace(-1, 2, batch, dtype=torch.float64)[:, None] / dim**0.5
    y = torch.randint(classes, (batch,), generator=generator)
    if batch > 3:
        y[1] = y[0]
        x[2] = 3 * weight[y[2] * centers] + 0.05 * x[2] / x[2].norm()
        x[3] = -3 * weight[y[3] * centers] + 0.05 * x[3] / x[3].norm()  # θ + m > π
    return weight, x, y


def sharded_steps(
    mesh: Mesh,
    margin: plsc.losses.Margin,
    problem: tuple,
    sizes: list[int],
    dtype: torch.dtype,
    steps: int = 1,
    **options: object,
) -> list[tuple[torch.Tensor, ...]]:
    """Some steps of HeadSGD: loss, this rank's embedding gradient and the whole weight after each."""
    weight, x, y = problem
    centers = int(options.get("centers", 1))
    head = plsc.ShardedHead(
        x.shape[1], len(weight) // centers, mesh, margin, weight_dtype=dtype, momentum_dtype=dtype, **options
    )
    first, stop = head.class_range
    with torch.no_grad():
        head.weight.copy_(weight[first * centers : stop * centers])
    optimizer = plsc.HeadSGD(head, lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    out = []
    for step in range(steps):
        mine = (x * (1 + 0.1 * step)).roll(step, 0).split(sizes)[mesh.rank].to(dtype).requires_grad_()
        labels = y.roll(step, 0).split(sizes)[mesh.rank]
        before = labels.clone()
        loss = head(mine, labels)
        loss.backward()
        assert torch.equal(labels, before)
        optimizer.step()
        out.append((loss.detach(), mine.grad / mesh.world_size, all_gather_rows(head.weight.detach(), mesh).clone()))
    return out


def dense_steps(oracle: Oracle, problem: tuple, steps: int, centers: int = 1) -> list[tuple[torch.Tensor, ...]]:
    oracle = Oracle(oracle.name, oracle.s, oracle.gradient, oracle.parameters)
    weight, x, y = problem
    weight = weight.clone().requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    out = []
    for step in range(steps):
        inputs = (x * (1 + 0.1 * step)).roll(step, 0).clone().requires_grad_()
        loss = oracle.loss(inputs, y.roll(step, 0), weight, centers)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        out.append((loss.detach(), inputs.grad, weight.detach().clone()))
    return out


def assert_equal_steps(got: list, want: list, start: torch.Tensor, limit: float) -> None:
    """Compare all ranks' steps with the oracle's; the weights by their change, which is much smaller than they are."""
    for step, (loss, gradient, weight) in enumerate(want):
        for rank in got:
            assert relative_error(rank[step][0], loss) <= limit
        assert relative_error(torch.cat([rank[step][1] for rank in got]), gradient) <= limit
        assert relative_error(got[0][step][2].double() - start, weight - start) <= max(limit, 1e-12)


def split(total: int, world: int) -> list[int]:
    """Unequal batches whose sum is ``total``: one rank has a single sample."""
    sizes = [1] * world
    sizes[0] += total - world
    return sizes


@pytest.mark.slow
@pytest.mark.parametrize("name", MARGINS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
def test_every_margin(ranks, name, dtype):
    margin, oracle = MARGINS[name]
    problem = make_problem(53, 12)
    start = problem[0].to(dtype).double()
    problem = (start, problem[1].to(dtype).double(), problem[2])
    got = ranks(2, sharded_steps, margin, problem, [7, 5], dtype)
    assert_equal_steps(got, dense_steps(oracle, problem, 1), start, LIMIT[dtype])


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("classes", "batch"), [(53, 12), (3, 9), (1, 4), (400, 4)], ids=["odd", "C<world", "one", "no target"]
)
def test_five_steps_on_any_world(ranks, world, classes, batch):
    problem = make_problem(classes, batch)
    got = ranks(world, sharded_steps, plsc.ArcFace(), problem, split(batch, world), torch.float64, 5)
    assert_equal_steps(got, dense_steps(MARGINS["arcface"][1], problem, 5), problem[0], 1e-9)


def test_elasticface_plus_gives_the_hardest_samples_the_largest_margins():
    margin = plsc.ElasticFace(m=0.35, std=0.1, base="cos", plus=True)
    cos = torch.tensor([0.9, -0.5, 0.2, 0.6], dtype=torch.float64)
    drawn = cos - margin.phi(cos, None, {}, torch.Generator().manual_seed(3))
    assert drawn.argsort().tolist() == [0, 3, 2, 1]


@pytest.mark.parametrize("chunk", [1, 2, 7, 53, 1000])
def test_any_chunk_size(ranks, chunk):
    problem = make_problem(53, 12)
    got = ranks(2, sharded_steps, plsc.ArcFace(), problem, [6, 6], torch.float64, 2, chunk_classes=chunk)
    assert_equal_steps(got, dense_steps(MARGINS["arcface"][1], problem, 2), problem[0], 1e-10)


@pytest.mark.parametrize("name", ["arcface", "curricularface", "arcface_s100"])
def test_subcentres(ranks, name):
    margin, oracle = MARGINS[name]
    problem = make_problem(21, 9, centers=3)
    got = ranks(2, sharded_steps, margin, problem, [4, 5], torch.float64, 2, centers=3, chunk_classes=4)
    assert_equal_steps(got, dense_steps(oracle, problem, 2, centers=3), problem[0], 1e-10)


@settings(max_examples=25, deadline=None)
@given(classes=st.integers(1, 40), batch=st.integers(1, 9), chunk=st.integers(1, 50), seed=st.integers(0, 99))
def test_any_problem(classes, batch, chunk, seed):
    problem = make_problem(classes, batch, seed=seed)
    mesh = Mesh(0, 1, 0, torch.device("cpu"))
    got = sharded_steps(mesh, plsc.ArcFace(), problem, [batch], torch.float64, chunk_classes=chunk)
    assert_equal_steps([got], dense_steps(MARGINS["arcface"][1], problem, 1), problem[0], 1e-9)


@pytest.mark.parametrize("name", ["arcface", "magface", "adaface", "combined_m1"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_cosines_of_exactly_one_are_finite(name, sign):
    head = plsc.ShardedHead(8, 5, margin=MARGINS[name][0], weight_dtype=torch.float64)
    x = (sign * 20 * head.weight.detach()).requires_grad_()
    loss = head(x, torch.arange(5))
    loss.backward()
    plsc.HeadSGD(head, lr=0.1).step()
    assert all(torch.isfinite(t).all() for t in (loss, x.grad, head.weight))


def test_gradients_are_orthogonal_to_what_normalisation_removes():
    head = plsc.ShardedHead(16, 30, weight_dtype=torch.float64, update="autograd")
    x = torch.randn(6, 16, dtype=torch.float64, requires_grad=True)
    head(x, torch.arange(6)).backward()
    assert (x * x.grad).sum(1).abs().max() < 1e-12 * x.grad.norm()
    assert (head.weight * head.weight.grad).sum(1).abs().max() < 1e-12 * head.weight.grad.norm()


def test_untrained_table_starts_at_the_expected_loss():
    """log Z of random directions is about ln C + s²/2D, and the target's own logit about s·cos(π/2 + m)."""
    head = plsc.ShardedHead(512, 20_000, margin=plsc.Softmax(s=16.0))
    loss = head(torch.randn(256, 512), torch.randint(20_000, (256,)))
    assert abs(loss.item() - (np.log(20_000) + 16**2 / (2 * 512))) < 0.25  # five deviations of 256 targets' mean


@pytest.mark.parametrize("name", ["arcface", "cosface"])
def test_arcface_torch_numbers(ranks, name):
    path = Path(__file__).parents[1] / "fixtures" / f"arcface_torch_{name}.npz"
    peer = {key: torch.from_numpy(value) for key, value in np.load(path).items()}
    got = ranks(2, autograd_on_halves, name, peer["weight"], peer["embeddings"], peer["labels"])
    loss, x_grad, w_grad = got[0]
    assert relative_error(loss, peer["loss"]) <= 1e-5
    assert relative_error(x_grad, peer["grad_embeddings_rank0"]) <= 1e-5
    assert relative_error(w_grad, peer["grad_weight_rank0"]) <= 1e-5


def autograd_on_halves(mesh: Mesh, name: str, weight: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> tuple:
    kind = {
        "arcface": plsc.ArcFace(m=0.5, gradient="straight_through"),
        "cosface": plsc.CosFace(m=0.4, gradient="straight_through"),
    }[name]
    head = plsc.ShardedHead(x.shape[1], len(weight), mesh, kind, update="autograd")
    with torch.no_grad():
        head.weight.copy_(weight[slice(*head.class_range)])
    mine = x.chunk(2)[mesh.rank].clone().requires_grad_()
    loss = head(mine, y.chunk(2)[mesh.rank])
    loss.backward()
    return loss.detach(), mine.grad, head.weight.grad
