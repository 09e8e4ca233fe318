"""A rank of `plsc bench train`: ``python -m plsc.bench.train_worker TASK.json FOLDER``."""

from typing import Any

import torch

from plsc.bench.harness import PeakMemory, limit_allocations
from plsc.bench.ranks import be_rank, time_steps
from plsc.bench.train_baselines import LOOPS, Images, TrainBenchConfig
from plsc.parallel.mesh import Mesh, init

_WARM_UP_STEPS = 2  # DDP orders its buckets anew after the first
_BATCH_SEED = 0x5EED_0F_1AA6E


def measure_loop(config: TrainBenchConfig, mesh: Mesh) -> dict[str, Any]:
    """Measure one loop on this rank.

    Returns:
        Medians over the steps, ``cpu_s`` and ``wall_s``; ``memory_mib`` above what the rank held before backbone and
        head were made, and ``peak_mib`` with it; the ``loss`` of the first step.
    """
    loop = LOOPS[config.implementation]
    if config.memory_bytes is not None:
        limit_allocations(config.memory_bytes)
    batches = [loop.prepare(_batch(config, mesh, number), mesh) for number in range(config.steps + _WARM_UP_STEPS)]
    memory = PeakMemory(mesh.device)
    step = loop.build(config, mesh)
    loss = step(batches[0])
    for batch in batches[1:_WARM_UP_STEPS]:
        step(batch)
    times: dict[str, Any] = time_steps(step, batches[_WARM_UP_STEPS:], mesh.device)
    return times | {"memory_mib": memory.above(), "peak_mib": memory.peak(), "loss": loss}


def _batch(config: TrainBenchConfig, mesh: Mesh, number: int) -> Images:
    generator = torch.Generator().manual_seed(_BATCH_SEED + number * mesh.world_size + mesh.rank)
    shape = (config.batch, 3, config.image_size, config.image_size)
    images = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
    return images, torch.randint(config.classes, (config.batch,), generator=generator)


def _measure(task: dict[str, Any]) -> dict[str, Any]:
    config = TrainBenchConfig(**task)
    torch.set_num_threads(config.threads)
    return measure_loop(config, init(None if config.device == "cuda" else "cpu"))


if __name__ == "__main__":
    be_rank(_measure)
