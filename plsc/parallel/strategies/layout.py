"""The layout of the ranks: pipeline, replicas, shards and tensor parallel groups as dimensions of one DeviceMesh.

From the outermost to the innermost, whose ranks lie next to each other: ``pp``, ``replicate``, ``shard``, ``tp``. What
sends most often lies closest: tensor parallelism within a machine, shards there too if it has room, stages of a
pipeline the farthest apart.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from plsc.errors import UsageError
from plsc.parallel.mesh import Mesh, device_mesh, divisors, subgroup, submesh

if TYPE_CHECKING:  # it takes long to import
    from torch.distributed.device_mesh import DeviceMesh

CUT_WEIGHTS = ("zero2", "fsdp", "hsdp")  # strategies that leave ranks parts of weights alone
STAGES_OF_A_RANK = {"gpipe": 1, "1f1b": 1, "interleaved": 2}  # by the schedule of a pipeline


@dataclass(frozen=True)
class StrategyOptions:
    """How a backbone lies on the ranks: a name of STRATEGIES with its numbers.

    Attributes:
        name: of the strategy.
        shard_ranks: hsdp: consecutive ranks, or groups of ``tp`` ranks, that share one set of weights; 0: those of a
            machine.
        tp: ranks of a group that splits the blocks of a vision transformer (tensor parallelism); 1: none does.
        pp: ranks of a pipeline, or groups of ``tp`` ranks; 1: none.
        pp_schedule: a key of STAGES_OF_A_RANK.
        pp_micro_batches: into which a rank's batch is cut; 0: twice ``pp``.
    """

    name: str = "ddp"
    shard_ranks: int = 0
    tp: int = 1
    pp: int = 1
    pp_schedule: str = "1f1b"
    pp_micro_batches: int = 0

    def check_world(self, world_size: int, *, offload: bool = False) -> None:
        """UsageError unless so many ranks can be arranged like that, perhaps with weights offloaded to host memory."""
        if world_size % self.pp:
            raise UsageError(
                f"parallel.pp = {self.pp} does not divide the number of ranks, {world_size}; "
                f"give {divisors(world_size, 2)}, or start another number"
            )
        of_a_stage = world_size // self.pp
        if of_a_stage % self.tp:
            counted = "" if self.pp == 1 else f" of a stage of parallel.pp = {self.pp}"
            raise UsageError(
                f"parallel.tp = {self.tp} does not divide the number of ranks{counted}, {of_a_stage}; "
                f"give {divisors(of_a_stage, 2)}, or start another number"
            )
        groups, shards = self.data_ranks(world_size), self.shards(world_size)
        if groups and groups % shards:
            of_groups = "" if self.tp == 1 else f" of groups of parallel.tp = {self.tp}"
            of_groups += "" if self.pp == 1 else f" of a stage of parallel.pp = {self.pp}"
            raise UsageError(
                f"parallel.shard_ranks = {shards} does not divide the number{of_groups or ' of ranks'}, {groups}; "
                f"give {divisors(groups, 2)}"
            )
        if offload and world_size == self.tp * self.pp > 1:
            sizes = {"parallel.tp": self.tp, "parallel.pp": self.pp}
            keys = " and ".join(f"{key} = {size}" for key, size in sizes.items() if size > 1)
            raise UsageError(
                f"parallel.offload needs weights that several ranks share, and {keys} leave none on "
                f"{world_size} ranks; leave offload out, or start more ranks"
            )

    @property
    def micro_batches(self) -> int:
        """Into which a pipeline cuts a rank's batch; 1 without one."""
        return (self.pp_micro_batches or 2 * self.pp) if self.pp > 1 else 1

    def data_ranks(self, world_size: int) -> int:
        """How many ranks, or groups of ranks, see different images."""
        return world_size // (self.pp * self.tp)

    def shards(self, world_size: int, local_ranks: int | None = None) -> int:
        """Over how many of them each weight is cut, along its first dimension; 1 where it is whole.

        Args:
            world_size: all ranks.
            local_ranks: those of a machine; None: as torchrun says.
        """
        groups = self.data_ranks(world_size)
        if self.name != "hsdp":
            return groups if self.name in CUT_WEIGHTS else 1
        local_ranks = local_ranks or int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        return self.shard_ranks or min(max(local_ranks // self.tp, 1), groups)

    def dimensions(self, world_size: int) -> dict[str, int]:
        """Names and sizes of the DeviceMesh's dimensions; none where no engine needs one."""
        groups, is_cut, shards = self.data_ranks(world_size), self.name in CUT_WEIGHTS, self.shards(world_size)
        dims = {"pp": self.pp} if self.pp > 1 else {}
        if groups > shards and (dims or is_cut or self.tp > 1):
            dims |= {"replicate": groups // shards}
        # fully_shard also averages the gradients of groups of tensor parallelism, over one shard each
        if (groups > 1 and (is_cut or self.tp > 1)) or (is_cut and self.tp * self.pp == 1):
            dims |= {"shard": shards}
        return dims | ({"tp": self.tp} if self.tp > 1 else {})


@dataclass(frozen=True)
class Layout:
    """The groups of ranks of which one rank is a member, as its strategy asks for them.

    Attributes:
        mesh: all ranks.
        stage: the ranks that hold the same layers, or parts of them: all without a pipeline.
        peers: those of them that see different images and hold the same parts of tensor parallelism.
        dims: names and sizes of the DeviceMesh's dimensions.
        groups: all ranks by these; None where there are none.
    """

    mesh: Mesh
    stage: Mesh
    peers: Mesh
    dims: Mapping[str, int]
    groups: "DeviceMesh | None"

    @classmethod
    def of(cls, options: StrategyOptions, mesh: Mesh) -> "Layout":
        """Make the process groups; every rank of ``mesh`` calls. It has a number that ``options`` allow."""
        dims = options.dimensions(mesh.world_size)
        groups = device_mesh(mesh, dims) if dims else None
        of_a_stage, tp = mesh.world_size // options.pp, options.tp
        stage = subgroup(mesh, of_a_stage) if options.pp > 1 else mesh
        peers = stage
        if tp > 1:
            firsts = range(0, mesh.world_size, of_a_stage)
            members = [range(first + rank, first + of_a_stage, tp) for first in firsts for rank in range(tp)]
            peers = submesh(mesh, members)
        return cls(mesh, stage, peers, dims, groups)

    def along(self, *names: str) -> "DeviceMesh":
        """The DeviceMesh of this rank's group along those of these dimensions that there are."""
        held = tuple(name for name in names if name in self.dims)
        assert self.groups is not None
        return self.groups if len(held) == len(self.dims) else self.groups[held]

    def size(self, name: str) -> int:
        """The size of a dimension; 1 where there is none of that name."""
        return self.dims.get(name, 1)
