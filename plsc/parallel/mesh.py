"""The mesh: this process's rank, its process groups, and its device.

Tensors travel between GPUs by NCCL. What one host tells the others (objects, barriers) travels by gloo, in groups
beside NCCL's: one rank may work alone for hours while the others wait in a broadcast, which NCCL would take for a
failure, and gloo notices at once when the process of a rank has ended.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from plsc.errors import UsageError
from plsc.parallel.rendezvous import agent_keeps_store, connect, store_of_attempt

if TYPE_CHECKING:  # it takes long to import
    from torch.distributed.device_mesh import DeviceMesh

DEVICE_SECONDS = 600.0  # in which all ranks come to a collective of GPUs, of which a step has several
_NCCL_SECONDS = 60.0  # more: NCCL ends the process where it gives up, and should not be the first to do so
HOST_TIMEOUT = timedelta(hours=24)  # of gloo's collectives: while the first rank evaluates alone, the others wait


@dataclass(frozen=True)
class Mesh:
    """One rank of a run: ``rank`` of ``world_size`` in ``group``, computing on ``device``.

    ``group`` is None where there is one rank only; no process group is needed then. ``head_group`` and
    ``replica_group`` are those of :func:`with_head_groups`, None where all ranks share one class table. ``host_group``
    are the same ranks in a group of gloo's, for what lies on hosts; None where ``group`` does that itself. ``timeout``
    are the seconds in which all ranks of a run on GPUs have to come to a step's end.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    group: dist.ProcessGroup | None = None
    head_group: "Mesh | None" = None
    replica_group: "Mesh | None" = None
    host_group: dist.ProcessGroup | None = None
    timeout: float = DEVICE_SECONDS

    @property
    def control(self) -> dist.ProcessGroup | None:
        """The process group for what lies on hosts: objects, numbers, barriers."""
        return self.group if self.host_group is None else self.host_group

    @property
    def is_main(self) -> bool:
        """True on the rank that prints, and writes the files that exist once."""
        return self.rank == 0

    @property
    def head(self) -> "Mesh":
        """Ranks over which one class table is sharded, this one among them: all, unless there are groups."""
        return self if self.head_group is None else self.head_group

    @property
    def replicas(self) -> "Mesh":
        """Ranks, one of each group, that hold the same shard of the table; this one alone without groups."""
        return Mesh(0, 1, self.local_rank, self.device) if self.replica_group is None else self.replica_group


def init(device: str | torch.device | None = None, head_ranks: int = 0, timeout: float | None = None) -> Mesh:
    """Join the run that torchrun's environment describes; without one, be a single process.

    Args:
        device: where this rank computes; by default its GPU (one per local rank), else the CPU.
        head_ranks: over how many ranks a class table is sharded; the other ranks hold replicas of it, as
            :func:`with_head_groups` says. 0: over all.
        timeout: seconds in which all ranks have to come to a collective, else it fails: on GPUs 600 by default,
            elsewhere 24 hours. Objects and barriers always have 24 hours; a rank that ends is noticed at once there.

    Returns:
        The mesh. The backend is NCCL on GPUs, with a gloo group beside it for what lies on hosts, and gloo elsewhere;
        a process group that exists already is used.

    Raises:
        UsageError: torchrun's environment is incomplete or contradicts itself, there is no such device, there are
            fewer GPUs than ranks, or ``head_ranks`` does not divide the number of ranks.
    """
    if timeout is not None and not timeout > 0:
        raise UsageError(f"timeout is a number of seconds above 0, not {timeout!r}")
    return with_head_groups(_joined(device, head_ranks, timeout), head_ranks)


def with_head_groups(mesh: Mesh, head_ranks: int) -> Mesh:
    """Return ``mesh`` with the class table sharded over ``head_ranks`` consecutive ranks and replicated over the rest.

    What the head gathers within a group then grows with the group and not with the world; in return the replicas
    sum the gradients of their rows in every step (:class:`plsc.ShardedHead` counts the bytes). Every rank of
    ``mesh`` calls; what other process groups a program has made does not matter.

    Args:
        mesh: all ranks.
        head_ranks: ranks in a group; 0, or as many as there are, leaves one group, as it is without this call.

    Raises:
        UsageError: ``head_ranks`` does not divide the number of ranks.
    """
    check_head_ranks(head_ranks, mesh.world_size)
    if head_ranks in (0, mesh.world_size):
        return replace(mesh, head_group=None, replica_group=None)
    agree_on_group_names(mesh)
    heads = [range(first, first + head_ranks) for first in range(0, mesh.world_size, head_ranks)]
    replicas = [range(first, mesh.world_size, head_ranks) for first in range(head_ranks)]
    return replace(mesh, head_group=submesh(mesh, heads), replica_group=submesh(mesh, replicas))


