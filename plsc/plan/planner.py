"""The whole plan: the run as configured, the run recommended, the most classes of each storage; and its report."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from plsc.config import Config, changes_to_toml, class_tables
from plsc.config.checks import with_precision
from plsc.config.sections import AUTO
from plsc.devices import GIB, Device
from plsc.errors import UsageError
from plsc.models.preprocessing import size_text
from plsc.plan.advice import (
    SPARE_SHARE,
    Advice,
    Estimate,
    Hardware,
    advise,
    estimate,
    gib,
    largest_classes,
    profile_of,
    storage_label,
    storages,
)
from plsc.plan.backbone_timing import BACKBONE_SHARE, HEAD_SHARE
from plsc.plan.memory import plan_disk, row_size
from plsc.plan.plan_config import UNITS_OF, PlanConfig, check_ranks, plan_config
from plsc.plan.strategy_choice import choose_strategy, comparison, label

_WIDTH = 48
# Of the times with these constants, over the throughputs that others published: benchmarks/retrodiction.py.
MEDIAN_ERROR = 0.226


@dataclass(frozen=True)
class Plan:
    """``largest`` maps (storage, placement) to the most classes that the exact softmax could have on these ranks.

    ``strategies`` are estimates of the configured run under each strategy of the backbone; ``strategy_why`` says why
    "auto" became the configured one, and is empty where it was given. ``given`` is the configuration that was asked
    about, before "auto" was resolved in it.
    """

    given: Config
    hardware: Hardware
    configured: Estimate
    advice: Advice
    largest: dict[tuple[tuple[str, str], str], int]
    strategies: list[Estimate]
    strategy_why: tuple[str, ...] = ()
    images: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON: bytes, seconds, images per second."""
        run, device = self.configured.run, self.hardware.device
        profile = profile_of(run)
        return {
            "classes": sum(table.classes for table in run.tables if not table.fixed),
            "tables": [_table_dict(table) for table in run.tables] if run.others else [],
            "embedding_dim": run.config.embedding_dim,
            "backbone": run.config.backbone,
            "precision": run.config.precision,
            "gpus": run.world,
            "gpus_per_node": run.per_node,
            "gpu_memory": self.hardware.memory,
            "device": {"name": device.name, "flops": device.products, "bandwidth": device.bandwidth},
            "links": {"inside": self.hardware.links.inside, "between": self.hardware.links.between},
            "bytes_per_class": row_size(run) * run.config.head.centers,
            "backbone_flops_per_image": profile.flops / profile.images,
            "activation_bytes_per_image": profile.activations / profile.images,
            "configured": self.configured.as_dict(),
            "disk": plan_disk(run, profile).as_dict(),
            "recommended": {**self.advice.choice.as_dict(), "why": self.advice.why, "toml": self.recommended_toml},
            "strategies": [each.as_dict() for each in self.strategies],
            "strategy_why": list(self.strategy_why),
            "largest_classes": [
                {"weight_dtype": weights, "momentum_dtype": momentum, "placement": placement, "classes": most}
                for ((weights, momentum), placement), most in self.largest.items()
            ],
            "epoch_seconds": self.epoch_seconds(self.configured),
            "recommended_epoch_seconds": self.epoch_seconds(self.advice.choice),
            "gpu_hours": self.gpu_hours(self.configured),
            "recommended_gpu_hours": self.gpu_hours(self.advice.choice),
            "median_error": MEDIAN_ERROR,
        }

    @property
    def recommended_toml(self) -> str:
        """The keys to change in the given configuration for the recommended run, as TOML; "" where there are none."""
        run = self.advice.choice.run
        of_table: dict[str, Any] = {}
        if run.placement != self.given.head.placement.partition(":")[0]:
            of_table["placement"] = run.placement
        head_ranks = self.given.head_ranks
        if run.head_ranks != (head_ranks or run.table_ranks):
            head_ranks = run.head_ranks
        config = replace(
            run.config,
            precision=AUTO if self.given.precision == AUTO else run.config.precision,
            head_ranks=head_ranks,
            head=replace(run.config.head, **of_table),
        )
        return changes_to_toml(self.given, config)

    def run_seconds(self, of: Estimate) -> float | None:
        """Seconds of the whole run, where it has a number of steps, or the number of images is known."""
        config = of.run.config
        if config.steps is not None:
            return config.steps * of.timing.seconds
        epoch = self.epoch_seconds(of)
        return None if epoch is None or config.epochs is None else config.epochs * epoch

    def gpu_hours(self, of: Estimate) -> float | None:
        """Hours of the whole run on each GPU, summed over them, where its length is known."""
        seconds = self.run_seconds(of)
        return None if seconds is None else seconds / 3600 * of.run.world

    def epoch_seconds(self, of: Estimate) -> float | None:
        """Seconds of an epoch, where the number of images is known."""
        return None if self.images is None else self.images / of.timing.images_per_second


