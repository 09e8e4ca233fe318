"""Encrypted stores: nothing readable without the key file, nobody readable who was deleted, and nobody lost besides."""

import base64
import errno
import json
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.encrypted_store import (
    GALLERY,
    MODEL,
    SLOT,
    Opened,
    Sealed,
    delete_all_faces,
    delete_person,
    enrol,
    faces,
    names_in,
    slot_content,
    slot_of,
)
from support.stores import content_of, new_key_file

from plsc.errors import IntegrityError, NotFoundError, StorageError, UsageError
from plsc.gallery.backends import open_store
from plsc.gallery.sqlite.backup import check_readers, restore
from plsc.gallery.sqlite.keys import KeyTable
from plsc.gallery.sqlite.rows import SqliteRows
from plsc.gallery.sqlite.store import SqliteStore
from plsc.gallery.values import NewPerson, Person
from plsc.tools.entry import main

# --- what is in the files --------------------------------------------------------------------------------------------


def test_no_file_holds_a_vector_and_every_vector_comes_back(tmp_path: Path, key_file: Path) -> None:
    store = SqliteStore(tmp_path / "store", key_file=key_file)
    made = enrol(store, 50)
    store.add_faces(GALLERY, made[0].id, faces(3, seed=1), MODEL)
    before = [store.vectors(GALLERY, one.id) for one in made]
    store.compact()
    store.snapshot(store.folder / "snapshots" / "one")
    for again in (False, True):
        if again:
            store.close()
            store = SqliteStore(tmp_path / "store", key_file=key_file)
        for one, vectors in zip(made, before, strict=True):
            np.testing.assert_array_equal(store.vectors(GALLERY, one.id), vectors)
        found = store.search(GALLERY, faces(50), k=1)
        assert [answer[0].person for answer in found] == [one.id for one in made]
        assert store.check()["encrypted"]
        for name, content in content_of(store.folder).items():
            for vector in np.concatenate(before):
                assert vector.tobytes()[8:40] not in content, name
    store.close()
    assert not list((store.folder / "collections").rglob("vectors.npy"))
    assert (store.folder / "keys").stat().st_mode & 0o777 == 0o600
    assert not list((store.folder / "snapshots").rglob("keys"))


def test_a_person_has_one_key_and_nobody_shares_it(tmp_path: Path, key_file: Path) -> None:
    store = SqliteStore(tmp_path / "store", key_file=key_file)
    made = enrol(store, 1500)
    added = store.add_faces(GALLERY, made[7].id, faces(2, seed=1), MODEL)
    store.close()
    store = SqliteStore(tmp_path / "store", key_file=key_file)
    added += store.add_faces(GALLERY, made[7].id, faces(1, seed=2), MODEL)
    made += enrol(store, 1100, seed=3)
    store.check()
    store.close()
    slots = [slot_of(store.folder, one.faces[0]) for one in made]
    assert len(set(slots)) == len(slots)
    assert {slot_of(store.folder, face) for face in added} == {slots[7]}


# --- deletion --------------------------------------------------------------------------------------------------------


def replace(store: SqliteStore, person: Person) -> None:
    store.put_person(GALLERY, NewPerson(faces(1, seed=9), "new", {}, "E-4"), MODEL)


def delete_expired(store: SqliteStore, person: Person) -> None:
    store.update_person(GALLERY, person.id, expires="2001-01-01")
    store.delete_expired(GALLERY, [person.id])


@pytest.mark.parametrize("forget", [delete_person, delete_all_faces, replace, delete_expired])
def test_an_older_snapshot_opens_without_whom_a_deletion_took(
    tmp_path: Path, key_file: Path, forget: Callable[[SqliteStore, Person], None]
) -> None:
    store = SqliteStore(tmp_path / "store", key_file=key_file)
    made = enrol(store, 4)
    made += store.add_persons(GALLERY, [NewPerson(faces(2, seed=5), "person-x", {}, "E-4")], MODEL)
    made += enrol(store, 3, seed=6)
    snapshot = store.folder / "snapshots" / "one"
    store.snapshot(snapshot)
    assert store.check()["deleted_in_snapshots"] == 0
    slot = slot_of(store.folder, made[4].faces[0])
    kept = slot_content(store.folder, slot)
    plain = KeyTable(store.folder / "keys", base64.b64decode(key_file.read_text()), writable=False)
    key = plain.key(slot)
    assert key is not None
    forget(store, made[4])
    assert slot_content(store.folder, slot) == bytes(SLOT), "before the deletion is answered"
    assert plain.key(slot) is None
    plain.close()
    assert store.check()["deleted_in_snapshots"] == 0
    assert check_readers(snapshot, key_file, None) == {"readable": 7, "readable_faces": 7, "gone": 1}
    store.close()
    for name, content in content_of(store.folder).items():
        assert key not in content, name
        assert kept[12:60] not in content, name
    result = restore(snapshot, tmp_path / "new", key_file=key_file)
    assert (result["left_out"], result["collections"][0]["persons"]) == (1, 7)
    for name, content in content_of(tmp_path / "new").items():
        assert b"person-x" not in content, name
    restored = SqliteStore(tmp_path / "new", key_file=key_file)
    assert names_in(restored) == [one.name for one in made if one is not made[4]]
    found = restored.search(GALLERY, np.concatenate([faces(4), faces(3, seed=6)]), k=1)
    assert all(answer[0].score > 0.999 for answer in found)
    restored.check()
    enrol(restored, 5, seed=8)
    restored.close()


