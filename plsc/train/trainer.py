"""The training run, top to bottom: from a configuration to a run directory, in one go or in as many as it takes."""

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from plsc import config as configuration
from plsc.config import Config
from plsc.data.loader import report_killed_workers
from plsc.errors import PlscError, UsageError
from plsc.files import atomic_write, make_folder
from plsc.optim.schedules import advance, scheduler
from plsc.parallel import Mesh
from plsc.parallel.collectives import on_main
from plsc.parallel.rank_monitor import RankMonitor
from plsc.parallel.step_timeline import CHECKPOINT, DATA, EVALUATION, StepTimeline, step_part
from plsc.progress import counted
from plsc.train.async_checkpoint import AsyncCheckpointer
from plsc.train.checkpoint import CHECKPOINTS, CheckpointFolder
from plsc.train.checkpoint_reader import StoredCheckpoint, open_checkpoint, open_newest
from plsc.train.components import build, open_training_data, peak_rates, with_preprocessing
from plsc.train.efficiency import EfficiencyMeter
from plsc.train.evaluate import (
    BEST,
    MODEL,
    check_sets,
    evaluate_sets,
    mean_accuracy,
    save_weights,
    summary,
    weights_writer,
)
from plsc.train.failures import Interrupted, StopRequest, monitor_ranks, raise_on_all_ranks
from plsc.train.kept_batches import KeptBatches
from plsc.train.metrics import METRICS, Logger, MetricsLog, StepMeter
from plsc.train.profiling import FOLDER as PROFILE
from plsc.train.profiling import StepProfiler
from plsc.train.report import RunReport, StepProgress, append_to_log, begins_anew, closing_lines, header
from plsc.train.restart import after_restart, current_launch, mark_launch
from plsc.train.slow_ranks import SlowRanks
from plsc.train.stages import enter_stage, plan_stages
from plsc.train.state import Position, capture, changed_keys, changed_tables, restore, steps_per_epoch
from plsc.train.step import EnqueuedStep, MicroBatch, Stepper, StepResult, micro_batches

POLL_STEPS = 10  # between two exchanges about a checkpoint under way, for which the ranks' hosts wait for each other
CONFIG, CLASSES = "config.toml", "classes.json"
# What a rank is at, in the order of a step; ranks may work alone for long where it is not of the step itself.
_OF_STEP = ("data of step", "step")
_PLACES = (*_OF_STEP, "evaluation after step", "checkpoint of step")


def train(
    config: Config,
    mesh: Mesh,
    *,
    out: str | Path,
    resume: str | None = None,
    quiet: bool = False,
    notes: Sequence[str] = (),
    loggers: Sequence[Logger] = (),
    on_hang: Callable[[PlscError], None] | None = None,
) -> dict[str, Any]:
    """Train as ``config`` says and write the run directory ``out``; every rank calls.

    Args:
        config: see :mod:`plsc.config`.
        mesh: the ranks, from :func:`plsc.init`, with the head groups that ``config.head_ranks`` asks for. They share
            one file system.
        out: config.toml, classes.json, train.log, metrics.jsonl, tensorboard/, checkpoints/, model.safetensors (the
            last weights) and best.safetensors (those of the best mean accuracy).
        resume: None begins a run; "auto" goes on from the newest checkpoint of ``out``, or begins where there
            is none; else a checkpoint's folder, or a run's. After a restart by torchrun, the run that the same
            launch has begun in ``out`` goes on as by "auto".
        quiet: print nothing; train.log is written.
        notes: lines for the head of train.log.
        loggers: are given what TensorBoard is, on the first rank: functions that are called as
            ``logger({"loss": 2.5, "time/head": 0.01, …}, step=100)``, or objects with such a method ``log``. One that
            raises does not end the run; the first error of each is a line of train.log.
        on_hang: called from another thread, on one rank, with the ranks that the others have waited for longer than
            ``parallel.timeout_seconds``; every rank's process ends after that. None: nothing is watched.

    Returns:
        {"out", "steps", "epochs", "loss", "skipped_steps", "images", "seconds", "images_per_second",
        "classes", "eval", "best"}, the same on every rank but for the times.

    Raises:
        UsageError: the configuration or the request is off, or the mesh has other head groups than the configuration;
            ``out`` holds a run and ``resume`` is None.
        IntegrityError: the checkpoint to resume from is corrupt.
        DataError: too many unreadable images; a decoding process was killed; a full disk.
        PlscError: the loss was not finite for too long.
        Interrupted: SIGINT, SIGTERM or SIGUSR1 came; a checkpoint was written first.
    """
    with StopRequest() as stop:
        trainer = Trainer(config, mesh, Path(out), resume, quiet, notes, loggers)
        try:
            with report_killed_workers(), trainer.timeline.active(), trainer.monitored(on_hang):
                return trainer.run(stop)
        except PlscError as error:
            trainer.report.log(f"ended: {error}")
            raise
        finally:
            trainer.profiler.close()
            trainer.checkpointer.close()
            trainer.metrics.close()
            trainer.report.close()


