"""The softmax's passes by Triton kernels, interpreted on the CPU, against float64 and against the plain path."""

import pytest
import torch
from reference import relative_error

import plsc
from plsc.head.backends import HeadShape, choose_backend, triton_backend
from plsc.head.class_table import ClassRows

S = 30.0
KINDS = [(torch.float32, "logits"), (torch.bfloat16, "logits"), (torch.bfloat16, "product")]
# Triton's interpreter cuts bfloat16 off where a GPU rounds: twice the error, and always towards zero
LIMIT = {torch.float32: 5e-6, torch.bfloat16: 1.2e-2}


def problem(classes: int, batch: int, dim: int, dtype: torch.dtype, some: bool = False) -> dict:
    """Rows and unit features of ``dtype``; labels among the first and last classes, and one that is elsewhere."""
    generator = torch.Generator().manual_seed(classes + batch)
    weight = (torch.randn(classes, dim, generator=generator) * 3).to(dtype)
    x = torch.nn.functional.normalize(torch.randn(batch, dim, generator=generator)).to(dtype)
    selected = torch.arange(0, classes, 3) if some else None
    rows = ClassRows(weight, weight.float().norm(dim=1).reciprocal(), 1, selected)
    labels = torch.randint(classes, (batch,), generator=generator)
    labels[:3] = torch.tensor([0, classes - 1, classes + 5])[:batch]
    samples = {
        "log_z": torch.full((batch,), 3.0) + torch.rand(batch, generator=generator),
        "scale": torch.rand(batch, generator=generator),
        "target_grad": -torch.rand(batch, generator=generator),
    }
    return {"rows": rows, "features": x, "position": rows.positions(labels), **samples}


def by_kernels(given: dict, method: str, chunk: int) -> tuple[torch.Tensor, ...]:
    """Sums, pull and gradient."""
    rows, x, position = given["rows"], given["features"], given["position"]
    samples = (given["log_z"], given["scale"], given["target_grad"])
    with triton_backend.force_kernel(method):
        total, pull = triton_backend.first_pass(rows, x, position, S, chunk, with_grad=True)
        pieces = list(triton_backend.second_pass(rows, x, position, S, *samples, chunk))
    assert [piece.start for piece, _ in pieces] == list(range(0, rows.num_classes, chunk))
    return total, pull, torch.cat([gradient for _, gradient in pieces])


def by_formula(given: dict) -> tuple[torch.Tensor, ...]:
    """The same, dense and in float64."""
    rows = given["rows"]
    weight = rows.weight if rows.selected is None else rows.weight[rows.selected]
    w, x, position = weight.double(), given["features"].double(), given["position"]
    unit = w / w.norm(dim=1, keepdim=True)
    is_target = torch.arange(len(w))[:, None] == position[None]
    z = S * unit @ x.T
    e = z.exp().masked_fill(is_target, 0)
    p = torch.where(is_target, given["target_grad"].double(), (z - given["log_z"]).exp() * given["scale"])
    return e.sum(0), e.T @ unit, p @ x


@pytest.mark.parametrize(("dtype", "method"), KINDS)
@pytest.mark.parametrize(("classes", "batch", "dim"), [(70, 19, 24), (33, 1, 16), (16, 16, 32), (1, 3, 8)])
@pytest.mark.parametrize("some", [False, True])
def test_passes_agree_with_the_formula(interpreter, dtype, method, classes, batch, dim, some):
    given = problem(classes, batch, dim, dtype, some)
    total, pull, gradient = interpreter(by_kernels, given, method, chunk=32)
    expected = by_formula(given)
    assert relative_error(total, expected[0]) < 5e-6
    assert total.dtype == torch.float64
    assert relative_error(gradient, expected[2]) < LIMIT[dtype]
    if classes > 1:  # a single class is its sample's target, and pulls nobody
        assert relative_error(pull, expected[1]) < LIMIT[dtype]
    assert pull.dtype == gradient.dtype == torch.float32


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "method"), KINDS)
def test_chunks_of_whole_blocks_leave_no_trace(interpreter, dtype, method):
    given = problem(100, 20, 16, dtype)
    one = interpreter(by_kernels, given, method, chunk=112)
    for chunk in (16, 48):
        other = interpreter(by_kernels, given, method, chunk=chunk)
        assert relative_error(other[0], one[0]) < 1e-15
        assert relative_error(other[2], one[2]) < 1e-7  # the library's product may sum in another order


@pytest.mark.parametrize(("dtype", "method"), KINDS)
def test_features_may_lie_in_memory_in_any_order(interpreter, dtype, method):
    given = problem(20, 6, 8, dtype)
    turned = {**given, "features": given["features"].t().contiguous().t(), "log_z": given["log_z"].repeat(2)[::2]}
    straight = {**given, "log_z": turned["log_z"].contiguous()}
    assert not turned["features"].is_contiguous()
    results = [interpreter(by_kernels, case, method, chunk=16) for case in (turned, straight)]
    for got, expected in zip(*results, strict=True):
        assert torch.equal(got, expected)


def choice(dtype: torch.dtype, **options: object) -> str:
    shape = HeadShape(torch.device("cpu"), dtype, 8, options.get("centers", 1), options.get("margin", plsc.ArcFace()))
    return choose_backend(shape).describe()


def test_other_cases_are_left_to_pytorch(interpreter):
    assert interpreter(choice, torch.float32) == "triton backend: on cpu"
    assert interpreter(choice, torch.float64) == "torch backend: no kernels for torch.float64"
    assert interpreter(choice, torch.bfloat16, centers=2) == (
        "triton backend: on cpu; passes by torch: several centres to a class"
    )
    assert not triton_backend.runs_on(torch.device("cpu"))  # in this process, where nothing is interpreted