def test_one_face_of_several_leaves_the_others_readable(sealed: Sealed, key_file: Path) -> None:
    folder, made = sealed
    store = SqliteStore(folder, key_file=key_file)
    added = store.add_faces(GALLERY, made[2].id, faces(2, seed=4), MODEL)
    store.delete_face(GALLERY, made[2].id, made[2].faces[0])
    store.compact()
    assert len(store.vectors(GALLERY, made[2].id)) == len(added)
    store.check()
    store.close()
    assert check_readers(folder / "snapshots" / "one", key_file, None)["gone"] == 0


def test_an_erasure_that_a_crash_interrupted_is_finished_at_the_opening(sealed: Sealed, key_file: Path) -> None:
    folder, made = sealed
    keys = (folder / "keys").read_bytes()
    store = SqliteStore(folder, key_file=key_file)
    for one in made[3:5]:
        store.delete_person(GALLERY, one.id)
    store.close()
    (folder / "keys").write_bytes(keys)  # as if the process had been killed after the commits
    assert check_readers(folder / "snapshots" / "one", key_file, None)["gone"] == 0
    store = SqliteStore(folder, key_file=key_file)
    assert check_readers(folder / "snapshots" / "one", key_file, None) == {
        "readable": 8,
        "readable_faces": 8,
        "gone": 2,
    }
    store.check()
    store.close()


