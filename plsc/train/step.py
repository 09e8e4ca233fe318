"""One optimizer step: forward, loss and backward over its micro-batches, a vote of all ranks, the update."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from plsc.data.loader import TrainLoader
from plsc.losses.margins import State
from plsc.optim.gradients import clip_by_norm_, sharded_norm, total_norm
from plsc.optim.verdict import Verdict
from plsc.parallel.collectives import all_reduce_max
from plsc.parallel.step_timeline import BACKBONE, HEAD, OPTIMIZER, step_part
from plsc.parallel.strategies import Weight
from plsc.train.components import TrainComponents


@dataclass(frozen=True)
class MicroBatch:
    """This rank's ``images`` uint8 (b, 3, S, S) and ``labels`` (b,) of a global batch, of which ranks have ``sizes``.

    Both lie on the CPU, in pinned memory where a GPU computes. ``indices`` (b,) are the images' in the data set.
    """

    images: Tensor
    labels: Tensor
    sizes: Sequence[int]
    indices: Sequence[int] = ()

    @property
    def size(self) -> int:
        """Samples of the global batch."""
        return sum(self.sizes)


@dataclass(frozen=True)
class StepResult:
    """The result of a step, the same on every rank.

    ``loss`` is the mean over the step's global samples, ``grad_norm`` that of the backbone (with the head's
    under clip_head) before clipping; ``skipped`` steps changed nothing; ``stop`` is the signal that some rank
    was asked to stop by, or 0.
    """

    loss: float
    grad_norm: float
    images: int
    skipped: bool
    stop: int


def micro_batches(loader: TrainLoader, accumulate: int) -> Iterator[list[MicroBatch]]:
    """The rest of the loader's epoch in groups of ``accumulate``; the last group may be shorter.

    When a group is yielded, the loader's position is the one after it.
    """
    group: list[MicroBatch] = []
    for images, labels in loader:
        group.append(MicroBatch(images, labels, loader.sizes, loader.indices))
        if len(group) == accumulate:
            yield group
            group = []
    if group:
        yield group


@dataclass(frozen=True)
class EnqueuedStep:
    """A step of ``images`` samples whose work is enqueued, and whose result the device has not come to yet."""

    images: int
    verdict: Verdict

    def result(self) -> StepResult:
        """The step's result; waits until the device has come to the ranks' vote, which is before the update."""
        skipped, stop, loss, norm = self.verdict.numbers()
        return StepResult(loss, norm, self.images, bool(skipped), int(stop))


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
        self._warm_up()

    def step(self, group: Sequence[MicroBatch], number: int, stop: int = 0) -> EnqueuedStep:
        """Learn from ``group`` as step ``number``; ``stop`` is this rank's vote to stop (a signal's number).

        The gradients are those of the mean loss over all samples of the group, so k micro-batches step as one
        large batch does. Where loss or gradients are not finite on any rank, weights, statistics and momenta
        stay as they were.
        """
        components = self.components
        margin_state = components.head.margin_state
        self.statistics.remember()
        self._seed(number)
        components.exchange.begin(number)
        loss = self._backward(group)
        with step_part(OPTIMIZER):
            verdict = self._update(loss, margin_state, stop)
        return EnqueuedStep(sum(batch.size for batch in group), verdict)

    def _update(self, loss: Tensor, margin_state: State, stop: int) -> Verdict:
        """Update everything by the gradients, or take back what the passes moved, as the ranks agree."""
        components = self.components
        components.strategy.collect_gradients()
        for weight in components.frozen.weights:  # the optimizer then leaves them and their state as they are
            weight.grad = None
        components.scaler.unscale_all(components.optimizer, components.head_optimizer)
        norm = self._clipped_norm()
        verdict = self._vote(loss, norm, stop)
        components.scaler.step_both(components.optimizer, components.head_optimizer, verdict)
        self.statistics.restore_where(verdict.flag)
        components.exchange.settle(verdict.flag)
        components.head.margin_state = {
            name: torch.where(verdict.flag != 0, margin_state[name], moved)
            for name, moved in components.head.margin_state.items()
        }
        if components.average is not None:
            components.average.update(components.strategy.parts(), verdict)
        components.scaler.update()
        components.strategy.zero_grad()
        components.head_optimizer.zero_grad()
        return verdict

    def _backward(self, group: Sequence[MicroBatch]) -> Tensor:
        """Leave the gradients of the group's mean loss, times the loss scale; the loss itself, detached."""
        strategy, samples = self.components.strategy, sum(batch.size for batch in group)
        total = torch.zeros((), dtype=torch.float64, device=self.components.mesh.device)
        for index, batch in enumerate(group):
            upcoming = group[index + 1] if index + 1 < len(group) else None
            loss = partial(self._loss, total, samples, upcoming)
            images = partial(self._prepared, batch.images)
            with step_part(BACKBONE):
                if self.components.frozen.trains_head_alone:
                    with torch.no_grad():
                        loss = torch.enable_grad()(loss)
                        strategy.forward_backward(images, batch.labels, batch.sizes, loss, last=False)
                else:
                    strategy.forward_backward(images, batch.labels, batch.sizes, loss, last=upcoming is None)
        return strategy.from_head(total)

    def _loss(
        self,
        total: Tensor,
        samples: int,
        upcoming: MicroBatch | None,
        embeddings: Tensor,
        labels: Tensor,
        sizes: Sequence[int],
    ) -> Tensor:
        """Return what is differentiated of a micro-batch: its share of the loss, which joins ``total``, scaled."""
        share = sum(sizes) / samples
        embeddings = embeddings[: len(labels)].to(torch.promote_types(embeddings.dtype, torch.float32))
        with step_part(HEAD):
            loss = self.components.head(embeddings, labels, sizes)
            self._prefetch(upcoming)
        total += loss.detach().double() * share
        scaled: Tensor = self.components.scaler.scale(loss * share)
        return scaled

    def _prefetch(self, upcoming: MicroBatch | None) -> None:
        """Prefetch the next batch's rows of a table that is not on the device, during this batch's backward pass.

        ``upcoming`` is that batch where the group holds it; else the loader knows its labels.
        """
        head, loader = self.components.head, self.components.loader
        share = self.components.strategy.head_share
        if head.placement == "device" or not self.components.strategy.prefetches:
            return
        if upcoming is not None:
            head.prefetch(*share(upcoming.labels, upcoming.sizes))
        elif (labels := loader.next_labels) is not None:
            head.prefetch(*share(labels, loader.next_sizes or []))

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
            head = components.head_optimizer if optim.clip_head else None
            if head is not None:
                with step_part(HEAD):
                    of_head = head.gradient_norm()
                norm = torch.hypot(norm.double(), components.strategy.from_head(of_head).to(norm.device))
            norm = clip_by_norm_(_gradients(self._clipped), norm, optim.clip_norm, head)
        return torch.hypot(norm, self._norm(self._unclipped).to(norm)) if self._unclipped else norm

    def _norm(self, weights: Sequence[Weight]) -> Tensor:
        """The norm of these weights' gradients, those of other ranks included."""
        strategy = self.components.strategy
        if strategy.is_replicated:
            return total_norm(_gradients(weights))
        copies = [weight.copies for weight in weights if weight.parameter.grad is not None]
        return sharded_norm(_gradients(weights), copies, strategy.mesh)

    def _vote(self, loss: Tensor, norm: Tensor, stop: int) -> Verdict:
        """Agree with all ranks whether this step goes through, on the largest signal that any has received, and
        send the step's loss and norm to the host along with that.
        """
        bad = ~(torch.isfinite(loss) & torch.isfinite(norm)) | (self.components.head_optimizer.not_finite() != 0)
        ballot = torch.stack([bad.double(), torch.full_like(bad, stop, dtype=torch.float64)])
        mesh = self.components.mesh
        agreed = all_reduce_max(ballot, mesh)
        return Verdict(torch.cat([agreed, torch.stack([loss, norm.to(loss)])]), mesh.timeout)
