"""Our training loops under measurement, and a rank that measures one or a baseline (``python -m plsc.bench.train``)."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plsc import config as configuration
from plsc.bench.comparison import (
    ARCFACE,
    SGD,
    Contestant,
    Task,
    all_contestants,
    be_contestant,
    measure_steps,
)
from plsc.bench.harness import limit_allocations
from plsc.data.dataset import ImageDataset
from plsc.models.preprocessing import height_and_width
from plsc.native.allocator import keep_freed_memory
from plsc.parallel.mesh import Mesh
from plsc.train.components import build
from plsc.train.micro_batches import MicroBatch
from plsc.train.step import EnqueuedStep, Stepper

CLIP_NORM = 5.0  # of arcface_torch's loop
Images = tuple[Tensor, Tensor]  # uint8 (b, 3, S, S) and labels (b,) on the CPU
Step = Callable[[Any], float]  # takes a prepared batch, returns its loss, or the step's before where that waits less
_WARM_UP_STEPS = 2  # DDP orders its buckets anew after the first
_BATCH_SEED = 0x5EED_0F_1AA6E


class _BlankImages(ImageDataset):
    """A data set whose labels alone matter: batches are made of random numbers."""

    def __init__(self, task: Task) -> None:
        count = max(task.classes, task.batch * task.nproc)
        names = range(task.classes)
        labels = np.arange(count) % task.classes
        super().__init__("benchmark", labels, names, task.image_size)  # type: ignore[arg-type]

    def image(self, index: int) -> Tensor:
        """A black image."""
        return torch.zeros(3, *height_and_width(self.image_size or 1), dtype=torch.uint8)

    def key(self, index: int) -> str:
        """Its number."""
        return str(index)

    def sample_ids(self, start: int, stop: int) -> list[str]:
        """Their numbers."""
        return list(map(str, range(start, stop)))


def make_stepper(weight_dtype: str, momentum_dtype: str, task: Task, mesh: Mesh, **changes: Any) -> Stepper:
    """Make what takes our steps, as ``plsc train`` does; ``changes`` are of its configuration."""
    keep_freed_memory()  # as `plsc train` does
    keys = {
        "backbone": task.backbone,
        "embedding_dim": task.dim,
        "precision": task.precision,
        "channels_last": task.device == "cuda",  # as in the recipes, which are for GPUs
        "data.image_size": task.image_size,
        "data.batch_size": task.batch,
        "data.workers": 0,
        "head.margin": "arcface",
        **{f"head.{name}": value for name, value in ARCFACE.items()},
        "head.weight_dtype": weight_dtype,
        "head.momentum_dtype": momentum_dtype,
        **{f"optim.{name}": value for name, value in SGD.items()},
        "optim.clip_norm": CLIP_NORM,
        **changes,
    }
    return Stepper(build(configuration.load(None, keys), _BlankImages(task), mesh))


def _plsc(weight_dtype: str, momentum_dtype: str, task: Task, mesh: Mesh) -> Step:
    return step_of(make_stepper(weight_dtype, momentum_dtype, task, mesh), task, mesh)


def step_of(stepper: Stepper, task: Task, mesh: Mesh) -> Step:
    """Take steps as the trainer does: the result of one is read when the next one is enqueued."""
    sizes, numbers = [task.batch] * mesh.world_size, itertools.count()
    unread: list[EnqueuedStep] = []

    def step(batch: Images) -> float:
        unread.append(stepper.step([MicroBatch(*batch, sizes)], next(numbers)))
        return (unread.pop(0) if len(unread) > 1 else unread[0]).result().loss

    return step


def as_loaded(batch: Images, mesh: Mesh) -> Images:
    """Our step takes batches as its loader brings them, and normalises on the device."""
    images, labels = batch
    return (images.pin_memory(), labels.pin_memory()) if mesh.device.type == "cuda" else batch


LOOPS = {
    "plsc": Contestant("plsc, table in bf16 + int8", partial(_plsc, "bfloat16", "int8"), as_loaded),
    "plsc-fp32": Contestant("plsc, table in fp32", partial(_plsc, "float32", "float32"), as_loaded),
}


def measure_loop(task: Task, mesh: Mesh) -> dict[str, Any]:
    """Measure one loop on this rank; the figures are those of :func:`plsc.bench.comparison.measure_steps`."""
    loop = all_contestants("train", LOOPS, task.baselines)[task.contestant]
    if task.memory_bytes is not None:
        limit_allocations(task.memory_bytes)
    assert loop.prepare is not None
    count = task.steps + _WARM_UP_STEPS
    batches = [(loop.prepare(random_batch(task, mesh, number), mesh),) for number in range(count)]
    return measure_steps(task, mesh, loop.build, batches, _WARM_UP_STEPS)


def random_batch(task: Task, mesh: Mesh, number: int) -> Images:
    """This rank's images and labels of a step."""
    generator = torch.Generator().manual_seed(_BATCH_SEED + number * mesh.world_size + mesh.rank)
    shape = (task.batch, 3, task.image_size, task.image_size)
    images = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
    return images, torch.randint(task.classes, (task.batch,), generator=generator)


if __name__ == "__main__":
    be_contestant(measure_loop)