def test_a_key_that_cannot_be_erased_refuses_the_next_write_until_it_can(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, made = opened

    def fail(*args: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("plsc.gallery.sqlite.keys.os.pwrite", fail)
        with pytest.raises(StorageError, match=r"keys cannot be written: 1 keys? of deleted people"):
            store.delete_person(GALLERY, made[0].id)
        assert store.search(GALLERY, faces(1), k=1)[0][0].person != made[0].id
        with pytest.raises(StorageError, match="keys cannot be written"):
            store.add_faces(GALLERY, made[1].id, faces(1), MODEL)
        with pytest.raises(StorageError, match="keys cannot be written"):
            store.compact()
    store.add_faces(GALLERY, made[1].id, faces(1), MODEL)
    assert slot_content(store.folder, slot_of(store.folder, made[0].faces[0])) == bytes(SLOT)
    store.check()


def test_vectors_read_while_their_person_is_deleted_are_not_found(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, made = opened
    find = SqliteRows.require

    def find_and_delete(*args: Any) -> Person:
        found = find(*args)
        monkeypatch.setattr(SqliteRows, "require", find)
        thread = threading.Thread(target=store.delete_person, args=(GALLERY, found.id))
        thread.start()
        thread.join()
        return found

    monkeypatch.setattr(SqliteRows, "require", find_and_delete)
    with pytest.raises(NotFoundError, match="no person"):
        store.vectors(GALLERY, made[0].id)


# --- who may open it -------------------------------------------------------------------------------------------------


def test_the_wrong_way_to_open_a_store_is_one_line_and_changes_nothing(
    sealed: Sealed, key_file: Path, tmp_path: Path
) -> None:
    folder, _ = sealed
    plain = SqliteStore(tmp_path / "plain")
    enrol(plain, 2)
    plain.close()
    other = new_key_file(tmp_path / "other.key")
    before = content_of(folder), content_of(tmp_path / "plain")
    for opened, given, message in (
        (folder, None, "is encrypted; name its key file: --encrypt KEYFILE"),
        (folder, other, "was made under another key: name the key file"),
        (tmp_path / "plain", key_file, "is not encrypted; leave --encrypt out"),
    ):
        with pytest.raises(UsageError, match=message) as caught:
            SqliteStore(opened, key_file=given)
        assert "\n" not in str(caught.value)
    after = content_of(folder), content_of(tmp_path / "plain")
    for first, second in zip(before, after, strict=True):
        for one in (first, second):
            one.pop("lock", None)
            one.pop("reserve", None)
            for name in [name for name in one if name.endswith(("-wal", "-shm"))]:
                del one[name]
        assert first == second
    SqliteStore(folder, key_file=key_file).close()


@pytest.mark.parametrize("content", ["", "c2hvcnQ=\n", "no base64!\n", "A" * 86 + "==\n", "ключ\n"])
def test_what_is_no_key_file_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "key"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(UsageError, match="openssl rand -base64 32"):
        SqliteStore(tmp_path / "store", key_file=path)
    with pytest.raises(UsageError, match="cannot be read"):
        SqliteStore(tmp_path / "store", key_file=tmp_path / "none")
    assert not (tmp_path / "store").exists()


def test_a_key_file_that_others_read_is_told(
    tmp_path: Path, key_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    SqliteStore(tmp_path / "store", key_file=key_file).close()
    assert capsys.readouterr().err == ""
    key_file.chmod(0o640)
    SqliteStore(tmp_path / "store", key_file=key_file).close()
    assert f"the key file {key_file} can be read by others than its owner: chmod 600 it" in capsys.readouterr().err


@pytest.mark.parametrize("spec", ["milvus:http://127.0.0.1:1", "postgres:host=127.0.0.1 port=1"])
def test_servers_refuse_encryption(spec: str, key_file: Path) -> None:
    with pytest.raises(UsageError, match=r"--encrypt: (milvus|postgres) keeps its own files"):
        open_store(spec, key_file=key_file)


def test_a_store_made_halfway_opens(tmp_path: Path, key_file: Path) -> None:
    SqliteStore(tmp_path / "store", key_file=key_file).close()
    for path in (tmp_path / "store").glob("gallery.sqlite*"):
        path.unlink()
    with pytest.raises(UsageError, match="is an encrypted store; name its key file"):
        SqliteStore(tmp_path / "store")
    store = SqliteStore(tmp_path / "store", key_file=key_file)
    enrol(store, 2)
    store.close()
    for path in (tmp_path / "store").glob("gallery.sqlite*"):
        path.unlink()
    with pytest.raises(IntegrityError, match=r"gallery\.sqlite is missing"):
        SqliteStore(tmp_path / "store", key_file=key_file)


def test_without_the_package_it_is_one_line(tmp_path: Path, key_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(UsageError, match=re.escape("pip install plsc-torch[encryption]")):
        SqliteStore(tmp_path / "store", key_file=key_file)


# --- commands --------------------------------------------------------------------------------------------------------


def test_every_action_takes_the_key_file(
    sealed: Sealed, key_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, made = sealed
    store = SqliteStore(folder, key_file=key_file)
    store.delete_person(GALLERY, made[2].id)
    store.close()
    new, report = new_key_file(tmp_path / "new.key"), tmp_path / "report.json"

    def run(*words: object) -> str:
        status = main(["gallery", *map(str, words)])
        told = capsys.readouterr()
        return f"{status} {told.out}{told.err}"

    def encrypted(*words: object) -> str:
        return run(*words, "--encrypt", key_file)

    snapshot = folder / "snapshots" / "one"
    assert "--encrypt KEYFILE tells who can be read" in run("check", snapshot)
    assert "; 9 persons readable, 1 gone for good" in encrypted("check", snapshot, "--json", report)
    assert json.loads(report.read_text())["gone"] == 1
    assert "encrypted on" in encrypted("check", folder)
    assert encrypted("check", folder, "--keys", folder / "keys").startswith("2 ")
    assert encrypted("compact", folder).startswith("0 ")
    assert encrypted("snapshot", folder, "--out", tmp_path / "two").startswith("0 ")
    assert encrypted("restore", tmp_path / "two", "--store", tmp_path / "n").startswith("2 ")
    told = encrypted("restore", snapshot, "--store", tmp_path / "restored", "--keys", folder / "keys")
    assert "people: 9 persons, 9 faces" in told
    assert "; 1 person left out, deleted or given other faces since" in told
    assert encrypted("export", folder, GALLERY, "--out", tmp_path / "people.emb").startswith("0 ")
    assert encrypted("import", tmp_path / "made", GALLERY, tmp_path / "people.emb").startswith("0 ")
    assert run("check", tmp_path / "made").startswith("2 ")
    assert encrypted("rotate-key", tmp_path / "made", "--new-key", new) == (
        f"0 {tmp_path / 'made'}: 1,024 keys under {new}; {key_file} opens none of them\n"
    )
    assert run("check", tmp_path / "made", "--encrypt", new).startswith("0 ")
    for wrong in (
        ("rotate-key", tmp_path / "made", "--new-key", new),
        ("rotate-key", tmp_path, "--new-key", new, "--encrypt", key_file),
        ("rotate-key", "postgres:host=nowhere", "--new-key", new, "--encrypt", key_file),
        ("rotate-key", tmp_path / "made", "--new-key", new, "--encrypt", new),
        ("check", "milvus:http://127.0.0.1:1", "--encrypt", key_file),
    ):
        assert re.fullmatch(r"2 plsc[^\n]*\n", run(*wrong)), wrong
