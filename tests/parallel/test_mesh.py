"""Head groups in programs that have process groups of their own."""

import subprocess
import sys
import textwrap

import pytest
import torch

from plsc.parallel import Mesh, with_head_groups
from plsc.parallel.collectives import all_gather_rows

PROGRAM = textwrap.dedent("""
    import os, socket, torch, torch.distributed as dist, torch.multiprocessing as mp
    import plsc
    from plsc.parallel import shutdown
    from plsc.parallel.collectives import all_reduce_sum, barrier

    def rank_main(rank, port):
        os.environ.update(
            RANK=str(rank), WORLD_SIZE="4", LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
        )
        dist.init_process_group("gloo")
        if rank < 2:  # two ranks make groups that the others know nothing of
            dist.new_group([0, 1], use_local_synchronization=True)
            dist.new_group([0, 1], use_local_synchronization=True)
        for _ in range(2):
            mesh = plsc.init("cpu", head_ranks=2)
            head = all_reduce_sum(torch.tensor([10.0**rank]), mesh.head).item()
            replicas = all_reduce_sum(torch.tensor([10.0**rank]), mesh.replicas).item()
            assert head == (11 if rank < 2 else 1100), head
            assert replicas == (101 if rank % 2 == 0 else 1010), replicas
            barrier(mesh.head)
        shutdown()

    if __name__ == "__main__":
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        mp.spawn(rank_main, (port,), nprocs=4)
""")


@pytest.mark.slow
def test_head_groups_find_each_other_whatever_groups_the_program_has_made(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def replicas_alone(mesh: Mesh) -> tuple[list[int], int]:
    """Head groups of a mesh that is a part of the world: ranks outside take no part."""
    split = with_head_groups(mesh, 1)
    return all_gather_rows(torch.tensor([mesh.rank]), split.replicas).tolist(), split.head.world_size


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_mesh_that_is_part_of_the_world_splits_without_the_rest(ranks, world):
    assert ranks(world, replicas_alone) == [(list(range(world)), 1)] * world
