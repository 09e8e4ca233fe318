"""The order of an epoch's samples: a permutation of the data set, or of its parts, mixed by their shares."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plsc.data.permutation import permuted, round_keys

NEWEST_ORDER = 2


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

    def order(self, *, seed: int, epoch: int, shuffle: bool, kind: int = NEWEST_ORDER) -> "EpochOrder":
        """The order of an epoch's samples, the same on every rank; ``kind`` is one of :data:`ORDERS`."""
        return ORDERS[kind](self, seed, epoch, shuffle)

    def parts_of(self, indices: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        """The number of the part that each image (n,) is of."""
        return np.searchsorted(np.cumsum(self.sizes), indices, side="right")

    def neighbour(self, index: int, distance: int) -> int:
        """The index so many images behind ``index``, around its part if need be."""
        part = int(self.parts_of(np.array([index]))[0])
        first = sum(self.sizes[:part])
        return first + (index - first + distance) % self.sizes[part]

    def samples_at(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Which part has the sample at each position (n,) of an epoch, and which of its samples there that is, from 0.

        Sample k of c stands as if at the time (k + ½)/c, ties in the order of the parts. It is exact as long as twice
        an epoch's length times a part's samples in it is below 2⁶³.
        """
        counts, total = self.counts, self.epoch_length
        parts, samples = np.zeros_like(positions), positions.copy()
        for part, count in enumerate(counts if len(counts) > 1 else ()):
            # The time of a position is known up to a half sample of each other part, which gives the least sample.
            sample = np.maximum(-((total - (2 * positions + 2 - len(counts)) * count) // (2 * total)), 0)
            for _ in counts[2:]:
                sample += self._places(part, sample) < positions
            is_own = self._places(part, sample) == positions
            parts[is_own], samples[is_own] = part, sample[is_own]
        return parts, samples

    def _places(self, part: int, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where a part's ``samples`` (n,) stand in an epoch."""
        counts, places = self.counts, samples.copy()
        for other, count in enumerate(counts):
            if other != part:  # how many of its samples stand before: in whole numbers, as divisions would round
                ahead = (2 * samples + 1) * count - counts[part]
                places += ahead // (2 * counts[part]) + 1 if other < part else -(-ahead // (2 * counts[part]))
        return places


@dataclass(frozen=True)
class EpochOrder:
    """The indices in the data set of an epoch's samples, of which those that are asked for are computed.

    Args:
        mixture: of the data set's parts.
        seed: keys the permutations.
        epoch: from 0.
        shuffle: permute the parts; else each is passed through as it is.
    """

    mixture: Mixture
    seed: int
    epoch: int
    shuffle: bool

    def __len__(self) -> int:
        return self.mixture.epoch_length

    def __getitem__(self, which: slice | NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        """The indices, int64 (n,), of the samples at positions ``which``; IndexError if an epoch has none there."""
        mixture = self.mixture
        positions = np.arange(*which.indices(len(self))) if isinstance(which, slice) else which.astype(np.int64)
        if len(positions) and not 0 <= positions.min() <= positions.max() < len(self):
            raise IndexError(f"an epoch has positions 0 to {len(self) - 1:,}")
        parts, samples = mixture.samples_at(positions)
        first = 0
        for part, (size, count) in enumerate(zip(mixture.sizes, mixture.counts, strict=True)):
            is_own = parts == part
            numbers, places = np.divmod(self.epoch * count + samples[is_own], size)
            positions[is_own] = first + (self._permuted(part, numbers, places) if self.shuffle else places)
            first += size
        return positions

    def _permuted(self, part: int, numbers: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.int64]:
        """What stands at ``places`` of a part's permutations, whose ``numbers`` count them from the run's start on."""
        own, which = np.unique(numbers, return_inverse=True)
        if not len(own):
            return places
        keys = np.stack([round_keys(_key(self.seed, number, part)) for number in own.tolist()], 1)
        return permuted(places, self.mixture.sizes[part], keys if len(own) == 1 else keys[:, which])


@dataclass(frozen=True)
class ListedOrder(EpochOrder):
    """The same by shuffled lists of whole parts, 4 bytes an index: runs that began with it go on with it."""

    _lists: dict[tuple[int, int], NDArray[np.uint32]] = field(default_factory=dict, repr=False, compare=False)

    def _permuted(self, part: int, numbers: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.int64]:
        found = np.empty_like(places)
        for number in np.unique(numbers).tolist():
            if (part, number) not in self._lists:
                order = np.arange(self.mixture.sizes[part], dtype=np.uint32)
                np.random.default_rng(_key(self.seed, number, part)).shuffle(order)
                self._lists[part, number] = order
            is_own = numbers == number
            found[is_own] = self._lists[part, number][places[is_own]]
        return found


def _key(seed: int, number: int, part: int) -> Sequence[int]:
    return [seed, number, part] if part else [seed, number]


ORDERS = {1: ListedOrder, NEWEST_ORDER: EpochOrder}  # by the number that a run's state has
