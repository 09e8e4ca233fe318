"""Which storage, sample rate, placement and group size to take, and why; or what to change where nothing fits."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from plsc.errors import PlscError
from plsc.plan.devices import GIB
from plsc.plan.estimate import Estimate, Machine, estimate, profile_of
from plsc.plan.memory import plan_memory, row_bytes
from plsc.plan.setup import STORAGES, Setup

_TIE = 0.02  # a step's time that two setups may differ by before the faster one is taken over the more exact one
_SAMPLE_RATES = (0.5, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01)
_MOST_GPUS = 1 << 14


class CapacityError(PlscError):
    """What is planned for fits in no way; the message says what to change."""


@dataclass(frozen=True)
class Advice:
    """A setup that fits, with a sentence for each choice in it."""

    choice: Estimate
    why: dict[str, str]


def advise(setup: Setup, machine: Machine, wanted: float | None = None) -> Advice:
    """The best setup for the same classes, backbone and batch on the same ranks.

    Args:
        setup: what the configuration asks for; its storage, sample rate, placement and groups are what is chosen.
        machine: what it runs on.
        wanted: images per second. Sampling is recommended only where no exact setup reaches it and a sampled one does.

    Raises:
        CapacityError: nothing fits.
    """
    exact = replace(setup.sampled(1.0), placement="device")
    fitting = _fitting(exact, machine)
    if not fitting:
        raise CapacityError(_what_to_change(exact, machine))
    choice = _best(fitting)
    if wanted is not None and choice.timing.images_per_second < wanted:
        choice = _sampled(choice, machine, wanted)
    return Advice(choice, _reasons(choice, machine, wanted))


def storages(setup: Setup) -> Iterator[tuple[str, str]]:
    """The storages that the configuration's optimizer can work with."""
    for weights, momentum in STORAGES:
        if momentum != "none" or setup.config.optim.name == "sgd":
            yield weights, momentum


def group_sizes(world: int) -> list[int]:
    """Over how many ranks a table can be sharded, most first."""
    return [ranks for ranks in range(world, 0, -1) if world % ranks == 0]


def _fitting(exact: Setup, machine: Machine) -> list[Estimate]:
    """Setups that fit: on the device with momentum if any does, else without, else in host memory."""
    stored = list(storages(exact))
    with_momentum = [s for s in stored if s[1] != "none"]
    without = [s for s in stored if s[1] == "none"]
    host = replace(exact, placement="host")
    for setup, choices in ((exact, with_momentum), (exact, without), (host, with_momentum)):
        found = [e for e in _estimates(setup, choices, machine) if e.fits]
        if found:
            return found
    return []


def _estimates(setup: Setup, stored: Iterable[tuple[str, str]], machine: Machine) -> Iterator[Estimate]:
    for weights, momentum in stored:
        for ranks in group_sizes(setup.world):
            yield estimate(replace(setup.stored_as(weights, momentum), head_ranks=ranks), machine)


def _best(fitting: list[Estimate]) -> Estimate:
    """The fastest; among those as good as it the first, which is the most exact and takes least memory."""
    least = min(e.timing.seconds for e in fitting)
    return next(e for e in fitting if e.timing.seconds <= least * (1 + _TIE))


def _sampled(choice: Estimate, machine: Machine, wanted: float) -> Estimate:
    """The largest sample rate that reaches ``wanted``, or ``choice`` where none does."""
    for rate in _SAMPLE_RATES:
        candidates = _estimates(choice.setup.sampled(rate), [choice.setup.storage], machine)
        fast = [e for e in candidates if e.fits and e.timing.images_per_second >= wanted]
        if fast:
            return _best(fast)
    return choice


def _reasons(choice: Estimate, machine: Machine, wanted: float | None) -> dict[str, str]:
    return {
        "storage": _why_storage(choice, machine),
        "sampling": _why_sampling(choice, machine, wanted),
        "placement": _why_placement(choice, machine),
        "groups": _why_groups(choice, machine),
    }