def device_mesh(mesh: Mesh, dims: Mapping[str, int]) -> "DeviceMesh":
    """Return the ranks of ``mesh`` as torch's DeviceMesh; every rank of the mesh calls.

    Args:
        mesh: its ranks; all of the world where there are several dimensions.
        dims: names and sizes of the dimensions, the one whose ranks lie next to each other last.
    """
    from torch.distributed.device_mesh import DeviceMesh

    if len(dims) == 1:
        group = _group_of_one(mesh) if mesh.group is None else mesh.group
        return DeviceMesh.from_group(group, mesh.device.type, mesh_dim_names=tuple(dims))
    agree_on_group_names(mesh)
    ranks = torch.tensor(dist.get_process_group_ranks(mesh.group)).view(*dims.values())
    return DeviceMesh(mesh.device.type, ranks, mesh_dim_names=tuple(dims))


def _group_of_one(mesh: Mesh) -> dist.ProcessGroup:
    """A process group of this rank alone, which torch's engines want where there is one rank too."""
    if dist.is_initialized():
        group: object = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    else:
        from torch._C._distributed_c10d import HashStore

        backend = "nccl" if mesh.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    return group


def subgroup(mesh: Mesh, ranks: int) -> Mesh:
    """Return this rank's part of ``mesh`` cut into ``ranks`` consecutive ranks, a divisor of all; every rank calls."""
    agree_on_group_names(mesh)
    return submesh(mesh, [range(first, first + ranks) for first in range(0, mesh.world_size, ranks)])


def agree_on_group_names(mesh: Mesh) -> None:
    """Let the ranks of ``mesh`` count the process groups made so far from one number on.

    torch names a group by that count, and its members wait for each other under that name. The counts part where
    some ranks made groups that the others took no part in: a program's own groups with ``use_local_synchronization``,
    or those of a mesh that is not the whole world. torch has no public way to name a group.
    """
    from plsc.parallel.collectives import all_gather_object  # here: it imports this module

    world = dist.distributed_c10d._world
    world.group_count = max(all_gather_object(world.group_count, mesh))


def submesh(mesh: Mesh, parts: list[range]) -> Mesh:
    """The part of ``mesh`` that holds this rank, with a process group of its own where it has several ranks.

    Every rank makes the groups of all parts, in one order, as :func:`torch.distributed.new_group` asks.
    """
    ranks = dist.get_process_group_ranks(mesh.group)
    own = mesh
    for members in parts:
        group = host_group = None
        if len(members) > 1:
            numbers = [ranks[member] for member in members]
            group = dist.new_group(numbers)
            host_group = _new_host_group(numbers) if mesh.host_group is not None else None
        if mesh.rank in members:
            assert group is None or isinstance(group, dist.ProcessGroup)  # this rank is a member
            place = members.index(mesh.rank), len(members), mesh.local_rank, mesh.device
            own = Mesh(*place, group, host_group=host_group, timeout=mesh.timeout)
    return own


def host_mesh(mesh: Mesh) -> Mesh:
    """Return the ranks of ``mesh`` on CPUs, in a group of gloo's of their own; every rank calls.

    For what a thread exchanges beside the collectives of the main thread, whose order would not be that of all ranks.
    """
    agree_on_group_names(mesh)
    group = _new_host_group(dist.get_process_group_ranks(mesh.group))
    return Mesh(mesh.rank, mesh.world_size, mesh.local_rank, torch.device("cpu"), group)


def _new_host_group(ranks: list[int] | None = None) -> dist.ProcessGroup | None:
    """A group of gloo's for these ranks of the world, or all; None on a rank that is no member. Every rank calls."""
    group = dist.new_group(ranks, timeout=HOST_TIMEOUT, backend="gloo")
    return group if isinstance(group, dist.ProcessGroup) else None


