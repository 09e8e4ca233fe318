"""One rank of one contestant: ``python -m plsc.bench.worker TASK.json FOLDER``.

Reads a :class:`plsc.bench.setting.Setting`, measures, and leaves ``rank-R.json`` in FOLDER: figures, or a reason.
"""

import gc
import itertools
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plsc.bench.contestants import CONTESTANTS, FLOOR
from plsc.bench.floor import measure_floor
from plsc.bench.memory import PeakMemory, limit_allocations
from plsc.bench.peers import Step
from plsc.bench.setting import Setting
from plsc.errors import PlscError
from plsc.files import write_json
from plsc.parallel.mesh import Mesh, init, shutdown

_REHEARSED = 2048  # classes
_BATCH_SEED = 0x5EED_0F_BA7C4  # far from the heads' seeds: the same one would make embeddings of class rows


def measure(setting: Setting, mesh: Mesh) -> dict[str, Any]:
    """This rank's medians over the steps: ``cpu_s``, ``wall_s``; ``memory_mib``, ``peak_mib``; the first ``loss``."""
    build = CONTESTANTS[setting.contestant].build
    # What libraries load, compile or allocate at their first call belongs to them, not to the contestant's tables.
    small = setting.smaller(_REHEARSED)
    build(small, mesh)(*_batch(small, mesh, 0))
    gc.collect()
    if setting.memory_bytes is not None:
        limit_allocations(setting.memory_bytes)
    batches = [_batch(setting, mesh, number) for number in range(setting.steps + 1)]
    memory = PeakMemory(mesh.device)
    step = build(setting, mesh)
    loss = float(step(*batches[0]))
    times = _time_on_gpu(step, batches[1:]) if mesh.device.type == "cuda" else _time_on_cpu(step, batches[1:])
    return times | {"memory_mib": memory.above(), "peak_mib": memory.peak(), "loss": loss}


def _batch(setting: Setting, mesh: Mesh, number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(_BATCH_SEED + number * mesh.world_size + mesh.rank)
    embeddings = torch.randn(setting.batch, setting.dim, generator=generator)
    labels = torch.randint(setting.classes, (setting.batch,), generator=generator)
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


def _reason(error: Exception) -> str:
    """One line for the table."""
    text = " ".join(str(error).split())
    if isinstance(error, PlscError):
        return text
    signs = ("can't allocate memory", "not enough memory", "out of memory", "bad_alloc")
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or any(sign in text.lower() for sign in signs):
        return "does not fit into memory"
    return f"{type(error).__name__}: {text}"[:200]


def main() -> int:
    """Measure what the task says, as the rank that the environment says."""
    task, folder = sys.argv[1:]
    setting = Setting(**json.loads(Path(task).read_text(encoding="utf-8")))
    torch.set_num_threads(setting.threads)
    result: dict[str, Any]
    try:
        mesh = init(None if setting.device == "cuda" else "cpu")
        result = measure_floor(setting, mesh) if setting.contestant == FLOOR else measure(setting, mesh)
    except Exception as error:  # whatever a contestant does wrong is its result
        result = {"reason": _reason(error)}
    write_json(Path(folder) / f"rank-{os.environ['RANK']}.json", result)
    if "reason" in result:
        os._exit(1)  # at once: the other ranks wait for this one, and it must not wait for them
    shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