def _why_storage(choice: Estimate, machine: Machine) -> str:
    setup = choice.setup
    row = sum(row_bytes(setup.config).values())
    text = f"{spoken(setup.storage)}: {row:,} bytes of state per class"
    if setup.storage == STORAGES[0]:
        return f"{text}, the most exact storage; it fits, and no other makes the step more than {_TIE:.0%} faster."
    wide = estimate(setup.stored_as(*STORAGES[0]), machine)
    if not wide.fits:
        needed = wide.memory.total if setup.placement == "device" else wide.memory.host
        return f"{text}; in float32 a GPU's part would need {gib(needed)} and does not fit."
    ratio = wide.timing.seconds / choice.timing.seconds
    return f"{text}; in float32 it fits too, but a step takes {ratio:.1f} times as long."


def _why_sampling(choice: Estimate, machine: Machine, wanted: float | None) -> str:
    rate = choice.setup.config.head.sample_rate
    if rate < 1:
        return f"sampled at {rate:g}: the exact softmax does not reach the {wanted:,.0f} images/s asked for; this does."
    tenth = estimate(choice.setup.sampled(0.1), machine).timing.images_per_second
    gain = tenth / choice.timing.images_per_second
    text = f"exact: every class takes part in every step; sampling a tenth would give {gain:.2f} times the images/s."
    if wanted is not None and choice.timing.images_per_second < wanted:
        text += f" Neither it nor any sample rate reaches {wanted:,.0f} images/s: the backbone takes the time."
    return text


def _why_placement(choice: Estimate, machine: Machine) -> str:
    spare = machine.memory - choice.memory.total
    if choice.setup.placement == "host":
        return "host: no storage of the table fits into the GPUs' memory; in the host's it does, at the bus's speed."
    return f"device: everything fits into the GPU's memory, with {gib(spare)} to spare."


def _why_groups(choice: Estimate, machine: Machine) -> str:
    setup = choice.setup
    if setup.world == 1:
        return "one rank holds the whole table."
    whole = estimate(replace(setup, head_ranks=setup.world), machine)
    if setup.head_ranks == setup.world:
        return f"the table is sharded over all {setup.world:,} ranks: copies would have to exchange their gradients."
    ratio = whole.timing.seconds / choice.timing.seconds
    return (
        f"the table is sharded over {setup.head_ranks} ranks and replicated {setup.replicas} times: a rank gathers "
        f"{setup.group_batch:,} embeddings instead of {setup.batch * setup.world:,}; sharded over all ranks, a step "
        f"takes {ratio:.2f} times as long."
    )


def _what_to_change(exact: Setup, machine: Machine) -> str:
    """One line: what is lacking, and what would mend it."""
    stored = list(storages(exact))[-1]
    smallest = replace(exact.stored_as(*stored), head_ranks=exact.world)
    memory = plan_memory(smallest, profile_of(smallest), machine.device)
    table = sum(row_bytes(smallest.config).values()) * smallest.rows
    ranks = f"{exact.world:,} GPU{'s' if exact.world > 1 else ''} of {gib(machine.memory)}"
    if memory.total - table > machine.memory:
        return (
            f"a batch of {exact.batch} with {exact.config.backbone} takes {gib(memory.total - table)} without any "
            f"class table, and there are {ranks}; lower data.batch_size (and raise optim.accumulate)"
        )
    mend = [f"give --gpus {more:,}" for more in _enough_gpus(smallest, machine)]
    mend += ["GPUs with more memory", "(more) --host-memory for a table in the hosts'", "a smaller embedding_dim"]
    return (
        f"{exact.classes:,} classes x {exact.config.embedding_dim} do not fit on {ranks}: stored as {spoken(stored)} "
        f"a GPU still needs {gib(memory.total)}; {', or '.join(mend)}"
    )


def _enough_gpus(smallest: Setup, machine: Machine) -> Iterator[int]:
    """The first doubling of the ranks that fits, if any does."""
    world = 2 * smallest.world
    while world <= _MOST_GPUS:
        if estimate(replace(smallest, world=world, head_ranks=world), machine).fits:
            yield world
            return
        world *= 2


def spoken(storage: tuple[str, str]) -> str:
    """``bfloat16 + int8``; a table without momentum by name."""
    weights, momentum = storage
    return f"{weights} + {momentum}" if momentum != "none" else f"{weights} without momentum"


def gib(size: float) -> str:
    """Bytes for people."""
    return f"{size / GIB:,.1f} GiB"
