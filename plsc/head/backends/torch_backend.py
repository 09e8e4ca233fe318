"""The head's passes and updates in plain PyTorch: the reference for the other backends, and where they have no kernel.

No (B, C_local) matrix ever exists, unless there is memory to keep one (kept_exponentials.py). Pass 1 gives what the
loss and the embeddings' gradient need: each sample's sum of exponentials over this shard and the rows weighted by them.
Once log Z is known over all shards, pass 2 recomputes each chunk's probabilities and gives the rows' gradient, chunk by
chunk, and the update takes it while it is in cache.
Logits are class-major, (classes, B).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from plsc.head.backends.kept_exponentials import KeptExponentials, KeptSecondPass
from plsc.head.backends.products import ChunkProducts, Fp32Precision, copied_classes
from plsc.head.class_table import Chunk, ClassRows, renew_norms
from plsc.head.kept_rows import kept_rows
from plsc.head.low_precision import ROUNDED, Rounding, RoundingBits, RowState, store
from plsc.head.update_rules import Update, UpdateKind
from plsc.losses.margins import Margin

_LARGEST_LOG = math.log(torch.finfo(torch.float32).max)  # 88.7
_LOWEST = -1e30
_CPU_ROWS = 256  # updated at a time on a CPU: an update makes several float32 copies of its rows


@dataclass(frozen=True)
class Logits:
    """A chunk's logits z (classes, B); dz/dcos divided by s, where it is not 1; the winning sub-centre, if K > 1."""

    z: Tensor
    slope: Tensor | None
    winner: Tensor | None


@dataclass(frozen=True)
class PartialSoftmax:
    """The result of pass 1 over one shard, targets left out.

    ``total`` (B,) float64 is Σ exp(z − maximum), ``grad_embeddings`` (B, D) is Σ exp(z − maximum)·(dz/dcos)/s·ρ·W:
    divided by Z and multiplied by s/B, it is the gradient by the unit embeddings but for the targets' share.
    ``exponentials`` are those kept for pass 2.
    """

    maximum: Tensor
    total: Tensor
    grad_embeddings: Tensor | None
    exponentials: KeptExponentials | None = None


class Negatives(Protocol):
    """Which classes are negatives of the samples B of a batch, as their rows say."""

    def factors(self, products: ChunkProducts) -> list[Tensor]:
        """What a pass multiplies every chunk's rows by, (B, D) each, as factors valid for the pass."""

    def leave_out(
        self, z: Tensor, chunk: Chunk, weight: Tensor, factors: Sequence[Tensor], products: ChunkProducts
    ) -> None:
        """Set logits z (classes, B) of the chunk's other classes to −inf; ``weight`` is a factor.

        No gradient goes through the choice.
        """

    def with_others(self, others: Sequence[Any]) -> "Negatives":
        """Those of this batch and of further ones of the same head."""


@dataclass(frozen=True)
class Batch:
    """The input of both passes: unit embeddings (B, D) of the global batch, and the index of each one's target here.

    ``position`` (B,) is the target's index among the selected classes, −1 where another shard owns it, or (B, K) those
    of several labels; ``phi`` is the targets' φ, for margins that compare negatives with it; ``state`` are the margin's
    statistics; ``negatives`` says which of them are left out of the softmax, None: none is.
    """

    features: Tensor
    position: Tensor
    phi: Tensor
    margin: Margin
    state: Mapping[str, Tensor]
    negatives: Negatives | None = None

    def factors(self, products: ChunkProducts) -> list[Tensor]:
        """What a pass multiplies every chunk's rows by: the features, and what tells negatives."""
        filtered = [] if self.negatives is None else self.negatives.factors(products)
        return [products.factor("features", self.features), *filtered]

    def logits(
        self, chunk: Chunk, centers: int, weight: Tensor, factors: list[Tensor], products: ChunkProducts
    ) -> Logits:
        """z = s·f(cos) of a chunk's classes against every sample, −inf where a negative is left out.

        ``weight`` is the chunk's rows as a factor, ``factors`` are those of :meth:`factors`.
        """
        cos = products.multiply("logits", weight, factors[0].t()).mul_(chunk.inverse_norm[:, None])
        winner, slope = None, None
        if centers > 1:
            cos, winner = cos.view(-1, centers, cos.shape[1]).max(dim=1)
        if self.margin.changes_negatives:
            cos, slope = self.margin.negatives(cos, self.phi, self.state)
        z = cos.mul_(self.margin.s)
        if self.negatives is not None:
            self.negatives.leave_out(z, chunk, weight, factors[1:], products)
        return Logits(z, slope, winner)

    def scatter_targets(self, chunk: Chunk, matrix: Tensor, values: Tensor | float) -> None:
        """Replace the targets' entries of ``matrix`` (classes, B).

        They are replaced, never corrected by a difference: near p = 1, exp(z) and its target's share would cancel.
        """
        positions = self.position.unbind(1) if self.position.dim() > 1 else [self.position]
        for label, position in enumerate(positions):
            value = values[:, label] if isinstance(values, Tensor) and values.dim() > 1 else values
            inside = (position >= chunk.start) & (position < chunk.stop)
            index = torch.where(inside, position - chunk.start, 0)[None]
            matrix.scatter_(0, index, torch.where(inside, value, matrix.gather(0, index)))


