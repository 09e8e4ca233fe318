"""Collectives of the project: the only module that calls torch.distributed's.

Each takes the mesh last and is the identity where there is one rank. All ranks must call them in the same order.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from plsc.errors import PlscError
from plsc.parallel.mesh import Mesh
from plsc.parallel.step_timeline import COMMUNICATION, step_part

T = TypeVar("T")
_FAREWELL = 7  # the tag of its messages

# torch 2.14 gave these two new names; its old ones are aliases, and 2.14's warn at every call.
_all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_reduce_sum(tensor: Tensor, mesh: Mesh) -> Tensor:
    """Sum ``tensor`` over the ranks, in place. Moves 2·bytes per rank."""
    if mesh.world_size > 1:
        with step_part(COMMUNICATION):
            dist.all_reduce(tensor, dist.ReduceOp.SUM, group=mesh.group)
    return tensor


def all_reduce_sum_async(tensor: Tensor, mesh: Mesh) -> dist.Work:
    """Begin to sum ``tensor`` over the ranks, several of them, in place; the sum is there after the result's wait().

    On GPUs the sum starts when the work enqueued so far is done, and wait() holds up the stream, not the host. What
    lies on hosts is summed between hosts.
    """
    group = mesh.group if tensor.is_cuda else mesh.control
    return dist.all_reduce(tensor, dist.ReduceOp.SUM, group=group, async_op=True)


def all_reduce_max(tensor: Tensor, mesh: Mesh) -> Tensor:
    """Take the elementwise maximum of ``tensor`` over the ranks, in place."""
    if mesh.world_size > 1:
        with step_part(COMMUNICATION):
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=mesh.group)
    return tensor


def all_gather_equal(tensor: Tensor, mesh: Mesh) -> Tensor:
    """Stack tensors of one shape over the ranks: (…) on each becomes (world, …) on all."""
    if mesh.world_size == 1:
        return tensor.unsqueeze(0)
    gathered = tensor.new_empty((mesh.world_size * tensor.numel(),))
    with step_part(COMMUNICATION):
        _all_gather_single(gathered, tensor.contiguous().view(-1), group=mesh.group)
    return gathered.view(mesh.world_size, *tensor.shape)


def all_gather_rows(tensor: Tensor, mesh: Mesh, sizes: list[int] | None = None) -> Tensor:
    """Concatenate the ranks' rows in rank order: (n_r, …) becomes (Σ n_r, …).

    Args:
        tensor: this rank's rows; the numbers of rows may differ, and may be 0.
        mesh: the ranks.
        sizes: every rank's number of rows where the caller knows them; else they are exchanged first, which waits
            for the device.
    """
    if mesh.world_size == 1:
        return tensor
    if sizes is None:
        count = torch.tensor([tensor.shape[0]], device=tensor.device)
        sizes = all_gather_equal(count, mesh).flatten().tolist()
    if max(sizes) == 0:
        return tensor
    gathered = all_gather_equal(_pad_rows(tensor, max(sizes)), mesh)
    if min(sizes) == max(sizes):
        return gathered.flatten(0, 1)
    return torch.cat([rows[:size] for rows, size in zip(gathered, sizes, strict=True)])


def reduce_scatter_rows(tensor: Tensor, sizes: list[int], mesh: Mesh) -> Tensor:
    """Sum (Σ n_r, …) over the ranks and return this rank's n_r rows of it."""
    if mesh.world_size == 1 or max(sizes) == 0:
        return tensor
    if mesh.device.type != "cuda":  # gloo: one all-reduce, of which a slice is kept
        return torch.split(all_reduce_sum(tensor, mesh), sizes)[mesh.rank]
    parts = pad_parts(tensor, sizes)
    local = parts.new_empty(parts.shape[1:])
    with step_part(COMMUNICATION):
        _reduce_scatter_single(local, parts.flatten(0, 1), dist.ReduceOp.SUM, group=mesh.group)
    return local[: sizes[mesh.rank]]


def pad_parts(tensor: Tensor, sizes: list[int]) -> Tensor:
    """The parts of (Σ n_r, …) below each other, filled up with zeros to the largest: (ranks, max n_r, …).

    NCCL scatters equal parts. Part r is rank r's: its first n_r rows.
    """
    most = max(sizes)
    if min(sizes) < most:
        tensor = torch.cat([_pad_rows(rows, most) for rows in torch.split(tensor, sizes)])
    return tensor.reshape(len(sizes), most, *tensor.shape[1:])


