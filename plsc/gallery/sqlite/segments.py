"""Segments, the searched copies of a collection's vectors: one sealed on disk, one growing in memory, and their views.

As in Lucene or Milvus, a sealed segment never changes after it is published; later faces go to the growing segment, and
deletions are masks over both. Segments are derived from SQLite, so a damaged one is rebuilt rather than repaired.

An encrypted store has its sealed segments in memory alone, of what SQLite's rows decrypt to; of others they are files:

STORE/collections/<collection's number>/base-<n>/
  manifest.json    with its own digest: the collection, n, rows, dim, watermark, and {file: {"bytes", "sha256"}}; SQLite
                   stores the digest too, so that no other segment can stand in this one's place
  vectors.npy      (N, dim) float32 of unit length, by ascending face id
  faces.npy        (N,) int64 face ids, ascending
  persons.npy      (N,) int64 owner of each face
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from plsc.embedding.columns import open_array, save_array
from plsc.errors import DataError, IntegrityError
from plsc.files import (
    Manifest,
    atomic_private_folder,
    describe_files,
    digest,
    read_manifest,
    verify_files,
    write_manifest,
)
from plsc.gallery.sqlite.records import Faces, StoredCollection
from plsc.gallery.values import Float32
from plsc.index.ann import ApproximateSearch
from plsc.index.rows import Int64, Mask, RowSource, rank
from plsc.index.scan import ExactScan

FORMAT = "plsc gallery base"
VERSION = 1
FILES = ("vectors.npy", "faces.npy", "persons.npy")
_INITIAL_ROWS = 64  # of a growing segment
_BATCH_ROWS = 4096  # copied at once
_SCORES_IN_MEMORY = 1 << 22  # of a scan of the growing segment
_FLOAT32_ERROR = 2.0**-23  # twice the unit roundoff, per addition
_MAX_CACHED_FILTERS = 8


@dataclass(frozen=True, eq=False)
class SealedSegment:
    """An immutable, memory-mapped segment of N faces.

    Attributes:
        faces: (N,) ids, ascending; persons: (N,) their owners; vectors: (N, dim) float32, mapped.
        max_faces: the most faces that one person has in it.
        scan: exact search of ``vectors``.
        ann: approximate search of them, which replaces ``scan`` where there is one.
    """

    faces: Int64
    persons: Int64
    vectors: Float32
    max_faces: int
    scan: ExactScan
    ann: ApproximateSearch | None = None

    def __len__(self) -> int:
        return len(self.faces)

    @property
    def memory_bytes(self) -> int:
        """Bytes that searching keeps in memory; an approximate structure holds the vectors a second time."""
        return self.scan.memory_bytes + (0 if self.ann is None else self.vectors.nbytes)


class GrowingSegment:
    """Faces newer than the sealed segment, in arrays that double when they are full.

    Rows are appended and never modified, so a reader that holds :attr:`rows` of an earlier moment may go on reading it
    without a lock: appending writes behind its end, and growing leaves it the former arrays. One thread appends at a
    time. Memory that was allocated and not yet written is not resident.
    """

    def __init__(self, dim: int) -> None:
        self._length = 0
        self._vectors: Float32 = np.empty((0, dim), dtype=np.float32)
        self._faces: Int64 = np.empty(0, dtype=np.int64)
        self._persons: Int64 = np.empty(0, dtype=np.int64)

    def reserve(self, count: int) -> None:
        """Allocate room for ``count`` more rows: appending them cannot fail then."""
        needed, capacity = self._length + count, len(self._faces)
        if needed <= capacity:
            return
        capacity = max(needed, 2 * capacity, _INITIAL_ROWS)
        vectors = np.empty((capacity, self._vectors.shape[1]), dtype=np.float32)
        faces, persons = np.empty(capacity, dtype=np.int64), np.empty(capacity, dtype=np.int64)
        for new, old in ((vectors, self._vectors), (faces, self._faces), (persons, self._persons)):
            new[: self._length] = old[: self._length]
        self._vectors, self._faces, self._persons = vectors, faces, persons

    def append(self, batch: Faces) -> None:
        """Append rows, whose ids are larger than all before."""
        self.reserve(len(batch.ids))
        part = slice(self._length, self._length + len(batch.ids))
        self._vectors[part], self._faces[part], self._persons[part] = batch.vectors, batch.ids, batch.persons
        self._length += len(batch.ids)

    @property
    def rows(self) -> Faces:
        """All rows so far; later ones do not appear in it."""
        return Faces(self._faces[: self._length], self._persons[: self._length], self._vectors[: self._length])


# --- views ---


@dataclass(frozen=True)
class RowMasks:
    """Masks of the rows that a search may return, of the sealed segment (N,) and of the growing one; None: all."""

    sealed: Mask | None
    growing: Mask | None


@dataclass(frozen=True, eq=False)
class SegmentView:
    """The faces that one search sees; immutable except for a cache of masks.

    Attributes:
        sealed: the sealed segment; None: the collection has none.
        alive: (N,) mask of the sealed rows that are not deleted; None: all.
        growing: the faces added since the sealed segment.
        growing_deleted: row numbers in ``growing`` that were deleted, ascending.
        masks: rows that recent filters match, by filter.
    """

    sealed: SealedSegment | None
    alive: Mask | None
    growing: Faces
    growing_deleted: Int64
    masks: dict[str, RowMasks] = field(default_factory=dict)

    @functools.cached_property
    def sealed_deleted(self) -> int:
        """Number of rows of the sealed segment that were deleted."""
        return 0 if self.alive is None else len(self.alive) - int(np.count_nonzero(self.alive))

    @functools.cached_property
    def max_faces(self) -> int:
        """Upper bound on the faces of one person."""
        return (0 if self.sealed is None else self.sealed.max_faces) + max_count(self.growing.persons)

    def remaining(self) -> Iterator[Faces]:
        """Yield the faces that are not deleted, in batches by ascending id."""
        parts = [(self.growing.ids, self.growing.persons, self.growing.vectors, self.masks_of(None).growing)]
        if self.sealed is not None:
            parts.insert(0, (self.sealed.faces, self.sealed.persons, self.sealed.vectors, self.alive))
        for ids, persons, vectors, alive in parts:
            for start in range(0, len(ids), _BATCH_ROWS):
                rows = slice(start, start + _BATCH_ROWS)
                kept = slice(None) if alive is None else alive[rows]
                yield Faces(ids[rows][kept], persons[rows][kept], vectors[rows][kept])

    @property
    def remaining_count(self) -> int:
        """Number of faces that are not deleted."""
        sealed = 0 if self.sealed is None else len(self.sealed) - self.sealed_deleted
        return sealed + len(self.growing.ids) - len(self.growing_deleted)

    def without(self, faces: Sequence[int]) -> "SegmentView":
        """Return this view without ``faces``; ids that it does not have are ignored."""
        deleted = np.sort(np.asarray(faces, dtype=np.int64))
        alive = self.alive
        if self.sealed is not None:
            rows = _rows_of(deleted, self.sealed.faces)
            if len(rows):
                alive = np.ones(len(self.sealed), dtype=np.bool_) if alive is None else alive.copy()
                alive[rows] = False
        growing_deleted = np.union1d(self.growing_deleted, _rows_of(deleted, self.growing.ids))
        return replace(self, alive=alive, growing_deleted=growing_deleted, masks={})

    def cache_masks(self, key: str, masks: RowMasks) -> None:
        """Keep a filter's masks for as long as this view is current. Searches may race here: the dict is atomic."""
        if len(self.masks) < _MAX_CACHED_FILTERS:
            self.masks[key] = masks

    def masks_of(self, persons: Int64 | None) -> RowMasks:
        """Return masks of the rows of ``persons`` (None: of everybody) that are not deleted."""
        sealed, growing = self.alive, None
        if len(self.growing_deleted):
            growing = np.ones(len(self.growing.ids), dtype=np.bool_)
            growing[self.growing_deleted] = False
        if persons is None:
            return RowMasks(sealed, growing)
        matching = np.isin(self.growing.persons, persons)
        growing = matching if growing is None else growing & matching
        if self.sealed is not None:
            matching = np.isin(self.sealed.persons, persons)
            sealed = matching if sealed is None else sealed & matching
        return RowMasks(sealed, growing)

    def knn(self, queries: Float32, k: int, masks: RowMasks) -> tuple[Float32, Int64, Int64]:
        """Find the ``k`` most similar faces for each of ``queries`` (Q, dim), best first, ties by id.

        Returns:
            scores, faces and persons, (Q, k') each; k' < k only if the masks leave fewer than k rows.
        """
        scores, rows = _knn_growing(self.growing.vectors, queries, k, masks.growing)
        faces, persons = self.growing.ids[rows], self.growing.persons[rows]
        if self.sealed is None:
            return scores, faces, persons
        search = self.sealed.scan if self.sealed.ann is None else self.sealed.ann
        sealed_scores, sealed_rows = search.search(queries, k, allowed=masks.sealed)
        sealed_faces, sealed_persons = self.sealed.faces[sealed_rows], self.sealed.persons[sealed_rows]
        if not faces.size:
            return sealed_scores, sealed_faces, sealed_persons
        # The sealed segment first: its ids are smaller, and the stable sort then leaves ties in the order of ids.
        scores = np.concatenate([sealed_scores, scores], axis=1)
        faces = np.concatenate([sealed_faces, faces], axis=1)
        persons = np.concatenate([sealed_persons, persons], axis=1)
        order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        return tuple(np.take_along_axis(part, order, axis=1) for part in (scores, faces, persons))  # type: ignore[return-value]


