"""The order of collectives: ranks that meet in some must issue them alike, and in one order over all their groups."""

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import combinations, zip_longest

from gpu_trace.tracer import Collective


def differences(by_rank: Mapping[int, Sequence[Collective]]) -> list[str]:
    """A line for each pair of ranks whose sequences part, at the first collective where they do.

    Compared are the collectives that both ranks are members of, over whatever group: NCCL hangs as well where two
    ranks take two groups in opposite orders. Sends and receives are left to :func:`stuck`.
    """
    lines = []
    for (rank, mine), (other, theirs) in combinations(by_rank.items(), 2):
        pairs = zip_longest(_shared(mine, other), _shared(theirs, rank))
        for number, (here, there) in enumerate(pairs):
            if here is None or there is None or here.kind != there.kind:
                lines.append(f"collective {number}: rank {rank} issues {_text(here)}, rank {other} {_text(there)}")
                break
    return lines


def _shared(collectives: Sequence[Collective], rank: int) -> list[Collective]:
    return [each for each in collectives if rank in each.ranks and not each.is_between_two]


def stuck(by_rank: Mapping[int, Sequence[Collective]]) -> list[str]:
    """A line for each rank that waits for ever: what for.

    Every rank takes its collectives one after another, and a send ends when it is received, as on one NCCL stream: a
    batch of sends and receives is taken together. Ranks that were not traced never keep others waiting.
    """
    queues = {rank: _batches(collectives) for rank, collectives in by_rank.items()}
    while any(_advance(rank, queues) for rank in queues):
        pass
    return [f"rank {rank} waits in {', '.join(map(_text, queue[0]))}" for rank, queue in queues.items() if queue]


_Queues = Mapping[int, deque[list[Collective]]]


def _batches(collectives: Sequence[Collective]) -> deque[list[Collective]]:
    batches: deque[list[Collective]] = deque()
    for collective in collectives:
        if batches and collective.batch and batches[-1][0].batch == collective.batch:
            batches[-1].append(collective)
        else:
            batches.append([collective])
    return batches


def _advance(rank: int, queues: _Queues) -> bool:
    """Take what ``rank`` waits in off the queues where all traced ranks have come to it; return whether any was."""
    if not queues[rank]:
        return False
    first = queues[rank][0][0]
    if first.is_between_two:
        return any(_exchange(rank, each, queues) for each in list(queues[rank][0]))
    members = [queues[member] for member in first.ranks if member in queues]
    if not all(queue and queue[0][0].kind == first.kind for queue in members):
        return False
    for queue in members:
        queue.popleft()
    return True


def _exchange(rank: int, collective: Collective, queues: _Queues) -> bool:
    """Take a send or recv of ``rank`` off the queues if its peer is at the other side of it, or was not traced."""
    peer = sum(collective.ranks) - rank
    if peer in queues:
        waiting = queues[peer][0] if queues[peer] else []
        matching = [each for each in waiting if each.is_between_two and _is_other_side(each, collective)]
        if not matching:
            return False
        _leave(queues[peer], matching[0])
    _leave(queues[rank], collective)
    return True


def _is_other_side(one: Collective, other: Collective) -> bool:
    return one.name != other.name and (one.ranks, one.dtypes, one.size) == (other.ranks, other.dtypes, other.size)


def _leave(queue: deque[list[Collective]], done: Collective) -> None:
    queue[0].remove(done)
    if not queue[0]:
        queue.popleft()


def _text(collective: Collective | None) -> str:
    return "none" if collective is None else f"{collective} ({collective.size:,} bytes, {collective.place})"
