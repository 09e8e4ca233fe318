"""The whole plan: the setup as configured, the setup recommended, and the most classes of each storage."""

from dataclasses import dataclass, replace
from typing import Any

from plsc.config import Config
from plsc.errors import UsageError
from plsc.plan.advice import Advice, advise, storages
from plsc.plan.devices import GIB
from plsc.plan.estimate import Estimate, Machine, estimate, largest_classes, profile_of
from plsc.plan.memory import row_bytes
from plsc.plan.setup import Setup, check_ranks


@dataclass(frozen=True)
class Plan:
    """``largest`` maps (storage, placement) to the most classes that the exact softmax could have on these ranks."""

    machine: Machine
    configured: Estimate
    advice: Advice
    largest: dict[tuple[tuple[str, str], str], int]
    images: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON: bytes, seconds, images per second."""
        setup, device = self.configured.setup, self.machine.device
        profile = profile_of(setup)
        return {
            "classes": setup.classes,
            "embedding_dim": setup.config.embedding_dim,
            "backbone": setup.config.backbone,
            "gpus": setup.world,
            "gpus_per_node": setup.per_node,
            "gpu_memory": self.machine.memory,
            "device": {"name": device.name, "flops": device.products, "bandwidth": device.bandwidth},
            "links": {"inside": self.machine.links.inside, "between": self.machine.links.between},
            "bytes_per_class": sum(row_bytes(setup.config).values()) * setup.config.head.centers,
            "backbone_flops_per_image": profile.flops / profile.images,
            "activation_bytes_per_image": profile.activations / profile.images,
            "configured": self.configured.as_dict(),
            "recommended": {**self.advice.choice.as_dict(), "why": self.advice.why},
            "largest_classes": [
                {"weight_dtype": weights, "momentum_dtype": momentum, "placement": placement, "classes": most}
                for ((weights, momentum), placement), most in self.largest.items()
            ],
            "epoch_seconds": self.epoch_seconds(self.configured),
            "recommended_epoch_seconds": self.epoch_seconds(self.advice.choice),
        }

    def epoch_seconds(self, of: Estimate) -> float | None:
        """Seconds of an epoch, where the number of images is known."""
        return None if self.images is None else self.images / of.timing.images_per_second


def plan(
    config: Config,
    classes: int,
    machine: Machine,
    *,
    gpus: int = 1,
    gpus_per_node: int = 8,
    images: int | None = None,
    wanted: float | None = None,
) -> Plan:
    """Plan the run of ``config`` with ``classes`` classes on ``gpus`` ranks of ``machine``.

    Args:
        config: what to train; its backbone is run once on tensors without memory.
        classes: C.
        machine: what a rank has, and what links the ranks.
        gpus: ranks, one GPU each; ``gpus_per_node`` of them to a machine.
        images: of an epoch, if known.
        wanted: images per second, below which sampling is considered.

    Raises:
        UsageError: numbers that cannot be.
        CapacityError: no storage and placement of the table fits; the message says what to change.
    """
    check_ranks(gpus, gpus_per_node, config.head_ranks)
    if classes < 1:
        raise UsageError(f"--classes {classes}: at least one is needed")
    if machine.memory < GIB // 64:
        raise UsageError(f"{machine.memory:,} bytes of memory are too little for anything; write it as 80GB or 78GiB")
    placement = config.head.placement.partition(":")[0]
    setup = Setup(config, classes, gpus, min(gpus_per_node, gpus), config.head_ranks or gpus, placement)
    advice = advise(setup, machine, wanted)
    return Plan(machine, estimate(setup, machine), advice, _largest(setup, machine), images)


def _largest(setup: Setup, machine: Machine) -> dict[tuple[tuple[str, str], str], int]:
    exact = replace(setup.sampled(1.0), head_ranks=setup.world)
    placements = ["device"] if machine.host_memory is None else ["device", "host"]
    return {
        (storage, placement): largest_classes(replace(exact.stored_as(*storage), placement=placement), machine)
        for placement in placements
        for storage in storages(setup)
    }
