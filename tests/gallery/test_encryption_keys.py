"""The file of keys of an encrypted store: damage, rotation, and snapshots that are read with it."""

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from support.encrypted_store import (
    GALLERY,
    HEADER,
    MODEL,
    SLOT,
    Opened,
    Sealed,
    enrol,
    exchange_vectors,
    faces,
    slot_of,
)
from support.stores import flip, new_key_file

from plsc.errors import DataError, IntegrityError, PlscError, StorageError, UsageError
from plsc.gallery.sqlite import keys
from plsc.gallery.sqlite.backup import check_readers, restore
from plsc.gallery.sqlite.folder import rotate_key
from plsc.gallery.sqlite.store import SqliteStore
from plsc.gallery.values import NewPerson, Person

# --- damage ----------------------------------------------------------------------------------------------------------


def erase_slot(folder: Path, slot: int) -> None:
    with (folder / "keys").open("r+b") as file:
        file.seek(HEADER + SLOT * slot)
        file.write(bytes(SLOT))


DAMAGE: dict[str, Callable[[Path, Sequence[Person]], object]] = {
    "keys is too short: it ends before key": lambda folder, _: os.truncate(folder / "keys", HEADER + 5 * SLOT + 7),
    r"keys is corrupt: key \d+ is not what was written": lambda folder, made: flip(
        folder / "keys", HEADER + SLOT * slot_of(folder, made[4].faces[0]) + 20
    ),
    "keys is corrupt: its header is not what was written": lambda folder, _: flip(folder / "keys", 20),
    "keys is missing: without it nobody in this store can be read": lambda folder, _: (folder / "keys").unlink(),
    r"is older than the file of keys, from which key \d+ was erased since": lambda folder, made: erase_slot(
        folder, slot_of(folder, made[4].faces[0])
    ),
    r"the vector of face \d+ is not what was encrypted": exchange_vectors,
}


@pytest.mark.parametrize("message", DAMAGE)
def test_damage_is_named(sealed: Sealed, key_file: Path, message: str) -> None:
    folder, made = sealed
    DAMAGE[message](folder, made)
    with pytest.raises(IntegrityError, match=message) as caught:
        SqliteStore(folder, key_file=key_file)
    assert "\n" not in str(caught.value)


def test_the_keys_of_another_store_are_refused(sealed: Sealed, key_file: Path, tmp_path: Path) -> None:
    folder, _ = sealed
    other = SqliteStore(tmp_path / "other", key_file=key_file)
    enrol(other, 3)
    other.close()
    shutil.copy(tmp_path / "other" / "keys", folder / "keys")
    with pytest.raises(UsageError, match="is of another store than"):
        SqliteStore(folder, key_file=key_file)
    with pytest.raises(UsageError, match="is of another store than"):
        check_readers(folder / "snapshots" / "one", key_file, tmp_path / "other" / "keys")
    (folder / "keys").write_bytes(b"something else")
    with pytest.raises(DataError, match="is no file of keys"):
        SqliteStore(folder, key_file=key_file)


