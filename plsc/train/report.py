"""Report of a run for its user: header, progress line, closing lines; on standard error and in RUN/train.log."""

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from plsc.config import Config, DataConfig
from plsc.data.dataset import ImageDataset
from plsc.files import AppendFile
from plsc.losses.margins import Margin
from plsc.models.preprocessing import Preprocessing, size_text
from plsc.models.recompute import recomputed_blocks
from plsc.progress import StatusLine, counted, duration, printable
from plsc.train.components import TrainComponents
from plsc.train.evaluate import BEST, MODEL
from plsc.train.state import Position, steps_per_epoch
from plsc.train.tables import TrainedTable, global_batch, peak_rates

LOG = "train.log"
_LINE_SECONDS = 5.0  # between lines of the log, and of a pipe
_TERMINAL_SECONDS = 0.5  # between two states of a terminal's line


class RunReport:
    """Writes lines and progress to standard error, and with a timestamp each to RUN/train.log, which it appends to.

    Args:
        out: the run directory.
        enabled: False on all ranks but the first: nothing is written.
        quiet: write the log alone.
    """

    def __init__(self, out: Path, *, enabled: bool, quiet: bool = False) -> None:
        self._log = AppendFile(out / LOG) if enabled else None
        self._status = StatusLine() if enabled and not quiet else None

    def line(self, text: str) -> None:
        """Write a line that stays."""
        self.log(text)
        if self._status is not None:
            with contextlib.suppress(OSError):  # a file on a full disk, or a reader that has gone
                self._status.print(f"train: {text}")

    def log(self, text: str) -> None:
        """Write to train.log alone."""
        if self._log is not None:
            self._log.write_line(_dated(text))

    def status(self, text: str, *, log: bool) -> None:
        """Show the state of the progress line; ``log`` when it is also one for the log, and for a pipe."""
        if log:
            self.log(text)
        if self._status is not None and (log or self._status.rewrites):
            with contextlib.suppress(OSError):
                self._status.update(f"train: {text}")

    def close(self) -> None:
        """End the progress line, and close the log."""
        if self._status is not None:
            self._status.close()
        if self._log is not None:
            self._log.close()


def append_to_log(out: Path, text: str) -> None:
    """Write a line into the log of the run ``out`` from any rank, beside the first one's."""
    with contextlib.suppress(OSError):
        file = AppendFile(out / LOG)
        file.write_line(_dated(text))
        file.close()


def _dated(text: str) -> str:
    return f"{datetime.now():%Y-%m-%d %H:%M:%S} {printable(text)}"


