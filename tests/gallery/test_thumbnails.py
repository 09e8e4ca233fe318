"""Every store alike: thumbnails come with faces, and go with them from every file."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from support.stores import DIM, GALLERY, MODEL, Servers, faces
from support.waiting import wait_until

from plsc.data.codec import decode_image
from plsc.errors import ConflictError, NotFoundError, StorageError
from plsc.gallery.backends import open_store
from plsc.gallery.retention import Retention
from plsc.gallery.store import Store
from plsc.gallery.thumbnails import ThumbnailStore
from plsc.gallery.values import NewPerson


def crop(level: int) -> torch.Tensor:
    return torch.full((3, 16, 16), level, dtype=torch.uint8)


def files(folder: Path) -> list[str]:
    """Their names, those of encrypted ones as if they were not."""
    return sorted(path.name.replace(".sealed", ".jpg") for path in folder.rglob("*") if path.is_file())


def contents(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in folder.rglob("*") if path.is_file()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "thumbnails"


@pytest.fixture
def kept(store: Store, folder: Path) -> ThumbnailStore:
    return ThumbnailStore(store, folder, keep=True)


def test_thumbnails_are_of_their_faces_and_go_with_them(store: Store, kept: ThumbnailStore, folder: Path) -> None:
    new = [NewPerson(faces(2), "Ada"), NewPerson(faces(1, seed=1), "Grace")]
    ada, grace = kept.add_persons(GALLERY, new, MODEL, [[crop(10), None], [crop(90)]])
    assert decode_image(kept.read(GALLERY, ada.id, ada.faces[0]), "it").float().mean() == pytest.approx(10, abs=1)
    assert decode_image(kept.read(GALLERY, grace.id, grace.faces[0]), "it").float().mean() == pytest.approx(90, abs=1)
    for person, face in ((ada.id, ada.faces[1]), (ada.id, grace.faces[0]), (grace.id, 10**6)):
        with pytest.raises(NotFoundError, match="no thumbnail of face"):
            kept.read(GALLERY, person, face)
    (added,) = kept.add_faces(GALLERY, ada.id, faces(1, seed=2), MODEL, [crop(200)])
    assert len(files(folder)) == 3
    assert folder.stat().st_mode & 0o777 == 0o700  # they show faces

    with pytest.raises(NotFoundError):
        kept.delete_face(GALLERY, ada.id, grace.faces[0])  # not hers: nothing goes
    assert len(files(folder)) == 3
    kept.delete_face(GALLERY, ada.id, added)
    assert files(folder) == sorted([f"{ada.id}-{ada.faces[0]}.jpg", f"{grace.id}-{grace.faces[0]}.jpg"])
    kept.delete_person(GALLERY, ada.id)
    assert files(folder) == [f"{grace.id}-{grace.faces[0]}.jpg"]
    assert [person.name for person in store.persons(GALLERY)] == ["Grace"]
    kept.delete_collection(GALLERY)
    assert list(folder.iterdir()) == []


def test_what_another_process_deleted_is_shown_no_more_and_compaction_removes_it(
    store: Store, kept: ThumbnailStore, folder: Path
) -> None:
    ada, grace = kept.add_persons(GALLERY, [NewPerson(faces(1))] * 2, MODEL, [[crop(10)], [crop(90)]])
    store.delete_person(GALLERY, ada.id)
    with pytest.raises(NotFoundError):
        kept.read(GALLERY, ada.id, ada.faces[0])
    foreign = folder / "letters"
    foreign.mkdir()
    (foreign / "mine.jpg").touch()
    (folder / "gone@20260101000000000").mkdir()
    (folder / "gone@20260101000000000" / "1-2.jpg").touch()
    kept.compact(GALLERY)
    assert files(folder) == sorted([f"{grace.id}-{grace.faces[0]}.jpg", "mine.jpg"])


def test_a_new_collection_of_an_old_name_shows_nobody_of_the_old_one(
    store: Store, kept: ThumbnailStore, folder: Path
) -> None:
    (ada,) = kept.add_persons(GALLERY, [NewPerson(faces(1))], MODEL, [[crop(10)]])
    store.delete_collection(GALLERY)  # past the thumbnails
    store.create_collection(GALLERY, DIM, MODEL)
    while True:
        (other,) = store.add_persons(GALLERY, [NewPerson(faces(1, seed=1))], MODEL)
        with pytest.raises(NotFoundError):
            kept.read(GALLERY, other.id, other.faces[0])
        if other.id >= ada.id:
            break
    kept.compact(GALLERY)
    assert files(folder) == []


def test_a_service_that_keeps_none_deletes_those_of_an_earlier_one(
    store: Store, kept: ThumbnailStore, folder: Path
) -> None:
    (ada,) = kept.add_persons(GALLERY, [NewPerson(faces(2))], MODEL, [[crop(10), crop(20)]])
    plain = ThumbnailStore(store, folder, keep=False)
    assert not plain.keeps
    with pytest.raises(NotFoundError):
        plain.read(GALLERY, ada.id, ada.faces[0])
    plain.add_faces(GALLERY, ada.id, faces(1, seed=1), MODEL, [crop(30)])
    assert len(files(folder)) == 2
    plain.delete_person(GALLERY, ada.id)
    assert files(folder) == []


def test_a_snapshot_holds_no_thumbnail(store: Store, kept: ThumbnailStore, tmp_path: Path) -> None:
    kept.add_persons(GALLERY, [NewPerson(faces(1))], MODEL, [[crop(10)]])
    store.snapshot(tmp_path / "copy")
    kept_bytes = kept.read(GALLERY, *_only(store))
    assert not [path for path in (tmp_path / "copy").rglob("*") if path.is_file() and kept_bytes in path.read_bytes()]


def _only(store: Store) -> tuple[int, int]:
    (person,) = store.persons(GALLERY)
    return person.id, person.faces[0]


def test_a_replacement_that_is_refused_keeps_the_thumbnails(store: Store, kept: ThumbnailStore, folder: Path) -> None:
    kept.put_person(GALLERY, NewPerson(faces(1), external_id="E-1"), MODEL, [crop(10)])
    before = contents(folder)
    assert len(before) == 1
    with pytest.raises(ConflictError):
        kept.put_person(GALLERY, NewPerson(faces(1, seed=1), external_id="E-1"), "another model", [crop(90)])
    assert contents(folder) == before
    kept.put_person(GALLERY, NewPerson(faces(1, seed=1), external_id="E-1"), MODEL, [crop(90)])
    assert len(files(folder)) == 1
    assert contents(folder) != before


def test_an_expired_person_is_deleted_as_ever_where_the_external_id_is_given_again(
    store: Store, kept: ThumbnailStore, folder: Path
) -> None:
    brief = NewPerson(faces(1), external_id="E-1", expires="2001-01-01")
    (first,) = kept.add_persons(GALLERY, [brief], MODEL, [[crop(10)]])
    second, _ = kept.put_person(GALLERY, brief, MODEL, [crop(50)])
    (third,) = kept.add_persons(GALLERY, [NewPerson(faces(1), external_id="E-1")], MODEL, [[crop(90)]])
    told = list[int]()
    while kept.delete_expired(lambda _, persons: told.extend(persons)):
        pass
    assert told == [first.id, second.id]
    assert files(folder) == [f"{third.id}-{third.faces[0]}.jpg"]
    assert store.find_person(GALLERY, "E-1") == third


def test_who_was_deleted_is_told_even_if_the_next_collection_fails(
    store: Store, kept: ThumbnailStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.create_collection("others", DIM, MODEL)
    for name in (GALLERY, "others"):
        kept.add_persons(name, [NewPerson(faces(1), expires="2001-01-01")], MODEL, [[None]])
    delete, told = store.delete_expired, list[str]()

    def fails_second(collection: str, persons: Sequence[int]) -> list[int]:
        if told:
            raise StorageError("the disk is full")
        return delete(collection, persons)

    monkeypatch.setattr(store, "delete_expired", fails_second)
    with pytest.raises(StorageError):
        kept.delete_expired(lambda name, _: told.append(name))
    assert len(told) == 1


def test_a_thumbnail_that_cannot_be_written_fails_no_enrolment(
    store: Store, kept: ThumbnailStore, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.write_text("a file where the folder should be")
    (ada,) = kept.add_persons(GALLERY, [NewPerson(faces(1))], MODEL, [[crop(10)]])
    assert store.person(GALLERY, ada.id) == ada
    assert "a thumbnail was not kept: File exists" in capsys.readouterr().err


@pytest.fixture
def both(store: Store, tmp_path: Path) -> tuple[ThumbnailStore, ThumbnailStore, Path, Path]:
    """Two services' thumbnails of one store, and their folders."""
    folders = tmp_path / "one", tmp_path / "two"
    one, two = (ThumbnailStore(store, folder, keep=True) for folder in folders)
    return one, two, *folders


