"""The training loader: which samples each rank gets at each step, and the processes that read and augment them.

The order is a pure function of (seed, epoch, position), so the loader resumes at any sample, on any number of ranks.
Nothing here is as long as an epoch: positions, batches and requests are computed when they are asked for.
From top to bottom: :class:`TrainLoader`; the order of samples; :class:`BatchReader`, which runs in the loader's
processes and fills the :class:`plsc.data.image_cache.ImageCache` that they share.
"""

import itertools
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from plsc.data.dataset import ImageDataset
from plsc.data.image_cache import ImageCache, image_shape, open_cache
from plsc.data.mixture import NEWEST_ORDER, ORDERS, EpochOrder
from plsc.data.transforms import augment_batch, check_augmentation
from plsc.errors import DataError, UsageError
from plsc.progress import counted, warn

_END_TOLD_SECONDS = 1.0  # within which the system tells of the end of a process that has closed its pipes
T = TypeVar("T", covariant=True)
_PARENT_SECONDS = 1.0  # after which a loader process looks whether its reader is there


class TrainLoader:
    """Iterates one epoch of ``(images uint8 (b, 3, H, W), labels int64 (b,) or (b, K))`` from its position on.

    The last batches of an epoch may be unequal, see :func:`global_batches`.

    Args:
        dataset: labelled images of one size.
        batch_size: samples per rank and step. Each step's global batch is split contiguously over the ranks.
        rank: this rank, in [0, world_size).
        world_size: number of ranks.
        seed: keys the order, by (seed, epoch), and the augmentation, by (seed, epoch, sample index). At equal
            ``batch_size * world_size`` the global batches hold the same samples and pixels at any world size.
        augment: one of :data:`plsc.data.transforms.AUGMENTATIONS`.
        workers: loader processes of this rank; 0 loads in this one.
        shuffle: permute the samples anew in every epoch.
        cache: of decoded images, kept over the epochs; or what :func:`plsc.data.image_cache.open_cache` opens by.
        max_bad_records: number of distinct unreadable images after which loading fails. Each is reported by key, once,
            and the next readable image of the data set takes its place: every rank knows the size of any rank's batch.
        counts_own: let ``sizes`` be of this rank alone, which steps by itself.
        pin_memory: put batches into pinned memory, from which they are copied to a GPU while the host goes on.

    Attributes:
        epoch: the current epoch, from 0; it advances when the loop over it ends.
        indices: those in the data set of the images that were yielded last.

    Raises:
        UsageError: an argument is out of range, or the data set is too small for the ranks.
        DataError: while iterating: more than ``max_bad_records`` images are unreadable.
    """

    def __init__(
        self,
        dataset: ImageDataset,
        *,
        batch_size: int,
        rank: int,
        world_size: int,
        seed: int,
        augment: str = "flip",
        workers: int = 0,
        shuffle: bool = True,
        cache: ImageCache | str | None = "auto",
        max_bad_records: int = 100,
        pin_memory: bool = False,
        counts_own: bool = False,
    ) -> None:
        _check(dataset, batch_size, rank, world_size, seed, workers)
        self.dataset, self.batch_size, self.rank, self.world_size = dataset, batch_size, rank, world_size
        self.seed, self.shuffle, self.max_bad_records = seed, shuffle, max_bad_records
        self._pin_memory, self._counts_own = pin_memory, counts_own
        self.epoch = self._consumed = self._yielded = 0
        self._order_kind = NEWEST_ORDER
        self.indices: list[int] = []
        self._bad_keys: set[str] = set()
        self._has_read = False
        reader = BatchReader(
            dataset, seed, open_cache(cache, dataset) if isinstance(cache, str) else cache, max_bad_records
        )
        self._requests = EpochRequests(rank, world_size)  # of an epoch from the position on; the DataLoader's sampler
        self.augment = augment
        self._batches = map_in_workers(reader, self._requests, workers, persistent=True, pin_memory=pin_memory)

    @property
    def augment(self) -> str:
        """The augmentation, one of AUGMENTATIONS. Another one holds from the next loop over the loader on."""
        return self._augment

    @augment.setter
    def augment(self, name: str) -> None:
        check_augmentation(name)
        self._augment = name

    @property
    def steps_per_epoch(self) -> int:
        """Steps of a whole epoch, the same on every rank."""
        return len(self._plan(consumed=0))

    def __len__(self) -> int:
        return self.steps_per_epoch  # Lightning reads a batch ahead of a loader that does not tell

    @property
    def steps_left(self) -> int:
        """Steps from the position to the epoch's end, the same on every rank."""
        return len(self._plan(self._consumed))

    @property
    def next_labels(self) -> torch.Tensor | None:
        """Labels of this rank's next batch, including images that turn out unreadable; None at an epoch's end.

        Reading them ahead leaves the position where it is: that of the batches already yielded.
        """
        return self._labels_of(self._requests[self._yielded].indices) if self._has_next else None

    @property
    def sizes(self) -> list[int]:
        """Every rank's number of samples in the batch that was yielded last."""
        return self._sizes_of(self._requests.plan[self._yielded - 1])

    @property
    def next_sizes(self) -> list[int] | None:
        """Those of the next batch; None at an epoch's end."""
        return self._sizes_of(self._requests.plan[self._yielded]) if self._has_next else None

    @property
    def _has_next(self) -> bool:
        return self._yielded < len(self._requests.plan)

    def _sizes_of(self, step: "StepRange") -> list[int]:
        sizes = step.sizes(self.world_size)
        return [sizes[self.rank]] if self._counts_own else sizes

    @property
    def parts(self) -> list["PartOfBatch"]:
        """What each part of the data set has in the batch that was yielded last."""
        return self._parts(self._yielded - 1, np.array(self.indices, dtype=np.int64))

    @property
    def next_parts(self) -> list["PartOfBatch"] | None:
        """The same of the next batch; None at an epoch's end."""
        return self._parts(self._yielded, self._requests[self._yielded].indices) if self._has_next else None

    def state_dict(self) -> dict[str, int]:
        """Return ``{"epoch", "consumed", "order"}``: samples of the epoch that all ranks together have yielded.

        ``"order"`` is a run's kind of order for its whole life, one of :data:`plsc.data.mixture.ORDERS`.
        """
        return {"epoch": self.epoch, "consumed": self._consumed, "order": self._order_kind}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state saved by any number of ranks; without ``"order"``, it is one of shuffled lists.

        Raises:
            DataError: the data has no such position, or this version no such order.
        """
        epoch, consumed, kind = int(state["epoch"]), int(state["consumed"]), state.get("order", 1)
        if kind not in list(ORDERS):
            known = " or ".join(map(str, ORDERS))
            raise DataError(
                f"the run's order of samples is {kind!r}, not {known}: go on with the version that saved it"
            )
        if epoch < 0 or not 0 <= consumed <= self.dataset.mixture.epoch_length:
            raise DataError(
                f"there is no sample {consumed:,} of epoch {epoch} in {self.dataset.source} with its "
                f"{len(self.dataset):,} images; resume with the data that the run began with"
            )
        self.epoch, self._consumed, self._order_kind = epoch, consumed, kind

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        if self._consumed == self.dataset.mixture.epoch_length:  # the last loop was left, or saved, at its last batch
            self.epoch, self._consumed = self.epoch + 1, 0
        self._yielded, plan, mixture = 0, self._plan(self._consumed), self.dataset.mixture
        order = mixture.order(seed=self.seed, epoch=self.epoch, shuffle=self.shuffle, kind=self._order_kind)
        self._requests.begin(order, plan, self.augment)
        for count, (step, batch) in enumerate(zip(plan, self._batches, strict=True), start=1):
            self._check_readable(batch, step.sizes(self.world_size)[self.rank])
            self._report(batch.failures)
            # The position advances by what was yielded, not by what the processes have read ahead.
            self._consumed, self._yielded, self.indices = step.stop, count, batch.indices.tolist()
            yield batch.images, self._labels_of(batch.indices)
        self.epoch, self._consumed = self.epoch + 1, 0

    def _parts(self, number: int, indices: NDArray[np.integer[Any]]) -> list["PartOfBatch"]:
        """The parts of batch ``number`` of the loop, in which this rank has the images ``indices`` (b,)."""
        step, mixture = self._requests.plan[number], self.dataset.mixture
        of_step, _ = mixture.samples_at(np.arange(*step))
        of_ranks = np.split(of_step, np.cumsum(step.sizes(self.world_size))[:-1])
        own = mixture.parts_of(indices)
        return [
            PartOfBatch(np.flatnonzero(own == part), [int((of_rank == part).sum()) for of_rank in of_ranks])
            for part in range(len(mixture.sizes))
        ]

    def _plan(self, consumed: int) -> "GlobalBatches":
        return global_batches(
            self.dataset.mixture.epoch_length, consumed=consumed, batch_size=self.batch_size, world_size=self.world_size
        )

    def _labels_of(self, indices: NDArray[np.integer[Any]]) -> torch.Tensor:
        labels = torch.from_numpy(np.asarray(self.dataset.labels[indices], dtype=np.int64))
        return labels.pin_memory() if self._pin_memory else labels

    def _report(self, failures: dict[str, str]) -> None:
        """Log unreadable images, each once; :class:`DataError` if there are too many."""
        for key in failures.keys() - self._bad_keys:
            self._bad_keys.add(key)
            warn("plsc.data", f"left out: {failures[key]}")
            if len(self._bad_keys) > self.max_bad_records:
                raise DataError(
                    f"more than {self.max_bad_records} images of {self.dataset.source} could not be read; "
                    f"the last: {failures[key]}; `plsc data check` lists them all"
                )

    def _check_readable(self, batch: "ImageBatch", size: int) -> None:
        """Raise :class:`DataError` if a batch of ``size`` misses images because no image of a part is readable.

        If there may be some beyond ``max_bad_records`` unreadable ones, that is left to :meth:`_report`.
        """
        self._has_read = self._has_read or len(batch.indices) > 0
        if len(batch.indices) == size or (self._has_read and len(batch.failures) > self.max_bad_records):
            return
        first = next(iter(batch.failures.values()))
        raise DataError(
            f"no image of {self.dataset.source} can be read: {counted(len(batch.failures), 'image')} tried, "
            f"the first: {first}; `plsc data check` lists them all"
        )


def _check(dataset: ImageDataset, batch_size: int, rank: int, world_size: int, seed: int, workers: int) -> None:
    if dataset.image_size is None:
        raise UsageError("training needs images of one size: open the data set with an image_size")
    for name, value, minimum in (("batch_size", batch_size, 1), ("workers", workers, 0), ("seed", seed, 0)):
        if value < minimum:
            raise UsageError(f"{name} is {value}; it must be at least {minimum}")
    if not 0 <= rank < world_size:
        raise UsageError(f"rank {rank} is not one of {world_size} ranks")
    needed = min(2, batch_size) * world_size
    if len(dataset) < needed:
        raise UsageError(
            f"{dataset.source} has {len(dataset)} images, too few for {world_size} ranks; use at most "
            f"{len(dataset) // min(2, batch_size)} ranks, or more images"
        )


class PartOfBatch(NamedTuple):
    """What one part of a data set has in a global batch: ``rows`` (n,) of this rank's, ``sizes`` of every rank's."""

    rows: NDArray[np.int64]
    sizes: list[int]


class StepRange(NamedTuple):
    """Samples of one step over all ranks: positions [start, stop) of the epoch's order."""

    start: int
    stop: int

    def part(self, rank: int, world_size: int) -> slice:
        """Return the positions of ``rank``: contiguous, and shares differ by one sample at most."""
        count, first = self.stop - self.start, self.start
        share, longer = divmod(count, world_size)
        begin = first + rank * share + min(rank, longer)
        return slice(begin, begin + share + (rank < longer))

    def sizes(self, world_size: int) -> list[int]:
        """Return every rank's number of samples."""
        share, longer = divmod(self.stop - self.start, world_size)
        return [share + (rank < longer) for rank in range(world_size)]