@dataclass(frozen=True)
class PassInputs:
    """The input of pass 2 over some rows.

    Attributes:
        rows: the shard, as pass 1 saw it.
        batch: the samples; several micro-batches may be concatenated.
        log_z: (B,) log of each sample's normaliser over all shards.
        scale: (B,) derivative of the loss by a non-target's cosine, divided by its probability: s/B for a mean.
        target_grad: (B,) or (B, K) derivative of the loss by the targets' cosines.
        chunk_size: classes per chunk, at most about; bits do not depend on it.
        member: (selected classes, B) bool, whether the class took part in the sample's softmax; None: all did.
        exponentials: that pass 1 kept of each of the batches, whose samples follow each other; (): none.
    """

    rows: ClassRows
    batch: Batch
    log_z: Tensor
    scale: Tensor
    target_grad: Tensor
    chunk_size: int
    member: Tensor | None = None
    exponentials: Sequence[KeptExponentials] = ()


def is_bounded(margin: Margin, num_classes: int) -> bool:
    """Return whether exp(), summed over so many classes, is a finite float32, so that no maximum has to be taken off.

    Up to s = 70.9 over 50 million classes, 74.9 over a million.
    """
    return margin.largest_logit + math.log(max(num_classes, 1)) <= _LARGEST_LOG


Updater = Callable[[Chunk, Tensor, Mapping[str, RowState], Update], None]
StateOf = Callable[[Chunk], Mapping[str, RowState]]


