"""The class table and its optimizer state from a checkpoint, whatever types it stores them in.

A wider type holds the stored values exactly. To a narrower one they are rounded once, to the nearest: bfloat16 is off
by at most 2⁻⁹ of a value, int8 by half a step, 1/254 of the largest value in its row. The updates that follow round
stochastically (:mod:`plsc.head.low_precision`), as in a run that had these types from its beginning.

int8 tables have a second one with the scales of their rows. Values are converted as they are read, one stored piece
after another, so that there is never a second copy of a table.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from plsc.head.low_precision import quantize_rows, scale_name
from plsc.parallel.tensor_shard import TensorShard
from plsc.train.checkpoint_reader import StoredCheckpoint

_MIDDLE = 32767  # of the 16 bits that decide a rounding: to the nearest
_BITS = {torch.float64: 53, torch.float32: 24, torch.bfloat16: 8, torch.int8: 7}  # of significand


def load_tables(stored: StoredCheckpoint, prefix: str, targets: Mapping[str, TensorShard]) -> None:
    """Fill tables of this rank's rows from those that the checkpoint holds under ``prefix`` and their names.

    Tables of optimizer state of which it holds none at all stay as they are: zeros, as at a run's beginning.

    Raises:
        DataError: it holds other tables, or of other shapes.
    """
    direct: dict[str, TensorShard] = {}
    for name, target in _tables(targets).items():
        scale, scale_key = targets.get(scale_name(name)), prefix + scale_name(name)
        if _begins_at_zero(stored, prefix, name):
            continue
        if prefix + name not in stored.stored or (scale_key in stored.stored) == (scale is not None):
            direct |= {prefix + name: target} | ({} if scale is None else {scale_key: scale})
        elif scale is None:
            _load_dequantized(stored, prefix + name, scale_key, target)
        else:
            _load_quantized(stored, prefix + name, target, scale)
    stored.load_into(direct)


def described_changes(stored: StoredCheckpoint, prefix: str, targets: Mapping[str, TensorShard]) -> list[str]:
    """Name the tables that are kept in other types than they are stored in, and what that does to them."""
    lines = []
    for name, target in _tables(targets).items():
        if _begins_at_zero(stored, prefix, name):
            lines.append(f"{prefix}{name} begins at zero: the checkpoint holds none")
            continue
        before, now = stored.stored[prefix + name].properties.dtype, target.dtype
        if before != now:
            effect = "rounded once, to the nearest" if _BITS[now] < _BITS[before] else "the same values"
            words = " in the checkpoint, ".join(str(dtype).removeprefix("torch.") for dtype in (before, now))
            lines.append(f"{prefix}{name}: {words} here: {effect}")
    left = [name for name in stored.stored if name.startswith(prefix) and not targets]
    return [*lines, *(f"left out: {name} of the checkpoint" for name in left if not name.endswith(scale_name("")))]


def _tables(targets: Mapping[str, TensorShard]) -> dict[str, TensorShard]:
    """``targets`` without the scales."""
    scales = {scale_name(name) for name in targets}
    return {name: target for name, target in targets.items() if name not in scales}


def _begins_at_zero(stored: StoredCheckpoint, prefix: str, name: str) -> bool:
    return name != "weight" and not any(key.startswith(prefix) for key in stored.stored)


def _load_dequantized(stored: StoredCheckpoint, key: str, scale_key: str, target: TensorShard) -> None:
    for rows, first in _pieces(stored, key, target):
        values = torch.empty(rows.shape, dtype=torch.int8)
        scales = torch.empty(len(rows))
        stored.load_into({key: _as_rows(values, first, target), scale_key: _as_rows(scales, first, target)})
        rows.copy_(values.to(rows.dtype if rows.dtype == torch.float64 else torch.float32).mul_(scales[:, None]))


def _load_quantized(stored: StoredCheckpoint, key: str, target: TensorShard, scale: TensorShard) -> None:
    ((scales, (scales_first,)),) = scale.blocks
    for rows, first in _pieces(stored, key, target):
        values = torch.empty(rows.shape)
        stored.load_into({key: _as_rows(values, first, target)})
        steps, found = quantize_rows(values, torch.full(values.shape, _MIDDLE, dtype=torch.int32))
        rows.copy_(steps)
        scales[first - scales_first : first - scales_first + len(rows)].copy_(found)


def _pieces(stored: StoredCheckpoint, key: str, target: TensorShard) -> Iterator[tuple[Tensor, int]]:
    """The rows of ``target`` that lie in each stored piece of ``key``, and the number of the first one."""
    ((local, (start, *_)),) = target.blocks
    for chunk in stored.stored[key].chunks:
        first, stop = max(chunk.offsets[0], start), min(chunk.offsets[0] + chunk.sizes[0], start + len(local))
        if first < stop:
            target.release()
            yield local[first - start : stop - start], first


def _as_rows(local: Tensor, first: int, target: TensorShard) -> Any:
    return TensorShard.of_rows(local, first, target.shape[0])
