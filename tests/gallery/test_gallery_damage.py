"""A flipped bit, a missing file, a full disk: named, mended where SQLite can mend it, and nothing half done."""

import errno
import os
import random
import resource
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from support.encrypted_store import DIM, GALLERY, MODEL, faces
from support.moved_clock import compact_in_time
from support.stores import flip
from support.waiting import wait_until

from plsc.errors import IntegrityError, PlscError, StorageError
from plsc.gallery.sqlite import RESERVE
from plsc.gallery.sqlite.backup import restore
from plsc.gallery.sqlite.store import SqliteStore
from plsc.gallery.values import NewPerson
from plsc.index.scan import best_precision


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed store with a sealed segment, newer faces, something deleted, and a snapshot."""
    store = SqliteStore(tmp_path_factory.mktemp("sound") / "store")
    store.create_collection(GALLERY, DIM, MODEL)
    new = [NewPerson(vector[None], f"person {n}", {"n": n, "on": True}) for n, vector in enumerate(faces(40))]
    made = store.add_persons(GALLERY, new, MODEL)
    store.compact()
    store.add_persons(GALLERY, [NewPerson(faces(5, 1), "five")], MODEL)
    store.delete_person(GALLERY, made[3].id)
    store.snapshot(store.folder / "snapshots" / "one")
    store.close()
    return store.folder


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return shutil.copytree(sound, tmp_path / "store")


def verify_found(store: SqliteStore) -> None:
    found = store.search(GALLERY, faces(40), k=1)
    assert [answer[0].score > 0.999 for answer in found] == [n != 3 for n in range(40)]
    assert store.search(GALLERY, faces(5, 1), k=1)[4][0].score > 0.999


# --- sealed segments -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["vectors.npy", "codes.npy", "code_bounds.npy", "faces.npy", "persons.npy", "manifest.json"]
)
def test_a_bit_flipped_in_a_base_is_named_and_the_base_made_anew(
    folder: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if name.startswith("code") and best_precision(DIM) != "int8":
        pytest.skip("searches scan no codes on this machine")
    (path,) = (folder / "collections").rglob(name)
    size = path.stat().st_size
    for byte in sorted({0, 9, size // 2, size - 1, *random.Random(1).sample(range(size), 4)}):
        flip(path, byte, byte % 8)
        store = SqliteStore(folder)
        message = capsys.readouterr().err
        assert str(path.parent) in message
        assert "rebuilding it" in message
        verify_found(store)
        store.check()
        store.close()
        (path,) = (folder / "collections").rglob(name)
    store = SqliteStore(folder)
    assert capsys.readouterr().err == ""
    store.close()


def test_a_bit_flipped_while_the_store_is_open_is_named_by_the_check(folder: Path) -> None:
    store = SqliteStore(folder)
    (path,) = (folder / "collections").rglob("vectors.npy")
    flip(path, path.stat().st_size - 5)
    with pytest.raises(IntegrityError, match=r"vectors\.npy"):
        store.check()
    store.compact()
    verify_found(store)
    store.check()
    store.close()


@pytest.mark.live
@pytest.mark.parametrize("precision", ["int8", "bf16", "fp32"])
@pytest.mark.parametrize("kept", [None, 0, 200])
def test_a_base_that_is_cut_or_written_over_under_an_open_store_is_made_anew(
    folder: Path, precision: str, kept: int | None
) -> None:
    """To read what was cut off of a mapped file would end the process, by SIGBUS."""
    store = SqliteStore(folder, precision=precision)
    store.compact()
    verify_found(store)
    name = "codes.npy" if precision == "int8" else "vectors.npy"
    (path,) = (folder / "collections").rglob(name)
    content = path.read_bytes()
    if kept is None:  # another file's content of the same length
        path.write_bytes(content[:128] + bytes(len(content) - 128))
        os.utime(path, ns=(0, 0))
    else:
        os.truncate(path, kept)
    with pytest.raises(StorageError, match=f"people are written anew: .*{name} was cut, or written over"):
        store.search(GALLERY, faces(40), k=1)
    compact_in_time(store)
    verify_found(store)
    store.check()
    store.close()


@pytest.mark.parametrize("lost", ["vectors.npy", "manifest.json", "."])
def test_a_lost_base_is_made_anew(folder: Path, lost: str, capsys: pytest.CaptureFixture[str]) -> None:
    (segment,) = (folder / "collections").glob("*/base-*")
    if lost == ".":
        shutil.rmtree(folder / "collections")
    else:
        (segment / lost).unlink()
    store = SqliteStore(folder)
    assert "rebuilding it" in capsys.readouterr().err
    verify_found(store)
    store.check()
    store.close()


def test_an_older_base_in_place_of_the_current_one_is_not_taken(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (segment,) = (folder / "collections").glob("*/base-*")
    shutil.copytree(segment, tmp_path / "older")
    store = SqliteStore(folder)
    store.compact()
    store.close()
    (segment,) = (folder / "collections").glob("*/base-*")
    shutil.rmtree(segment)
    shutil.copytree(tmp_path / "older", segment)
    store = SqliteStore(folder)
    assert "another segment" in capsys.readouterr().err
    verify_found(store)
    store.close()


# --- SQLite ----------------------------------------------------------------------------------------------------------


def change(folder: Path, statement: str) -> None:
    """Change a row's content as a flipped bit does: SQLite itself sees nothing wrong."""
    connection = sqlite3.connect(folder / "gallery.sqlite")
    assert connection.execute(statement).rowcount
    connection.commit()
    connection.close()


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE persons SET name = 'Person 7' WHERE name = 'person 7'",
        """UPDATE persons SET metadata = replace(metadata, '"n": 7', '"n": 6') WHERE name = 'person 7'""",
        "UPDATE persons SET created = '2' WHERE name = 'person 7'",
        "UPDATE faces SET person = 8 WHERE id = 7",
        "UPDATE vectors SET vector = zeroblob(64) WHERE face = 7",
        "UPDATE vectors SET checksum = x'0000000000' WHERE face = 43",
        "DELETE FROM vectors WHERE face = 43",
        "DELETE FROM attributes WHERE person = 7 AND key = 'n'",
        "UPDATE attributes SET value = 1234 WHERE person = 7 AND key = 'n'",
        "INSERT INTO attributes VALUES (1, 'other', 1, 2, 7)",
        "UPDATE collections SET faces = faces + 1",
        "INSERT INTO vectors VALUES (999, x'0102030405', zeroblob(64))",
        "DELETE FROM forgotten",
    ],
)
def test_a_row_that_is_not_what_was_written_is_named(folder: Path, statement: str) -> None:
    change(folder, statement)
    with (
        pytest.raises(IntegrityError, match=r"gallery\.sqlite|faces that were deleted"),
        closing(SqliteStore(folder)) as store,
    ):
        store.check()


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE collections SET dim = 8",
        "UPDATE collections SET name = 'others'",
        "UPDATE vectors SET vector = zeroblob(64) WHERE face = 43",
    ],
)
def test_what_opening_reads_is_verified_by_opening(folder: Path, statement: str) -> None:
    change(folder, statement)
    with pytest.raises(IntegrityError, match=r"gallery\.sqlite is corrupt"):
        SqliteStore(folder)


