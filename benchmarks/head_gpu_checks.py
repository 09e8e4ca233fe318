"""Is the class head right on a GPU? Each check raises AssertionError, or returns a line that says what was found.

They also run where TRITON_INTERPRET=1, on the CPU, at smaller sizes.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import plsc
from plsc.head.backends.torch_backend import Batch, PassInputs, TorchBackend
from plsc.head.backends.triton_backend import TritonBackend
from plsc.head.backends.triton_update import update_rows
from plsc.head.class_table import ClassRows
from plsc.head.low_precision import RowState
from plsc.head.update_rules import SgdRule, Update
from plsc.parallel import Mesh

LOW = {"weight_dtype": torch.bfloat16, "momentum_dtype": torch.int8}
FAR_ROWS, FAR_DIM = (1 << 22) + 1024, 512  # 2³¹ elements, and some more


@contextmanager
def plain_path(optimizer: plsc.HeadSGD | None = None) -> Iterator[None]:
    """Run no Triton kernel within: neither in passes, nor in the update of ``optimizer``."""
    with ExitStack() as patches:
        for name in ("first_pass", "second_pass"):
            patches.enter_context(patch.object(TritonBackend, name, getattr(TorchBackend, name)))
        if optimizer is not None:
            patches.enter_context(patch.object(optimizer, "_updater", optimizer.head.backend.update))
        yield


@contextmanager
def in_shape(*, stored: bool, is_wide: bool = False) -> Iterator[None]:
    """Let Triton's passes store their logits within, whatever the batch, in wide blocks if wished; or never."""
    with patch.object(TritonBackend, "_stores", lambda *_: stored), patch.object(TritonBackend, "_is_wide", is_wide):
        yield


def some_head(device: torch.device, classes: int, dim: int, **options: Any) -> tuple[plsc.ShardedHead, plsc.HeadSGD]:
    """A head whose rows have norms around √dim, and its optimizer."""
    head = plsc.ShardedHead(dim, classes, Mesh(0, 1, 0, device), **(LOW | options))
    with torch.no_grad():
        head.weight.mul_(100)
    has_momentum = head.momentum_dtype is not None
    return head, plsc.HeadSGD(head, lr=0.1, momentum=0.9 if has_momentum else 0.0, weight_decay=5e-4)


def some_batch(device: torch.device, classes: int, dim: int, batch: int) -> tuple[Tensor, Tensor]:
    """Embeddings that have something to do with their labels' rows."""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(batch, dim, generator=generator, device=device)
    return x, torch.randint(classes, (batch,), generator=generator, device=device)


def relative_error(got: Tensor, want: Tensor) -> float:
    """‖got − want‖ / ‖want‖."""
    return float((got.double() - want.double()).norm() / want.double().norm())


def passes_agree(device: torch.device, classes: int = 5000, dim: int = 512, batch: int = 240) -> str:
    """Sums, pull and gradient against the formula in float64, by every way to multiply, in all shapes."""
    worst = 0.0
    fused, stored = {"stored": False}, {"stored": True}
    for dtype, precision, limit, shape, memory in (
        (torch.bfloat16, "ieee", 1.2e-2, fused, 0),
        (torch.bfloat16, "ieee", 1.2e-2, stored, 0),
        (torch.bfloat16, "ieee", 1.2e-2, stored | {"is_wide": True}, 0),
        (torch.bfloat16, "ieee", 1.2e-2, stored, 1 << 30),
        (torch.bfloat16, "ieee", 1.2e-2, stored, 3000 * 2 * batch),  # of the first chunk alone
        (torch.float32, "tf32", 2e-2, fused, 0),
        (torch.float32, "tf32", 2e-2, stored, 0),
        (torch.float32, "tf32", 2e-2, stored, 1 << 30),
        (torch.float32, "bf16x3", 1e-3, fused, 0),
    ):
        generator = torch.Generator(device).manual_seed(1)
        weight = torch.randn(classes, dim, generator=generator, device=device).to(dtype)
        x = torch.nn.functional.normalize(torch.randn(batch, dim, generator=generator, device=device)).to(dtype)
        rows = ClassRows(weight, weight.float().norm(dim=1).reciprocal())
        position = torch.randint(-1, classes, (batch,), generator=generator, device=device)
        log_z, pull = torch.full((batch,), 9.0, device=device), torch.full((batch,), -0.5, device=device)
        given = Batch(x, position, torch.zeros(batch, device=device), plsc.ArcFace(s=64.0), {})
        backend = TritonBackend("checked", dim=dim, with_passes=True, fp32_precision=precision)  # type: ignore[arg-type]
        backend = backend.in_shape(**shape)
        backend.exponentials_memory = memory
        got = backend.first_pass(rows, given, 2048, with_grad=True, keeps=True)
        kept = [] if got.exponentials is None else [got.exponentials]
        pieces = backend.second_pass(PassInputs(rows, given, log_z, log_z, pull, 2048, exponentials=kept))
        gradient = torch.cat([piece for _, piece in pieces])
        unit = weight.double() / weight.double().norm(dim=1, keepdim=True)
        target = torch.arange(classes, device=device)[:, None] == position
        z = 64.0 * unit @ x.double().T
        e = z.exp().masked_fill(target, 0)
        p = torch.where(target, pull.double(), (z - log_z).exp() * log_z)
        assert got.grad_embeddings is not None
        errors = [
            relative_error(got.total, e.sum(0)),
            relative_error(got.grad_embeddings, e.T @ unit),
            relative_error(gradient, p @ x.double()),
        ]
        assert errors[0] < (2e-5 if dtype == torch.bfloat16 else limit), (dtype, precision, errors)
        assert max(errors) < limit, (dtype, precision, errors)
        worst = max(worst, *errors)
    return f"largest relative error {worst:.1e}"


