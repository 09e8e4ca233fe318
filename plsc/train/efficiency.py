"""Efficiency of a run: model FLOP/s and their share of the devices' peak, the parts of a step, memory, power.

Model FLOPs are those that the mathematics of a step needs, an addition counted as well as a multiplication, and each
once, however often an implementation computes it (Chowdhery et al., PaLM, 2022, appendix B): neither recomputed
activations nor the class head's second pass over its logits count. With images/s over all ranks,

    mfu = flops_per_image · images_per_second / peak_flops_per_second

- of the backbone, every product of the forward and the backward pass, as torch's FlopCounterMode counts them on fake
  tensors; attention as its plain formula has it.
- of the class head, 6·D·S: 2·D·S for the logits of S class centres of D numbers, as much for the gradient of the
  embedding, and for that of the centres. S are all centres or, where classes are sampled, those of a step.
- the peak is that of one device times the ranks, in the precision in which it is fastest, whatever the run computes
  in: :func:`plsc.devices.peak_flops`.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from plsc.devices import known_device, peak_flops
from plsc.head.class_table import class_range
from plsc.models.preprocessing import ImageSize, height_and_width
from plsc.models.recompute import compute_once
from plsc.parallel.collectives import all_gather_numbers
from plsc.parallel.mesh import Mesh
from plsc.parallel.step_timeline import BACKBONE, DATA, HEAD, OPTIMIZER, OTHER, StepTimeline
from plsc.sizes import peak_resident_bytes
from plsc.train.components import TrainComponents

_SHOWN_WAIT = 0.05  # share of a step from which the wait for data is part of the progress line
_UNKNOWN = -1  # among integers that ranks exchange
_OWN_PARTS = (DATA, BACKBONE, HEAD, OPTIMIZER, OTHER)  # in which a rank does not wait for others


@dataclass(frozen=True)
class BackboneFlops:
    """FLOPs of a backbone for one image in each pass."""

    forward: int
    backward: int


def backbone_flops(template: nn.Module, image_size: ImageSize) -> BackboneFlops:
    """Count the products of a training pass.

    Args:
        template: on the meta device; weights that require no gradient have none.
        image_size: side of the square images, or (height, width).
    """
    from torch.utils.flop_counter import FlopCounterMode  # late: it takes long to import

    images = 2  # the least that batch normalisation takes
    model = compute_once(copy.deepcopy(template)).train()
    x = torch.empty(images, 3, *height_and_width(image_size), device="meta")
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        embeddings = model(x)
        forward = counter.get_total_flops()
        if embeddings.requires_grad:
            embeddings.sum().backward()
    return BackboneFlops(forward // images, (counter.get_total_flops() - forward) // images)


def centers_in_step(num_classes: int, centers: int, sample_rate: float, shards: int, batch: int) -> float:
    """The class centres S that take part in a step: all, or those of the sampled classes.

    Each shard samples its share of the classes, or takes the distinct classes of the batch, if these are more: their
    number is the one to expect of labels that are drawn uniformly.

    Args:
        num_classes: of the table.
        centers: of a class.
        sample_rate: the share of the classes that is sampled.
        shards: of the table.
        batch: samples that come to the head together, of all ranks.
    """
    if sample_rate >= 1:
        return num_classes * centers
    taken = 0.0
    for shard in range(shards):
        first, stop = class_range(num_classes, shard, shards)
        distinct = (stop - first) * (1 - (1 - 1 / num_classes) ** batch)
        taken += min(max(round(sample_rate * (stop - first)), distinct), stop - first)
    return taken * centers


def head_flops(dim: int, centers: float, *, trains_backbone: bool = True) -> float:
    """FLOPs of the class head for one sample: logits, the gradient of the embedding, that of the centres."""
    return (6 if trains_backbone else 4) * dim * centers


class EfficiencyMeter:
    """Tells how well a run uses its devices.

    Args:
        components: of the run.
        timeline: of its steps.

    Attributes:
        own_seconds: of each rank, by the parts of the steps before the last line in which no rank waits for others.
    """

    def __init__(self, components: TrainComponents, timeline: StepTimeline) -> None:
        self._components, self._timeline = components, timeline
        self._mesh = components.voters
        self._backbone: BackboneFlops | None = None
        self._peak, self._peak_precision = 0.0, ""
        if components.mesh.is_main:
            self._backbone = backbone_flops(
                components.strategy.template, components.config.data.preprocessing.image_size
            )
            peak, self._peak_precision = peak_flops(self._mesh.device)
            self._peak = peak * self._mesh.world_size
        self._power_is_known = self._mesh.device.type == "cuda"
        self._waiting_share = 0.0
        self.own_seconds: list[dict[str, float]] = []

    def flops_per_image(self) -> float:
        """Model FLOPs that backbone and head take for an image in the present stage; 0 on ranks but the first."""
        if self._backbone is None:
            return 0.0
        components = self._components
        trains_backbone = components.trains_backbone
        backbone = self._backbone.forward + (self._backbone.backward if trains_backbone else 0)
        # replicas of the table take the classes of all their samples, so that they stay equal
        batch = components.config.data.batch_size * components.strategy.data_ranks // components.strategy.micro_batches
        shares = sum(table.of.share for table in components.tables)
        of_heads = 0.0
        for table in components.tables:
            head, share = table.head, table.of.share / shares
            shards = head.mesh.head.world_size
            centers = centers_in_step(
                max(head.num_classes, 1), head.centers, head.sample_rate, shards, round(batch * share)
            )
            of_heads += share * head_flops(head.dim, centers, trains_backbone=trains_backbone)
        if trains_backbone:
            of_heads += sum(feature.flops_per_image() for feature in components.features.values())
        return backbone + of_heads

    def utilisation(self, images_per_second: float) -> float | None:
        """The share of the devices' peak; None where that is unknown."""
        return self.flops_per_image() * images_per_second / self._peak if self._peak else None

    def line(self, images_per_second: float) -> dict[str, Any]:
        """The values of a line of metrics; every rank calls.

        ``time`` is the first rank's mean step since the line before, ``peak_memory_bytes`` that of the rank with most
        since it began, ``power_watts`` that of all GPUs.
        """
        taken = self._timeline.take()
        split = taken.per_step()
        self._waiting_share = split[DATA] / max(split["step"], 1e-9) if split else 0.0
        memory, power = self._of_all_ranks(taken.seconds)
        return {
            "images_per_second": images_per_second,
            "flops_per_image": self.flops_per_image(),
            "peak_flops_per_second": self._peak or None,
            "mfu": self.utilisation(images_per_second),
            "time": split,
            "peak_memory_bytes": memory,
            "power_watts": power,
        }

    def notes(self, images_per_second: float) -> list[str]:
        """What the progress line says beside its images per second."""
        utilisation = self.utilisation(images_per_second)
        notes = [] if utilisation is None else [f"MFU {utilisation:.{0 if utilisation >= 0.1 else 1}%}"]
        if self._waiting_share >= _SHOWN_WAIT:
            notes.append(f"{self._waiting_share:.0%} waiting for data")
        return notes

    def describe(self) -> str:
        """The work of an image and the peak, in words for a run's first lines."""
        per_rank = self._peak / self._mesh.world_size
        return (
            f"{self.flops_per_image() / 1e9:,.3g} GFLOP per image, forward and backward; MFU is the share of "
            f"{per_rank / 1e12:,.3g} TFLOP/s a rank (products in {self._peak_precision}, {_source(self._mesh)})"
        )

    def _of_all_ranks(self, seconds: Mapping[str, float]) -> tuple[int | None, float | None]:
        device = self._mesh.device
        memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_resident_bytes()
        own = [_UNKNOWN if memory is None else memory, self._milliwatts()]
        own += [round(1e6 * seconds[part]) for part in _OWN_PARTS]
        memories, powers, *parts = zip(*all_gather_numbers(own, self._mesh), strict=True)
        self.own_seconds = [
            {part: microseconds / 1e6 for part, microseconds in zip(_OWN_PARTS, of_rank, strict=True)}
            for of_rank in zip(*parts, strict=True)
        ]
        watts = None if _UNKNOWN in powers else sum(powers) / 1000
        return None if _UNKNOWN in memories else max(memories), watts

    def _milliwatts(self) -> int:
        """This rank's GPU's, which NVML tells by the package nvidia-ml-py; once it does not, it is not asked again."""
        if not self._power_is_known:
            return _UNKNOWN
        try:
            return int(torch.cuda.power_draw(self._mesh.device))
        except Exception:  # no package, no NVML, no such sensor: each has its own error
            self._power_is_known = False
            return _UNKNOWN


def _source(mesh: Mesh) -> str:
    if mesh.device.type == "cuda" and known_device(torch.cuda.get_device_name(mesh.device)) is not None:
        return "data sheet"
    return "measured"
