"""Strategies of the backbone by name, and what is meaningless together."""

import os
from dataclasses import dataclass

from plsc.errors import UsageError
from plsc.parallel.mesh import Mesh
from plsc.parallel.strategies.base import Strategy, Weight, Wrapping

__all__ = ["STRATEGIES", "Strategy", "StrategyOptions", "Weight", "Wrapping", "make_strategy"]

STRATEGIES = ("ddp", "zero1", "fsdp", "hsdp")


@dataclass(frozen=True)
class StrategyOptions:
    """How a backbone lies on the ranks: a name of STRATEGIES with its numbers.

    Attributes:
        name: of the strategy.
        shard_ranks: hsdp: consecutive ranks that share one set of weights; 0: those of a machine.
    """

    name: str = "ddp"
    shard_ranks: int = 0

    def check_world(self, world_size: int) -> None:
        """UsageError unless so many ranks can be arranged like that."""
        shards = self.shards(world_size)
        if world_size % shards:
            divisors = ", ".join(str(k) for k in range(2, world_size + 1) if world_size % k == 0)
            raise UsageError(
                f"parallel.shard_ranks = {shards} does not divide the number of ranks, {world_size}; give {divisors}"
            )

    def shards(self, world_size: int) -> int:
        """Over how many ranks fsdp and hsdp cut the weights."""
        if self.name != "hsdp":
            return world_size
        return self.shard_ranks or min(int(os.environ.get("LOCAL_WORLD_SIZE", world_size)), world_size)


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
    # each is imported where it is used: torch's engines take long to import
    if options.name == "zero1":
        from plsc.parallel.strategies.zero import ZeroOptimizer

        return ZeroOptimizer(mesh)
    if options.name in ("fsdp", "hsdp") and (mesh.world_size > 1 or offload):
        from plsc.parallel.strategies.fsdp import FullySharded

        return FullySharded(mesh, options.shards(mesh.world_size))
    from plsc.parallel.strategies.ddp import DataParallel

    return DataParallel(mesh)
