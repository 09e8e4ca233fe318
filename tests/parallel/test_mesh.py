"""Head groups in programs that have process groups of their own."""

import subprocess
import sys
import textwrap
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support.waiting import free_port

import plsc
from plsc.errors import UsageError
from plsc.parallel import Mesh, mesh, with_head_groups
from plsc.parallel.collectives import all_gather_numbers, all_gather_object, all_gather_rows, barrier

PROGRAM = textwrap.dedent("""
    import os, sys, torch, torch.distributed as dist, torch.multiprocessing as mp
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
        mp.spawn(rank_main, (int(sys.argv[1]),), nprocs=4)
""")


@pytest.mark.live
@pytest.mark.slow
def test_head_groups_find_each_other_whatever_groups_the_program_has_made(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    done = subprocess.run([sys.executable, script, str(free_port())], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


def replicas_alone(mesh: Mesh) -> tuple[list[int], int]:
    """Head groups of a mesh that is a part of the world: ranks outside take no part."""
    split = with_head_groups(mesh, 1)
    return all_gather_rows(torch.tensor([mesh.rank]), split.replicas).tolist(), split.head.world_size


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_mesh_that_is_part_of_the_world_splits_without_the_rest(ranks, world):
    assert ranks(world, replicas_alone) == [(list(range(world)), 1)] * world


class PretendedGpus:
    """torch.distributed and torch.cuda as a rank of several GPUs meets them; records the groups that it makes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rank: int, world: int) -> None:
        self.made: list[tuple[str, list[int], timedelta | None]] = []
        self.rank, self.world = rank, world
        self.groups = []
        for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world}.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: world)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
        monkeypatch.setattr(dist, "is_initialized", lambda: False)
        monkeypatch.setattr(dist, "init_process_group", self.init)
        monkeypatch.setattr(dist, "new_group", self.new_group)
        monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: list(range(world)))
        monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=dist.ProcessGroup(rank, world)))
        monkeypatch.setattr(mesh, "agree_on_group_names", lambda mesh: None)

    def init(self, backend, timeout, device_id, **options):
        self.made.append((backend, list(range(self.world)), timeout))

    def new_group(self, ranks=None, timeout=None, backend="nccl"):
        ranks = list(range(self.world)) if ranks is None else list(ranks)
        self.made.append((backend, ranks, timeout))
        if self.rank not in ranks:
            return dist.GroupMember.NON_GROUP_MEMBER
        self.groups.append((backend, ranks, dist.ProcessGroup(ranks.index(self.rank), len(ranks))))
        return self.groups[-1][2]


def test_every_rank_makes_the_groups_of_nccl_and_gloo_in_one_order(monkeypatch):
    day, twelve = timedelta(hours=24), timedelta(minutes=12)
    pairs = [([0, 1], [2, 3]), ([0, 2], [1, 3])]
    beside = [(name, part, when) for kind in pairs for part in kind for name, when in (("nccl", None), ("gloo", day))]
    for rank in range(4):
        with monkeypatch.context() as patches:
            pretended = PretendedGpus(patches, rank, 4)
            joined = plsc.init(head_ranks=2, timeout=660)
            assert pretended.made == [("nccl", [0, 1, 2, 3], twelve), ("gloo", [0, 1, 2, 3], day), *beside]
            by_name = {(backend, tuple(ranks)): group for backend, ranks, group in pretended.groups}
            head, replicas = (next(tuple(part) for part in kind if rank in part) for kind in pairs)
            assert joined.control is by_name["gloo", (0, 1, 2, 3)]
            assert joined.timeout == 660
            for part, ranks in ((joined.head, head), (joined.replicas, replicas)):
                assert part.group is by_name["nccl", ranks]
                assert part.control is by_name["gloo", ranks]
                assert (part.rank, part.world_size) == (ranks.index(rank), 2)


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan")])
def test_a_time_out_is_above_zero(timeout):
    with pytest.raises(UsageError, match="timeout is a number of seconds above 0"):
        plsc.init("cpu", timeout=timeout)


def told_beside(mesh: Mesh) -> tuple[list[int], list[list[int]], list[int]]:
    """What ranks tell each other in a group for hosts; the one for tensors is closed."""
    host = mesh.control
    pretended = Mesh(mesh.rank, mesh.world_size, mesh.rank, torch.device("cpu"), None, host_group=host)
    barrier(pretended)
    numbers = all_gather_numbers([mesh.rank, 7], pretended)
    return all_gather_object(mesh.rank, pretended), numbers, [mesh.head.world_size]


def test_what_lies_on_hosts_takes_the_group_beside(ranks):
    assert ranks(3, told_beside) == [([0, 1, 2], [[0, 7], [1, 7], [2, 7]], [3])] * 3
