"""One optimizer step: forward, loss and backward over its micro-batches, a vote of all ranks, the update."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plsc.data.loader import TrainLoader
from plsc.data.transforms import normalize
from plsc.optim.gradients import clip_grad_norm_, total_norm
from plsc.parallel.collectives import all_reduce_max
from plsc.train.parts import Parts


@dataclass(frozen=True)
class MicroBatch:
    """This rank's ``images`` uint8 (b, 3, S, S) and ``labels`` (b,) of a global batch of ``size`` samples."""

    images: Tensor
    labels: Tensor
    size: int


@dataclass(frozen=True)
class Outcome:
    """What a step came to, the same on every rank.

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
    consumed = loader.state_dict()["consumed"]
    for images, labels in loader:
        before, consumed = consumed, loader.state_dict()["consumed"]
        group.append(MicroBatch(images, labels, consumed - before))
        if len(group) == accumulate:
            yield group
            group = []
    if group:
        yield group


class Stepper:
    """Takes steps with the parts of a run."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self._weights = [p for group in parts.optimizer.param_groups for p in group["params"]]
        self._buffers = list(parts.backbone.buffers())
        self._buffers_before = [buffer.clone() for buffer in self._buffers]
        if parts.mesh.world_size > 2:
            self._settle_buckets()

    def step(self, group: Sequence[MicroBatch], number: int, stop: int = 0) -> Outcome:
        """Learn from ``group`` as step ``number``; ``stop`` is this rank's vote to stop (a signal's number).

        The gradients are those of the mean loss over all samples of the group, so k micro-batches step as one
        large batch does. Where loss or gradients are not finite on any rank, weights, statistics and momenta
        stay as they were.
        """
        parts = self.parts
        margin_state = parts.head.margin_state
        self._remember_buffers()
        self._seed(number)
        loss = self._backward(group)
        parts.scaler.unscale_all(parts.optimizer, parts.head_optimizer)
        norm = self._clipped_norm()
        fine, stop = self._vote(loss, norm, stop)
        if fine:
            parts.scaler.step_both(parts.optimizer, parts.head_optimizer)
            if parts.average is not None:
                parts.average.update(parts.backbone)
        else:
            parts.head.margin_state = margin_state
            self._restore_buffers()
        parts.scaler.update()
        parts.optimizer.zero_grad()
        parts.head_optimizer.zero_grad()
        size = sum(batch.size for batch in group)
        return Outcome(float(loss), float(norm), size, not fine, stop)

    def _backward(self, group: Sequence[MicroBatch]) -> Tensor:
        """Leave the gradients of the group's mean loss, times the loss scale; the loss itself, detached."""
        parts = self.parts
        samples = sum(batch.size for batch in group)
        total = torch.zeros((), dtype=torch.float64, device=parts.mesh.device)
        for position, batch in enumerate(group):
            share = batch.size / samples
            with self._reduced_only_at_end(last=position == len(group) - 1):
                loss = parts.head(self._embed(batch.images), batch.labels.to(parts.mesh.device))
                self._announce(group[position + 1].labels if position + 1 < len(group) else parts.loader.next_labels)
                parts.scaler.scale(loss * share).backward()
            total += loss.detach().double() * share
        return total

    def _announce(self, labels: Tensor | None) -> None:
        """Let a head whose table is not on the device fetch the next batch's rows while this one goes back."""
        head = self.parts.head
        if labels is not None and head.placement != "device":
            head.prefetch(labels.to(self.parts.mesh.device))

    def _seed(self, number: int) -> None:
        """Dropout and its like follow from (seed, step, rank): a resumed run needs no generator's state."""
        mesh = self.parts.mesh
        torch.manual_seed(hash((self.parts.config.seed, number, mesh.rank)))

    def _embed(self, images: Tensor) -> Tensor:
        """Embeddings (b, D) of this rank's images, whatever their number: batch normalisation needs two.

        Unreadable records may leave a rank with one image, or none; stand-ins join the forward pass then, and
        no embedding of theirs reaches the loss.
        """
        parts = self.parts
        count = len(images)
        if count == 0:
            images = torch.zeros((2, *images.shape[1:]), dtype=images.dtype)
            images[1] = 255
        elif count == 1:
            images = torch.cat([images, images.flip(-1)])
        x = normalize(images.to(parts.mesh.device, non_blocking=True))
        if parts.config.channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        with parts.autocast():
            embeddings: Tensor = parts.net(x)
        return embeddings[:count].to(torch.promote_types(embeddings.dtype, torch.float32))

    def _settle_buckets(self) -> None:
        """Let data parallel order its buckets now, by a pass that teaches nothing.

        It does so after its first backward pass. From three ranks on, the order of a sum hangs on the place in a
        bucket: a resumed run would differ from one never stopped in its first step's last bits.
        """
        parts = self.parts
        self._remember_buffers()
        size = parts.config.data.image_size
        blank = torch.zeros((parts.config.data.batch_size, 3, size, size), dtype=torch.uint8)
        (self._embed(blank).sum() * 0).backward()
        parts.optimizer.zero_grad()
        self._restore_buffers()

    def _reduced_only_at_end(self, *, last: bool) -> contextlib.AbstractContextManager[None]:
        """Data parallel's gradients travel once per step, with the last micro-batch."""
        net = self.parts.net
        if last or not hasattr(net, "no_sync"):
            return contextlib.nullcontext()
        quiet: contextlib.AbstractContextManager[None] = net.no_sync()  # type: ignore[operator]
        return quiet

    def _clipped_norm(self) -> Tensor:
        """The gradient's norm, and the gradient scaled down where that exceeds optim.clip_norm."""
        optim = self.parts.config.optim
        if optim.clip_norm:
            head = self.parts.head_optimizer if optim.clip_head else None
            return clip_grad_norm_(self._weights, optim.clip_norm, head)
        return total_norm([w.grad for w in self._weights if w.grad is not None])

    def _vote(self, loss: Tensor, norm: Tensor, stop: int) -> tuple[bool, int]:
        bad = ~(torch.isfinite(loss) & torch.isfinite(norm))
        ballot = torch.stack([bad.double(), bad.new_tensor(stop, dtype=torch.float64)])
        bad_somewhere, wish = all_reduce_max(ballot, self.parts.mesh).tolist()
        return not bad_somewhere, int(wish)

    def _remember_buffers(self) -> None:
        if self._buffers:
            torch._foreach_copy_(self._buffers_before, self._buffers)

    def _restore_buffers(self) -> None:
        if self._buffers:
            torch._foreach_copy_(self._buffers, self._buffers_before)
