"""The computation of the class head in a training step: gather, margin, pass 1, loss, gradients; pass 2 for the update.

Notation: x̂ unit embeddings (B, D), W rows of the table, ρ = 1/‖W‖, t target cosines, z logits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from plsc.head.backends.torch_backend import (
    Batch,
    PartialSoftmax,
    PassInputs,
    TorchBackend,
    Updater,
    backward_through_normalize,
    is_bounded,
)
from plsc.head.class_table import (
    SMALLEST_NORM,
    Chunk,
    ClassRows,
    ClassTable,
    OptimizerState,
    default_chunk_size,
    overlapped_chunk_size,
)
from plsc.head.global_batch import GlobalBatch, LocalTargetRows, gather_batch, gather_labels, target_cosines
from plsc.head.multi_label import LabelOptions, Normalized, concatenated, normalize_each, separate
from plsc.head.negative_filter import concatenated_filters, gather_filter
from plsc.head.pending import PendingBackward, PendingBatches
from plsc.head.replica_exchange import ReplicaExchange
from plsc.head.sampling import ClassSampler, keyed_generator
from plsc.head.update_rules import Update
from plsc.losses.margins import Margin, State, TargetLogit
from plsc.parallel.collectives import all_gather_equal, all_reduce_max, all_reduce_sum, reduce_scatter_rows
from plsc.parallel.mesh import Mesh

_DRAWN_LABELS = -1  # the salt of their keys: 0 belongs to the margins, 1 and above to shards


class ShardedSoftmax:
    """The loss of a class table that is sharded over a head group's ranks and replicated over the groups.

    Args:
        mesh: the ranks.
        margin: of the softmax.
        table: this rank's rows.
        backend: computes the passes.
        sampler: of the classes that take part.
        chunk_classes: classes per chunk; None: chosen from the batch and the device.
        exchange: between the replicas of the shard.
        multi_label: how the losses of several labels a sample are formed.
        negative_filter: the cosine of two rows from which on a class is no negative of the other; None: all are.

    Attributes:
        margin_state: the margin's running statistics, equal on all ranks.
        forwards: training batches seen; keys sampling and random margins.
        pending: batches that went through backward() and wait for the update.
    """

    def __init__(
        self,
        mesh: Mesh,
        margin: Margin,
        table: ClassTable,
        backend: TorchBackend,
        sampler: ClassSampler,
        chunk_classes: int | None,
        exchange: ReplicaExchange,
        multi_label: LabelOptions,
        negative_filter: float | None = None,
    ) -> None:
        self.exchange, self.multi_label, self.negative_filter = exchange, multi_label, negative_filter
        self.mesh, self.margin, self.table, self.backend, self.sampler = mesh, margin, table, backend, sampler
        self.chunk_classes, self.dim = chunk_classes, table.shape.dim
        self.margin_state: State = {name: value.to(mesh.device) for name, value in margin.initial_state().items()}
        self.forwards = 0
        self.pending = PendingBatches(table)

    def chunk_size(self, batch: int) -> int:
        """Classes per chunk for this many samples."""
        if self.chunk_classes is not None:
            return self.chunk_classes
        return default_chunk_size(batch, self.dim, self.table.centers, self.mesh.device.type)

    # Forward, in the order in which it happens.

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        *,
        differentiate: bool,
        training: bool,
        sizes: Sequence[int] | None = None,
        weights: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, PendingBackward]:
        """Compute the mean loss over the global batch.

        Args:
            embeddings, labels: this rank's (b, D) and (b,) or (b, K).
            differentiate: compute gradients too.
            training: count this batch, and move the margin's statistics, if it is differentiated.
            sizes: every rank's number of samples, where the caller knows them.
            weights: (b, K) of the labels' losses.

        Returns:
            The loss; this rank's embedding gradient (b, D) if ``differentiate``; what the update needs.

        Raises:
            UsageError: no optimizer took the batches before this one (:meth:`PendingBatches.raise_if_forgotten`).
        """
        training = training and differentiate
        if training:
            self.pending.raise_if_forgotten()
        uses_norm = self.margin.uses_norm
        gathered = gather_batch(
            embeddings, labels, self.table, self.mesh, with_norms=uses_norm, sizes=sizes, weights=weights
        )
        selected, rows = self._select_rows(gathered, training)
        position = rows.positions(gathered.labels - self.sampler.first)
        cos, local_targets = _target_cosines(rows, gathered.features, position)
        target: TargetLogit | None = None
        if self.margin.changes_negatives:  # pass 1 compares them with the targets
            target = self._apply_margin(all_reduce_sum(cos, self.mesh.head), gathered, training)
        phi = cos if target is None else target.phi  # of other margins pass 1 has no use for it
        batch = Batch(gathered.features, position, phi, self.margin, self.margin_state)
        labels, unrolls = gathered.labels, False
        if self.negative_filter is not None:
            batch, labels = self._filtered(batch, labels, rows, local_targets)
            unrolls = cos.dim() > 1
        partial = self.backend.first_pass(rows, batch, self.chunk_size(len(batch.position)), with_grad=differentiate)
        others = [] if target is not None else [cos.flatten()] if cos.dim() == 1 or unrolls else cos.unbind(1)
        maximum, total, *sums = self._sum_over_shards(partial, *others)
        if target is None:
            cos = sums[0].view(cos.shape) if len(others) == 1 else torch.stack(sums, 1)
            target = self._apply_margin(cos, gathered, training)
            batch = replace(batch, phi=target.phi, state=self.margin_state)
        if cos.dim() == 1:
            normalized = _normalize(target, self.margin.s, maximum, total)
        else:
            normalized = self._normalize_labels(gathered, target, cos, maximum + total.log())
        loss, count = self._mean(normalized, gathered.total)
        scale = self.margin.s / count
        target_grad = normalized.by_logit * target.slope * scale
        if normalized.by_cosine is not None:
            target_grad = target_grad + normalized.by_cosine * scale
        by_sample = torch.empty_like(normalized.log_z).fill_(scale)
        if normalized.weights is not None:
            by_sample *= normalized.weights
        pending = PendingBackward(
            batch,
            labels,
            selected,
            normalized.log_z,
            by_sample,
            self.multi_label.unrolled_grad(target_grad) if unrolls else target_grad,
            self.table.version,
            gathered.largest * (cos.shape[1] if unrolls else 1),
            rows,
        )
        if training:
            self.forwards += 1
        loss = loss.to(partial.maximum.dtype)
        if partial.grad_embeddings is None:
            return loss, None, pending
        grad = _shards_gradient(partial.grad_embeddings, partial, normalized, scale)
        grad = _with_targets(grad, target_grad, local_targets)
        # In one piece: scattered by samples while pass 1 goes on, each would read the table anew, and leave before 1/Z
        # and the targets' share are known, which come with the sums behind pass 1.
        unit_gradient = reduce_scatter_rows(grad, gathered.sizes, self.mesh.head)
        gradient = self._embedding_gradient(embeddings, unit_gradient, target, normalized, gathered, count)
        return loss, gradient, pending

    def prefetch(self, labels: Tensor, sizes: Sequence[int] | None = None) -> None:
        """Begin to fetch the rows of a coming training batch with this rank's ``labels`` (b,) of all ``sizes``."""
        if self.table.is_resident or self.sampler.takes_all:
            return
        all_labels = gather_labels(labels, self.table.shape.num_classes, self.mesh, sizes)
        self.table.notice_writes()
        key = self.forwards + self.table.num_prefetched
        self.table.prefetch(key, all_labels, self.sampler.draw(all_labels, key))

    def _select_rows(self, gathered: GlobalBatch, training: bool) -> tuple[Tensor | None, ClassRows]:
        """This step's local classes (None: all), the same on all replicas, and their rows."""
        if self.sampler.takes_all:
            return None, self.table.rows(None)
        labels = gathered.gather_replicas(gathered.labels, self.mesh)
        if training and not self.table.is_resident:
            self.table.notice_writes()
            prefetched = self.table.take_prefetched(self.forwards, labels)
            if prefetched is not None:
                return prefetched
        selected = self.sampler.draw(labels, self.forwards)
        return selected, self.table.rows(selected, training=training)

    def _filtered(
        self, batch: Batch, labels: Tensor, rows: ClassRows, targets: Sequence[LocalTargetRows]
    ) -> tuple[Batch, Tensor]:
        """The batch with its filter, and its labels. Those of several a sample have other negatives each.

        They are as many samples then.
        """
        assert self.negative_filter is not None
        found = gather_filter(targets, self.negative_filter, self.mesh.head)
        if labels.dim() == 1:
            return replace(batch, negatives=found), labels
        features = batch.features.repeat_interleave(labels.shape[1], 0)
        labels = self.multi_label.unrolled(labels)
        position = rows.positions(labels - self.sampler.first)
        return replace(batch, features=features, position=position, phi=batch.phi.flatten(), negatives=found), labels

    def _apply_margin(self, cos: Tensor, gathered: GlobalBatch, training: bool) -> TargetLogit:
        """The margin at the group's targets (b,) or (b, K). Statistics, and margins drawn at random, are those of the
        whole batch."""
        cos = gathered.gather_replicas(cos, self.mesh)
        norms = gathered.gather_replicas(gathered.norms, self.mesh) if gathered.norms is not None else None
        if training:
            self.margin_state = self.margin.updated_state(self.margin_state, cos, norms)
        generator = keyed_generator(torch.device("cpu"), self.sampler.seed, 0, self.forwards)
        if norms is not None and cos.dim() > 1:
            norms = norms.repeat_interleave(cos.shape[1])
        targets = self.margin.target(cos.flatten(), norms, self.margin_state, generator)
        optional = targets.norm_slope, targets.penalty, targets.penalty_slope
        phi, slope, norm_slope, penalty, penalty_slope = (
            None if values is None else gathered.local_group(values.view(cos.shape))
            for values in (targets.phi, targets.slope, *optional)
        )
        assert phi is not None
        assert slope is not None
        if cos.dim() > 1 and penalty is not None and penalty_slope is not None:  # of a sample, if it has a label
            has_label = (gathered.labels >= 0).any(1)
            penalty, penalty_slope = penalty[:, 0], torch.where(has_label, penalty_slope[:, 0], 0)
        return TargetLogit(phi, slope, norm_slope, penalty, penalty_slope)

    def _sum_over_shards(self, partial: PartialSoftmax, *others: Tensor) -> list[Tensor]:
        """The shards' largest maximum, their Σ exp(z − maximum) without targets, and the sums of ``others``.

        All are (b,) float64. Sums share a collective: over many ranks each takes as long as its latency.
        """
        maximum, total = partial.maximum.double(), partial.total
        if not is_bounded(self.margin, self.table.shape.num_classes):
            highest = all_reduce_max(maximum.clone(), self.mesh.head)
            maximum, total = highest, total * (maximum - highest).exp()
        return [maximum, *all_reduce_sum(torch.stack([total, *others]), self.mesh.head)]

    def _normalize_labels(self, gathered: GlobalBatch, target: TargetLogit, cos: Tensor, log_n: Tensor) -> Normalized:
        """The losses of several labels a sample; which of them count is drawn from the whole batch's keys."""
        labels, keys = gathered.labels, None
        if self.multi_label.draws(labels):
            generator = keyed_generator(torch.device("cpu"), self.sampler.seed, _DRAWN_LABELS, self.forwards)
            on_host = torch.empty(gathered.total, labels.shape[1], pin_memory=labels.is_cuda)
            keys = gathered.local_group(on_host.uniform_(generator=generator)).to(labels.device, non_blocking=True)
        weights = self.multi_label.weights(labels, gathered.weights, keys)
        if self.negative_filter is not None:
            return normalize_each(labels, weights, target, self.margin.s, log_n)
        if self.margin.separates_positives:
            return separate(labels, weights, target, self.margin.s, log_n)
        return self.multi_label.normalize(labels, weights, target, cos, self.margin.s, log_n)

    def _mean(self, normalized: Normalized, total: int) -> tuple[Tensor, Tensor | int]:
        """The mean loss over the samples of the whole batch of ``total`` that have a label, and how many have.

        Sums are gathered and added here: the same bits on every rank.
        """
        own = normalized.losses.sum()
        if normalized.count is None:
            return all_gather_equal(own, self.mesh.replicas).sum() / total, total
        everyone = all_gather_equal(torch.stack([own, normalized.count.double()]), self.mesh.replicas)
        sums = everyone.reshape(-1, 2).sum(0)
        count = sums[1].clamp(min=1)
        return sums[0] / count, count

    def _embedding_gradient(
        self,
        embeddings: Tensor,
        unit_gradient: Tensor,
        target: TargetLogit,
        normalized: Normalized,
        gathered: GlobalBatch,
        count: Tensor | int,
    ) -> Tensor:
        """Turn the gradient by this rank's unit embeddings into the gradient by the embeddings: through ‖x‖."""
        x = embeddings.to(unit_gradient.dtype)
        norm = torch.linalg.vector_norm(x, dim=1, keepdim=True).clamp(min=SMALLEST_NORM)
        unit = x / norm
        gradient = (unit_gradient - unit * (unit_gradient * unit).sum(1, keepdim=True)) / norm
        by_norm = torch.zeros_like(normalized.losses)
        if target.norm_slope is not None:
            by_label = normalized.by_logit * target.norm_slope * self.margin.s
            by_norm += by_label if by_label.dim() == 1 else by_label.sum(1)
        if target.penalty_slope is not None:
            by_norm += target.penalty_slope
        if self.margin.uses_norm:
            local = torch.split(by_norm, gathered.sizes)[self.mesh.head.rank] / count
            gradient = gradient + unit * local.to(gradient.dtype)[:, None]
        return cast(Tensor, gradient)

    # Pass 2.

    def gradient_chunks(
        self, pending: list[PendingBackward], update: OptimizerState | None = None
    ) -> Iterator[tuple[Chunk, Tensor]]:
        """Run pass 2: the rows that the pending batches touch, chunk by chunk, with the gradients by their unit rows.

        It runs over the concatenation of ``pending``, so that table traffic is paid once, however many they are.
        Gradients are summed over the replicas. Those of replicas that step by themselves are of the group's own mean
        loss. Every rank calls. Where the caller updates each chunk as it comes, ``update`` is its state.
        """
        inputs = self._pass_inputs(pending, update)
        with torch.autocast(self.mesh.device.type, enabled=False):
            chunks = self.backend.second_pass(inputs)
            yield from self.exchange.summed(chunks)

    def update_rows(
        self, pending: list[PendingBackward], state: OptimizerState, updater: Updater, step: Update
    ) -> None:
        """Run pass 2 as :meth:`gradient_chunks` does, and update every row that took part. Every rank calls.

        Rows that the table keeps stay as they are.
        """
        kept = self.table.kept
        if kept is not None:
            if kept.are_all:
                return
            updater = kept.updater(updater)
        if self.exchange.sums:
            for chunk, gradient in self.gradient_chunks(pending, state):
                updater(chunk, gradient, state.of(chunk), step)
            return
        inputs = self._pass_inputs(pending, state)
        with torch.autocast(self.mesh.device.type, enabled=False):
            self.backend.update_pass(inputs, updater, state.of, step)

    def _pass_inputs(self, pending: list[PendingBackward], update: OptimizerState | None) -> PassInputs:
        """The input of pass 2 over the concatenation of ``pending``."""
        selected, member = _union(pending, self.table.shape.rows // self.table.centers)
        if update is not None:
            self.exchange.record(selected)
        rows = self.table.rows_again(selected, [p.rows for p in pending], update)
        batch = Batch(
            torch.cat([p.batch.features for p in pending]),
            rows.positions(concatenated([p.labels for p in pending], -1) - self.sampler.first),
            concatenated([p.batch.phi for p in pending], 0),
            self.margin,
            _states(pending),
            None if self.negative_filter is None else concatenated_filters([p.batch.negatives for p in pending]),
        )
        log_z = torch.cat([p.log_z for p in pending])
        # of the mean over all samples a group has its part; of its own mean, as many times that as there are groups
        groups = self.exchange.loss_factor
        factors = [p.loss_gradient.double() if groups == 1 else p.loss_gradient.double() * groups for p in pending]
        scale = torch.cat([p.scale * factor for p, factor in zip(pending, factors, strict=True)])
        target_grad = concatenated([p.target_grad * factor for p, factor in zip(pending, factors, strict=True)], 0)
        size = self.chunk_size(sum(p.largest_group for p in pending))  # chunks are the same on all replicas
        if self.exchange.overlaps and self.chunk_classes is None:
            size = overlapped_chunk_size(size, rows.num_classes)
        return PassInputs(rows, batch, log_z, scale, target_grad, size, member)

    def dense_gradient(self, pending: PendingBackward) -> Tensor:
        """The gradient by the whole table (rows, D), for ``update="autograd"``."""
        dense = torch.zeros_like(self.table.parameter)
        for chunk, gradient in self.gradient_chunks([pending]):
            dense[chunk.index] = backward_through_normalize(gradient, chunk).to(dense.dtype)
        return dense


def _target_cosines(rows: ClassRows, features: Tensor, position: Tensor) -> tuple[Tensor, list[LocalTargetRows]]:
    """:func:`target_cosines` of one label a sample (b,), or of each of K in turn (b, K)."""
    if position.dim() == 1:
        cos, found = target_cosines(rows, features, position)
        return cos, [found]
    columns = [target_cosines(rows, features, column) for column in position.unbind(1)]
    return torch.stack([cos for cos, _ in columns], 1), [found for _, found in columns]


def _normalize(target: TargetLogit, s: float, maximum: Tensor, total: Tensor) -> Normalized:
    """Losses (b,) and derivatives from the shards' sums, for one label a sample.

    The targets' own exponentials, which pass 1 left out, are added here: exactly once, in float64.
    """
    logit = target.phi * s
    highest = torch.maximum(maximum, logit)
    total = total * (maximum - highest).exp() + (logit - highest).exp()
    log_z = highest + total.log()
    losses = log_z - logit
    if target.penalty is not None:
        losses = losses + target.penalty
    return Normalized(losses, highest, total, log_z, (logit - log_z).exp() - 1)


def _with_targets(grad: Tensor, target_grad: Tensor, targets: Sequence[LocalTargetRows]) -> Tensor:
    """The gradient by unit embeddings (b, D) with the targets' share, of negatives' (b, D), or (b·K, D) by label."""
    if len(grad) > len(target_grad):
        grad = grad.view(*target_grad.shape, -1).sum(1)
    by_label = [target_grad] if target_grad.dim() == 1 else target_grad.unbind(1)
    for rows_of_label, of_label in zip(targets, by_label, strict=True):
        rows_of_label.add_gradient(grad, of_label)
    return grad


def _shards_gradient(pull: Tensor, partial: PartialSoftmax, normalized: Normalized, scale: Tensor | float) -> Tensor:
    """Turn pass 1's sums of rows (b, D) into the loss's gradient by unit embeddings, in place, without the targets'."""
    pull.mul_(((partial.maximum - normalized.highest).exp() / normalized.total).to(pull.dtype)[:, None])
    if normalized.weights is not None:
        pull.mul_(normalized.weights.to(pull.dtype)[:, None])
    return pull.mul_(scale)


def _union(pending: list[PendingBackward], count: int) -> tuple[Tensor | None, Tensor | None]:
    """The classes that any batch selected (None: all), and which of them each sample's softmax held (None: all).

    Of the shard's ``count`` classes, some may have come after a batch that took all there were.
    """
    if all(p.selected is None and p.rows.num_classes == count for p in pending):
        return None, None
    device = pending[0].log_z.device
    sets = [torch.arange(p.rows.num_classes, device=device) if p.selected is None else p.selected for p in pending]
    if len(sets) == 1:
        return sets[0], None
    union = torch.cat(sets).unique()
    held = [torch.isin(union, selected) for selected in sets]
    columns = [column[:, None].expand(-1, len(p.log_z)) for column, p in zip(held, pending, strict=True)]
    return union, torch.cat(columns, dim=1)


def _states(pending: list[PendingBackward]) -> dict[str, Tensor]:
    """The margin's statistics as each sample (B,) met them: they move from one micro-batch to the next."""
    return {
        name: torch.cat([p.batch.state[name].expand(len(p.log_z)) for p in pending]) for name in pending[0].batch.state
    }


class HeadLoss(torch.autograd.Function):
    """The head in autograd's graph: the loss forward; backward the embeddings' gradient, and a pending update.

    ``anchor`` requires a gradient, so that backward() comes here even where the embeddings need none. ``weight`` is the
    table where it is to get a dense gradient, else None.
    """

    @staticmethod
    def forward(
        ctx: Any,
        embeddings: Tensor,
        anchor: Tensor,
        weight: Tensor | None,
        labels: Tensor,
        weights: Tensor | None,
        softmax: ShardedSoftmax,
        sizes: Sequence[int] | None,
        differentiate: bool,
        training: bool,
    ) -> Tensor:
        with torch.autocast(softmax.mesh.device.type, enabled=False):
            loss, gradient, pending = softmax.forward(
                embeddings.detach(),
                labels,
                differentiate=differentiate,
                training=training,
                sizes=sizes,
                weights=weights,
            )
        ctx.softmax, ctx.pending, ctx.training, ctx.dense = softmax, pending, training, weight is not None
        ctx.save_for_backward(*([gradient] if gradient is not None else []))
        ctx.dtype = embeddings.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        softmax: ShardedSoftmax = ctx.softmax
        pending: PendingBackward = ctx.pending
        pending.grad_loss = grad.detach().clone()
        by_weight = None
        if ctx.dense:
            by_weight = softmax.dense_gradient(pending)
        elif ctx.training:
            softmax.pending.add(pending)
        # data parallelism averages gradients over the ranks; the factor makes that average the sum of their parts
        by_embeddings = (gradient * (grad * softmax.mesh.world_size)).to(ctx.dtype)
        return by_embeddings, None, by_weight, None, None, None, None, None, None