def test_a_damaged_vector_is_not_given_out(folder: Path) -> None:
    change(folder, "UPDATE vectors SET vector = zeroblob(64) WHERE face = 7")
    store = SqliteStore(folder)
    with pytest.raises(IntegrityError, match="vector of face 7"):
        store.vectors(GALLERY, 7)
    with pytest.raises(IntegrityError, match="vector of face 7"):
        store.compact()
    verify_found(store)  # the segment still has it
    store.close()


@pytest.mark.parametrize("value", ["'Person 7'", "x'FF00'", "7", "NULL", "1e999", "CAST(x'FF' AS TEXT)"])
def test_a_damaged_name_is_not_shown_with_a_match(folder: Path, value: str) -> None:
    change(folder, f"UPDATE persons SET name = {value} WHERE id = 7")
    store = SqliteStore(folder)
    assert list(store.person_summaries(GALLERY, [6, 8])) == [6, 8]
    with pytest.raises(IntegrityError, match=r"gallery\.sqlite is corrupt"):
        store.person_summaries(GALLERY, [6, 7, 8])
    with pytest.raises(IntegrityError, match=r"gallery\.sqlite is corrupt"):
        store.person(GALLERY, 7)
    store.close()


@pytest.mark.slow
def test_flipped_bits_in_sqlite_never_change_an_answer_unnoticed(folder: Path, sound: Path, tmp_path: Path) -> None:
    path = folder / "gallery.sqlite"
    good = SqliteStore(shutil.copytree(sound, tmp_path / "good"))
    expected = good.persons(GALLERY), good.search(GALLERY, faces(40), k=5)
    good.close()
    chance, written = random.Random(7), np.flatnonzero(np.fromfile(path, dtype=np.uint8))  # the rest is empty room
    named = 0
    for _ in range(40):
        flip(path, int(chance.choice(written)), chance.randrange(8))
        try:
            store = SqliteStore(folder)
            try:
                store.check()
                assert (store.persons(GALLERY), store.search(GALLERY, faces(40), k=5)) == expected
            finally:
                store.close()
        except PlscError as error:
            named += "gallery.sqlite" in str(error) or "faces" in str(error)
        shutil.rmtree(folder)
        shutil.copytree(sound, folder)
    assert named > 30


