"""The searchable rows of several embedding sets as one: classes matched by name, ids kept apart."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from plsc.data.dataset import PackedStringColumn
from plsc.embedding.columns import ChainedStringColumn, Float32, Int64, Mask, searchable
from plsc.embedding.embedding_set import EmbeddingSet, same_contract
from plsc.embedding.metadata import Metadata, read_metadata
from plsc.errors import DataError, UsageError

_READ_KEYS = 1 << 16  # at once
_READ_NUMBERS = 1 << 18  # of the rows of a set that are read at once


@dataclass(frozen=True)
class MergedSets:
    """The searchable rows of several embedding sets, in the sets' order.

    Attributes:
        sets: the sets.
        contract_id: that they share.
        source_rows: (N,) positions in the sets laid one behind the other.
        ids: (N,), unique.
        labels: (N,) into ``class_names``, -1 for none.
        class_names: of all sets, each once.
        source_keys: the keys of all rows of the sets, searchable or not.
        source_metadata: their metadata, as stored.
        left_out: {reason: number of rows that are not searchable}.
        offsets: what was added to each set's ids.
    """

    sets: Sequence[EmbeddingSet]
    contract_id: str
    source_rows: Int64
    ids: Int64
    labels: Int64
    class_names: list[str]
    source_keys: ChainedStringColumn
    source_metadata: Sequence[str]
    left_out: dict[str, int]
    offsets: list[int]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def dim(self) -> int:
        """Numbers in a vector."""
        return self.sets[0].dim

    @property
    def alignments(self) -> list[str]:
        """How faces were aligned while the sets were made, each way once; none for pictures taken as they came."""
        return sorted({str(source.manifest["alignment"]) for source in self.sets if "alignment" in source.manifest})

    def keys(self, rows: Int64) -> Iterator[PackedStringColumn]:
        """Yield the keys of the searchable ``rows``, in their order."""
        for start in range(0, len(rows), _READ_KEYS):
            yield from self.source_keys.packed(self.source_rows[rows[start : start + _READ_KEYS]])

    def metadata(self, row: int) -> Metadata:
        """The metadata of searchable row ``row``."""
        return read_metadata(self.source_metadata, int(self.source_rows[row]), self.sets[0].path)

    def unit_chunks(self) -> Iterator[tuple[int, Float32]]:
        """Yield (first row, vectors (n, D) float32 of length 1) until all rows are covered, in order."""
        row, begin = 0, 0
        for source in self.sets:
            for start, stop in _chunks(source):
                last = int(np.searchsorted(self.source_rows, begin + stop))
                if last > row:
                    vectors = source.rows(start, stop)[self.source_rows[row:last] - begin - start].astype(np.float64)
                    yield row, (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
                row = last
            begin += len(source)


def gather(sets: Sequence[EmbeddingSet]) -> MergedSets:
    """Merge sets; rows with an error, NaN, infinity or no length are left out and counted.

    Classes are matched by name. Where two sets use the same ids, the later set's are moved up behind the earlier
    ones'.

    Raises:
        UsageError: the sets' contracts differ, a set is given twice, or none is given.
        DataError: a set repeats an id, or nothing is searchable.
    """
    if not sets:
        raise UsageError("no embedding set is given")
    folders = [source.path.resolve() for source in sets]
    for number, folder in enumerate(folders):
        if folder in folders[:number]:
            raise UsageError(f"{folder} is given twice")
    contract = same_contract(sets)
    left_out = {"error": 0, "not_finite": 0, "zero": 0}
    good = np.concatenate([_searchable_rows(source, left_out) for source in sets])
    if not good.any():
        names = ", ".join(str(source.path) for source in sets)
        raise DataError(f"{names} holds no embedding that can be searched ({len(good)} rows)")
    ids, offsets = _unique_ids(sets)
    labels, class_names = _merged_classes(sets)
    rows = np.flatnonzero(good).astype(np.int64)
    keys = ChainedStringColumn([source.keys for source in sets])
    metadata = ChainedStringColumn([source.metadata_column for source in sets])
    return MergedSets(sets, contract, rows, ids[good], labels[good], class_names, keys, metadata, left_out, offsets)


def _searchable_rows(source: EmbeddingSet, left_out: dict[str, int]) -> Mask:
    """(len,) mask of the rows of ``source`` that can be searched; counts the others into ``left_out``."""
    mask = np.ones(len(source), dtype=bool)
    mask[list(source.errors)] = False
    left_out["error"] += len(source.errors)
    for start, stop in _chunks(source):
        without_error = mask[start:stop].copy()
        finite, usable = searchable(source.marks(start, stop))
        left_out["not_finite"] += int((without_error & ~finite).sum())
        left_out["zero"] += int((without_error & finite & ~usable).sum())
        mask[start:stop] &= usable
    return mask


def _chunks(source: EmbeddingSet) -> Iterator[tuple[int, int]]:
    step = max(1, _READ_NUMBERS // max(1, source.dim))
    for start in range(0, len(source), step):
        yield start, min(start + step, len(source))


def _unique_ids(sets: Sequence[EmbeddingSet]) -> tuple[Int64, list[int]]:
    parts: list[Int64] = []
    offsets: list[int] = []
    for source in sets:
        ids = source.ids
        if not (np.diff(ids) > 0).all() and len(np.unique(ids)) != len(ids):
            raise DataError(f"{source.path} uses an id twice; embed it again")
        offset = 0
        if len(ids) and any(np.isin(ids, part).any() for part in parts):
            offset = max(int(part.max()) for part in parts if len(part)) + 1 - int(ids.min())
            if int(ids.max()) + offset > np.iinfo(np.int64).max:
                raise DataError(f"the ids of {source.path} cannot be moved behind the others' within 64 bits")
        parts.append(ids + offset)
        offsets.append(offset)
    return np.concatenate(parts), offsets


def _merged_classes(sets: Sequence[EmbeddingSet]) -> tuple[Int64, list[str]]:
    positions: dict[str, int] = {}
    parts = []
    for source in sets:
        mapped = [positions.setdefault(name, len(positions)) for name in source.class_names]
        table = np.array([*mapped, -1], dtype=np.int64)  # label -1 indexes the last entry
        labels = source.labels
        if len(labels) and not -1 <= int(labels.min()) <= int(labels.max()) < len(mapped):
            raise DataError(f"{source.path} holds labels outside its {len(mapped)} classes; embed it again")
        parts.append(table[labels])
    return np.concatenate(parts), list(positions)