def require_mesh(mesh: object) -> Mesh:
    """``mesh``; UsageError unless it is a Mesh."""
    if not isinstance(mesh, Mesh):
        raise UsageError(f"mesh must be what plsc.init() returns, not {mesh!r}")
    return mesh


def check_head_ranks(head_ranks: int, world_size: int) -> None:
    """UsageError unless ``head_ranks`` divides the number of ranks, or is 0."""
    if isinstance(head_ranks, bool) or not isinstance(head_ranks, int):
        raise UsageError(f"head_ranks must be an integer, not {head_ranks!r}")
    if head_ranks < 0 or (head_ranks and world_size % head_ranks):
        raise UsageError(
            f"head_ranks = {head_ranks} does not divide the number of ranks, {world_size}; "
            f"give {divisors(world_size)}, or 0 for all"
        )


def divisors(number: int, least: int = 1) -> str:
    """The divisors of a number from ``least`` on, for messages."""
    return ", ".join(str(k) for k in range(least, number + 1) if number % k == 0)


def _joined(device: str | torch.device | None, head_ranks: int, timeout: float | None) -> Mesh:
    rank, world_size, local_rank = (
        _integer(name, default) for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))
    )
    chosen = default_device(local_rank) if device is None else to_device(device, local_rank)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if dist.is_available() and dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
        return _mesh_of_world(rank, world_size, local_rank, chosen, timeout)
    check_head_ranks(head_ranks, world_size)  # before any rank waits for the others
    if world_size == 1:
        return Mesh(0, 1, 0, chosen)
    if not 0 <= rank < world_size:
        raise UsageError(f"RANK={rank} is not below WORLD_SIZE={world_size}; start the ranks with torchrun or --nproc")
    # env:// would meet under the keys of ranks that were restarted, see plsc.parallel.rendezvous.
    shared = agent_keeps_store()
    on_gpu = chosen.type == "cuda"
    wait = HOST_TIMEOUT if timeout is None else timedelta(seconds=timeout)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        timeout=timedelta(seconds=(timeout or DEVICE_SECONDS) + _NCCL_SECONDS) if on_gpu else wait,
        device_id=chosen if on_gpu else None,
        store=store_of_attempt(connect(), rank, world_size) if shared else None,
        rank=rank if shared else -1,
        world_size=world_size if shared else -1,
    )
    return _mesh_of_world(rank, world_size, local_rank, chosen, timeout)


def _mesh_of_world(rank: int, world_size: int, local_rank: int, device: torch.device, timeout: float | None) -> Mesh:
    """The mesh of all ranks, which have met."""
    group = dist.group.WORLD if world_size > 1 else None
    host_group = _new_host_group() if group is not None and device.type == "cuda" else None
    seconds = DEVICE_SECONDS if timeout is None else timeout
    return Mesh(rank, world_size, local_rank, device, group, host_group=host_group, timeout=seconds)


def shutdown() -> None:
    """Leave the process group, if this process is in one."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def initialised(device: str | torch.device | None = None) -> Iterator[Mesh]:
    """The mesh of :func:`init`, whose process group is left in the end."""
    mesh = init(device)
    try:
        yield mesh
    finally:
        shutdown()


def default_device(local_rank: int) -> torch.device:
    """The GPU of a local rank, or the CPU where there are none; UsageError where there are fewer than ranks."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise UsageError(
            f"local rank {local_rank} has no GPU ({torch.cuda.device_count()} here); start fewer ranks, "
            "or hide the GPUs (CUDA_VISIBLE_DEVICES=) to compute on the CPU"
        )
    return torch.device("cuda", local_rank)


def to_device(device: str | torch.device, local_rank: int = 0) -> torch.device:
    """``device`` as a torch.device, with "cuda" meaning GPU ``local_rank``; UsageError if there is no such device."""
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError, ValueError):
        raise UsageError(f'there is no device {device!r}: give "cpu", "cuda" or "cuda:N"') from None
    if chosen.type != "cuda":
        return chosen
    if not torch.cuda.is_available():
        raise UsageError(f"torch finds no GPU for device {str(device)!r}: give cpu, or leave it out")
    return default_device(local_rank) if chosen.index is None else chosen


def _integer(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise UsageError(
            f"the environment's {name}={text!r} is not an integer; start the ranks with torchrun"
        ) from None
