"""Estimates of memory and time for one way to store and place the class table, and the choice among all ways."""

import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from plsc.config import Config, DataConfig, OptimConfig
from plsc.devices import GIB, Device
from plsc.errors import PlscError
from plsc.plan.backbone import BackboneProfile, profile_backbone
from plsc.plan.backbone_memory import frees_gradients
from plsc.plan.devices import Links
from plsc.plan.memory import Memory, plan_memory, row_size
from plsc.plan.plan_config import STORAGES, UNITS_OF, PlanConfig
from plsc.plan.timing import Timing, plan_time

_MANY = 10**10  # classes whose shard is larger than any chunk
TIE = 0.02  # of a step's time, by which a less exact or less simple run has to be faster to be taken
_SAMPLE_RATES = (0.5, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01)
_SHARE_TO_KEEP = 0.9  # of the memory that is free, for exponentials: an allocator has fragments
_MOST_GPUS = 1 << 14
# Of a device's memory that no plan promises: 50 million classes x 512 on a card of 80 GB would leave 0.2 of 78 GiB,
# less than the allowance for an allocator's fragments can be off by.
SPARE_SHARE = 0.01


class CapacityError(PlscError):
    """The run fits in no way; the message says what to change."""


@dataclass(frozen=True)
class Hardware:
    """A rank's device, its usable bytes, the links, and a node's bytes for tables in host memory (None: not known)."""

    device: Device
    memory: int
    links: Links
    host_memory: int | None = None

    @property
    def room(self) -> int:
        """Bytes of a device that a plan may take."""
        return int((1 - SPARE_SHARE) * self.memory)


@dataclass(frozen=True)
class Estimate:
    """A run with its bytes and seconds."""

    run: PlanConfig
    memory: Memory
    timing: Timing
    fits: bool

    def as_dict(self) -> dict[str, Any]:
        """For JSON; bytes and seconds."""
        config = self.run.config
        sources = {
            self.run: ("placement", "head_ranks", "shard_ranks", "tp", "pp"),
            config.head: ("weight_dtype", "momentum_dtype", "fp32_precision", "sample_rate"),
            config.parallel: ("strategy", "offload", "comm_hook"),
        }
        return {
            **{name: getattr(source, name) for source, names in sources.items() for name in names},
            "batch_size": self.run.batch,
            "fits": self.fits,
            "memory": self.memory.as_dict(),
            "seconds": self.timing.seconds,
            "seconds_by_part": self.timing.parts,
            "seconds_hidden": self.timing.hidden,
            "images_per_second": self.timing.images_per_second,
        }


def estimate(run: PlanConfig, hardware: Hardware) -> Estimate:
    """Estimate bytes and seconds of ``run`` on ``hardware``."""
    profile = profile_of(run)
    memory = plan_memory(run, profile, hardware.device)
    in_host = (memory.host if run.placement == "host" else 0) + memory.offloaded
    has_room = hardware.host_memory is not None and in_host * run.per_node <= hardware.host_memory
    fits = memory.total <= hardware.room and (not in_host or has_room)
    return Estimate(run, memory, plan_time(run, profile, hardware.device, hardware.links), fits)


def profile_of(run: PlanConfig) -> BackboneProfile:
    """Return the backbone's profile, computed once for each batch, size, precision and set of frozen weights."""
    config = run.config
    kept = ("recompute", "recompute_every", "recompute_budget")
    same = ("backbone", "embedding_dim", "precision", "features", "stage", *kept)
    alike = Config(
        **{name: getattr(config, name) for name in same},
        init_weights=config.init_weights if config.backbone.startswith("timm:") else "",
        data=DataConfig(image_size=config.data.image_size, batch_size=run.batch),
        optim=OptimConfig(groups=config.optim.groups),
    )
    return _profile(alike, frees_gradients(run))


