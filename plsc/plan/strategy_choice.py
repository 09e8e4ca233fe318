"""The choice of ``parallel.strategy = "auto"``: the fastest placement of the backbone that fits, and why.

Searched are the strategy, the ranks that share its shards, tensor and pipeline parallelism, recomputation and offload.
What a rank's devices hold of the class table stays as configured. All candidates step by the same global batch, with
the same samples in each batch normalisation: where K ranks share a batch, a step takes K times the micro-batches.
"""

import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from plsc.config import Config
from plsc.config.checks import check_together, with_precision
from plsc.errors import UsageError
from plsc.parallel.collectives import on_main
from plsc.parallel.mesh import Mesh
from plsc.plan.advice import TIE, CapacityError, Estimate, Hardware, estimate, fastest, gib, profile_of
from plsc.plan.devices import Links, link_speed, present_device
from plsc.plan.plan_config import PlanConfig, plan_config
from plsc.train.components import with_preprocessing
from plsc.train.tables import classes_of, open_training_data

# Of a rank's memory that the choice leaves free: the plan's peak was within 5% of measured CPU steps.
MARGIN = 0.05
_HOST_SHARE = 0.5  # of a machine's memory that offload may take: the loaders and checkpoints need theirs
# From the least work that is done twice to the most.
_RECOMPUTATIONS: tuple[dict[str, Any], ...] = (
    {"recompute": "none"},
    {"recompute": "every_k", "recompute_every": 2},
    {"recompute": "every_k", "recompute_every": 1},
)


def comparison(run: PlanConfig, hardware: Hardware) -> list[Estimate]:
    """Return the estimates of ``run`` under every strategy and offload, those that can be on its ranks."""
    plain = run.placed(strategy="ddp", shard_ranks=0, offload=False)
    names = ("ddp",) if run.data_ranks == 1 else ("ddp", "zero1", "zero2", "fsdp", "hsdp")
    layouts = [plain.placed(strategy=name) for name in names]
    if not 1 < layouts[-1].shard_ranks < run.data_ranks:
        layouts = [each for each in layouts if each.config.parallel.strategy != "hsdp"]
    found = [estimate(each, hardware) for layout in layouts for each in _valid(layout, {}, offload=False)]
    if hardware.host_memory is not None:
        offloaded = _valid(plain.placed(strategy="fsdp"), {}, offload=True)
        found += [estimate(each, hardware) for each in offloaded]
    return found


@dataclass(frozen=True)
class StrategyChoice:
    """The configuration that was chosen, without "auto", its estimate, and three lines that say why."""

    config: Config
    estimate: Estimate
    why: tuple[str, str, str]


def choose_strategy(run: PlanConfig, hardware: Hardware) -> StrategyChoice:
    """Choose for ``run``, whose configuration says "auto".

    On a CPU it is ddp unless that does not fit: ranks that share one memory gain nothing by faster exchanges.

    Raises:
        CapacityError: nothing fits; the message says what the smallest placement takes.
    """
    least = list(placements(run))
    plain = estimate(least[0], hardware)
    if hardware.device.kind == "cpu" and fits(plain, hardware):
        found = [plain]
    else:
        found = [each for layout in least for each in _fastest_of(layout, hardware)]
    if not found:
        raise CapacityError(_nothing_fits(run, least, hardware))
    choice = fastest(found)
    return StrategyChoice(choice.run.config, choice, _why(choice, found, plain, hardware))


def choose_on_ranks(config: Config, mesh: Mesh, between: str = "infiniband") -> StrategyChoice:
    """Choose for the ranks of a run that begins; every rank calls, and the first one's choice is all's.

    Args:
        config: it says "auto".
        mesh: all ranks.
        between: the link between machines, as ``plsc plan --between`` takes it.

    Raises:
        CapacityError: nothing fits.
        UsageError: the data cannot be opened, or ``between`` is no link.
    """

    def choose() -> StrategyChoice:
        filled = with_preprocessing(config)
        classes = classes_of(open_training_data(filled))
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE", mesh.world_size))
        hardware = hardware_of(mesh.device, per_node, between)
        resolved = with_precision(filled, hardware.device.units)
        chosen = choose_strategy(plan_config(resolved, classes, mesh.world_size, per_node), hardware)
        # the run resolves "auto" itself, with all ranks' devices and its checkpoint in view
        of_run = {name: getattr(filled, name) for name in ("data", "head", "optim", "table")}  # and no table's own
        return replace(chosen, config=replace(chosen.config, precision=config.precision, **of_run))

    return on_main(choose, mesh)


