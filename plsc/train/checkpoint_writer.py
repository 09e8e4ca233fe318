"""One rank's part of a checkpoint: its tensors are copied to host memory, and a thread writes, hashes and syncs them.

torch.distributed.checkpoint plans and writes, through its SavePlanner and FileSystemWriter. Its async_save is not used:
it copies the whole state to the host whatever the memory, needs a CPU backend for collectives in the thread, and its
stager knows no shards of other types. Here the thread does local work only.
"""

import contextlib
import hashlib
import io
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from plsc.errors import DataError
from plsc.parallel import Mesh
from plsc.parallel.collectives import all_gather_object, raise_on_all_ranks

Described = dict[str, dict[str, Any]]


class ShardWriter:
    """Writes this rank's tensors of one checkpoint in a thread, while training goes on.

    They are copied to host memory first, piece by piece: pinned memory where they are on a GPU (torch keeps it for the
    next time), so that the copies are queued behind the step's kernels and nobody waits for them. At most
    ``host_bytes`` are held; what is more waits until the thread has written some, so that any state is saved with any
    memory.
    """

    def __init__(self, folder: Path, tensors: Mapping[str, Any], mesh: Mesh, host_bytes: int) -> None:
        """Plan with all ranks, which all call."""
        self._host_bytes = host_bytes
        self._stager = HostStager(host_bytes)
        self._planner = _StagedPlanner(self._stager)
        # Without copying ahead: that would be from this thread's GPU stream, of tensors that have changed by then.
        self._writer = FileSystemWriter(folder, single_file_per_rank=True, sync_files=True, per_thread_copy_ahead=0)
        self._writer.fs = self._files = _HashingFileSystem()
        self._planner.set_up_planner(dict(tensors), self._writer.storage_meta(), mesh.is_main)
        self._writer.set_up_storage_writer(mesh.is_main)
        local_plan = raise_on_all_ranks(
            mesh, lambda: self._writer.prepare_local_plan(self._planner.create_local_plan())
        )
        plans, self._metadata = self._planner.create_global_plan(all_gather_object(local_plan, mesh))
        self._plan = self._planner.finish_plan(self._writer.prepare_global_plan(plans)[mesh.rank])
        self.nbytes = sum(map(_item_bytes, self._plan.items))

    @property
    def fits(self) -> bool:
        """True if a copy of all that this rank writes fits into ``host_bytes``."""
        return self.nbytes <= self._host_bytes

    def write(
        self, thread: Executor, flush: Callable[[], None] = lambda: None
    ) -> "Future[tuple[list[WriteResult], Described]]":
        """Let ``thread`` write the tensors as they are now; when this returns, they may change.

        Args:
            thread: runs all of it.
            flush: is called behind it, and syncs what belongs to the checkpoint and lies elsewhere.

        Returns:
            The results for torch's metadata, and the files as the manifest describes them.
        """
        if self.fits:  # copied first: the two would take each other's time
            self._planner.stage(self._plan)
            return thread.submit(self._write, flush)
        written = thread.submit(self._write, flush)
        with contextlib.suppress(StagingClosedError):  # the thread has failed, and ``written`` tells
            self._planner.stage(self._plan)
        return written

    def finish(self, results: list[list[WriteResult]]) -> None:
        """Write torch's own file of all ranks' results; the main rank calls."""
        self._writer.finish(self._metadata, results)

    def cancel(self) -> None:
        """Let the thread stop after the tensor that it writes, with a StagingClosedError."""
        self._stager.close()

    def _write(self, flush: Callable[[], None]) -> tuple[list[WriteResult], Described]:
        try:
            with write_errors(f"the checkpoint {self._writer.path}"), self._files.unwrapped_errors(), _without_crc32():
                results = self._writer.write_data(self._plan, self._planner).wait()
                flush()
        finally:
            self._stager.close()
        return results, self._files.described


class StagingClosedError(Exception):
    """The other thread takes, or gives, no more tensors."""