def largest_classes(run: PlanConfig, hardware: Hardware) -> int:
    """Return the most classes that ``run`` could have on ``hardware``; 0 where none fits."""
    row = row_size(run)
    many = replace(run, classes=_MANY)
    memory = plan_memory(many, profile_of(many), hardware.device)
    if run.placement == "host":
        if hardware.host_memory is None or memory.total > hardware.room:
            return 0
        rows = hardware.host_memory // run.per_node // row
    else:
        rows = (hardware.room - (memory.total - row * many.rows)) // row
    return max(rows // run.config.head.centers, 0) * run.head_ranks


@functools.cache
def _profile(config: Config, keep_gradients: bool) -> BackboneProfile:
    from plsc.train.components import make_backbone
    from plsc.train.feature import overriding

    backbone = make_backbone(config)
    for prepare in overriding((section.make(config) for section in config.features_on), "prepare"):
        prepare(backbone)
    # synchronised batch normalisation keeps on a GPU what the ordinary one does: its input and two numbers per channel
    size = config.data.preprocessing.image_size
    return profile_backbone(backbone, config.data.batch_size, size, config.precision, keep_gradients=keep_gradients)


@dataclass(frozen=True)
class Advice:
    """The recommended run, with a sentence for each choice in it."""

    choice: Estimate
    why: dict[str, str]


def advise(run: PlanConfig, hardware: Hardware, wanted: float | None = None) -> Advice:
    """Choose storage, sample rate, placement and groups for the same classes, backbone and batch on the same ranks.

    What is configured stays, unless it does not fit, is sampled, is in a precision that the device lacks, or another
    setup is faster by more than 2%.

    Args:
        run: what the configuration asks for; its storage, sample rate, placement and groups are what is chosen.
        hardware: what it runs on.
        wanted: images per second. Sampling is recommended only where no exact setup reaches it and a sampled one does.

    Raises:
        CapacityError: nothing fits.
    """
    exact = replace(run.sampled(1.0).suited_to(hardware.device), placement="device")
    fitting = _fitting(exact, hardware)
    if not fitting:
        raise CapacityError(_what_to_change(exact, hardware))
    choice = fastest(fitting)
    kept = estimate(exact, hardware)  # storage and groups as configured
    if kept.fits and kept.timing.seconds <= choice.timing.seconds * (1 + TIE):
        choice = kept
    if wanted is not None and choice.timing.images_per_second < wanted:
        choice = _sampled(choice, hardware, wanted)
    why = {
        "change": _why_change(choice, estimate(run, hardware)),
        "storage": _why_storage(choice, hardware),
        "sampling": _why_sampling(choice, hardware, wanted),
        "placement": _why_placement(choice, hardware),
        "groups": _why_groups(choice, hardware),
        **_why_precision(choice.run.config, run.config, hardware.device),
    }
    return Advice(choice, why)


def storages(run: PlanConfig) -> Iterator[tuple[str, str]]:
    """Yield the storages that the configuration's optimizer supports."""
    for weights, momentum in STORAGES:
        if momentum != "none" or run.config.optim.head_name == "sgd":
            yield weights, momentum


def _fitting(exact: PlanConfig, hardware: Hardware) -> list[Estimate]:
    """Setups that fit: on the device with momentum if any does, else without, else in host memory."""
    stored = list(storages(exact))
    with_momentum, without = ([each for each in stored if (each[1] != "none") == kept] for kept in (True, False))
    host = replace(exact, placement="host")
    for run, choices in ((exact, with_momentum), (exact, without), (host, with_momentum)):
        found = [each for each in _estimates(run, choices, hardware) if each.fits]
        if found:
            return found
    return []


def _estimates(run: PlanConfig, stored: Iterable[tuple[str, str]], hardware: Hardware) -> Iterator[Estimate]:
    for weights, momentum in stored:
        for ranks in (each for each in range(run.table_ranks, 0, -1) if run.table_ranks % each == 0):
            yield estimate(replace(run.stored_as(weights, momentum), head_ranks=ranks), hardware)


def fastest(found: list[Estimate]) -> Estimate:
    """The first that no other is more than 2% faster than: the most exact, or the simplest, comes first."""
    most = max(each.timing.images_per_second for each in found)
    return next(each for each in found if each.timing.images_per_second * (1 + TIE) >= most)


def _sampled(choice: Estimate, hardware: Hardware, wanted: float) -> Estimate:
    """The largest sample rate that reaches ``wanted``, or ``choice`` where none does."""
    for rate in _SAMPLE_RATES:
        candidates = _estimates(choice.run.sampled(rate), [choice.run.storage], hardware)
        fast = [e for e in candidates if e.fits and e.timing.images_per_second >= wanted]
        if fast:
            return fastest(fast)
    return choice


def _why_change(choice: Estimate, configured: Estimate) -> str:
    """Say what the recommended setup has over the configured one."""
    if choice.run == configured.run:
        return f"none: as configured it fits, and no other exact setup is faster by more than {TIE:.0%}."
    if not configured.fits:
        return f"as configured it does not fit: a GPU would need {gib(configured.memory.total)}."
    gain = configured.timing.seconds / choice.timing.seconds - 1
    speed = f"{abs(gain):.1%} {'faster' if gain >= 0 else 'slower'} than as configured"
    rate, was = choice.run.config.head.sample_rate, configured.run.config.head.sample_rate
    if rate == 1 and was < 1:
        return f"exact in place of sampled at {was:g}: every class is trained in every step; {speed}."
    return f"{speed}."


def _why_precision(choice: Config, configured: Config, device: Device) -> dict[str, str]:
    """Say which configured precisions the device has no units for, where that is so."""
    pairs = {
        "precision": (choice.precision, configured.precision),
        "head.fp32_precision": (choice.head.fp32_precision, configured.head.fp32_precision),
    }
    changed = {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
    if not changed:
        return {}
    lacking = dict.fromkeys(UNITS_OF.get(was, was) for _, was in changed.values())
    texts = [f"{key} = {now} in place of {was}" for key, (now, was) in changed.items()]
    return {"precision": f"{', '.join(texts)}: {device.name} has no {' and no '.join(lacking)} units."}


def _why_storage(choice: Estimate, hardware: Hardware) -> str:
    run = choice.run
    row = row_size(run)
    text = f"{storage_label(run.storage)}: {row:,} bytes of state per class"
    if run.storage == STORAGES[0]:
        return f"{text}, the most exact storage; it fits, and no other makes the step more than {TIE:.0%} faster."
    float32 = estimate(run.stored_as(*STORAGES[0]), hardware)
    if not float32.fits:
        needed = float32.memory.total if run.placement == "device" else float32.memory.host
        return f"{text}; in float32 a GPU's part would need {gib(needed)} and does not fit."
    ratio = float32.timing.seconds / choice.timing.seconds
    if ratio <= 1 + TIE:
        return f"{text}; float32 + float32 fits too and is as fast: the more exact storage."
    return f"{text}; in float32 it fits too, but a step takes {ratio:.1f} times as long."


def _why_sampling(choice: Estimate, hardware: Hardware, wanted: float | None) -> str:
    rate = choice.run.config.head.sample_rate
    if rate < 1:
        return f"sampled at {rate:g}: the exact softmax does not reach the {wanted:,.0f} images/s asked for; this does."
    tenth = estimate(choice.run.sampled(0.1), hardware).timing.images_per_second
    gain = tenth / choice.timing.images_per_second
    text = f"exact: every class takes part in every step; sampling a tenth would give {gain:.2f} times the images/s."
    if wanted is not None and choice.timing.images_per_second < wanted:
        text += f" Neither it nor any sample rate reaches {wanted:,.0f} images/s: the backbone takes the time."
    return text


def _why_placement(choice: Estimate, hardware: Hardware) -> str:
    spare = hardware.memory - choice.memory.total
    if choice.run.placement == "host":
        return "host: no storage of the table fits into the GPUs' memory; in the host's it does, at the bus's speed."
    kept = _with_exponentials(choice, hardware)
    return f"device: everything fits into the GPU's memory, with {gib(spare)} to spare.{kept}"


def _with_exponentials(choice: Estimate, hardware: Hardware) -> str:
    """What the memory to spare would do for the head, where that is more than a tie."""
    run, head = choice.run, choice.run.config.head
    free = _SHARE_TO_KEEP * (hardware.room - choice.memory.total) / run.micro_batches  # each waits with its own
    amount = min(int(free / GIB), math.ceil(run.visited_rows * run.group_batch * run.weight_width / GIB))
    if head.exponentials_memory or amount < 1:
        return ""
    keeping = replace(run.config, head=replace(head, exponentials_memory=f"{amount}GiB"))
    kept = estimate(replace(run, config=keeping), hardware)
    if not kept.fits or kept.timing.seconds * (1 + TIE) >= choice.timing.seconds:
        return ""
    gain = choice.timing.seconds / kept.timing.seconds
    return f' head.exponentials_memory = "{amount}GiB" would make a step {gain:.2f} times as fast.'


def _why_groups(choice: Estimate, hardware: Hardware) -> str:
    run = choice.run
    if run.world == 1:
        return "one rank holds the whole table."
    whole = estimate(replace(run, head_ranks=run.table_ranks), hardware)
    if run.head_ranks == run.table_ranks:
        return (
            f"the table is sharded over all {run.table_ranks:,} ranks: copies would have to exchange their gradients."
        )
    ratio = whole.timing.seconds / choice.timing.seconds
    return (
        f"the table is sharded over {run.head_ranks} ranks and replicated {run.replicas} times: a rank gathers "
        f"{run.group_batch:,} embeddings instead of {run.batch * run.data_ranks:,}; sharded over all ranks, a "
        f"step takes {ratio:.2f} times as long."
    )


def _what_to_change(exact: PlanConfig, hardware: Hardware) -> str:
    """Say in one line what is lacking, and what would fix it."""
    stored = list(storages(exact))[-1]
    smallest = replace(exact.stored_as(*stored), head_ranks=exact.table_ranks)
    memory = plan_memory(smallest, profile_of(smallest), hardware.device)
    table = row_size(smallest) * smallest.rows
    ranks = f"{exact.world:,} GPU{'s' if exact.world > 1 else ''} of {gib(hardware.memory)}"
    if memory.total - table > hardware.room:
        return (
            f"a batch of {exact.batch} with {exact.config.backbone} takes {gib(memory.total - table)} without any "
            f"class table, and there are {ranks}; lower data.batch_size (and raise optim.accumulate)"
        )
    fixes = [f"give --gpus {more:,}" for more in _enough_gpus(smallest, hardware)]
    fixes += ["GPUs with more memory", "(more) --host-memory for a table in the hosts'", "a smaller embedding_dim"]
    return (
        f"{exact.classes:,} classes x {exact.config.embedding_dim} do not fit on {ranks}: stored as "
        f"{storage_label(stored)} a GPU still needs {gib(memory.total)}; {', or '.join(fixes)}"
    )


def _enough_gpus(smallest: PlanConfig, hardware: Hardware) -> Iterator[int]:
    """The first doubling of the ranks that fits, if any does."""
    world = 2 * smallest.world
    while world <= _MOST_GPUS:
        if estimate(replace(smallest, world=world, head_ranks=world // smallest.pp), hardware).fits:
            yield world
            return
        world *= 2


def storage_label(storage: tuple[str, str]) -> str:
    """``bfloat16 + int8``; a table without momentum by name."""
    weights, momentum = storage
    return f"{weights} + {momentum}" if momentum != "none" else f"{weights} without momentum"


def gib(size: float) -> str:
    """Bytes for people."""
    return f"{size / GIB:,.1f} GiB"
