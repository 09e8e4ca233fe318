"""Loss, gradients and steps of the sharded head against the dense float64 oracle."""

import contextlib
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import Oracle, relative_error
from support.head_problems import LIMIT, ONE, assert_equal_steps, dense_steps, make_problem, sharded_steps

import plsc
from plsc.head import sharded_softmax
from plsc.parallel import Mesh

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


def table_of(dtype: torch.dtype) -> dict[str, torch.dtype]:
    return {"weight_dtype": dtype, "momentum_dtype": dtype}


def split(total: int, world: int) -> list[int]:
    """Unequal batches whose sum is ``total``: one rank has a single sample."""
    return [1 + total - world, *[1] * (world - 1)]


@pytest.mark.slow
@pytest.mark.parametrize("name", MARGINS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
def test_every_margin(ranks, name, dtype):
    margin, oracle = MARGINS[name]
    problem = make_problem(extreme=True)
    problem = (problem[0].to(dtype).double(), problem[1].to(dtype).double(), problem[2])
    got = ranks(2, sharded_steps, margin, problem, [7, 5], **table_of(dtype))
    assert_equal_steps(got, dense_steps(oracle, problem), problem[0], LIMIT[dtype])


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("classes", "batch"), [(53, 12), (3, 9), (1, 4), (400, 4)], ids=["odd", "C<world", "one", "no target"]
)
def test_five_steps_on_any_world(ranks, world, classes, batch):
    problem = make_problem(classes, batch, extreme=True)
    got = ranks(world, sharded_steps, plsc.ArcFace(), problem, split(batch, world), 5)
    assert_equal_steps(got, dense_steps(MARGINS["arcface"][1], problem, 5), problem[0], 1e-9)


def test_elasticface_plus_gives_the_hardest_samples_the_largest_margins():
    margin = plsc.ElasticFace(m=0.35, std=0.1, base="cos", plus=True)
    cos = torch.tensor([0.9, -0.5, 0.2, 0.6], dtype=torch.float64)
    drawn = cos - margin.phi(cos, None, {}, torch.Generator().manual_seed(3))
    assert drawn.argsort().tolist() == [0, 3, 2, 1]


def sums_of_a_loss(mesh: Mesh, margin: plsc.losses.margins.Margin) -> list[str]:
    """The all-reduces of a loss, in order."""
    head = plsc.ShardedHead(8, 11, mesh, margin)
    called: list[str] = []

    def noted(name, function):
        return lambda *args: called.append(name) or function(*args)

    with contextlib.ExitStack() as patches:
        for name in ("all_reduce_sum", "all_reduce_max"):
            function = noted(name.removeprefix("all_reduce_"), getattr(sharded_softmax, name))
            patches.enter_context(patch.object(sharded_softmax, name, function))
        head(torch.ones(2, 8), torch.arange(2))
    return called


@pytest.mark.parametrize(
    ("margin", "sums"),
    [
        (plsc.ArcFace(), ["sum"]),
        (plsc.AdaFace(), ["sum"]),
        (plsc.ElasticFace(plus=True), ["sum"]),
        (plsc.ArcFace(s=100.0), ["max", "sum"]),
        (plsc.CurricularFace(s=20.0), ["sum", "sum"]),
        (plsc.CurricularFace(), ["sum", "max", "sum"]),
    ],
)
def test_targets_and_exponentials_are_summed_together(ranks, margin, sums):
    """But for margins whose negatives are compared with the targets; large logits need their maximum before."""
    assert ranks(2, sums_of_a_loss, margin) == [sums] * 2


@pytest.mark.parametrize(("s", "classes"), [(78.0, 60_000), (71.0, 60_000), (88.0, 3), (95.0, 3)])
def test_a_sum_of_many_large_exponentials_is_finite(s, classes):
    """Every class lies in the embedding's direction: exp(78) of each of 60,000 is no float32."""
    head = plsc.ShardedHead(2, classes, margin=plsc.Softmax(s=s), backend="torch")
    with torch.no_grad():
        head.weight.copy_(torch.tensor([1.0, 0.0]).expand(classes, 2))
    x = torch.tensor([[3.0, 0.0]], requires_grad=True)
    loss = head(x, torch.tensor([1]))
    loss.backward()
    assert loss.item() == pytest.approx(np.log(classes), rel=1e-5)
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("chunk", [1, 2, 7, 53, 1000])
def test_any_chunk_size(ranks, chunk):
    problem = make_problem(extreme=True)
    got = ranks(2, sharded_steps, plsc.ArcFace(), problem, [6, 6], 2, chunk_classes=chunk)
    assert_equal_steps(got, dense_steps(MARGINS["arcface"][1], problem, 2), problem[0], 1e-10)


@pytest.mark.parametrize("name", ["arcface", "curricularface", "arcface_s100"])
def test_subcentres(ranks, name):
    margin, oracle = MARGINS[name]
    problem = make_problem(21, 9, centers=3, extreme=True)
    got = ranks(2, sharded_steps, margin, problem, [4, 5], 2, centers=3, chunk_classes=4)
    assert_equal_steps(got, dense_steps(oracle, problem, 2, centers=3), problem[0], 1e-10)


@settings(max_examples=25, deadline=None)
@given(classes=st.integers(1, 40), batch=st.integers(1, 9), chunk=st.integers(1, 50), seed=st.integers(0, 99))
def test_any_problem(classes, batch, chunk, seed):
    problem = make_problem(classes, batch, seed=seed, extreme=True)
    got = sharded_steps(ONE, plsc.ArcFace(), problem, [batch], chunk_classes=chunk)
    assert_equal_steps([got], dense_steps(MARGINS["arcface"][1], problem), problem[0], 1e-9)


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
