"""Checkpoints beside training: every rank's thread writes its files, and the ranks publish them at a later step.

The threads do local work alone. What needs all ranks happens in their main threads between two steps, in one order on
all: planning, asking how far the threads are, and collecting what they wrote. So no collective of a checkpoint comes
between those of a step, and no process group of its own is needed.

A checkpoint passes through two tasks: all ranks write (:mod:`plsc.train.checkpoint_writer`), then the main rank
publishes (:meth:`plsc.train.checkpoint.CheckpointFolder.publish`). One is under way at a time; the next waits for it.
"""

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.storage import WriteResult

from plsc.errors import PlscError
from plsc.files import write_json
from plsc.parallel.collectives import all_gather_numbers, all_gather_object, barrier, raise_on_all_ranks
from plsc.sizes import available_bytes
from plsc.train.checkpoint import STATE, CheckpointFolder
from plsc.train.checkpoint_writer import Described, ShardWriter, StagingClosedError, write_errors

WAITING_BYTES = 128 << 20  # of host memory where training waits: a piece is copied while another is written
HOST_SHARE = 0.5  # of the host memory that is free at the first checkpoint: what its ranks may fill with snapshots
_LOOK_SECONDS = 1.0  # between two exchanges of ranks that wait
LONG_WAIT_SECONDS = 10.0  # shorter waits for the checkpoint before are not reported


@dataclass
class _Pending:
    """A checkpoint on its way; ``task`` is what this rank's thread does for it now."""

    step: int
    tmp_path: Path
    state: Mapping[str, Any]
    before: Callable[[], None]
    writer: ShardWriter
    task: Future[Any]
    is_written: bool = False  # on all ranks: the main rank publishes it