def test_a_block_of_keys_torn_by_a_crash_costs_nobody(sealed: Sealed, key_file: Path) -> None:
    folder, _ = sealed
    with (folder / "keys").open("ab") as file:
        file.write(os.urandom(SLOT) + bytes(SLOT) + os.urandom(SLOT // 2))
    store = SqliteStore(folder, key_file=key_file)
    enrol(store, 1200, seed=2)
    store.check()
    store.close()
    store = SqliteStore(folder, key_file=key_file)
    assert store.check()["faces"] == 1210
    store.close()


def test_a_full_disk_while_a_block_of_keys_is_made_changes_nothing(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, _ = opened
    size = (store.folder / "keys").stat().st_size
    write = os.pwrite

    def half(file: int, content: bytes, offset: int) -> int:
        if len(content) > 1 << 15:
            return write(file, content[: 1 << 15], offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("plsc.gallery.sqlite.keys.os.pwrite", half)
        with pytest.raises(StorageError, match="No space"):
            enrol(store, 2000, seed=2)
    assert (store.folder / "keys").stat().st_size == size
    assert store.check()["faces"] == 10
    enrol(store, 2000, seed=2)
    assert store.check()["faces"] == 2010


def test_a_refused_enrolment_leaves_its_keys_to_the_next(opened: Opened) -> None:
    store, _ = opened
    store.add_persons(GALLERY, [NewPerson(faces(1), "x", {}, "E-1")], MODEL)
    size = (store.folder / "keys").stat().st_size
    for _ in range(3):
        with pytest.raises(PlscError, match="E-1"):
            store.add_persons(
                GALLERY, [*(NewPerson(one[None]) for one in faces(900)), NewPerson(faces(1), "y", {}, "E-1")], MODEL
            )
    enrol(store, 900, seed=3)
    assert (store.folder / "keys").stat().st_size == size
    store.check()


# --- rotation --------------------------------------------------------------------------------------------------------


def test_rotation_changes_the_key_file_and_nothing_else(sealed: Sealed, key_file: Path, tmp_path: Path) -> None:
    folder, made = sealed
    store = SqliteStore(folder, key_file=key_file)
    store.delete_person(GALLERY, made[0].id)
    store.close()
    rows = (folder / "gallery.sqlite").read_bytes()
    new = new_key_file(tmp_path / "new.key")
    assert rotate_key(folder, key_file, new) == 1023
    assert (folder / "gallery.sqlite").read_bytes() == rows
    with pytest.raises(UsageError, match="another key"):
        SqliteStore(folder, key_file=key_file)
    with pytest.raises(UsageError, match="another key"):
        rotate_key(folder, key_file, new)
    store = SqliteStore(folder, key_file=new)
    assert [answer[0].score > 0.999 for answer in store.search(GALLERY, faces(10), k=1)] == [False] + [True] * 9
    with pytest.raises(UsageError, match="in use by process"):
        rotate_key(folder, new, key_file)
    store.close()
    assert check_readers(folder / "snapshots" / "one", new, None)["gone"] == 1


KILLED = """
import os, sys
from pathlib import Path
from plsc.gallery.sqlite import keys
from plsc.gallery.sqlite.folder import rotate_key
kill = lambda *_: os._exit(9)
if sys.argv[4] == "before":
    Path.replace = kill
else:
    keys.sync = kill
rotate_key(*map(Path, sys.argv[1:4]))
"""


@pytest.mark.live
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_rotation_killed_halfway_leaves_a_store_that_opens(
    sealed: Sealed, key_file: Path, tmp_path: Path, moment: str
) -> None:
    folder, _ = sealed
    new = new_key_file(tmp_path / "new.key")
    done = subprocess.run([sys.executable, "-c", KILLED, folder, key_file, new, moment])
    assert done.returncode == 9
    opening, other = (key_file, new) if moment == "before" else (new, key_file)
    with pytest.raises(UsageError, match="another key"):
        SqliteStore(folder, key_file=other)
    store = SqliteStore(folder, key_file=opening)
    assert store.check()["faces"] == 10
    store.close()
    assert not list(folder.glob(".keys*")), "it may hold keys that are erased later"


def test_a_rotation_that_cannot_overwrite_the_former_keys_says_so(
    sealed: Sealed, key_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = sealed
    new = new_key_file(tmp_path / "new.key")
    written: list[int] = []
    write = keys._write_all

    def failing(file: int, content: bytes, offset: int) -> None:
        written.append(len(content))
        if len(written) == 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        write(file, content, offset)

    monkeypatch.setattr(keys, "_write_all", failing)
    with pytest.raises(StorageError, match=r"is under the new key file now, but .* destroy the former key file"):
        rotate_key(folder, key_file, new)
    store = SqliteStore(folder, key_file=new)
    assert store.check()["faces"] == 10
    store.close()


# --- restoring -------------------------------------------------------------------------------------------------------


def test_a_snapshot_is_read_with_its_own_key_file_and_keys_alone(
    sealed: Sealed, key_file: Path, tmp_path: Path
) -> None:
    folder, _ = sealed
    moved = shutil.copytree(folder / "snapshots" / "one", tmp_path / "moved")
    with pytest.raises(UsageError, match="is encrypted; name its key file"):
        restore(moved, tmp_path / "new")
    with pytest.raises(UsageError, match="there is no file of keys"):
        restore(moved, tmp_path / "new", key_file=key_file)
    with pytest.raises(UsageError, match="another key"):
        restore(moved, tmp_path / "new", key_file=new_key_file(tmp_path / "o"), keys=folder / "keys")
    assert not (tmp_path / "new").exists()
    assert restore(moved, tmp_path / "new", key_file=key_file, keys=folder / "keys")["left_out"] == 0
    store = SqliteStore(tmp_path / "new", key_file=key_file)
    former = (folder / "keys").read_bytes()
    restored = (tmp_path / "new" / "keys").read_bytes()
    shared = {former[start : start + SLOT] for start in range(HEADER, len(former), SLOT)}
    shared &= {restored[start : start + SLOT] for start in range(HEADER, len(restored), SLOT)}
    assert len(shared - {bytes(SLOT)}) == 10, "the two stores give later persons keys of their own"
    enrol(store, 5, seed=3)
    store.check()
    store.close()
    plain = SqliteStore(tmp_path / "plain")
    plain.snapshot(tmp_path / "plain.snapshot")
    plain.close()
    with pytest.raises(UsageError, match="is not encrypted; leave --encrypt and --keys out"):
        restore(tmp_path / "plain.snapshot", tmp_path / "another", key_file=key_file)


def test_a_damaged_vector_in_a_snapshot_is_no_deleted_person(sealed: Sealed, key_file: Path) -> None:
    folder, made = sealed
    snapshot = folder / "snapshots" / "one"
    exchange_vectors(snapshot, made)
    with pytest.raises(IntegrityError, match=r"the vector of face \d+ is not what was encrypted"):
        check_readers(snapshot, key_file, None)
