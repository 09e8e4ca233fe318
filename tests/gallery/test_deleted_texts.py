"""Names, metadata and external ids of deleted and changed persons leave every file of a store, whatever SQLite copied.

Each text says whose it is and which of that person's: ``text-PERSON-VERSION-``, followed by as many letters as make
rows of many lengths, so that SQLite splits pages and moves rows between them. All files are searched for them.
"""

import random
import re
import shutil
import sqlite3
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.moved_clock import MovedClock, compact_in_time
from support.stores import content_of, faces

from plsc.errors import StorageError
from plsc.gallery.sqlite import database, rewriting
from plsc.gallery.sqlite.store import SqliteStore
from plsc.gallery.values import NewPerson

GALLERY, MODEL = "people", "model-1"
_TEXT = re.compile(rb"text-(\d+)-(\d+)-")
Texts = set[tuple[int, int]]


class People:
    """Persons of a store, with what of their texts may be in its files."""

    def __init__(self, store: SqliteStore, seed: int = 0) -> None:
        self._store, self._chance = store, random.Random(seed)
        self._count = 0
        self.living: dict[int, tuple[int, int]] = {}  # person: the number and the version of its texts
        store.create_collection(GALLERY, 8, MODEL)

    def _texts(self, number: int, version: int) -> dict[str, Any]:
        def text() -> str:
            return f"text-{number}-{version}-" + "x" * int(self._chance.expovariate(1 / 60))

        lengths = [self._chance.randrange(900) for _ in range(self._chance.randrange(1, 4))]
        metadata = {f"key {at}": (text() + "y" * length)[:1024] for at, length in enumerate(lengths)}
        return {"name": text(), "metadata": {**metadata, text(): 1}}

    def enrol(self, count: int) -> None:
        new = []
        for number in range(self._count, self._count + count):
            vectors = faces(1, number)
            new.append(NewPerson(vectors, external_id=f"text-{number}-0-id", **self._texts(number, 0)))
        self._count += count
        for number, person in enumerate(self._store.add_persons(GALLERY, new, MODEL), self._count - count):
            self.living[person.id] = number, 0

    def change(self) -> None:
        person = self._chance.choice(list(self.living))
        number, version = self.living[person]
        self._store.update_person(GALLERY, person, **self._texts(number, version + 1))
        self.living[person] = number, version + 1

    def delete(self) -> None:
        person = self._chance.choice(list(self.living))
        self._store.delete_person(GALLERY, person)
        del self.living[person]

    def live(self, rounds: int) -> None:
        """Enrolments, changes and deletions, mixed."""
        self.enrol(3 * rounds)
        for number in range(rounds):
            for _ in range(2):
                self.delete()
            self.change()
            if number % 8 == 0:
                self.enrol(8)

    @property
    def texts(self) -> Texts:
        ids = {(number, 0) for number, _ in self.living.values()}  # the external id is as old as the person
        return ids | set(self.living.values())


def texts_in(folder: Path) -> Texts:
    """The texts in any file of a folder."""
    texts = _TEXT.findall(b"".join(content_of(folder).values()))
    return {(int(number), int(version)) for number, version in texts}


@pytest.fixture(params=["plain", "encrypted"])
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"key_file": request.getfixturevalue("key_file")} if request.param == "encrypted" else {}


@pytest.mark.live
def test_texts_of_the_deleted_and_changed_leave_all_files_in_time(tmp_path: Path, options: dict[str, Any]) -> None:
    store = SqliteStore(tmp_path / "store", clock=(clock := MovedClock()), **options)
    people = People(store)
    people.live(150)
    compact_in_time(store, clock)
    assert texts_in(store.folder) == people.texts
    people.change()  # which alone is a reason, too
    compact_in_time(store, clock)
    assert texts_in(store.folder) == people.texts
    store.check()
    store.close()
    assert texts_in(store.folder) == people.texts


