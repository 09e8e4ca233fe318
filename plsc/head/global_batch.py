"""The global batch: every rank's embeddings and labels on every rank, once all have found each other's input right."""

from dataclasses import dataclass

import torch
from torch import Tensor

from plsc.errors import LabelError, UsageError
from plsc.parallel.collectives import all_gather_equal, all_gather_rows
from plsc.parallel.mesh import Mesh

SMALLEST_NORM = 1e-12
_FITTING, _EMBEDDINGS, _LABELS = range(3)
_PROBLEMS = {
    _EMBEDDINGS: "embeddings must be (b, {dim}) and floating point",
    _LABELS: "labels must be (b,) integers, as many as there are embeddings",
}


@dataclass(frozen=True)
class GlobalBatch:
    """Unit ``features`` (B, D) in the table's dtype, ``labels`` (B,) int64, ``norms`` (B,) where the margin asks.

    ``sizes`` are the ranks' batch sizes; their samples follow each other in rank order.
    """

    sizes: list[int]
    features: Tensor
    labels: Tensor
    norms: Tensor | None


def gather_batch(
    embeddings: Tensor,
    labels: Tensor,
    *,
    dim: int,
    num_classes: int,
    dtype: torch.dtype,
    with_norms: bool,
    mesh: Mesh,
) -> GlobalBatch:
    """Check and gather this rank's embeddings (b, dim) and labels (b,). Moves B·dim numbers of ``dtype``."""
    sizes = _agreed_sizes(embeddings, labels, dim, num_classes, mesh)
    wide = torch.promote_types(dtype, torch.float32)
    norm = torch.linalg.vector_norm(embeddings.to(wide), dim=1).clamp(min=SMALLEST_NORM)
    unit = (embeddings.to(wide) / norm[:, None]).to(dtype)
    return GlobalBatch(
        sizes,
        all_gather_rows(unit, mesh, sizes),
        all_gather_rows(labels.to(mesh.device, torch.int64), mesh, sizes),
        all_gather_rows(norm, mesh, sizes) if with_norms else None,
    )


def _agreed_sizes(embeddings: Tensor, labels: Tensor, dim: int, num_classes: int, mesh: Mesh) -> list[int]:
    """Every rank's batch size. One small exchange tells every rank of any rank's bad input, so that all raise."""
    problem = _problem(embeddings, labels, dim)
    facts = [0, 0, 0, problem]
    if not problem and labels.numel():
        facts = [labels.numel(), int(labels.min()), int(labels.max()), problem]
    everyone = all_gather_equal(torch.tensor(facts, device=mesh.device), mesh).tolist()
    for rank, (_, low, high, problem) in enumerate(everyone):
        if problem:
            raise UsageError(f"rank {rank}: {_PROBLEMS[problem].format(dim=dim)}")
        if low < 0 or high >= num_classes:
            wrong = low if low < 0 else high
            raise LabelError(f"rank {rank}: label {wrong} lies outside [0, {num_classes}), the head's classes; "
                             "mend the labels, or make the head with as many classes as they need")
    sizes = [size for size, *_ in everyone]
    if sum(sizes) == 0:
        raise UsageError("no rank has a sample; skip the step, or give at least one")
    return sizes


def _problem(embeddings: Tensor, labels: Tensor, dim: int) -> int:
    if embeddings.dim() != 2 or embeddings.shape[1] != dim or not embeddings.is_floating_point():
        return _EMBEDDINGS
    integers = not (labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool)
    return _FITTING if labels.shape == embeddings.shape[:1] and integers else _LABELS
