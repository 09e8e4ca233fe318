"""A residual on an affine map between embedding spaces: one hidden layer, which begins as no residual at all."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from plsc.embedding.columns import Float32, Int64

HIDDEN = 256
_BATCH = 256
_LEARNING_RATE, _WEIGHT_DECAY = 1e-3, 1e-2
_TEMPERATURE = 0.05


@dataclass(frozen=True)
class Layers:
    """Weights in float32: ``base`` (d, e) and its bias (e,), ``inner`` (d, h) and its bias (h,), ``outer`` (h, e)."""

    base: torch.Tensor
    base_bias: torch.Tensor
    inner: torch.Tensor
    inner_bias: torch.Tensor
    outer: torch.Tensor

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Map ``rows`` (n, d) to (n, e), not normalised."""
        hidden = functional.relu(rows @ self.inner + self.inner_bias)
        return rows @ self.base + self.base_bias + hidden @ self.outer


class Training:
    """The training of a residual, an epoch at a time; a generator of its own makes it deterministic.

    The loss asks which of a batch's new embeddings is each estimate's (InfoNCE, both ways): mean squared errors would
    draw what is uncertain to the mean, where it resembles everybody. Faces of the same person are no strangers to each
    other, and are left out.

    Args:
        base: weight (d, e) and bias (e,) of the affine map, which stays.
        old, new: unit rows (n, d) and (n, e) float32, which trainings may share.
        persons: (n,).
        rows: the indices of those that are learned from.
        seed: of the first weights and the order of rows.
    """

    def __init__(
        self, base: Sequence[Float32], old: Float32, new: Float32, persons: Int64, rows: Int64, seed: int
    ) -> None:
        self._random, self._rows = torch.Generator().manual_seed(seed), torch.from_numpy(rows)
        self._old, self._new, self._persons = map(torch.from_numpy, (old, new, persons))
        weight, bias = map(torch.from_numpy, base)
        inner = torch.randn(weight.shape[0], HIDDEN, generator=self._random) * (2 / weight.shape[0]) ** 0.5
        self.layers = Layers(weight, bias, inner, torch.zeros(HIDDEN), torch.zeros(HIDDEN, weight.shape[1]))
        self._trained = [self.layers.inner, self.layers.inner_bias, self.layers.outer]
        for tensor in self._trained:
            tensor.requires_grad_()
        self._optimizer = torch.optim.AdamW(self._trained, lr=_LEARNING_RATE, weight_decay=_WEIGHT_DECAY)

    def epoch(self) -> None:
        """See every face once."""
        for rows in self._batches():
            estimated = functional.normalize(self.layers(self._old[rows]))
            loss = _contrastive_loss(estimated, self._new[rows], self._persons[rows])
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()

    def estimate(self, old: Float32) -> Float32:
        """Map ``old`` (n, d) by the weights as they are now; not normalised."""
        with torch.no_grad():
            estimated: Float32 = self.layers(torch.from_numpy(old)).numpy()
        return estimated

    def arrays(self) -> dict[str, Float32]:
        """The weights as they are now, by name."""
        return {name: np.array(tensor.detach().numpy()) for name, tensor in vars(self.layers).items()}

    def _batches(self) -> Iterator[torch.Tensor]:
        """Rows in a random order, in batches of nearly the same size."""
        order = self._rows[torch.randperm(len(self._rows), generator=self._random)]
        yield from order.chunk(-(-len(order) // _BATCH))


def _contrastive_loss(estimated: torch.Tensor, new: torch.Tensor, persons: torch.Tensor) -> torch.Tensor:
    scores = estimated @ new.T / _TEMPERATURE
    same = persons[:, None] == persons[None, :]
    same.fill_diagonal_(False)
    scores = scores.masked_fill(same, float("-inf"))
    targets = torch.arange(len(scores))
    return (functional.cross_entropy(scores, targets) + functional.cross_entropy(scores.T, targets)) / 2
