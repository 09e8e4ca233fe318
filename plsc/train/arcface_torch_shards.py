"""Class tables in the files of insightface's arcface_torch, whose ranks write one each (recognition/arcface_torch).

    checkpoint_gpu_R.pt         train_v2.py, since 2022-04: {"state_dict_softmax_fc": {"weight"}, "state_optimizer", …}
    softmax_fc_gpu_R.pt         train.py of early 2022: the head's state_dict, {"weight"}
    rank_R_softmax_weight.pt    partial_fc.py of 2021: a tensor, with its momentum in rank_R_softmax_weight_mom.pt
    rank:R_softmax_weight.pt    the same, in March 2021

Each holds the rows of C // W classes in order, and of one more on the first C % W of W ranks. A file does not tell of
how many ranks it is one; the numbers of rows do, unless the last ranks' files are missing and the others are even.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plsc.errors import DataError, UsageError
from plsc.files import atomic_write, new_folder
from plsc.models.torch_files import check_tensors, load_torch_file
from plsc.signing import MODEL, open_signed
from plsc.train.checkpoint_writer import write_errors
from plsc.train.stored_table import WEIGHT, StoredTable

LAYOUTS = ("arcface_torch", "arcface_torch-2021")  # that are written
MOMENTUM = "momentum"
_CHECKPOINT, _SOFTMAX, _RANK = "checkpoint_gpu_{}.pt", "softmax_fc_gpu_{}.pt", "rank_{}_softmax_weight.pt"
_RANK_MOMENTUM = "rank_{}_softmax_weight_mom.pt"
_KINDS = {
    _CHECKPOINT: re.compile(r"checkpoint_gpu_(\d{1,6})\.pt"),
    _SOFTMAX: re.compile(r"softmax_fc_gpu_(\d{1,6})\.pt"),
    _RANK: re.compile(r"rank[_:](\d{1,6})_softmax_weight\.pt"),
}
_MOMENTUM_FILE = re.compile(r"rank[_:](\d{1,6})_softmax_weight_mom\.pt")
_NAMES = ", ".join(kind.format("R") for kind in _KINDS)
# Optimizer state of torch.optim.SGD, Adam and AdamW, by the names that it has here.
_STATE = {"momentum_buffer": MOMENTUM, "exp_avg": "first_moment", "exp_avg_sq": "second_moment"}
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_PIECE_BYTES = 64 << 20


def rows_of_rank(classes: int, rank: int, world_size: int) -> tuple[int, int]:
    """The classes [first, stop) that a rank of arcface_torch holds (partial_fc_v2.py: class_start, num_local)."""
    first = classes // world_size * rank + min(rank, classes % world_size)
    return first, first + classes // world_size + int(rank < classes % world_size)


@dataclass(frozen=True)
class Shards:
    """The files of all ranks, in order; their tensors are mapped.

    Attributes:
        files: of the weights.
        ranks: each rank's tensors (rows, D): ``weight``, and the optimizer's tables by the names that plsc has.
        left_out: what was found and is not read, a line each.
    """

    files: tuple[Path, ...]
    ranks: tuple[dict[str, Tensor], ...]
    left_out: tuple[str, ...]

    @property
    def classes(self) -> int:
        """Rows of all ranks."""
        return sum(len(rank[WEIGHT]) for rank in self.ranks)

    @property
    def dim(self) -> int:
        """Their width."""
        return self.ranks[0][WEIGHT].shape[1]

    def tensors(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """The type and the shape of each table when it is joined."""
        return {name: (each.dtype, (self.classes, self.dim)) for name, each in self.ranks[0].items()}

    def pieces(self, name: str) -> Iterator[Tensor]:
        """The rows of a table, a few at a time."""
        for rank in self.ranks:
            yield from rank[name].split(max(_PIECE_BYTES // max(rank[name][:1].nbytes, 1), 1))


def open_shards(paths: Sequence[Path], classes: int | None = None) -> Shards:
    """Open the files of all ranks of one run of arcface_torch; no pickle in them is run.

    Args:
        paths: a folder, or files.
        classes: that they have together, if it is known. Without it, files of last ranks may be missing unseen.

    Raises:
        UsageError: there are no such files, or those of several kinds.
        IntegrityError: a file is not signed, where that is asked for.
        DataError: a file cannot be read; a rank's is missing, or there twice; or they are of different numbers of
            ranks, widths or types.
    """
    files, momenta = _found(paths)
    ranks = [_read(files[rank], momenta.get(rank)) for rank in range(len(files))]
    ordered = [files[rank] for rank in range(len(files))]
    _check_alike(ordered, ranks)
    _check_rows(ordered, [len(rank[WEIGHT]) for rank in ranks], classes)
    shared = set.intersection(*(set(rank) for rank in ranks))
    partial = sorted(set.union(*(set(rank) for rank in ranks)) - shared)
    left_out = tuple(f"{name}, which not all ranks have" for name in partial)
    tensors = tuple({name: rank[name] for name in rank if name in shared} for rank in ranks)
    return Shards(tuple(ordered), tensors, left_out)


def write_shards(table: StoredTable, folder: Path, world_size: int, layout: str) -> list[str]:
    """Write a class table as ``world_size`` ranks of arcface_torch hold it, a rank after another, in float32.

    Args:
        table: without sub-centres, which arcface_torch has not.
        folder: is made; shards of further ranks that are in it, of the kind that is written, are removed.
        world_size: of the run that will read them.
        layout: "arcface_torch", the state_dict of PartialFC_V2 and of the heads before it, in softmax_fc_gpu_R.pt; or
            "arcface_torch-2021", with the momentum, which is 0 where the table has none.

    Returns:
        The names of the files.

    Raises:
        UsageError: the table has sub-centres, or fewer classes than ranks.
        DataError: a file cannot be written.
    """
    if table.centers > 1:
        raise UsageError(f"{table.path} has {table.centers} sub-centres a class, which arcface_torch does not know")
    if world_size > table.classes:
        raise UsageError(f"--world-size {world_size}: there are {table.classes:,} classes, and a rank needs one")
    written = []
    with new_folder(folder):
        for rank in range(world_size):
            rows = rows_of_rank(table.classes, rank, world_size)
            weight = _gathered(table, WEIGHT, *rows)
            if layout == LAYOUTS[0]:
                written.append(_save({WEIGHT: weight}, folder / _SOFTMAX.format(rank)))
                continue
            written.append(_save(weight, folder / _RANK.format(rank)))
            weight = _gathered(table, MOMENTUM, *rows) if MOMENTUM in table.columns else weight.zero_()
            written.append(_save(weight, folder / _RANK_MOMENTUM.format(rank)))
        _remove_others(folder, written)
    return written


def _gathered(table: StoredTable, column: str, start: int, stop: int) -> Tensor:
    rows = torch.empty(stop - start, table.dim)
    for first, end in table.pieces(column, start, stop):
        rows[first - start : end - start] = table.floats(column, first, end)
    return rows


def _save(value: object, path: Path) -> str:
    with write_errors(str(path)), atomic_write(path) as tmp_path, tmp_path.open("wb") as file:
        torch.save(value, file)
    return path.name


def _remove_others(folder: Path, written: Sequence[str]) -> None:
    """Remove shards of further ranks, of the kind of those that were written."""
    kind, _ = _kind_of(folder / written[0])
    for path in folder.iterdir():
        is_momentum = kind == _RANK and _MOMENTUM_FILE.fullmatch(path.name)
        if path.name not in written and (is_momentum or _kind_of(path)[0] == kind):
            path.unlink()


def _kind_of(path: Path) -> tuple[str | None, int]:
    """Which kind of file of weights it is by its name, and of which rank."""
    for kind, pattern in _KINDS.items():
        if match := pattern.fullmatch(path.name):
            return kind, int(match[1])
    return None, 0


def _found(paths: Sequence[Path]) -> tuple[dict[int, Path], dict[int, Path]]:
    """The files of weights, of ranks 0, 1, …, and of momenta, by their ranks."""
    if gone := [path for path in paths if not path.exists()]:
        raise UsageError(f"{gone[0]} does not exist; name the folder of arcface_torch's files of ranks, or the files")
    inside = [sorted(path.iterdir()) if path.is_dir() else [path] for path in paths]
    files: dict[str, dict[int, Path]] = {}
    momenta: dict[int, Path] = {}
    for path in (each for folder in inside for each in folder):
        kind, rank = _kind_of(path)
        match = _MOMENTUM_FILE.fullmatch(path.name)
        if kind is not None:
            _add(files.setdefault(kind, {}), rank, path)
        elif match is not None:
            _add(momenta, int(match[1]), path)
        elif path in paths and not path.is_dir():
            raise UsageError(f"{path} is not named as arcface_torch's files of ranks are: {_NAMES}")
    if len(files) != 1:
        kinds = ", ".join(kind.format("R") for kind in files)
        many = f"shards of several kinds ({kinds}): name the files of one" if files else f"no shards: {_NAMES}"
        raise UsageError(f"{', '.join(map(str, paths[:3]))} holds {many}")
    ((kind, found),) = files.items()
    for rank in range(max(found) + 1):
        if rank not in found:
            raise DataError(f"{found[max(found)].with_name(kind.format(rank))} is missing: all ranks' files are needed")
    if kind == _RANK and (lost := sorted(found.keys() ^ momenta.keys())) and momenta:
        alone = found.get(lost[0], momenta.get(lost[0]))
        raise DataError(f"{alone} has no counterpart: give the momenta of all ranks' weights, or none")
    return found, momenta if kind == _RANK else {}


def _add(found: dict[int, Path], rank: int, path: Path) -> None:
    if found.setdefault(rank, path) != path:
        raise DataError(f"{path} is rank {rank}'s, as {found[rank]} is; give one file for each rank")


def _read(path: Path, momentum: Path | None) -> dict[str, Tensor]:
    """The weight and the optimizer's tables of one rank."""
    content = _load(path)
    kind, _ = _kind_of(path)
    state: dict[str, Tensor] = {}
    if kind == _RANK:
        weight = content
        if momentum is not None:
            state[MOMENTUM] = _load(momentum)
    else:
        head = content.get("state_dict_softmax_fc") if kind == _CHECKPOINT and isinstance(content, Mapping) else content
        weight = head.get(WEIGHT) if isinstance(head, Mapping) else None
        state = _optimizer_state(content) if kind == _CHECKPOINT and isinstance(content, Mapping) else {}
    if not isinstance(weight, Tensor) or weight.dim() != 2 or weight.dtype not in _FLOATS or not weight.shape[1]:
        raise DataError(f"{path} holds no rows of a class table; arcface_torch writes a weight (rows, D) into it")
    own = {WEIGHT: weight.detach(), **{name: each.detach() for name, each in state.items() if _fits(each, weight)}}
    if momentum is not None and MOMENTUM not in own:
        raise DataError(f"{momentum} does not have the {len(weight):,} rows of {weight.shape[1]} that {path.name} has")
    check_tensors({name: each for name, each in own.items() if name != MOMENTUM or momentum is None}, path)
    if momentum is not None:
        check_tensors({MOMENTUM: own[MOMENTUM]}, momentum)
    return own


