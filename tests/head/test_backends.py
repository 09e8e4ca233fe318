"""The choice of what computes a head: made once, by what the machine and the head can, and told with its reason."""

import logging
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import plsc
from plsc.errors import UsageError
from plsc.head import backends
from plsc.head.backends import HeadShape, choose_backend
from plsc.head.backends.torch_backend import Batch, PassInputs
from plsc.head.backends.triton_backend import TritonBackend
from plsc.head.backends.triton_shape import NEVER, Threshold
from plsc.head.class_table import ClassRows
from plsc.native import build, head_kernels

compiled = pytest.mark.skipif(build.library() is None, reason="needs a C++ compiler")


def shape(dtype: torch.dtype = torch.bfloat16, dim: int = 64, **options: object) -> HeadShape:
    return HeadShape(
        torch.device(options.get("device", "cpu")),
        dtype,
        dim,
        options.get("centers", 1),
        options.get("margin", plsc.ArcFace()),
        options.get("fp32_precision", "ieee"),
    )


def test_without_a_compiler_pytorch_computes(monkeypatch):
    monkeypatch.setenv("PLSC_NATIVE", "0")
    assert choose_backend(shape()).describe() == "torch backend: PLSC_NATIVE=0"
    monkeypatch.delenv("PLSC_NATIVE")
    monkeypatch.setattr(head_kernels, "library", lambda: None)
    assert choose_backend(shape()).describe() == "torch backend: no compiler"


@compiled
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"margin": plsc.CurricularFace()}, "CurricularFace changes the negatives"),
        ({"margin": plsc.ArcFace(s=100.0)}, "logits that need a running maximum"),
        ({"centers": 3}, "several centres to a class"),
        ({"dim": 60}, "D is no multiple of 32"),
    ],
)
def test_passes_that_have_no_kernel_are_pytorchs_and_the_update_is_not(options, reason):
    assert choose_backend(shape(**options)).describe() == f"cpu backend: compiled SGD; passes by torch: {reason}"


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_passes_tell_what_multiplies(monkeypatch, dtype):
    own = head_kernels.products(dtype)
    smaller = "; passes of fewer than 16 samples by torch" if dtype == torch.float32 else ""
    assert choose_backend(shape(dtype)).describe() == f"cpu backend: compiled passes ({own}) and SGD{smaller}"
    monkeypatch.setattr(head_kernels, "products", lambda dtype: "portable")
    assert choose_backend(shape(dtype)).reason == "compiled SGD; passes by torch: no AVX2 or NEON"


@compiled
def test_a_head_says_whether_it_keeps_exponentials():
    keeping = replace(shape(), exponentials_memory=3 << 29)
    assert choose_backend(keeping, "torch").describe() == "torch backend: requested; keeps exponentials in 1.5 GiB"
    compiled_alone = choose_backend(shape(), "cpu").describe()
    assert choose_backend(keeping, "cpu").describe() == f"{compiled_alone}; its passes keep no exponentials"
    for samples, says in ((NEVER, "its passes keep no exponentials"), (256, "keeps exponentials in 1.5 GiB")):
        triton = TritonBackend("here", dim=64, with_passes=True, stored_from=Threshold(samples, "measured"))
        triton.exponentials_memory = keeping.exponentials_memory
        assert f"; {says}" in triton.describe()


def test_tables_and_devices_without_kernels_are_pytorchs():
    assert choose_backend(shape(torch.float64)).describe() == "torch backend: no kernels for torch.float64"
    assert choose_backend(shape(device="meta")).describe() == "torch backend: Triton does not run on meta"


@compiled
def test_a_backend_can_be_asked_for(monkeypatch, caplog):
    assert choose_backend(shape(), "torch").describe() == "torch backend: requested"
    assert choose_backend(shape(), "cpu").name == "cpu"
    monkeypatch.setenv("PLSC_HEAD_BACKEND", "torch")
    with caplog.at_level(logging.INFO, "plsc"):
        head = plsc.ShardedHead(64, 10)
    assert caplog.messages == ["class head: torch backend: requested"]
    assert (head.backend.name, head.backend.reason) == ("torch", "requested")
    assert plsc.ShardedHead(64, 10, backend="cpu").backend.name == "cpu"


@pytest.mark.parametrize(
    ("requested", "options", "message"),
    [
        ("fast", {}, "head backend 'fast' does not exist: give torch, cpu, triton"),
        ("triton", {}, "head backend 'triton' cannot run here, Triton does not run on cpu"),
        ("cpu", {"dtype": torch.float64}, "head backend 'cpu' cannot run here, no kernels for torch.float64"),
    ],
)
def test_a_backend_that_cannot_be_is_a_usage_error(requested, options, message):
    with pytest.raises(UsageError, match=message) as error:
        choose_backend(shape(**options), requested)
    assert "\n" not in str(error.value)


