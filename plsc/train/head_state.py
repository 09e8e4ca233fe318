"""The class table and its optimizer's tables in a checkpoint, as rows in it, unless a feature keeps them itself.

Rows are read whatever types the checkpoint stores them in. A wider type holds the stored values exactly. To a narrower
one they are rounded once, to the nearest: bfloat16 is off by at most 2⁻⁹ of a value, int8 by half a step, 1/254 of the
largest value in its row. The updates that follow round stochastically (:mod:`plsc.head.low_precision`), as in a run
that had these types from its beginning.

int8 tables have a second one with the scales of their rows. Values are converted as they are read, one stored piece
after another, so that there is never a second copy of a table.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from plsc.errors import IntegrityError
from plsc.feature_config import keeper_of_tables
from plsc.head.low_precision import quantize_rows, scale_name
from plsc.parallel.collectives import raise_on_all_ranks
from plsc.parallel.tensor_shard import TensorShard
from plsc.train.checkpoint import CheckpointFolder, step_of
from plsc.train.checkpoint_reader import StoredCheckpoint
from plsc.train.components import TrainComponents
from plsc.train.feature import overriding
from plsc.train.init_rows import set_first_rows

_MIDDLE = 32767  # of the 16 bits that decide a rounding: to the nearest
_BITS = {torch.float64: 53, torch.float32: 24, torch.bfloat16: 8, torch.int8: 7}  # of significand


def table_numbers(components: TrainComponents) -> dict[str, Any]:
    """Small state of the heads and of their optimizers: of the only one, or of each table by its name."""
    heads = {table.name: table.head.get_extra_state() for table in components.tables}
    steps = {table.name: table.optimizer.steps for table in components.tables}
    return {"head": heads.get("", heads), "head_steps": steps.get("", steps)}


def check_numbers(stored: StoredCheckpoint) -> None:
    """Raise IntegrityError unless the small state holds what :func:`restore_numbers` takes."""
    tables = stored.value("config", dict).get("table") or [{"name": ""}]
    for name in [table.get("name") for table in tables if isinstance(table, dict)]:
        of_table = f".{name}" if name else ""
        stored.value(f"head_steps{of_table}", int)
        stored.value(f"head{of_table}.forwards", int)
        if "steps" in stored.value(f"head{of_table}", dict):
            stored.value(f"head{of_table}.steps", int)
        margin = stored.value(f"head{of_table}.margin", dict)
        if not all(isinstance(number, int | float) for number in margin.values()):
            raise IntegrityError(f"{stored.path} holds no state of a margin; it is the checkpoint of another program")


def restore_numbers(components: TrainComponents, stored: StoredCheckpoint) -> None:
    """Take what :func:`table_numbers` has stored; IntegrityError where a margin has other statistics."""
    for table in components.tables:
        state, steps = stored.state["head"], stored.state["head_steps"]
        if table.name:
            state, steps = state[table.name], steps[table.name]
        if not state["margin"].keys() <= table.head.margin_state.keys():
            raise IntegrityError(f"{stored.path} holds no state of the margin {table.of.config.head.margin}")
        table.head.set_extra_state(state)
        table.optimizer.load_state_dict({**table.optimizer.state_dict(), "steps": steps})


def capture_tables(components: TrainComponents, step: int) -> dict[str, Any]:
    """This rank's rows, and what goes with them, by name; a feature keeps its own as those of ``step``. All call."""
    tables: list[tuple[str, dict[str, TensorShard]]] = []
    if (keeper := components.keeper) is not None:
        raise_on_all_ranks(components.mesh, lambda: keeper.keep(step))
    else:
        tables = _tables_of(components)
    tables += [("", tensors()) for tensors in overriding(components.features.values(), "table_tensors")]
    return {name: table for prefix, found in tables for name, table in prefixed(prefix, found).items()}


def restore_tables(components: TrainComponents, stored: StoredCheckpoint) -> None:
    """Take the rows that ``stored`` holds, or those that it goes with, from the feature that keeps them.

    Raises:
        UsageError, DataError: what was kept does not go with the checkpoint.
    """
    keeper, kept = components.keeper, keeper_of_tables(stored.state)
    is_back = keeper is not None and keeper.take_back(stored, None if kept is None else kept[1])
    for restore in overriding(components.features.values(), "restore_tables"):
        restore(stored)
    if not is_back:
        for prefix, tables in _tables_of(components):
            load_tables(stored, prefix, tables)
        if keeper is not None:
            keeper.keep(stored.step)


def begin_tables(components: TrainComponents, *, goes_on: bool) -> None:
    """Set first rows of a run that has no checkpoint yet, or take back those that a feature kept, if it ``goes_on``.

    Raises:
        UsageError, DataError: as :func:`set_first_rows`; or what was kept is of another run.
    """
    keeper = components.keeper
    is_back = keeper is not None and keeper.take_first(goes_on=goes_on)
    for table, part in zip(components.tables, components.dataset.parts, strict=True):
        if not (source := table.of.config.head.init_rows):
            continue
        of_features = overriding(components.features.values(), "first_rows")
        if not any(first_rows(table, source) for first_rows in of_features) and not is_back:
            set_first_rows(table.head, source, part.class_names)
    if keeper is not None and not is_back:
        keeper.keep(0)


def flush_tables(components: TrainComponents) -> None:
    """Bring rows that a checkpoint goes with onto the disk."""
    if components.keeper is not None:
        components.keeper.flush()


def forget_tables(components: TrainComponents, checkpoints: CheckpointFolder) -> None:
    """Drop rows that only checkpoints went with that are gone."""
    keeper = components.keeper
    published = checkpoints.published() if keeper is not None else []
    if keeper is not None and published:
        keeper.forget(step_of(published[0]))


def _tables_of(components: TrainComponents) -> list[tuple[str, dict[str, TensorShard]]]:
    """This rank's rows of the class tables, and of the state beside them, each with the prefix of their names."""
    heads = [(f"head.{table.of.prefix}", table.head.sharded_state()) for table in components.tables]
    return heads + [
        (f"head_optimizer.{table.of.prefix}", table.optimizer.sharded_state()) for table in components.tables
    ]


def prefixed(prefix: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """``tensors`` by their names behind ``prefix``."""
    return {prefix + name: tensor for name, tensor in tensors.items()}


def load_tables(stored: StoredCheckpoint, prefix: str, targets: Mapping[str, TensorShard]) -> None:
    """Fill tables of this rank's rows from those that the checkpoint holds under ``prefix`` and their names.

    Tables of optimizer state of which it holds none at all stay as they are: zeros, as at a run's beginning.

    Raises:
        DataError: it holds other tables, or of other shapes.
    """
    direct: dict[str, TensorShard] = {}
    for name, target in _tables(targets).items():
        if not target.shape[0]:  # no class has come yet, and checkpoints hold no empty tensors
            continue
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


def changed_tables(stored: StoredCheckpoint, components: TrainComponents) -> list[str]:
    """A line for each table of the head that is kept in another type than the checkpoint stores it in."""
    if keeper_of_tables(stored.state) is not None:
        return []
    return [line for prefix, tables in _tables_of(components) for line in described_changes(stored, prefix, tables)]


def described_changes(stored: StoredCheckpoint, prefix: str, targets: Mapping[str, TensorShard]) -> list[str]:
    """Name the tables that are kept in other types than they are stored in, and what that does to them."""
    lines = []
    for name, target in _tables(targets).items():
        if not target.shape[0]:
            continue
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
