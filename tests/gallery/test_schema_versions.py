"""Stores and snapshots that former versions wrote: they are migrated whole, or not at all.

fixtures/version_1.store.tar.gz and version_1.snapshot.tar.gz were written by the code of version 1: two collections, a
compacted segment, persons and faces added and deleted after it; version_2.store.tar.gz and
version_2_encrypted.store.tar.gz by that of version 2: the same with a snapshot in them, one of whose three persons was
deleted since, and a key file that holds 32 letters A. version_3.store.tar.gz: two persons, one collection that is being
moved to another model, and a snapshot. version_4.store: three persons, of whom one was deleted at DELETED and is not
erased, and a snapshot of all three.
"""

import sqlite3
import subprocess
import sys
import tarfile
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from plsc.errors import DataError, IntegrityError
from plsc.gallery.filters import Filter
from plsc.gallery.sqlite import unfinished
from plsc.gallery.sqlite.backup import IDS_SKIPPED, restore
from plsc.gallery.sqlite.database import Database
from plsc.gallery.sqlite.schema import VERSION
from plsc.gallery.sqlite.store import SqliteStore
from plsc.gallery.values import NewPerson
from plsc.tools.entry import main

FIXTURES = Path(__file__).parent / "fixtures"
NAMES = ["Ada", None, "Grace 李", "Late"]
FACES = 7
DELETED = datetime(2026, 11, 20, 3, 4, 5, 1, UTC)


