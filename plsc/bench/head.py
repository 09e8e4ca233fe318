"""Our class heads under measurement, and a rank that measures one, or a baseline, or the roofline.

``python -m plsc.bench.head TASK.json FOLDER`` reads a :class:`~plsc.bench.comparison.Task` and leaves figures, or the
reason why there are none, in FOLDER.
"""

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from plsc.bench.comparison import (
    ARCFACE,
    ROOFLINE,
    SGD,
    Contestant,
    Task,
    all_contestants,
    be_contestant,
    is_sampled,
    measure_steps,
)
from plsc.bench.harness import limit_allocations
from plsc.devices import low_precision_units
from plsc.head import ShardedHead
from plsc.head.class_table import class_range
from plsc.losses import ArcFace
from plsc.native import head_kernels
from plsc.optim import HeadSGD
from plsc.parallel.collectives import all_reduce_sum
from plsc.parallel.mesh import Mesh

Step = Callable[[Tensor, Tensor], Tensor]  # embeddings (b, D) that require a gradient, labels (b,) -> loss

_REHEARSAL_CLASSES = 2048
_BATCH_SEED = 0x5EED_0F_BA7C4  # unlike the heads' seeds: with the same one the embeddings would be class rows

# Of the roofline, by device type.
_TABLE_ROWS = {"cpu": (2_048, 65_536), "cuda": (524_288,)}  # in one product; a processor's cache holds the small one
_COPY_BYTES = {"cpu": 128 << 20, "cuda": 2 << 30}  # beyond any cache
_LEAST_SECONDS = 0.2  # for a rate
_PRODUCTS = 4  # of an exact step: logits in both passes, the embeddings' gradient, the rows' gradient


