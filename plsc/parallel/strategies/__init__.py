"""Strategies of the backbone by name, and what is meaningless together."""

import os
from dataclasses import dataclass

from plsc.errors import UsageError
from plsc.parallel.mesh import Mesh
from plsc.parallel.strategies.base import Strategy, Weight, Wrapping

__all__ = ["STAGES_OF_A_RANK", "STRATEGIES", "Strategy", "StrategyOptions", "Weight", "Wrapping", "make_strategy"]

STAGES_OF_A_RANK = {"gpipe": 1, "1f1b": 1, "interleaved": 2}  # by the schedule of a pipeline
STRATEGIES = ("ddp", "zero1", "fsdp", "hsdp")


@dataclass(frozen=True)
class StrategyOptions:
    """How a backbone lies on the ranks: a name of STRATEGIES with its numbers.

    Attributes:
        name: of the strategy.
        shard_ranks: hsdp: consecutive ranks, or groups of ``tp`` ranks, that share one set of weights; 0: those of a
            machine.
        tp: ranks of a group that splits the blocks of a vision transformer (tensor parallelism); 1: none does.
        pp: ranks of a pipeline; 1: none.
        pp_schedule: a key of STAGES_OF_A_RANK.
        pp_micro_batches: into which a rank's batch is cut; 0: twice ``pp``.
    """

    name: str = "ddp"
    shard_ranks: int = 0
    tp: int = 1
    pp: int = 1
    pp_schedule: str = "1f1b"
    pp_micro_batches: int = 0

    def check_world(self, world_size: int) -> None:
        """UsageError unless so many ranks can be arranged like that."""
        if world_size % self.pp:
            raise UsageError(
                f"parallel.pp = {self.pp} does not divide the number of ranks, {world_size}; "
                f"give {_divisors(world_size)}, or start another number"
            )
        if world_size % self.tp:
            raise UsageError(
                f"parallel.tp = {self.tp} does not divide the number of ranks, {world_size}; "
                f"give {_divisors(world_size)}, or start another number"
            )
        groups, shards = world_size // self.tp, self.shards(world_size)
        if groups and groups % shards:
            of_groups = "" if self.tp == 1 else f" of groups of parallel.tp = {self.tp}"
            raise UsageError(
                f"parallel.shard_ranks = {shards} does not divide the number{of_groups or ' of ranks'}, {groups}; "
                f"give {_divisors(groups)}"
            )

    def shards(self, world_size: int) -> int:
        """Over how many ranks, or groups of tensor parallelism, fsdp and hsdp cut the weights."""
        groups = world_size // self.tp
        if self.name != "hsdp":
            return groups
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        return self.shard_ranks or min(max(local_ranks // self.tp, 1), groups)


def _divisors(number: int) -> str:
    return ", ".join(str(k) for k in range(2, number + 1) if number % k == 0)


def make_strategy(options: StrategyOptions, mesh: Mesh, *, offload: bool = False) -> Strategy:
    """Make this rank's side of a strategy; every rank calls.

    Args:
        options: the strategy.
        mesh: all ranks. With one rank, all strategies are one, but for ``offload``.
        offload: weights will be offloaded to host memory.

    Raises:
        UsageError: the strategy is unknown, or so many ranks cannot be arranged like that.
    """
    if options.name not in STRATEGIES:
        raise UsageError(f"there is no strategy {options.name!r}; it is one of {', '.join(STRATEGIES)}")
    options.check_world(mesh.world_size)
    if options.pp > 1:
        from plsc.parallel.strategies.pipeline import Pipeline

        stages = STAGES_OF_A_RANK[options.pp_schedule]
        return Pipeline(mesh, options.pp, options.pp_schedule, stages, options.pp_micro_batches or 2 * options.pp)
    shards = options.shards(mesh.world_size)
    # each is imported where it is used: torch's engines take long to import
    if options.tp > 1:
        from plsc.parallel.strategies.tensor_parallel import TensorParallel

        return TensorParallel(mesh, options.tp, 1 if options.name == "ddp" else shards, offload=offload)
    if options.name == "zero1":
        from plsc.parallel.strategies.zero import ZeroOptimizer

        return ZeroOptimizer(mesh)
    if options.name in ("fsdp", "hsdp") and (mesh.world_size > 1 or offload):
        from plsc.parallel.strategies.fsdp import FullySharded

        return FullySharded(mesh, shards)
    from plsc.parallel.strategies.ddp import DataParallel

    return DataParallel(mesh)
