"""Partial FC's choice of classes: all positives of the global batch, and random negatives (An et al., CVPR 2022)."""

from dataclasses import dataclass

import torch
from torch import Tensor

_DENSE = 0.25  # above this share of the classes, a permutation is faster than rejection sampling


def keyed_generator(device: torch.device, seed: int, salt: int, batch: int) -> torch.Generator:
    """A generator keyed by purpose (``salt``) and training batch number, so that a resumed run draws the same."""
    key = (seed * 1_000_003 + batch) * 0x9E3779B97F4A7C15 + salt * 0xD1B54A32D192ED03
    return torch.Generator(device).manual_seed(key % 2**63)


@dataclass(frozen=True)
class ClassSampler:
    """Draws the classes of one shard for each training batch.

    Args:
        first, stop: the shard's classes are [first, stop).
        rate: the share of them to draw; 1 takes all, 0 positives only.
        seed: of the run.
        device: of the result.
    """

    first: int
    stop: int
    rate: float
    seed: int
    device: torch.device

    @property
    def takes_all(self) -> bool:
        """True if every class takes part in every batch."""
        return self.rate >= 1

    def draw(self, labels: Tensor, batch: int) -> Tensor:
        """The local classes for training batch number ``batch``, given the ``labels`` (B,) or (B, K) of all ranks.

        The same on every replica of the shard, and for a batch that is prefetched and the same one when it is trained.
        """
        local, count = labels.flatten() - self.first, self.stop - self.first
        owned = (local >= 0) & (local < count)
        # keyed by the shard's first class, since shards must draw independently; salt 0 belongs to the margins
        generator = keyed_generator(self.device, self.seed, self.first + 1, batch)
        size = round(self.rate * count)
        if self.device.type != "cpu" and labels.numel() <= size:
            return sample_with_fixed_size(count, torch.where(owned, local, count), size, generator)
        return sample_classes(count, local[owned], self.rate, generator)


def sample_classes(num_classes: int, positives: Tensor, rate: float, generator: torch.Generator) -> Tensor:
    """Draw a shard's classes for one step.

    Args:
        num_classes: of the shard.
        positives: local classes that must be in it, any order, repeats allowed, (p,) int64.
        rate: the share of the shard's classes to draw; 0 takes positives only. All positives stay, even beyond it.
        generator: on the device of the result.

    Returns:
        Sorted int64 classes without repeats, max(round(rate·num_classes), distinct positives) of them. The negatives
        are a uniform sample without replacement; the time is proportional to the result, not to num_classes.
    """
    positives = positives.unique()
    sample_size = min(max(round(rate * num_classes), positives.numel()), num_classes)
    missing = sample_size - positives.numel()
    if missing == 0:
        return positives
    if sample_size > _DENSE * num_classes:
        candidates = torch.randperm(num_classes, generator=generator, device=positives.device)
        negatives = candidates[places_in(positives, candidates) < 0][:missing]
    else:
        negatives = _draw(num_classes, positives, missing, generator)
    return torch.cat([positives, negatives]).sort().values


def sample_with_fixed_size(num_classes: int, positives: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Draw a shard's classes for one step, without waiting for the device: their number is known to the host.

    :func:`sample_classes` has to ask how many positives there are, and how many draws coincide; here every class draws
    a number, positives the largest, and the largest win. The time is proportional to num_classes.

    Args:
        num_classes: of the shard.
        positives: (p,) int64 local classes that must be in it, any order, repeats allowed; ``num_classes`` for none.
        size: of the sample, at least p.
        generator: on the device of the result.

    Returns:
        Sorted int64 classes (size,) without repeats, the negatives among them a uniform sample.
    """
    keys = torch.rand(num_classes + 1, generator=generator, device=positives.device)
    keys.index_fill_(0, positives, 2.0)
    return keys[:num_classes].topk(size, sorted=False).indices.sort().values


def _draw(num_classes: int, excluded: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """``count`` distinct classes outside ``excluded`` (sorted), each set equally likely."""
    drawn = excluded.new_empty(0)
    while drawn.numel() < count:
        more = torch.randint(num_classes, (count + count // 4 + 16,), generator=generator, device=excluded.device)
        drawn = torch.cat([drawn, more[places_in(excluded, more) < 0]]).unique()
    keep = torch.randperm(drawn.numel(), generator=generator, device=drawn.device)[:count]
    return drawn[keep]


def places_in(ordered: Tensor, values: Tensor) -> Tensor:
    """The place of each value in ``ordered``, which rises; −1 where it is not in it."""
    if ordered.numel() == 0:
        return torch.full_like(values, -1)
    places = torch.searchsorted(ordered, values).clamp(max=ordered.numel() - 1)
    return torch.where(ordered[places] == values, places, -1)
