"""The exact softmax over a shard of classes in two passes over chunks; no (B, C_local) matrix ever exists.

Pass 1 gives what the loss and the embeddings' gradient need: each sample's sum of exponentials over this shard and
the rows pulled together by them. Once log Z is known over all shards, pass 2 recomputes each chunk's probabilities
and gives the rows' gradient, chunk by chunk. Logits are class-major, (classes, B).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from plsc.losses import triton_softmax
from plsc.losses.class_rows import Chunk, ClassRows
from plsc.losses.margins import Margin
from plsc.losses.product import ChunkProducts
from plsc.native import kernels

_SAFE_LOGIT = 78.0  # exp(78)·50 million classes is still a float32
_LOWEST = -1e30


def is_bounded(margin: Margin) -> bool:
    """Whether exp() of every logit is a finite float32, so that no maximum has to be taken off."""
    return margin.largest_logit <= _SAFE_LOGIT


@dataclass(frozen=True)
class Logits:
    """A chunk's logits z (classes, B); dz/dcos divided by s, where it is not 1; the winning sub-centre, if K > 1."""

    z: Tensor
    slope: Tensor | None
    winner: Tensor | None


@dataclass(frozen=True)
class Partial:
    """Pass 1 over one shard, targets left out.

    ``total`` (B,) float64 is Σ exp(z − maximum), ``pull`` (B, D) is Σ exp(z − maximum)·(dz/dcos)/s·ρ·W.
    """

    maximum: Tensor
    total: Tensor
    pull: Tensor | None


@dataclass(frozen=True)
class Batch:
    """What both passes share: unit embeddings (B, D) of the global batch, and where each target stands here.

    ``position`` (B,) is the target's place among the visited classes, −1 where another shard owns it; ``phi`` (B,) is
    the target's φ, for margins that compare negatives with it.
    """

    features: Tensor
    position: Tensor
    phi: Tensor
    margin: Margin
    state: Mapping[str, Tensor]

    def logits(self, chunk: Chunk, centers: int, weight: Tensor, features: Tensor, products: ChunkProducts) -> Logits:
        """z = s·f(cos) of a chunk's classes against every sample; ``weight`` and ``features`` are factors."""
        cos = products.multiply("logits", weight, features.t()).mul_(chunk.inverse_norm[:, None])
        winner = None
        if centers > 1:
            cos, winner = cos.view(-1, centers, cos.shape[1]).max(dim=1)
        if not self.margin.changes_negatives:
            return Logits(cos.mul_(self.margin.s), None, winner)
        changed, slope = self.margin.negatives(cos, self.phi, self.state)
        return Logits(changed.mul_(self.margin.s), slope, winner)

    def put_targets(self, chunk: Chunk, matrix: Tensor, values: Tensor | float) -> None:
        """Replace the entries of ``matrix`` (classes, B) where class and sample belong together."""
        inside = (self.position >= chunk.start) & (self.position < chunk.stop)
        place = torch.where(inside, self.position - chunk.start, 0)[None]
        matrix.scatter_(0, place, torch.where(inside, values, matrix.gather(0, place)))


def first_pass(rows: ClassRows, batch: Batch, chunk_size: int, *, with_pull: bool) -> Partial:
    """Visit every chunk once and sum its exponentials; with ``with_pull`` also what pulls the embeddings."""
    if _is_plain(rows, batch) and triton_softmax.supports(rows, batch.features):
        return _triton_first_pass(rows, batch, chunk_size, with_pull)
    if _is_plain(rows, batch) and kernels.fits_tiles(rows.weight):
        return _tiled_first_pass(rows, batch, chunk_size, with_pull)
    features = batch.features
    wide = torch.promote_types(features.dtype, torch.float32)
    bounded = is_bounded(batch.margin)
    maximum = features.new_full((features.shape[0],), 0.0 if bounded else _LOWEST, dtype=wide)
    total = torch.zeros_like(maximum, dtype=torch.float64)
    pull = torch.zeros_like(features, dtype=wide) if with_pull else None
    products = ChunkProducts(features.dtype, features.device)
    features = products.factor("features", features)
    for chunk in rows.chunks(chunk_size):
        weight = products.rows(chunk)
        logits = batch.logits(chunk, rows.centers, weight, features, products)
        batch.put_targets(chunk, logits.z, -torch.inf)
        if not bounded:
            higher = torch.maximum(maximum, logits.z.amax(0))
            shrink = (maximum - higher).exp_()
            total *= shrink
            if pull is not None:
                pull *= shrink[:, None]
            maximum = higher
            logits.z.sub_(maximum)
        exponentials = logits.z.exp_()
        total += exponentials.sum(0, dtype=wide)
        if pull is not None:
            weighted = _on_rows(exponentials, logits, rows.centers).mul_(chunk.inverse_norm[:, None])
            pull += products.multiply("pull", products.rounded_factor(weighted).t(), weight)
    return Partial(maximum, total, pull)


