"""Strategies of the backbone by name, and what is meaningless together."""

from plsc.errors import UsageError
from plsc.parallel.mesh import Mesh
from plsc.parallel.strategies.base import Strategy, Weight, Wrapping
from plsc.parallel.strategies.layout import STAGES_OF_A_RANK, Layout, StrategyOptions

__all__ = ["STAGES_OF_A_RANK", "STRATEGIES", "Strategy", "StrategyOptions", "Weight", "Wrapping", "make_strategy"]

STRATEGIES = ("ddp", "zero1", "fsdp", "hsdp")
CHOICES = (*STRATEGIES, "auto")  # of a configuration, which plsc train resolves


def make_strategy(options: StrategyOptions, mesh: Mesh, *, offload: bool = False) -> Strategy:
    """Make this rank's side of a strategy; every rank calls.

    Args:
        options: the strategy.
        mesh: all ranks. With one rank, all strategies are one, but for ``offload``.
        offload: weights will be offloaded to host memory.

    Raises:
        UsageError: the strategy is unknown, or so many ranks cannot be arranged like that.
    """
    if options.name == "auto":
        raise UsageError(
            'parallel.strategy = "auto" is chosen by plsc train; from Python, train with the configuration that '
            "plsc.plan.strategy_choice.choose_on_ranks(config, mesh).config gives"
        )
    if options.name not in STRATEGIES:
        raise UsageError(f"there is no strategy {options.name!r}; it is one of {', '.join(STRATEGIES)}")
    options.check_world(mesh.world_size)
    model_ranks = options.tp * options.pp
    if offload and mesh.world_size == model_ranks > 1:
        sizes = {"parallel.tp": options.tp, "parallel.pp": options.pp}
        keys = " and ".join(f"{key} = {size}" for key, size in sizes.items() if size > 1)
        raise UsageError(
            f"parallel.offload needs weights that several ranks share, and {keys} leave none on "
            f"{mesh.world_size} ranks; leave offload out, or start more ranks"
        )
    if mesh.world_size == 1 and not offload:
        from plsc.parallel.strategies.ddp import DataParallel

        return DataParallel(mesh)
    layout = Layout.of(options, mesh)
    within = _within_a_stage(options, layout, offload=offload)
    if options.pp == 1:
        return within
    from plsc.parallel.strategies.pipeline import Pipeline

    stages = STAGES_OF_A_RANK[options.pp_schedule]
    micro_batches = options.pp_micro_batches or 2 * options.pp
    return Pipeline(layout, within, options.pp, options.pp_schedule, stages, micro_batches)


def _within_a_stage(options: StrategyOptions, layout: Layout, *, offload: bool) -> Strategy:
    """Make the strategy of the ranks that hold the same layers; without a pipeline these are all."""
    # each is imported where it is used: torch's engines take long to import
    if options.tp > 1:
        from plsc.parallel.strategies.tensor_parallel import TensorParallel

        return TensorParallel(layout)
    if options.name == "zero1":
        from plsc.parallel.strategies.zero import ZeroOptimizer

        return ZeroOptimizer(layout.stage)
    if options.name in ("fsdp", "hsdp") and (layout.stage.world_size > 1 or offload):
        from plsc.parallel.strategies.fsdp import FullySharded

        return FullySharded(layout)
    from plsc.parallel.strategies.ddp import DataParallel

    return DataParallel(layout.stage)
