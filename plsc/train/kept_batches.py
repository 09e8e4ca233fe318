"""Batches of steps whose loss or gradients were not finite, kept in the run for a person to look at."""

import contextlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plsc.data.codec import encode_image
from plsc.data.dataset import ImageDataset
from plsc.files import atomic_write, write_json
from plsc.parallel import Mesh
from plsc.train.step import MicroBatch, StepResult

FOLDER = "non_finite"
IMAGES = 1024  # of a step, on all ranks, that are drawn; the list names all


class KeptBatches:
    """RUN/non_finite: for each such step and rank, a list of its images, and a picture of them as they were trained on.

    Args:
        out: the run directory.
        dataset: where the images come from.
        mesh: the ranks, each of which writes what it saw.
        most: steps that are kept, the first ones; those of the run before it was resumed count too.
    """

    def __init__(self, out: Path, dataset: ImageDataset, mesh: Mesh, most: int) -> None:
        self.folder = out / FOLDER
        self._dataset, self._mesh, self._most = dataset, mesh, most

    def keep(self, step: int, group: Sequence[MicroBatch], result: StepResult, rates: Sequence[float]) -> Path | None:
        """Write the batch of ``step``; its folder, or None where there are enough, or there is no space."""
        folder, rank = self.folder / f"step-{step:08}", self._mesh.rank
        if len([other for other in self.folder.glob("step-*") if other != folder]) >= self._most:
            return None
        numbers = {"step": step, "rank": rank, "loss": result.loss, "grad_norm": result.grad_norm}
        numbers |= {"lr": rates[0], "head_lr": rates[1]}
        images = torch.cat([batch.images for batch in group])
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            listed = {name: _shown(value) for name, value in numbers.items()} | {"images": self._listed(group)}
            write_json(folder / f"rank-{rank}.json", listed)
            with atomic_write(folder / f"rank-{rank}.png") as tmp_path:
                drawn = images[: max(IMAGES // self._mesh.world_size, 1)]
                tmp_path.write_bytes(encode_image(contact_sheet(drawn), "png"))
            return folder
        return None

    def _listed(self, group: Sequence[MicroBatch]) -> list[dict[str, Any]]:
        """A line for each image, in the order of the picture: which it is, and the range of its pixels."""
        return [
            {
                "key": self._dataset.key(int(index)),
                "label": int(label),
                "class": str(self._dataset.class_names[int(label)]),
                "pixels": [int(image.min()), round(float(image.float().mean()), 1), int(image.max())],
            }
            for batch in group
            for index, label, image in zip(batch.indices, batch.labels, batch.images, strict=True)
        ]


def contact_sheet(images: Tensor) -> Tensor:
    """Lay images uint8 (n, 3, H, W) out in rows, in a square as near as may be; uint8 (3, rows·H, columns·W)."""
    count, channels, height, width = images.shape
    columns = math.isqrt(max(count - 1, 0)) + 1
    rows = -(-count // columns)
    padded = torch.cat([images, images.new_zeros((rows * columns - count, channels, height, width))])
    grid = padded.view(rows, columns, channels, height, width).permute(2, 0, 3, 1, 4)
    return grid.reshape(channels, rows * height, columns * width)


def _shown(value: float) -> float | str:
    """JSON has no NaN and no infinity."""
    return value if math.isfinite(value) else str(value)
