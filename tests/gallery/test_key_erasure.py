"""What is left of a person's key when the power fails, or the process is killed, behind the answer to a deletion."""

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from support.encrypted_store import (
    GALLERY,
    HEADER,
    MODEL,
    SLOT,
    Opened,
    Sealed,
    delete_all_faces,
    delete_person,
    enrol,
    faces,
    slot_content,
    slot_of,
)
from support.waiting import wait_until

from plsc.errors import StorageError
from plsc.gallery.sqlite.backup import check_readers
from plsc.gallery.sqlite.encryption import EncryptedVectors
from plsc.gallery.sqlite.keys import KeyTable
from plsc.gallery.sqlite.store import SqliteStore
from plsc.gallery.values import Person


class Disk:
    """What a power failure leaves of the file of keys: its content at the last sync."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._path, self.content, self.syncs = folder / "keys", (folder / "keys").read_bytes(), 0
        self._sync = os.fdatasync
        monkeypatch.setattr("plsc.gallery.sqlite.keys.os.fdatasync", self._synced)

    def _synced(self, file: int) -> None:
        content = self._path.read_bytes()
        self._sync(file)
        self.content, self.syncs = content, self.syncs + 1

    def lose_power(self, store: SqliteStore, target: Path) -> Path:
        """Copy the store as the disk has it now, and end the process that has it."""
        with store._maintenance.lock:  # its log would go into the database between the copies of the two
            shutil.copytree(store.folder, target)
        (target / "keys").write_bytes(self.content)
        store.close()
        return target


def delete_collection(store: SqliteStore, person: Person) -> None:
    store.delete_collection(GALLERY)


@pytest.mark.parametrize("forget", [delete_person, delete_all_faces, delete_collection])
def test_a_power_failure_behind_the_answer_brings_no_key_back(
    sealed: Sealed,
    key_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    forget: Callable[[SqliteStore, Person], None],
) -> None:
    folder, made = sealed
    store, disk = SqliteStore(folder, key_file=key_file), Disk(folder, monkeypatch)
    forget(store, made[4])
    lost = disk.lose_power(store, tmp_path / "lost")
    gone = 10 if forget is delete_collection else 1
    assert check_readers(folder / "snapshots" / "one", key_file, lost / "keys")["gone"] == gone
    store = SqliteStore(lost, key_file=key_file)
    store.check()
    store.close()


def test_a_power_failure_behind_a_compaction_brings_no_key_back(
    sealed: Sealed, key_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, made = sealed
    store, disk = SqliteStore(folder, key_file=key_file), Disk(folder, monkeypatch)
    with monkeypatch.context() as patch:  # killed before the answer
        patch.setattr(EncryptedVectors, "sync_erased", fail_to_sync)
        with pytest.raises(KeyboardInterrupt):
            store.delete_person(GALLERY, made[9].id)
    assert not disk.syncs
    store.compact()
    lost = disk.lose_power(store, tmp_path / "lost")
    store = SqliteStore(lost, key_file=key_file)
    assert check_readers(folder / "snapshots" / "one", key_file, lost / "keys")["gone"] == 1
    enrol(store, 1, seed=2)
    assert check_readers(folder / "snapshots" / "one", key_file, lost / "keys")["gone"] == 1, "nobody gets the key"
    store.close()


def fail_to_sync(_: EncryptedVectors) -> None:
    raise KeyboardInterrupt


def test_a_key_whose_erasure_is_not_synced_is_erased_again(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    store, made = opened
    disk = Disk(store.folder, monkeypatch)

    def fail(file: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("plsc.gallery.sqlite.keys.os.fdatasync", fail)
        with pytest.raises(StorageError, match=r"keys cannot be written: 1 keys? of deleted people"):
            store.delete_person(GALLERY, made[0].id)
        with pytest.raises(StorageError, match="keys cannot be written"):
            store.compact()
    before = bytearray((store.folder / "keys").read_bytes())
    start = HEADER + SLOT * slot_of(store.folder, made[0].faces[0])
    before[start : start + SLOT] = disk.content[start : start + SLOT]  # as a kernel does that gave the page up
    with (store.folder / "keys").open("r+b") as file:
        file.write(before)
    store.add_faces(GALLERY, made[1].id, faces(1), MODEL)
    assert disk.content[start : start + SLOT] == bytes(SLOT)


@pytest.mark.live
def test_deletions_at_the_same_time_share_a_sync(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    store, made = opened
    codec = store._database.codec
    assert isinstance(codec, EncryptedVectors)
    disk = Disk(store.folder, monkeypatch)
    threads = [threading.Thread(target=store.delete_person, args=(GALLERY, one.id)) for one in made[:8]]
    with codec._syncing:  # a sync that takes long: all are committed meanwhile, and none is answered
        for thread in threads:
            thread.start()
        wait_until(lambda: not any(slot_content(store.folder, n) != bytes(SLOT) for n in range(8)))
        assert all(thread.is_alive() for thread in threads)
    for thread in threads:
        thread.join()
    assert disk.syncs == 1
    assert store.check()["persons"] == 2


def test_a_key_that_another_thread_erases_is_no_failure(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    store, made = opened
    failures: list[StorageError] = []

    def delete(person: Person) -> None:
        try:
            store.delete_person(GALLERY, person.id)
        except StorageError as error:
            failures.append(error)

    threads = [threading.Thread(target=delete, args=(one,)) for one in made[:2]]
    erases, begun = threading.Event(), threading.Event()
    erase, sync = KeyTable.erase, KeyTable.sync

    def slow_erase(table: KeyTable, slots: Iterable[int]) -> None:
        if begun.is_set():  # of the second deletion: the first is answered meanwhile, as far as it does not wait
            erases.set()
            threads[0].join(0.5)
        erase(table, slots)

    def slow_sync(table: KeyTable) -> None:
        if not begun.is_set():
            begun.set()
            erases.wait(120)
        sync(table)

    monkeypatch.setattr(KeyTable, "erase", slow_erase)
    monkeypatch.setattr(KeyTable, "sync", slow_sync)
    threads[0].start()
    assert begun.wait(120)
    threads[1].start()
    for thread in threads:
        thread.join()
    assert not failures
