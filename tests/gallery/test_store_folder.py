"""A store's folder on disk: who may open its files, its one owner, and when a deletion has left every file."""

import os
import shutil
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from support.encrypted_store import DIM, GALLERY, MODEL, faces
from support.moved_clock import MovedClock, compact_in_time
from support.stores import files_with

from plsc.errors import ConflictError, DataError, StorageError, UsageError
from plsc.gallery.backends import open_store
from plsc.gallery.sqlite.backup import restore
from plsc.gallery.sqlite.collection_state import CollectionState
from plsc.gallery.sqlite.store import SqliteStore
from plsc.gallery.sqlite.unfinished import deletions_since
from plsc.gallery.thumbnails import ThumbnailStore
from plsc.gallery.transfer import write_copy
from plsc.gallery.values import NewPerson
from plsc.serve.snapshots import Snapshots


def filled(folder: Path, **options: Any) -> SqliteStore:
    store = SqliteStore(folder, **options)
    store.create_collection(GALLERY, DIM, MODEL)
    store.add_persons(GALLERY, [NewPerson(vector[None], "x", {"n": 1}) for vector in faces(20)], MODEL)
    store.compact()
    return store


def open_to_others(folder: Path) -> list[str]:
    return [
        f"{path.relative_to(folder)} {stat.S_IMODE(path.stat().st_mode):o}"
        for path in (folder, *folder.rglob("*"))
        if path.stat().st_mode & 0o077
    ]


@pytest.fixture
def permissive() -> Iterator[None]:
    former = os.umask(0)
    yield
    os.umask(former)


# --- access rights ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("permissive")
@pytest.mark.parametrize("made_before", [False, True], ids=["new folder", "folder made before"])
def test_nobody_but_the_owner_may_open_what_a_store_writes(tmp_path: Path, made_before: bool) -> None:
    folder = tmp_path / "parent" / "store"
    if made_before:
        folder.mkdir(parents=True)
    store = filled(folder)
    thumbnails = ThumbnailStore(store, folder / "thumbnails", keep=True)
    crop = torch.zeros(3, 16, 16, dtype=torch.uint8)
    thumbnails.add_persons(GALLERY, [NewPerson(faces(1))], MODEL, [[crop]])
    Snapshots(store, folder / "snapshots").take()
    store.snapshot(tmp_path / "elsewhere" / "one")
    person = store.persons(GALLERY)[0]
    write_copy(tmp_path / "copy", [(store.collection(GALLERY), [(person, store.vectors(GALLERY, person.id))])])
    assert len(list(folder.rglob("*.jpg"))) == 1
    for written in (folder, tmp_path / "elsewhere", tmp_path / "copy"):
        assert not open_to_others(written)
    store.close()
    restore(tmp_path / "elsewhere" / "one", tmp_path / "restored")
    SqliteStore(tmp_path / "restored").close()
    assert not open_to_others(tmp_path / "restored")


@pytest.mark.usefixtures("permissive")
def test_a_store_that_was_open_to_others_is_closed_to_them_when_it_is_opened(tmp_path: Path) -> None:
    store = filled(tmp_path / "store")
    Snapshots(store, tmp_path / "snapshots").take()
    store.close()
    for path in (tmp_path / "store").rglob("*"):
        path.chmod(0o777 if path.is_dir() else 0o666)
    for path in (tmp_path / "snapshots").rglob("*"):
        path.chmod(0o777 if path.is_dir() else 0o666)
    assert open_to_others(tmp_path / "store")
    store = SqliteStore(tmp_path / "store")
    assert not open_to_others(tmp_path / "store")
    Snapshots(store, tmp_path / "snapshots")
    assert not open_to_others(next(path for path in (tmp_path / "snapshots").iterdir() if path.is_dir()))
    store.close()


@pytest.mark.live
def test_commands_write_for_their_owner_alone(tmp_path: Path) -> None:
    filled(tmp_path / "store").close()
    export = f"gallery export {tmp_path}/store people --out {tmp_path}/people.emb"
    command = f"umask 0; {sys.executable} -m plsc.tools.entry {export}"
    subprocess.run(command, shell=True, check=True, capture_output=True)
    assert not open_to_others(tmp_path / "people.emb")


# --- whose store it is -----------------------------------------------------------------------------------------------