class StepProgress:
    """The progress line: step, epoch, learning rate, loss, images per second, time to go, best accuracy so far.

    Images per second are those since the last line of the log, without evaluations and checkpoints; the time to go is
    what the steps so far took, with them.

    Args:
        report: of the run.
        position: of the run, which counts its steps.
        total_steps: of the run.
        notes: returns what else is to be said beside so many images per second.
    """

    def __init__(
        self,
        report: RunReport,
        position: Position,
        total_steps: int,
        notes: Callable[[float], Sequence[str]] = lambda images_per_second: (),
    ) -> None:
        self._report, self._position, self._total = report, position, total_steps
        self._notes = notes
        self._first_step = position.step
        self._start = self._window_start = self._last_shown = time.monotonic()
        self._images = 0
        self._state: list[str] = []  # of the last step
        self._logged_step = -1

    def advance(self, images: int, *, epoch: float, lr: float, loss: float | None) -> None:
        """Count a step of ``images``, which ``position`` counts already, and report when it is time."""
        self._images += images
        self._state = [f"epoch {epoch:.2f}", f"lr {lr:.4g}", *([f"loss {loss:.3f}"] if loss is not None else [])]
        now = time.monotonic()
        if now - self._last_shown < _TERMINAL_SECONDS:
            return
        self._last_shown = now
        is_for_log = now - self._window_start >= _LINE_SECONDS
        self._report.status(self._text(now), log=is_for_log)
        if is_for_log:
            self._window_start, self._images, self._logged_step = now, 0, self._position.step

    def finish(self) -> None:
        """Report the last step, unless the log has it already."""
        if self._state and self._logged_step != self._position.step:
            self._report.line(self._text(time.monotonic()))

    def _text(self, now: float) -> str:
        step, total = self._position.step, max(self._total, self._position.step)
        parts = [f"step {step:,}/{total:,}", *self._state]
        if self._images:
            rate = self._images / max(now - self._window_start, 1e-9)
            parts.append(f"{rate:,.{0 if rate >= 10 else 1}f} images/s")
            parts += self._notes(rate)
        if step < total:
            left = (total - step) * (now - self._start) / (step - self._first_step)
            parts.append(f"{duration(left)} to go")
        if best := self._position.best:
            parts.append(f"best {best['accuracy']:.4f} at step {best['step']:,}")
        if self._position.skipped:
            parts.append(f"{counted(self._position.skipped, 'step')} skipped (not finite)")
        return ", ".join(parts)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time of an evaluation or a checkpoint out of the images per second."""
        start = time.monotonic()
        yield
        self._window_start += time.monotonic() - start


def header(
    components: TrainComponents,
    total_steps: int,
    start: str,
    stages: Sequence[str] = (),
    work: str = "",
    why_precision: str = "",
) -> list[str]:
    """The lines at the start of a run: data, model, head, ranks, work, length, stages, evaluation, and its start.

    ``why_precision`` says why "auto" is the run's precision.
    """
    config, dataset = components.config, components.dataset
    blocks = recomputed_blocks(components.strategy.backbone)
    images = f"{counted(len(dataset), 'image')} of {counted(dataset.num_classes, 'class')}"
    size = config.data.preprocessing.image_size
    pixels = size if isinstance(size, int) else size_text(size)
    source = dataset.source if components.tables[0].name else config.data.train
    lines = {
        "data": f"{images} from {source}, {pixels} px, augment {config.data.augment}",
        "pixels": _pixels(config.data),
        "model": _model(components, why_precision),
        **{_table_title(table): _head(table, components) for table in components.tables},
        "ranks": _ranks(components),
        "work": work,
        "memory": "" if config.recompute == "none" else f"activations of {counted(blocks, 'block')} are recomputed",
        "hook": _compression(components),
        "length": _length(components, total_steps),
        **{name: line for feature in components.features.values() for name, line in feature.lines().items()},
        **{f"stage {number}": text for number, text in enumerate(stages, start=1)},
        "eval": _evaluation(config),
        "start": start,
    }
    return [f"{name:<8}{line}" for name, line in lines.items() if line]


def data_warnings(dataset: ImageDataset) -> list[str]:
    """A line where no class has two images: nothing shows then what the images of a class have in common."""
    if np.bincount(dataset.labels[dataset.labels >= 0]).max() > 1:
        return []
    return ["warning: no class has two images, so that nothing shows what makes them alike; give several of each class"]


def closing_lines(out: Path, result: dict[str, Any]) -> list[str]:
    """The lines at the end of a run: which file holds what, and the command that comes next."""
    trained = f"trained {counted(result['steps'], 'step')} ({result['epochs']:.2f} epochs)"
    lines = [f"{trained} in {duration(result['seconds'])}: {out / MODEL} holds the last weights"]
    best = result["best"]
    choice = ""
    if best is not None:
        lines.append(f"best: {out / BEST}, of step {best['step']:,}, mean accuracy {best['accuracy']:.4f}")
        choice = " (takes the last weights; --best takes the best)"
    return [*lines, f"next: plsc eval {out} --data UNSEEN, or plsc export {out} --format onnx --out FILE{choice}"]


def _pixels(data: DataConfig) -> str:
    """A line on the preprocessing contract, where it is not plsc's own."""
    contract = data.preprocessing
    if contract == Preprocessing(contract.image_size):
        return ""
    resized = f"resized by {contract.interpolation} interpolation"
    return f"{contract.normalisation()} of values 0 to 255; {resized}"


def _model(components: TrainComponents, why_precision: str) -> str:
    config = components.config
    extras = [name for name in ("channels_last", "compile", "sync_batchnorm", "rotation_tta") if getattr(config, name)]
    extras += [f"ema_decay {config.ema_decay:g}"] if config.ema_decay else []
    extras += [note for feature in components.features.values() if (note := feature.model_note())]
    model = (
        f"{config.backbone}, {components.strategy.size / 1e6:.1f} M parameters, embedding_dim {config.embedding_dim}"
    )
    precision = config.precision + (f" (auto: {why_precision})" if why_precision else "")
    return ", ".join([model, precision, *extras])


def _table_title(table: TrainedTable) -> str:
    return f"table {table.name}: " if table.name else "head"


