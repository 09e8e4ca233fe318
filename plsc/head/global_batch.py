"""The global batch: checked on all ranks together, gathered, and its samples' cosines with their own classes.

Where the table is replicated over groups of ranks, a rank holds its own group's part of the batch, and of the rest no
more than a few numbers per sample.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plsc.errors import LabelError, UsageError
from plsc.head.class_table import SMALLEST_NORM, ClassRows, ClassTable
from plsc.parallel.collectives import all_gather_numbers, all_gather_object, all_gather_rows
from plsc.parallel.mesh import Mesh

MOST_LABELS = 100  # a sample
_TARGET_BYTES = 64 << 20  # of the float64 copies of targets' rows that are made at a time

_FITTING, _EMBEDDINGS, _LABELS, _SIZES, _WEIGHTS = range(5)
_PROBLEMS = {
    _EMBEDDINGS: "embeddings must be (b, {dim}) and floating point",
    _LABELS: "labels must be (b,) integers, as many as there are embeddings, or (b, K) with K from 1 to 100",
    _WEIGHTS: "weights must be floating point, one for each of several labels (b, K)",
    _SIZES: "sizes must be every rank's number of samples, this one's too",
}


@dataclass(frozen=True)
class GlobalBatch:
    """A rank's part of the global batch of ``total`` samples B, which are in the order of the ranks.

    Its head group's samples b: unit ``features`` (b, D) in the table's dtype, ``labels`` (b,) int64, or (b, K) of which
    none is there twice, with −1 for none; ``norms`` (b,) where the margin uses them; the labels' ``weights`` (b, K),
    where they were given. ``sizes`` are the batch sizes of that group's ranks, ``group_sizes`` those of all
    groups, of which this one is number ``group``.
    """

    features: Tensor
    labels: Tensor
    norms: Tensor | None
    weights: Tensor | None
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
    table: ClassTable,
    mesh: Mesh,
    *,
    with_norms: bool,
    sizes: Sequence[int] | None,
    weights: Tensor | None = None,
) -> GlobalBatch:
    """Check this rank's embeddings (b, D), labels (b,) or (b, K) and weights (b, K), and gather its head group's.

    Moves b·D numbers of the table's dtype and 8 to 16 bytes per sample and label of the group, at once. Where
    ``sizes``, every rank's number of samples, is not given, 40 bytes per rank of the world are exchanged first.
    """
    unchecked = sizes is not None and is_read_late(labels)
    num_classes, dtype, head = table.shape.num_classes, table.parameter.dtype, mesh.head
    sizes, labels = _agreed_sizes(embeddings, labels, table.shape.dim, num_classes, mesh, sizes, weights)
    groups = [sizes[start : start + head.world_size] for start in range(0, mesh.world_size, head.world_size)]
    group = groups[mesh.replicas.rank]
    x = embeddings.to(torch.promote_types(dtype, torch.float32))
    norm = torch.linalg.vector_norm(x, dim=1).clamp(min=SMALLEST_NORM)
    unit = (x / norm[:, None]).to(dtype)
    labels = labels.to(mesh.device, torch.int64, non_blocking=True)
    if unchecked:  # the loss is NaN then, on every rank, and no optimizer updates anything by it
        outside = (labels < (0 if labels.dim() == 1 else -1)) | (labels >= num_classes)
        unit = unit.masked_fill(outside.view(len(unit), -1).any(1, keepdim=True), torch.nan)
    optional = [norm] if with_norms else []
    if weights is not None:
        optional.append(weights.to(mesh.device, torch.float32, non_blocking=True))
    features, labels, *gathered = _gather_together([unit, distinct(labels), *optional], head, group)
    norms = gathered.pop(0) if with_norms else None
    sums = [sum(sizes) for sizes in groups]
    return GlobalBatch(features, labels, norms, gathered[0] if gathered else None, group, sums, mesh.replicas.rank)


def distinct(labels: Tensor) -> Tensor:
    """Labels (b, K) of which each counts once: a repeated one is -1, as one that is missing."""
    if labels.dim() == 1 or labels.shape[1] == 1:
        return labels
    ordered, order = labels.sort(dim=1, stable=True)
    repeated = torch.zeros_like(ordered, dtype=torch.bool)
    repeated[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    return labels.masked_fill(repeated.gather(1, order.argsort(1)), -1)


def _gather_together(columns: list[Tensor], mesh: Mesh, sizes: list[int]) -> list[Tensor]:
    """Concatenate the ranks' rows of several tensors by one collective: their bytes travel beside each other.

    Over many ranks an all-gather of a few bytes takes nearly as long as one of the features.
    """
    if mesh.world_size == 1:
        return columns
    packed = [column.reshape(len(column), math.prod(column.shape[1:])).view(torch.uint8) for column in columns]
    gathered = all_gather_rows(torch.cat(packed, dim=1), mesh, sizes)
    parts = gathered.split([part.shape[1] for part in packed], dim=1)
    return [
        part.contiguous().view(column.dtype).view(-1, *column.shape[1:])
        for part, column in zip(parts, columns, strict=True)
    ]


def gather_labels(labels: Tensor, num_classes: int, mesh: Mesh, sizes: Sequence[int] | None) -> Tensor:
    """Check every rank's labels and gather them in rank order, as :func:`gather_batch` does."""
    placeholder = labels.new_empty((len(labels), 1), dtype=torch.float32)
    sizes, labels = _agreed_sizes(placeholder, labels, 1, num_classes, mesh, sizes, None)
    return all_gather_rows(distinct(labels.to(mesh.device, torch.int64, non_blocking=True)), mesh, sizes)


