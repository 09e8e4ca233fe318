"""A verification set drawn from labelled images: half the pairs show the same identity, half do not."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plsc.data.dataset import ImageDataset
from plsc.data.decode import decode_image
from plsc.data.encode import Encoding, encoded_image
from plsc.data.pairs import write_pairs
from plsc.errors import UsageError


def make_pairs(
    dataset: ImageDataset, out: Path, *, pairs: int, seed: int = 0, encoding: Encoding = "jpeg"
) -> dict[str, Any]:
    """Write a ``.bin`` of ``pairs`` pairs, no two alike, the same for the same seed.

    Same and different pairs alternate, so that each of the protocol's ten unshuffled folds has as many of both.
    Images are copied as stored if ``dataset.image_size`` is ``None``, otherwise resized and encoded anew.
    Raises UsageError if the data set does not have that many pairs, and DataError for an image that does not
    decode. Returns ``{"out", "pairs", "same", "images", "identities"}``.
    """
    if pairs < 2:
        raise UsageError(f"{pairs} pairs are too few; ask for at least 2")
    draw = _Draw(dataset.labels, np.random.default_rng(seed), dataset.source)
    same = draw.same((pairs + 1) // 2)
    different = draw.different(pairs // 2)
    drawn = np.empty((pairs, 2), dtype=np.int64)
    drawn[0::2], drawn[1::2] = same, different
    used = np.unique(drawn)
    images = {int(index): _checked(dataset, int(index), encoding) for index in used}
    write_pairs(out, [images[int(index)] for index in drawn.reshape(-1)], np.arange(pairs) % 2 == 0)
    return {
        "out": str(out),
        "pairs": pairs,
        "same": len(same),
        "images": len(used),
        "identities": len(np.unique(dataset.labels[used])),
    }


def _checked(dataset: ImageDataset, index: int, encoding: Encoding) -> bytes:
    data = encoded_image(dataset, index, encoding)
    decode_image(data, f"image {dataset.key(index)} of {dataset.source}")
    return data


class _Draw:
    """Draws pairs of images, identities evenly: one with a thousand images is not drawn oftener than others."""

    def __init__(self, labels: NDArray[np.int64], rng: np.random.Generator, source: str) -> None:
        self._rng, self._source = rng, source
        self._order = np.argsort(labels, kind="stable")
        counts = np.bincount(labels)
        self._identities = np.flatnonzero(counts)
        self._counts = counts[self._identities]
        self._starts = (np.cumsum(counts) - counts)[self._identities]

    def same(self, wanted: int) -> NDArray[np.int64]:
        """``wanted`` distinct pairs (n, 2) of images of one identity."""
        possible = int(np.sum(self._counts.astype(object) * (self._counts - 1) // 2))
        several = np.flatnonzero(self._counts > 1)
        if possible < wanted:
            self._refuse(possible, wanted, "the same identity")
        if possible < 4 * wanted:
            return self._of_all_same(several, wanted)
        return self._distinct(wanted, lambda n: self._some_same(several, n))

    def different(self, wanted: int) -> NDArray[np.int64]:
        """``wanted`` distinct pairs (n, 2) of images of two identities."""
        images = len(self._order)
        possible = (images**2 - int(np.sum(self._counts.astype(object) ** 2))) // 2
        if possible < wanted:
            self._refuse(possible, wanted, "different identities")
        if possible < 4 * wanted:
            return self._of_all_different(wanted)
        return self._distinct(wanted, self._some_different)

    def _refuse(self, possible: int, wanted: int, what: str) -> None:
        raise UsageError(
            f"{self._source} has {possible:,} pairs of {what}, but {wanted:,} are asked for; ask for fewer pairs"
        )

    def _distinct(self, wanted: int, some: Any) -> NDArray[np.int64]:
        """Draw until ``wanted`` pairs differ, keeping the order in which they first came."""
        found = np.empty((0, 2), dtype=np.int64)
        while len(found) < wanted:
            found = np.concatenate([found, np.sort(some(wanted), axis=1)])
            found = found[np.sort(np.unique(found, axis=0, return_index=True)[1])]
        return found[:wanted]

    def _some_same(self, several: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        identity = self._rng.choice(several, count)
        first = self._rng.integers(self._counts[identity])
        other = self._rng.integers(self._counts[identity] - 1)
        places = self._starts[identity][:, None] + np.stack([first, other + (other >= first)], axis=1)
        pairs: NDArray[np.int64] = self._order[places]
        return pairs

    def _some_different(self, count: int) -> NDArray[np.int64]:
        first = self._rng.integers(len(self._counts), size=count)
        other = self._rng.integers(len(self._counts) - 1, size=count)
        identity = np.stack([first, other + (other >= first)], axis=1)
        places = self._starts[identity] + self._rng.integers(self._counts[identity])
        pairs: NDArray[np.int64] = self._order[places]
        return pairs

    def _of_all_same(self, several: NDArray[np.int64], wanted: int) -> NDArray[np.int64]:
        """Where nearly all there are is wanted: list them all, and choose."""
        lists = []
        for identity in several:
            images = self._order[self._starts[identity] : self._starts[identity] + self._counts[identity]]
            lists.append(images[np.stack(np.triu_indices(len(images), 1), axis=1)])
        return self._rng.permutation(np.concatenate(lists))[:wanted]

    def _of_all_different(self, wanted: int) -> NDArray[np.int64]:
        images = len(self._order)
        others_from = np.repeat(self._starts + self._counts, self._counts)  # images lie grouped by identity
        others = images - others_from
        rows = np.repeat(np.arange(images), others)
        columns = others_from[rows] + np.arange(len(rows)) - np.repeat(np.cumsum(others) - others, others)
        chosen = self._rng.permutation(len(rows))[:wanted]
        pairs: NDArray[np.int64] = self._order[np.stack([rows[chosen], columns[chosen]], axis=1)]
        return pairs
