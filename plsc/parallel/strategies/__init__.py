"""Strategies of the backbone by name, and what is meaningless together."""

import pkgutil

from plsc.errors import UsageError
from plsc.extensions import Registry, is_subclass
from plsc.parallel.mesh import Mesh
from plsc.parallel.strategies.base import Strategy, Weight, Wrapping
from plsc.parallel.strategies.layout import CUT_WEIGHTS, STAGES_OF_A_RANK, Layout, StrategyOptions

__all__ = ["STAGES_OF_A_RANK", "STRATEGIES", "Strategy", "StrategyOptions", "Weight", "Wrapping", "make_strategy"]

# Each by its name in the configuration, with its class, imported when it is made: torch's engines take long to import.
STRATEGIES: Registry[str | type[Strategy]] = Registry(
    "plsc.strategies",
    {
        "ddp": "ddp:DataParallel",
        "zero1": "zero:ZeroOptimizer",
        "zero2": "fsdp:ShardedGradients",
        "fsdp": "fsdp:FullySharded",
        "hsdp": "fsdp:FullySharded",
    },
    is_subclass(Strategy),
    "a subclass of plsc.parallel.strategies.Strategy",
)
CHOICES = STRATEGIES.with_name("auto")  # of a configuration, which plsc train resolves


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
    if STRATEGIES.find(options.name) is None:
        raise UsageError(f"there is no strategy {options.name!r}; it is one of {', '.join(STRATEGIES.every_name())}")
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
        return _made("ddp", Layout(mesh, mesh, mesh, {}, None))
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
    if options.tp > 1:
        from plsc.parallel.strategies.tensor_parallel import TensorParallel

        return TensorParallel(layout)
    is_alone = layout.stage.world_size == 1 and not offload
    return _made("ddp" if is_alone and options.name in CUT_WEIGHTS else options.name, layout)


def _made(name: str, layout: Layout) -> Strategy:
    kind = STRATEGIES[name]
    make: type[Strategy] = pkgutil.resolve_name(f"plsc.parallel.strategies.{kind}") if isinstance(kind, str) else kind
    return make(layout)