class TorchBackend:
    """Passes and updates for every dtype, margin, number of centres and device.

    Other backends derive from it, and fall back to its methods where they have no kernel.

    Args:
        reason: why this backend was chosen, for logs.
        fp32_precision: of products over a float32 table on a GPU.

    Attributes:
        takes_passes: whether the passes are kernels, and not this class's.
        exponentials_memory: bytes in which pass 1 may keep a batch's exponentials.
        updates_by_rows: whether kernels that update take gradients times ρ, as ``is_by_rows``.
    """

    name = "torch"
    takes_passes = False
    updates_by_rows = False

    def __init__(self, reason: str, fp32_precision: Fp32Precision = "ieee") -> None:
        self.reason, self._fp32_precision = reason, fp32_precision
        self.exponentials_memory = 0

    def describe(self) -> str:
        """The choice and its reason in one line."""
        text = f"{self.name} backend: {self.reason}"
        if not self.exponentials_memory:
            return text
        if not self.keeps_exponentials:
            return f"{text}; its passes keep no exponentials"
        return f"{text}; keeps exponentials in {self.exponentials_memory / 2**30:.3g} GiB"

    @property
    def chunking(self) -> str:
        """What chunks of pass 2 depend on beside its inputs, in words; replicas, which sum by chunks, must share it."""
        return self.name

    @property
    def keeps_exponentials(self) -> bool:
        """Whether its passes take :attr:`exponentials_memory`, where the head is one whose exponentials are kept."""
        return True

    def first_pass(
        self, rows: ClassRows, batch: Batch, chunk_size: int, *, with_grad: bool, keeps: bool = False
    ) -> PartialSoftmax:
        """Sum the exponentials of every class but the target.

        Args:
            rows: the shard, or the selected classes of it.
            batch: the samples.
            chunk_size: classes per chunk, at most about; sums are grouped by it.
            with_grad: also sum the rows, for the embeddings' gradient.
            keeps: with that, keep exponentials for pass 2, where there is memory for them.
        """
        features = batch.features
        sum_dtype = torch.promote_types(features.dtype, torch.float32)
        bounded = is_bounded(batch.margin, rows.num_classes)
        maximum = features.new_full((features.shape[0],), 0.0 if bounded else _LOWEST, dtype=sum_dtype)
        total = torch.zeros_like(maximum, dtype=torch.float64)
        grad = torch.zeros_like(features, dtype=sum_dtype) if with_grad else None
        kept = self._room(rows, batch, chunk_size) if keeps and with_grad and bounded else None
        products = ChunkProducts(features.dtype, features.device, self._fp32_precision)
        factors = batch.factors(products)
        for chunk in rows.chunks(chunk_size):
            weight = products.rows(chunk)
            logits = batch.logits(chunk, rows.centers, weight, factors, products)
            batch.scatter_targets(chunk, logits.z, -torch.inf)
            if not bounded:  # the online maximum (Milakov & Gimelshein, 2018): earlier sums shrink as it rises
                higher = torch.maximum(maximum, logits.z.amax(0))
                shrink = (maximum - higher).exp_()
                total *= shrink
                if grad is not None:
                    grad *= shrink[:, None]
                maximum = higher
                logits.z.sub_(maximum)
            exponentials = logits.z.exp_()
            total += exponentials.sum(0, dtype=sum_dtype)
            if grad is not None:
                weighted = _on_rows(exponentials, logits, rows.centers).mul_(chunk.inverse_norm[:, None])
                rounded = products.rounded_factor(weighted, None if kept is None else kept.of(chunk))
                grad += products.multiply("grad", rounded.t(), weight)
        return PartialSoftmax(maximum, total, grad, kept)

    def _room(self, rows: ClassRows, batch: Batch, chunk_size: int) -> KeptExponentials | None:
        """For exponentials of a pass without a maximum."""
        return KeptExponentials.fitting(self.exponentials_memory, rows, batch, chunk_size)

    def second_pass(self, inputs: PassInputs) -> Iterator[tuple[Chunk, Tensor]]:
        """Give each chunk with the gradient (n·K, D) by its unit rows; see :func:`backward_through_normalize`.

        It is float32 (float64 for float64 tables). On a CPU it may be overwritten when the next is asked for; on a GPU
        each has memory of its own, since the last one may still be in use by a collective.
        """
        batch, centers, member = inputs.batch, inputs.rows.centers, inputs.member
        dtype = torch.promote_types(batch.features.dtype, torch.float32)
        log_z, scale, target_grad = (x.to(dtype) for x in (inputs.log_z, inputs.scale, inputs.target_grad))
        products = ChunkProducts(batch.features.dtype, batch.features.device, self._fp32_precision)
        factors, kept = batch.factors(products), KeptSecondPass(inputs, self._fp32_precision)
        for chunk in inputs.rows.chunks(self.second_pass_classes(inputs)):
            if (gradient := kept.unit_gradient(chunk)) is not None:
                yield chunk, gradient
                continue
            weight = products.rows(chunk)
            logits = batch.logits(chunk, centers, weight, factors, products)
            log_probabilities = logits.z.sub_(log_z)
            if batch.negatives is not None:  # whose products may round otherwise at the limit than in pass 1
                log_probabilities.clamp_(max=0)
            probabilities = log_probabilities.exp_().mul_(scale)
            if logits.slope is not None:
                probabilities.mul_(logits.slope)
            if member is not None:
                probabilities.mul_(member[chunk.start : chunk.stop])
            batch.scatter_targets(chunk, probabilities, target_grad)
            weighted = _on_rows(probabilities, Logits(logits.z, None, logits.winner), centers)
            yield chunk, products.multiply("gradient", products.rounded_factor(weighted), factors[0])

    def second_pass_classes(self, inputs: PassInputs) -> int:
        """Classes of a chunk of pass 2. Replicas sum chunk by chunk: it is the same for any number of samples."""
        features = inputs.batch.features
        return copied_classes(inputs.chunk_size, features.dtype, features.device)

    def update_pass(self, inputs: PassInputs, updater: Updater, state: StateOf, update: Update) -> None:
        """Run pass 2, and update each chunk's rows as soon as their gradient exists.

        Args:
            inputs: of pass 2.
            updater: of this backend.
            state: gives the optimizer's tables that a chunk's index selects rows of.
            update: the step.
        """
        for chunk, gradient in self.second_pass(inputs):
            updater(chunk, gradient, state(chunk), update)

    def updater(self, kind: UpdateKind) -> Updater:
        """Choose, once for an optimizer, how its rows are updated: :meth:`update`, or a kernel with its arguments."""
        return self.update

    def without_kernel(self, reason: str) -> Updater:
        """Update by PyTorch though there is a kernel, for a reason that :meth:`describe` gives from now on."""
        self.reason += f"; updates by torch: {reason}"
        return self.update

    def update(self, chunk: Chunk, unit_gradient: Tensor, state: Mapping[str, RowState], update: Update) -> None:
        """Update a chunk's rows, their state and 1/norms.

        Args:
            chunk: of pass 2.
            unit_gradient: (n·K, D) by its unit rows. May be overwritten.
            state: the optimizer's tables by name, which ``chunk.index`` selects rows of.
            update: the rule and what all chunks of a step have in common.
        """
        # rows are independent of each other: bits do not depend on how many are updated at a time
        for part, rows in chunk.parts(_CPU_ROWS if unit_gradient.device.type == "cpu" else len(unit_gradient)):
            with nullcontext() if update.skip is None else kept_rows(rows, state, update.skip != 0):
                self._apply(rows, unit_gradient[part], state, update)

    def _apply(self, rows: Chunk, unit_gradient: Tensor, state: Mapping[str, RowState], update: Update) -> None:
        gradient = backward_through_normalize(unit_gradient, rows).mul_(update.factor)
        weight = rows.weight.to(gradient.dtype, copy=True)
        moments = {name: table.read(rows.index, gradient.dtype) for name, table in state.items()}
        update.rule.apply(weight, gradient, moments)
        bits = rounding_bits(rows, state, update.seed, update.step, update.first_row)
        for name, table in state.items():
            table.write(rows.index, moments[name], bits)
        write_rows(rows, weight, bits, update.rounding)