def hardware_of(device: torch.device, per_node: int, between: str) -> Hardware:
    """Return this machine's hardware, for each of ``per_node`` ranks: its memory, at the speeds of its data sheet.

    Nothing is measured, so that a run that goes on chooses as before.
    """
    known = present_device(device)
    inside = "nvlink" if known.nvlink else "pcie"
    links = Links(link_speed(inside, known, "--link"), link_speed(between, known, "--between"))
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    memory = known.memory if known.memory is not None else machine // per_node
    return Hardware(known, memory, links, int(_HOST_SHARE * machine))


def candidates(run: PlanConfig) -> Iterator[PlanConfig]:
    """Yield every candidate of the search, the simplest first."""
    for layout in placements(run):
        for offload in (False, True):
            for recomputation in _recomputations(run):
                yield from _valid(layout, recomputation, offload=offload)


def placements(run: PlanConfig) -> Iterator[PlanConfig]:
    """Yield the placements that are sensible for backbone and ranks, without offload.

    A tensor parallel group stays within a node. Tensor and pipeline parallelism that the configuration asks for stay as
    they are. The first placement is plain data parallelism in that.
    """
    plain = run.placed(strategy="ddp", shard_ranks=0)
    for tp, pp in _model_ranks(plain):
        split = plain if (tp, pp) == (plain.tp, plain.pp) else _split(plain, tp, pp)
        if split is None:
            continue
        for strategy, shards in _sharding(split):
            yield from _valid(split.placed(strategy=strategy, shard_ranks=shards), {}, offload=False)


def _model_ranks(plain: PlanConfig) -> Iterator[tuple[int, int]]:
    """Pairs of the ranks of a tensor parallel group and of a pipeline that divide the world."""
    if plain.model_ranks > 1 or not profile_of(plain).blocks:
        yield plain.tp, plain.pp
        return
    sizes = [2**power for power in range(plain.world.bit_length())]
    for pp in sizes:
        yield from ((tp, pp) for tp in sizes if tp <= plain.per_node and plain.world % (tp * pp) == 0)


def fits(planned: Estimate, hardware: Hardware) -> bool:
    """True where the plan leaves the margin free."""
    return planned.fits and planned.memory.total <= (1 - MARGIN) * hardware.memory


