"""The choice of what computes a head: made once, by what the machine and the head can, and told with its reason."""

import logging

import pytest
import torch

import plsc
from plsc.errors import UsageError
from plsc.head.backends import HeadShape, choose_backend
from plsc.native import build, head_kernels

compiled = pytest.mark.skipif(build.library() is None, reason="needs a C++ compiler")


def shape(dtype: torch.dtype = torch.bfloat16, dim: int = 64, **options: object) -> HeadShape:
    return HeadShape(
        torch.device(options.get("device", "cpu")),
        dtype,
        dim,
        options.get("centers", 1),
        options.get("margin", plsc.ArcFace()),
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
        ({"dtype": torch.float32}, "a torch.float32 table"),
        ({"dim": 60}, "D is no multiple of 32"),
    ],
)
def test_passes_that_have_no_kernel_are_pytorchs_and_the_update_is_not(options, reason):
    assert choose_backend(shape(**options)).describe() == f"cpu backend: compiled SGD; passes by torch: {reason}"


@compiled
def test_passes_are_compiled_where_there_are_tiles(monkeypatch):
    monkeypatch.setenv("PLSC_SELF_CHECK", "0")  # this processor may have none
    monkeypatch.setattr(head_kernels, "has_tiles", lambda: True)
    assert choose_backend(shape()).describe() == "cpu backend: compiled passes and SGD"
    monkeypatch.setattr(head_kernels, "has_tiles", lambda: False)
    assert choose_backend(shape()).reason == "compiled SGD; passes by torch: no matrix tiles (AMX)"


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
