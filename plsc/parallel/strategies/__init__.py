"""Strategies of the backbone by name, and what is meaningless together."""

import pkgutil

from plsc.errors import UsageError
from plsc.extensions import Registry, is_subclass
from plsc.parallel.mesh import Mesh
from plsc.parallel.strategies.base import Strategy, Weight, Wrapping
from plsc.parallel.strategies.layout import CUT_WEIGHTS, STAGES_OF_A_RANK, Layout, StrategyOptions

__all__ = [
    "STAGES_OF_A_RANK",
    "STRATEGIES",
    "Strategy",
    "StrategyOptions",
    "Weight",
    "Wrapping",
    "class_within_a_stage",
    "make_strategy",
]

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
    options.check_world(mesh.world_size, offload=offload)
    if mesh.world_size == 1 and not offload:
        return _named("ddp")(Layout(mesh, mesh, mesh, {}, None))
    layout = Layout.of(options, mesh)
    within = class_within_a_stage(options, options.data_ranks(mesh.world_size), offload=offload)(layout)
    if options.pp == 1:
        return within
    from plsc.parallel.strategies.pipeline import Pipeline

    stages = STAGES_OF_A_RANK[options.pp_schedule]
    return Pipeline(layout, within, options.pp, options.pp_schedule, stages, options.micro_batches)


def class_within_a_stage(options: StrategyOptions, data_ranks: int, *, offload: bool) -> type[Strategy]:
    """Return the strategy of the ranks that hold the same layers; without a pipeline these are all.

    Args:
        options: the strategy, which is not "auto".
        data_ranks: those of a stage that see different images.
        offload: weights will be offloaded to host memory.
    """
    if options.tp > 1:
        from plsc.parallel.strategies.tensor_parallel import TensorParallel

        return TensorParallel
    is_alone = data_ranks == 1 and not offload
    return _named("ddp" if is_alone and options.name in CUT_WEIGHTS else options.name)


def _named(name: str) -> type[Strategy]:
    kind = STRATEGIES[name]
    found: type[Strategy] = pkgutil.resolve_name(f"plsc.parallel.strategies.{kind}") if isinstance(kind, str) else kind
    return found