def updates_agree(device: torch.device, rows: int = 3000, dim: int = 512) -> str:
    """The kernel against the plain path on the same gradient: bits may differ where a sum's last place does."""
    worst = 0.0
    for weight_dtype in (torch.float32, torch.bfloat16):
        for momentum_dtype in (None, torch.float32, torch.bfloat16, torch.int8):
            kinds = {"weight_dtype": weight_dtype, "momentum_dtype": momentum_dtype}
            tables = [_two_steps(device, rows, dim, plain, **kinds) for plain in (False, True)]
            for mine, theirs in zip(*tables, strict=True):
                if mine.dtype in (torch.bfloat16, torch.int8):
                    worst = max(worst, float((mine != theirs).double().mean()))
                assert relative_error(mine, theirs) < 1e-3, (weight_dtype, momentum_dtype)
    assert worst < 2e-3, worst
    return f"at most {worst:.1e} of a table's low-precision numbers differ"


def _two_steps(device: torch.device, rows: int, dim: int, plain: bool, **kinds: Any) -> list[Tensor]:
    """Weights, norms and state after two updates of every row by made-up gradients."""
    head, optimizer = some_head(device, rows, dim, backend="torch" if plain else None, **kinds)
    (chunk,) = head.softmax.table.rows(None).chunks(rows)
    generator = torch.Generator(device).manual_seed(2)
    for _ in range(2):
        gradient = torch.randn(rows, dim, generator=generator, device=device)
        optimizer._updater(chunk, gradient, optimizer._state.of(chunk), optimizer._step(0.5))
        head.softmax.table.norms_are_current()
        chunk.__dict__.pop("weight", None), chunk.__dict__.pop("inverse_norm", None)
        optimizer.steps += 1
    return [head.weight.detach(), head.inverse_norms(), *states_of(optimizer)]


def states_of(optimizer: plsc.HeadSGD | plsc.HeadAdamW) -> list[Tensor]:
    """The tensors of an optimizer's momentum or moments."""
    return [tensor for table in optimizer.tables.values() for tensor in table.tensors("state").values()]


