"""A savepoint of a table in mapped files, read from outside: nothing is changed, and its run may be training.

The rows are read first, and the journals after them. A row's old values are in a journal before the row changes, so
what was read of a row that changed meanwhile, even half of it, is overwritten by what it held at the savepoint.
"""

import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plsc.errors import DataError, IntegrityError
from plsc.feature_config import RowsOutside
from plsc.features.journal.undo_journal import FORMAT, RecordLayout, check_identities, journals_back_to
from plsc.files import read_json
from plsc.head.host_memory import mapped_file
from plsc.train.checkpoint_reader import StoredCheckpoint

_WEIGHT = "weight"
_NUMBERS = ("_norm", "_scale")  # how the names of columns of one number for each row end
_FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_PART_BYTES = 16 << 20  # of the weights at a time
_OPAQUE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class SavedRows:
    """One rank's ``rows`` of ``total_rows``, from ``first_row`` on, in the files of ``prefix``.

    ``used`` are the first of them that were a table's at the savepoint; the others are reserved.
    """

    prefix: Path
    rows: int
    dim: int
    first_row: int
    total_rows: int
    columns: tuple[str, ...]
    used: int

    def weights(self, step: int, dtype: torch.dtype) -> Iterator[tuple[slice | Tensor, Tensor]]:
        """Give weights of savepoint ``step``, as (rows of this rank, values (n, D)); later ones replace earlier ones.

        Raises:
            DataError: there is no such savepoint, or a file is missing or of another size.
            IntegrityError: a journal is damaged.
        """
        journals_back_to(step, self.prefix)  # refuses a step without a savepoint before gigabytes are read
        if not self.used:
            return
        layout = RecordLayout(self.rows, self._columns(dtype))
        yield from self._present(dtype)
        for path in journals_back_to(step, self.prefix):
            for rows, values in layout.read(path):
                inside = rows < self.used
                yield rows[inside], values[_WEIGHT][inside]

    def _present(self, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
        row_bytes = self.dim * dtype.itemsize
        size = max(_PART_BYTES // row_bytes, 1)
        with self._file(_WEIGHT).open("rb") as file:
            for start in range(0, self.used, size):
                stop = min(start + size, self.used)
                part = bytearray(file.read((stop - start) * row_bytes))
                if len(part) < (stop - start) * row_bytes:
                    raise DataError(f"{self._file(_WEIGHT)} ends before row {stop:,}; bring the table's file back")
                yield slice(start, stop), torch.frombuffer(part, dtype=dtype).view(-1, self.dim)

    def _columns(self, dtype: torch.dtype) -> dict[str, tuple[torch.dtype, torch.Size]]:
        """The types and shapes of the columns, by the sizes of their files; of others than the weights no more."""
        found = {}
        for name in self.columns:
            size, rest = divmod(_size(self._file(name)), self.rows)
            shape = torch.Size([] if name.endswith(_NUMBERS) else [self.dim])
            kind = dtype if name == _WEIGHT else _OPAQUE.get(size // shape.numel())
            if rest or kind is None or size != shape.numel() * kind.itemsize:
                raise DataError(f"{self._file(name)} has another size than {self.rows:,} rows; bring the file back")
            found[name] = kind, shape
        return found

    def _file(self, column: str) -> Path:
        return self.prefix.with_name(f"{self.prefix.name}.{column}")


def saved_table(stored: StoredCheckpoint, state: Any, used: Sequence[int] | None) -> RowsOutside:
    """The class table of a checkpoint in files, as it was then.

    Args:
        stored: the checkpoint.
        state: what its small state holds: the identity of each rank's table.
        used: rows of each shard that were in use; None: all.

    Raises:
        DataError: the files are not there, or those of another table.
        IntegrityError: the checkpoint names none.
    """
    identities, placement = check_identities(state, stored.path), stored.value("config.head.placement", str)
    file = mapped_file(placement) if placement.startswith("mmap:") else None
    dtype = _FLOATS.get(stored.value("config.head.weight_dtype", str))
    if file is None or dtype is None:
        raise IntegrityError(f"{stored.path} names no files of a class table; it is the checkpoint of another program")
    ranks = open_saved_rows(file, identities, used)
    dims, files = {saved.dim for saved in ranks} or {0}, tuple(f"{saved.prefix}.{_WEIGHT}" for saved in ranks)
    if len(dims) > 1:
        raise DataError(f"{file}.rank*-of-{len(identities)}.* have rows of several lengths; bring all files back")
    copy = partial(_copy, ranks, stored.step, dtype)
    return RowsOutside(sum(saved.used for saved in ranks), dims.pop(), dtype, files, copy)


def _copy(ranks: Sequence[SavedRows], step: int, dtype: torch.dtype, centres: NDArray[np.float32]) -> None:
    """Write the rows as they are into ``centres`` (rows, D), then over them what the journals hold."""
    first = 0
    for saved in ranks:
        own = centres[first : first + saved.used]
        for index, values in saved.weights(step, dtype):
            own[index if isinstance(index, slice) else index.numpy()] = values.float().numpy()
        first += saved.used


def open_saved_rows(file: Path, identities: Sequence[str | None], used: Sequence[int] | None = None) -> list[SavedRows]:
    """The rows of each rank of a table in ``FILE.rankR-of-W.*``, replicas left out, in the order of the table.

    Args:
        file: FILE.
        identities: of each rank's table; None where a rank has none.
        used: rows of each shard that were in use at the savepoint; None: all.

    Raises:
        DataError: the files are not there, or those of another table.
    """
    ranks: dict[int, SavedRows] = {}
    for rank, identity in enumerate(identities):
        if identity is not None:
            saved = _open(file.with_name(f"{file.name}.rank{rank}-of-{len(identities)}"), identity)
            if saved.rows:
                ranks.setdefault(saved.first_row, saved)
    ordered = [ranks[first] for first in sorted(ranks)]
    ends = [0, *(saved.first_row + saved.rows for saved in ordered)]
    total = {saved.total_rows for saved in ordered} or {0}
    if [saved.first_row for saved in ordered] != ends[:-1] or total != {ends[-1]}:
        raise DataError(f"{file}.rank*-of-{len(identities)}.* do not hold all rows of one table; bring all files back")
    if used is None:
        return ordered
    if len(used) != len(ordered) or any(not 0 <= own <= saved.rows for own, saved in zip(used, ordered, strict=True)):
        raise DataError(
            f"{file}.rank*-of-{len(identities)}.* hold other shards than the checkpoint; bring all files back"
        )
    return [replace(saved, used=own) for own, saved in zip(used, ordered, strict=True)]


def _open(prefix: Path, identity: str) -> SavedRows:
    described = prefix.with_name(f"{prefix.name}.json")
    _size(described)
    found = read_json(described)
    if not isinstance(found, dict) or found.get("format") != FORMAT or found.get("id") != identity:
        raise DataError(f"{described} describes another table than the checkpoint's; bring the files back")
    rows, dim, first, total = (_count(described, found, name) for name in ("rows", "dim", "first_row", "total_rows"))
    columns = found.get("columns")
    if not isinstance(columns, list) or not all(isinstance(name, str) and name.isidentifier() for name in columns):
        raise DataError(f"{described} names no columns of a table; bring the files back")
    if _WEIGHT not in columns or not dim:
        raise DataError(f"{described} names no weights; bring the files back")
    return SavedRows(prefix, rows, dim, first, total, tuple(columns), used=rows)


def _count(described: Path, found: Mapping[str, Any], name: str) -> int:
    value = found.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise DataError(f"{described} holds no number of {name}; bring the files back")
    return value


def _size(path: Path) -> int:
    """Bytes of an ordinary file."""
    try:
        found = path.stat()
    except OSError as error:
        raise DataError(f"cannot read {path}, of the checkpoint's table: {error.strerror}; bring it back") from None
    if not stat.S_ISREG(found.st_mode):
        raise DataError(f"{path} is no file; bring the table's files back")
    return found.st_size
