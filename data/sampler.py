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

    No rank gets fewer than two samples (or than ``batch_size``, if that is one), for batch normalisation fails
    on one: a last batch too small for that is folded onto the one before it. Where it is the only one, after
    a resumption on more ranks, it is filled up with samples from just before ``consumed``.
    """
    least = min(2, batch_size) * world_size
    starts = list(range(consumed, size, batch_size * world_size))
    if len(starts) > 1 and size - starts[-1] < least:
        del starts[-1]
    if len(starts) == 1:
        starts[0] = max(0, min(consumed, size - least))
    return [GlobalBatch(start, stop) for start, stop in pairwise([*starts, size])]