def training_step(loss_of: Step, optimizer: torch.optim.Optimizer) -> Step:
    """Return a step of forward, backward and update."""

    def step(embeddings: Tensor, labels: Tensor) -> Tensor:
        loss = loss_of(embeddings, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _sharded_head(weight: str, momentum: str | None, task: Task, mesh: Mesh) -> Step:
    rate = task.sample_rate if is_sampled(task.contestant) else 1.0
    margin = ArcFace(**ARCFACE)
    head = ShardedHead(task.dim, task.classes, mesh, margin, rate, weight_dtype=weight, momentum_dtype=momentum)
    optimizer = HeadSGD(head, **SGD if momentum is not None else {**SGD, "momentum": 0.0})
    return training_step(head, optimizer)


# Heads --------------------------------------------------------------------------------------------------------------


def measure_head(task: Task, mesh: Mesh) -> dict[str, Any]:
    """Measure one head on this rank; the figures are those of :func:`plsc.bench.comparison.measure_steps`."""
    build = all_contestants("head", HEADS, task.baselines)[task.contestant].build
    # What libraries load, compile or allocate at their first call belongs to them, not to this head's tables.
    rehearsal = replace(task, classes=min(task.classes, _REHEARSAL_CLASSES))
    build(rehearsal, mesh)(*_batch(rehearsal, mesh, 0))
    gc.collect()
    if task.memory_bytes is not None:
        limit_allocations(task.memory_bytes)
    batches = [_batch(task, mesh, number) for number in range(task.steps + 1)]
    return measure_steps(task, mesh, build, batches, warm_up=1)


def _batch(task: Task, mesh: Mesh, number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(_BATCH_SEED + number * mesh.world_size + mesh.rank)
    embeddings = torch.randn(task.batch, task.dim, generator=generator)
    labels = torch.randint(task.classes, (task.batch,), generator=generator)
    return embeddings.to(mesh.device).requires_grad_(), labels.to(mesh.device)


# Roofline -----------------------------------------------------------------------------------------------------------


def measure_roofline(task: Task, mesh: Mesh) -> dict[str, Any]:
    """Measure the rates of this rank while all ranks do, and the time of an exact step that they imply.

    On a CPU seconds are of processor time, which other programs do not disturb.

    Returns:
        ``product_gflops`` of the fastest of a step's products, by PyTorch or by our own kernels, in bfloat16 where
        there are units for it, or in float32 where that is faster (``note`` names the dtype); ``copy_gb_s`` of bytes
        read and written; ``wall_s`` and ``cpu_s`` (None on a GPU) for 8·B·C·D / ranks floating-point operations.
    """
    all_reduce_sum(torch.zeros(1, device=mesh.device), mesh)  # all ranks begin together
    on_cpu = mesh.device.type == "cpu"
    has_bf16 = not on_cpu or "bf16" in low_precision_units(mesh.device).precisions  # emulated, it takes minutes
    dtypes = (*([torch.bfloat16] if has_bf16 else []), *([torch.float32] if on_cpu else []))
    rate, dtype = max(((_product_rate(task, mesh.device, each), each) for each in dtypes), key=lambda pair: pair[0])
    first, stop = class_range(task.classes, mesh.rank, mesh.world_size)
    seconds = 2 * _PRODUCTS * task.batch * task.nproc * (stop - first) * task.dim / rate
    return {
        "product_gflops": rate / 1e9,
        "copy_gb_s": _copy_rate(task, mesh.device) / 1e9,
        "wall_s": seconds,
        "cpu_s": seconds * task.threads if on_cpu else None,
        "note": str(dtype).removeprefix("torch."),
    }


def _product_rate(task: Task, device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of the fastest product, at the number of rows at which it is."""
    samples = task.batch * task.nproc
    embeddings = torch.nn.functional.normalize(torch.randn(samples, task.dim, device=device)).to(dtype)
    rates = []
    for rows in _TABLE_ROWS[device.type]:
        table = torch.randn(min(task.classes, rows), task.dim, device=device).to(dtype)
        works = [*_torch_products(table, embeddings), *_own_product(table, embeddings)]
        fastest = min(_seconds_per_call(work, task, device) for work in works)
        rates.append(2 * table.numel() * samples / fastest)
    return max(rates)


def _torch_products(table: Tensor, embeddings: Tensor) -> Iterator[Callable[[], object]]:
    """A step's products as PyTorch has them: W·xᵀ, P·x and Pᵀ·W."""
    probability = torch.rand_like(table[:, :1]).expand(-1, len(embeddings)).contiguous()
    for left, right in ((table, embeddings.t()), (probability, embeddings), (probability.t(), table)):
        yield partial(torch.mm, left, right, out=left.new_empty(len(left), right.shape[1]))


def _own_product(table: Tensor, embeddings: Tensor) -> Iterator[Callable[[], object]]:
    """W·xᵀ by our kernels for a CPU, where they take such a table; it cannot be cut from its exponentials."""
    if table.device.type != "cpu" or head_kernels.why_no_passes(table.dtype, table.shape[1]) is not None:
        return
    batch = head_kernels.PackedBatch(embeddings, torch.full((len(embeddings),), -1))
    rows = head_kernels.Table.visiting(table, 1 / torch.linalg.vector_norm(table.float(), dim=1), slice(None))
    yield lambda: head_kernels.FirstPass(batch, ARCFACE["s"], with_grad=False).add(rows, 0)


def _copy_rate(task: Task, device: torch.device) -> float:
    size = _COPY_BYTES[device.type]
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return 2 * size / _seconds_per_call(lambda: target.copy_(source), task, device)


def _seconds_per_call(work: Callable[[], object], task: Task, device: torch.device) -> float:
    work()
    calls, start = 0, _now(task, device)
    while (passed := _now(task, device) - start) < _LEAST_SECONDS:
        for _ in range(8):
            work()
        calls += 8
    return passed / calls


def _now(task: Task, device: torch.device) -> float:
    if device.type == "cpu":
        return time.process_time() / task.threads
    torch.cuda.synchronize(device)
    return time.perf_counter()


HEADS = {
    ROOFLINE: Contestant("roofline (product alone)", measure_roofline),
    "plsc": Contestant("plsc, bf16 + int8", partial(_sharded_head, "bfloat16", "int8")),
    "plsc-no-momentum": Contestant("plsc, bf16, no momentum", partial(_sharded_head, "bfloat16", None)),
    "plsc-fp32": Contestant("plsc, fp32 + fp32", partial(_sharded_head, "float32", "float32")),
    "plsc-sampled": Contestant("plsc, bf16 + int8, sampled", partial(_sharded_head, "bfloat16", "int8")),
    "plsc-fp32-sampled": Contestant("plsc, fp32 + fp32, sampled", partial(_sharded_head, "float32", "float32")),
}


if __name__ == "__main__":
    be_contestant(lambda task, mesh: (measure_roofline if task.contestant == ROOFLINE else measure_head)(task, mesh))
