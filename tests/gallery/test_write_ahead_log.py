"""Acknowledged writes lie in SQLite's log until a checkpoint: a flipped bit there must not undo them unnoticed."""

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from support.stores import flip

from plsc.errors import IntegrityError
from plsc.gallery.sqlite.store import SqliteStore
from plsc.gallery.values import NewPerson

GALLERY, MODEL, DIM = "people", "m", 16
FRAME = 24 + 16384


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """The folder of a store as a kill would leave it, and the frames in its log after each of five enrolments."""
    folder, copy = (tmp_path_factory.mktemp("store") / name for name in ("open", "killed"))
    store = SqliteStore(folder)
    store.create_collection(GALLERY, DIM, MODEL)
    log, ends = folder / "gallery.sqlite-wal", []
    for number in range(5):
        vectors = np.random.default_rng(number).standard_normal((3, DIM))
        store.add_persons(GALLERY, [NewPerson(vectors, f"person {number}")], MODEL)
        ends.append((log.stat().st_size - 32) // FRAME)
    shutil.copytree(folder, copy)
    store.close()
    assert ends == sorted(set(ends))
    return copy, ends


def names(folder: Path) -> list[str | None]:
    store = SqliteStore(folder)
    try:
        return [person.name for person in store.persons(GALLERY, limit=1000)]
    finally:
        store.close()


@pytest.mark.slow
@pytest.mark.parametrize("within", [0, 5, 11, 18, 24, 24 + 9000, FRAME - 1])
def test_a_bit_flipped_in_the_log_is_named_and_the_log_kept(
    killed: tuple[Path, list[int]], tmp_path: Path, within: int
) -> None:
    sound, ends = killed
    folder = shutil.copytree(sound, tmp_path / "damaged")
    log = folder / "gallery.sqlite-wal"
    for frame in range(ends[0], ends[3]):
        flip(log, 32 + frame * FRAME + within, bit=3)
        for _ in range(2):  # the second opening is told the same
            with pytest.raises(IntegrityError, match=rf"gallery\.sqlite-wal is corrupt: frame {frame + 1} .*lost"):
                SqliteStore(folder)
        flip(log, 32 + frame * FRAME + within, bit=3)
    assert names(folder) == [f"person {number}" for number in range(5)]


@pytest.mark.parametrize("byte", [0, 3, 6, 10, 14, 17, 22, 25, 31])
def test_a_bit_flipped_in_the_logs_header_is_named(killed: tuple[Path, list[int]], tmp_path: Path, byte: int) -> None:
    folder = shutil.copytree(killed[0], tmp_path / "damaged")
    flip(folder / "gallery.sqlite-wal", byte, bit=3)
    with pytest.raises(IntegrityError, match=r"gallery\.sqlite-wal is corrupt: its header"):
        SqliteStore(folder)


def test_a_log_that_ends_anywhere_opens_with_what_was_whole(killed: tuple[Path, list[int]], tmp_path: Path) -> None:
    """A kill, or a power failure, in the middle of the last transaction."""
    sound, ends = killed
    whole = (sound / "gallery.sqlite-wal").read_bytes()
    cuts = [0, 20, 32, 50, *(32 + ends[3] * FRAME + more for more in (0, 10, 24, 5000)), len(whole) - 1, len(whole)]
    for cut in cuts:
        folder = shutil.copytree(sound, tmp_path / str(cut))
        log = folder / "gallery.sqlite-wal"
        log.write_bytes(whole[:cut])
        if cut >= 32 + ends[3] * FRAME:
            assert names(folder) == [f"person {number}" for number in range(5 if cut == len(whole) else 4)]
    torn = shutil.copytree(sound, tmp_path / "torn")
    flip(torn / "gallery.sqlite-wal", 32 + ends[3] * FRAME + 100, bit=3)
    assert names(torn) == [f"person {number}" for number in range(4)]


def test_a_log_begun_anew_over_an_old_one_is_sound(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "store")
    store.create_collection(GALLERY, DIM, MODEL)
    people = [NewPerson(np.eye(DIM)[row % DIM][None], f"person {row}") for row in range(300)]
    store.add_persons(GALLERY, people, MODEL)
    log = tmp_path / "store" / "gallery.sqlite-wal"
    size = log.stat().st_size
    with closing(sqlite3.connect(tmp_path / "store" / "gallery.sqlite")) as other:
        other.execute("PRAGMA wal_checkpoint(PASSIVE)")
    store.add_persons(GALLERY, people[:1], MODEL)
    assert log.stat().st_size == size, "old frames lie behind the new ones"
    copy = shutil.copytree(tmp_path / "store", tmp_path / "killed")
    store.close()
    assert len(names(copy)) == 301


def test_what_a_failed_commit_left_in_the_log_is_no_damage(killed: tuple[Path, list[int]], tmp_path: Path) -> None:
    """A commit that the disk refused at its end leaves whole frames; the next transaction overwrites some of them."""
    sound, ends = killed
    whole = (sound / "gallery.sqlite-wal").read_bytes()
    folder = shutil.copytree(sound, tmp_path / "open")
    log = folder / "gallery.sqlite-wal"
    log.write_bytes(whole[: 32 + ends[1] * FRAME])
    with closing(sqlite3.connect(folder / "gallery.sqlite")) as other:
        other.execute("INSERT INTO unfinished VALUES ('x', NULL)")
        other.execute("DELETE FROM unfinished")
        other.commit()
        written = log.read_bytes()
        copy = shutil.copytree(folder, tmp_path / "killed")
    assert ends[1] < (len(written) - 32) // FRAME < ends[2]
    (copy / "gallery.sqlite-wal").write_bytes(written + whole[len(written) : 32 + ends[2] * FRAME])
    assert names(copy) == ["person 0", "person 1"]
