"""One line for a failure of many ranks: the first to fail tells, the others end quietly with the same code."""

import time

import torch
import torch.distributed as dist

from plsc.errors import PlscError
from plsc.parallel import Mesh

_PATIENCE_SECONDS = 2.0  # in which the rank that failed first reports, or whoever started us notices its end


class LostRankError(PlscError):
    """Another rank of the run has ended."""


def tells(mesh: Mesh) -> bool:
    """Whether this rank is the one to report the failure; asks the store that the ranks met through."""
    if mesh.world_size == 1:
        return True
    try:
        store = dist.distributed_c10d._get_default_store()
        return bool(store.add("plsc/failures", 1) == 1)
    except (RuntimeError, ValueError):  # its keeper has ended, and so has spoken already
        return False


def wait_for_the_teller() -> None:
    """Stay a moment: the end of one rank makes whoever started them end the others, the teller too."""
    time.sleep(_PATIENCE_SECONDS)


def as_lost_rank(error: RuntimeError, mesh: Mesh) -> LostRankError | None:
    """What an error of a collective means; None for errors that are not of that kind.

    gloo and NCCL raise RuntimeErrors when a peer is gone. Waits a moment: the rank that failed should tell why.
    """
    text = str(error)
    signs = ("Connection closed by peer", "Connection reset", "Broken pipe", "Timed out", "gloo", "NCCL")
    is_of_network = isinstance(error, dist.DistError) or any(sign in text for sign in signs)
    if mesh.world_size == 1 or not is_of_network or isinstance(error, torch.cuda.OutOfMemoryError):
        return None
    wait_for_the_teller()
    return LostRankError(
        f"rank {mesh.rank} lost touch with another rank; --resume auto goes on from the last checkpoint"
    )
