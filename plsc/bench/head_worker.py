"""A rank of `plsc bench head`: ``python -m plsc.bench.head_worker TASK.json FOLDER``.

It reads a :class:`~plsc.bench.head_baselines.BenchConfig`, measures a head or the roofline, and leaves ``rank-R.json``
in FOLDER: figures, or the reason why there are none.
"""

import gc
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from plsc.bench.harness import PeakMemory, limit_allocations
from plsc.bench.head_baselines import IMPLEMENTATIONS, ROOFLINE, BenchConfig
from plsc.bench.ranks import be_rank, time_steps
from plsc.head.class_table import class_range
from plsc.parallel.collectives import all_reduce_sum
from plsc.parallel.mesh import Mesh, init

_REHEARSAL_CLASSES = 2048
_BATCH_SEED = 0x5EED_0F_BA7C4  # unlike the heads' seeds: with the same one the embeddings would be class rows

# Of the roofline, by device type.
_TABLE_ROWS = {"cpu": (2_048, 65_536), "cuda": (524_288,)}  # in one product; a processor's cache holds the small one
_COPY_BYTES = {"cpu": 128 << 20, "cuda": 2 << 30}  # beyond any cache
_LEAST_SECONDS = 0.2  # for a rate
_PRODUCTS = 4  # of an exact step: logits in both passes, the embeddings' gradient, the rows' gradient


# Heads --------------------------------------------------------------------------------------------------------------


def measure_head(config: BenchConfig, mesh: Mesh) -> dict[str, Any]:
    """Measure one head on this rank.

    Returns:
        Medians over the steps, ``cpu_s`` and ``wall_s``; ``memory_mib`` above what the rank held before the head was
        made, and ``peak_mib`` with it; the ``loss`` of the first step.
    """
    build = IMPLEMENTATIONS[config.implementation].build
    # What libraries load, compile or allocate at their first call belongs to them, not to this head's tables.
    rehearsal = config.with_at_most(_REHEARSAL_CLASSES)
    build(rehearsal, mesh)(*_batch(rehearsal, mesh, 0))
    gc.collect()
    if config.memory_bytes is not None:
        limit_allocations(config.memory_bytes)
    batches = [_batch(config, mesh, number) for number in range(config.steps + 1)]
    memory = PeakMemory(mesh.device)
    step = build(config, mesh)
    loss = float(step(*batches[0]))
    times: dict[str, Any] = time_steps(lambda batch: step(*batch), batches[1:], mesh.device)
    return times | {"memory_mib": memory.above(), "peak_mib": memory.peak(), "loss": loss}


def _batch(config: BenchConfig, mesh: Mesh, number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(_BATCH_SEED + number * mesh.world_size + mesh.rank)
    embeddings = torch.randn(config.batch, config.dim, generator=generator)
    labels = torch.randint(config.classes, (config.batch,), generator=generator)
    return embeddings.to(mesh.device).requires_grad_(), labels.to(mesh.device)


# Roofline -----------------------------------------------------------------------------------------------------------


def measure_roofline(config: BenchConfig, mesh: Mesh) -> dict[str, Any]:
    """Measure the rates of this rank while all ranks do, and the time of an exact step that they imply.

    On a CPU seconds are of processor time, which other programs do not disturb.

    Returns:
        ``product_gflops`` of PyTorch's fastest product of rows (n, D) and the embeddings (D, B), in bfloat16, or in
        float32 where the processor is faster at it (``note`` names the dtype); ``copy_gb_s`` of bytes read and
        written; ``wall_s`` and ``cpu_s`` (None on a GPU) for 8·B·C·D / ranks floating-point operations.
    """
    all_reduce_sum(torch.zeros(1, device=mesh.device), mesh)  # all ranks begin together
    on_cpu = mesh.device.type == "cpu"
    rates = {torch.bfloat16: _product_rate(config, mesh.device, torch.bfloat16)}
    if on_cpu:
        rates[torch.float32] = _product_rate(config, mesh.device, torch.float32)
    dtype = max(rates, key=lambda key: rates[key])
    first, stop = class_range(config.classes, mesh.rank, mesh.world_size)
    seconds = 2 * _PRODUCTS * config.global_batch * (stop - first) * config.dim / rates[dtype]
    return {
        "product_gflops": rates[dtype] / 1e9,
        "copy_gb_s": _copy_rate(config, mesh.device) / 1e9,
        "wall_s": seconds,
        "cpu_s": seconds * config.threads if on_cpu else None,
        "note": str(dtype).removeprefix("torch."),
    }


def _product_rate(config: BenchConfig, device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of PyTorch's product of rows and embeddings, at the number of rows at which it is fastest."""
    embeddings = torch.randn(config.global_batch, config.dim, device=device).to(dtype)
    rates = []
    for rows in _TABLE_ROWS[device.type]:
        table = torch.randn(min(config.classes, rows), config.dim, device=device).to(dtype)
        out = torch.empty(len(table), config.global_batch, device=device, dtype=dtype)
        seconds = _seconds_per_call(partial(torch.mm, table, embeddings.t(), out=out), config, device)
        rates.append(2 * table.numel() * config.global_batch / seconds)
    return max(rates)


def _copy_rate(config: BenchConfig, device: torch.device) -> float:
    size = _COPY_BYTES[device.type]
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return 2 * size / _seconds_per_call(lambda: target.copy_(source), config, device)


def _seconds_per_call(work: Callable[[], object], config: BenchConfig, device: torch.device) -> float:
    work()
    calls, start = 0, _now(config, device)
    while (passed := _now(config, device) - start) < _LEAST_SECONDS:
        for _ in range(8):
            work()
        calls += 8
    return passed / calls


def _now(config: BenchConfig, device: torch.device) -> float:
    if device.type == "cpu":
        return time.process_time() / config.threads
    torch.cuda.synchronize(device)
    return time.perf_counter()


# The process --------------------------------------------------------------------------------------------------------


def _measure(task: dict[str, Any]) -> dict[str, Any]:
    config = BenchConfig(**task)
    torch.set_num_threads(config.threads)
    mesh = init(None if config.device == "cuda" else "cpu")
    return measure_roofline(config, mesh) if config.implementation == ROOFLINE else measure_head(config, mesh)


if __name__ == "__main__":
    be_rank(_measure)