@pytest.mark.parametrize("byte", [0, 17, 100, 16384])
def test_a_damaged_database_is_refused_by_name(folder: Path, byte: int) -> None:
    with (folder / "gallery.sqlite").open("r+b") as file:
        file.seek(byte)
        file.write(b"\xff" * 60)
    with pytest.raises(PlscError, match=r"gallery\.sqlite"), closing(SqliteStore(folder)) as store:
        store.check()


def test_a_cut_or_missing_database_is_refused_by_name(folder: Path) -> None:
    path = folder / "gallery.sqlite"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    with pytest.raises(IntegrityError, match=r"gallery\.sqlite is corrupt"), closing(SqliteStore(folder)) as store:
        store.check()
    path.unlink()
    with pytest.raises(IntegrityError, match=r"gallery\.sqlite is missing"):
        SqliteStore(folder)


# --- snapshots -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gallery.sqlite", "manifest.json"])
def test_a_damaged_snapshot_is_named_and_not_restored(folder: Path, tmp_path: Path, name: str) -> None:
    path = folder / "snapshots" / "one" / name
    flip(path, path.stat().st_size // 2)
    with pytest.raises(IntegrityError, match=name):
        restore(path.parent, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    store = SqliteStore(folder)
    with pytest.raises(IntegrityError, match=name):
        store.check()
    store.close()


# --- full disks ------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Sixteen megabytes, where mounting is allowed."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def fill(path: Path) -> None:
    with path.open("ab", buffering=0) as file:
        size = 1 << 20
        while size:
            try:
                file.write(bytes(size))
            except OSError:
                size //= 2


@pytest.mark.live
def test_a_full_disk_refuses_what_adds_takes_what_deletes_and_loses_nothing(small_disk: Path) -> None:
    store = SqliteStore(small_disk / "store")
    store.create_collection(GALLERY, DIM, MODEL)
    made = store.add_persons(GALLERY, [NewPerson(vector[None], "x") for vector in faces(500)], MODEL)
    store.compact()
    filler = small_disk / "filler"
    fill(filler)
    large = [NewPerson(faces(1000, n)) for n in range(20)]
    adding: list[Callable[[], object]] = [
        lambda: store.add_persons(GALLERY, large, MODEL),
        lambda: store.add_faces(GALLERY, made[0].id, faces(20000), MODEL),
        lambda: store.snapshot(small_disk / "copy"),
    ]
    before = store.persons(GALLERY, limit=999), store.search(GALLERY, faces(50), k=3)
    for add in adding:
        with pytest.raises(StorageError, match=r"full|No space"):
            add()
        assert (store.persons(GALLERY, limit=999), store.search(GALLERY, faces(50), k=3)) == before
    assert not (small_disk / "copy").exists()
    for person in made[:200]:
        store.delete_person(GALLERY, person.id)
        fill(filler)
    with pytest.raises(StorageError, match="deletions are still taken"):
        store.update_person(GALLERY, made[300].id, name="y")
    store.close()
    fill(filler)
    store = SqliteStore(small_disk / "store")
    assert [one.id for one in store.persons(GALLERY, limit=999)] == [one.id for one in made[200:]]
    assert store.search(GALLERY, faces(500)[200:], k=1)[0][0].person == made[200].id
    store.check()
    filler.unlink()
    store.compact()
    store.add_persons(GALLERY, large[:2], MODEL)
    assert store.check()["faces"] == 2300
    assert (store.folder / RESERVE).exists()
    store.close()


@pytest.mark.live
def test_a_store_that_found_no_room_to_rewrite_its_file_opens_and_still_forgets(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("plsc.gallery.sqlite.compaction._MIN_ERASED", 100)
    monkeypatch.setattr("plsc.gallery.sqlite.maintenance._RETRY_SECONDS", 0.05)
    store = SqliteStore(small_disk / "store")
    store.create_collection(GALLERY, 512, MODEL)
    wide = np.random.default_rng(1).standard_normal((600, 512)).astype(np.float32)
    made = store.add_persons(GALLERY, [NewPerson(vectors) for vectors in np.split(wide, 30)], MODEL)
    for person in made[:22]:
        store.delete_person(GALLERY, person.id)

    def fail(*args: object) -> None:
        if not (small_disk / "filler").exists():  # room that is freed for deletions later is theirs
            fill(small_disk / "filler")
        raise StorageError("database or disk is full")

    with monkeypatch.context() as patched:
        patched.setattr("plsc.gallery.sqlite.compaction.rewrite", fail)
        with pytest.raises(StorageError, match="full"):
            store.compact()
        store.close()
        store = SqliteStore(small_disk / "store")
        wait_until(lambda: "put off" in capsys.readouterr().err)
        assert [one.id for one in store.persons(GALLERY, limit=999)] == [one.id for one in made[22:]]
        store.delete_person(GALLERY, made[25].id)
        assert made[25].id not in [match.person for match in store.search(GALLERY, wide[500:501], k=5)[0]]
    size = (store.folder / "gallery.sqlite").stat().st_size  # before there is room: the next try comes at once
    (small_disk / "filler").unlink()
    wait_until(lambda: (store.folder / "gallery.sqlite").stat().st_size < size / 2)
    store.check()
    store.close()


@pytest.mark.live
def test_a_compaction_without_room_is_put_off_and_tried_again(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("plsc.gallery.sqlite.maintenance._RETRY_SECONDS", 0.05)
    store = SqliteStore(small_disk / "store")
    store.create_collection(GALLERY, DIM, MODEL)
    store.add_persons(GALLERY, [NewPerson(faces(4000))], MODEL)
    fill(small_disk / "filler")
    with pytest.raises(StorageError, match="No space"):
        store.compact()
    assert not list((small_disk / "store" / "collections").rglob("*.npy"))
    assert store.search(GALLERY, faces(1), k=1)[0][0].score > 0.999
    monkeypatch.setattr("plsc.gallery.sqlite.collection_state.MIN_CHANGES", 100)
    store._maintenance.wake()
    wait_until(lambda: store.statistics()[GALLERY]["failed_compactions"])
    assert "put off" in capsys.readouterr().err
    (small_disk / "filler").unlink()
    wait_until(lambda: store.statistics()[GALLERY]["sealed"])
    store.check()
    store.close()


_LIMITED = """
import resource, signal, sys
import numpy as np
from plsc.errors import StorageError
from plsc.gallery.values import NewPerson
from plsc.index.scan import best_precision
from plsc.gallery.sqlite.store import SqliteStore
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = SqliteStore(sys.argv[1])
store.create_collection("people", 16, "a model")
vectors = np.random.default_rng(0).standard_normal((6000, 16))
made = store.add_persons("people", [NewPerson(vectors[:50])], "a model")
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
for work in (lambda: store.add_persons("people", [NewPerson(vectors)], "a model"),
             lambda: store.snapshot(store.folder / "copy")):
    try:
        work()
    except StorageError as error:
        print("refused")
assert len(store.search("people", vectors[:1])[0]) == 1 and not (store.folder / "copy").exists()
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
store.add_persons("people", [NewPerson(vectors)], "a model")
store.check()
store.close()
"""


@pytest.mark.live
@pytest.mark.slow
def test_a_limit_on_files_is_like_a_full_disk(tmp_path: Path) -> None:
    """Show the same without mounting anything."""
    if resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY:
        pytest.skip("files are limited already")
    command = [sys.executable, "-c", _LIMITED, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["refused", "refused"]


@pytest.mark.live
def test_a_damaged_row_does_not_end_the_compactions_for_good(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("plsc.gallery.sqlite.maintenance._RETRY_SECONDS", 0.05)
    store = SqliteStore(folder)

    def figures() -> dict[str, float]:
        return store.statistics()[GALLERY]

    connection = sqlite3.connect(folder / "gallery.sqlite")
    (vector,) = connection.execute("SELECT vector FROM vectors WHERE face = 7").fetchone()
    for content, done in ((bytes(64), False), (vector, True)):
        connection.execute("UPDATE vectors SET vector = ? WHERE face = 7", (content,))
        connection.commit()
        monkeypatch.setattr("plsc.gallery.sqlite.collection_state.MIN_CHANGES", 3)
        monkeypatch.setattr("plsc.gallery.sqlite.collection_state.COMPACTION_DIVISOR", 10)
        store._maintenance.wake()
        wait_until(lambda done=done: not figures()["growing"] if done else figures()["failed_compactions"])
    connection.close()
    assert "put off" in capsys.readouterr().err
    verify_found(store)
    store.check()
    store.close()


def test_a_compaction_that_failed_leaves_no_reader_of_an_earlier_moment(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SqliteStore(folder)
    store.add_persons(GALLERY, [NewPerson(vector[None]) for vector in faces(40, 7)], MODEL)

    def fill_the_disk(folder: Path, rows: int, dim: int, batches: Iterator[object], *, is_coded: bool) -> None:
        next(batches)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("plsc.gallery.sqlite.segments._write_columns", fill_the_disk)
        patch.setattr("plsc.gallery.sqlite.records._FETCH_ROWS", 10)
        with pytest.raises(StorageError, match="No space") as caught:
            store.compact()
    (made,) = store.add_persons(GALLERY, [NewPerson(faces(1, 8), "late")], MODEL)
    assert store.person(GALLERY, made.id).name == "late"
    store.compact()
    assert caught.value, "whoever keeps the error keeps no moment of the store"
    store.close()
