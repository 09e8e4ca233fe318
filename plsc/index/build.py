"""Building an index: gather the sets' rows, normalise them, choose and tune a structure, measure, publish."""

import math
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from plsc.arguments import as_integer, as_number
from plsc.embedding.columns import ChainedStringColumn, save_array, save_strings
from plsc.embedding.embedding_set import EmbeddingSet, same_contract
from plsc.errors import DataError, UsageError
from plsc.files import (
    atomic_replace_dir,
    check_output,
    describe_files,
    holds_manifest,
    make_folder,
    new_folder,
    write_manifest,
)
from plsc.index import ann
from plsc.index.index import COLUMN_FILES, FAISS_FILE, FORMAT, VERSION
from plsc.index.on_disk import LISTS_FILE, MemoryBudget
from plsc.index.recall import RecallTarget, choose_held_out
from plsc.index.rows import Float32, Int64, Mask, searchable
from plsc.index.tuning import HELD_OUT, BuildOptions, choose_structure

KINDS = ("auto", "exact", "ivf", "hnsw", "pq")
EXACT_UP_TO = 200_000  # rows; below, brute force answers in milliseconds and misses nothing
_MAX_SEED = 2**31 - 1  # of faiss' k-means
MIN_ROWS_FOR_LATENCY = 1000  # below, no latency that can be asked for is missed
_READ_NUMBERS = 1 << 18  # of the rows of a set that are read at once


