"""The computation of the class head in a training step: gather, margin, pass 1, loss, gradients; pass 2 for the update.

Notation: x̂ unit embeddings (B, D), W rows of the table, ρ = 1/‖W‖, t target cosines, z logits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from plsc.head.backends.torch_backend import (
    Batch,
    Negatives,
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
from plsc.head.global_batch import GlobalBatch, LocalTargetRows, gather_batch, gather_labels
from plsc.head.one_label import Normalized, OneLabel
from plsc.head.pending import PendingBackward, PendingBatches, concatenated, states, union
from plsc.head.replica_exchange import ReplicaExchange
from plsc.head.sampling import ClassSampler, keyed_generator
from plsc.head.update_rules import Update
from plsc.losses.margins import Margin, State, TargetLogit
from plsc.parallel.collectives import all_gather_equal, all_reduce_max, all_reduce_sum, reduce_scatter_rows
from plsc.parallel.mesh import Mesh


class NegativesOfBatches(Protocol):
    """Tells which classes are negatives of a batch's samples."""

    def of_batch(self, targets: Sequence[LocalTargetRows], mesh: Mesh) -> Negatives:
        """Those of b samples with K labels, as b·K, each sample's labels side by side.

        Args:
            targets: the shard's rows of each column of labels.
            mesh: the ranks that share the table; all call.
        """


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

    Attributes:
        forms: what depends on the labels' form, by their number of dimensions.
        negatives: which classes are negatives; None: all but the label.
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
    ) -> None:
        self.exchange = exchange
        self.forms = {1: OneLabel()}
        self.negatives: NegativesOfBatches | None = None
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
        gathered = gather_batch(
            embeddings, labels, self.table, self.mesh, with_norms=self.margin.uses_norm, sizes=sizes, weights=weights
        )
        form = self.forms[gathered.labels.dim()]
        selected, rows = self._select_rows(gathered, training)
        batch, cos, local_targets, target = self._compare_targets(form, rows, gathered, training)
        batch, labels, parts = form.of_passes(batch, gathered.labels)
        size = self.chunk_size(len(batch.position))
        keeps = training and not (self.table.kept is not None and self.table.kept.are_all)  # else no pass 2 follows
        partial = self.backend.first_pass(rows, batch, size, with_grad=differentiate, keeps=keeps)
        maximum, total, *sums = self._sum_over_shards(partial, *(form.columns(cos) if target is None else ()))
        if target is None:
            cos = form.of_columns(sums, cos)
            target = self._apply_margin(cos, gathered, training)
            batch = replace(batch, phi=target.phi, state=self.margin_state)
        normalized = form.normalize(self.margin, gathered, target, cos, (maximum, total), self._generator)
        loss, count = self._mean(normalized, gathered.total)
        scale = self.margin.s / count
        target_grad = normalized.target_grad(target.slope, scale)
        pending = PendingBackward(
            batch,
            labels,
            selected,
            normalized.log_z,
            normalized.scale_of_passes(scale),
            form.target_grad_of_passes(target_grad),
            self.table.version,
            gathered.largest * parts,
            rows,
            partial.exponentials,
        )
        if training:
            self.forwards += 1
        loss = loss.to(partial.maximum.dtype)
        if partial.grad_embeddings is None:
            return loss, None, pending
        grad = _shards_gradient(partial.grad_embeddings, partial, normalized, scale)
        grad = form.add_targets(grad, target_grad, local_targets)
        # In one piece: scattered by samples while pass 1 goes on, each would read the table anew, and leave before 1/Z
        # and the targets' share are known, which come with the sums behind pass 1.
        unit_gradient = reduce_scatter_rows(grad, gathered.sizes, self.mesh.head)
        return loss, self._embedding_gradient(embeddings, unit_gradient, target, normalized, gathered, count), pending

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

    def _compare_targets(
        self, form: OneLabel, rows: ClassRows, gathered: GlobalBatch, training: bool
    ) -> tuple[Batch, Tensor, list[LocalTargetRows], TargetLogit | None]:
        """What pass 1 needs of the targets, before their form is that of the passes.

        Returns:
            The batch; cosines of the targets that the shard owns, else 0; their rows; and, of a margin that changes
            negatives, which pass 1 compares with the targets, what it makes of these.
        """
        position = rows.positions(gathered.labels - self.sampler.first)
        cos, local_targets = form.cosines(rows, gathered.features, position)
        target: TargetLogit | None = None
        if self.margin.changes_negatives:
            target = self._apply_margin(all_reduce_sum(cos, self.mesh.head), gathered, training)
        phi = cos if target is None else target.phi  # of other margins pass 1 has no use for it
        batch = Batch(gathered.features, position, phi, self.margin, self.margin_state)
        if self.negatives is not None:
            batch = replace(batch, negatives=self.negatives.of_batch(local_targets, self.mesh.head))
        return batch, cos, local_targets, target

    def _apply_margin(self, cos: Tensor, gathered: GlobalBatch, training: bool) -> TargetLogit:
        """The margin at the group's targets (b,) or (b, K). Statistics, and margins drawn at random, are those of the
        whole batch."""
        cos = gathered.gather_replicas(cos, self.mesh)
        norms = gathered.gather_replicas(gathered.norms, self.mesh) if gathered.norms is not None else None
        if training:
            self.margin_state = self.margin.updated_state(self.margin_state, cos, norms)
        form = self.forms[cos.dim()]
        targets = self.margin.target(cos.flatten(), form.norms(norms, cos), self.margin_state, self._generator(0))
        optional = targets.norm_slope, targets.penalty, targets.penalty_slope
        phi, slope, norm_slope, penalty, penalty_slope = (
            None if values is None else gathered.local_group(values.view(cos.shape))
            for values in (targets.phi, targets.slope, *optional)
        )
        assert phi is not None
        assert slope is not None
        return form.at_targets(TargetLogit(phi, slope, norm_slope, penalty, penalty_slope), gathered.labels)

    def _generator(self, salt: int) -> torch.Generator:
        """On the CPU, of this batch, equal on all ranks; 0 is the margins', 1 and above are the shards'."""
        return keyed_generator(torch.device("cpu"), self.sampler.seed, salt, self.forwards)

    def _sum_over_shards(self, partial: PartialSoftmax, *others: Tensor) -> list[Tensor]:
        """The shards' largest maximum, their Σ exp(z − maximum) without targets, and the sums of ``others``.

        All are (b,) float64. Sums share a collective: over many ranks each takes as long as its latency.
        """
        maximum, total = partial.maximum.double(), partial.total
        if not is_bounded(self.margin, self.table.shape.num_classes):
            highest = all_reduce_max(maximum.clone(), self.mesh.head)
            maximum, total = highest, total * (maximum - highest).exp()
        return [maximum, *all_reduce_sum(torch.stack([total, *others]), self.mesh.head)]

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
        selected, member = union(pending, self.table.shape.rows // self.table.centers)
        if update is not None:
            self.exchange.record(selected)
        rows = self.table.rows_again(selected, [p.rows for p in pending], update)
        negatives = pending[0].batch.negatives
        batch = Batch(
            torch.cat([p.batch.features for p in pending]),
            rows.positions(concatenated([p.labels for p in pending], -1) - self.sampler.first),
            concatenated([p.batch.phi for p in pending], 0),
            self.margin,
            states(pending),
            None if negatives is None else negatives.with_others([p.batch.negatives for p in pending[1:]]),
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
        kept = [p.exponentials for p in pending if p.exponentials is not None]
        kept = kept if len(kept) == len(pending) and member is None else []  # else some visit other rows
        return PassInputs(rows, batch, log_z, scale, target_grad, size, member, kept)

    def dense_gradient(self, pending: PendingBackward) -> Tensor:
        """The gradient by the whole table (rows, D), for ``update="autograd"``."""
        dense = torch.zeros_like(self.table.parameter)
        for chunk, gradient in self.gradient_chunks([pending]):
            dense[chunk.index] = backward_through_normalize(gradient, chunk).to(dense.dtype)
        return dense


def _shards_gradient(pull: Tensor, partial: PartialSoftmax, normalized: Normalized, scale: Tensor | float) -> Tensor:
    """Turn pass 1's sums of rows (b, D) into the loss's gradient by unit embeddings, in place, without the targets'."""
    pull.mul_(((partial.maximum - normalized.highest).exp() / normalized.total).to(pull.dtype)[:, None])
    if normalized.weights is not None:
        pull.mul_(normalized.weights.to(pull.dtype)[:, None])
    return pull.mul_(scale)


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
            pending.exponentials = None
        elif ctx.training:
            softmax.pending.add(pending)
        # data parallelism averages gradients over the ranks; the factor makes that average the sum of their parts
        by_embeddings = (gradient * (grad * softmax.mesh.world_size)).to(ctx.dtype)
        return by_embeddings, None, by_weight, None, None, None, None, None, None