def _head(table: TrainedTable, components: TrainComponents) -> str:
    head, options = table.head, table.of.config.head
    kind = "exact" if options.sample_rate == 1 else f"sampled at {options.sample_rate:g}"
    centers = f", {options.centers} centers" if options.centers > 1 else ""
    storage = f"{options.weight_dtype} + {options.momentum_dtype} on {options.placement}"
    described = f"{_margin(head.margin)}{centers}, {kind}, {storage}; {head.backend.describe()}"
    if not table.name:
        return described
    share = table.of.share / sum(each.of.share for each in components.tables)
    classes = counted(head.num_classes, "class")
    rate = peak_rates(table.of.config, components.strategy.data_ranks)[1]
    return f"{classes}, {share:.3g} of a batch, loss weight {table.of.loss_weight:g}, lr {rate:g}, {described}"


def _margin(margin: Margin) -> str:
    values = {field.name: getattr(margin, field.name) for field in dataclasses.fields(margin)}
    if values["gradient"] == "exact":
        del values["gradient"]
    shown = ", ".join(
        f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}" for name, value in values.items()
    )
    return f"{type(margin).__name__.lower()} ({shown})"


def _ranks(components: TrainComponents) -> str:
    config, mesh, strategy = components.config, components.mesh, components.strategy
    device = torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else "CPU"
    backend = f" ({dist.get_backend(mesh.group)})" if mesh.world_size > 1 else ""
    readers = counted(mesh.world_size, "rank")
    if strategy.data_ranks < mesh.world_size:
        size = counted(mesh.world_size // strategy.data_ranks, "rank")
        readers = f"{counted(strategy.data_ranks, 'group')} of {size}"
    factors = f"{config.data.batch_size} x {readers}"
    accumulate = config.optim.accumulate
    factors += f" x {accumulate} accumulated" if accumulate > 1 else ""
    batch = global_batch(config, strategy.data_ranks)
    groups = f", class table over {counted(mesh.head.world_size, 'rank')}" if mesh.head_group is not None else ""
    placement = f", {strategy.describe()}" if strategy.describe() else ""
    ranks = f"{counted(mesh.world_size, 'rank')} on {device}{backend}{groups}{placement}"
    return f"{ranks}; global batch {batch:,} = {factors}"


def _compression(components: TrainComponents) -> str:
    """The line about compressed gradients, with what a rank gives to the network once the warm-up is over."""
    hook, weights = components.config.parallel.comm_hook, [weight.parameter for weight in components.strategy.weights]
    if hook == "none" or components.mesh.world_size == 1:
        return ""
    sent = components.exchange.sent_bytes(weights, sys.maxsize)
    whole = sum(weight.numel() * weight.element_size() for weight in weights)
    return f"{hook}: {sent / 1e6:,.3f} MB of gradients per rank and step of {whole / 1e6:,.3f} MB"


def _length(components: TrainComponents, total_steps: int) -> str:
    optim, per_epoch = components.config.optim, steps_per_epoch(components)
    lr, head_lr = peak_rates(components.config, components.strategy.data_ranks)
    rate = f"lr {lr:g}" + (f" (head {head_lr:g})" if optim.head_lr is not None else "")
    if optim.lr_scaling != "none":
        rate += f", which is {optim.lr:g} at {optim.base_batch:,} images, scaled ({optim.lr_scaling})"
    # A run that goes on with another batch size has taken steps of two sizes; its epochs are what was asked for.
    count = components.config.epochs or total_steps / per_epoch
    epochs = f"{count:.2f}".rstrip("0").rstrip(".")
    epochs += " epoch" if epochs == "1" else " epochs"
    warmup = ""
    if optim.warmup_steps:
        warmup = f" after {counted(optim.warmup_steps, 'step')} of warm-up"
    elif optim.warmup_epochs:
        warmup = f" after {optim.warmup_epochs:g} epochs of warm-up"
    length = f"{counted(total_steps, 'step')} = {epochs} of {counted(per_epoch, 'step')}"
    name = optim.name if optim.head_name == optim.name else f"{optim.name} (head {optim.head_name})"
    return f"{length}; {name}, {rate}, {optim.schedule}{warmup}"


def _evaluation(config: Config) -> str:
    if not config.eval.sets:
        return "none (eval.sets is empty, so there will be no best.safetensors)"
    every = f"every {counted(config.eval.every_steps, 'step')} and " if config.eval.every_steps else ""
    return f"{', '.join(config.eval.sets)}, {every}at the end"
