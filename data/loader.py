"""The loader that feeds training: its position is exact, and no sample depends on ranks or processes."""

import logging
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from plsc.data.batches import Batch, BatchReader, Request
from plsc.data.cache import ImageCache, cache_fits
from plsc.data.dataset import ImageDataset
from plsc.data.sampler import GlobalBatch, epoch_order, global_batches
from plsc.data.transforms import check_augmentation
from plsc.errors import DataError, UsageError

_log = logging.getLogger("plsc.data")


class TrainLoader:
    """Iterates one epoch of ``(images uint8 (b, 3, S, S), labels int64 (b,))`` from its position on.

    batch_size: samples per rank and step. Each step's global batch is split contiguously over the ranks.
    seed: keys the order, by (seed, epoch), and the augmentation, by (seed, epoch, sample index). At equal
        ``batch_size * world_size`` the global batches hold the same samples and pixels at any world size.
    augment: ``"none"``, ``"flip"`` or ``"standard"``.
    workers: loader processes of this rank; 0 loads in this one.
    cache_images: keep decoded images in memory over the epochs, shared by the loader processes;
        ``"auto"`` does where they take less than 1 GiB and an eighth of the free memory.
    max_bad_records: images that do not decode are reported by key, once, and left out of their batch (one that
        is left with fewer than two takes the next sound images in the data set); one more than this many of
        them raises a DataError.

    The last batches of an epoch may be unequal, see :func:`plsc.data.sampler.global_batches`.
    Raises UsageError for arguments out of range and for a data set too small for the ranks.
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
        cache_images: bool | Literal["auto"] = "auto",
        max_bad_records: int = 100,
    ) -> None:
        _check(dataset, batch_size, rank, world_size, seed, workers)
        check_augmentation(augment)
        self.dataset, self.batch_size, self.rank, self.world_size = dataset, batch_size, rank, world_size
        self.seed, self.shuffle, self.max_bad_records = seed, shuffle, max_bad_records
        self._epoch = self._consumed = self._given = 0
        self._bad_keys: set[str] = set()
        cached = cache_fits(dataset) if cache_images == "auto" else cache_images
        reader = BatchReader(dataset, augment, seed, ImageCache(dataset) if cached else None)
        self._requests = _Requests()
        self._batches = _open_batches(reader, self._requests, workers)

    @property
    def epoch(self) -> int:
        """The epoch under way, from 0; it advances when the loop over it ends."""
        return self._epoch

    @property
    def steps_per_epoch(self) -> int:
        """Steps of a whole epoch, the same on every rank."""
        return len(self._plan(consumed=0))

    @property
    def steps_left(self) -> int:
        """Steps from the position to the end of its epoch."""
        return len(self._plan(consumed=self._consumed))

    @property
    def next_labels(self) -> torch.Tensor | None:
        """The labels (b,) that this rank is given next, unless pictures turn out unreadable; None at an epoch's end.

        To know them ahead moves nothing: the position stays that of the batches given.
        """
        part = self._requests.part_at(self._given)
        return None if part is None else torch.from_numpy(self.dataset.labels[part.astype(np.int64)])

    def state_dict(self) -> dict[str, int]:
        """``{"epoch", "consumed"}``: samples of the epoch that all ranks together have been given."""
        return {"epoch": self._epoch, "consumed": self._consumed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state that any number of ranks saved; DataError if the data has no such place."""
        epoch, consumed = int(state["epoch"]), int(state["consumed"])
        if epoch < 0 or not 0 <= consumed <= len(self.dataset):
            raise DataError(
                f"there is no sample {consumed:,} of epoch {epoch} in {self.dataset.source} with its "
                f"{len(self.dataset):,} images; resume with the data that the run began with"
            )
        self._epoch, self._consumed = epoch, consumed

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        if self._consumed == len(self.dataset):  # the last loop was left, or saved, at its last batch
            self._epoch, self._consumed = self._epoch + 1, 0
        plan = self._plan(self._consumed)
        order = epoch_order(len(self.dataset), seed=self.seed, epoch=self._epoch, shuffle=self.shuffle)
        self._given = 0
        self._requests.epoch = self._epoch
        self._requests.parts = [order[batch.part(self.rank, self.world_size)] for batch in plan]
        for given, (batch, loaded) in enumerate(zip(plan, self._batches, strict=True), start=1):
            self._report(loaded.failures)
            self._consumed, self._given = batch.stop, given
            yield loaded.images, torch.from_numpy(self.dataset.labels[loaded.indices])
        self._epoch, self._consumed = self._epoch + 1, 0

    def _plan(self, consumed: int) -> list[GlobalBatch]:
        return global_batches(
            len(self.dataset), consumed=consumed, batch_size=self.batch_size, world_size=self.world_size
        )

    def _report(self, failures: dict[str, str]) -> None:
        """Tell of images that could not be read, each once, and stop where there are too many."""
        for key in failures.keys() - self._bad_keys:
            self._bad_keys.add(key)
            _log.warning("left out: %s", failures[key])
            if len(self._bad_keys) > self.max_bad_records:
                raise DataError(
                    f"more than {self.max_bad_records} images of {self.dataset.source} could not be read; "
                    f"the last: {failures[key]}; `plsc data check` lists them all"
                )


class _Requests:
    """What the DataLoader asks its processes for, in order; filled anew for every epoch or resumption."""

    def __init__(self) -> None:
        self.epoch = 0
        self.parts: list[NDArray[np.unsignedinteger]] = []

    def __iter__(self) -> Iterator[Request]:
        return (Request(self.epoch, part.astype(np.int64)) for part in self.parts)

    def __len__(self) -> int:
        return len(self.parts)

    def part_at(self, number: int) -> NDArray[np.unsignedinteger] | None:
        """The part of that number, if there is one."""
        return self.parts[number] if number < len(self.parts) else None


def _open_batches(reader: BatchReader, requests: _Requests, workers: int) -> DataLoader[Batch]:
    """The DataLoader; its processes live on between epochs, and it draws no number from torch's generator."""
    return DataLoader(
        reader,
        batch_size=None,
        sampler=requests,
        num_workers=workers,
        collate_fn=_as_it_is,
        persistent_workers=workers > 0,
        generator=torch.Generator(),
    )


def _as_it_is(batch: Any) -> Any:
    return batch


def _check(dataset: ImageDataset, batch_size: int, rank: int, world_size: int, seed: int, workers: int) -> None:
    if dataset.image_size is None:
        raise UsageError("training needs images of one size: open the data set with an image_size")
    for name, value, least in (("batch_size", batch_size, 1), ("workers", workers, 0), ("seed", seed, 0)):
        if value < least:
            raise UsageError(f"{name} is {value}; it must be at least {least}")
    if not 0 <= rank < world_size:
        raise UsageError(f"rank {rank} is not one of {world_size} ranks")
    needed = min(2, batch_size) * world_size
    if len(dataset) < needed:
        raise UsageError(
            f"{dataset.source} has {len(dataset)} images, too few for {world_size} ranks; use at most "
            f"{len(dataset) // min(2, batch_size)} ranks, or more images"
        )
