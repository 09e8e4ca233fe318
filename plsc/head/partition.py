"""Which classes a rank owns, and their first weights."""

from collections.abc import Iterator

import torch
from torch import Tensor

_BLOCK = 1024  # rows that share one generator


def class_range(num_classes: int, rank: int, world_size: int) -> tuple[int, int]:
    """(first, last + 1) of a rank's classes: contiguous, the first C mod W ranks own one more. May be empty."""
    share, rest = divmod(num_classes, world_size)
    first = rank * share + min(rank, rest)
    return first, first + share + (rank < rest)


def fill_normal(weight: Tensor, first_row: int, seed: int, std: float = 0.01) -> None:
    """Fill rows [first_row, …) of the global table with N(0, std²), in place, a block at a time.

    A row's values depend on the seed and its global number alone, so that every number of ranks starts from the same
    table, and no two ranks from the same rows.
    """
    for rows, values in normal_rows(weight.shape, first_row, seed, weight.device, std):
        weight[rows] = values.to(weight.dtype)


def normal_rows(
    shape: tuple[int, ...], first_row: int, seed: int, device: torch.device, std: float = 0.01
) -> Iterator[tuple[slice, Tensor]]:
    """:func:`fill_normal`'s values for a table (n, D) = ``shape``, in float32 on ``device``, some rows at a time."""
    stop = first_row + shape[0]
    for block in range(first_row // _BLOCK, -(-stop // _BLOCK)):
        generator = torch.Generator(device).manual_seed(
            (seed * 0x9E3779B97F4A7C15 + block * 0xD1B54A32D192ED03) % 2**63
        )
        low = block * _BLOCK
        values = torch.randn(_BLOCK, shape[1], generator=generator, device=device) * std
        start, end = max(low, first_row), min(low + _BLOCK, stop)
        yield slice(start - first_row, end - first_row), values[start - low : end - low]