def unpacked(name: str, folder: Path) -> Path:
    with tarfile.open(FIXTURES / f"{name}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder / name


@pytest.fixture
def former(tmp_path: Path) -> Path:
    return unpacked("version_1.store", tmp_path)


def version_of(store: Path) -> int:
    with closing(sqlite3.connect(store / "gallery.sqlite")) as connection:
        return int(connection.execute("PRAGMA user_version").fetchone()[0])


def test_a_former_store_opens_and_works(former: Path) -> None:
    store = SqliteStore(former)
    figures = store.check()
    assert (figures["version"], figures["migrated_from"]) == (VERSION, 1)
    people = store.persons("people")
    assert [person.name for person in people] == NAMES
    assert {(person.external_id, person.revision, person.expires) for person in people} == {(None, 1, None)}
    assert store.collection("people").faces == sum(len(person.faces) for person in people) == FACES
    for person in people:
        for face, vector in zip(person.faces, store.vectors("people", person.id), strict=True):
            (best,) = store.search("people", vector[None], k=1)[0]
            assert (best.person, best.face) == (person.id, face)
    assert [one.name for one in store.persons("people", filter=Filter.parse({"age": {"gte": 36}}))] == ["Ada"]
    (new,) = store.add_persons("people", [NewPerson(np.eye(8)[:1], "New")], "model-1")
    assert new.id > people[-1].id
    store.close()
    again = SqliteStore(former)
    assert "migrated_from" not in again.check()
    assert [person.name for person in again.persons("people")] == [*NAMES, "New"]
    again.compact()
    assert again.check()["tombstones"] == 0
    again.close()


def test_a_former_snapshot_is_restored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    snapshot = unpacked("version_1.snapshot", tmp_path)
    assert main(["gallery", "check", str(snapshot)]) == 0
    assert "a sound snapshot; version 1, which plsc migrates" in capsys.readouterr().out
    restore(snapshot, tmp_path / "new")
    assert version_of(tmp_path / "new") == 1
    assert main(["gallery", "check", str(tmp_path / "new")]) == 0
    assert f"version {VERSION}, migrated from 1, 2 collections, 5 persons" in capsys.readouterr().out
    store = SqliteStore(tmp_path / "new")
    assert [person.name for person in store.persons("people")] == NAMES
    (new,) = store.add_persons("people", [NewPerson(np.eye(8)[:1])], "model-1")
    assert new.id > IDS_SKIPPED
    store.close()


@pytest.mark.parametrize("name", ["version_2.store", "version_2_encrypted.store"])
def test_stores_and_snapshots_of_version_2(name: str, tmp_path: Path) -> None:
    folder, key_file = unpacked(name, tmp_path), None
    if "encrypted" in name:
        key_file = tmp_path / "gallery.key"
        key_file.write_text("QUFB" * 10 + "QUE=\n")
        key_file.chmod(0o600)
    store = SqliteStore(folder, key_file=key_file)
    assert (store.check()["version"], store.check()["migrated_from"]) == (VERSION, 2)
    assert [person.external_id for person in store.persons("people")] == ["ada", "late"]
    for person in store.persons("people"):
        for face, vector in zip(person.faces, store.vectors("people", person.id), strict=True):
            assert store.search("people", vector[None], k=1)[0][0][:2] == (person.id, face)
    store.begin_migration("people", 4, "model-2")
    store.close()
    restore(folder / "snapshots" / "one", tmp_path / "new", key_file=key_file)
    store = SqliteStore(tmp_path / "new", key_file=key_file)
    others = [] if key_file else ["Grace 李"]  # whose key is gone
    assert [person.name for person in store.persons("people")] == ["Ada", *others, "Late"]
    assert store.check()["version"] == VERSION
    store.close()


def test_faces_of_version_3_get_keys(tmp_path: Path) -> None:
    folder = unpacked("version_3.store", tmp_path)
    restore(folder / "snapshots" / "one", tmp_path / "new")
    for place in (folder, tmp_path / "new"):
        store = SqliteStore(place)
        assert (store.check()["version"], store.check()["migrated_from"]) == (VERSION, 3)
        ada = store.find_person("people", "ada")
        assert (len(ada.faces), ada.keys) == (3, {})
        added = store.add_faces("people", ada.id, np.eye(8)[[1, 6, 4]], "model-1", keys=["b", "new", "e"])
        assert (added[0], added[2]) == (ada.faces[1], ada.faces[2])
        assert added[1] not in ada.faces
        assert store.find_person("people", "ada").keys == dict(zip(added, ["b", "new", "e"], strict=True))
        assert store.check()["faces"] == 6
        store.close()


def test_what_version_4_left_unfinished_keeps_its_time(tmp_path: Path) -> None:
    folder = unpacked("version_4.store", tmp_path)
    database = Database(folder / "gallery.sqlite")
    assert database.migrated_from == 4
    with database.reading() as db:
        assert (unfinished.deletions_since(db), unfinished.rewrite_since(db)) == (DELETED, DELETED)
        rows = db.execute("SELECT work, since IS NULL FROM unfinished ORDER BY work").fetchall()
        assert rows == [("erase", 0), ("rewrite", 0), ("written anew", 1)]
    database.close()
    store = SqliteStore(folder)
    assert [person.name for person in store.persons("people")] == ["Ada", "Late"]
    store.compact()
    with store._database.reading() as db:
        assert (unfinished.deletions_since(db), unfinished.rewrite_since(db)) == (None, None)
    assert (store.check()["tombstones"], store.check()["deleted_in_snapshots"]) == (0, 2)
    store.close()
    restore(folder / "snapshots" / "one", tmp_path / "new")
    store = SqliteStore(tmp_path / "new")
    assert (store.check()["migrated_from"], store.check()["persons"]) == (4, 3)
    store.close()


def test_a_former_store_that_was_tampered_with_is_not_migrated(former: Path) -> None:
    with closing(sqlite3.connect(former / "gallery.sqlite")) as connection:
        connection.execute("ALTER TABLE persons ADD COLUMN external_id TEXT")
        connection.commit()
    with pytest.raises(IntegrityError, match="its schema is not what was written"):
        SqliteStore(former)
    assert version_of(former) == 1


def test_what_a_later_plsc_wrote_is_refused_with_a_line(former: Path) -> None:
    SqliteStore(former).close()
    with closing(sqlite3.connect(former / "gallery.sqlite")) as connection:
        connection.execute("INSERT INTO settings VALUES ('compression', 'zstd')")
        connection.commit()
    with pytest.raises(DataError, match=r"has the setting compression, which this plsc does not know: update plsc$"):
        SqliteStore(former)
    with closing(sqlite3.connect(former / "gallery.sqlite")) as connection:
        connection.execute(f"PRAGMA user_version = {VERSION + 1}")
    with pytest.raises(
        DataError, match=rf"of version {VERSION + 1}; this plsc reads up to version {VERSION}: update it$"
    ):
        SqliteStore(former)


# Opens copies of a store in children that are killed before their first, second ... statement of the migration.
KILLS = """
import os, shutil, signal, sqlite3, sys
from pathlib import Path
from plsc.gallery.sqlite import database, schema

class Killed:
    def __init__(self, connection, after):
        self.connection, self.left = connection, after

    def __getattr__(self, name):
        return getattr(self.connection, name)

    def execute(self, text):
        if not self.left:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1
        return self.connection.execute(text)

migrate = schema.migrate
for count in range(99):
    copy = Path(sys.argv[2]) / str(count)
    shutil.copytree(sys.argv[1], copy)
    child = os.fork()
    if not child:
        database.migrate = lambda connection, version: migrate(Killed(connection, count), version)
        database.Database(copy / "gallery.sqlite")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    connection = sqlite3.connect(copy / "gallery.sqlite")
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    assert sorted(schema.statements(connection)) == sorted(schema.SCHEMAS[version]), count
    connection.close()
    database.Database(copy / "gallery.sqlite").close()
    print(version)
    if version == schema.VERSION:
        break
"""


@pytest.mark.live
def test_a_kill_leaves_one_version_or_the_other(former: Path, tmp_path: Path) -> None:
    (tmp_path / "copies").mkdir()
    command = [sys.executable, "-c", KILLS, str(former), str(tmp_path / "copies")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    versions = done.stdout.split()
    assert len(versions) > 8
    assert versions == ["1"] * (len(versions) - 1) + [str(VERSION)]
    store = SqliteStore(tmp_path / "copies" / "3")
    assert [person.name for person in store.persons("people")] == NAMES
    assert store.check()["version"] == VERSION
    store.close()
