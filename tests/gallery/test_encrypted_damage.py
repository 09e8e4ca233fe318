"""Encrypted stores and snapshots with anything in their rows: one line that names it, and nothing changed."""

import re
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from support.encrypted_store import Sealed, faces
from support.stores import content_of

from plsc.files import describe_files, read_manifest, write_manifest
from plsc.gallery.sqlite.backup import FORMAT, VERSION
from plsc.gallery.sqlite.store import SqliteStore
from plsc.gallery.values import NewPerson
from plsc.tools.entry import main

OF_SCHEMA = (
    ("DROP TABLE vectors", "its schema is not what was written"),
    ("ALTER TABLE faces RENAME TO others; CREATE VIEW faces AS SELECT * FROM others", "its schema is not"),
    ("PRAGMA user_version = 9", "is a gallery of version 9"),
    ("PRAGMA application_id = 1", "is no gallery"),
)
OF_ROWS = (
    ("UPDATE vectors SET vector = x'000000'", r"vector of face 1 is not what was"),
    ("UPDATE vectors SET vector = 'text of a length' WHERE face = 3", r"vector of face 3 is not what was"),
    ("UPDATE vectors SET vector = 7 WHERE face = 3", r"vector of face 3 is not what was"),
    ("UPDATE vectors SET vector = zeroblob(100) WHERE face = 3", r"vector of face 3 is not what was"),
    (f"UPDATE vectors SET vector = x'{'f' * 200}'", r"face 1 is not what was|keys is too short"),
    (f"UPDATE vectors SET vector = x'{'f' * 14}{'0' * 186}'", r"face 1 is not what was|keys is too short"),
    ("UPDATE vectors SET vector = x'ffff' || zeroblob(98)", r"face 1 is not what was|not decode to UTF-8"),
    ("UPDATE faces SET person = x'00000000' WHERE id = 2", r"face 2 is not what was written"),
    ("UPDATE faces SET person = 1.5 WHERE id = 2", r"face 2 is not what was written"),
)
OF_A_STORE = (
    ("UPDATE persons SET expires = x'ffff' WHERE id = 4", "person 4 is not|a person expires is not what was written"),
    ("UPDATE sqlite_sequence SET seq = x'ffff' WHERE name = 'faces'", "last id of faces is not what was written"),
    ("UPDATE collections SET name = x'ffff'", "collection 1 is not what was written"),
    ("UPDATE collections SET covered = x'ffff'", "collection 1 is not what was written"),
    ("UPDATE collections SET faces = 'many'", "collection 1 is not what was written"),
)
# What the check of a store sees in a snapshot beside it, which it does not decrypt.
SEEN_BESIDE = (OF_SCHEMA[0][0], OF_ROWS[0][0], OF_ROWS[1][0], OF_ROWS[4][0])


def change(path: Path, statements: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.executescript(f"PRAGMA foreign_keys = OFF; {statements}")
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def seal(snapshot: Path) -> None:
    """Give a changed snapshot a manifest that fits, as its maker can."""
    manifest = read_manifest(snapshot, FORMAT, VERSION)
    kept = {name: manifest[name] for name in ("format", "version", "created", "collections")}
    write_manifest(snapshot, {**kept, "files": describe_files(snapshot, ["gallery.sqlite"])})


def verify_refused(folder: Path, message: str, words: list[object], capsys: pytest.CaptureFixture[str]) -> None:
    """The command fails with one line that says ``message``, and leaves ``folder`` as it was."""

    def content() -> dict[str, bytes]:
        own = ("lock", "reserve", "gallery.sqlite-wal", "gallery.sqlite-shm")
        return {name: found for name, found in content_of(folder).items() if name not in own}

    before = content()
    assert main(["gallery", *map(str, words)]) in (1, 2)
    told = capsys.readouterr().err
    assert told.count("\n") == 1, told
    assert re.search(message, told), told
    assert content() == before


@pytest.mark.parametrize(("statements", "message"), [*OF_SCHEMA, *OF_ROWS])
def test_a_crafted_snapshot_is_refused_in_one_line(
    sealed: Sealed,
    key_file: Path,
    tmp_path: Path,
    statements: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, _ = sealed
    snapshot = folder / "snapshots" / "one"
    change(snapshot / "gallery.sqlite", statements)
    seal(snapshot)
    key = ["--encrypt", key_file]
    verify_refused(folder, message, ["check", snapshot, *key], capsys)
    verify_refused(folder, message, ["restore", snapshot, "--store", tmp_path / "new", *key], capsys)
    assert not (tmp_path / "new").exists()
    if statements in SEEN_BESIDE:
        verify_refused(folder, "is not what was", ["check", folder, *key], capsys)


def test_a_snapshot_whose_rows_are_an_empty_file_is_no_gallery(
    sealed: Sealed, key_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = sealed
    snapshot = folder / "snapshots" / "one"
    (snapshot / "gallery.sqlite").write_bytes(b"")
    seal(snapshot)
    for path in (snapshot, folder):
        verify_refused(folder, "is no gallery", ["check", path, "--encrypt", key_file], capsys)


@pytest.mark.parametrize(("statements", "message"), [OF_SCHEMA[0], *OF_ROWS, *OF_A_STORE])
@pytest.mark.parametrize("encrypted", [True, False], ids=["encrypted", "plain"])
def test_rows_of_other_types_are_named(
    sealed: Sealed,
    key_file: Path,
    tmp_path: Path,
    encrypted: bool,
    statements: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, key = sealed[0], ["--encrypt", key_file]
    if not encrypted:
        folder, key = tmp_path / "plain", []
        store = SqliteStore(folder)
        store.create_collection("people", 16, "a model")
        store.add_persons("people", [NewPerson(one[None], "somebody") for one in faces(10)], "a model")
        store.close()
    change(folder / "gallery.sqlite", statements)
    verify_refused(folder, message, ["check", folder, *key], capsys)
    verify_refused(folder, message, ["compact", folder, *key], capsys)
