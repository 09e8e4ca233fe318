"""Which samples each rank gets at each step, as a pure function of (seed, epoch, position)."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class GlobalBatch:
    """The samples of one step over all ranks: positions [start, stop) of the epoch's order."""

    start: int
    stop: int

    def part(self, rank: int, world_size: int) -> slice:
        """The positions of ``rank``: contiguous, and no rank gets two more than another."""
        count, first = self.stop - self.start, self.start
        share, longer = divmod(count, world_size)
        begin = first + rank * share + min(rank, longer)
        return slice(begin, begin + share + (rank < longer))


def epoch_order(size: int, *, seed: int, epoch: int, shuffle: bool) -> NDArray[np.unsignedinteger]:
    """The order of an epoch, a permutation of 0 … size-1, the same on every rank; 4 bytes a sample."""
    order: NDArray[np.unsignedinteger] = np.arange(size, dtype=np.uint32 if size <= 2**32 else np.uint64)
    if shuffle:
        np.random.default_rng([seed, epoch]).shuffle(order)
    return order


def global_batches(size: int, *, consumed: int, batch_size: int, world_size: int) -> list[GlobalBatch]:
    """Split positions [consumed, size) into global batches of ``batch_size`` samples per rank.

    A last batch that would leave a rank with fewer than two samples (or than ``batch_size``, if that is one)
    is folded onto the one before it; batch normalisation fails on one sample. Only where fewer samples than
    that remain in all does a rank get fewer, or none.
    """
    step = batch_size * world_size
    starts = list(range(consumed, size, step))
    if len(starts) > 1 and size - starts[-1] < min(2, batch_size) * world_size:
        del starts[-1]
    return [GlobalBatch(start, stop) for start, stop in pairwise([*starts, size])]