def _sharding(run: PlanConfig) -> Iterator[tuple[str, int]]:
    """Strategies with the ranks that share one set of weights: whole nodes, or parts of one."""
    yield "ddp", 0
    if run.data_ranks == 1:
        return
    yield "zero1", 0
    yield "zero2", 0
    node = max(run.per_node // run.tp, 1)
    for shards in range(2, run.data_ranks):
        if run.data_ranks % shards == 0 and (shards % node == 0 or node % shards == 0):
            yield "hsdp", shards
    yield "fsdp", 0


def _split(plain: PlanConfig, tp: int, pp: int) -> PlanConfig | None:
    """``plain`` with as many samples per step, and per batch normalisation; None where the table's ranks forbid it."""
    config, accumulate = plain.config, plain.config.optim.accumulate * tp
    head_ranks = config.head_ranks or plain.world // pp
    if (plain.world // pp) % head_ranks:
        return None
    parallel: dict[str, int] = {"tp": tp, "pp": pp}
    batch = config.data.batch_size
    if pp > 1:
        micro_batches, accumulate = pp * accumulate, 1
        parallel["pp_micro_batches"] = micro_batches
        batch *= micro_batches
    changed = replace(
        config,
        data=replace(config.data, batch_size=batch),
        optim=replace(config.optim, accumulate=accumulate),
    )
    return replace(plain, config=changed, head_ranks=head_ranks).placed(**parallel)


def _valid(layout: PlanConfig, changes: dict[str, Any], *, offload: bool) -> Iterator[PlanConfig]:
    """Yield ``layout`` with ``changes``, unless the configuration's own checks refuse it."""
    changed = layout.placed(offload=offload)
    config = replace(changed.config, **changes)
    try:
        _check(config, layout.world)
    except UsageError:
        return
    yield replace(changed, config=config)


@functools.lru_cache(maxsize=4096)
def _check(config: Config, world: int) -> None:
    check_together(config)
    config.parallel.strategy_options().check_world(world, offload=config.parallel.offload)


def _fastest_of(layout: PlanConfig, hardware: Hardware) -> Iterator[Estimate]:
    """Yield of a placement the fastest that fits, without and with offload.

    More recomputation takes less memory and more time, so that the first that fits is the fastest. With offload, only
    less recomputation than without can gain.
    """
    choices = _recomputations(layout)
    most = len(choices)
    for offload in (False, True):
        for number, recomputation in enumerate(choices[:most]):
            planned = [estimate(each, hardware) for each in _valid(layout, recomputation, offload=offload)]
            if planned and fits(planned[0], hardware):
                yield planned[0]
                most = number
                break


def _recomputations(run: PlanConfig) -> tuple[dict[str, Any], ...]:
    """What may be recomputed: as configured where the configuration says so, or the backbone has no blocks for it."""
    if run.config.recompute != "none" or not profile_of(run).units:
        return ({},)
    return _RECOMPUTATIONS


def _nothing_fits(run: PlanConfig, layouts: list[PlanConfig], hardware: Hardware) -> str:
    most = _recomputations(run)[-1]
    every = [estimate(each, hardware) for layout in layouts for each in _valid(layout, most, offload=False)]
    smallest = min(every, key=lambda planned: planned.memory.total)
    room = (1 - MARGIN) * hardware.memory
    return (
        f'parallel.strategy = "auto" finds nothing that fits: the smallest, {label(smallest.run)}, takes '
        f"{gib(smallest.memory.total)}, and a rank has {gib(room)} to spend; lower data.batch_size, store "
        "the table as bfloat16 and int8, or give more ranks"
    )


def _why(choice: Estimate, found: list[Estimate], plain: Estimate, hardware: Hardware) -> tuple[str, str, str]:
    room = gib((1 - MARGIN) * hardware.memory)
    verdict = "fits" if fits(plain, hardware) else "does not fit"
    first = f"ddp {verdict}: it takes {gib(plain.memory.total)}, and a rank has {room} to spend"
    taken = gib(choice.memory.total)
    speed = f"{choice.timing.seconds * 1e3:,.1f} ms a step, {choice.timing.images_per_second:,.0f} images/s"
    second = f"{label(choice.run)}: {taken}, {speed}"
    kinds = [(each.run.config.parallel.strategy, each.run.tp > 1, each.run.pp > 1) for each in (choice, *found)]
    others = [each for each, kind in zip(found, kinds[1:], strict=True) if kind != kinds[0]]
    if not others:
        return first, f"chosen: {second}", "nothing else was considered" if len(found) == 1 else "no other kind fits"
    other = max(others, key=lambda each: each.timing.images_per_second)
    return first, f"chosen: {second}", _beside(choice, other)


def _beside(choice: Estimate, other: Estimate) -> str:
    """Compare with the best of another kind, and name what of a step differs most."""
    gain = choice.timing.images_per_second / other.timing.images_per_second - 1
    samples = choice.timing.samples, other.timing.samples
    mine, theirs = _by_cause(choice.timing.parts), _by_cause(other.timing.parts)
    theirs = {cause: seconds * samples[0] / samples[1] for cause, seconds in theirs.items()}
    cause = max(mine, key=lambda name: abs(theirs[name] - mine[name]))
    why = f"{cause} {mine[cause] * 1e3:.2f} ms a step, there {theirs[cause] * 1e3:.2f}"
    if gain >= 0:
        return f"it is {gain:.1%} faster than {label(other.run)}: {why}"
    return f"{label(other.run)} is {-gain:.1%} faster, and {TIE:.0%} are asked for the less simple: {why}"


_CAUSES = {
    **dict.fromkeys(("backbone, forward and backward", "head, products"), "computing"),
    **dict.fromkeys(("head, table traffic", "head, samples' traffic"), "computing"),
    "pipeline, bubble": "the pipeline's bubble",
    **dict.fromkeys(("backbone, update", "backbone, shards copied"), "copies and updates"),
    "backbone, gradients compressed": "copies and updates",
}


def _by_cause(parts: dict[str, float]) -> dict[str, float]:
    """Seconds of a step's parts by what they wait for."""
    causes = dict.fromkeys(("computing", "the network", "the pipeline's bubble", "copies and updates"), 0.0)
    for name, seconds in parts.items():
        causes[_CAUSES.get(name, "the network")] += seconds
    return causes


def label(run: PlanConfig) -> str:
    """Name a placement by its keys: ``hsdp, shard_ranks = 8, tp = 2``."""
    config, parallel = run.config, run.config.parallel
    parts = [parallel.strategy]
    parts += [f"shard_ranks = {run.shard_ranks}"] if parallel.strategy == "hsdp" else []
    parts += [f"{name} = {value}" for name, value in (("tp", run.tp), ("pp", run.pp)) if value > 1]
    parts += ["offload"] if parallel.offload else []
    every = f", recompute_every = {config.recompute_every}" if config.recompute == "every_k" else ""
    parts += [f"recompute = {config.recompute}{every}"] if config.recompute != "none" else []
    return ", ".join(parts)
