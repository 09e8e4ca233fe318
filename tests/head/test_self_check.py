"""Kernels are compared with float64 before they are used: one that disagrees is left out, loudly."""

import logging

import pytest
import torch

import plsc
from plsc.head import low_precision
from plsc.head.backends import HeadShape, choose_backend, cpu_backend, products, self_check, triton_backend
from plsc.head.backends.cpu_backend import CpuBackend
from plsc.head.backends.self_check import Shard, check_passes, check_update, problem_of
from plsc.head.backends.torch_backend import PartialSoftmax, TorchBackend
from plsc.head.backends.triton_backend import TritonBackend
from plsc.head.update_rules import AdamWRule, SgdRule, UpdateKind
from plsc.native import build
from plsc.parallel.mesh import with_head_groups

compiled = pytest.mark.skipif(build.library() is None, reason="needs a C++ compiler")
CPU = torch.device("cpu")
SGD = SgdRule(0.1, 0.9, 5e-4, nesterov=True)
ADAMW = AdamWRule(1e-3, 0.9, 0.999, 1e-8, 1e-2, 3)


@pytest.fixture(autouse=True)
def _forgotten_verdicts(monkeypatch):
    monkeypatch.setattr(self_check, "_verdicts", {})


class WrongSums(TorchBackend):
    """Pass 1 leaves a class out, as a kernel would whose last block is cut short."""

    name = "wrong"

    def first_pass(self, rows, batch, chunk_size, *, with_grad, keeps):
        right = super().first_pass(rows, batch, chunk_size, with_grad=with_grad)
        return PartialSoftmax(right.maximum, right.total * (1 - 1e-3), right.grad_embeddings)


class WrongGradient(TorchBackend):
    """Pass 2 gives noise."""

    name = "wrong"

    def second_pass(self, inputs):
        for chunk, gradient in super().second_pass(inputs):
            yield chunk, torch.randn(gradient.shape, generator=torch.Generator().manual_seed(0))


def noise(chunk, unit_gradient, state, update):
    """An updater that writes noise."""
    chunk.table.weight[chunk.index] = torch.randn(unit_gradient.shape).to(chunk.table.weight.dtype)


def untouched(chunk, unit_gradient, state, update):
    """An updater that does nothing, as a kernel that was compiled for another device."""


def passes_problem(backend, shard):
    return problem_of(lambda: check_passes(backend, shard))


def update_problem(backend, shard, rule, state_dtypes, rounding="stochastic"):
    return problem_of(lambda: check_update(backend, shard, UpdateKind(rule, state_dtypes, rounding)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"listed": True}, {"centers": 3}, {"dim": 20, "batch": 1}], ids=str)
def test_pytorch_agrees_with_the_formula(dtype, options):
    shard, backend = Shard(CPU, dtype, **({"dim": 64} | options)), TorchBackend("")
    assert passes_problem(backend, shard) is None
    for kind in (torch.float32, torch.bfloat16, torch.int8):
        assert update_problem(backend, shard, SGD, {"momentum": kind}) is None
    moments = {"first_moment": torch.int8, "second_moment": torch.bfloat16}
    assert update_problem(backend, shard, ADAMW, moments) is None
    assert update_problem(backend, shard, SGD, {"momentum": torch.int8}, "nearest") is None


@pytest.mark.parametrize(
    ("backend", "words"), [(WrongSums, "sums 0.001 (bound 2e-05)"), (WrongGradient, "rows' gradient")]
)
def test_wrong_passes_are_named(backend, words):
    problem = passes_problem(backend(""), Shard(CPU, torch.bfloat16, 64))
    assert words in problem
    assert "embeddings' gradient" not in problem


@pytest.mark.parametrize(
    ("updater", "words"),
    [(noise, "weights, roundings"), (untouched, "momentum")],
    ids=["noise", "untouched"],
)
def test_wrong_updates_are_named(updater, words):
    backend = TorchBackend("")
    backend.updater = lambda *args: updater
    problem = update_problem(backend, Shard(CPU, torch.bfloat16, 64), SGD, {"momentum": torch.float32})
    assert words in problem


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.int8])
def test_rounding_that_cuts_off_is_named(monkeypatch, kind):
    monkeypatch.setattr(low_precision, "random_bits", lambda seed, step, rows, dim: torch.zeros(len(rows), dim).int())
    shard = Shard(CPU, torch.bfloat16, 64)
    problem = update_problem(TorchBackend(""), shard, SGD, {"momentum": kind})
    assert "weights, bias" in problem
    assert "momentum, bias" in problem


