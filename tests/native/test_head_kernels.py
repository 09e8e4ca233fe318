"""The compiled kernels against the float64 oracle, and against PyTorch's path, whose results they must give."""

import os
import subprocess
import sys

import pytest
import torch
from reference import Oracle, relative_error
from support.head_problems import LOW, everything, same
from support.kernel_paths import kernel_paths, use_path

import plsc
from plsc.errors import UsageError
from plsc.head.backends.torch_backend import backward_through_normalize
from plsc.native import build, head_kernels

compiled = pytest.mark.skipif(build.library() is None, reason="needs a C++ compiler")
MARGIN = plsc.ArcFace(s=32.0, m=0.3)


@pytest.fixture(params=kernel_paths("torch"))
def path(request, monkeypatch):
    """Every way in which a CPU computes the head: without a compiler, and by each part of the instructions."""
    monkeypatch.setenv("PLSC_SELF_CHECK", "0")  # a kernel that is wrong would give way to PyTorch, which is right
    use_path(request.param, monkeypatch)
    return request.param


@pytest.fixture
def plain(monkeypatch):
    """A function that switches the kernels off."""
    return lambda: monkeypatch.setenv("PLSC_NATIVE", "0")


def some_batch(batch, dim, classes, seed=0):
    generator = torch.Generator().manual_seed(100 + seed)  # a head of seed 0 begins with rows that seed 0 draws
    x = torch.randn(batch, dim, generator=generator)
    return (x / x.norm(dim=1, keepdim=True)).bfloat16().float(), torch.randint(classes, (batch,), generator=generator)