def plan(
    config: Config,
    classes: int | Sequence[int],
    hardware: Hardware,
    *,
    gpus: int = 1,
    gpus_per_node: int = 8,
    images: int | None = None,
    wanted: float | None = None,
) -> Plan:
    """Plan the run of ``config`` with ``classes`` classes on ``gpus`` ranks of ``hardware``.

    Args:
        config: what to train; its backbone is run once on tensors without memory.
        classes: C; of several class tables, that of each.
        hardware: what a rank has, and what links the ranks.
        gpus: ranks, one GPU each; ``gpus_per_node`` of them in a machine.
        images: of an epoch, if known.
        wanted: images per second, below which sampling is considered.

    Raises:
        UsageError: numbers that cannot be.
        CapacityError: no storage and placement of the table fits; the message says what to change.
    """
    check_ranks(gpus, gpus_per_node, config.head_ranks)
    if config.parallel.strategy != "auto":
        config.parallel.strategy_options().check_world(gpus, offload=config.parallel.offload)
    counts = [classes] if isinstance(classes, int) else list(classes)
    if min(counts) < 1:
        raise UsageError(f"--classes {min(counts)}: at least one is needed")
    if hardware.memory < GIB // 64:
        raise UsageError(f"{hardware.memory:,} bytes of memory are too little for anything; write it as 80GB or 78GiB")
    run = plan_config(with_precision(config, hardware.device.units), counts, gpus, gpus_per_node)
    given = class_tables(config)[0].config  # what is advised is for the first table of several
    why: tuple[str, ...] = ()
    if config.parallel.strategy == "auto":
        chosen = choose_strategy(run, hardware)
        run, why = chosen.estimate.run, chosen.why
    advice, largest = advise(run, hardware, wanted), _largest_by_storage(run, hardware)
    strategies = comparison(run, hardware)
    return Plan(given, hardware, estimate(run, hardware), advice, largest, strategies, why, images)


def _largest_by_storage(run: PlanConfig, hardware: Hardware) -> dict[tuple[tuple[str, str], str], int]:
    exact = replace(run.sampled(1.0), head_ranks=run.table_ranks)
    placements = ["device"] if hardware.host_memory is None else ["device", "host"]
    return {
        (storage, placement): largest_classes(replace(exact.stored_as(*storage), placement=placement), hardware)
        for placement in placements
        for storage in storages(run)
    }


def as_text(plan: Plan) -> str:
    """Everything of a plan in aligned columns."""
    sections = (_heading, _memory, _disk, _time, _strategies, _recommended, _largest, _assumptions)
    return "\n\n".join("\n".join(section(plan)) for section in sections)