class GlobalBatches:
    """The steps of an epoch, each computed by its number: positions from one of ``starts`` to the next or ``end``."""

    def __init__(self, starts: range, end: int) -> None:
        self._starts, self._end = starts, end

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, number: int) -> StepRange:
        start = self._starts[number]
        return StepRange(start, self._end if start == self._starts[-1] else start + self._starts.step)

    def __iter__(self) -> Iterator[StepRange]:
        return map(self.__getitem__, range(len(self)))


def global_batches(size: int, *, consumed: int, batch_size: int, world_size: int) -> GlobalBatches:
    """Split positions [consumed, size) into global batches of ``batch_size`` samples per rank.

    Every rank gets at least two samples (or ``batch_size``, if that is one), because batch normalisation fails on one:
    a last batch too small for that joins the one before it. If it is the only one, after a resumption on more ranks, it
    is filled up with samples from just before ``consumed``.
    """
    minimum = min(2, batch_size) * world_size
    starts = range(consumed, size, batch_size * world_size)
    if len(starts) > 1 and size - starts[-1] < minimum:
        starts = starts[:-1]
    if len(starts) == 1:
        first = max(0, min(consumed, size - minimum))
        starts = range(first, first + 1)
    return GlobalBatches(starts, size)


class BatchRequest(NamedTuple):
    """Samples to read, by their indices (b,) in the data set; the epoch keys their augmentation ``augment``."""

    epoch: int
    indices: NDArray[np.int64]
    augment: str