@compiled
def test_every_backend_gives_the_same_update_but_for_sums():
    weights = []
    for backend in ("torch", "cpu"):
        head = plsc.ShardedHead(64, 300, weight_dtype=torch.float32, backend=backend)
        optimizer = plsc.HeadSGD(head, lr=0.5, momentum=0.9, weight_decay=1e-3)
        head(torch.randn(20, 64, generator=torch.Generator().manual_seed(0)), torch.arange(20)).backward()
        optimizer.step()
        weights.append(head.weight.detach())
    torch.testing.assert_close(*weights, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("options", "requested", "described"),
    [
        ({}, "torch", "torch backend: requested; float32 products: ieee"),
        ({"fp32_precision": "tf32"}, "torch", "torch backend: requested; float32 products: tf32"),
        ({"fp32_precision": "bf16x3"}, None, "triton backend: on cuda; float32 products: bf16x3"),
        (
            {"fp32_precision": "tf32", "dim": 40},
            None,
            "triton backend: on cuda; float32 products: tf32; weights stored (D is no multiple of 32)",
        ),
        (
            {},
            None,
            "triton backend: on cuda; float32 products: ieee; "
            "weights stored (matrix units do not multiply float32 exactly)",
        ),
        ({"fp32_precision": "tf32", "dtype": torch.bfloat16}, None, "triton backend: on cuda"),
        ({"fp32_precision": "bf16x3", "dtype": torch.float64}, "torch", "torch backend: requested"),
    ],
)
def test_the_precision_of_float32_products_is_told(monkeypatch, options, requested, described):
    monkeypatch.setattr(backends, "runs_on", lambda device: device.type == "cuda")
    monkeypatch.setenv("PLSC_SELF_CHECK", "0")
    given = {"dtype": torch.float32, "device": "cuda", **options}
    assert choose_backend(shape(**given), requested).describe() == described


@pytest.mark.parametrize(
    ("options", "requested", "message"),
    [
        ({"fp32_precision": "tf32", "device": "cpu"}, None, 'fp32_precision "tf32" is for GPUs, .* give "ieee"'),
        ({"fp32_precision": "bf16x3", "device": "cpu"}, "torch", 'fp32_precision "bf16x3" is for GPUs'),
        ({"fp32_precision": "bf16x3"}, "torch", r"needs Triton's passes \(requested\): give \"tf32\" or \"ieee\""),
        ({"fp32_precision": "bf16x3", "dim": 40}, None, r"needs Triton's passes \(D is no multiple of 32\)"),
    ],
)
def test_a_precision_that_nothing_computes_is_a_usage_error(monkeypatch, options, requested, message):
    monkeypatch.setattr(backends, "runs_on", lambda device: device.type == "cuda")
    with pytest.raises(UsageError, match=message) as error:
        choose_backend(shape(**{"dtype": torch.float32, "device": "cuda", **options}), requested)
    assert "\n" not in str(error.value)


def test_the_head_takes_a_precision_by_name():
    with pytest.raises(UsageError, match="fp32_precision must be one of ieee, tf32, bf16x3, not 'high'"):
        plsc.ShardedHead(64, 10, fp32_precision="high")
    with pytest.raises(UsageError, match="is for GPUs"):
        plsc.ShardedHead(64, 10, fp32_precision="tf32")
    assert plsc.ShardedHead(64, 10, weight_dtype="bfloat16", fp32_precision="tf32").fp32_precision == "tf32"


class PrecisionOfProducts(TorchDispatchMode):
    """Notes torch's precision of float32 products on GPUs at each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.mm.default:
            self.seen.append(torch.backends.cuda.matmul.fp32_precision)
        return func(*args, **(kwargs or {}))


@pytest.fixture(params=["ieee", "tf32"])
def own_setting(request):
    """Torch's precision of float32 products on GPUs, as a user set it."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = request.param
    yield request.param
    torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_torchs_products_on_a_gpu_take_the_heads_precision_and_leave_torchs_setting(own_setting, precision):
    """On fake tensors: they have a GPU's device and no memory."""
    backend = choose_backend(shape(torch.float32, device="cuda", fp32_precision=precision), "torch")
    with FakeTensorMode(), PrecisionOfProducts() as products:
        weight, features = torch.randn(40, 8, device="cuda"), torch.randn(6, 8, device="cuda")
        rows = ClassRows(weight, torch.ones(40, device="cuda"))
        sample = torch.ones(6, device="cuda")
        batch = Batch(features, torch.zeros(6, dtype=torch.int64, device="cuda"), sample, plsc.ArcFace(), {})
        backend.first_pass(rows, batch, 16, with_grad=True)
        for _ in backend.second_pass(PassInputs(rows, batch, sample, sample, sample, 16)):
            assert torch.backends.cuda.matmul.fp32_precision == own_setting
    assert products.seen == [precision] * 12
    assert torch.backends.cuda.matmul.fp32_precision == own_setting
