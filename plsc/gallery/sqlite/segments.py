"""Sealed segments: the searched copy of a collection's vectors, but for those that came since it was made.

As in Lucene or Milvus, a sealed segment never changes after it is published; later faces go to the growing segment, and
deletions are masks over both (plsc.gallery.sqlite.collection_state). Segments are derived from SQLite, so a damaged one
is rebuilt rather than repaired.

An encrypted store has its sealed segments in memory alone, of what SQLite's rows decrypt to; of others they are files:

STORE/collections/<collection's number>/base-<n>/
  manifest.json    with its own digest: the collection, n, rows, dim, watermark, and {file: {"bytes", "sha256"}}; SQLite
                   stores the digest too, so that no other segment can stand in this one's place
  vectors.npy      (N, dim) float32 of unit length, by ascending face id
  faces.npy        (N,) int64 face ids, ascending
  persons.npy      (N,) int64 owner of each face
  codes.npy, code_bounds.npy  where searches scan 8-bit codes (plsc.index.codes): (N, stride) uint8 and (3, N) float32

Codes are mapped too, so the system keeps them in its cache and takes them back where memory is short: a compaction
makes a second segment beside the one that is searched, in no more memory than it takes to search one.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from plsc.embedding.columns import open_array, save_array, write_npy_header
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
from plsc.index.codes import RowCodes, encode_into, stride_of
from plsc.index.rows import Int64
from plsc.index.scan import AUTO, ExactScan, best_precision

FORMAT = "plsc gallery base"
VERSION = 1
FILES = ("vectors.npy", "faces.npy", "persons.npy")
CODE_FILES = ("codes.npy", "code_bounds.npy")


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


def max_count(persons: Int64) -> int:
    """Return how often the most frequent of ``persons`` occurs."""
    return int(np.unique(persons, return_counts=True)[1].max(initial=0))


def segment_folder(collections: Path, number: int, segment: int) -> Path:
    """Return the folder of segment ``segment`` of collection ``number``."""
    return collections / str(number) / f"base-{segment}"


def write_segment(
    collections: Path, former: StoredCollection, watermark: int, rows: int, batches: Iterator[Faces], precision: str
) -> StoredCollection:
    """Publish the segment that follows the current one of ``former``, from ``rows`` faces by ascending id.

    It has codes where searches in ``precision`` scan them. Returns the collection as it is to be stored. Raises OSError
    if the disk is full; nothing is left then.
    """
    segment, dim = former.segment + 1, former.info.dim
    folder = segment_folder(collections, former.number, segment)
    with atomic_private_folder(folder) as tmp_path:  # syncs the files before the rename: a crash leaves all or none
        is_coded = _is_coded(precision, dim)
        _write_columns(tmp_path, rows, dim, batches, is_coded=is_coded)
        content: Manifest = {
            "format": FORMAT,
            "version": VERSION,
            "collection": former.number,
            "base": segment,
            "rows": rows,
            "dim": dim,
            "contract_id": former.info.contract_id,
            "covered": watermark,
            "files": describe_files(tmp_path, [*FILES, *(CODE_FILES if is_coded else ())]),
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
    with ThreadPoolExecutor(len(FILES) + len(CODE_FILES)) as threads:
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
    codes = None  # of segments that another machine wrote, or an earlier version, they are made now, in memory
    if _is_coded(precision, dim) and "codes.npy" in manifest["files"]:
        coded = open_array(folder / "codes.npy", (rows, stride_of(dim)), "uint8")
        codes = RowCodes(coded, open_array(folder / "code_bounds.npy", (3, rows), "float32"))
    scan = ExactScan(vectors, precision=precision, row_codes=codes)
    return SealedSegment(np.array(faces), np.array(persons), vectors, max_count(persons), scan)


def _is_coded(precision: str, dim: int) -> bool:
    return (best_precision(dim) if precision == AUTO else precision) == "int8"


def _open_ids(folder: Path, rows: int) -> tuple[Int64, Int64]:
    return open_array(folder / "faces.npy", (rows,), "int64"), open_array(folder / "persons.npy", (rows,), "int64")


def _write_columns(folder: Path, rows: int, dim: int, batches: Iterator[Faces], *, is_coded: bool) -> None:
    """Write the arrays by write(), where a full disk is an error; through a memory map it would be SIGBUS."""
    bounds = np.empty((3, rows if is_coded else 0), dtype=np.float32)
    with ExitStack() as files:
        vectors = files.enter_context((folder / "vectors.npy").open("wb"))
        write_npy_header(vectors, (rows, dim))
        codes = files.enter_context((folder / "codes.npy").open("wb")) if is_coded else None
        if codes is not None:
            write_npy_header(codes, (rows, stride_of(dim)), "|u1")

        def keep(part: slice, batch: Float32) -> None:
            numbers = np.ascontiguousarray(batch, dtype="<f4")
            vectors.write(numbers.data)
            if codes is not None:
                coded = np.zeros((len(numbers), stride_of(dim)), dtype=np.uint8)
                encode_into(coded, bounds[:, part], 0, numbers)
                codes.write(coded.data)

        faces, persons = _collect(rows, batches, keep)
    save_array(folder / "faces.npy", faces)
    save_array(folder / "persons.npy", persons)
    if is_coded:
        save_array(folder / "code_bounds.npy", bounds)


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
