"""The global batch: every rank's embeddings and labels on every rank, once all have found each other's input right.

Where the table is replicated over groups of ranks, a rank holds its own group's part of it, and of the rest no more
than a few numbers per sample.
"""

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
    """What a rank holds of the global batch of ``total`` samples B, whose order is that of the ranks.

    Its head group's samples b: unit ``features`` (b, D) in the table's dtype, ``labels`` (b,) int64, ``norms`` (b,)
    where the margin asks. ``sizes`` are the batch sizes of that group's ranks, ``group_sizes`` those of all groups,
    of which this one is number ``group``.
    """

    features: Tensor
    labels: Tensor
    norms: Tensor | None
    sizes: list[int]
    group_sizes: list[int]
    group: int

    @property
    def total(self) -> int:
        """B, over all groups."""
        return sum(self.group_sizes)

    @property
    def largest(self) -> int:
        """The largest group's number of samples: equal on all ranks."""
        return max(self.group_sizes)

    def everyones(self, values: Tensor, mesh: Mesh) -> Tensor:
        """The whole batch's (B, …), of which this group computed (b, …). Moves B of them between the replicas."""
        return all_gather_rows(values, mesh.replicas, self.group_sizes)

    def ours(self, values: Tensor) -> Tensor:
        """This group's (b, …) of the whole batch's (B, …)."""
        ours: Tensor = values.split(self.group_sizes)[self.group]
        return ours


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
    """Check this rank's embeddings (b, dim) and labels (b,), and gather those of its head group.

    Moves 32 bytes per rank of the world, then b·dim numbers of ``dtype`` and 8 to 16 bytes per sample of the group.
    """
    sizes = _agreed_sizes(embeddings, labels, dim, num_classes, mesh)
    head = mesh.head
    groups = [sizes[start : start + head.world_size] for start in range(0, mesh.world_size, head.world_size)]
    ours = groups[mesh.replicas.rank]
    wide = torch.promote_types(dtype, torch.float32)
    norm = torch.linalg.vector_norm(embeddings.to(wide), dim=1).clamp(min=SMALLEST_NORM)
    unit = (embeddings.to(wide) / norm[:, None]).to(dtype)
    return GlobalBatch(
        all_gather_rows(unit, head, ours),
        all_gather_rows(labels.to(mesh.device, torch.int64), head, ours),
        all_gather_rows(norm, head, ours) if with_norms else None,
        ours,
        [sum(group) for group in groups],
        mesh.replicas.rank,
    )


def gather_labels(labels: Tensor, *, num_classes: int, mesh: Mesh) -> Tensor:
    """Check every rank's labels (b,) and gather them, (B,) in rank order."""
    sizes = _agreed_sizes(labels.new_empty((labels.numel(), 1), dtype=torch.float32), labels, 1, num_classes, mesh)
    return all_gather_rows(labels.to(mesh.device, torch.int64), mesh, sizes)


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
            raise LabelError(
                f"rank {rank}: label {wrong} lies outside [0, {num_classes}), the head's classes; "
                "mend the labels, or make the head with as many classes as they need"
            )
    sizes = [size for size, *_ in everyone]
    if sum(sizes) == 0:
        raise UsageError("no rank has a sample; skip the step, or give at least one")
    return sizes


def _problem(embeddings: Tensor, labels: Tensor, dim: int) -> int:
    if embeddings.dim() != 2 or embeddings.shape[1] != dim or not embeddings.is_floating_point():
        return _EMBEDDINGS
    integers = not (labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool)
    return _FITTING if labels.shape == embeddings.shape[:1] and integers else _LABELS
