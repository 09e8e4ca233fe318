"""Meeting in the store of torchrun's agent, which outlives the ranks: across restarts, and without their leftovers.

The agent starts all ranks anew when one fails, and its store still holds every key of the ranks that ended. A process
group that is made in it as it is reads addresses of processes that are gone: gloo fails or hangs in connectFullMesh,
NCCL takes the former attempt's unique id. TORCHELASTIC_RESTART_COUNT does not tell attempts apart, because each
machine's agent counts its own failures. So the ranks agree on a name for their attempt first.
"""

import os
import time
import uuid
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from plsc.errors import PlscError

TIMEOUT = timedelta(minutes=30)  # as torch waits by default until all ranks have come
_POLL_SECONDS = 0.01


def agent_keeps_store() -> bool:
    """Return True if the launcher's own process keeps the store at MASTER_ADDR:MASTER_PORT, and not rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def connect() -> TCPStore:
    """Connect to the launcher's store."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=TIMEOUT)


def store_of_attempt(store: Store, rank: int, world_size: int, timeout: timedelta = TIMEOUT) -> Store:
    """Return the part of ``store`` that only the ranks of this attempt use. Every rank calls.

    Each rank announces itself under a new name. Rank 0 names the attempt and answers every announcement until it is
    acknowledged: what it read first may be that of a process that has ended.

    Raises:
        PlscError: some rank did not come within ``timeout``.
    """
    name = uuid.uuid4().hex
    deadline = time.monotonic() + timeout.total_seconds()
    if rank == 0:
        attempt = name
        _gather(store, attempt, set(range(1, world_size)), deadline)
    else:
        store.set(f"plsc/rank/{rank}", name)
        attempt = _wait_for_answer(store, rank, name, deadline)
        store.set(f"plsc/{attempt}/joined/{rank}", "")
    return PrefixStore(f"plsc/{attempt}", store)


def _gather(store: Store, attempt: str, missing: set[int], deadline: float) -> None:
    answered: dict[int, bytes] = {}
    while missing:
        for rank in sorted(missing):
            if store.check([f"plsc/rank/{rank}"]) and (name := store.get(f"plsc/rank/{rank}")) != answered.get(rank):
                store.set(f"plsc/answer/{rank}", f"{name.decode()} {attempt}")
                answered[rank] = name
            if store.check([f"plsc/{attempt}/joined/{rank}"]):
                missing.discard(rank)
        _pause(deadline, f"rank {min(missing, default=0)} did not")


def _wait_for_answer(store: Store, rank: int, name: str, deadline: float) -> str:
    key = f"plsc/answer/{rank}"
    while True:
        if store.check([key]):
            addressee, attempt = store.get(key).decode().split()
            if addressee == name:
                return attempt
        _pause(deadline, "rank 0 did not")


def _pause(deadline: float, who: str) -> None:
    if time.monotonic() > deadline:
        raise PlscError(f"{who} come to the rendezvous: look at its machine, and whether the address can be reached")
    time.sleep(_POLL_SECONDS)