def cut_to_tf32(values: torch.Tensor) -> torch.Tensor:
    """As matrix units take float32 factors: the last 13 bits are left out."""
    return (values.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


@pytest.mark.parametrize("dim", [8, 64, 512])
def test_passes_have_the_bounds_of_their_precision(monkeypatch, dim):
    monkeypatch.setattr(products, "product", lambda a, b, *_: cut_to_tf32(a) @ cut_to_tf32(b))
    backend = TorchBackend("")
    assert passes_problem(backend, Shard(CPU, torch.float32, dim, fp32_precision="tf32")) is None
    for precision in ("ieee", "bf16x3"):
        shard = Shard(CPU, torch.float32, dim, fp32_precision=precision)
        assert "sums" in passes_problem(backend, shard)


def test_pytorch_takes_the_place_of_kernels_with_a_precision_that_it_has(monkeypatch):
    monkeypatch.setattr("plsc.head.backends.runs_on", lambda device: device.type == "cuda")
    monkeypatch.setattr(TritonBackend, "first_pass", lambda *args, **options: 1 / 0)
    told = [
        choose_backend(HeadShape(torch.device("cuda"), torch.float32, 64, 1, plsc.ArcFace(), precision)).describe()
        for precision in ("tf32", "bf16x3")
    ]
    assert [line.rpartition("; ")[2] for line in told] == ["float32 products: tf32", "float32 products: ieee"]
    assert all(line.startswith("torch backend: the passes of the triton backend disagree") for line in told)


def test_not_a_number_is_a_disagreement():
    backend = TorchBackend("")
    backend.updater = lambda *args: lambda chunk, *rest: chunk.table.weight.fill_(torch.nan)
    assert "nan" in update_problem(backend, Shard(CPU, torch.float32, 64), SGD, {})


def test_a_head_whose_passes_disagree_computes_by_pytorch(monkeypatch, caplog):
    monkeypatch.setattr(triton_backend, "runs_on", lambda device: True)
    monkeypatch.setattr("plsc.head.backends.runs_on", lambda device: True)
    for name in ("first_pass", "second_pass"):
        monkeypatch.setattr(TritonBackend, name, getattr(WrongSums, name))
    monkeypatch.setattr(TritonBackend, "first_pass", lambda *args, **options: 1 / 0)
    shape = HeadShape(CPU, torch.bfloat16, 64, 1, plsc.ArcFace())
    with caplog.at_level(logging.WARNING, "plsc"):
        chosen = [choose_backend(shape), choose_backend(shape, "triton")]
    assert {backend.name for backend in chosen} == {"torch"}
    assert "ZeroDivisionError" in chosen[0].describe()
    assert len(caplog.messages) == 2
    assert all(line.startswith("KERNELS SWITCHED OFF: the passes of the triton backend") for line in caplog.messages)
    monkeypatch.setenv("PLSC_SELF_CHECK", "0")
    assert choose_backend(shape).name == "triton"


@compiled
@pytest.mark.parametrize("momentum_dtype", [torch.float32, torch.int8])
def test_an_update_kernel_that_disagrees_is_left_out(monkeypatch, caplog, momentum_dtype):
    steps = []
    for kernel in (None, noise):
        if kernel is not None:
            monkeypatch.setattr(cpu_backend, "_sgd", kernel)
            self_check._verdicts.clear()
        head = plsc.ShardedHead(64, 90, momentum_dtype=momentum_dtype, backend="torch" if kernel is None else "cpu")
        with caplog.at_level(logging.WARNING, "plsc"):
            optimizer = plsc.HeadSGD(head, lr=0.1, momentum=0.9)
        head(torch.randn(20, 64, generator=torch.Generator().manual_seed(0)), torch.arange(20)).backward()
        optimizer.step()
        steps.append(head.weight.detach())
    torch.testing.assert_close(*steps, rtol=0, atol=0)
    (line,) = caplog.messages
    assert line.startswith("KERNEL SWITCHED OFF: the SgdRule kernel of the cpu backend disagrees with float64")
    assert "updates by torch: the SgdRule kernel" in head.backend.describe()


@compiled
def test_kernels_are_checked_once_in_a_process(monkeypatch):
    checks = []
    whole = self_check.check_update
    monkeypatch.setattr(
        self_check, "check_update", lambda *given, **also: checks.append(given[1]) or whole(*given, **also)
    )
    for _ in range(3):
        head = plsc.ShardedHead(64, 90, backend="cpu")
        plsc.HeadSGD(head, lr=0.1, momentum=0.9)
        assert head.backend.name == "cpu"
    plsc.HeadSGD(plsc.ShardedHead(32, 90, backend="cpu"), lr=0.0, momentum=0.9)
    assert [shard.dim for shard in checks] == [64, 32]


@compiled
def test_checks_leave_random_numbers_and_modes_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with torch.inference_mode(), torch.autocast("cpu"):
        shard = Shard(CPU, torch.bfloat16, 64)
        backend = CpuBackend("", with_passes=False)
        assert passes_problem(backend, shard) is None
        assert update_problem(backend, shard, SGD, {"momentum": torch.int8}) is None
    assert torch.equal(torch.get_rng_state(), before)


def different_backends(mesh):
    own = with_head_groups(mesh, 1)
    return plsc.ShardedHead(64, 90, own, backend="torch" if mesh.rank == 0 else "cpu").backend.name


@compiled
@pytest.mark.slow
def test_replicas_of_a_shard_share_a_backend(ranks):
    assert ranks(2, different_backends) == ["torch", "torch"]
