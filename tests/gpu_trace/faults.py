"""Faults planted into a step, each of which the trace has to name."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import triton
import triton.language as tl
from torch import Tensor

from plsc.head.class_table import ClassRows, ClassTable
from plsc.head.sharded_head import ShardedHead
from plsc.head.staging import _Lane
from plsc.optim.verdict import Verdict
from plsc.parallel.collectives import all_reduce_max
from plsc.parallel.mesh import Mesh


@contextmanager
def cpu_tensor() -> Iterator[None]:
    """Hand the head's first kernel a table of norms that lies on the host."""
    rows = ClassTable.rows

    def on_host(table: ClassTable, *args: Any, **options: Any) -> ClassRows:
        found = rows(table, *args, **options)
        norms = torch.empty(found.inverse_norm.shape, device="cpu")
        return ClassRows(found.weight, norms, found.centers, found.selected)

    with patch.object(ClassTable, "rows", on_host):
        yield


@contextmanager
def extra_item() -> Iterator[None]:
    """Ask for the loss as a number, right behind its kernels."""
    with _behind_forward(lambda head, loss: loss.item()):
        yield


@contextmanager
def int32_offset() -> Iterator[None]:
    """Read the table by offsets that are computed in 32 bits."""

    def launch(head: ShardedHead, loss: Tensor) -> None:
        weight = head.softmax.table.parameter
        rows, dim = weight.shape
        sum_rows[(rows,)](weight, loss, dim, BLOCK=512)

    with _behind_forward(launch):
        yield


@contextmanager
def doubled_copy() -> Iterator[None]:
    """Copy the table in every pass."""
    rows = ClassTable.rows

    def copied(table: ClassTable, *args: Any, **options: Any) -> ClassRows:
        found = rows(table, *args, **options)
        return ClassRows(found.weight.clone(), found.inverse_norm, found.centers, found.selected)

    with patch.object(ClassTable, "rows", copied):
        yield


@contextmanager
def other_order() -> Iterator[None]:
    """Let the last rank join a collective before the loss that the others join behind it."""
    forward = ShardedHead.forward

    def reordered(head: ShardedHead, *args: Any) -> Tensor:
        if head.mesh.rank == head.mesh.world_size - 1:
            _extra_collective(head.mesh)
            return forward(head, *args)
        loss = forward(head, *args)
        _extra_collective(head.mesh)
        return loss

    with patch.object(ShardedHead, "forward", reordered):
        yield


@contextmanager
def hasty_copy_stream() -> Iterator[None]:
    """Let streams that copy rows begin without the work enqueued so far."""

    def on_stream(lane: Any, submitted: object, task: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        with torch.cuda.stream(lane._stream):
            task(*arguments)
            lane._stream.synchronize()

    with patch.object(_Lane, "_on_stream", on_stream):
        yield


@contextmanager
def unfinished_loads() -> Iterator[None]:
    """Fill the buffer with the next rows while the last ones may still be on their way to the device."""
    with _without_finish("load"):
        yield


@contextmanager
def unfinished_stores() -> Iterator[None]:
    """Store what the buffer holds before the device's rows have come into it."""
    with _without_finish("store"):
        yield


@contextmanager
def unready_copies() -> Iterator[None]:
    """Compute with fetched rows while they may still be on their way."""

    def on_stream(
        lane: Any, submitted: torch.cuda.Event, task: Callable[..., None], arguments: tuple[Any, ...]
    ) -> None:
        with torch.cuda.stream(lane._stream):
            lane._stream.wait_event(submitted)
            task(*arguments)

    with patch.object(_Lane, "_on_stream", on_stream), _without_finish("load"):
        yield


@contextmanager
def early_verdict() -> Iterator[None]:
    """Read a step's verdict before its copy has come to the host."""
    with patch.object(Verdict, "_wait_for", lambda verdict, event: None):
        yield


_COPIED = "host memory, sampled at 0.01, 1 rank"

# Faults by name, with the scenario whose step they are planted into.
FAULTS: dict[str, tuple[Callable[[], AbstractContextManager[None]], str]] = {
    "a CPU tensor": (cpu_tensor, "cosface, 8 ranks"),
    "an extra item": (extra_item, "cosface, 8 ranks"),
    "an int32 offset": (int32_offset, "50M classes, 1 rank"),
    "a doubled copy": (doubled_copy, "cosface, 8 ranks"),
    "another order of collectives": (other_order, "groups of 8, 64 ranks"),
    "a copy stream that does not wait": (hasty_copy_stream, _COPIED),
    "a buffer that is filled too early": (unfinished_loads, _COPIED),
    "a buffer that is stored too early": (unfinished_stores, _COPIED),
    "rows that are computed with too early": (unready_copies, _COPIED),
    "a verdict that is read too early": (early_verdict, "cosface, 8 ranks"),
}


@triton.jit
def sum_rows(weight, total, dim, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add up the first column; a row times the width leaves 32 bits where there are many rows."""
    offset = tl.program_id(0) * dim
    tl.atomic_add(total, tl.load(weight + offset).to(tl.float32))


def _behind_forward(action: Callable[[ShardedHead, Tensor], object]) -> AbstractContextManager[Any]:
    forward = ShardedHead.forward

    def acting(head: ShardedHead, *args: Any) -> Tensor:
        loss = forward(head, *args)
        action(head, loss.detach())
        return loss

    return patch.object(ShardedHead, "forward", acting)


@contextmanager
def _without_finish(name: str) -> Iterator[None]:
    """Let a task of the lanes not wait for its stream between its copies."""
    task = getattr(_Lane, name)

    def hasty(lane: Any, *args: Any) -> None:
        with patch.object(_Lane, "_finish", lambda lane: None):
            task(lane, *args)

    with patch.object(_Lane, name, hasty):
        yield


def _extra_collective(mesh: Mesh) -> None:
    all_reduce_max(torch.zeros(1, device=mesh.device), mesh)
