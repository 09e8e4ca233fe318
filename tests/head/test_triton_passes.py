"""The softmax's passes by Triton kernels, interpreted on the CPU, against float64 and against the plain path."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from reference import relative_error

import plsc
from plsc.head.backends import (
    HeadShape,
    choose_backend,
    triton_backend,
    triton_passes,
    triton_stored,
    why_no_triton_passes,
    why_not_fused,
)
from plsc.head.backends.torch_backend import Batch, PassInputs, TorchBackend
from plsc.head.backends.triton_backend import TritonBackend
from plsc.head.backends.triton_tiles import Tile, force_tile
from plsc.head.class_table import ClassRows

S = 30.0
TILES = {"straight": Tile(16, 16, 32), "flipped": Tile(16, 32, 16, flipped=True)}
SHAPES = [*TILES, "stored"]
SUMS = 1e-5
# Triton's interpreter cuts bfloat16 off where a GPU rounds: twice the error, and always towards zero
GRADIENTS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def problem(
    classes: int, batch: int, dim: int, dtype: torch.dtype, *, centers: int = 1, some: bool = False, mask: bool = False
) -> dict:
    """Rows and unit features of ``dtype``; labels among the first and last classes, and one that is elsewhere."""
    generator = torch.Generator().manual_seed(classes + batch)
    weight = (torch.randn(classes * centers, dim, generator=generator) * 3).to(dtype)
    x = torch.nn.functional.normalize(torch.randn(batch, dim, generator=generator)).to(dtype)
    selected = torch.arange(0, classes, 3) if some else None
    rows = ClassRows(weight, weight.float().norm(dim=1).reciprocal(), centers, selected)
    labels = torch.randint(classes, (batch,), generator=generator) if classes else torch.full((batch,), 3)
    labels[:3] = torch.tensor([0, classes - 1, classes + 5])[:batch]
    return {
        "rows": rows,
        "batch": Batch(x, rows.positions(labels), torch.zeros(batch), plsc.ArcFace(s=S), {}),
        "log_z": torch.full((batch,), 3.0) + torch.rand(batch, generator=generator),
        "scale": torch.rand(batch, generator=generator),
        "target_grad": -torch.rand(batch, generator=generator),
        "member": torch.rand(rows.num_classes, batch, generator=generator) < 0.7 if mask else None,
    }


def by_kernels(given: dict, tile: str = "straight", chunk: int = 32, precision: str = "ieee") -> tuple:
    """Sums, pull and gradient."""
    backend = TritonBackend("tested", dim=given["rows"].weight.shape[1], with_passes=True, fp32_precision=precision)
    backend = backend.in_shape(stored=tile in ("stored", "wide"), is_wide=tile == "wide")
    rows, batch = given["rows"], given["batch"]
    with force_tile(TILES.get(tile, TILES["straight"])):
        partial = backend.first_pass(rows, batch, chunk, with_grad=True)
        samples = given["log_z"], given["scale"], given["target_grad"]
        pieces = list(backend.second_pass(PassInputs(rows, batch, *samples, chunk, given["member"])))
    assert [piece.start for piece, _ in pieces] == list(range(0, rows.num_classes, chunk))
    gradients = [gradient for _, gradient in pieces] or [torch.zeros(0, rows.weight.shape[1])]
    return partial.total, partial.grad_embeddings, torch.cat(gradients)


def by_formula(given: dict) -> tuple[torch.Tensor, ...]:
    """The same, dense and in float64."""
    rows, batch = given["rows"], given["batch"]
    w = rows.weight[rows.row_index(0, rows.num_classes)].double()
    x = batch.features.double()
    unit = w / w.norm(dim=1, keepdim=True)
    cos = (unit @ x.T).view(rows.num_classes, rows.centers, len(x))
    wins = torch.nn.functional.one_hot(cos.argmax(1), rows.centers).movedim(2, 1)
    position = batch.position if batch.position.dim() > 1 else batch.position[:, None]
    own = torch.arange(rows.num_classes)[:, None, None] == position
    is_target = own.any(2)
    z = S * cos.amax(1)
    e = z.exp().masked_fill(is_target, 0)
    p = (z - given["log_z"]).exp() * given["scale"]
    if given["member"] is not None:
        p = p * given["member"]
    target_grad = given["target_grad"].double().view(position.shape)
    p = torch.where(is_target, (own * target_grad).sum(2), p)
    spread_e, spread_p = ((wins * values[:, None]).flatten(0, 1) for values in (e, p))
    return e.sum(0), spread_e.T @ unit, spread_p @ x


def check(got: tuple, given: dict, limit: float) -> None:
    expected = by_formula(given)
    assert got[0].dtype == torch.float64
    assert got[1].dtype == got[2].dtype == torch.float32
    assert relative_error(got[0], expected[0]) < SUMS
    assert relative_error(got[1], expected[1]) < limit
    assert relative_error(got[2], expected[2]) < limit


PROBLEMS = [
    (70, 19, 32, {}),
    (70, 19, 32, {"some": True}),
    (70, 19, 32, {"mask": True}),
    (33, 1, 96, {}),
    (40, 7, 64, {"centers": 3}),
    (40, 7, 32, {"centers": 3, "some": True, "mask": True}),
    (16, 16, 32, {}),
]


def pairs() -> Iterator[Any]:
    """Each problem in each shape, by one type in the first ring and by the other in the second."""
    for (number, given), (shape, tile), dtype in itertools.product(
        enumerate(PROBLEMS), enumerate(SHAPES), (torch.float32, torch.bfloat16)
    ):
        marks = () if (number + shape) % 2 == (dtype == torch.bfloat16) else pytest.mark.exhaustive
        yield pytest.param(dtype, tile, *given, marks=marks)


@pytest.mark.parametrize(("dtype", "tile", "classes", "batch", "dim", "options"), list(pairs()))
def test_passes_agree_with_the_formula(interpreter, dtype, tile, classes, batch, dim, options):
    given = problem(classes, batch, dim, dtype, **options)
    check(interpreter(by_kernels, given, tile), given, GRADIENTS[dtype])


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(("batch", "dim"), [(128, 512), (300, 32), (5, 768)])
@pytest.mark.parametrize("tile", SHAPES)
def test_wide_rows_and_many_samples(interpreter, batch, dim, tile):
    given = problem(37, batch, dim, torch.bfloat16)
    check(interpreter(by_kernels, given, tile), given, GRADIENTS[torch.bfloat16])


@pytest.mark.parametrize(("precision", "limit"), [("tf32", 1e-2), ("bf16x3", 3e-4)])
def test_float32_tables_are_multiplied_as_they_are_told(interpreter, precision, limit):
    given = problem(70, 19, 64, torch.float32)
    got, expected = interpreter(by_kernels, given, precision=precision), by_formula(given)
    errors = [relative_error(mine, theirs) for mine, theirs in zip(got, expected, strict=True)]
    assert max(errors) < limit
    assert min(errors) > 1e-6  # and no better: "ieee" is another choice


def test_rounding_to_tf32_has_no_bias(interpreter):
    given = problem(200, 16, 32, torch.float32)
    got, expected = interpreter(by_kernels, given, precision="tf32"), by_formula(given)
    assert abs(float((got[0] / expected[0]).log().mean())) < 2e-4


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        pytest.param(torch.bfloat16, {"centers": 8, "some": True}, marks=pytest.mark.exhaustive),
    ],
)
def test_stored_logits_take_rows_of_any_width_and_many_chunks(interpreter, dtype, options):
    given = problem(300, 131, 40, dtype, **options)
    check(interpreter(by_kernels, given, "stored", 290), given, GRADIENTS[dtype])


def in_wide_blocks(given: dict) -> tuple:
    """:func:`by_kernels` with wide blocks, and whether the passes took them."""
    with patch.object(triton_stored, "row_options", wraps=triton_stored.row_options) as chosen:
        got, calls = by_kernels(given, "wide"), chosen.call_args_list
    return got, [call.kwargs["is_wide"] for call in calls if "is_wide" in call.kwargs]


@pytest.mark.parametrize(("batch", "fills"), [(64, True), (61, True), (33, False)])
def test_wide_blocks_of_samples_that_fill_them(interpreter, batch, fills):
    """A few of their places may stay empty, not a half."""
    given = problem(70, batch, 48, torch.bfloat16, mask=True)
    got, taken = interpreter(in_wide_blocks, given)
    assert taken == [fills] * 2  # by both passes
    check(got, given, GRADIENTS[torch.bfloat16])


@pytest.mark.parametrize("tile", ["straight", "stored"])
def test_an_empty_shard_and_a_single_class(interpreter, tile):
    given = problem(0, 5, 32, torch.bfloat16)
    total, pull, gradient = interpreter(by_kernels, given, tile)
    assert not total.any()
    assert not pull.any()
    assert gradient.shape == (0, 32)
    alone = problem(1, 3, 32, torch.bfloat16)
    check(interpreter(by_kernels, alone, tile), alone, GRADIENTS[torch.bfloat16])


def gradients_by_chunk(given: dict, sizes: tuple[int, ...]) -> list:
    return [by_kernels(given, chunk=size)[2] for size in sizes]


def test_chunks_leave_no_trace(interpreter):
    given = problem(100, 20, 32, torch.bfloat16)
    whole, *others = interpreter(gradients_by_chunk, given, (112, 48, 16))
    assert all(torch.equal(other, whole) for other in others)


def test_features_may_lie_in_memory_in_any_order(interpreter):
    given = problem(20, 6, 32, torch.bfloat16)
    features = given["batch"].features.t().contiguous().t()
    turned = {**given, "batch": replace(given["batch"], features=features), "log_z": given["log_z"].repeat(2)[::2]}
    assert not turned["batch"].features.is_contiguous()
    straight = {**given, "log_z": turned["log_z"].contiguous()}
    results = [interpreter(by_kernels, case) for case in (turned, straight)]
    for got, expected in zip(*results, strict=True):
        assert torch.equal(got, expected)


def without_gradient(given: dict, stored: bool) -> tuple:
    backend = TritonBackend("tested", dim=32, with_passes=True).in_shape(stored=stored)
    partial = backend.first_pass(given["rows"], given["batch"], 32, with_grad=False)
    return partial.total, partial.grad_embeddings


@pytest.mark.parametrize("stored", [False, True])
def test_an_evaluation_sums_no_rows(interpreter, stored):
    given = problem(50, 9, 32, torch.bfloat16)
    total, gradient = interpreter(without_gradient, given, stored)
    assert gradient is None
    assert relative_error(total, by_formula(given)[0]) < SUMS


def many_equal_terms(classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What one program sums of ``classes`` equal rows, and of the first tile of them."""
    dim, slots = 32, 4096
    weight = torch.full((1, dim), dim**-0.5).expand(classes, dim).contiguous()
    features = weight[:16] * torch.linspace(0.1, 1, 16)[:, None]
    batch = Batch(features, torch.full((16,), -1), torch.zeros(16), plsc.ArcFace(s=S), {})
    with force_tile(Tile(16, slots, dim)), patch.object(triton_passes, "_PROGRAMS", 0):
        tables = [ClassRows(weight[:count], torch.ones(count)) for count in (classes, slots)]
        whole, tile = (triton_passes.first_pass(rows, batch, classes, "ieee", with_grad=False)[0] for rows in tables)
    return whole, tile * (classes // slots)


def test_a_quarter_of_a_million_terms_lose_nothing(interpreter):
    """Added one tile after another in float32, most sums would be off."""
    whole, expected = interpreter(many_equal_terms, 1 << 18)
    assert (expected > 1 << 18).all()
    assert torch.equal(whole, expected)


def test_large_logits_keep_their_sums(interpreter):
    """At s = 64 a sample on top of a row has exp(64) beside exp(−64)."""
    given = problem(40, 4, 32, torch.float32)
    rows = given["rows"]
    features = (rows.weight[:4] * rows.inverse_norm[:4, None]).contiguous()
    batch = replace(given["batch"], features=features, position=torch.full((4,), -1), margin=plsc.ArcFace(s=64.0))
    total, _, _ = interpreter(by_kernels, {**given, "batch": batch})
    assert relative_error(total.log(), torch.full((4,), 64.0)) < 1e-4
    plain = TorchBackend("expected").first_pass(rows, batch, 40, with_grad=False)
    assert relative_error(total, plain.total * plain.maximum.exp()) < SUMS
    assert math.isfinite(float(total.sum()))


def choice(dtype: torch.dtype, dim: int = 32, **options: object) -> str:
    shape = HeadShape(torch.device("cpu"), dtype, dim, options.get("centers", 1), options.get("margin", plsc.ArcFace()))
    return choose_backend(shape).describe()


def test_other_cases_are_left_to_pytorch(interpreter):
    assert interpreter(choice, torch.float32) == "triton backend: on cpu"
    assert interpreter(choice, torch.bfloat16, centers=3) == "triton backend: on cpu"
    assert interpreter(choice, torch.float64) == "torch backend: no kernels for torch.float64"
    passes = "triton backend: on cpu; passes by torch: "
    assert interpreter(choice, torch.bfloat16, centers=9) == passes + "more than 8 centres to a class"
    assert interpreter(choice, torch.bfloat16, 40) == passes + "D is no multiple of 32"
    assert interpreter(choice, torch.bfloat16, 160) == passes + "D is above 128 and no multiple of it"
    assert interpreter(choice, torch.bfloat16, 896) == passes + "D is above 768"
    curricular = interpreter(choice, torch.bfloat16, margin=plsc.CurricularFace())
    assert curricular == passes + "CurricularFace changes the negatives"
    on_gpu = HeadShape(torch.device("cuda"), torch.float32, 512, 1, plsc.ArcFace(), "tf32")
    assert "TF32" in why_not_fused(on_gpu)
    assert why_no_triton_passes(on_gpu) is None  # with stored weights
    assert why_not_fused(replace(on_gpu, fp32_precision="bf16x3")) is None
    split = why_no_triton_passes(replace(on_gpu, dim=40, fp32_precision="bf16x3"))
    assert split == "D is no multiple of 32"  # PyTorch has no products in bf16x3 to store them
    assert not triton_backend.runs_on(torch.device("cpu"))  # in this process, where nothing is interpreted