@dataclass(frozen=True)
class LocalTargetRows:
    """The rows of the samples' own classes, of which this shard has the classes; the nearest of several centres.

    ``owned`` (b,) tells which samples' classes it has, ``nearest`` (b,) their rows' numbers in ``rows``, any for other
    samples. All are taken through the arithmetic: a list of the owned ones has a length that only the device knows.
    """

    rows: ClassRows
    owned: Tensor
    nearest: Tensor

    def class_rows(self) -> Tensor:
        """All centres' rows (b, K, D) of the samples' classes in the table's dtype, 0 where another shard has them."""
        centers, count = self.rows.centers, len(self.nearest)
        weight = self.rows.weight
        found = torch.zeros(count, centers, weight.shape[1], dtype=weight.dtype, device=self.owned.device)
        for part in _parts(self.rows, count):
            picked = self.rows.picked(self.rows.rows_of(self.nearest[part] // centers))
            owned = self.owned[part, None, None]
            found[part] = torch.where(owned, picked.weight.view(-1, centers, found.shape[2]), 0)
        return found

    def add_gradient(self, grad_embeddings: Tensor, target_grad: Tensor) -> None:
        """Add ``target_grad``·ρ_y·W_y to ``grad_embeddings`` (b, D); the former is by the samples' own cosines (b,)."""
        dtype = grad_embeddings.dtype
        strength = torch.where(self.owned, target_grad, 0).to(dtype)
        for part in _parts(self.rows, len(strength)):
            picked = self.rows.picked(self.nearest[part])
            factor = strength[part] * picked.inverse_norm.to(dtype)
            grad_embeddings[part].addcmul_(picked.weight.to(dtype), factor[:, None])


def target_cosines(rows: ClassRows, features: Tensor, position: Tensor) -> tuple[Tensor, LocalTargetRows]:
    """Cosines (b,) float64 of the group's samples with their own classes, 0 where another shard's, and the local rows.

    Double precision costs nothing for one row per sample, and keeps margins exact where the cosine is near ±1.

    Args:
        rows: the shard's rows in this batch.
        features: (b, D) unit embeddings of the group.
        position: (b,) index of each target among the selected classes, −1 where another shard owns it.
    """
    owned = position >= 0
    cos = torch.zeros_like(position, dtype=torch.float64)
    classes = position.clamp(min=0)
    if rows.selected is not None and rows.num_classes:
        classes = rows.selected[classes]
    nearest = torch.zeros_like(classes)
    for part in _parts(rows, len(position)):
        cos[part], nearest[part] = _nearest_rows(rows, classes[part], features[part])
    return torch.where(owned, cos, 0), LocalTargetRows(rows, owned, nearest)


def _nearest_rows(rows: ClassRows, classes: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
    """Each sample's cosine (n,) with the nearest centre of its class (n,), and that centre's row."""
    weight = rows.picked(rows.rows_of(classes)).weight.view(len(classes), rows.centers, features.shape[1])
    norms = _norms(weight, 2) * _norms(features, 1)[:, None]
    # the product of two bfloat16 is exact in float32: float64 begins with the sum
    exact = weight.to(torch.float32 if weight.dtype == torch.bfloat16 else torch.float64, copy=True)
    each = exact.mul_(features[:, None]).sum(2, dtype=torch.float64) / norms.clamp(min=SMALLEST_NORM)
    if rows.centers == 1:
        return each[:, 0], classes
    best, winner = each.max(dim=1)
    return best, classes * rows.centers + winner


def _norms(vectors: Tensor, dim: int) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(vectors, dim=dim, dtype=torch.float64)
    return norms


def _parts(rows: ClassRows, samples: int) -> Iterator[slice]:
    """The samples in parts whose float64 copies of their classes' rows are small; none where there is no row."""
    size = max(_TARGET_BYTES // (8 * rows.centers * rows.weight.shape[1]), 1)
    for start in range(0, samples if rows.num_classes else 0, size):
        yield slice(start, min(start + size, samples))


def _agreed_sizes(
    embeddings: Tensor,
    labels: Tensor,
    dim: int,
    num_classes: int,
    mesh: Mesh,
    known: Sequence[int] | None,
    weights: Tensor | None,
) -> tuple[list[int], Tensor]:
    """Every rank's batch size: ``known``, or from a small exchange that shows all ranks any rank's bad input.

    Labels on a GPU are waited for, unless sizes are known. Returns the labels too: a rank that has none gives them the
    width that the others' have.
    """
    problem = _problem(embeddings, labels, dim, weights)
    if known is not None and not problem and (len(known) != mesh.world_size or known[mesh.rank] != len(labels)):
        problem = _SIZES
    facts = [0 if problem else len(labels), 0, 0, problem, 0 if labels.dim() == 1 else labels.shape[-1]]
    if not problem and labels.numel() and (known is None or not is_read_late(labels)):
        facts[1:3] = torch.stack(labels.aminmax()).tolist()
    everyone = [facts] if known is not None else all_gather_numbers(facts, mesh)
    came = [""]
    if any(problem for _, _, _, problem, _ in everyone):
        came = [_described(embeddings, labels, known, weights)]
        came = came if known is not None else all_gather_object(came[0], mesh)
    widths = {width for size, *_, width in everyone if size} or {facts[4]}
    first = 0 if known is None else mesh.rank
    for rank, (size, low, high, problem, width) in enumerate(everyone, start=first):
        if problem:
            raise UsageError(f"rank {rank}: {_PROBLEMS[problem].format(dim=dim)}, not {came[rank - first]}")
        if low < (-1 if width else 0) or high >= num_classes:
            wrong = high if high >= num_classes else low
            hint = "" if width else " (where samples may lack a label, give them as (b, 1), with -1 for none)"
            raise LabelError(
                f"rank {rank}: label {wrong} lies outside [0, {num_classes}), the head's classes: "
                f"correct the labels, or make the head with as many classes as they need{hint if wrong == -1 else ''}"
            )
        if size and len(widths) > 1:
            raise UsageError(f"ranks have {sorted(widths)} labels a sample: give all the same number, with -1 for none")
    sizes = [size for size, *_ in everyone] if known is None else list(known)
    if sum(sizes) == 0:
        raise UsageError("no rank has a sample; skip the step, or give at least one")
    (width,) = widths
    if not len(labels) and labels.dim() == 1 and width:
        labels = labels.view(0, 1).expand(0, width)
    return sizes, labels


def is_read_late(labels: Tensor) -> bool:
    """Return whether the host would have to wait for ``labels``."""
    return labels.is_cuda


def _described(embeddings: Tensor, labels: Tensor, sizes: Sequence[int] | None, weights: Tensor | None) -> str:
    """What a rank was given, in words."""
    given = {"embeddings": embeddings, "labels": labels, "weights": weights}
    texts = [
        f"{name} {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
        for name, tensor in given.items()
        if tensor is not None
    ]
    return " with ".join([*texts, *([] if sizes is None else [f"sizes {list(sizes)}"])])


def _problem(embeddings: Tensor, labels: Tensor, dim: int, weights: Tensor | None) -> int:
    if embeddings.dim() != 2 or embeddings.shape[1] != dim or not embeddings.is_floating_point():
        return _EMBEDDINGS
    integers = not (labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool)
    several = labels.dim() == 2 and 0 < labels.shape[1] <= MOST_LABELS
    if not integers or labels.shape[:1] != embeddings.shape[:1] or not (labels.dim() == 1 or several):
        return _LABELS
    if weights is not None and (not several or weights.shape != labels.shape or not weights.is_floating_point()):
        return _WEIGHTS
    return _FITTING