def all_gather_numbers(numbers: list[int], mesh: Mesh) -> list[list[int]]:
    """Return every rank's ``numbers``, equally many, in rank order: from host to host, past the device's work."""
    if mesh.world_size == 1:
        return [numbers]
    # a mesh made by hand may have no group for hosts
    device = mesh.device if mesh.host_group is None else torch.device("cpu")
    own = torch.tensor(numbers, device=device)
    gathered = own.new_empty((mesh.world_size * len(numbers),))
    with step_part(COMMUNICATION):
        _all_gather_single(gathered, own, group=mesh.control)
    return cast(list[list[int]], gathered.view(mesh.world_size, -1).tolist())


def all_gather_object(value: T, mesh: Mesh) -> list[T]:
    """Return every rank's ``value``, in rank order. For small objects: it pickles, and waits."""
    if mesh.world_size == 1:
        return [value]
    values: list[Any] = [None] * mesh.world_size
    with step_part(COMMUNICATION):
        dist.all_gather_object(values, value, group=mesh.control)
    return values


def broadcast_object(value: T, mesh: Mesh, source: int = 0) -> T:
    """Return ``source``'s value on every rank."""
    if mesh.world_size == 1:
        return value
    holder = [value]
    with step_part(COMMUNICATION):
        dist.broadcast_object_list(holder, group=mesh.control, group_src=source)
    return holder[0]


def on_main(function: Callable[[], T], mesh: Mesh) -> T:
    """Run ``function`` on the first rank; return its result, or raise its error, on every rank."""
    outcome: tuple[T | None, PlscError | None] = None, None
    if mesh.is_main:
        try:
            outcome = function(), None
        except PlscError as error:
            outcome = None, error
    result, failure = broadcast_object(outcome, mesh)
    if failure is not None:
        raise failure
    return cast(T, result)


def raise_on_all_ranks(mesh: Mesh, function: Callable[[], T]) -> T:
    """Call ``function()`` on every rank; where it fails on any, raise the first rank's failure on all.

    No rank is left waiting in a collective for one that has failed. Only failures that a person can fix (PlscError,
    OSError) are shared; any other exception is a defect and propagates on its rank.

    Args:
        mesh: the ranks; all of them call.
        function: holds no collective.

    Returns:
        This rank's result.
    """
    results: list[T] = []
    failure: PlscError | OSError | None = None
    try:
        results.append(function())
    except (PlscError, OSError) as error:
        failure = error
    for shared in all_gather_object(failure, mesh):
        if shared is not None:
            raise shared
    return results[0]


def broadcast(tensor: Tensor, mesh: Mesh, source: int = 0) -> Tensor:
    """Overwrite ``tensor`` with ``source``'s on every rank, in place."""
    if mesh.world_size > 1:
        with step_part(COMMUNICATION):
            dist.broadcast(tensor, group=mesh.group, group_src=source)
    return tensor


def barrier(mesh: Mesh) -> None:
    """Wait until every rank is here. On a GPU that says nothing of the device's work."""
    if mesh.world_size > 1:
        with step_part(COMMUNICATION):
            dist.barrier(group=mesh.control)


def farewell(mesh: Mesh) -> None:
    """Tell the next rank, around the ring of all, that this one will end well."""
    dist.send(torch.zeros(1), group=mesh.control, group_dst=(mesh.rank + 1) % mesh.world_size, tag=_FAREWELL)


def await_farewell(mesh: Mesh, limit: timedelta) -> None:
    """Wait for the farewell of the rank before this one; a RuntimeError where it ends without, or after ``limit``.

    For a thread of its own, beside the main thread's collectives.
    """
    before = (mesh.rank - 1) % mesh.world_size
    work = dist.irecv(torch.zeros(1), group=mesh.control, group_src=before, tag=_FAREWELL)
    assert work is not None
    work.wait(limit)


def send_all(tensors: list[Tensor], mesh: Mesh) -> None:
    """Send tensors in host memory, one after the other, to every other rank; returns when all have been sent.

    For a thread of its own, with :func:`receive` on the others, on a mesh of :func:`plsc.parallel.mesh.host_mesh`.
    """
    others = [rank for rank in range(mesh.world_size) if rank != mesh.rank]
    for work in [dist.isend(tensor, group=mesh.group, group_dst=rank) for tensor in tensors for rank in others]:
        assert work is not None
        work.wait()


def receive(tensor: Tensor, mesh: Mesh, source: int) -> Tensor:
    """Fill ``tensor``, in host memory, with the next that ``source`` sends; a RuntimeError where that rank ends."""
    dist.recv(tensor, group=mesh.group, group_src=source)
    return tensor


def _pad_rows(tensor: Tensor, rows: int) -> Tensor:
    if tensor.shape[0] == rows:
        return tensor
    padded = tensor.new_zeros((rows, *tensor.shape[1:]))
    padded[: tensor.shape[0]] = tensor
    return padded
