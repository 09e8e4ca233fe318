"""An encrypted store of a few persons, and its files as they lie on the disk."""

import sqlite3
import zlib
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import numpy.typing as npt

from plsc.gallery.sqlite.store import SqliteStore
from plsc.gallery.values import NewPerson, Person

DIM, MODEL, GALLERY = 16, "a model", "people"
HEADER, SLOT = 4096, 64
Sealed = tuple[Path, list[Person]]  # the folder of a closed store, and who is in it
Opened = tuple[SqliteStore, list[Person]]


def faces(count: int, seed: int = 0) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((count, DIM)).astype(np.float32)


def enrol(store: SqliteStore, count: int, seed: int = 0) -> list[Person]:
    if GALLERY not in {one.name for one in store.collections()}:
        store.create_collection(GALLERY, DIM, MODEL)
    new = [NewPerson(vector[None], f"person-{seed}-{n:03}") for n, vector in enumerate(faces(count, seed))]
    return store.add_persons(GALLERY, new, MODEL)


def delete_person(store: SqliteStore, person: Person) -> None:
    store.delete_person(GALLERY, person.id)


def delete_all_faces(store: SqliteStore, person: Person) -> None:
    for face in person.faces:
        store.delete_face(GALLERY, person.id, face)


def slot_of(folder: Path, face: int) -> int:
    with closing(sqlite3.connect(folder / "gallery.sqlite")) as db:
        (found,) = db.execute("SELECT substr(vector, 1, 8) FROM vectors WHERE face = ?", (face,)).fetchone()
    return int.from_bytes(found, "little")


def slot_content(folder: Path, slot: int) -> bytes:
    return (folder / "keys").read_bytes()[HEADER + SLOT * slot :][:SLOT]


def names_in(store: SqliteStore) -> list[str | None]:
    return [person.name for person in store.persons(GALLERY, limit=1000)]


def exchange_vectors(folder: Path, made: Sequence[Person]) -> None:
    """Give a face another face's vector, with a checksum that fits."""
    with closing(sqlite3.connect(folder / "gallery.sqlite")) as db:
        (stored,) = db.execute("SELECT vector FROM vectors WHERE face = ?", (made[1].faces[0],)).fetchone()
        face = made[2].faces[0]
        checksum = b"\1" + zlib.crc32(stored, zlib.crc32(face.to_bytes(8, "little"))).to_bytes(4, "little")
        db.execute("UPDATE vectors SET vector = ?, checksum = ? WHERE face = ?", (stored, checksum, face))
        db.commit()