class EpochRequests:
    """What ``rank`` of ``world_size`` has read in a loop over an epoch, each request made when it is asked for.

    Attributes:
        plan: the steps of the loop.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self.plan = GlobalBatches(range(0), 0)

    def begin(self, order: EpochOrder, plan: GlobalBatches, augment: str) -> None:
        """Be those of another loop."""
        self._order, self.plan, self._augment = order, plan, augment

    def __getitem__(self, number: int) -> BatchRequest:
        indices = self._order[self.plan[number].part(self._rank, self._world_size)]
        return BatchRequest(self._order.epoch, indices, self._augment)

    def __iter__(self) -> Iterator[BatchRequest]:
        return map(self.__getitem__, range(len(self.plan)))


@dataclass(frozen=True)
class ImageBatch:
    """Images uint8 (n, 3, H, W) of the readable ``indices`` (n,), and the errors of the others by key."""

    images: torch.Tensor
    indices: NDArray[np.int64]
    failures: dict[str, str]

    def pin_memory(self) -> "ImageBatch":
        """Copy the images into pinned memory; torch's DataLoader calls it."""
        return replace(self, images=self.images.pin_memory())


class BatchReader(Dataset[ImageBatch]):
    """Reads, caches and augments one rank's part of a batch: a map from request to batch, for torch's DataLoader.

    The next readable images of the data set take the places of unreadable ones, but where more than
    ``max_bad_records`` were tried in vain for one batch.
    """

    def __init__(self, dataset: ImageDataset, seed: int, cache: ImageCache | None, max_bad_records: int) -> None:
        self.dataset, self.seed, self.cache, self.max_bad_records = dataset, seed, cache, max_bad_records

    def __getitem__(self, request: BatchRequest) -> ImageBatch:
        batch = self._read(request.indices)
        if batch.failures:
            batch = self._with_neighbours(batch, request.indices)
        augment = partial(augment_batch, seed=self.seed, epoch=request.epoch, interpolation=self.dataset.interpolation)
        return replace(batch, images=augment(batch.images, batch.indices, request.augment))

    def _read(self, indices: NDArray[np.int64]) -> ImageBatch:
        images = torch.empty((len(indices), *image_shape(self.dataset)), dtype=torch.uint8)
        good, failures = self._fill(images, indices)
        return ImageBatch(images[torch.from_numpy(good)] if failures else images, indices[good], failures)

    def _with_neighbours(self, batch: ImageBatch, requested: NDArray[np.int64]) -> ImageBatch:
        """Add for each part of the data set as many readable images as it misses, of those behind its first bad one."""
        mixture, missing = self.dataset.mixture, requested[~np.isin(requested, batch.indices)]
        parts = mixture.parts_of(missing)
        for part in np.unique(parts):
            bad = missing[parts == part]
            wanted, had = len(batch.indices) + len(bad), len(batch.indices)
            for distance in itertools.count(1):
                is_hopeless = distance > mixture.sizes[part] and len(batch.indices) == had
                if len(batch.indices) == wanted or len(batch.failures) > self.max_bad_records or is_hopeless:
                    break
                extra = self._read(np.array([mixture.neighbour(int(bad[0]), distance)]))
                images = torch.cat([batch.images, extra.images])
                indices = np.concatenate([batch.indices, extra.indices])
                batch = ImageBatch(images, indices, batch.failures | extra.failures)
        return batch

    def _fill(self, images: torch.Tensor, indices: NDArray[np.int64]) -> tuple[NDArray[np.bool_], dict[str, str]]:
        """Read into the rows of ``images``; return the mask of readable rows and the errors of the others by key."""
        good = np.zeros(len(indices), dtype=np.bool_)
        failures: dict[str, str] = {}
        pixels = images.numpy()  # numpy copies what decoders give, (H, W, 3) in memory, in half of torch's time
        if self.cache is not None:
            good = self.cache.take(indices, images)
        for row in np.flatnonzero(~good):
            index = int(indices[row])
            try:
                image = self.dataset.image(index)
            except DataError as error:
                failures[self.dataset.key(index)] = str(error)
                continue
            pixels[row] = image.numpy()
            good[row] = True
            if self.cache is not None:
                self.cache.put(index, images[row])
        return good, failures


