"""Names of the ranks that the others wait for in every step, by what they take beside communication."""

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median_low

SLOW = 1.3  # times the median of all ranks, from which a rank is reported
PERIOD_SECONDS = 20.0  # over which ranks are compared: one slow batch is no slow rank
REPEAT_SECONDS = 600.0  # between two lines about the same rank


class SlowRanks:
    """Compares what ranks take for their own part of a step, and reports those that are slow.

    A rank that is done waits in the next exchange of gradients or embeddings, and so for the slowest. What it takes
    without the time in exchanges is its own.

    Args:
        report: takes a line.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._since = time.monotonic()
        self._seconds: list[dict[str, float]] = []
        self._reported: dict[int, float] = {}

    def add(self, ranks: Sequence[Mapping[str, float]]) -> None:
        """Take in the seconds that each rank has spent since the last call, by the part of the step."""
        if not self._seconds:
            self._seconds = [dict(parts) for parts in ranks]
        else:
            for total, parts in zip(self._seconds, ranks, strict=True):
                for name, seconds in parts.items():
                    total[name] += seconds
        now = time.monotonic()
        if now - self._since >= PERIOD_SECONDS:
            for rank, line in slow_ranks(self._seconds).items():
                if now - self._reported.get(rank, -REPEAT_SECONDS) >= REPEAT_SECONDS:
                    self._reported[rank] = now
                    self._report(line)
            self._seconds, self._since = [], now


def slow_ranks(ranks: Sequence[Mapping[str, float]]) -> dict[int, str]:
    """Find the ranks that take much longer than the median, and say by how much and in which part.

    Args:
        ranks: seconds by part of each, exchanges left out.

    Returns:
        ``{3: "rank 3 takes 1.8 times the median of all ranks, mostly in data (11.2 s compared with 1.0 s)"}``. The
        median of an even number is the lower of the two in the middle: of two ranks, the faster one.
    """
    totals = [sum(parts.values()) for parts in ranks]
    middle = median_low(totals)
    found = {}
    for rank, total in enumerate(totals):
        if middle <= 0 or total < SLOW * middle:
            continue
        usual = {name: median_low([parts[name] for parts in ranks]) for name in ranks[rank]}
        worst = max(usual, key=lambda name: ranks[rank][name] - usual[name])
        found[rank] = (
            f"rank {rank} takes {total / middle:.1f} times the median of all ranks, mostly in {worst} "
            f"({ranks[rank][worst]:.1f} s compared with {usual[worst]:.1f} s)"
        )
    return found
