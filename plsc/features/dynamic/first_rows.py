"""What a class begins with that comes into a table while it trains: a direction of its own, or random numbers."""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plsc.features.dynamic.key_map import Keys
from plsc.head.class_table import SMALLEST_NORM

_STD = 0.01  # of a row's numbers at its beginning, as in a fixed table
_SEED_FACTOR = 0x9E3779B97F4A7C15


class FirstRows:
    """First rows (m, K, D) float64 of new classes, of the length that random rows have, 0.01·√D.

    Args:
        dim: D.
        centers: K, sub-centres of a class.
        seed: of the random ones.
    """

    def __init__(self, dim: int, centers: int, seed: int) -> None:
        self.dim, self.centers, self.seed = dim, centers, seed

    @property
    def length(self) -> float:
        """Of a row."""
        return _STD * math.sqrt(self.dim)

    def means(self, new: Keys, found: Keys, vectors: NDArray[np.float32]) -> Tensor:
        """Rows of ``new`` keys (m,), sorted, from all ranks' samples' keys (n,) and unit embeddings (n, D)."""
        of_sample = np.searchsorted(new, found)
        # in the order of their bytes: the sum's last bits must not tell which rank had which sample
        order = sorted(range(len(found)), key=lambda i: (of_sample[i], vectors[i].tobytes()))
        sums = np.zeros((len(new), self.dim))
        np.add.at(sums, of_sample[order], vectors[order].astype(np.float64))
        return self.around(torch.from_numpy(sums), new)

    def around(self, directions: Tensor, keys: Keys) -> Tensor:
        """Rows of classes whose embeddings have these mean ``directions`` (m, D)."""
        noise = self.random(keys)
        lengths = directions.norm(dim=1, keepdim=True)
        mean = directions / lengths.clamp(min=SMALLEST_NORM) * self.length
        rows = mean[:, None] + noise * (torch.arange(self.centers) > 0)[:, None]
        return torch.where((lengths > SMALLEST_NORM)[:, None], rows, noise)

    def random(self, keys: Keys) -> Tensor:
        """N(0, 0.01²) (m, K, D) float64, from the seed and each key alone."""
        rows = torch.empty(len(keys), self.centers, self.dim, dtype=torch.float64)
        for row, key in zip(rows, keys.tolist(), strict=True):
            row.normal_(std=_STD, generator=torch.Generator().manual_seed((key ^ self.seed * _SEED_FACTOR) % 2**63))
        return rows