class AsyncCheckpointer:
    """Saves a run's checkpoints. All ranks call :meth:`save`, :meth:`poll` and :meth:`wait` at the same steps."""

    def __init__(
        self,
        folder: CheckpointFolder,
        report: Callable[[str], None],
        *,
        background: bool = True,
        every_minutes: float = 0.0,
    ) -> None:
        """Save into ``folder``.

        Args:
            folder: where checkpoints are published.
            report: takes a line about a checkpoint that failed in the background, or that makes training wait.
            background: write while training goes on; else :meth:`save` returns when all is published.
            every_minutes: how long after the last checkpoint began :meth:`poll` asks for the next; 0: never.
        """
        self.folder, self.mesh, self._report = folder, folder.mesh, report
        self._background, self._every_seconds = background, 60 * every_minutes
        self._last_begin = time.monotonic()
        self._host_bytes: int | None = None if background else WAITING_BYTES
        self._pending: _Pending | None = None
        self._has_waited = False
        self._thread = ThreadPoolExecutor(1, "checkpoint", _take_device, (self.mesh.device,))

    @property
    def is_saving(self) -> bool:
        """True while a checkpoint is not published; the same on all ranks."""
        return self._pending is not None

    def save(
        self,
        step: int,
        tensors: Mapping[str, Any],
        state: Mapping[str, Any],
        before: Callable[[], None] = lambda: None,
        flush: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin the checkpoint of ``step``, once the one before is published; then ``tensors`` may change again.

        Args:
            step: its number, and its name.
            tensors: tensors by name; each rank gives what it has to write, tables as TensorShard. Of a tensor
                that all ranks hold, one rank gives it.
            state: everything else, as JSON holds it; the main rank's is written. Its ``accuracy``, where it has one,
                is what the keep policy goes by.
            before: called by the main rank's thread before the checkpoint is published, so that a run that goes on
                from it finds what this has written; an error of it is one of the checkpoint.
            flush: called by every rank's thread behind its tensors; syncs files that the checkpoint refers to.

        Raises:
            DataError: it cannot be written (a full disk, say); nothing was published. What happens in the
                background is reported by :meth:`poll` or the next call, or raised by :meth:`wait`.
        """
        begin = self._last_begin = time.monotonic()
        with self._reported_failure():
            self.wait()
        if (waited := time.monotonic() - begin) >= LONG_WAIT_SECONDS:
            self._report(f"training waited {waited:.0f} s until the checkpoint before was written: save less often")
        tmp_path = raise_on_all_ranks(self.mesh, lambda: self.folder.prepare(step))
        writer = ShardWriter(tmp_path, tensors, self.mesh, self._allowed_bytes())
        if self._background and not writer.fits and not self._has_waited:
            self._has_waited = True
            self._report(
                f"training waits while most of a checkpoint is written: a rank saves {writer.nbytes / 1e9:.1f} GB, "
                f"and may hold {self._allowed_bytes() / 1e9:.1f} GB of it in host memory"
            )
        self._pending = _Pending(step, tmp_path, deepcopy(state), before, writer, writer.write(self._thread, flush))
        barrier(self.mesh)  # of hosts: where memory was short, a rank may come later than a GPU's collective waits
        if not self._background:
            self.wait()

    def poll(self) -> bool:
        """Publish a checkpoint that all ranks have written; return True when the clock asks for the next.

        A failure in the background is reported, and training goes on: what it has learned is in memory only.
        """
        if self._pending is None and not self._every_seconds:  # the same on all ranks
            return False
        by_clock = bool(self._every_seconds) and time.monotonic() - self._last_begin >= self._every_seconds
        is_due = False  # also after a failure: clocks differ
        with self._reported_failure():
            is_due = self._go_on(by_clock and self.mesh.is_main)
        return is_due and self._pending is None

    def wait(self) -> None:
        """Return when the checkpoint that was begun last is published.

        Raises:
            DataError: it cannot be written; nothing was published.
        """
        while self._pending is not None:  # in many short exchanges: a process group's time-out would end a long one
            futures.wait([self._pending.task], _LOOK_SECONDS)
            self._go_on()

    def close(self) -> None:
        """Leave a checkpoint that is not published as it is; holds no collective. The run's next start removes it."""
        if self._pending is not None:
            self._pending.writer.cancel()
        self._thread.shutdown()

    def _go_on(self, is_due: bool = False) -> bool:
        """Publish what all ranks have written, or raise what some rank has met; True if any rank gives ``is_due``."""
        task = self._pending.task if self._pending is not None else None
        running, failed, is_due = self._on_any_rank(
            task is not None and not task.done(),
            task is not None and task.done() and task.exception() is not None,
            is_due,
        )
        if failed:
            self._abandon()
        if not running:
            self._advance()
        return is_due

    def _advance(self) -> None:
        """All ranks' tasks have ended well: let the main rank publish, or forget what is published."""
        pending = self._pending
        if pending is None:
            return
        if pending.is_written:
            self._pending = None
            if self.mesh.is_main and (failure := pending.task.result()):
                self._report(f"the checkpoint of step {pending.step:,} is published, but not all after it: {failure}")
            return
        results, described = zip(*all_gather_object(pending.task.result(), self.mesh), strict=True)
        files: Described = {name: entry for share in described for name, entry in share.items()}
        pending.is_written = True
        if self.mesh.is_main:
            pending.task = self._thread.submit(self._publish, pending, list(results), files)

    def _publish(self, pending: _Pending, results: list[list[WriteResult]], files: Described) -> str | None:
        """Complete and publish the folder; returns what failed afterwards, in words."""
        what = f"the checkpoint {pending.tmp_path}"
        with write_errors(what):
            pending.writer.finish(results)
            write_json(pending.tmp_path / STATE, dict(pending.state))
        pending.before()
        with write_errors(what):
            return self.folder.publish(pending.tmp_path, pending.step, files, pending.state.get("accuracy"))

    def _abandon(self) -> NoReturn:
        """Some rank's task has failed: end the others' and remove the files. Raises that rank's error on all."""
        pending, self._pending = self._pending, None
        assert pending is not None
        pending.writer.cancel()
        futures.wait([pending.task])
        try:
            raise_on_all_ranks(self.mesh, lambda: _result(pending.task))
        finally:
            if self.mesh.is_main:
                shutil.rmtree(pending.tmp_path, ignore_errors=True)
        raise AssertionError("no rank has failed")

    @contextlib.contextmanager
    def _reported_failure(self) -> Iterator[None]:
        pending = self._pending
        try:
            yield
        except PlscError as error:
            assert pending is not None
            self._report(f"no checkpoint of step {pending.step:,}: {error}; training goes on, and tries again later")

    def _allowed_bytes(self) -> int:
        """Bytes of host memory for this rank's snapshot; asked once, as later its memory counts as used."""
        if self._host_bytes is None:
            ranks = int(os.environ.get("LOCAL_WORLD_SIZE", self.mesh.world_size))
            self._host_bytes = int(HOST_SHARE * (available_bytes() or 0)) // ranks
        return self._host_bytes

    def _on_any_rank(self, *flags: bool) -> list[bool]:
        everyone = all_gather_numbers([int(flag) for flag in flags], self.mesh)
        return [any(column) for column in zip(*everyone, strict=True)]


def _take_device(device: torch.device) -> None:
    """A thread begins on GPU 0, where waiting for an event would make a context for every rank."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _result(task: Future[Any]) -> None:
    """Raise the task's error, unless it was cancelled because of another rank's."""
    with contextlib.suppress(StagingClosedError):
        task.result()