def _heading(plan: Plan) -> Iterable[str]:
    run = plan.configured.run
    config, links = run.config, plan.hardware.links
    nodes = -(-run.world // run.per_node)
    linked = f"{nodes:,} node{'s' if nodes > 1 else ''}; "
    linked += f"{links.inside / 1e9:,.0f} GB/s inside a node" if run.per_node > 1 else "one GPU to a node"
    linked += f", {links.between / 1e9:,.0f} GB/s between nodes" if nodes > 1 else ""
    yield (
        f"A plan, not a measurement: times that others published are planned with a median error of "
        f"{MEDIAN_ERROR:.1%}; of plsc's own, an H100 confirmed the head's within 10%."
    )
    yield ""
    size = size_text(config.data.preprocessing.image_size)
    batches = f" and micro-batch, {run.micro_batches} micro-batches to a step" if run.micro_batches > 1 else ""
    again = {"none": "", "every_k": f"every {config.recompute_every}", "budget": f"budget {config.recompute_budget:g}"}
    recompute = f", recompute {again[config.recompute]}" if config.recompute != "none" else ""
    lacking = _lacking(config.precision, plan.hardware.device)
    precision = f"{config.precision} ({lacking})" if lacking else config.precision
    yield f"{config.backbone}, {precision}{recompute}, {run.batch} images of {size} per GPU{batches}"
    if run.world > 1 or config.parallel.offload:
        hook = config.parallel.comm_hook
        yield f"backbone: {label(run)}" + (f", comm_hook {hook}" if hook != "none" else "")
    for table in run.tables:
        share = f", {table.share:.3g} of a batch" if table.share < 1 else ""
        name = f"table {table.name}: " if table.name else ""
        if table.fixed:
            yield f"{table.fixed}: {table.classes:,} x {config.embedding_dim}, stored as {table.storage[0]}, exact"
            continue
        yield f"{name}{table.classes:,} classes x {config.embedding_dim}, {_head(table, plan.hardware.device)}{share}"
    yield (
        f"{run.world:,} GPU{'s' if run.world > 1 else ''} with {gib(plan.hardware.memory)} usable each "
        f"({plan.hardware.device.name})" + (f", {linked}" if run.world > 1 else "")
    )


def _table_dict(table: PlanConfig) -> dict[str, Any]:
    row = row_size(table) * table.config.head.centers
    return {"name": table.name, "classes": table.classes, "batch_share": table.share, "bytes_per_class": row}


def _lacking(units: str, device: Device) -> str:
    """That the device has no such units, in words; nothing where it has."""
    return "" if units in device.products else f"{device.name} has no {units} units"


def _head(run: PlanConfig, device: Device) -> str:
    rate = run.config.head.sample_rate
    sampled = "exact" if rate >= 1 else f"sampled at {rate:g}"
    where = {"device": "", "host": ", in host memory", "mmap": ", in a file"}[run.placement]
    ranks = "" if run.world == 1 else f", sharded over {run.head_ranks:,} ranks"
    products = ""
    if run.storage[0] == "float32":
        precision = run.config.head.fp32_precision
        lacking = _lacking(UNITS_OF[precision], device)
        products = f", products in {f'fp32: {lacking}' if lacking else precision}"
    return f"stored as {storage_label(run.storage)}{products}, {sampled}{ranks}{where}"


def _memory(plan: Plan) -> Iterable[str]:
    memory = plan.configured.memory
    unit, size_of = ("GiB", 2**30) if memory.total >= 2**32 else ("MiB", 2**20)

    def amount(size: float) -> str:
        return f"{size / size_of:9,.2f}"

    yield _line("Memory of the fullest GPU, as configured", f"  {unit:>9}").removeprefix("  ")
    for name, size in memory.kept.items():
        yield _line(name, amount(size))
    worst = max(memory.phases, key=lambda name: memory.phases[name])
    yield _line(f"the most of a step, in: {worst}", amount(memory.phases[worst]))
    for name, size in memory.allowed.items():
        yield _line(f"{name} (allowed for)", amount(size))
    verdict = "fits" if plan.configured.fits else "DOES NOT FIT"
    yield _line("in all", f"{amount(memory.total)}   {verdict} in {gib(plan.hardware.room)}")
    if memory.host:
        tables = plan.configured.run.tables
        where = "on its host's disk" if any(table.placement == "mmap" for table in tables) else "in its host's memory"
        yield _line(f"its share of the table, {where}", amount(memory.host))
    if memory.offloaded:
        yield _line("its share of the backbone, in its host's memory", amount(memory.offloaded))
    yield _line("a checkpoint's copy, in its host's memory", amount(memory.checkpoint))
    phases = ", ".join(f"{name} {amount(size).strip()}" for name, size in memory.phases.items())
    yield f"  (a step holds on top, in turn: {phases})"


def _disk(plan: Plan) -> Iterable[str]:
    run = plan.configured.run
    disk = plan_disk(run, profile_of(run))
    yield _line("Disk, as configured", f"  {'GB':>9}").removeprefix("  ")
    if disk.table:
        yield _line("the table's files, of each rank", f"{disk.table / 1e9:9,.3f}")
    for term in disk.of_features:
        yield _line(term.words, f"{term.nbytes / 1e9:9,.3f}   of each rank")
    count = f"{disk.checkpoints} checkpoints, the next one among them"
    yield _line(count, f"{disk.checkpoints * disk.checkpoint / 1e9:9,.3f}   {disk.checkpoint / 1e9:,.3f} each")


def _time(plan: Plan) -> Iterable[str]:
    timing = plan.configured.timing
    yield _line("Time of a step, as configured", f"  {'ms':>9}").removeprefix("  ")
    for name, seconds in timing.parts.items():
        yield _line(name, f"{seconds * 1e3:9.2f}")
    yield _line("in all", f"{timing.seconds * 1e3:9.2f}   {_rate(plan, plan.configured)}")
    if length := _length(plan, plan.configured):
        yield f"  {length}"
    for name, seconds in timing.hidden.items():
        yield _line(f"(hidden: {name}", f"{seconds * 1e3:9.2f})")


def _strategies(plan: Plan) -> Iterable[str]:
    if plan.strategy_why:
        yield 'parallel.strategy = "auto" is resolved'
        yield from (f"  {line}" for line in plan.strategy_why)
    yield "Strategies of the backbone on these ranks, all else as configured"
    for each in plan.strategies:
        fits = "" if each.fits else "   does not fit"
        on_host = f" and {gib(each.memory.offloaded)} of the host" if each.memory.offloaded else ""
        text = f"{each.timing.seconds * 1e3:9.2f} ms   {gib(each.memory.total)} of a GPU{on_host}{fits}"
        yield _line(label(each.run), text)


def _rate(plan: Plan, estimate: Estimate) -> str:
    epoch = plan.epoch_seconds(estimate)
    rate = f"{estimate.timing.images_per_second:,.0f} images/s"
    return rate if epoch is None else f"{rate}, {epoch / 3600:,.2f} hours an epoch"


def _length(plan: Plan, estimate: Estimate) -> str:
    """What the whole run takes; "" where its length is not known."""
    seconds, hours, config = plan.run_seconds(estimate), plan.gpu_hours(estimate), estimate.run.config
    if seconds is None or hours is None:
        return ""
    whole = f"{config.steps:,} steps" if config.steps is not None else f"{config.epochs:,} epochs"
    world = estimate.run.world
    gpus = f" x {world:,} GPUs = {_hours(hours)} GPU hours" if world > 1 else " of one GPU"
    return f"{whole}: {_hours(seconds / 3600)} hours{gpus}"


def _hours(hours: float) -> str:
    return f"{hours:,.1f}" if hours >= 10 else f"{hours:.2g}"


def _recommended(plan: Plan) -> Iterable[str]:
    choice = plan.advice.choice
    same = "as configured, " if choice.run == plan.configured.run else ""
    of_table = f"table {choice.run.name} " if choice.run.name else ""
    yield f"Recommended: {same}{of_table}{_head(choice.run, plan.hardware.device)}"
    yield f"  {gib(choice.memory.total)} of a GPU, {choice.timing.seconds * 1e3:,.1f} ms a step, {_rate(plan, choice)}"
    if length := _length(plan, choice):
        yield f"  {length}"
    for name, sentence in plan.advice.why.items():
        yield f"  {name:<10} {sentence}"
    if plan.recommended_toml:
        of_table = f", keys of [head] in table {choice.run.name}" if choice.run.name else ""
        yield f"  to change in the configuration{of_table}:"
        yield from (f"    {line}" for line in plan.recommended_toml.splitlines())


def _largest(plan: Plan) -> Iterable[str]:
    run = plan.configured.run
    yield f"The most classes on these GPUs{f' in table {run.name}, beside the others' if run.name else ''}, exact"
    for (storage, placement), classes in plan.largest.items():
        row = row_size(run.stored_as(*storage)) * run.config.head.centers
        where = "" if placement == "device" else ", in host memory"
        yield _line(storage_label(storage) + where, f"{classes:>15,}   ({row:,} bytes each)")


def _assumptions(plan: Plan) -> Iterable[str]:
    device = plan.hardware.device
    speeds = ", ".join(f"{name} {speed / 1e12:,.3g} TFLOP/s" for name, speed in device.products.items())
    yield "Assumed"
    yield f"  products reach {speeds}; copies {device.bandwidth / 1e9:,.0f} GB/s"
    yield f"  {SPARE_SHARE:.0%} of a GPU's {gib(plan.hardware.memory)} stays free"
    yield f"  a backbone reaches {BACKBONE_SHARE:.0%} of what its operations allow at these speeds"
    yield f"  the head's products reach {HEAD_SHARE:.0%} of the speed of large ones"
    yield "  images are there when they are needed: reading and decoding them is not planned"
    for section in plan.configured.run.config.features_on:
        yield from (f"  {line}" for line in section.plan_notes())


def _line(name: str, value: str) -> str:
    return f"  {name:<{_WIDTH}}{value}"