class HostStager:
    """Tensors on their way from the training thread to the writing one, as copies in at most ``limit`` bytes."""

    def __init__(self, limit: int) -> None:
        self._limit, self._held, self._handed_out = limit, 0, 0
        self._copies: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def put(self, tensor: Tensor) -> None:
        """Copy ``tensor``; waits for memory first. A tensor that is larger than the limit has it alone.

        Raises:
            StagingClosedError: :meth:`close` was called.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self._held or self._held + tensor.nbytes <= self._limit)
            if self._closed:
                raise StagingClosedError
            self._held += tensor.nbytes
        copy, event = _copy_to_host(tensor.detach())
        with self._changed:
            self._copies.append((copy, event))
            self._changed.notify_all()

    def get(self) -> Tensor:
        """Return the next copy, and forget the one before, which has been written.

        Raises:
            StagingClosedError: :meth:`close` was called.
        """
        with self._changed:
            self._held -= self._handed_out
            self._handed_out = 0
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._closed or bool(self._copies))
            if self._closed:
                raise StagingClosedError
            copy, event = self._copies.popleft()
            self._handed_out = copy.nbytes
        if event is not None:
            event.synchronize()
        return copy

    def close(self) -> None:
        """End both threads' waiting, and forget all copies."""
        with self._changed:
            self._closed = True
            self._copies.clear()
            self._changed.notify_all()


class _StagedPlanner(DefaultSavePlanner):
    """torch's planner, whose tensors the writer takes from a stager in the order of the plan."""

    def __init__(self, stager: HostStager) -> None:
        super().__init__()
        self._stager = stager

    def stage(self, plan: SavePlan) -> None:
        """Copy the plan's tensors."""
        for item in plan.items:
            self._stager.put(cast(Tensor, super().resolve_data(item)))

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """Return the copy of the item's tensor."""
        return self._stager.get()


class _HashingFileSystem(FileSystem):
    """torch's file system, with the SHA-256 of each file taken while it is written."""

    def __init__(self) -> None:
        self.described: Described = {}
        self.failure: OSError | None = None

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Open a file."""
        try:
            with super().create_stream(path, mode) as raw:
                stream = _HashingStream(cast(io.BufferedWriter, raw), self)
                yield cast(io.IOBase, stream)
        except OSError as error:
            self.failure = error
            raise
        self.described[Path(path).name] = {"bytes": stream.nbytes, "sha256": stream.digest.hexdigest()}

    @contextlib.contextmanager
    def unwrapped_errors(self) -> Iterator[None]:
        """Raise the OSError of a file where torch.save wraps it into one that does not say that the disk is full."""
        try:
            yield
        except RuntimeError:
            if self.failure is None:
                raise
            raise self.failure from None


class _HashingStream:
    """A file that is written from its beginning to its end."""

    def __init__(self, raw: io.BufferedWriter, files: _HashingFileSystem) -> None:
        self._raw, self._files = raw, files
        self.nbytes, self.digest = 0, hashlib.sha256()
        self.tell, self.flush, self.fileno, self.close = raw.tell, raw.flush, raw.fileno, raw.close

    def write(self, data: Any) -> int:
        self.digest.update(data)
        try:
            count = self._raw.write(data)
        except OSError as error:
            self._files.failure = error
            raise
        self.nbytes += count
        return count


def _copy_to_host(tensor: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Copy to memory of its own, with the event after which the copy holds what ``tensor`` is now."""
    if tensor.device.type != "cuda":
        return tensor.to("cpu", copy=True), None
    copy = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(tensor.device))
    return copy, event


def _item_bytes(item: WriteItem) -> int:
    assert item.tensor_data is not None  # a checkpoint holds tensors only
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize


@contextlib.contextmanager
def write_errors(what: str) -> Iterator[None]:
    """Translate an OSError into a :class:`DataError` that says what cannot be written, and why."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"cannot write {what}: {reason}; free some space") from None


@contextlib.contextmanager
def _without_crc32() -> Iterator[None]:
    """Let torch.save take no CRC-32 of its records: it takes longer than writing, and SHA-256 covers every byte."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)
