"""The global batch: checked on all ranks together, gathered, and its samples' cosines with their own classes.

Where the table is replicated over groups of ranks, a rank holds its own group's part of the batch, and of the rest no
more than a few numbers per sample.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from plsc.errors import LabelError, UsageError
from plsc.head.class_table import SMALLEST_NORM, ClassRows
from plsc.parallel.collectives import all_gather_equal, all_gather_rows, all_reduce_sum
from plsc.parallel.mesh import Mesh

_FITTING, _EMBEDDINGS, _LABELS = range(3)
_PROBLEMS = {
    _EMBEDDINGS: "embeddings must be (b, {dim}) and floating point",
    _LABELS: "labels must be (b,) integers, as many as there are embeddings",
}


@dataclass(frozen=True)
class GlobalBatch:
    """A rank's part of the global batch of ``total`` samples B, which are in the order of the ranks.

    Its head group's samples b: unit ``features`` (b, D) in the table's dtype, ``labels`` (b,) int64, ``norms`` (b,)
    where the margin uses them. ``sizes`` are the batch sizes of that group's ranks, ``group_sizes`` those of all
    groups, of which this one is number ``group``.
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

    def gather_replicas(self, values: Tensor, mesh: Mesh) -> Tensor:
        """All groups' values (B, …), of which this one computed (b, …). Moves B of them between the replicas."""
        return all_gather_rows(values, mesh.replicas, self.group_sizes)

    def local_group(self, values: Tensor) -> Tensor:
        """This group's (b, …) of the whole batch's (B, …)."""
        local: Tensor = values.split(self.group_sizes)[self.group]
        return local


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
    group = groups[mesh.replicas.rank]
    x = embeddings.to(torch.promote_types(dtype, torch.float32))
    norm = torch.linalg.vector_norm(x, dim=1).clamp(min=SMALLEST_NORM)
    unit = (x / norm[:, None]).to(dtype)
    return GlobalBatch(
        all_gather_rows(unit, head, group),
        all_gather_rows(labels.to(mesh.device, torch.int64), head, group),
        all_gather_rows(norm, head, group) if with_norms else None,
        group,
        [sum(sizes) for sizes in groups],
        mesh.replicas.rank,
    )


def gather_labels(labels: Tensor, *, num_classes: int, mesh: Mesh) -> Tensor:
    """Check every rank's labels (b,) and gather them, (B,) in rank order."""
    sizes = _agreed_sizes(labels.new_empty((labels.numel(), 1), dtype=torch.float32), labels, 1, num_classes, mesh)
    return all_gather_rows(labels.to(mesh.device, torch.int64), mesh, sizes)


@dataclass(frozen=True)
class LocalTargetRows:
    """The rows of the samples' own classes, of which this shard has the classes; the nearest of several centres.

    ``samples`` (n,) are the samples' positions; ``weight`` (n, D) and ``inverse_norm`` (n,) their rows.
    """

    samples: Tensor
    weight: Tensor
    inverse_norm: Tensor

    def add_gradient(self, grad_embeddings: Tensor, target_grad: Tensor) -> None:
        """Add ``target_grad``·ρ_y·W_y to ``grad_embeddings`` (B, D); the former is by the samples' own cosines (B,)."""
        dtype = grad_embeddings.dtype
        strength = target_grad[self.samples].to(dtype) * self.inverse_norm.to(dtype)
        grad_embeddings.index_add_(0, self.samples, self.weight.to(dtype) * strength[:, None])


def target_cosines(rows: ClassRows, features: Tensor, position: Tensor, mesh: Mesh) -> tuple[Tensor, LocalTargetRows]:
    """Cosines (b,) of the group's samples with their own classes, from all shards in float64, and the local rows.

    Double precision costs nothing for one row per sample, and keeps margins exact where the cosine is near ±1.

    Args:
        rows: the shard's rows in this batch.
        features: (b, D) unit embeddings of the group.
        position: (b,) index of each target among the selected classes, −1 where another shard owns it.
        mesh: whose head group sums the cosines.
    """
    owned = torch.where(position >= 0)[0]
    classes = position[owned] if rows.selected is None else rows.selected[position[owned]]
    picked = rows.picked(rows.rows_of(classes))
    weight = picked.weight.double().view(len(owned), rows.centers, features.shape[1])
    x = features[owned].double()
    norms = torch.linalg.vector_norm(weight, dim=2) * torch.linalg.vector_norm(x, dim=1, keepdim=True)
    each = torch.einsum("bkd,bd->bk", weight, x) / norms.clamp(min=SMALLEST_NORM)
    best, winner = each.max(dim=1) if rows.centers > 1 else (each[:, 0], torch.zeros_like(classes))
    cos = features.new_zeros(len(position), dtype=torch.float64)
    cos[owned] = best
    nearest = torch.arange(len(owned), device=winner.device) * rows.centers + winner
    local = LocalTargetRows(owned, picked.weight[nearest], picked.inverse_norm[nearest])
    return all_reduce_sum(cos, mesh.head), local


def _agreed_sizes(embeddings: Tensor, labels: Tensor, dim: int, num_classes: int, mesh: Mesh) -> list[int]:
    """Every rank's batch size. One small exchange shows every rank any rank's bad input, so that all raise."""
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
                f"rank {rank}: label {wrong} lies outside [0, {num_classes}), the head's classes: "
                "correct the labels, or make the head with as many classes as they need"
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