def trained(batch, dim, classes, steps=3, threads=1, **options):
    """(losses, the embeddings' gradients, head, optimizer) after some steps on a table of wide rows."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        head = plsc.ShardedHead(dim, classes, margin=MARGIN, **{**LOW, **options})
        with torch.no_grad():
            head.weight.mul_(100)
        momentum = 0.9 if head.momentum_dtype is not None else 0.0
        optimizer = plsc.HeadSGD(head, lr=0.5, momentum=momentum, weight_decay=1e-3)
        losses, gradients = [], []
        for step in range(steps):
            x, y = some_batch(batch, dim, classes, seed=step)
            x.requires_grad_()
            loss = head(x, y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            gradients.append(x.grad)
        return losses, gradients, head, optimizer
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("batch", "dim", "classes"), [(5, 32, 7), (32, 64, 256), (130, 96, 700), (300, 512, 1000)])
def test_loss_and_gradients_are_the_oracles_within_rounding(path, dtype, batch, dim, classes):
    x, y = some_batch(batch, dim, classes)
    head = plsc.ShardedHead(dim, classes, margin=MARGIN, weight_dtype=dtype, momentum_dtype=None)
    of_loss, of_gradients = {torch.bfloat16: (1e-4, 1e-2), torch.float32: (1e-6, 1e-5)}[dtype]
    weight = head.weight.detach().double().requires_grad_()
    wide, own = x.double().requires_grad_(), x.clone().requires_grad_()
    expected = Oracle("arcface", s=32.0, parameters={"m": 0.3}).loss(wide, y, weight)
    expected.backward()
    loss = head(own, y)
    loss.backward()
    # bf16 of unit embeddings is exact here but for ‖x‖
    assert loss.item() == pytest.approx(expected.item(), rel=of_loss)
    assert relative_error(own.grad, wide.grad) < of_gradients
    by_rows = torch.cat(
        [
            backward_through_normalize(g, chunk).clone()
            for chunk, g in head.softmax.gradient_chunks(head.softmax.pending.batches)
        ]
    )
    assert relative_error(by_rows, weight.grad) < of_gradients


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum_dtype": torch.bfloat16},
        {"momentum_dtype": torch.float32},
        {"momentum_dtype": None},
        {"sample_rate": 0.3},
        {"sample_rate": 0.0},
    ],
)
def test_the_kernels_and_pytorch_agree(path, options, plain):
    own = trained(90, 64, 700, **options)
    plain()
    other = trained(90, 64, 700, **options)
    assert own[0] == pytest.approx(other[0], rel=2e-4)
    for mine, theirs in zip(own[1], other[1], strict=True):
        assert relative_error(mine, theirs) < 5e-3
    mine, theirs = own[2].weight.detach().float(), other[2].weight.detach().float()
    assert relative_error(mine, theirs) < 2e-3
    assert ((mine - theirs).abs() > theirs.abs() / 64 + 1e-3).float().mean() < 1e-3  # one unit, rounded the other way
    assert torch.allclose(own[2].inverse_norms(), own[2].weight.detach().float().norm(dim=1).reciprocal(), rtol=1e-5)


@pytest.mark.parametrize("momentum_dtype", [torch.float32, torch.bfloat16, torch.int8, None])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("nesterov", [False, True])
def test_the_row_update_is_pytorchs_bit_for_bit_but_for_sums(path, weight_dtype, momentum_dtype, nesterov, plain):
    """With the same gradient: the random bits are the same, so at most the last place differs, and rarely."""

    def updated():
        head = plsc.ShardedHead(40, 300, weight_dtype=weight_dtype, momentum_dtype=momentum_dtype, seed=3)
        look_ahead = nesterov and momentum_dtype is not None
        optimizer = plsc.HeadSGD(
            head, lr=0.1, momentum=0.9 if momentum_dtype is not None else 0, weight_decay=0.01, nesterov=look_ahead
        )
        for step in range(3):
            optimizer.steps = step
            chunks = list(head.softmax.table.rows(None).chunks(1000))
            gradient = torch.randn(300, 40, generator=torch.Generator().manual_seed(step))
            optimizer._updater(chunks[0], gradient, optimizer._state.of(chunks[0]), optimizer._step(0.5))
        tables = [head.weight.detach().float(), head.softmax.table.rows(None).inverse_norm]
        return tables + [table.read(slice(None), torch.float32) for table in optimizer.tables.values()]

    own = updated()
    plain()
    other = updated()
    rounded = weight_dtype == torch.bfloat16 or momentum_dtype in (torch.bfloat16, torch.int8)
    for mine, theirs in zip(own, other, strict=True):
        assert relative_error(mine, theirs) < (1e-2 if rounded else 1e-6)
    if weight_dtype == torch.bfloat16:
        assert (own[0] == other[0]).float().mean() > 0.99


@pytest.mark.parametrize("options", [{}, {"weight_dtype": torch.float32, "momentum_dtype": torch.float32}])
def test_weights_are_the_same_bits_for_every_chunk_size_and_number_of_threads(path, options):
    ways = [{"chunk_classes": size} for size in (256, 512, 768, 4096)]
    ways += [{"threads": 3}] if path != "torch" else []
    results = [trained(70, 64, 1500, steps=1, **way, **options)[2].weight.detach() for way in ways]
    last_place = 1e-6 if path == "torch" else 0.0  # PyTorch's first pass sums by chunks, and log Z moves with them
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=0.0, atol=last_place)


def test_rows_that_take_no_part_keep_every_bit(path):
    head = plsc.ShardedHead(64, 2000, margin=MARGIN, sample_rate=0.05, **LOW)
    optimizer = plsc.HeadSGD(head, lr=0.5, momentum=0.9, weight_decay=0.01)
    for step in range(3):
        before = everything(head, optimizer)
        head(*some_batch(16, 64, 2000, seed=step)).backward()
        untouched = torch.ones(2000, dtype=torch.bool)
        untouched[head.softmax.pending.batches[0].selected] = False
        optimizer.step()
        after = everything(head, optimizer)
        assert all(torch.equal(a[untouched], b[untouched]) for a, b in zip(before, after, strict=True))
        assert not torch.equal(before[0], after[0])


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_changes_no_bit(path, poison):
    head = plsc.ShardedHead(64, 600, margin=MARGIN, **LOW)
    optimizer = plsc.HeadSGD(head, lr=0.5, momentum=0.9, weight_decay=0.01)
    x, y = some_batch(40, 64, 600)
    head(x, y).backward()
    optimizer.step()
    before = everything(head, optimizer)
    x[3, 5] = poison
    head(x, y).backward()
    optimizer.step()
    assert optimizer.skipped
    assert same(before, everything(head, optimizer))


def test_rounding_depends_on_the_seed_and_the_global_row(path):
    tables = [trained(40, 64, 300, steps=1, seed=seed)[2].weight.detach() for seed in (1, 1, 2)]
    assert torch.equal(tables[0], tables[1])
    assert not torch.equal(tables[0], tables[2])


@pytest.mark.live
@pytest.mark.slow
def test_without_a_compiler_pytorch_computes():
    """The switch, and a compiler that fails: training goes on, and a failing compiler is said once."""
    program = (
        "import torch, plsc; from plsc.native import build\n"
        "head = plsc.ShardedHead(32, 50, weight_dtype=torch.bfloat16, momentum_dtype=None)\n"
        "head(torch.randn(4, 32), torch.arange(4)).backward(); plsc.HeadSGD(head, lr=0.1).step()\n"
        "print(build.library())"
    )
    unset = {name: value for name, value in os.environ.items() if name not in ("PLSC_NATIVE", "PLSC_CPU")}
    for name, value, said in (("PLSC_NATIVE", "0", ""), ("CXX", "/bin/false", "could not be compiled")):
        run = subprocess.run(
            [sys.executable, "-c", program], env=unset | {name: value}, capture_output=True, text=True, check=True
        )
        assert run.stdout.strip() == "None"
        assert said in run.stderr


@compiled
def test_a_path_that_does_not_exist_or_that_the_processor_lacks_is_a_usage_error(monkeypatch):
    monkeypatch.setenv("PLSC_CPU", "sse9")
    with pytest.raises(
        UsageError, match="PLSC_CPU=sse9 is unknown: give avx2, avx512, avx512-bf16, amx, neon, neon-bf16,"
    ):
        build.library()
    monkeypatch.setitem(build._PATHS, "future", (["-march=native"], ["__NO_PROCESSOR_HAS_THIS__"]))
    monkeypatch.setenv("PLSC_CPU", "future")
    with pytest.raises(UsageError, match="PLSC_CPU=future: this processor lacks future") as error:
        build.library()
    assert "\n" not in str(error.value)


def test_a_path_multiplies_by_its_own_units(path):
    assert head_kernels.products(torch.bfloat16) == {"torch": None}.get(path, path)
    in_float32 = {"torch": None, "amx": "avx512", "avx512-bf16": "avx512", "neon-bf16": "neon"}
    assert head_kernels.products(torch.float32) == in_float32.get(path, path)


@pytest.mark.live
@pytest.mark.slow
@compiled
def test_a_cache_that_others_can_write_is_not_trusted(tmp_path):
    folder = tmp_path / "plsc"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    program = "from plsc.native import build; print(build.library())"
    run = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == "None"
    assert "can be written by others" in run.stderr