def steps_agree(device: torch.device, classes: int = 20_000, dim: int = 512, batch: int = 256) -> str:
    """Three steps of the whole head with kernels and without; also by exponentials of all classes, and of some."""
    x, y = some_batch(device, classes, dim, batch)

    def after(**options: Any) -> tuple[Tensor, Tensor, Tensor]:
        head, optimizer = some_head(device, classes, dim, **options)
        for _ in range(3):
            mine = x.clone().requires_grad_()
            loss = head(mine, y)
            loss.backward()
            optimizer.step()
        assert mine.grad is not None
        return loss.detach(), mine.grad, head.weight.detach()

    want, worst = after(backend="torch"), [0.0] * 3
    for share in (0.0, 1.0, 0.6):
        kept = {"exponentials_memory": int(share * 2 * classes * batch), "chunk_classes": classes // 4}
        with in_shape(stored=True) if share else nullcontext():
            got = after(**(kept if share else {}))
        errors = [relative_error(mine, theirs) for mine, theirs in zip(got, want, strict=True)]
        assert max(errors) < 1e-2, (share, errors)
        worst = list(map(max, worst, errors))
    return f"relative differences of loss, gradient, weights: {', '.join(f'{error:.1e}' for error in worst)}"


def chunks_agree(
    device: torch.device,
    classes: int = 20_000,
    dim: int = 512,
    batch: int = 256,
    sizes: tuple[int, ...] = (4096, 1024),
) -> str:
    """Weights after two steps, bit by bit, at several chunk sizes."""
    tables = []
    for chunk in (classes, *sizes):
        head, optimizer = some_head(device, classes, dim, chunk_classes=chunk)
        x, y = some_batch(device, classes, dim, batch)
        for _ in range(2):
            head(x, y).backward()
            optimizer.step()
        tables.append(head.weight.detach())
    unequal = max(float((other != tables[0]).double().mean()) for other in tables[1:])
    assert unequal < 1e-3, unequal
    return "weights are bit-identical" if unequal == 0 else f"{unequal:.1e} of the weights differ"


def skipped_step_changes_nothing(device: torch.device, classes: int = 5000, dim: int = 512) -> str:
    """A step with found_inf leaves weights, norms and state, bit for bit."""
    head, optimizer = some_head(device, classes, dim)
    x, y = some_batch(device, classes, dim, 64)
    head(x, y).backward()
    optimizer.step()
    tables = [head.weight.detach(), head.inverse_norms(), *states_of(optimizer)]
    before = [table.clone() for table in tables]
    head(x, y).backward()
    optimizer.found_inf = torch.ones((), device=device)  # type: ignore[attr-defined]
    optimizer.step()
    assert optimizer.skipped
    assert all(torch.equal(*pair) for pair in zip(tables, before, strict=True))
    return "every bit stays"


def far_rows_are_reached(device: torch.device) -> str:
    """A step on a table of more than 2³¹ elements moves all rows that take part, the others not at all."""
    head, optimizer = some_head(device, FAR_ROWS, FAR_DIM, sample_rate=0.0)
    edge = (1 << 31) // FAR_DIM
    touched = torch.tensor([0, 1, edge - 1, edge, edge + 1, FAR_ROWS - 1], device=device)
    x, _ = some_batch(device, FAR_ROWS, FAR_DIM, len(touched))
    near = torch.cat([touched - 1, touched + 1]).clamp(0, FAR_ROWS - 1)
    others = near[~torch.isin(near, touched)]
    weight = head.weight.detach()
    before, kept = weight[touched].clone(), weight[others].clone()
    head(x, touched).backward()
    optimizer.step()
    assert (weight[touched] != before).any(1).all()
    assert torch.equal(weight[others], kept)
    fresh = weight[touched].float().norm(dim=1).reciprocal()
    assert torch.allclose(head.inverse_norms()[touched], fresh)
    whole = plsc.ShardedHead(FAR_DIM, FAR_ROWS, Mesh(0, 1, 0, device), **LOW)  # type: ignore[arg-type]
    exact = plsc.HeadSGD(whole, lr=0.1, momentum=0.9, weight_decay=5e-4)
    last = whole.weight.detach()[-3:].clone()
    whole(x, touched).backward()
    exact.step()
    assert (whole.weight.detach()[-3:] != last).any(1).all()
    return f"element {FAR_ROWS * FAR_DIM:,} and its neighbours"


def chunks_never_wait(device: torch.device, classes: int = 20_000, dim: int = 512) -> str:
    """Nothing in the loops over chunks waits for the device."""
    head, _ = some_head(device, classes, dim)
    x, y = some_batch(device, classes, dim, 128)
    rows, features = head.softmax.table.rows(None), torch.nn.functional.normalize(x).bfloat16()
    log_z, scale, pull = (torch.full((128,), value, device=device) for value in (9.0, 1.0, -1.0))
    state = RowState(classes, dim, torch.int8, device)
    rule = SgdRule(lr=0.1, momentum=0.9, weight_decay=0.0, nesterov=False)
    update = Update(rule, 1.0, "stochastic", seed=0, step=1, first_row=0)
    given = Batch(features, y, torch.zeros(128, device=device), head.margin, {})
    backend = head.backend
    for mode in ("default", "error"):  # kernels are compiled before
        _set_sync_debug_mode(mode)
        try:
            backend.first_pass(rows, given, 4096, with_grad=True)
            inputs = PassInputs(rows, given, log_z, scale, pull, 4096)
            backend.update_pass(inputs, update_rows, lambda chunk: {"momentum": state}, update)
        finally:
            _set_sync_debug_mode("default")
    return "no wait"


def _set_sync_debug_mode(mode: str) -> None:
    """Set it without torch's warning that this is a prototype: warnings end tests."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*prototype feature")
        torch.cuda.set_sync_debug_mode(mode)


CHECKS: tuple[Callable[[torch.device], str], ...] = (
    passes_agree,
    updates_agree,
    steps_agree,
    chunks_agree,
    skipped_step_changes_nothing,
    chunks_never_wait,
    far_rows_are_reached,
)
SMALL: dict[Callable[..., str], dict[str, Any]] = {  # for the interpreter
    passes_agree: {"classes": 70, "dim": 32, "batch": 32},
    updates_agree: {"rows": 40, "dim": 32},
    steps_agree: {"classes": 90, "dim": 32, "batch": 16},
    chunks_agree: {"classes": 150, "dim": 32, "batch": 9, "sizes": (64, 32)},
    skipped_step_changes_nothing: {"classes": 90, "dim": 32},
}