def max_count(persons: Int64) -> int:
    """Return how often the most frequent of ``persons`` occurs."""
    return int(np.unique(persons, return_counts=True)[1].max(initial=0))


def _rows_of(wanted: Int64, ascending: Int64) -> Int64:
    """Return the positions in ``ascending`` of those of ``wanted`` that occur in it."""
    if not len(ascending):
        return np.empty(0, dtype=np.int64)
    rows = np.minimum(np.searchsorted(ascending, wanted), len(ascending) - 1)
    found: Int64 = rows[ascending[rows] == wanted].astype(np.int64)
    return found


def _knn_growing(vectors: Float32, queries: Float32, k: int, allowed: Mask | None) -> tuple[Float32, Int64]:
    """Return scores and rows (Q, k'): candidates from a float32 product, ranked in float64.

    A float32 score is off by at most ``margin``/2, so every row within ``margin`` of the k-th best is a candidate, and
    the ranking is that of float64, as in a sealed segment.
    """
    rows_allowed = np.arange(len(vectors)) if allowed is None else np.flatnonzero(allowed)
    k = min(k, len(rows_allowed))
    scores, rows = np.empty((len(queries), k), np.float32), np.empty((len(queries), k), np.int64)
    if not k:
        return scores, rows
    source = RowSource(vectors)
    margin = 2 * _FLOAT32_ERROR * (vectors.shape[1] + 16)
    batch = max(1, _SCORES_IN_MEMORY // len(vectors))
    for start in range(0, len(queries), batch):
        products = queries[start : start + batch] @ vectors.T
        if allowed is not None:
            products = products[:, rows_allowed]
        for query, product in enumerate(products, start):
            kth = len(rows_allowed) - k
            candidates = rows_allowed[product >= np.partition(product, kth)[kth] - margin]
            scores[query], rows[query] = rank(queries[query], source, candidates, k)
    return scores, rows


# --- files ---


def segment_folder(collections: Path, number: int, segment: int) -> Path:
    """Return the folder of segment ``segment`` of collection ``number``."""
    return collections / str(number) / f"base-{segment}"


def write_segment(
    collections: Path, former: StoredCollection, watermark: int, rows: int, batches: Iterator[Faces]
) -> StoredCollection:
    """Publish the segment that follows the current one of ``former``, from ``rows`` faces by ascending id.

    Returns the collection as it is to be stored. Raises OSError if the disk is full; nothing is left then.
    """
    segment, dim = former.segment + 1, former.info.dim
    folder = segment_folder(collections, former.number, segment)
    with atomic_private_folder(folder) as tmp_path:  # syncs the files before the rename: a crash leaves all or none
        _write_columns(tmp_path, rows, dim, batches)
        content: Manifest = {
            "format": FORMAT,
            "version": VERSION,
            "collection": former.number,
            "base": segment,
            "rows": rows,
            "dim": dim,
            "contract_id": former.info.contract_id,
            "covered": watermark,
            "files": describe_files(tmp_path, list(FILES)),
        }
        write_manifest(tmp_path, content)
    return replace(former, segment=segment, digest=digest(content), watermark=watermark)


def open_segment(collections: Path, stored: StoredCollection, precision: str, *, verify: bool = True) -> SealedSegment:
    """Open the current segment of ``stored``; ``verify`` hashes its files while the vectors are read for the scan.

    Raises:
        IntegrityError: the segment is missing or damaged; names the file.
    """
    folder = segment_folder(collections, stored.number, stored.segment)
    manifest = _read_manifest(folder, stored)
    with ThreadPoolExecutor(len(FILES)) as threads:
        described = manifest["files"] if verify else {}
        checks = [threads.submit(verify_files, folder, {name: figures}) for name, figures in described.items()]
        try:
            return _map_segment(folder, manifest, precision)
        except DataError as error:
            raise IntegrityError(f"{folder}: {error}") from None
        finally:
            for check in checks:
                check.result()


def segment_in_memory(rows: int, dim: int, batches: Iterable[Faces], precision: str) -> SealedSegment:
    """Make a segment of ``rows`` faces by ascending id that is in no file, as encrypted stores have them."""
    vectors = np.empty((rows, dim), dtype=np.float32)
    faces, persons = _collect(rows, batches, vectors.__setitem__)
    return SealedSegment(faces, persons, vectors, max_count(persons), ExactScan(vectors, precision=precision))


def verify_segment(collections: Path, stored: StoredCollection) -> tuple[Int64, Int64]:
    """Hash every file of the current segment; returns faces (N,) and persons (N,). Raises as :func:`open_segment`."""
    folder = segment_folder(collections, stored.number, stored.segment)
    manifest = _read_manifest(folder, stored)
    verify_files(folder, manifest["files"])
    return _open_ids(folder, manifest["rows"])


def _read_manifest(folder: Path, stored: StoredCollection) -> Manifest:
    """Return the manifest if it is the one whose digest SQLite holds; else :class:`IntegrityError`."""
    try:
        manifest = read_manifest(folder, FORMAT, VERSION)
    except DataError as error:
        raise IntegrityError(str(error)) from None
    except OSError as error:
        raise IntegrityError(f"{folder} cannot be read: {error.strerror}") from None
    if digest(manifest) != stored.digest or manifest["covered"] != stored.watermark:
        raise IntegrityError(f"{folder} is another segment than the one that was published under its name")
    return manifest


def _map_segment(folder: Path, manifest: Manifest, precision: str) -> SealedSegment:
    rows, dim = manifest["rows"], manifest["dim"]
    vectors = open_array(folder / "vectors.npy", (rows, dim), "float32")
    faces, persons = _open_ids(folder, rows)
    scan = ExactScan(vectors, precision=precision)
    return SealedSegment(np.array(faces), np.array(persons), vectors, max_count(persons), scan)


def _open_ids(folder: Path, rows: int) -> tuple[Int64, Int64]:
    return open_array(folder / "faces.npy", (rows,), "int64"), open_array(folder / "persons.npy", (rows,), "int64")


def _write_columns(folder: Path, rows: int, dim: int, batches: Iterator[Faces]) -> None:
    """Write the arrays by write(), where a full disk is an error; through a memory map it would be SIGBUS."""
    with (folder / "vectors.npy").open("wb") as file:
        header = {"descr": "<f4", "fortran_order": False, "shape": (rows, dim)}
        np.lib.format.write_array_header_1_0(file, header)
        write = file.write
        faces, persons = _collect(rows, batches, lambda _, part: write(np.ascontiguousarray(part, dtype="<f4").data))
    save_array(folder / "faces.npy", faces)
    save_array(folder / "persons.npy", persons)


def _collect(rows: int, batches: Iterable[Faces], keep: Callable[[slice, Float32], object]) -> tuple[Int64, Int64]:
    """Return ids and persons (rows,) of faces; ``keep(part, vectors)`` gets the vectors of each batch."""
    faces, persons = np.empty(rows, dtype=np.int64), np.empty(rows, dtype=np.int64)
    row = 0
    for batch in batches:
        part = slice(row, row + len(batch.ids))
        faces[part], persons[part] = batch.ids, batch.persons
        keep(part, batch.vectors)
        row = part.stop
    assert row == rows, f"{row} faces were read where {rows} had been counted"
    return faces, persons
