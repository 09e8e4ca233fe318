"""Snapshots of encrypted stores: who in them can still be read, and stores restored from them without the others.

A snapshot holds no keys. It is read with the present file of keys of its store, from which those of everybody who was
deleted since have been erased.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

from plsc.errors import IntegrityError, UsageError
from plsc.gallery.sqlite import KEYS, SQLITE, records
from plsc.gallery.sqlite.compaction import erase, tombstones
from plsc.gallery.sqlite.database import check_schema, corrupt_row, translate_errors
from plsc.gallery.sqlite.encryption import decrypted_vectors, living_keys
from plsc.gallery.sqlite.keys import KeyTable, read_key_file
from plsc.gallery.sqlite.schema import read_settings
from plsc.gallery.sqlite.unfinished import mark_written_anew

_FETCH_ROWS = 2048


class ReadablePersons(NamedTuple):
    """Persons of a snapshot as (collection's number, person): those whose vectors can be decrypted, and the others.

    Attributes:
        faces: how many vectors can be decrypted.
    """

    readable: set[tuple[int, int]]
    gone: set[tuple[int, int]]
    faces: int


@contextmanager
def reading_snapshot(snapshot: Path) -> Iterator[sqlite3.Connection]:
    """Open a snapshot's rows for reading alone.

    Raises:
        DataError: they are another program's, or of a later version.
        IntegrityError: they are damaged.
    """
    path = snapshot / SQLITE
    with (
        translate_errors(path),
        closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)) as db,
    ):
        check_schema(db, path)
        yield db


def store_id_of(snapshot: Path) -> str | None:
    """Return the id of the encrypted store that a snapshot was taken of; None: of one that is not encrypted."""
    with reading_snapshot(snapshot) as db:
        return read_settings(db).get("store_id")


def open_keys(snapshot: Path, key_file: Path | None, keys: Path | None) -> KeyTable | None:
    """Open the keys of a snapshot's store for reading; None where it is not encrypted.

    Args:
        snapshot: its folder.
        key_file: with the master key.
        keys: the file of keys; None: of the store that the snapshot lies in.

    Raises:
        UsageError: ``key_file`` is missing, of another store, or not needed; or there is no such file of keys.
    """
    store_id = store_id_of(snapshot)
    if store_id is None:
        if key_file is not None or keys is not None:
            raise UsageError(f"{snapshot} is not encrypted; leave --encrypt and --keys out")
        return None
    if key_file is None:
        raise UsageError(f"{snapshot} is encrypted; name its key file: --encrypt KEYFILE")
    path = snapshot.absolute().parent.parent / KEYS if keys is None else keys
    if not path.is_file():
        raise UsageError(f"there is no file of keys {path}; name the newest copy of its store's: --keys FILE")
    table = KeyTable(path, read_key_file(key_file), writable=False)
    if table.store_id.hex() != store_id:
        table.close()
        raise UsageError(f"{path} is of another store than {snapshot}; name its own: --keys FILE")
    return table


def find_readable(db: sqlite3.Connection, table: KeyTable) -> ReadablePersons:
    """Try to decrypt every vector; raises :class:`IntegrityError` for one that is damaged."""
    readable, everyone, count = set[tuple[int, int]](), set[tuple[int, int]](), 0
    cursor = db.execute(
        "SELECT f.collection, f.person, f.id, v.vector FROM faces f JOIN vectors v ON v.face = f.id ORDER BY f.id"
    )
    while rows := cursor.fetchmany(_FETCH_ROWS):
        texts = decrypted_vectors(table, [row[2] for row in rows], [row[3] for row in rows])
        for (number, person, face, _), (_, text) in zip(rows, texts, strict=True):
            if not (isinstance(number, int) and isinstance(person, int)):
                raise corrupt_row(db, f"face {face} is not what was written")
            everyone.add((number, person))
            if text is not None:
                readable.add((number, person))
                count += 1
    return ReadablePersons(readable, everyone - readable, count)


def check_readers(snapshot: Path, key_file: Path | None, keys: Path | None) -> dict[str, int]:
    """Return how many persons and faces of a snapshot can be read, after trying each, and how many are gone for good.

    Raises:
        UsageError, IntegrityError: see :func:`open_keys` and :func:`find_readable`.
    """
    table = open_keys(snapshot, key_file, keys)
    assert table is not None, "what is not encrypted was refused"
    with closing(table), reading_snapshot(snapshot) as db:
        found = find_readable(db, table)
    return {"readable": len(found.readable), "readable_faces": found.faces, "gone": len(found.gone)}


def leave_out(db: sqlite3.Connection, table: KeyTable) -> int:
    """Delete the persons who cannot be read from a copy of a snapshot; returns how many."""
    gone = find_readable(db, table).gone
    for number, id in sorted(gone):
        person = records.find_person(db, number, id)
        if person is None:
            raise IntegrityError(f"the snapshot holds a face of person {id}, who is not in it; use another copy")
        records.delete_person(db, number, person)
    for number in {number for number, _ in gone}:
        erase(db, tombstones(db, number))
    if gone:
        db.execute("DELETE FROM idempotency")  # answers that may name them
        mark_written_anew(db)  # by finish_copy
    return len(gone)


def finish_copy(db_path: Path, table: KeyTable, target: Path) -> None:
    """Write the keys that a copy of a snapshot needs, and no others, and rewrite the copy without its free space."""
    with translate_errors(db_path), closing(sqlite3.connect(db_path, isolation_level=None)) as db:
        db.execute("VACUUM")
        table.copy(target, living_keys(db))
