"""Looking over a whole data set: does every image decode, is any there twice, is any class empty."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from plsc.data.dataset import EncodedDataset, ImageDataset
from plsc.data.decode import decode_image
from plsc.errors import DataError
from plsc.progress import Progress

SHOWN = 100
_CHUNK = 64
_DIGEST_BYTES = 16


@dataclass(frozen=True)
class _Found:
    """Of some consecutive images: the digests of their content, (n, 2) uint64, and what is wrong, by index."""

    digests: NDArray[np.uint64]
    broken: dict[int, str]


def check(dataset: ImageDataset, *, workers: int = 0, quiet: bool = False) -> dict[str, Any]:
    """Decode every image of ``dataset`` and compare their contents.

    Returns ``images``, ``classes``, ``broken`` (a count, with the records that were left out on opening),
    ``broken_images`` (the first 100: ``{"key", "why"}``), ``duplicates`` (images whose bytes an earlier one
    has), ``duplicates_across_classes`` (those of them that another class has too), ``duplicate_images`` (the
    first 100: ``{"key", "same_as"}``), ``empty_classes``.
    """
    digests = np.zeros((len(dataset), 2), dtype=np.uint64)
    broken: dict[int, str] = {}
    start = 0
    progress = Progress("check", len(dataset), quiet=quiet)
    for found in _inspected(dataset, workers):
        stop = start + len(found.digests)
        digests[start:stop] = found.digests
        broken |= found.broken
        progress.advance(stop - start)
        start = stop
    progress.finish()
    reasons = dataset.skipped | {dataset.key(index): why for index, why in broken.items()}
    return {
        "source": dataset.source,
        "images": len(dataset) + len(dataset.skipped),
        "classes": dataset.num_classes,
        "broken": len(reasons),
        "broken_images": [{"key": key, "why": why} for key, why in list(reasons.items())[:SHOWN]],
        **_duplicates(dataset, digests, np.array(sorted(broken), dtype=np.int64)),
        "empty_classes": _empty_classes(dataset),
    }


class _Inspector(Dataset[_Found]):
    """Inspects the images of a range."""

    def __init__(self, dataset: ImageDataset) -> None:
        self.dataset = dataset

    def __getitem__(self, indices: range) -> _Found:
        digests = np.zeros((len(indices), 2), dtype=np.uint64)
        broken: dict[int, str] = {}
        for row, index in enumerate(indices):
            try:
                digests[row] = np.frombuffer(_digest(self.dataset, index), dtype=np.uint64)
            except DataError as error:
                broken[index] = str(error)
        return _Found(digests, broken)


def _digest(dataset: ImageDataset, index: int) -> bytes:
    """A digest of the stored bytes, or of the pixels where there are none; DataError if it does not decode."""
    if isinstance(dataset, EncodedDataset):
        content = dataset.encoded(index)
        decode_image(content, f"image {dataset.key(index)} of {dataset.source}")
    else:
        content = dataset.image(index).numpy().tobytes()
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()


def _inspected(dataset: ImageDataset, workers: int) -> Iterator[_Found]:
    chunks = [range(start, min(start + _CHUNK, len(dataset))) for start in range(0, len(dataset), _CHUNK)]
    yield from DataLoader(
        _Inspector(dataset), batch_size=None, sampler=chunks, num_workers=workers, collate_fn=_as_it_is
    )


def _as_it_is(found: Any) -> Any:
    return found


def _duplicates(dataset: ImageDataset, digests: NDArray[np.uint64], broken: NDArray[np.int64]) -> dict[str, Any]:
    """Images with the bytes of an earlier one; broken images do not count."""
    sound = np.delete(np.arange(len(digests)), broken)
    # A stable sort by content: equal contents stand side by side, the earliest image of each first.
    order = sound[np.lexsort((digests[sound, 1], digests[sound, 0]))]
    repeats = np.all(digests[order[1:]] == digests[order[:-1]], axis=1) if len(order) > 1 else np.zeros(0, bool)
    first = np.concatenate([np.ones(min(len(order), 1), dtype=bool), ~repeats])
    originals = order[np.maximum.accumulate(np.where(first, np.arange(len(order)), 0))]
    later, earlier = order[~first], originals[~first]
    listed = np.argsort(later)[:SHOWN]
    return {
        "duplicates": len(later),
        "duplicates_across_classes": int(np.sum(dataset.labels[later] != dataset.labels[earlier])),
        "duplicate_images": [
            {"key": dataset.key(int(later[row])), "same_as": dataset.key(int(earlier[row]))} for row in listed
        ],
    }


def _empty_classes(dataset: ImageDataset) -> list[str]:
    """Classes without an image: those left out on opening, and those that have a number all the same."""
    counts = np.bincount(dataset.labels, minlength=dataset.num_classes)
    return dataset.empty_classes + [dataset.class_names[int(label)] for label in np.flatnonzero(counts == 0)]