def swept(thumbnails: ThumbnailStore) -> None:
    for _ in thumbnails.sweep():
        pass


def test_a_sweep_removes_pictures_of_whom_another_service_deleted(
    store: Store, both: tuple[ThumbnailStore, ThumbnailStore, Path, Path]
) -> None:
    one, two, first, second = both
    ada, grace = one.add_persons(GALLERY, [NewPerson(faces(2))] * 2, MODEL, [[crop(10), crop(20)]] * 2)
    mary, edith = two.add_persons(GALLERY, [NewPerson(faces(1))] * 2, MODEL, [[crop(30)]] * 2)
    swept(one)
    swept(two)
    assert (len(files(first)), len(files(second))) == (4, 2), "nobody is gone"
    two.delete_person(GALLERY, ada.id)
    two.delete_face(GALLERY, grace.id, grace.faces[0])
    one.delete_person(GALLERY, mary.id)
    swept(one)
    swept(two)
    assert files(first) == [f"{grace.id}-{grace.faces[1]}.jpg"]
    assert files(second) == [f"{edith.id}-{edith.faces[0]}.jpg"]
    one.delete_collection(GALLERY)
    another = second / "another@20260101000000000" / "0"  # of another gallery, as far as one knows
    another.mkdir(parents=True)
    (another / "1-2.jpg").touch()
    swept(two)
    assert files(second) == ["1-2.jpg"]


