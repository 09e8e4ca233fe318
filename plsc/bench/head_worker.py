"""A rank of `plsc bench head`: ``python -m plsc.bench.head_worker TASK.json FOLDER``.

It reads a :class:`~plsc.bench.head_baselines.BenchConfig`, measures a head or the roofline, and leaves ``rank-R.json``
in FOLDER: figures, or the reason why there are none.
"""

import gc
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plsc.bench.harness import PeakMemory, limit_allocations
from plsc.bench.head_baselines import IMPLEMENTATIONS, ROOFLINE, BenchConfig, Step
from plsc.errors import PlscError
from plsc.files import read_json, write_json
from plsc.head.class_table import class_range
from plsc.parallel.collectives import all_reduce_sum
from plsc.parallel.mesh import Mesh, init, shutdown

_REHEARSAL_CLASSES = 2048
_BATCH_SEED = 0x5EED_0F_BA7C4  # unlike the heads' seeds: with the same one the embeddings would be class rows
_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "bad_alloc")

# Of the roofline, by device type.
_TABLE_ROWS = {"cpu": 65_536, "cuda": 524_288}  # in one product
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
    times = _time_on_gpu(step, batches[1:]) if mesh.device.type == "cuda" else _time_on_cpu(step, batches[1:])
    return times | {"memory_mib": memory.above(), "peak_mib": memory.peak(), "loss": loss}


def _batch(config: BenchConfig, mesh: Mesh, number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(_BATCH_SEED + number * mesh.world_size + mesh.rank)
    embeddings = torch.randn(config.batch, config.dim, generator=generator)
    labels = torch.randint(config.classes, (config.batch,), generator=generator)
    return embeddings.to(mesh.device).requires_grad_(), labels.to(mesh.device)


def _time_on_cpu(step: Step, batches: list[tuple[Tensor, Tensor]]) -> dict[str, float]:
    cpu, wall = [], []
    for batch in batches:
        cpu_start, start = time.process_time(), time.perf_counter()
        step(*batch)
        cpu.append(time.process_time() - cpu_start)
        wall.append(time.perf_counter() - start)
    return {"cpu_s": statistics.median(cpu), "wall_s": statistics.median(wall)}


def _time_on_gpu(step: Step, batches: list[tuple[Tensor, Tensor]]) -> dict[str, float]:
    # Events are recorded between steps and read at the end: a synchronisation per step would stop the queue.
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(batches) + 1)]
    torch.cuda.synchronize()
    cpu_start = time.process_time()
    marks[0].record()
    for batch, mark in zip(batches, marks[1:], strict=True):
        step(*batch)
        mark.record()
    torch.cuda.synchronize()
    cpu = (time.process_time() - cpu_start) / len(batches)
    wall = [before.elapsed_time(after) / 1000 for before, after in itertools.pairwise(marks)]
    return {"cpu_s": cpu, "wall_s": statistics.median(wall)}


# Roofline -----------------------------------------------------------------------------------------------------------


def measure_roofline(config: BenchConfig, mesh: Mesh) -> dict[str, Any]:
    """Measure the rates of this rank while all ranks do, and the time of an exact step that they imply.

    On a CPU seconds are of processor time, which other programs do not disturb.

    Returns:
        ``product_gflops`` of a chunk of rows (n, D) times the embeddings (D, B), in bfloat16, or in float32 where the
        processor is faster at it (``note`` names the dtype); ``copy_gb_s`` of bytes read and written; ``wall_s`` and
        ``cpu_s`` (None on a GPU) for 8·B·C·D / ranks floating-point operations.
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
    rows = min(config.classes, _TABLE_ROWS[device.type])
    table = torch.randn(rows, config.dim, device=device).to(dtype)
    embeddings = torch.randn(config.global_batch, config.dim, device=device).to(dtype)
    out = torch.empty(rows, config.global_batch, device=device, dtype=dtype)
    seconds = _seconds_per_call(lambda: torch.mm(table, embeddings.t(), out=out), config, device)
    return 2 * rows * config.dim * config.global_batch / seconds


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


def _reason(error: Exception) -> str:
    """Return a failure as one line for the table."""
    text = " ".join(str(error).split())
    if isinstance(error, PlscError):
        return text
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or any(s in text.lower() for s in _OUT_OF_MEMORY):
        return "does not fit into memory"
    return f"{type(error).__name__}: {text}"[:200]


def main() -> int:
    """Measure the task on the rank that the environment names."""
    task, folder = map(Path, sys.argv[1:])
    config = BenchConfig(**read_json(task))
    torch.set_num_threads(config.threads)
    result: dict[str, Any]
    try:
        mesh = init(None if config.device == "cuda" else "cpu")
        measure = measure_roofline if config.implementation == ROOFLINE else measure_head
        result = measure(config, mesh)
    except Exception as error:  # whatever an implementation does wrong is its result
        result = {"reason": _reason(error)}
    write_json(folder / f"rank-{os.environ['RANK']}.json", result)
    if "reason" in result:
        os._exit(1)  # without clean-up: the other ranks wait for this one, and it would wait for them
    shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
