"""A pool of gloo worker processes, started once per test session: a test body runs on the first ``world`` of them."""

import multiprocessing as mp
import os
import socket
import traceback
from multiprocessing.connection import Connection
from typing import Any

import torch

MAX_WORLD = 4


class RankError(AssertionError):
    """A test body failed on a rank; the message is that rank's traceback."""


class RankPool:
    """``MAX_WORLD`` worker processes that share one gloo store; each call gets groups of the worlds 1 to 4."""

    def __init__(self) -> None:
        context = mp.get_context("spawn")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._pipes: list[Connection] = []
        self._workers = []
        for rank in range(MAX_WORLD):
            here, there = context.Pipe()
            worker = context.Process(target=_serve, args=(rank, port, there), daemon=True)
            worker.start()
            self._pipes.append(here)
            self._workers.append(worker)

    def __call__(self, world: int, function: Any, *args: Any, head_ranks: int = 0, **options: Any) -> list[Any]:
        """Run ``function(mesh, *args, **options)`` on ``world`` ranks; their results in order, or a RankError.

        With ``head_ranks`` the mesh has head groups of so many ranks.
        """
        for pipe in self._pipes[:world]:
            pipe.send(((world, head_ranks or world), function, args, options))
        answers = [pipe.recv() for pipe in self._pipes[:world]]
        failures = [text for ok, text in answers if not ok]
        if failures:
            raise RankError("\n".join(failures))
        return [value for _, value in answers]

    def close(self) -> None:
        """End the workers."""
        for pipe in self._pipes:
            pipe.send(None)
        for worker in self._workers:
            worker.join(10)


def _serve(rank: int, port: int, pipe: Connection) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=MAX_WORLD)
    meshes = _meshes(rank)
    while (task := pipe.recv()) is not None:
        place, function, args, options = task
        try:
            pipe.send((True, function(meshes[place], *args, **options)))
        except Exception:
            pipe.send((False, f"rank {rank} of {place[0]}:\n{traceback.format_exc()}"))
    dist.destroy_process_group()


def _meshes(rank: int) -> dict[tuple[int, int], Any]:
    """This rank's mesh by (world, ranks of a head group)."""
    import torch.distributed as dist

    from plsc.parallel import Mesh, with_head_groups

    groups = {world: dist.new_group(list(range(world))) for world in range(2, MAX_WORLD + 1)}
    meshes = {}
    for world in range(MAX_WORLD, rank, -1):
        whole = Mesh(rank, world, rank, torch.device("cpu"), groups.get(world))
        for head_ranks in range(1, world + 1):
            if world % head_ranks == 0:
                meshes[world, head_ranks] = with_head_groups(whole, head_ranks)
    return meshes
