"""A copy of a gallery in plain files: what stores that live in a database write as their snapshot.

COPY/
  manifest.json              sealed: every collection with its figures, and {file: {"bytes", "sha256"}}
  00000.persons.jsonl        a line {"id", "name", "metadata", "created", "faces": [ids]} for each person, by id
  00000.vectors.npy          (faces, dim) float32 of length 1, in the order of the persons' faces
"""

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import numpy as np

from plsc.embed.columns import open_array
from plsc.errors import ConflictError, DataError, IntegrityError
from plsc.files import (
    Manifest,
    atomic_replace_dir,
    describe_files,
    make_folder,
    read_manifest,
    verify_files,
    write_manifest,
)
from plsc.gallery.storage_errors import storage_errors
from plsc.gallery.store import Collection, Float32, NewPerson, Person, Store

FORMAT = "plsc gallery copy"
VERSION = 1
_TOGETHER = 500  # persons enrolled at once

Rows = Iterable[tuple[Person, Float32]]


def write_copy(target: Path, collections: Sequence[tuple[Collection, Rows]]) -> None:
    """Write ``collections``, each with its persons by id and their vectors (n, dim), into the new folder ``target``.

    :class:`ConflictError` if ``target`` exists; where writing fails, nothing is left of it.
    """
    if target.exists():
        raise ConflictError(f"{target} exists already; name a new folder")
    make_folder(target.parent)
    tmp_path = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    shutil.rmtree(tmp_path, ignore_errors=True)
    try:
        with storage_errors(target):
            tmp_path.mkdir()
            abouts = [_write(tmp_path, place, about, rows) for place, (about, rows) in enumerate(collections)]
            names = sorted(path.name for path in tmp_path.iterdir())
            content: Manifest = {"format": FORMAT, "version": VERSION, "collections": abouts}
            write_manifest(tmp_path, {**content, "files": describe_files(tmp_path, names)})
            atomic_replace_dir(tmp_path, target)
    finally:
        shutil.rmtree(tmp_path, ignore_errors=True)


def read_copy(folder: Path) -> list[tuple[Collection, Iterator[tuple[Person, Float32]]]]:
    """What :func:`write_copy` wrote, every file's hash checked first.

    Raises :class:`DataError` if ``folder`` holds no copy and :class:`IntegrityError` naming what is damaged.
    """
    manifest = read_manifest(folder, FORMAT, VERSION)
    verify_files(folder, manifest["files"])
    abouts = [Collection(**about) for about in manifest["collections"]]
    return [(about, _read(folder, place, about)) for place, about in enumerate(abouts)]


def copy_into(store: Store, folder: Path) -> list[Collection]:
    """Enrol all that a copy holds into ``store``, under new ids and times; returns the collections made.

    Raises what :func:`read_copy` raises, and :class:`ConflictError` if ``store`` has a collection of a name already.
    A collection whose enrolment fails is removed again.
    """
    copied = read_copy(folder)
    taken = {about.name for about in store.collections()} & {about.name for about, _ in copied}
    if taken:
        raise ConflictError(f"the store has a collection {min(taken)} already; copy into another store")
    return [_enrol(store, about, rows) for about, rows in copied]


def _enrol(store: Store, about: Collection, rows: Iterator[tuple[Person, Float32]]) -> Collection:
    store.create_collection(about.name, about.dim, about.contract_id)
    try:
        while part := list(islice(rows, _TOGETHER)):
            new = [NewPerson(vectors, person.name, person.metadata) for person, vectors in part]
            store.add_persons(about.name, new, about.contract_id)
    except BaseException:
        store.delete_collection(about.name)
        raise
    return store.collection(about.name)


def _files(folder: Path, place: int) -> tuple[Path, Path]:
    return folder / f"{place:05}.persons.jsonl", folder / f"{place:05}.vectors.npy"


def _write(folder: Path, place: int, about: Collection, rows: Rows) -> dict[str, object]:
    """Write one collection; the number of faces is known at the end, so the vectors' header is written last."""
    lines, vectors = _files(folder, place)
    persons = faces = 0
    raw = vectors.with_suffix(".raw")
    with lines.open("w", encoding="utf-8") as text, raw.open("wb") as numbers:
        for person, part in rows:
            text.write(json.dumps(asdict(person), allow_nan=False) + "\n")
            numbers.write(np.ascontiguousarray(part, dtype="<f4").tobytes())
            persons, faces = persons + 1, faces + len(part)
    _with_header(raw, vectors, (faces, about.dim))
    return {**asdict(about), "persons": persons, "faces": faces}


def _with_header(raw: Path, path: Path, shape: tuple[int, int]) -> None:
    with raw.open("rb") as source, path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
        shutil.copyfileobj(source, file, 1 << 20)
    raw.unlink()


def _read(folder: Path, place: int, about: Collection) -> Iterator[tuple[Person, Float32]]:
    lines, path = _files(folder, place)
    vectors: Float32 = open_array(path, (about.faces, about.dim), "float32")
    row = 0
    with lines.open(encoding="utf-8") as text:
        for line in text:
            try:
                person = Person(**{**json.loads(line), "faces": tuple(json.loads(line)["faces"])})
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(f"{lines} is not readable: {error}") from None
            yield person, np.array(vectors[row : row + len(person.faces)])
            row += len(person.faces)
    if row != about.faces:
        raise IntegrityError(f"{lines} names {row} faces and {path.name} holds {about.faces}; use another copy")
