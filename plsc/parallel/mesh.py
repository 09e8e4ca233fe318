"""Who this process is among its peers, and which device it owns."""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

from plsc.errors import UsageError


@dataclass(frozen=True)
class Mesh:
    """One rank's place: ``rank`` of ``world_size`` in ``group``, computing on ``device``.

    ``group`` is None where there is one rank only; no process group is needed then.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    group: dist.ProcessGroup | None = None

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that prints and writes the files that exist once."""
        return self.rank == 0


def init(device: str | torch.device | None = None) -> Mesh:
    """Join the run that torchrun's environment describes; without one, be a single process.

    Args:
        device: where this rank computes; by default its GPU (one per local rank), else the CPU.

    Returns:
        The mesh. The backend is NCCL on GPUs and gloo elsewhere; a process group that exists already is used.

    Raises:
        UsageError: torchrun's environment is incomplete or contradicts itself, or there are fewer GPUs than ranks.
    """
    rank, world_size, local_rank = (
        _integer(name, default) for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))
    )
    chosen = torch.device(device) if device is not None else _default_device(local_rank)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
        return Mesh(
            dist.get_rank(),
            dist.get_world_size(),
            local_rank,
            chosen,
            group if dist.get_world_size() > 1 else None,
        )
    if world_size == 1:
        return Mesh(0, 1, 0, chosen)
    if not 0 <= rank < world_size:
        raise UsageError(
            f"RANK={rank} is not below WORLD_SIZE={world_size}; start the ranks with torchrun or --nproc"
        )
    dist.init_process_group(
        "nccl" if chosen.type == "cuda" else "gloo", device_id=chosen if chosen.type == "cuda" else None
    )
    return Mesh(rank, world_size, local_rank, chosen, dist.group.WORLD)


def shutdown() -> None:
    """Leave the process group, if this process is in one."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _default_device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise UsageError(
            f"local rank {local_rank} has no GPU ({torch.cuda.device_count()} here); start fewer ranks, "
            "or hide the GPUs (CUDA_VISIBLE_DEVICES=) to compute on the CPU"
        )
    return torch.device("cuda", local_rank)


def _integer(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise UsageError(
            f"the environment's {name}={text!r} is not an integer; start the ranks with torchrun"
        ) from None