def _load(path: Path) -> Any:
    with open_signed(path, MODEL) as file:
        return load_torch_file(file, mapped=True)


def _fits(state: object, weight: Tensor) -> bool:
    return isinstance(state, Tensor) and state.shape == weight.shape and state.dtype in _FLOATS


def _optimizer_state(content: Mapping[str, Any]) -> dict[str, Tensor]:
    """The last parameter's state, which is the head's ("the params of partial fc must be last", train_v2.py)."""
    optimizer = content.get("state_optimizer")
    if not isinstance(optimizer, Mapping):
        return {}
    groups, states = optimizer.get("param_groups"), optimizer.get("state")
    numbers = groups[-1].get("params") if isinstance(groups, list) and groups and isinstance(groups[-1], dict) else None
    if not isinstance(states, Mapping) or not isinstance(numbers, list) or not numbers:
        return {}
    own = states.get(numbers[-1]) if isinstance(numbers[-1], int) else None
    return {ours: own[name] for name, ours in _STATE.items() if name in own} if isinstance(own, Mapping) else {}


def _check_alike(files: Sequence[Path], ranks: Sequence[Mapping[str, Tensor]]) -> None:
    """Raise DataError where widths or types differ."""
    first = ranks[0]
    for file, own in zip(files, ranks, strict=True):
        width, wanted = own[WEIGHT].shape[1], first[WEIGHT].shape[1]
        if width != wanted:
            raise DataError(
                f"{file} has rows of {width} numbers, and {files[0].name} of {wanted}; give one run's files"
            )
        for name in own.keys() & first.keys():
            dtypes = [str(each[name].dtype).removeprefix("torch.") for each in (own, first)]
            if dtypes[0] != dtypes[1]:
                raise DataError(f"{file} holds {dtypes[0]} ({name}), and {files[0].name} {dtypes[1]}; give one run's")


def _check_rows(files: Sequence[Path], rows: Sequence[int], classes: int | None) -> None:
    """Raise DataError unless these are the rows of all ranks of a world of as many."""
    total, world_size = sum(rows), len(files)
    for rank, (file, count) in enumerate(zip(files, rows, strict=True)):
        first, stop = rows_of_rank(total if classes is None else classes, rank, world_size)
        if count != stop - first:
            what = f"of {total if classes is None else classes:,} classes on {world_size} ranks"
            raise DataError(
                f"{file} has {count:,} rows, where rank {rank}'s are {stop - first:,} {what}: a file is missing, or is "
                "of another number of ranks"
            )
