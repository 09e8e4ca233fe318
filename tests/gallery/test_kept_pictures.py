"""Pictures that are kept without loss: the very pixels come back, nobody else sees them, and they go with faces."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from support.live_service import image_input, live_service
from support.stores import DIM, GALLERY, MODEL, content_of, faces, new_key_file

from plsc.data.codec import decode_image, encode_image
from plsc.errors import NotFoundError, StorageError
from plsc.gallery import thumbnails
from plsc.gallery.pictures import write_pictures
from plsc.gallery.sqlite.backup import restore
from plsc.gallery.sqlite.store import SqliteStore
from plsc.gallery.store import Store
from plsc.gallery.thumbnails import ThumbnailStore, is_lossless
from plsc.gallery.values import NewPerson, Person
from plsc.tools.entry import main


def crop(seed: int, side: int = 24) -> torch.Tensor:
    """Noise, of which JPEG keeps no pixel."""
    return torch.randint(256, (3, side, side), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def enrolled(kept: ThumbnailStore, count: int = 3) -> list[Person]:
    """Persons of two faces each; those of person n have the crops 2n and 2n + 1."""
    new = [NewPerson(faces(2, seed=n), f"P{n}") for n in range(count)]
    return kept.add_persons(GALLERY, new, MODEL, [[crop(2 * n), crop(2 * n + 1)] for n in range(count)])


def picture_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "thumbnails"


@pytest.fixture
def vault(tmp_path: Path, key_file: Path) -> Iterator[SqliteStore]:
    store = SqliteStore(tmp_path / "store", key_file=key_file)
    store.create_collection(GALLERY, DIM, MODEL)
    yield store
    store.close()


def test_the_very_pixels_come_back_from_every_store(store: Store, folder: Path) -> None:
    kept = ThumbnailStore(store, folder, keep=False, lossless=True)
    people = enrolled(kept)
    for number, person in enumerate(people):
        found = kept.contents(GALLERY, person)
        assert list(found) == list(person.faces)
        for index, content in enumerate(found.values()):
            assert is_lossless(content)
            assert torch.equal(decode_image(content, "it"), crop(2 * number + index))
    suffix = ".sealed" if store.seals else ".png"
    assert {path.suffix for path in picture_files(folder)} == {suffix}
    with pytest.raises(NotFoundError, match="no thumbnail"):  # they are kept, not shown
        kept.read(GALLERY, people[0].id, people[0].faces[0])
    shown = ThumbnailStore(store, folder, keep=True)
    assert is_lossless(shown.read(GALLERY, people[0].id, people[0].faces[0]))
    (added,) = shown.add_faces(GALLERY, people[0].id, faces(1, seed=9), MODEL, [crop(9)])
    assert not is_lossless(shown.contents(GALLERY, store.person(GALLERY, people[0].id))[added])
    kept.delete_face(GALLERY, people[0].id, people[0].faces[0])
    kept.delete_person(GALLERY, people[1].id)
    assert len(picture_files(folder)) == 4
    kept.delete_collection(GALLERY)
    assert picture_files(folder) == []


def test_no_file_beside_an_encrypted_store_shows_a_picture(vault: SqliteStore, folder: Path) -> None:
    shown = ThumbnailStore(vault, folder, keep=True)
    kept = ThumbnailStore(vault, folder, keep=True, lossless=True)
    for store in (shown, kept):
        enrolled(store)
    vault.compact()
    vault.snapshot(vault.folder / "snapshots" / "one")
    assert len(picture_files(folder)) == 12
    signs = (b"\x89PNG\r\n", b"\rIHDR", b"IEND\xae", b"\x10JFIF", b"\xff\xd8\xff\xe0\0")  # fewer bytes come by chance
    assert all(any(sign in encode_image(crop(0), kind) for kind in ("png", "jpeg")) for sign in signs)
    for name, content in {**content_of(folder), **content_of(vault.folder)}.items():
        for sign in signs:
            assert sign not in content, name
        for number in range(6):
            plain = encode_image(crop(number), "png")
            assert plain[100:140] not in content, name
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in picture_files(folder))


def test_a_sealed_picture_is_that_of_its_face_alone(
    vault: SqliteStore, folder: Path, tmp_path: Path, key_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = ThumbnailStore(vault, folder, keep=True, lossless=True)
    ada, grace, _ = enrolled(kept)
    own, second, *_, others = picture_files(folder)
    whole = own.read_bytes()
    twin = SqliteStore(tmp_path / "twin", key_file=key_file)
    twin.create_collection(GALLERY, DIM, MODEL)
    enrolled(ThumbnailStore(twin, tmp_path / "of-twin", keep=True, lossless=True))
    foreign = picture_files(tmp_path / "of-twin")[0].read_bytes()
    twin.close()
    altered = bytearray(whole)
    altered[-20] ^= 1
    hostile = {
        "another face's": second.read_bytes(),
        "another person's": others.read_bytes(),
        "another store's": foreign,
        "a picture in clear": encode_image(crop(0), "png"),
        "altered": bytes(altered),
        "cut short": whole[:-1],
        "a key far away": (2**63).to_bytes(8, "little") + whole[8:],
        "short": whole[:20],
        "empty": b"",
    }
    for name, content in hostile.items():
        own.write_bytes(content)
        with pytest.raises(NotFoundError):
            kept.read(GALLERY, ada.id, ada.faces[0])
        assert list(kept.contents(GALLERY, ada)) == [ada.faces[1]], name
        assert "it cannot be decrypted" in caplog.text, name
        caplog.clear()
    own.write_bytes(whole)
    assert list(kept.contents(GALLERY, ada)) == list(ada.faces)
    assert vault.unsealed(grace.id, ada.faces[0], whole) is None
    own.unlink()
    own.symlink_to(tmp_path / "gallery.key")
    assert list(kept.contents(GALLERY, ada)) == [ada.faces[1]]


def test_a_copy_of_a_deleted_persons_picture_is_nothing_any_more(folder: Path, tmp_path: Path, key_file: Path) -> None:
    vault = SqliteStore(tmp_path / "store", key_file=key_file)
    vault.create_collection(GALLERY, DIM, MODEL)
    kept = ThumbnailStore(vault, folder, keep=False, lossless=True)
    ada, grace, _ = enrolled(kept)
    shutil.copytree(folder, tmp_path / "backup")
    copies = [path.read_bytes() for path in picture_files(tmp_path / "backup")]
    assert vault.unsealed(ada.id, ada.faces[0], copies[0]) is not None
    kept.delete_face(GALLERY, ada.id, ada.faces[0])
    kept.delete_face(GALLERY, ada.id, ada.faces[1])  # with the last face the key goes
    kept.delete_person(GALLERY, grace.id)
    gone = [
        *zip([ada.id] * 2, ada.faces, copies[:2], strict=True),
        *zip([grace.id] * 2, grace.faces, copies[2:4], strict=True),
    ]
    assert [vault.unsealed(*one) for one in gone] == [None] * 4
    vault.close()
    again = SqliteStore(tmp_path / "store", key_file=key_file)
    assert [again.unsealed(*one) for one in gone] == [None] * 4
    again.close()


def test_a_replaced_person_has_a_new_key_and_a_refused_one_the_former_pictures(
    vault: SqliteStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = ThumbnailStore(vault, folder, keep=False, lossless=True)
    former, _ = kept.put_person(GALLERY, NewPerson(faces(1), external_id="E-1"), MODEL, [crop(1)])
    (path,) = picture_files(folder)
    copy = path.read_bytes()
    with monkeypatch.context() as patched:

        def full(*_: object, **__: object) -> None:
            raise StorageError("the disk is full")

        patched.setattr(vault, "put_person", full)
        with pytest.raises(StorageError):
            kept.put_person(GALLERY, NewPerson(faces(1), external_id="E-1"), MODEL, [crop(2)])
    (content,) = kept.contents(GALLERY, former).values()
    assert torch.equal(decode_image(content, "it"), crop(1))
    put, _ = kept.put_person(GALLERY, NewPerson(faces(1, seed=1), external_id="E-1"), MODEL, [crop(2)])
    (content,) = kept.contents(GALLERY, put).values()
    assert torch.equal(decode_image(content, "it"), crop(2))
    assert vault.unsealed(former.id, former.faces[0], copy) is None


def test_a_restored_store_reads_copied_pictures_of_who_is_still_there(
    vault: SqliteStore, folder: Path, tmp_path: Path, key_file: Path
) -> None:
    kept = ThumbnailStore(vault, folder, keep=False, lossless=True)
    ada, grace, _ = enrolled(kept)
    vault.snapshot(vault.folder / "snapshots" / "one")
    shutil.copytree(folder, tmp_path / "backup")
    kept.delete_person(GALLERY, grace.id)
    restore(vault.folder / "snapshots" / "one", tmp_path / "restored", key_file=key_file)
    assert not [name for name in content_of(tmp_path / "restored") if "sealed" in name]
    restored = SqliteStore(tmp_path / "restored", key_file=key_file)
    again = ThumbnailStore(restored, tmp_path / "backup", keep=False)
    (content, _) = again.contents(GALLERY, restored.person(GALLERY, ada.id)).values()
    assert torch.equal(decode_image(content, "it"), crop(0))
    (gone,) = (
        path for path in picture_files(tmp_path / "backup") if path.name.startswith(f"{grace.id}-{grace.faces[0]}")
    )
    assert restored.unsealed(grace.id, grace.faces[0], gone.read_bytes()) is None
    again.compact(GALLERY)
    assert len(picture_files(tmp_path / "backup")) == 4
    restored.close()


class Killed(BaseException):
    """The process ends here."""


def test_a_kill_while_a_picture_is_written_leaves_a_face_without_one(
    store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def half(path: Path, content: bytes) -> None:
        path.write_bytes(content[: len(content) // 2])
        raise Killed

    kept = ThumbnailStore(store, folder, keep=False, lossless=True)
    with monkeypatch.context() as patched:
        patched.setattr(thumbnails, "_write_file", half)
        with pytest.raises(Killed):
            kept.add_persons(GALLERY, [NewPerson(faces(1))], MODEL, [[crop(1)]])
    (ada,) = store.persons(GALLERY)
    assert kept.contents(GALLERY, ada) == {}
    assert "left out: " in caplog.text
    kept.delete_person(GALLERY, ada.id)
    assert picture_files(folder) == []


def test_a_kill_between_a_pictures_removal_and_its_faces_leaves_no_picture(
    store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = ThumbnailStore(store, folder, keep=False, lossless=True)
    (ada,) = kept.add_persons(GALLERY, [NewPerson(faces(1))], MODEL, [[crop(1)]])

    def killed(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(store, "delete_person", killed)
        with pytest.raises(Killed):
            kept.delete_person(GALLERY, ada.id)
    assert picture_files(folder) == []
    assert kept.contents(GALLERY, store.person(GALLERY, ada.id)) == {}


def test_an_expired_persons_pictures_are_removed(store: Store, folder: Path) -> None:
    kept = ThumbnailStore(store, folder, keep=False, lossless=True)
    kept.add_persons(GALLERY, [NewPerson(faces(1), expires="2001-01-01")], MODEL, [[crop(1)]])
    assert len(picture_files(folder)) == 1
    while kept.delete_expired():
        pass
    assert picture_files(folder) == []


def test_they_become_a_data_set_of_the_very_pixels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key_file = new_key_file(tmp_path / "gallery.key")
    store = SqliteStore(tmp_path / "store", key_file=key_file)
    store.create_collection(GALLERY, DIM, MODEL)
    people = enrolled(ThumbnailStore(store, tmp_path / "store" / "thumbnails", keep=False, lossless=True))
    write_pictures(store, GALLERY, tmp_path / "store" / "thumbnails", tmp_path / "direct", quiet=True)
    store.close()
    words = ["data", "from-gallery", str(tmp_path / "store"), str(tmp_path / "out"), "--encrypt", str(key_file)]
    assert main([*words, "--thumbnails", str(tmp_path / "store" / "thumbnails")]) == 0
    capsys.readouterr()
    for out in ("direct", "out"):
        for number, person in enumerate(people):
            for index, face in enumerate(person.faces):
                content = (tmp_path / out / str(person.id) / f"{face}.png").read_bytes()
                assert torch.equal(decode_image(content, "it"), crop(2 * number + index))


@pytest.mark.live
@pytest.mark.slow
@pytest.mark.parametrize("shown", [True, False])
def test_a_service_keeps_what_the_model_saw_and_shows_it_where_it_was_asked_to(tmp_path: Path, shown: bool) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    sent = encode_image(torch.from_numpy(pixels).permute(2, 0, 1), "png")
    folder = tmp_path / "thumbnails"
    with live_service(tmp_path, thumbnails=folder, keep_thumbnails=shown, keep_pictures=True) as live:
        assert live.ask("GET", "/v1/info").json()["thumbnails"] is shown
        place = live.collection("staff")
        person = live.ask("POST", f"{place}/persons", {"faces": [image_input(sent)]}).json()
        answer = live.ask("GET", f"{place}/persons/{person['id']}/faces/{person['faces'][0]['id']}/thumbnail")
        assert answer.status_code == (200 if shown else 404)
        if shown:
            assert answer.headers["content-type"] == "image/png"
        (path,) = picture_files(folder)
        np.testing.assert_array_equal(decode_image(path.read_bytes(), "it").permute(1, 2, 0).numpy(), pixels)
        both = {"inputs": [image_input(sent), image_input(path.read_bytes())]}
        fresh, again = live.ask("POST", "/v1/embeddings", both).json()["embeddings"]
        assert again == fresh


@pytest.mark.live
def test_the_options_go_with_encryption_and_need_a_folder(capsys: pytest.CaptureFixture[str], key_file: Path) -> None:
    words = ["serve", "--model", "missing.onnx", "--encrypt", str(key_file), "--keep-pictures", "--keep-thumbnails"]
    assert main([*words, "--store", "s"]) != 0
    assert "thumbnails are not encrypted" not in capsys.readouterr().err
    assert main(["serve", "--model", "m.onnx", "--store", "postgres:x", "--keep-pictures"]) == 2
    assert "--keep-pictures: a store on a server has no folder" in capsys.readouterr().err
