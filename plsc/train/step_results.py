"""Results of a run's steps, read after the steps that follow are enqueued, and what follows from one that failed.

Batches of steps whose loss or gradients were not finite are kept in the run for a person to look at.
"""

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from plsc.config import Config
from plsc.data.codec import encode_image
from plsc.data.dataset import ImageDataset
from plsc.errors import PlscError
from plsc.files import atomic_write, write_json
from plsc.parallel import Mesh
from plsc.train.micro_batches import MicroBatch
from plsc.train.state import Position
from plsc.train.step import EnqueuedStep, StepResult

FOLDER = "non_finite"
IMAGES = 1024  # of a step, on all ranks, that are drawn; the list names all


class StepMeter:
    """Means since the last line of metrics."""

    def __init__(self) -> None:
        self._images = 0
        self._losses: list[float] = []
        self._since = time.monotonic()

    def update(self, result: StepResult) -> None:
        """Count a step."""
        self._images += result.images
        if not result.skipped:
            self._losses.append(result.loss)

    def reset(self) -> tuple[float | None, float]:
        """(mean loss of the finite steps, images per second) since the last call."""
        now = time.monotonic()
        loss = sum(self._losses) / len(self._losses) if self._losses else None
        rate = self._images / max(now - self._since, 1e-9)
        self._images, self._losses, self._since = 0, [], now
        return loss, rate


@dataclass(frozen=True)
class _UnreadStep:
    """A step whose result is not read yet: what it learned from, and its learning rates."""

    number: int
    enqueued: EnqueuedStep
    group: Sequence[MicroBatch]
    rates: Sequence[float]


class StepResults:
    """Reads what enqueued steps have given, counts the skipped ones, and ends the run that skips too many.

    Reading waits for the device; a step that is read one step late has mostly been computed by then.

    Args:
        config: of the run: ``non_finite``, ``max_skipped_steps`` and the precision.
        position: of the run, which counts skipped steps.
        kept: takes the batches of steps that were not finite.
        report: takes a line.
        before_end: called before the run is given up, on every rank; its PlscError is passed over.

    Attributes:
        last_loss: of the last step that was learned from; None before the first.
        meter: means over the steps since its last reset.
    """

    def __init__(
        self,
        config: Config,
        position: Position,
        kept: "KeptBatches",
        report: Callable[[str], None],
        before_end: Callable[[], None],
    ) -> None:
        self.last_loss: float | None = None
        self.meter = StepMeter()
        self._config, self._position, self._kept = config, position, kept
        self._report, self._before_end = report, before_end
        self._unread: deque[_UnreadStep] = deque()
        self._skipped_in_a_row = 0

    def add(self, enqueued: EnqueuedStep, group: Sequence[MicroBatch], rates: Sequence[float]) -> None:
        """Take in the step that the position has just counted; ``rates`` are of backbone and tables."""
        self._unread.append(_UnreadStep(self._position.step, enqueued, group, rates))

    def read(self, keep: int = 0) -> StepResult | None:
        """Read the results of all steps but the ``keep`` newest; the last one that was read.

        Raises:
            PlscError: a step was not finite and ``non_finite`` is "stop", or too many in a row were not.
        """
        result = None
        while len(self._unread) > keep:
            step = self._unread.popleft()
            result = step.enqueued.result()
            self._take_in(step, result)
            self.meter.update(result)
        return result

    def _take_in(self, step: _UnreadStep, result: StepResult) -> None:
        """Count a step as learned from, or as skipped; keep the batch then, and give up where that is asked for."""
        if not result.skipped:
            self.last_loss, self._skipped_in_a_row = result.loss, 0
            return
        self._position.skipped += 1
        self._skipped_in_a_row += 1
        is_overflow = self._config.precision == "fp16" and math.isfinite(result.loss)
        if not is_overflow:
            self._keep(step, result)
        if self._skipped_in_a_row >= self._config.max_skipped_steps:
            self._give_up(
                f"loss or gradients were not finite for {self._skipped_in_a_row} steps in a row, up to step "
                f"{step.number:,} (learning rate {step.rates[0]:.3g}); lower optim.lr, lengthen the "
                'warm-up, set optim.clip_norm = 5, or compute with precision = "bf16" or "fp32"'
            )

    def _keep(self, step: _UnreadStep, result: StepResult) -> None:
        """Keep the batch of a step that was not finite; give up if non_finite says so."""
        kept = self._kept.keep(step.number, step.group, result, step.rates)
        if kept is not None:
            self._report(f"step {step.number:,} was not finite (loss {result.loss:g}); its batch is kept in {kept}")
        if self._config.non_finite == "stop":
            self._give_up(
                f"loss or gradients of step {step.number:,} were not finite (loss {result.loss:g}); its batch is in "
                f'{self._kept.folder}; non_finite = "skip" leaves such steps out'
            )

    def _give_up(self, why: str) -> NoReturn:
        with contextlib.suppress(PlscError):
            self._before_end()
        raise PlscError(f"{why}; --resume auto goes on from the last checkpoint")


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
        names = self._dataset.class_names
        return [
            {
                "key": self._dataset.key(int(index)),
                "label": label.tolist(),  # a number, or a list of several
                "class": ", ".join(names[number] for number in label.reshape(-1).tolist() if number >= 0),
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