def build(
    sets: Sequence[EmbeddingSet | str | Path],
    folder: Path,
    *,
    kind: str = "auto",
    recall: float = 0.99,
    recall_at: int = 10,
    latency_ms: float | None = None,
    memory: int | None = None,
    seed: int = 0,
    quiet: bool = False,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Build the index ``folder`` over embedding sets and return its manifest.

    Every set is hashed first.

    Args:
        sets: opened, or their folders; of one contract.
        folder: empty, absent, or an index.
        kind: "exact", "ivf", "hnsw", "pq" (least memory), or "auto": exact up to 200,000 rows; above that IVF, unless
            brute force answers a single query faster than IVF does at the wanted recall.
        recall: least recall of an approximate kind on held-out real rows.
        recall_at: 1 asks it of the nearest row alone, 10 of the ten nearest as well. Where an identity has fewer than
            11 rows, the last of ten neighbours are strangers, alike by chance, and finding them all takes many times
            the effort.
        latency_ms: with "auto" and any number of rows: exact if a single query then takes no longer, else the first of
            IVF and HNSW that takes no longer, else the fastest of all. The manifest's "latency" holds what was wanted
            and measured, medians in milliseconds.
        memory: bytes that the build may take, whatever the sets' size (see :mod:`plsc.index.on_disk`): an IVF
            structure that does not fit is trained on a smaller sample, added part by part and merged on disk, which
            takes three times the vectors' bytes there while it lasts; HNSW, which has to fit, is refused. None: as
            much as it takes.
        seed: of k-means and of the choice of held-out rows.
        quiet: print no progress.
        overwrite: replace an index that ``folder`` holds already, once the new one is whole.

    Raises:
        UsageError: a wrong kind or recall, sets that do not go together, a folder that exists, too few rows for the
            kind, or a recall out of reach.
        IntegrityError: a damaged set.
    """
    recall, recall_at = as_number(recall, "recall"), as_integer(recall_at, "recall_at")
    latency_ms = None if latency_ms is None else as_number(latency_ms, "latency_ms")
    memory = None if memory is None else as_integer(memory, "memory", 1)
    seed = as_integer(seed, "seed", 0, _MAX_SEED)
    _check_options(kind, recall, recall_at, latency_ms)
    _check_folder(folder, overwrite)
    opened = [source if isinstance(source, EmbeddingSet) else EmbeddingSet(source) for source in sets]
    for source in opened:
        source.verify()
    rows = gather(opened)
    began = time.monotonic()
    with _new_index(folder.resolve()) as tmp_path:
        options = BuildOptions(
            kind=_resolve_kind(kind, len(rows), latency_ms),
            may_choose=kind == "auto",
            target=RecallTarget(recall, recall_at),
            latency_ms=latency_ms,
            seed=seed,
            quiet=quiet,
            budget=None if memory is None else MemoryBudget(memory, len(rows), rows.sets[0].dim, tmp_path),
        )
        manifest = _write_index(tmp_path, rows, options)
        manifest["build_seconds"] = round(time.monotonic() - began, 3)
        write_manifest(tmp_path, manifest)
    return manifest


@contextmanager
def _new_index(folder: Path) -> Iterator[Path]:
    """Yield a temporary neighbour of ``folder``, which takes its place if the block succeeds."""
    tmp_path = folder.with_name(f".{folder.name}.building")
    with new_folder(folder.parent):
        shutil.rmtree(tmp_path, ignore_errors=True)
        make_folder(tmp_path)
        try:
            yield tmp_path
            atomic_replace_dir(tmp_path, folder)
        finally:
            shutil.rmtree(tmp_path, ignore_errors=True)


def _check_options(kind: str, recall: float, recall_at: int, latency_ms: float | None) -> None:
    if kind not in KINDS:
        raise UsageError(f"no kind {kind!r}; it is one of {', '.join(KINDS)}")
    if not 0 < recall <= 1:
        raise UsageError(f"recall {recall}: it lies above 0 and up to 1")
    if recall_at not in (1, 10):
        raise UsageError(f"recall at {recall_at}: it is measured at 1 and at 10")
    if latency_ms is not None and not 0 < latency_ms < math.inf:
        raise UsageError(f"a latency of {latency_ms} ms: it lies above 0")


def _check_folder(folder: Path, overwrite: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; name a folder")
    if folder.is_dir() and any(folder.iterdir()) and not holds_manifest(folder, FORMAT):
        raise UsageError(f"{folder} is not empty and holds no index; name another folder")
    check_output(folder, overwrite=overwrite)


def _resolve_kind(kind: str, rows: int, latency_ms: float | None) -> ann.Kind:
    few = EXACT_UP_TO if latency_ms is None else MIN_ROWS_FOR_LATENCY
    if kind == "exact" or (kind == "auto" and rows <= few):
        return "exact"
    resolved: ann.Kind = "hnsw" if kind == "hnsw" else "pq" if kind == "pq" else "ivf"
    if rows < ann.MIN_ROWS[resolved]:
        raise UsageError(f"{resolved} needs {ann.MIN_ROWS[resolved]} rows and there are {rows}; use --kind exact")
    return resolved


def _write_index(tmp_path: Path, rows: "MergedSets", options: BuildOptions) -> dict[str, Any]:
    """Write all files but the manifest; returns the manifest."""
    held_out = np.empty(0, dtype=np.int64)
    if options.kind != "exact":
        held_out = choose_held_out(rows.labels, HELD_OUT, options.seed)
    vectors = _write_columns(tmp_path, rows, held_out)
    structure = choose_structure(vectors, len(held_out), options, tmp_path / FAISS_FILE)
    if structure["kind"] == "exact":
        (tmp_path / LISTS_FILE).unlink(missing_ok=True)  # of a structure that was built and not chosen
    files = [*COLUMN_FILES, *(name for name in (FAISS_FILE, LISTS_FILE) if (tmp_path / name).exists())]
    return {
        "format": FORMAT,
        "version": VERSION,
        "rows": len(rows),
        "dim": rows.sets[0].dim,
        "contract_id": rows.contract_id,
        "model": rows.sets[0].manifest.get("model"),
        "classes": len(rows.class_names),
        "left_out": rows.left_out,
        "recall_asked": {"share": options.target.share, "at": options.target.at},
        **structure,
        "sets": [
            {"path": str(source.folder.resolve()), "rows": len(source), "id_offset": offset}
            for source, offset in zip(rows.sets, rows.offsets, strict=True)
        ],
        "files": describe_files(tmp_path, files),
    }


def _write_columns(tmp_path: Path, rows: "MergedSets", held_out: Int64) -> Float32:
    """Write vectors, ids, labels and names, the rows ``held_out`` (ascending) last; returns the vectors, mapped."""
    last = np.zeros(len(rows), dtype=bool)
    last[held_out] = True
    path = tmp_path / "vectors.npy"
    _write_vectors(path, rows, last)
    save_array(tmp_path / "ids.npy", np.concatenate([rows.ids[~last], rows.ids[last]]))
    save_array(tmp_path / "labels.npy", np.concatenate([rows.labels[~last], rows.labels[last]]))
    order = chain(np.flatnonzero(~last), held_out)
    save_strings(tmp_path, "keys", (rows.key(int(row)) for row in order))
    save_strings(tmp_path, "class_names", rows.class_names)
    mapped: Float32 = np.load(path, mmap_mode="r", allow_pickle=False)
    return mapped


def _write_vectors(path: Path, rows: "MergedSets", last: Mask) -> None:
    """Write the rows chunk by chunk, those that are ``last`` (N,) at the end.

    Not through a memory map, whose dirty pages would count towards the memory of the build.
    """
    with path.open("wb") as file:
        header = {"descr": "<f4", "fortran_order": False, "shape": (len(rows), rows.sets[0].dim)}
        np.lib.format.write_array_header_1_0(file, header)
        held_out = []
        for start, vectors in rows.unit_chunks():
            is_last = last[start : start + len(vectors)]
            file.write(np.ascontiguousarray(vectors[~is_last], dtype="<f4").data)
            held_out.append(vectors[is_last])
        file.write(np.concatenate(held_out).astype("<f4").data)


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
        left_out: {reason: number of rows that are not searchable}.
        offsets: what was added to each set's ids.
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
    folders = [source.folder.resolve() for source in sets]
    for number, folder in enumerate(folders):
        if folder in folders[:number]:
            raise UsageError(f"{folder} is given twice")
    contract = same_contract(sets)
    left_out = {"error": 0, "not_finite": 0, "zero": 0}
    good = np.concatenate([_searchable_rows(source, left_out) for source in sets])
    if not good.any():
        names = ", ".join(str(source.folder) for source in sets)
        raise DataError(f"{names} holds no embedding that can be searched ({len(good)} rows)")
    ids, offsets = _unique_ids(sets)
    labels, class_names = _merged_classes(sets)
    rows = np.flatnonzero(good).astype(np.int64)
    keys = ChainedStringColumn([source.keys for source in sets])
    return MergedSets(sets, contract, rows, ids[good], labels[good], class_names, keys, left_out, offsets)


def _searchable_rows(source: EmbeddingSet, left_out: dict[str, int]) -> Mask:
    """(len,) mask of the rows of ``source`` that can be searched; counts the others into ``left_out``."""
    mask = np.ones(len(source), dtype=bool)
    mask[list(source.errors)] = False
    left_out["error"] += len(source.errors)
    for start, stop in _chunks(source):
        without_error = mask[start:stop].copy()
        finite, usable = searchable(source.rows(start, stop))
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
    positions: dict[str, int] = {}
    parts = []
    for source in sets:
        mapped = [positions.setdefault(name, len(positions)) for name in source.class_names]
        table = np.array([*mapped, -1], dtype=np.int64)  # label -1 indexes the last entry
        labels = source.labels
        if len(labels) and not -1 <= int(labels.min()) <= int(labels.max()) < len(mapped):
            raise DataError(f"{source.folder} holds labels outside its {len(mapped)} classes; embed it again")
        parts.append(table[labels])
    return np.concatenate(parts), list(positions)
