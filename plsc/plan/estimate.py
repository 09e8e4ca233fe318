"""One setup on one kind of machine: bytes, seconds, whether it fits, and the most classes that would."""

import functools
from dataclasses import dataclass, replace
from typing import Any

from plsc.plan.backbone import BackboneProfile, profile_backbone
from plsc.plan.devices import Device
from plsc.plan.memory import Memory, as_dict, keeps_gradients, plan_memory, row_bytes
from plsc.plan.setup import Setup
from plsc.plan.timing import Links, Timing, plan_time

_MANY = 10**10  # classes whose shard is larger than any chunk


@dataclass(frozen=True)
class Machine:
    """A rank's device, its usable bytes, the links, and a node's bytes for tables in host memory (None: not known)."""

    device: Device
    memory: int
    links: Links
    host_memory: int | None = None


@dataclass(frozen=True)
class Estimate:
    """A setup with its bytes and seconds."""

    setup: Setup
    memory: Memory
    timing: Timing
    fits: bool

    def as_dict(self) -> dict[str, Any]:
        """For JSON; bytes and seconds."""
        setup = self.setup
        weights, momentum = setup.storage
        return {
            "weight_dtype": weights,
            "momentum_dtype": momentum,
            "sample_rate": setup.config.head.sample_rate,
            "placement": setup.placement,
            "head_ranks": setup.head_ranks,
            "batch_size": setup.batch,
            "fits": self.fits,
            "memory": as_dict(self.memory),
            "seconds": self.timing.seconds,
            "seconds_by_part": self.timing.parts,
            "seconds_hidden": self.timing.hidden,
            "images_per_second": self.timing.images_per_second,
        }


def estimate(setup: Setup, machine: Machine) -> Estimate:
    """Bytes and seconds of ``setup`` on ``machine``."""
    profile = profile_of(setup)
    memory = plan_memory(setup, profile, machine.device)
    on_host = machine.host_memory is not None and memory.host * setup.per_node <= machine.host_memory
    fits = memory.total <= machine.memory and (setup.placement != "host" or on_host)
    return Estimate(setup, memory, plan_time(setup, profile, machine.device, machine.links), fits)


def profile_of(setup: Setup) -> BackboneProfile:
    """The backbone's, found once for each batch, size and precision."""
    config = setup.config
    return _profile(
        config.backbone,
        config.embedding_dim,
        config.data.image_size,
        config.data.batch_size,
        config.precision,
        config.sync_batchnorm,
        keeps_gradients(setup),
    )


def largest_classes(setup: Setup, machine: Machine) -> int:
    """The most classes that ``setup`` could have on ``machine``; 0 where it does not fit with any."""
    row = sum(row_bytes(setup.config).values())
    many = replace(setup, classes=_MANY)
    memory = plan_memory(many, profile_of(many), machine.device)
    if setup.placement == "host":
        if machine.host_memory is None or memory.total > machine.memory:
            return 0
        rows = machine.host_memory // setup.per_node // row
    else:
        rows = (machine.memory - (memory.total - row * many.rows)) // row
    return max(rows // setup.config.head.centers, 0) * setup.head_ranks


@functools.cache
def _profile(
    name: str, dim: int, image_size: int, batch: int, precision: str, sync_batchnorm: bool, keep_gradients: bool
) -> BackboneProfile:
    import torch

    from plsc.models import create
    from plsc.parallel import Mesh, convert_sync_batchnorm

    backbone: torch.nn.Module = create(name, embedding_dim=dim, image_size=image_size)
    if sync_batchnorm:
        backbone = convert_sync_batchnorm(backbone, Mesh(0, 1, 0, torch.device("cpu")))
    return profile_backbone(backbone, batch, image_size, precision, keep_gradients=keep_gradients)