def second_pass(
    rows: ClassRows,
    batch: Batch,
    log_z: Tensor,
    scale: Tensor,
    target_pull: Tensor,
    chunk_size: int,
    member: Tensor | None = None,
) -> Iterator[tuple[Chunk, Tensor]]:
    """Give each chunk with the gradient (n·K, D) by its rows divided by their norms; see :func:`through_norm`.

    It is float32 (float64 for float64 tables), and may be overwritten when the next is asked for.

    Args:
        rows: the shard, as pass 1 saw it.
        batch: the samples; several micro-batches may be concatenated.
        log_z: (B,) log of each sample's normaliser over all shards.
        scale: (B,) derivative of the loss by a non-target's cosine, divided by its probability: s/B for a mean.
        target_pull: (B,) derivative of the loss by the target's cosine.
        chunk_size: classes per chunk.
        member: (visited classes, B) bool, whether the class took part in the sample's softmax; None where all did.
    """
    wide = torch.promote_types(batch.features.dtype, torch.float32)
    log_z, scale, target_pull = log_z.to(wide), scale.to(wide), target_pull.to(wide)
    if _is_plain(rows, batch) and member is None and triton_softmax.supports(rows, batch.features):
        samples = (batch.features, batch.position, batch.margin.s, log_z, scale, target_pull)
        yield from triton_softmax.second_pass(rows, *samples, chunk_size)
        return
    if _is_plain(rows, batch) and member is None and kernels.fits_tiles(rows.weight):
        yield from _tiled_second_pass(rows, batch, log_z, scale, target_pull, chunk_size)
        return
    products = ChunkProducts(batch.features.dtype, batch.features.device)
    features = products.factor("features", batch.features)
    for chunk in rows.chunks(products.chunk_size(chunk_size)):
        weight = products.rows(chunk)
        logits = batch.logits(chunk, rows.centers, weight, features, products)
        probabilities = logits.z.sub_(log_z).exp_().mul_(scale)
        if logits.slope is not None:
            probabilities.mul_(logits.slope)
        if member is not None:
            probabilities.mul_(member[chunk.start : chunk.stop])
        batch.put_targets(chunk, probabilities, target_pull)
        weighted = _on_rows(probabilities, Logits(logits.z, None, logits.winner), rows.centers)
        yield chunk, products.multiply("gradient", products.rounded_factor(weighted), features)


def _is_plain(rows: ClassRows, batch: Batch) -> bool:
    """Whether logits are s·cos but for the targets', one row to a class: what the kernels compute."""
    return rows.centers == 1 and not batch.margin.changes_negatives and is_bounded(batch.margin)


def _triton_first_pass(rows: ClassRows, batch: Batch, chunk_size: int, with_pull: bool) -> Partial:
    total, pull = triton_softmax.first_pass(
        rows, batch.features, batch.position, batch.margin.s, chunk_size, with_pull=with_pull
    )
    return Partial(torch.zeros_like(total, dtype=torch.float32), total, pull)


def _tiled_first_pass(rows: ClassRows, batch: Batch, chunk_size: int, with_pull: bool) -> Partial:
    sums = kernels.FirstPass(kernels.PackedBatch(batch.features, batch.position), batch.margin.s, with_pull)
    for chunk in rows.chunks(kernels.whole_blocks(chunk_size)):
        sums.add(_rows_of(chunk), chunk.start)
    return Partial(batch.features.new_zeros(len(batch.position), dtype=torch.float32), *sums.result())


def _tiled_second_pass(
    rows: ClassRows, batch: Batch, log_z: Tensor, scale: Tensor, target_pull: Tensor, chunk_size: int
) -> Iterator[tuple[Chunk, Tensor]]:
    packed = kernels.PackedBatch(batch.features, batch.position)
    log_z, scale, target_pull = (packed.pad(values) for values in (log_z, scale, target_pull))
    size = kernels.whole_blocks(min(chunk_size, kernels.IN_CACHE * torch.get_num_threads()))
    scratch = batch.features.new_empty((size, packed.dim), dtype=torch.float32)
    for chunk in rows.chunks(size):
        yield (
            chunk,
            kernels.gradient(_rows_of(chunk), packed, batch.margin.s, chunk.start, log_z, scale, target_pull, scratch),
        )


def _rows_of(chunk: Chunk) -> kernels.Table:
    return kernels.Table.visiting(chunk.table.weight, chunk.table.inverse_norm, chunk.index)


def _on_rows(matrix: Tensor, logits: Logits, centers: int) -> Tensor:
    """(classes, B) times the slope, laid out on the table's rows (classes·K, B): only the winning centre gets it."""
    if logits.slope is not None:
        matrix = matrix * logits.slope
    if logits.winner is None:
        return matrix
    spread = matrix.new_zeros((matrix.shape[0], centers, matrix.shape[1]))
    return spread.scatter_(1, logits.winner[:, None], matrix[:, None]).flatten(0, 1)


def through_norm(gradient: Tensor, chunk: Chunk) -> Tensor:
    """From the gradient by unit rows to the gradient by the rows, in place: ρ(g − Ŵ⟨g, Ŵ⟩)."""
    inverse = chunk.inverse_norm[:, None]
    unit = chunk.weight.to(gradient.dtype) * inverse
    along = (gradient * unit).sum(1, keepdim=True)
    return gradient.addcmul_(unit, along, value=-1).mul_(inverse)
