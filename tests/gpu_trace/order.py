"""The order of collectives: ranks that meet in some must issue them alike, and in one order over all their groups."""

from collections.abc import Mapping, Sequence
from itertools import combinations, zip_longest

from gpu_trace.tracer import Collective


def differences(by_rank: Mapping[int, Sequence[Collective]]) -> list[str]:
    """A line for each pair of ranks whose sequences part, at the first collective where they do.

    Compared are the collectives that both ranks are members of, over whatever group: NCCL hangs as well where two
    ranks take two groups in opposite orders.
    """
    lines = []
    for (rank, mine), (other, theirs) in combinations(by_rank.items(), 2):
        pairs = zip_longest(_shared(mine, other), _shared(theirs, rank))
        for number, (here, there) in enumerate(pairs):
            if here is None or there is None or here[:-1] != there[:-1]:
                lines.append(f"collective {number}: rank {rank} issues {_text(here)}, rank {other} {_text(there)}")
                break
    return lines


def _shared(collectives: Sequence[Collective], rank: int) -> list[Collective]:
    return [collective for collective in collectives if rank in collective.ranks]


def _text(collective: Collective | None) -> str:
    return "none" if collective is None else f"{collective} ({collective.size:,} bytes, {collective.place})"
