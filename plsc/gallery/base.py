"""The base of a collection: most of its faces as files made for scanning, never changed once published.

STORE/collections/<collection's number>/base-<n>/
  manifest.json    sealed: the collection, n, rows, dim, covered, and {file: {"bytes", "sha256"}}; SQLite holds the
                   seal, so that no other base can stand in this one's place
  vectors.npy      (N, dim) float32 of length 1, by face id
  faces.npy        (N,) int64, ascending
  persons.npy      (N,) int64: whose face it is
"""

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from plsc.embed.columns import open_array, save_array
from plsc.errors import DataError, IntegrityError
from plsc.files import Manifest, atomic_replace_dir, describe_files, digest, read_manifest, verify_files, write_manifest
from plsc.gallery.records import Faces, StoredCollection
from plsc.gallery.store import Float32
from plsc.index.ann import ApproximateSearch
from plsc.index.rows import Int64
from plsc.index.scan import ExactScan

FORMAT = "plsc gallery base"
VERSION = 1
FILES = ("vectors.npy", "faces.npy", "persons.npy")


@dataclass(frozen=True, eq=False)
class Base:
    """Faces (N,) ascending, their persons (N,) and vectors (N, dim), mapped; ``scan`` searches the vectors, and
    ``quick``, where there is one, does so approximately. Nobody has more than ``most_faces`` of the faces."""

    faces: Int64
    persons: Int64
    vectors: Float32
    most_faces: int
    scan: ExactScan
    quick: ApproximateSearch | None = None

    def __len__(self) -> int:
        return len(self.faces)


def base_folder(collections: Path, number: int, base: int) -> Path:
    """Where base ``base`` of collection ``number`` lies."""
    return collections / str(number) / f"base-{base}"


def write_base(folder: Path, about: Manifest, count: int, parts: Iterator[Faces]) -> str:
    """Publish the ``count`` faces of ``parts``, ascending, as ``folder``; returns the manifest's seal.

    ``about`` describes them (:func:`describe`). Raises OSError where the disk is full; nothing is left then.
    """
    tmp_path = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(tmp_path, ignore_errors=True)
    tmp_path.mkdir(parents=True)
    try:
        _write_columns(tmp_path, count, about["dim"], parts)
        content = {**about, "files": describe_files(tmp_path, list(FILES))}
        write_manifest(tmp_path, content)
        atomic_replace_dir(tmp_path, folder)
    finally:
        shutil.rmtree(tmp_path, ignore_errors=True)
    return digest(content)


def describe(collection: StoredCollection, base: int, covered: int, rows: int) -> Manifest:
    """A manifest of a base, without its files."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "collection": collection.number,
        "base": base,
        "rows": rows,
        "dim": collection.about.dim,
        "contract_id": collection.about.contract_id,
        "covered": covered,
    }


def open_base(folder: Path, collection: StoredCollection, precision: str, *, verify: bool = True) -> Base:
    """Open the base that ``collection`` points to; its files are hashed while the vectors are taken in.

    :class:`IntegrityError` names what is damaged.
    """
    manifest = verified_manifest(folder, collection)
    with ThreadPoolExecutor(len(FILES)) as threads:
        described = manifest["files"] if verify else {}
        checks = [threads.submit(verify_files, folder, {name: about}) for name, about in described.items()]
        try:
            return _opened(folder, manifest, precision)
        except DataError as error:
            raise IntegrityError(f"{folder}: {error}") from None
        finally:
            for check in checks:
                check.result()


def verify_base(folder: Path, collection: StoredCollection) -> tuple[Int64, Int64]:
    """Hash every file; returns faces (N,) and persons (N,). :class:`IntegrityError` names what is damaged."""
    manifest = verified_manifest(folder, collection)
    verify_files(folder, manifest["files"])
    faces, persons = _numbers(folder, manifest["rows"])
    return faces, persons


def verified_manifest(folder: Path, collection: StoredCollection) -> dict[str, Any]:
    """The manifest, if it is the one whose seal SQLite holds; else :class:`IntegrityError`."""
    try:
        manifest = read_manifest(folder, FORMAT, VERSION)
    except DataError as error:
        raise IntegrityError(str(error)) from None
    except OSError as error:
        raise IntegrityError(f"{folder} cannot be read: {error.strerror}") from None
    if digest(manifest) != collection.seal or manifest["covered"] != collection.covered:
        raise IntegrityError(f"{folder} is another base than the one that was published under its name")
    return manifest


def _opened(folder: Path, manifest: Manifest, precision: str) -> Base:
    rows, dim = manifest["rows"], manifest["dim"]
    vectors = open_array(folder / "vectors.npy", (rows, dim), "float32")
    faces, persons = _numbers(folder, rows)
    scan = ExactScan(vectors, precision=precision)
    return Base(np.array(faces), np.array(persons), vectors, most_of_one(persons), scan)


def most_of_one(persons: Int64) -> int:
    """How often the most frequent of ``persons`` occurs."""
    return int(np.unique(persons, return_counts=True)[1].max(initial=0))


def _numbers(folder: Path, rows: int) -> tuple[Int64, Int64]:
    return open_array(folder / "faces.npy", (rows,), "int64"), open_array(folder / "persons.npy", (rows,), "int64")


def _write_columns(tmp_path: Path, count: int, dim: int, parts: Iterator[Faces]) -> None:
    """Written, not mapped: a full disk is then an error, and not the end of the process."""
    faces, persons = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
    row = 0
    with (tmp_path / "vectors.npy").open("wb") as file:
        header = {"descr": "<f4", "fortran_order": False, "shape": (count, dim)}
        np.lib.format.write_array_header_1_0(file, header)
        for part in parts:
            stop = row + len(part.ids)
            faces[row:stop], persons[row:stop] = part.ids, part.persons
            file.write(np.ascontiguousarray(part.vectors, dtype="<f4").data)
            row = stop
    assert row == count, f"{row} faces were read where {count} had been counted"
    save_array(tmp_path / "faces.npy", faces)
    save_array(tmp_path / "persons.npy", persons)
