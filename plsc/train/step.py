"""One optimizer step: forward, loss and backward over its micro-batches, a vote of all ranks, the update."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from plsc.losses.margins import State
from plsc.optim.gradients import clip_by_norm_, sharded_norm, total_norm
from plsc.optim.verdict import Verdict
from plsc.parallel.collectives import all_reduce_max
from plsc.parallel.step_timeline import BACKBONE, HEAD, OPTIMIZER, step_part
from plsc.parallel.strategies import Weight
from plsc.train.components import TrainComponents
from plsc.train.feature import overriding
from plsc.train.micro_batches import MicroBatch


@dataclass(frozen=True)
class StepResult:
    """The result of a step, the same on every rank.

    ``loss`` is the mean over the step's global samples, ``grad_norm`` that of the backbone (with the head's
    under clip_head) before clipping; ``skipped`` steps changed nothing; ``stop`` is the signal that some rank
    was asked to stop by, or 0. ``table_losses`` are the means of several tables, by name, each over its own samples.
    ``feature_losses`` are those that rare features add, by name and without their weights.
    """

    loss: float
    grad_norm: float
    images: int
    skipped: bool
    stop: int
    table_losses: dict[str, float]
    feature_losses: dict[str, float]


@dataclass(frozen=True)
class EnqueuedStep:
    """A step of ``images`` samples whose work is enqueued, and whose result the device has not come to yet.

    ``tables`` are the names of the class tables whose losses are in the verdict, where there are several losses; behind
    them are those of ``features``, by their names.
    """

    images: int
    verdict: Verdict
    tables: Sequence[str]
    features: Sequence[str] = ()

    def result(self) -> StepResult:
        """The step's result; waits until the device has come to the ranks' vote, which is before the update."""
        skipped, stop, loss, norm, *losses = self.verdict.numbers()
        of_tables, of_features = losses[: len(self.tables)], losses[len(self.tables) :]
        by_table = dict(zip(self.tables, of_tables, strict=True)) if len(of_tables) > 1 else {}
        by_feature = dict(zip(self.features, of_features, strict=True)) if of_features else {}
        return StepResult(loss, norm, self.images, bool(skipped), int(stop), by_table, by_feature)


class RunningStatistics:
    """The buffers of a backbone as they were before a step, to which the device goes back where a step is skipped.

    Args:
        buffers: all of them. Copies are made of those of one dtype together: a step has hundreds, and each copy of its
            own would be a launch.
    """

    def __init__(self, buffers: Iterable[Tensor]) -> None:
        self._buffers: dict[torch.dtype, list[Tensor]] = {}
        for buffer in buffers:
            self._buffers.setdefault(buffer.dtype, []).append(buffer)
        self.before = {dtype: _flat(group) for dtype, group in self._buffers.items()}

    def remember(self) -> None:
        """Copy the buffers."""
        for dtype, group in self._buffers.items():
            self.before[dtype].copy_(_flat(group))

    def restore_where(self, skip: Tensor) -> None:
        """Copy them back where ``skip``, a scalar on their device, is not 0."""
        for dtype, group in self._buffers.items():
            kept = torch.where(skip != 0, self.before[dtype], _flat(group))
            parts = kept.split([buffer.numel() for buffer in group])
            torch._foreach_copy_(group, [part.view_as(buffer) for part, buffer in zip(parts, group, strict=True)])


def _gradients(weights: Sequence[Weight]) -> list[Tensor]:
    return [weight.parameter.grad for weight in weights if weight.parameter.grad is not None]


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


class Stepper:
    """Takes steps with the components of a run.

    On a GPU the host never waits for the step that it enqueues: the device decides by the ranks' vote whether the
    update goes through, and the host reads the vote of the step before when this one's backward pass is enqueued.
    """

    def __init__(self, components: TrainComponents) -> None:
        self.components = components
        clipped_locally = components.exchange.clipped_locally
        trained = components.strategy.trained
        self._clipped = [weight for weight in trained if weight.parameter not in clipped_locally]
        self._unclipped = [weight for weight in trained if weight.parameter in clipped_locally]
        self.statistics = RunningStatistics(components.strategy.backbone.buffers())
        self._preprocessing = components.config.data.preprocessing
        weights = self._weights = [table.of.loss_weight for table in components.tables]
        features = list(components.features.values())
        self._adding = [feature for feature in features if feature.loss_name]
        weights = [*weights, *(feature.loss_weight for feature in self._adding)]
        # what rare features do in a step: nothing is called where none is on
        self._begins = overriding(features, "begin_step")
        self._before_update = overriding(features, "before_update")
        self._commits = overriding(features, "commit_or_undo")
        self._loss_weights = torch.tensor(weights, dtype=torch.float64, device=components.mesh.device)
        self._is_sum = weights != [1.0]
        self._warm_up()

    def step(self, group: Sequence[MicroBatch], number: int, stop: int = 0) -> EnqueuedStep:
        """Learn from ``group`` as step ``number``; ``stop`` is this rank's vote to stop (a signal's number).

        The gradients are those of the mean loss over all samples of the group, so k micro-batches step as one
        large batch does. Where loss or gradients are not finite on any rank, weights, statistics and momenta
        stay as they were.
        """
        components = self.components
        margin_states = [table.head.margin_state for table in components.tables]
        self.statistics.remember()
        if components.config.compile_mode != "default":  # what the last step's graphs left is not read any more
            torch.compiler.cudagraph_mark_step_begin()
        self._seed(number)
        components.exchange.begin(number)
        stop = components.exchange.agreed_stop(stop)
        losses = self._backward(group)
        with step_part(OPTIMIZER):
            verdict = self._update(losses, margin_states, stop)
        names, added = [table.of.name for table in components.tables], [each.loss_name for each in self._adding]
        return EnqueuedStep(sum(batch.size for batch in group), verdict, names, added)

    def _update(self, losses: Tensor, margin_states: Sequence[State], stop: int) -> Verdict:
        """Update everything by the gradients, or take back what the passes moved, as the ranks agree."""
        components = self.components
        components.strategy.collect_gradients()
        for before_update in self._before_update:
            before_update()
        components.scaler.unscale_all(components.optimizer, components.head_optimizers)
        norm = self._clipped_norm()
        verdict = self._vote(losses, norm, stop)
        components.scaler.step_both(components.optimizer, components.head_optimizers, verdict)
        self.statistics.restore_where(verdict.flag)
        for commit_or_undo in (components.exchange.commit_or_undo, *self._commits):
            commit_or_undo(verdict.flag)
        for table, before in zip(components.tables, margin_states, strict=True):
            table.head.margin_state = {
                name: torch.where(verdict.flag != 0, before[name], moved)
                for name, moved in table.head.margin_state.items()
            }
        if components.average is not None:
            components.average.update(components.strategy.parts(), verdict)
        components.scaler.update()
        components.strategy.zero_grad()
        for optimizer in components.head_optimizers:
            optimizer.zero_grad()
        return verdict

    def _backward(self, group: Sequence[MicroBatch]) -> Tensor:
        """Leave the gradients of the group's loss, times the loss scale.

        Returns:
            The mean losses: the tables', and those of features behind them.
        """
        strategy, trains_backbone = self.components.strategy, self.components.trains_backbone
        totals = torch.zeros_like(self._loss_weights)
        for begin_step in self._begins:
            begin_step([batch.labels for batch in group])
        for index, batch in enumerate(group):
            upcoming = group[index + 1] if index + 1 < len(group) else None
            loss = partial(self._loss, totals, group, batch, upcoming)
            images = partial(self._prepared, batch.images)
            with step_part(BACKBONE):
                if not trains_backbone:
                    with torch.no_grad():
                        loss = torch.enable_grad()(loss)
                        strategy.forward_backward(images, batch.labels, batch.sizes, loss, last=False)
                else:
                    strategy.forward_backward(images, batch.labels, batch.sizes, loss, last=upcoming is None)
        return strategy.from_head(totals)

    def _loss(
        self,
        totals: Tensor,
        group: Sequence[MicroBatch],
        batch: MicroBatch,
        upcoming: MicroBatch | None,
        embeddings: Tensor,
        labels: Tensor,
        sizes: Sequence[int],
    ) -> Tensor:
        """Return what is differentiated of a micro-batch, scaled: its share of each loss, with the weight."""
        embeddings = embeddings[: len(labels)].to(torch.promote_types(embeddings.dtype, torch.float32))
        terms, class_loss = [], self.components.class_loss
        with step_part(HEAD):
            for number, loss, share in class_loss.losses(embeddings, labels, sizes, batch, group):
                totals[number].add_(loss.detach().double() * share)
                terms.append(loss * (share * self._weights[number]))
            for number, feature in enumerate(self._adding, start=len(self.components.tables)):
                loss, of_step = feature.loss(embeddings, labels, sizes)
                totals[number].add_(loss.detach().double() * of_step)
                terms.append(loss * (of_step.to(loss.dtype) * feature.loss_weight))
            class_loss.prefetch(self.components.loader, upcoming)
        scaled: Tensor = self.components.scaler.scale(sum(terms[1:], terms[0]))
        return scaled

    def _seed(self, number: int) -> None:
        """Seed dropout and its like by (seed, step, data rank), so that resuming needs no generator's state."""
        rank = self.components.strategy.data_rank
        torch.manual_seed(hash((self.components.config.seed, number, rank)))

    def _prepared(self, images: Tensor) -> Tensor:
        """Return this rank's images as the backbone takes them.

        Batch normalisation of a rank's own images needs two: beside a single one stands its mirror image, whose
        embedding reaches no loss.
        """
        components = self.components
        if len(images) < components.strategy.wrapping.least_images:
            images = torch.cat([images, images.flip(-1)])
        x = self._preprocessing(images.to(components.mesh.device, non_blocking=True))
        return x.contiguous(memory_format=torch.channels_last) if components.config.channels_last else x

    def _warm_up(self) -> None:
        """Let the strategy see a batch whose result nothing remembers."""
        components = self.components
        self.statistics.remember()
        blank = torch.zeros((components.config.data.batch_size, *self._preprocessing.shape), dtype=torch.uint8)
        components.strategy.warm_up(lambda: self._prepared(blank))
        self.statistics.restore_where(torch.ones((), device=components.mesh.device))

    def _clipped_norm(self) -> Tensor:
        """The gradient's norm, and the gradient scaled down where that exceeds optim.clip_norm."""
        components, optim = self.components, self.components.config.optim
        norm = self._norm(self._clipped)
        if optim.clip_norm:
            heads = components.head_optimizers if optim.clip_head else []
            for head in heads:
                with step_part(HEAD):
                    of_head = head.gradient_norm()
                norm = torch.hypot(norm.double(), components.strategy.from_head(of_head).to(norm.device))
            norm = clip_by_norm_(_gradients(self._clipped), norm, optim.clip_norm, heads)
        return torch.hypot(norm, self._norm(self._unclipped).to(norm)) if self._unclipped else norm

    def _norm(self, weights: Sequence[Weight]) -> Tensor:
        """The norm of these weights' gradients, those of other ranks included."""
        strategy = self.components.strategy
        if strategy.is_replicated:
            return total_norm(_gradients(weights))
        copies = [weight.copies for weight in weights if weight.parameter.grad is not None]
        return sharded_norm(_gradients(weights), copies, strategy.mesh)

    def _vote(self, losses: Tensor, norm: Tensor, stop: int) -> Verdict:
        """Agree with all ranks whether this step goes through, on the largest signal that any has received, and
        send the step's loss, its norm and the single losses to the host along with that.
        """
        loss = (losses * self._loss_weights).sum() if self._is_sum else losses[0]
        both = torch.stack([loss, norm.to(loss)])
        bad = ~torch.isfinite(both).all()
        for head in self.components.head_optimizers:
            bad = bad | (head.not_finite() != 0)
        ballot = torch.stack([bad.double(), torch.full_like(bad, stop, dtype=torch.float64)])
        mesh = self.components.voters
        agreed = all_reduce_max(ballot, mesh)
        told = [agreed, both, *([losses] if len(losses) > 1 else [])]
        return Verdict(torch.cat(told), mesh.timeout)
