"""The training run, top to bottom: from a configuration to a run directory, in one go or in as many as it takes."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from plsc import config as configuration
from plsc.config import Config
from plsc.data.loader import report_killed_workers
from plsc.errors import PlscError
from plsc.loggers import LoggedRun
from plsc.parallel import Mesh
from plsc.parallel.collectives import raise_on_all_ranks
from plsc.parallel.rank_monitor import RankMonitor
from plsc.parallel.step_timeline import CHECKPOINT, DATA, EVALUATION, StepTimeline, step_part
from plsc.train.async_checkpoint import AsyncCheckpointer
from plsc.train.efficiency import EfficiencyMeter
from plsc.train.evaluate import RunEvaluation, last_weights_writer
from plsc.train.failures import Interrupted, SlowRanks, StopRequest, monitor_ranks
from plsc.train.head_state import flush_tables, forget_tables
from plsc.train.metrics import Logger, MetricsLog
from plsc.train.micro_batches import MicroBatch, micro_batches
from plsc.train.opening import OpenedRun, open_run
from plsc.train.profiling import FOLDER as PROFILE
from plsc.train.profiling import StepProfiler
from plsc.train.report import RunReport, StepProgress, append_to_log, closing_lines, data_warnings, header
from plsc.train.resumption import slow_precision
from plsc.train.state import capture
from plsc.train.step import Stepper, StepResult
from plsc.train.step_results import KeptBatches, StepResults

POLL_STEPS = 10  # between two exchanges about a checkpoint under way, for which the ranks' hosts wait for each other
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
        out: config.toml, classes.json, train.log, metrics.jsonl, checkpoints/, model.safetensors (the last weights),
            best.safetensors (those of the best mean accuracy), and what the loggers of ``log.to`` write.
        resume: None begins a run; "auto" goes on from the newest checkpoint of ``out``, or begins where there
            is none; else a checkpoint's folder, or a run's. After a restart by torchrun, the run that the same
            launch has begun in ``out`` goes on as by "auto".
        quiet: print nothing; train.log is written.
        notes: lines for the head of train.log.
        loggers: are given the numbers of metrics.jsonl, on the first rank: functions that are called as
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
    with StopRequest(tell=mesh.is_main and not quiet) as stop:
        trainer = Trainer.from_config(config, mesh, Path(out), resume, quiet, notes, loggers)
        try:
            with report_killed_workers(), trainer.timeline.active(), trainer.monitored(on_hang):
                return trainer.run(stop)
        except PlscError as error:
            trainer.report.log(f"ended: {error}")
            raise
        finally:
            trainer.components.exchange.close()
            trainer.profiler.close()
            trainer.checkpointer.close()
            trainer.metrics.close()
            trainer.report.close()


class Trainer:
    """One rank's part of a training run."""

    @classmethod
    def from_config(
        cls,
        config: Config,
        mesh: Mesh,
        out: Path,
        resume: str | None,
        quiet: bool,
        notes: Sequence[str] = (),
        loggers: Sequence[Logger] = (),
    ) -> "Trainer":
        """Begin or resume the run ``out``; every rank calls, with arguments as of :func:`train`."""
        run = open_run(config, mesh, out, resume)
        report = RunReport(out, enabled=mesh.is_main, quiet=quiet)
        for line in notes:
            report.line(line)
        return cls(run, out, report, loggers)

    def __init__(self, run: OpenedRun, out: Path, report: RunReport, loggers: Sequence[Logger]) -> None:
        self.components = components = run.components
        self.config, self.mesh, self.out = components.config, components.mesh, out
        self.checkpoints, self.position, self.schedule = run.checkpoints, run.position, run.schedule
        self._saved = self._state_to_save() if run.is_saved else None
        mesh = self.mesh

        # What the run is reported to: train.log, metrics.jsonl, and the meters of its parts.
        self.timeline = StepTimeline(mesh.device)
        self.efficiency = EfficiencyMeter(components, self.timeline)
        self.report = report
        if mesh.is_main:  # other ranks may hold nothing of the head that it describes
            self._report_start(run.start, run.why_precision)
        for line in run.lines:
            report.line(line)
        self.metrics = raise_on_all_ranks(
            mesh,
            lambda: MetricsLog(
                LoggedRun(out, configuration.to_dict(self.config), self.position.step),
                to=self.config.log.to,
                enabled=mesh.is_main,
                loggers=loggers,
                warn=report.line,
            ),
        )

        # What steps, saves and evaluates.
        self.stepper = Stepper(components)
        self.checkpointer = AsyncCheckpointer(
            self.checkpoints,
            self.report.line,
            background=self.config.checkpoint.async_save and not components.strategy.steps_alone,
            every_minutes=self.config.checkpoint.every_minutes,
        )
        self.profiler = StepProfiler(
            self.timeline,
            out / PROFILE,
            steps=self.config.log.profile if mesh.is_main else 0,
            left=self._steps_left,
            device=mesh.device,
            report=self.report.line,
        )
        self._monitor: RankMonitor | None = None
        self._slow_ranks = SlowRanks(self.report.line)
        kept = KeptBatches(out, components.loader.dataset, mesh, self.config.non_finite_kept)
        self.results = StepResults(self.config, self.position, kept, self.report.line, self.checkpointer.wait)
        self.evaluation = RunEvaluation(components, self.position, out, self.metrics, self.report.line)

    def _report_start(self, start: str, why_precision: str) -> None:
        """Write the head of train.log."""
        work, stages = self.efficiency.describe(), self.schedule.described()
        lines = header(self.components, self.schedule.last_step, start, stages, work, why_precision)
        lines += slow_precision(self.config, self.mesh.device) + data_warnings(self.components.dataset)
        for line in lines:
            self.report.line(line)

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
        last_step = self.schedule.last_step
        progress = StepProgress(self.report, self.position, last_step, self.efficiency.notes)
        self.results.meter.reset()
        self.timeline.begin()
        for group in _awaited(self._groups()):
            self._at("step")
            enqueued = self.stepper.step(group, self.position.step, stop.signal)
            images += enqueued.images
            self.schedule.advance()
            self.results.add(enqueued, group, self.schedule.rates)
            self.profiler.end_step(self.position.step)
            result = self.results.read(keep=0 if self._is_looked_at(last_step) else 1)
            self._log(result)
            lr, loss = self.schedule.rates[0], self.results.last_loss
            progress.advance(enqueued.images, epoch=self.epochs_done, lr=lr, loss=loss)
            stop_signal = 0 if result is None else result.stop
            with progress.paused():
                # The checkpoint stores the best accuracy, and a run that goes on from it evaluates later steps only.
                if _is_due(self.position.step, self.config.eval.every_steps) or self.position.step >= last_step:
                    self._evaluate()
                if stop_signal or self._is_checkpoint_due():
                    self._save(wait=bool(stop_signal))
            if stop_signal:
                raise Interrupted(
                    f"stopped by a signal after step {self.position.step:,}; its checkpoint is "
                    f"written: --resume auto goes on",
                    stop_signal,
                )
        self.results.read()
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
        return state["epoch"] + state["consumed"] / self.components.dataset.mixture.epoch_length

    @property
    def _steps_left(self) -> int:
        return self.schedule.last_step - self.position.step

    def _groups(self) -> Iterator[list[MicroBatch]]:
        """The micro-batches of each step that is left, through all epochs and stages."""
        while not self.schedule.is_finished:
            self._at("data of step")
            split = self.components.class_loss.split
            for group in micro_batches(self.components.loader, self.config.optim.accumulate, split):
                yield group
                self._at("data of step")
                if self.schedule.is_finished:
                    return
                if self.schedule.enter_due_stage(self.report.line):
                    break  # what was read ahead has another augmentation; the loader goes on where it stands

    def _is_looked_at(self, last_step: int) -> bool:
        """Return whether something is written or evaluated after the present step."""
        config, step = self.config, self.position.step
        due = [config.log.every_steps, config.eval.every_steps, config.checkpoint.every_steps]
        due += [POLL_STEPS] if config.checkpoint.every_minutes else []
        return step >= last_step or any(_is_due(step, every) for every in due)

    def _evaluate(self) -> None:
        if not self.evaluation.is_done:
            self._at("evaluation after step")
            with step_part(EVALUATION):
                self.evaluation.run(self.epochs_done)

    def _is_checkpoint_due(self) -> bool:
        """By the steps, the clock or an evaluation; every few steps, the ranks also see how the last one does."""
        step, config = self.position.step, self.config.checkpoint
        with step_part(CHECKPOINT):
            by_clock = step % POLL_STEPS == 0 and self.checkpointer.poll()
        is_rated = config.keep.best > 0 and self.position.accuracy is not None
        return by_clock or is_rated or _is_due(step, config.every_steps)

    def _save(self, *, wait: bool = False) -> None:
        """Begin a checkpoint of this step, unless there is one; with ``wait``, return when the last is published."""
        self.results.read()  # the position counts the steps that were skipped
        self._at("checkpoint of step")
        step = self.position.step
        with step_part(CHECKPOINT):
            if step > 0 and self._state_to_save() != self._saved:
                with self.components.averaged():
                    tensors, state = capture(self.components, self.position)
                    weights = last_weights_writer(self.components, self.out, step, self.schedule.last_step)
                    self.checkpointer.save(step, tensors, state, weights, partial(flush_tables, self.components))
                self._saved = self._state_to_save()
            if wait:
                self.checkpointer.wait()
            forget_tables(self.components, self.checkpoints)

    def _state_to_save(self) -> tuple[int, dict[str, Any]]:
        """Return what makes a checkpoint another than the last: its step, or the best accuracy that it stores."""
        return self.position.step, self.position.best

    def _log(self, result: StepResult | None) -> None:
        """Write a line of metrics when it is due. All ranks call: they have parts of the head's norm and of memory."""
        if result is None or not _is_due(self.position.step, self.config.log.every_steps):
            return
        loss_mean, images_per_second = self.results.meter.reset()
        values = {
            "epoch": self.epochs_done,
            "loss": result.loss,
            "loss_mean": loss_mean,
            "lr": self.schedule.rates[0],
            "head_lr": self.schedule.rates[1],
            "grad_norm": result.grad_norm,
            "head_mean_norm": self.components.tables[0].head.mean_norm(),
            "loss_scale": self.components.scaler.get_scale(),
            "skipped_steps": self.position.skipped,
            **self.components.exchange.figures(),
            **{name: value for each in self.components.features.values() for name, value in each.figures().items()},
            **self._of_tables(result),
            **result.feature_losses,
            **self.efficiency.line(images_per_second),
        }
        self.metrics.write(self.position.step, values)
        self._slow_ranks.add(self.efficiency.own_seconds)

    def _of_tables(self, result: StepResult) -> dict[str, Any]:
        """The values of a line of metrics that each of several class tables has; every rank calls."""
        if not result.table_losses:
            return {}
        norms = {table.name: table.head.mean_norm() for table in self.components.tables}
        return {"table_loss": result.table_losses, "table_mean_norm": norms}

    def _result(self, seconds: float, images: int) -> dict[str, Any]:
        return {
            "out": str(self.out),
            "steps": self.position.step,
            "epochs": self.epochs_done,
            "loss": self.results.last_loss,
            "skipped_steps": self.position.skipped,
            "images": images,
            "seconds": seconds,
            "images_per_second": images / max(seconds, 1e-9),
            "classes": self.components.dataset.num_classes,
            "eval": self.evaluation.results,
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