@dataclass(frozen=True)
class _UnreadStep:
    """A step whose result is not read yet: what it learned from, and its learning rates."""

    number: int
    enqueued: EnqueuedStep
    group: Sequence[MicroBatch]
    rates: Sequence[float]


class Trainer:
    """One rank's part of a training run."""

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        out: Path,
        resume: str | None,
        quiet: bool,
        notes: Sequence[str] = (),
        loggers: Sequence[Logger] = (),
    ) -> None:
        _check_groups(config, mesh)
        config = raise_on_all_ranks(mesh, lambda: with_preprocessing(config))
        self.config, self.mesh, self.out = config, mesh, out
        self._launch = current_launch(mesh)
        restarted, resume = on_main(lambda: after_restart(out, resume, self._launch), mesh)
        raise_on_all_ranks(mesh, lambda: _check_folder(out, resume))
        dataset = raise_on_all_ranks(mesh, lambda: open_training_data(config.data))
        raise_on_all_ranks(mesh, lambda: check_sets(config) if mesh.is_main else None)
        self.components = build(config, dataset, mesh)
        self.checkpoints = CheckpointFolder(out / CHECKPOINTS, mesh, config.checkpoint.keep)
        self.position = Position()
        self._saved_at = -1
        stored = self._find_checkpoint(resume)  # a wrong one leaves no empty folder
        start = begins_anew(config) if stored is None else self._resume_from(stored)
        start = f"restarted by torchrun: {start}" if restarted else start
        self.plan = plan_stages(self.components, self.position, self._total_steps())
        self._stage = self.plan.at(self.position.schedule_step)
        enter_stage(self.components, self._stage)
        superseded = [] if stored is None else self.checkpoints.set_aside_after(self.position.step)
        raise_on_all_ranks(mesh, lambda: make_folder(out) if mesh.is_main else out)
        raise_on_all_ranks(mesh, self._write_descriptions)
        self._set_schedule()
        self.stepper = Stepper(self.components)
        self.timeline = StepTimeline(mesh.device)
        self.efficiency = EfficiencyMeter(self.components, self.timeline)
        self.report = RunReport(out, enabled=mesh.is_main, quiet=quiet)
        self.metrics = MetricsLog(
            out,
            step=self.position.step,
            tensorboard=config.log.tensorboard,
            enabled=mesh.is_main,
            loggers=loggers,
            warn=self.report.line,
        )
        for line in notes:
            self.report.line(line)
        if mesh.is_main:  # other ranks may hold nothing of the head that it describes
            work = self.efficiency.describe()
            for line in header(self.components, self._last_step(), start, self.plan.described(), work):
                self.report.line(line)
        self._report_resumption(stored, superseded)
        self.checkpointer = AsyncCheckpointer(
            self.checkpoints,
            self.report.line,
            background=config.checkpoint.async_save,
            every_minutes=config.checkpoint.every_minutes,
        )
        self.profiler = StepProfiler(
            self.timeline,
            out / PROFILE,
            steps=config.log.profile if mesh.is_main else 0,
            left=self._last_step() - self.position.step,
            device=mesh.device,
            report=self.report.line,
        )
        self._monitor: RankMonitor | None = None
        self._slow_ranks = SlowRanks(self.report.line)
        self.last_loss: float | None = None
        self._unread: deque[_UnreadStep] = deque()
        self._kept = KeptBatches(out, self.components.loader.dataset, mesh, config.non_finite_kept)
        self._meter = StepMeter()
        self._skipped_in_a_row = 0
        self._results: dict[str, dict[str, Any]] = {}
        self._evaluated_at = -1

    @contextlib.contextmanager
    def monitored(self, on_hang: Callable[[PlscError], None] | None) -> Iterator[None]:
        """Watch within that some rank makes progress, unless ``on_hang``, which hears where none does, is None."""
        if on_hang is not None:
            seconds = self.config.parallel.timeout_seconds
            log = partial(append_to_log, self.out)
            self._monitor = monitor_ranks(self.mesh, seconds, log, on_hang)
        try:
            yield
        finally:
            if self._monitor is not None:
                self._monitor.end()

    def run(self, stop: StopRequest) -> dict[str, Any]:
        """Take the steps that are left; evaluate, log and save on the way.

        A step's result is read when the next one is enqueued, so that the device never waits for the host; at once
        where something is written or evaluated after the step. So all ranks learn of a signal after the same step.
        """
        start, images = time.monotonic(), 0
        last_step = self._last_step()
        progress = StepProgress(self.report, self.position, last_step, self.efficiency.notes)
        self._meter = StepMeter()
        self.timeline.begin()
        for group in _awaited(self._groups()):
            self._at("step")
            enqueued = self.stepper.step(group, self.position.step, stop.signal)
            images += enqueued.images
            self._count(enqueued, group)
            self.profiler.end_step(self.position.step)
            result = self._read_results(keep=0 if self._is_looked_at(last_step) else 1)
            self._log(result)
            progress.advance(enqueued.images, epoch=self.epochs_done, lr=self.rates[0], loss=self.last_loss)
            if result is not None and result.stop:
                self._save(wait=True)
                raise Interrupted(
                    f"stopped by a signal after step {self.position.step:,}; its checkpoint is "
                    f"written: --resume auto goes on",
                    result.stop,
                )
            with progress.paused():
                # The last step's evaluation comes before its checkpoint, which stores the best accuracy.
                if _is_due(self.position.step, self.config.eval.every_steps) or self.position.step >= last_step:
                    self._evaluate()
                if self._is_checkpoint_due():
                    self._save()
        self._read_results()
        progress.finish()
        self._evaluate()
        self._save(wait=True)
        summary = self._result(time.monotonic() - start, images)
        for line in closing_lines(self.out, summary):
            self.report.log(line)
        return summary

    def _at(self, place: str) -> None:
        """Tell the monitor what is done now: one of _PLACES."""
        if self._monitor is not None:
            is_of_step = place in _OF_STEP
            number = self.position.step + is_of_step  # the position counts a step when it is enqueued
            self._monitor.at(f"{place} {number:,}", len(_PLACES) * number + _PLACES.index(place), limited=is_of_step)

    @property
    def epochs_done(self) -> float:
        """Epochs trained, with the share of the present one."""
        state = self.components.loader.state_dict()
        return state["epoch"] + state["consumed"] / len(self.components.dataset)

    # Beginning, or going on.

    def _find_checkpoint(self, resume: str | None) -> StoredCheckpoint | None:
        if self.mesh.is_main:
            for leftover in self.out.glob(".*.tmp"):
                leftover.unlink()
        self.checkpoints.clean()
        if resume is None:
            return None
        if resume == "auto":
            return open_newest(self.checkpoints)
        path = Path(resume)
        if not (path / CHECKPOINTS).is_dir():
            return open_checkpoint(path, self.mesh)
        stored = open_newest(CheckpointFolder(path / CHECKPOINTS, self.mesh))
        if stored is None:
            raise UsageError(f"{path} holds no finished checkpoint; --resume auto begins anew where there is none")
        return stored

    def _resume_from(self, stored: StoredCheckpoint) -> str:
        """Restore the run's state; returns what it starts from, in words."""
        self.position = raise_on_all_ranks(self.mesh, lambda: restore(self.components, stored))
        if stored.path.parent.resolve() == self.checkpoints.folder.resolve():
            self._saved_at = self.position.step
        ranks = counted(stored.state["world_size"], "rank")
        return f"resumed from {stored.path} (step {self.position.step:,}, saved by {ranks})"

    def _report_resumption(self, stored: StoredCheckpoint | None, superseded: list[Path]) -> None:
        """Report the keys that changed, the later checkpoints that were set aside, and where no step is left."""
        if stored is None:
            return
        for change in changed_keys(stored.state["config"], self.config):
            self.report.line(f"changed on resume: {change}")
        for change in changed_tables(stored, self.components) if self.mesh.is_main else ():
            self.report.line(change)
        for later in superseded:
            self.report.line(f"set aside as superseded-{later.name}: it is of a later step")
        if self.components.exchange.forgets:
            self.report.line(f"not stored in checkpoints: {self.components.exchange.forgets}")
        if self._last_step() == self.position.step:
            self.report.line("no step is left to train: raise epochs or steps to go on")

    def _write_descriptions(self) -> None:
        if self.mesh.is_main:
            with atomic_write(self.out / CONFIG) as tmp_path:
                tmp_path.write_text(configuration.to_toml(self.config), encoding="utf-8")
            self.components.dataset.save_label_map(self.out / CLASSES)
            if self._launch is not None:  # last: from here on a restart goes on with what this folder holds
                mark_launch(self.out, self._launch)

    def _set_schedule(self) -> None:
        ranks, step = self.components.strategy.data_ranks, self.position.schedule_step
        factors = self.plan.rate_factors(ranks)
        optimizers = (self.components.optimizer, self.components.head_optimizer)
        self.schedulers = [scheduler(each, factor, step=step) for each, factor in zip(optimizers, factors, strict=True)]
        self._peaks = list(zip(peak_rates(self.config, ranks), factors, strict=True))
        self.rates = [0.0, 0.0]  # of the last step: of backbone and head

    def _total_steps(self) -> int:
        if self.config.steps is not None:
            return self.config.steps
        assert self.config.epochs is not None
        return self.config.epochs * steps_per_epoch(self.components)

    def _last_step(self) -> int:
        """The number of the run's last step. ``step`` and ``schedule_step`` part when the batch size changes."""
        return self.position.step + max(self._total_steps() - self.position.schedule_step, 0)

    # Steps.

    def _groups(self) -> Iterator[list[MicroBatch]]:
        """The micro-batches of each step that is left, through all epochs and stages."""
        while not self._is_finished():
            self._at("data of step")
            for group in micro_batches(self.components.loader, self.config.optim.accumulate):
                yield group
                self._at("data of step")
                if self.config.steps is not None and self._is_finished():
                    return
                if self._enter_due_stage():
                    break  # what was read ahead has another augmentation; the loader goes on where it stands

    def _enter_due_stage(self) -> bool:
        """Enter the stage that the next step belongs to; returns whether that changes the augmentation."""
        due, augment = self.plan.at(self.position.schedule_step), self.components.loader.augment
        if due == self._stage:
            return False
        self._stage = due
        enter_stage(self.components, due)
        self.report.line(f"stage {due} begins {self.plan.described()[due - 1]}")
        return augment != self.components.loader.augment

    def _is_finished(self) -> bool:
        if self.config.steps is not None:
            return self.position.step >= self.config.steps
        assert self.config.epochs is not None
        return self.components.loader.epoch >= self.config.epochs

    def _count(self, enqueued: EnqueuedStep, group: Sequence[MicroBatch]) -> None:
        """Count a step, and move the learning rate on."""
        self.rates = [peak * factor(self.position.schedule_step) for peak, factor in self._peaks]
        self.position.step += 1
        self.position.schedule_step += 1
        self.position.accuracy = None
        advance(self.schedulers)
        self._unread.append(_UnreadStep(self.position.step, enqueued, group, self.rates))

    def _is_looked_at(self, last_step: int) -> bool:
        """Return whether something is written or evaluated after the present step."""
        config, step = self.config, self.position.step
        due = [config.log.every_steps, config.eval.every_steps, config.checkpoint.every_steps]
        due += [POLL_STEPS] if config.checkpoint.every_minutes else []
        return step >= last_step or any(_is_due(step, every) for every in due)

    def _read_results(self, keep: int = 0) -> StepResult | None:
        """Read the results of all steps but the ``keep`` newest; the last one that was read."""
        result = None
        while len(self._unread) > keep:
            step = self._unread.popleft()
            result = step.enqueued.result()
            self._take_in(step, result)
            self._meter.update(result)
        return result

    def _take_in(self, step: _UnreadStep, result: StepResult) -> None:
        """Count a step as learned from, or as skipped; keep the batch then, and give up where that is asked for."""
        if not result.skipped:
            self.last_loss, self._skipped_in_a_row = result.loss, 0
            return
        self.position.skipped += 1
        self._skipped_in_a_row += 1
        is_overflow = self.config.precision == "fp16" and math.isfinite(result.loss)
        if not is_overflow:
            self._keep(step, result)
        if self._skipped_in_a_row >= self.config.max_skipped_steps:
            self._give_up(
                f"loss or gradients were not finite for {self._skipped_in_a_row} steps in a row, up to step "
                f"{step.number:,} (learning rate {step.rates[0]:.3g}); lower optim.lr, lengthen the "
                'warm-up, set optim.clip_norm = 5, or compute with precision = "bf16" or "fp32"'
            )

    def _keep(self, step: _UnreadStep, result: StepResult) -> None:
        """Keep the batch of a step that was not finite; give up if non_finite says so."""
        kept = self._kept.keep(step.number, step.group, result, step.rates)
        if kept is not None:
            self.report.line(f"step {step.number:,} was not finite (loss {result.loss:g}); its batch is kept in {kept}")
        if self.config.non_finite == "stop":
            self._give_up(
                f"loss or gradients of step {step.number:,} were not finite (loss {result.loss:g}); its batch is in "
                f'{self._kept.folder}; non_finite = "skip" leaves such steps out'
            )

    def _give_up(self, why: str) -> NoReturn:
        with contextlib.suppress(PlscError):
            self.checkpointer.wait()
        raise PlscError(f"{why}; --resume auto goes on from the last checkpoint")

    # Evaluating and saving.

    def _evaluate(self) -> None:
        if not self.config.eval.sets or self._evaluated_at == self.position.step:
            return
        self._evaluated_at = self.position.step
        self._at("evaluation after step")
        with step_part(EVALUATION), self.components.averaged():
            self._evaluate_averaged()

    def _evaluate_averaged(self) -> None:
        self._results = evaluate_sets(self.components)
        self.metrics.write(self.position.step, {"epoch": self.epochs_done, "eval": summary(self._results)})
        for name, result in self._results.items():
            self.report.line(f"step {self.position.step:,}: {name}: " + _format_result(result))
        self.position.accuracy = accuracy = mean_accuracy(self._results)
        if accuracy is not None and accuracy > self.position.best.get("accuracy", -1.0):
            self.position.best = {"step": self.position.step, "accuracy": accuracy}
            self._saved_at = -1  # a checkpoint of this step does not know of it yet
            save_weights(self.components, self.out / BEST)

    def _is_checkpoint_due(self) -> bool:
        """By the steps, the clock or an evaluation; every few steps, the ranks also see how the last one does."""
        step, config = self.position.step, self.config.checkpoint
        by_clock = step % POLL_STEPS == 0 and self._poll()
        is_rated = config.keep.best > 0 and self.position.accuracy is not None
        return by_clock or is_rated or _is_due(step, config.every_steps)

    def _poll(self) -> bool:
        with step_part(CHECKPOINT):
            return self.checkpointer.poll()

    def _save(self, *, wait: bool = False) -> None:
        """Begin a checkpoint of this step, unless there is one; with ``wait``, return when the last is published."""
        step = self.position.step
        self._read_results()  # the position counts the steps that were skipped
        self._at("checkpoint of step")
        with step_part(CHECKPOINT):
            if step not in (self._saved_at, 0):
                with self.components.averaged():
                    tensors, state = capture(self.components, self.position)
                    self.checkpointer.save(step, tensors, state, weights_writer(self.components, self.out / MODEL))
                self._saved_at = step
            if wait:
                self.checkpointer.wait()

    # Reporting.

    def _log(self, result: StepResult | None) -> None:
        """Write a line of metrics when it is due. All ranks call: they have parts of the head's norm and of memory."""
        if result is None or not _is_due(self.position.step, self.config.log.every_steps):
            return
        loss_mean, images_per_second = self._meter.reset()
        values = {
            "epoch": self.epochs_done,
            "loss": result.loss,
            "loss_mean": loss_mean,
            "lr": self.rates[0],
            "head_lr": self.rates[1],
            "grad_norm": result.grad_norm,
            "head_mean_norm": self.components.head.mean_norm(),
            "loss_scale": self.components.scaler.get_scale(),
            "skipped_steps": self.position.skipped,
            **self.efficiency.line(images_per_second),
        }
        self.metrics.write(self.position.step, values)
        self._slow_ranks.add(self.efficiency.own_seconds)

    def _result(self, seconds: float, images: int) -> dict[str, Any]:
        return {
            "out": str(self.out),
            "steps": self.position.step,
            "epochs": self.epochs_done,
            "loss": self.last_loss,
            "skipped_steps": self.position.skipped,
            "images": images,
            "seconds": seconds,
            "images_per_second": images / max(seconds, 1e-9),
            "classes": self.components.dataset.num_classes,
            "eval": self._results,
            "best": self.position.best or None,
        }


def _awaited(groups: Iterator[list[MicroBatch]]) -> Iterator[list[MicroBatch]]:
    """The same groups; the time until each is there belongs to the data."""
    while True:
        with step_part(DATA):
            group = next(groups, None)
        if group is None:
            return
        yield group


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _format_result(result: dict[str, Any]) -> str:
    numbers = {"accuracy": result["accuracy"], "rank-1": result["rank1"]}
    return ", ".join(f"{name} {value:.4f}" for name, value in numbers.items() if value is not None)


def _check_groups(config: Config, mesh: Mesh) -> None:
    if mesh.head.world_size != (config.head_ranks or mesh.world_size):
        raise UsageError(
            f"head_ranks = {config.head_ranks}, but the mesh shards a class table over {mesh.head.world_size} of its "
            f"{mesh.world_size} ranks; give plsc.init(head_ranks={config.head_ranks})"
        )


def _check_folder(out: Path, resume: str | None) -> None:
    if resume is None and ((out / CHECKPOINTS).exists() or (out / METRICS).exists()):
        raise UsageError(f"{out} holds a run already; go on with it by --resume auto, or name another --out")