@pytest.mark.exhaustive
@pytest.mark.slow
def test_thousands_of_changes_leave_no_text_in_store_snapshots_and_thumbnails(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    store = SqliteStore(tmp_path / "store", **options)
    people = People(store, seed=1)
    for _ in range(2):
        people.live(500)
        former = set(people.texts)
        store.snapshot(store.folder / "snapshots" / "one")
        assert texts_in(store.folder / "snapshots") == former  # of its moment, and nothing besides
        people.live(200)
        store.compact()
        assert texts_in(store.folder / "snapshots") == former
        shutil.rmtree(store.folder / "snapshots")
        assert texts_in(store.folder) == people.texts
        store.check()
    store.delete_collection(GALLERY)
    store.compact()
    assert texts_in(store.folder) == set()
    store.close()


# --- while the file is written anew ---


@pytest.mark.first_ring("encrypted")
def test_killed_at_any_moment_of_the_rewriting_the_store_is_whole(
    tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SqliteStore(tmp_path / "store", **options)
    people = People(store)
    people.live(20)
    moments: list[Path] = []

    def keep() -> None:
        """As a kill would leave the files; the lock goes with the process."""
        moments.append(tmp_path / f"killed {len(moments)}")
        shutil.copytree(store.folder, moments[-1])

    def at(where: Any, name: str) -> None:
        original = getattr(where, name)

        def run(*args: Any) -> Any:
            keep()
            result = original(*args)
            keep()
            return result

        monkeypatch.setattr(where, name, run)

    at(rewriting, "sync")
    at(rewriting._Changes, "_copy_rows")
    at(database.Database, "_close_connections")
    at(database, "sync")
    at(database, "_connect")
    store.compact()
    monkeypatch.undo()
    keep()
    store.close()
    assert len(moments) > 10
    for folder in moments:
        found = SqliteStore(folder, **options)
        assert {person.id for person in found.persons(GALLERY, limit=1000)} == set(people.living)
        found.check()
        found.compact()
        assert texts_in(folder) == people.texts
        found.close()


def test_changes_while_the_file_is_written_anew_are_kept_and_leave_it_the_next_time(
    tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SqliteStore(tmp_path / "store", **options)
    people = People(store)
    people.live(20)
    copy = rewriting._Changes.copy

    def live_first(changes: Any, path: Path) -> None:
        people.live(20)
        copy(changes, path)

    monkeypatch.setattr(rewriting._Changes, "copy", live_first)
    store.compact()
    monkeypatch.undo()
    assert {person.id for person in store.persons(GALLERY, limit=1000)} == set(people.living)
    store.check()
    store.compact()
    assert texts_in(store.folder) == people.texts
    store.close()
    store = SqliteStore(store.folder, **options)
    assert {person.id for person in store.persons(GALLERY, limit=1000)} == set(people.living)
    store.close()


@pytest.mark.exhaustive
def test_a_long_read_puts_the_exchange_off_and_others_do_not_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rewriting, "_ATTEMPTS", 2)
    monkeypatch.setattr(rewriting, "_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(database, "_BUSY_TIMEOUT_SECONDS", 5.0)  # for which a program that has the file is waited for
    store = SqliteStore(tmp_path / "store")
    people = People(store)
    people.live(10)
    is_reading, end = threading.Event(), threading.Event()

    def read() -> None:
        with store._database.snapshot() as db:
            assert db.execute("SELECT count(*) FROM persons").fetchone()[0]
            is_reading.set()
            end.wait(60)

    reader = threading.Thread(target=read)
    reader.start()
    is_reading.wait(60)
    with pytest.raises(StorageError, match="long read"):
        store.compact()
    people.change()
    assert len(store.persons(GALLERY, limit=1000)) == len(people.living)
    end.set()
    reader.join()
    with closing(sqlite3.connect(store.folder / "gallery.sqlite")) as other:
        other.execute("SELECT count(*) FROM persons").fetchone()
        with pytest.raises(StorageError, match="another program has"):
            store.compact()
        people.change()
    store.compact()
    assert texts_in(store.folder) == people.texts
    store.check()
    store.close()


def test_a_disk_that_is_full_at_the_exchange_closes_no_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SqliteStore(tmp_path / "store")
    store.create_collection("people", 8, "m")
    gone, kept = store.add_persons("people", [NewPerson(faces(1)), NewPerson(faces(1, 1))], "m")
    store.delete_person("people", gone.id)
    connect, is_full = database._connect, True

    def full(path: Path) -> database.StoreConnection:
        # Readers connect at other moments; the exchange has closed all connections.
        if is_full and not rewriting.new_path(path).exists():
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error
        return connect(path)

    monkeypatch.setattr(database, "_connect", full)
    store.compact()
    for _ in range(2):
        with pytest.raises(StorageError, match="disk is full; nothing was changed: make room"):
            store.add_persons("people", [NewPerson(faces(1, 2))], "m")
    is_full = False
    (late,) = store.add_persons("people", [NewPerson(faces(1, 2))], "m")
    assert [person.id for person in store.persons("people")] == [kept.id, late.id]
    store.close()
