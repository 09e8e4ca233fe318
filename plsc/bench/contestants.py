"""Who takes part in the comparison of class heads."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from plsc.bench import peers
from plsc.bench.peers import LR, MARGIN, MOMENTUM, SCALE, WEIGHT_DECAY, Step, training_step
from plsc.bench.setting import Setting
from plsc.head import ShardedHead
from plsc.losses import ArcFace
from plsc.optim import HeadSGD
from plsc.parallel.mesh import Mesh

FLOOR = "floor"


@dataclass(frozen=True)
class Contestant:
    """``label`` is for people, ``build`` makes the head on this rank, ``sampled`` is whether classes are left out."""

    label: str
    build: Callable[[Setting, Mesh], Step]
    ours: bool = False
    sampled: bool = False


def _our_head(
    weight: torch.dtype, momentum: torch.dtype | None, *, sampled: bool = False
) -> Callable[[Setting, Mesh], Step]:
    def build(setting: Setting, mesh: Mesh) -> Step:
        head = ShardedHead(
            setting.dim,
            setting.classes,
            mesh,
            ArcFace(s=SCALE, m=MARGIN),
            setting.sample_rate if sampled else 1.0,
            weight,
            momentum,
        )
        kept = MOMENTUM if momentum is not None else 0.0
        return training_step(head, HeadSGD(head, lr=LR, momentum=kept, weight_decay=WEIGHT_DECAY))

    return build


_BF16, _FP32, _INT8 = torch.bfloat16, torch.float32, torch.int8

CONTESTANTS = {
    "plsc": Contestant("plsc, bf16 + int8", _our_head(_BF16, _INT8), ours=True),
    "plsc-no-momentum": Contestant("plsc, bf16, no momentum", _our_head(_BF16, None), ours=True),
    "plsc-fp32": Contestant("plsc, fp32 + fp32", _our_head(_FP32, _FP32), ours=True),
    "plsc-sampled": Contestant(
        "plsc, bf16 + int8, sampled", _our_head(_BF16, _INT8, sampled=True), ours=True, sampled=True
    ),
    "plsc-fp32-sampled": Contestant(
        "plsc, fp32 + fp32, sampled", _our_head(_FP32, _FP32, sampled=True), ours=True, sampled=True
    ),
    "dense": Contestant("dense logits, autograd", peers.dense),
    "linear-cross-entropy": Contestant("F.linear_cross_entropy (no margin)", peers.linear_cross_entropy),
    "partial-fc": Contestant("PartialFC_V2", peers.partial_fc(sampled=False)),
    "partial-fc-sampled": Contestant("PartialFC_V2, sampled", peers.partial_fc(sampled=True), sampled=True),
}
NEED_PARTIAL_FC = ("partial-fc", "partial-fc-sampled")


def label(name: str, sample_rate: float) -> str:
    """A contestant's name for people, with the share of classes it samples."""
    if name == FLOOR:
        return "floor (product alone)"
    return CONTESTANTS[name].label.replace("sampled", f"r = {sample_rate:g}")


def missing(name: str) -> str | None:
    """Why this contestant cannot run here at all; None where it can."""
    return peers.linear_cross_entropy_missing() if name == "linear-cross-entropy" else None
