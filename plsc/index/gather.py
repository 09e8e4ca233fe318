"""From embedding sets to the rows of one index: what can be searched, under which ids and classes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from plsc.embed.embedding_set import ChainedStrings, EmbeddingSet, same_contract
from plsc.errors import DataError, UsageError
from plsc.index.exact import Float32, Int64

_NUMBERS = 1 << 18  # of the rows read at once


@dataclass(frozen=True)
class Gathered:
    """The searchable rows of several sets, in the sets' order.

    source_rows: (N,) positions in the sets laid one behind the other; ids: (N,), unique; labels: (N,) into
    ``class_names``, -1 for none; source_keys: the keys of all rows of the sets; left_out: how many rows are not
    searchable, by reason; offsets: what was added to each set's ids.
    """

    sets: Sequence[EmbeddingSet]
    contract_id: str
    source_rows: Int64
    ids: Int64
    labels: Int64
    class_names: list[str]
    source_keys: Sequence[str]
    left_out: dict[str, int]
    offsets: list[int]

    def __len__(self) -> int:
        return len(self.ids)

    def key(self, row: int) -> str:
        """The key of searchable row ``row``."""
        return self.source_keys[int(self.source_rows[row])]

    def unit_chunks(self) -> Iterator[tuple[int, Float32]]:
        """Pairs (first row, vectors (n, D) float32 of length 1) that cover all rows in order."""
        row, begin = 0, 0
        for source in self.sets:
            for start, stop in _chunks(source):
                last = int(np.searchsorted(self.source_rows, begin + stop))
                if last > row:
                    vectors = source.rows(start, stop)[self.source_rows[row:last] - begin - start].astype(np.float64)
                    yield row, (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
                row = last
            begin += len(source)


def gather(sets: Sequence[EmbeddingSet]) -> Gathered:
    """Bring sets together: rows with an error, NaN, infinity or no length are left out and counted.

    Classes are matched by name. Where two sets use the same ids, the later set's are moved up behind the
    earlier ones'. Raises :class:`UsageError` if the sets' contracts differ, a set is given twice or none is
    given, and :class:`DataError` if a set repeats an id or nothing is searchable.
    """
    if not sets:
        raise UsageError("no embedding set is given")
    folders = [source.folder.resolve() for source in sets]
    for number, folder in enumerate(folders):
        if folder in folders[:number]:
            raise UsageError(f"{folder} is given twice")
    contract = same_contract(sets)
    left_out = {"error": 0, "not_finite": 0, "zero": 0}
    good = np.concatenate([_searchable(source, left_out) for source in sets])
    if not good.any():
        raise DataError(f"{_names(sets)} holds no embedding that can be searched ({len(good)} rows)")
    ids, offsets = _unique_ids(sets)
    labels, class_names = _merged_classes(sets)
    rows = np.flatnonzero(good).astype(np.int64)
    keys = ChainedStrings([source.keys for source in sets])
    return Gathered(sets, contract, rows, ids[good], labels[good], class_names, keys, left_out, offsets)


def _names(sets: Sequence[EmbeddingSet]) -> str:
    return ", ".join(str(source.folder) for source in sets)


def searchable(vectors: Float32) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Which rows (n, D) are finite, and which of them have a length."""
    finite = np.logical_and.reduce(np.isfinite(vectors), axis=1)
    nonzero = np.logical_or.reduce(vectors != 0, axis=1)
    return finite, finite & nonzero


def _searchable(source: EmbeddingSet, left_out: dict[str, int]) -> npt.NDArray[np.bool_]:
    """(len,) mask of the rows of ``source`` that can be searched; counts the others into ``left_out``."""
    mask = np.ones(len(source), dtype=bool)
    mask[list(source.errors)] = False
    left_out["error"] += len(source.errors)
    for start, stop in _chunks(source):
        asked = mask[start:stop].copy()
        finite, usable = searchable(source.rows(start, stop))
        left_out["not_finite"] += int((asked & ~finite).sum())
        left_out["zero"] += int((asked & finite & ~usable).sum())
        mask[start:stop] &= usable
    return mask


def _chunks(source: EmbeddingSet) -> Iterator[tuple[int, int]]:
    together = max(1, _NUMBERS // max(1, source.dim))
    for start in range(0, len(source), together):
        yield start, min(start + together, len(source))


def _unique_ids(sets: Sequence[EmbeddingSet]) -> tuple[Int64, list[int]]:
    parts: list[Int64] = []
    offsets: list[int] = []
    for source in sets:
        ids = source.ids
        if len(np.unique(ids)) != len(ids):
            raise DataError(f"{source.folder} uses an id twice; embed it again")
        offset = 0
        if len(ids) and any(np.isin(ids, part).any() for part in parts):
            offset = max(int(part.max()) for part in parts if len(part)) + 1 - int(ids.min())
            if int(ids.max()) + offset > np.iinfo(np.int64).max:
                raise DataError(f"the ids of {source.folder} cannot be moved behind the others' within 64 bits")
        parts.append(ids + offset)
        offsets.append(offset)
    return np.concatenate(parts), offsets


def _merged_classes(sets: Sequence[EmbeddingSet]) -> tuple[Int64, list[str]]:
    places: dict[str, int] = {}
    parts = []
    for source in sets:
        mapped = [places.setdefault(name, len(places)) for name in source.class_names]
        table = np.array([*mapped, -1], dtype=np.int64)  # label -1 finds the last entry
        labels = source.labels
        if len(labels) and not -1 <= int(labels.min()) <= int(labels.max()) < len(mapped):
            raise DataError(f"{source.folder} holds labels outside its {len(mapped)} classes; embed it again")
        parts.append(table[labels])
    return np.concatenate(parts), list(places)