@pytest.mark.live
@pytest.mark.skipif(sys.platform == "win32", reason="Windows locks no folders; there an open file cannot be removed")
def test_removing_the_lock_file_lets_nobody_in(tmp_path: Path) -> None:
    store = filled(tmp_path / "store")
    (tmp_path / "store" / "lock").unlink()
    with pytest.raises(ConflictError, match="in use by"):
        SqliteStore(tmp_path / "store")
    store.close()
    SqliteStore(tmp_path / "store").close()


@pytest.mark.live
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no forks")
def test_a_child_of_a_killed_owner_is_waited_for(tmp_path: Path) -> None:
    """Between its fork and its exec it has its parent's locks."""
    import fcntl

    filled(tmp_path / "store").close()
    owner = subprocess.Popen([sys.executable, "-c", ""])
    owner.wait()
    (tmp_path / "store" / "lock").write_text(f"{owner.pid}\n")
    descriptor = os.open(tmp_path / "store" / "lock", os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    threading.Timer(0.3, os.close, [descriptor]).start()
    SqliteStore(tmp_path / "store").close()


@pytest.mark.live
@pytest.mark.slow
def test_one_process_has_a_store_and_the_other_is_told_which(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "store")
    with pytest.raises(ConflictError, match=f"process {os.getpid()}"):
        SqliteStore(tmp_path / "store")
    code = f"from plsc.gallery.backends import open_store; open_store({str(tmp_path / 'store')!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert f"in use by process {os.getpid()}" in done.stderr
    store.close()
    SqliteStore(tmp_path / "store").close()


def test_other_folders_and_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "photo.jpg").write_bytes(b"x")
    with pytest.raises(UsageError, match="not empty"):
        open_store(tmp_path / "full")
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["photo.jpg"]
    with pytest.raises(UsageError, match="is a file"):
        open_store(tmp_path / "full" / "photo.jpg")
    with pytest.raises(UsageError, match="no store is named"):
        open_store("")
    (tmp_path / "other").mkdir()
    connection = sqlite3.connect(tmp_path / "other" / "gallery.sqlite")
    connection.execute("CREATE TABLE mine (x)")
    connection.close()
    with pytest.raises(DataError, match="no gallery"):
        open_store(tmp_path / "other")


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = filled(tmp_path / "store")
    store.close()
    with pytest.raises(UsageError, match="is closed"):
        store.persons(GALLERY)
    with pytest.raises(UsageError, match="is closed"):
        store.add_persons(GALLERY, [NewPerson(faces(1))], MODEL)


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    filled(tmp_path / "store").close()
    collections = tmp_path / "store" / "collections"
    for left in ("1/.base-2.tmp", "1/base-2", "9/base-1"):
        (collections / left).mkdir(parents=True)
        (collections / left / "vectors.npy").write_bytes(b"half")
    (tmp_path / "store" / "snapshots" / ".one.7.tmp").mkdir(parents=True)
    store = SqliteStore(tmp_path / "store")
    assert sorted(str(path.relative_to(collections)) for path in collections.glob("*/*")) == ["1/base-1"]
    assert not (collections / "9").exists()
    assert not list((tmp_path / "store" / "snapshots").iterdir())
    store.close()


# --- deletions and time ----------------------------------------------------------------------------------------------


@pytest.mark.live
def test_a_deletion_leaves_the_files_by_itself_in_time(tmp_path: Path) -> None:
    store = filled(tmp_path / "store", clock=(clock := MovedClock()))
    person = store.persons(GALLERY)[3]
    vector = store.vectors(GALLERY, person.id)[0].tobytes()
    assert set(files_with(tmp_path / "store", vector)) >= {"gallery.sqlite", "vectors.npy"}
    store.delete_person(GALLERY, person.id)
    compact_in_time(store)
    assert files_with(tmp_path / "store", vector), "it was not due"
    compact_in_time(store, clock)
    assert store.check()["tombstones"] == 0
    assert not files_with(tmp_path / "store", vector)
    newest = store.add_persons(GALLERY, [NewPerson(faces(1, seed=1))], MODEL)[0]  # in no segment yet
    vector = store.vectors(GALLERY, newest.id)[0].tobytes()
    store.delete_person(GALLERY, newest.id)
    compact_in_time(store, clock)
    assert not files_with(tmp_path / "store", vector)
    assert len(store.persons(GALLERY)) == 19
    person, _ = store.put_person(GALLERY, NewPerson(faces(1, seed=1), external_id="E-1"), MODEL)
    vector = store.vectors(GALLERY, person.id)[0].tobytes()
    store.compact()
    assert set(files_with(tmp_path / "store", vector)) >= {"gallery.sqlite", "vectors.npy"}
    store.put_person(GALLERY, NewPerson(faces(1, seed=2), external_id="E-1"), MODEL)
    compact_in_time(store, clock)
    assert not files_with(tmp_path / "store", vector)
    store.close()