def auto_workers() -> int:
    """Loader processes of a rank that leave each of torchrun's ranks on this machine a core: 1 to 8."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return min(max(len(os.sched_getaffinity(0)) // ranks - 1, 1), 8)


def map_in_workers(
    reader: Dataset[T], requests: Iterable[Any], workers: int, *, persistent: bool = False, pin_memory: bool = False
) -> DataLoader[T]:
    """Iterate ``reader[request]`` over ``requests`` in order, read ahead by loader processes.

    Training, conversion and inspection read images through it. An exception in ``reader`` ends its process, so readers
    return errors of single images as values.

    Args:
        reader: maps a request to a result; it is sent to the processes, so it must pickle.
        requests: iterated anew for each pass.
        workers: number of processes; 0 reads in this one.
        persistent: keep the processes from one pass to the next.
        pin_memory: call the results' ``pin_memory()``.
    """
    return DataLoader(
        reader,
        batch_size=None,
        sampler=requests,
        num_workers=workers,
        collate_fn=_identity_collate,
        worker_init_fn=begin_worker,
        persistent_workers=persistent and workers > 0,
        pin_memory=pin_memory,
        generator=torch.Generator(),  # its own: torch's global one would advance by a base seed in each pass
    )


def begin_worker(worker: int) -> None:
    """What a loader process begins with: it leaves signals to the process that reads from it, and ends with that.

    A terminal and Slurm send signals to all processes of a run. SIGTERM stays as it is, for DataLoader ends its
    processes by it. Of its reader's end DataLoader asks between images alone; a read may take for ever.
    """
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="plsc-parent", daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    while parent is not None and os.getppid() == parent.pid:
        time.sleep(_PARENT_SECONDS)
    os._exit(1)


@contextmanager
def report_killed_workers() -> Iterator[None]:
    """Turn torch's RuntimeError for a loader process that was killed into a :class:`DataError`.

    It surrounds the whole loop over a loader, the loop's body included: torch raises from its SIGCHLD handler, so in
    whatever the main thread does when the process dies, and from next() otherwise.
    """
    try:
        yield
    except RuntimeError as error:  # torch has no class of its own for it
        if not str(error).startswith("DataLoader worker (pid"):
            raise
        raise _killed_worker() from None
    except (ConnectionError, EOFError) as error:
        # A loader loses its connection to a process that ends before the system tells of the process's end.
        if all(frame.f_code.co_name != "_try_get_data" for frame, _ in traceback.walk_tb(error.__traceback__)):
            raise
        with suppress(RuntimeError):
            time.sleep(_END_TOLD_SECONDS)  # torch's handler raises here, and not in what comes next
        raise _killed_worker() from None


def _killed_worker() -> DataError:
    return DataError("a decoding process was killed, perhaps for want of memory: use fewer (--workers, data.workers)")


def _identity_collate(result: Any) -> Any:
    return result