def test_a_sweep_removes_pictures_of_whom_another_service_let_expire(
    store: Store, both: tuple[ThumbnailStore, ThumbnailStore, Path, Path]
) -> None:
    one, two, first, _ = both
    brief = NewPerson(faces(1), expires="2001-01-01")
    one.add_persons(GALLERY, [brief], MODEL, [[crop(10)]])
    (ada,) = one.add_persons(GALLERY, [NewPerson(faces(1), expires="2999-01-01")], MODEL, [[crop(10)]])
    two.delete_expired()
    assert (len(files(first)), store.collection(GALLERY).persons) == (2, 1)
    swept(one)
    assert files(first) == [f"{ada.id}-{ada.faces[0]}.jpg"]


@pytest.mark.live
def test_a_service_sweeps_its_own_folder_of_a_shared_store_by_itself(servers: Servers, tmp_path: Path) -> None:
    kit = servers.kit("postgres")
    store = kit.fresh()
    store.create_collection(GALLERY, DIM, MODEL)
    thumbnails = ThumbnailStore(store, tmp_path / "one", keep=True)
    ada, grace = thumbnails.add_persons(GALLERY, [NewPerson(faces(1))] * 2, MODEL, [[crop(10)]] * 2)
    other = open_store(f"postgres:{store._pool.conninfo}")  # type: ignore[attr-defined]
    retention = Retention(store, thumbnails, lambda *_: None, within=0)
    try:
        other.delete_person(GALLERY, ada.id)
        wait_until(lambda: files(tmp_path / "one") == [f"{grace.id}-{grace.faces[0]}.jpg"])
    finally:
        retention.close()
        other.close()
        kit.close()


def test_a_picture_is_on_the_disk_before_its_enrolment_is_answered(
    store: Store, kept: ThumbnailStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[int, int]] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        status = os.fstat(descriptor)
        synced.append((status.st_ino, status.st_size))

    monkeypatch.setattr(os, "fsync", noted)
    (ada,) = kept.add_persons(GALLERY, [NewPerson(faces(2))], MODEL, [[crop(10), crop(20)]])
    kept.add_faces(GALLERY, ada.id, faces(1, seed=1), MODEL, [crop(30)])
    pictures = [path for path in folder.rglob("*") if path.is_file()]
    assert len(pictures) == 3
    for path in pictures:
        at = synced.index((path.stat().st_ino, path.stat().st_size))  # whole
        inodes = [inode for inode, _ in synced[at:]]
        assert path.parent.stat().st_ino in inodes, "its name could be lost"