@pytest.mark.live
def test_a_log_that_a_long_read_keeps_is_truncated_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, refused = filled(tmp_path / "store", clock=(clock := MovedClock())), []
    truncate = store._database.truncate_log

    def refuse_once() -> None:
        if not refused:
            refused.append(True)
            raise StorageError("a long read keeps the write-ahead log in use")
        truncate()

    monkeypatch.setattr(store._database, "truncate_log", refuse_once)
    person = store.persons(GALLERY)[3]
    vector = store.vectors(GALLERY, person.id)[0].tobytes()
    store.delete_person(GALLERY, person.id)
    with suppress(StorageError):  # or the thread met it
        compact_in_time(store, clock)
    assert refused
    compact_in_time(store)
    assert not files_with(tmp_path / "store", vector)
    store.close()


def test_a_deletion_during_a_compaction_that_fails_is_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(tmp_path / "store")
    person = store.persons(GALLERY)[3]

    def fail(state: CollectionState) -> None:
        store.delete_person(GALLERY, person.id)
        raise StorageError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(store._maintenance._compactor, "compact", fail)
        with pytest.raises(StorageError):
            store.compact()
    assert store._states[GALLERY].is_due(0.0)
    assert store._states[GALLERY].deleted_at is not None
    store.close()


@pytest.mark.live
def test_the_time_counts_from_the_deletion_and_not_from_the_restart(tmp_path: Path) -> None:
    store = filled(tmp_path / "store")
    person = store.persons(GALLERY)[3]
    vector = store.vectors(GALLERY, person.id)[0].tobytes()
    store.delete_person(GALLERY, person.id)
    store.close()
    with sqlite3.connect(tmp_path / "store" / "gallery.sqlite") as db:
        db.execute("UPDATE unfinished SET since = '2026-01-02T03:04:05' WHERE work IN ('erase', 'rewrite')")
    db.close()
    assert files_with(tmp_path / "store", vector)
    store = SqliteStore(tmp_path / "store", clock=(clock := MovedClock()))
    compact_in_time(store)
    assert not files_with(tmp_path / "store", vector)
    clock.advance(3600)
    before = datetime.fromtimestamp(clock.time(), UTC)
    store.delete_person(GALLERY, store.persons(GALLERY)[0].id)
    with store._database.reading() as db:
        since = deletions_since(db)
    assert since is not None
    assert since >= before
    store.close()


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_time_that_is_none_is_refused(tmp_path: Path, seconds: float) -> None:
    with pytest.raises(UsageError, match="give a time above 0"):
        SqliteStore(tmp_path / "store", compact_within=seconds)
    assert not (tmp_path / "store").exists()


# --- snapshots elsewhere ---------------------------------------------------------------------------------------------


def test_snapshots_in_a_folder_of_their_own_are_looked_into(tmp_path: Path) -> None:
    store = filled(tmp_path / "store")
    snapshots = Snapshots(store, tmp_path / "snapshots")
    snapshots.take()
    store.delete_person(GALLERY, store.persons(GALLERY)[0].id)
    assert store.check()["snapshots"] == 0
    found = store.check(tmp_path / "snapshots")
    assert (found["snapshots"], found["deleted_in_snapshots"], found["unfinished_snapshots"]) == (1, 1, 0)
    store.close()


@pytest.mark.live
def test_what_a_killed_service_left_of_a_snapshot_is_removed(tmp_path: Path) -> None:
    store = filled(tmp_path / "store")
    folder = tmp_path / "snapshots"
    taken = Snapshots(store, folder).take()
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    for name in (f"20261121T080000000000Z.{ended.stdout.strip()}.tmp", f"20261121T080000000001Z.{os.getpid()}.tmp"):
        shutil.copytree(folder / taken.id, folder / f".{name}")
    shutil.copytree(folder / taken.id, folder / ".20261121T080000000002Z.deleted")
    shutil.copytree(folder / taken.id, folder / f".20261121T080000000003Z.{os.getppid()}.tmp")  # of a running process
    (folder / ".mine").mkdir()
    assert store.check(folder)["unfinished_snapshots"] == 5
    assert [one.id for one in Snapshots(store, folder).list()] == [taken.id]
    left = sorted(path.name for path in folder.iterdir())
    assert left == [f".20261121T080000000003Z.{os.getppid()}.tmp", ".mine", taken.id]
    store.close()
