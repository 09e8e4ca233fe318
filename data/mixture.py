"""The order of an epoch's samples: a permutation of the data set, or of its parts, mixed by their shares."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Mixture:
    """The parts of a data set, one after another in it, and their shares of every batch.

    An epoch is one pass over the first part. The other parts go on from epoch to epoch, through permutations of their
    own, as fast as their shares say. Any run of n consecutive samples has n times its share of each part, rounded up
    or down, so that batches do, whatever the number of ranks.

    Args:
        sizes: images of each part.
        shares: of the parts in a batch, positive; their sum is not looked at.
    """

    sizes: tuple[int, ...]
    shares: tuple[float, ...] = (1.0,)

    @property
    def counts(self) -> tuple[int, ...]:
        """Samples of each part in an epoch."""
        first = self.sizes[0]
        return tuple(max(round(first * share / self.shares[0]), 1) for share in self.shares)

    @property
    def epoch_length(self) -> int:
        """Samples of an epoch."""
        return sum(self.counts)

    def order(self, *, seed: int, epoch: int, shuffle: bool) -> NDArray[np.unsignedinteger]:
        """The indices (epoch_length,) of an epoch's samples, the same on every rank; 4 bytes each up to 2³² images."""
        total = sum(self.sizes)
        order: NDArray[np.unsignedinteger] = np.empty(self.epoch_length, np.uint32 if total <= 2**32 else np.uint64)
        first = 0
        for part, size in enumerate(self.sizes):
            indices = self._part_order(part, seed, epoch, shuffle)
            order[self._places(part)] = first + indices.astype(order.dtype, copy=False)
            first += size
        return order

    def parts_of(self, indices: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        """The number of the part that each image (n,) is of."""
        return np.searchsorted(np.cumsum(self.sizes), indices, side="right")

    def neighbour(self, index: int, distance: int) -> int:
        """The index so many images behind ``index``, around its part if need be."""
        part = int(self.parts_of(np.array([index]))[0])
        first = sum(self.sizes[:part])
        return first + (index - first + distance) % self.sizes[part]

    def _part_order(self, part: int, seed: int, epoch: int, shuffle: bool) -> NDArray[np.unsignedinteger]:
        """Which of its images a part gives in an epoch: the next ones of its permutations."""
        size, count = self.sizes[part], self.counts[part]
        start, stop = epoch * count, (epoch + 1) * count
        pieces = []
        for number in range(start // size, -(-stop // size)):
            key = [seed, number] if part == 0 else [seed, number, part]
            permutation = permuted(size, key) if shuffle else np.arange(size, dtype=np.uint32)
            pieces.append(permutation[max(start - number * size, 0) : stop - number * size])
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _places(self, part: int) -> NDArray[np.int64] | slice:
        """Where a part's samples stand in an epoch: sample k of c as if at the time (k + ½)/c, ties in parts' order."""
        counts = self.counts
        if len(counts) == 1:
            return slice(None)
        own = np.arange(counts[part], dtype=np.int64)
        places = own.copy()
        for other, count in enumerate(counts):
            if other != part:  # how many of its samples stand before: in whole numbers, as divisions would round
                ahead = (2 * own + 1) * count - counts[part]
                places += ahead // (2 * counts[part]) + 1 if other < part else -(-ahead // (2 * counts[part]))
        return places


def permuted(size: int, key: Sequence[int]) -> NDArray[np.unsignedinteger]:
    """A permutation of 0 … size-1 by ``key``."""
    order: NDArray[np.unsignedinteger] = np.arange(size, dtype=np.uint32 if size <= 2**32 else np.uint64)
    np.random.default_rng(key).shuffle(order)
    return order