def _on_rows(matrix: Tensor, logits: Logits, centers: int) -> Tensor:
    """(classes, B) times the slope, laid out on the table's rows (classes·K, B): only the winning centre gets it."""
    if logits.slope is not None:
        matrix = matrix * logits.slope
    if logits.winner is None:
        return matrix
    spread = matrix.new_zeros((matrix.shape[0], centers, matrix.shape[1]))
    return spread.scatter_(1, logits.winner[:, None], matrix[:, None]).flatten(0, 1)


def rounding_bits(
    chunk: Chunk, state: Mapping[str, RowState], seed: int, step: int, first_row: int
) -> RoundingBits | None:
    """What rounds the rows of a chunk and of its state; None where nothing is rounded at random."""
    if not any(table.dtype in ROUNDED for table in (chunk.table.weight, *(each.values for each in state.values()))):
        return None
    return RoundingBits.draw(seed, step, chunk.local_rows + first_row, chunk.table.weight.shape[1])


def write_rows(chunk: Chunk, weight: Tensor, bits: RoundingBits | None, rounding: Rounding) -> None:
    """Store a chunk's rows in its table, and renew their norms."""
    store(chunk.table.weight, chunk.index, weight, None if bits is None else bits.low, rounding)
    renew_norms(chunk.table, chunk.index)


def backward_through_normalize(gradient: Tensor, chunk: Chunk) -> Tensor:
    """Turn the gradient by unit rows into the gradient by the rows, in place: ρ(g − Ŵ⟨g, Ŵ⟩)."""
    inverse = chunk.inverse_norm[:, None]
    unit = chunk.weight.to(gradient.dtype) * inverse
    along = (gradient * unit).sum(1, keepdim=True)
    return gradient.addcmul_(unit, along, value=-1).mul_(inverse)


def squared_norm(gradient: Tensor, chunk: Chunk) -> Tensor:
    """‖ρ(g − Ŵ⟨g, Ŵ⟩)‖² over all rows, a float64 scalar, for the gradient g by unit rows, which is overwritten.

    It is Σ ρ²(‖g‖² − ⟨g, Ŵ⟩²): two reductions of each row, in float64, since they cancel where g is along the row.
    """
    inverse = chunk.inverse_norm.double()
    square = torch.linalg.vector_norm(gradient, dim=1, dtype=torch.float64).square_()
    along = gradient.mul_(chunk.weight).sum(1, dtype=torch.float64).mul_(inverse)
    total: Tensor = square.addcmul_(along, along, value=-1).clamp_(min=0).mul_(inverse.square()).sum()
    return total
