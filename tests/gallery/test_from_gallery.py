"""``plsc data from-gallery``: the pictures that a gallery keeps, as a data set whose classes are its persons' ids."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from support.stores import DIM, Servers, faces, new_key_file

from plsc.data import open_dataset
from plsc.data.avatars import render_avatar
from plsc.gallery.backends import open_store, opened_store
from plsc.gallery.sqlite.store import SqliteStore
from plsc.gallery.thumbnails import ThumbnailStore
from plsc.gallery.values import NewPerson, Person
from plsc.tools.entry import main


def from_gallery(*words: object) -> int:
    return main(["data", "from-gallery", *map(str, words)])


def crop(person: int, number: int, side: int = 48) -> torch.Tensor:
    return torch.from_numpy(np.array(render_avatar(person, number, side))).permute(2, 0, 1)


def fill(folder: Path, persons: int = 4, pictures: int = 3) -> list[Person]:
    """A gallery with thumbnails: person n has n faces without one besides, and the last one a single face with one."""
    store = open_store(folder)
    store.create_collection("people", DIM, "m")
    kept = ThumbnailStore(store, folder / "thumbnails", keep=True)
    added = []
    for number in range(persons):
        crops = [crop(number, n) for n in range(pictures if number < persons - 1 else 1)]
        new = NewPerson(faces(len(crops) + number, seed=number), f"P{number}")
        added += kept.add_persons("people", [new], "m", [[*crops, *[None] * number]])
    store.close()
    return added


def test_classes_are_the_ids_of_the_persons(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gallery, out, report = tmp_path / "gallery", tmp_path / "new/people", tmp_path / "report.json"
    zero, one, two, last = fill(gallery)
    store = open_store(gallery)
    ThumbnailStore(store, gallery / "thumbnails", keep=False).delete_person("people", zero.id)
    store.add_persons("people", [NewPerson(faces(1, seed=9), "without")], "m")
    store.add_persons("people", [NewPerson(faces(1, seed=8), "expired", expires="2001-01-01")], "m")
    store.close()

    assert from_gallery(gallery, out, "--least", 2, "--json", report) == 0
    told = capsys.readouterr().out
    assert f"{out}: 6 images of 2 classes, 48x48 pixels" in told
    assert "without a picture: 7 faces; 1 person without any" in told
    assert "fewer than 2 pictures: 1 person" in told
    assert "fewer than most models' 112x112 pixels" in told
    result = json.loads(report.read_text())
    assert (result["classes"], result["images"], result["faces_without_picture"]) == (2, 6, 7)

    pictures = open_dataset(str(out), image_size=None)
    assert list(pictures.class_names) == [str(one.id), str(two.id)]
    kept = {f"{who.id}/{face}.jpg" for who in (one, two) for face in who.faces[:3]}
    assert {pictures.key(n) for n in range(6)} == kept
    assert float((pictures.image(0).float() - crop(1, 0).float()).abs().mean()) < 4, "as JPEG keeps it"
    assert not (out / "persons.json").exists()
    modes = {path.stat().st_mode & 0o777 for path in out.rglob("*") if path.is_file()}
    assert modes == {0o600}
    assert {path.stat().st_mode & 0o777 for path in (out.parent, out, out / str(one.id))} == {0o700}

    (out.with_name(f".{out.name}.{2**22 + 1}.tmp") / "9").mkdir(parents=True)  # of one that was killed
    assert from_gallery(gallery, out) == 2
    assert f"{out} exists already: give --overwrite to replace it" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    assert from_gallery("gallery", "new/people", "--names", "--overwrite") == 0
    assert json.loads((out / "persons.json").read_text()) == {str(p.id): p.name for p in (one, two, last)}
    assert set(open_dataset(str(out)).class_names) == {str(person.id) for person in (one, two, last)}
    assert [path.name for path in out.parent.iterdir()] == [out.name]


def test_a_restored_snapshot_stands_in_for_a_gallery_that_is_served(tmp_path: Path) -> None:
    people, gallery = fill(tmp_path / "gallery"), SqliteStore(tmp_path / "gallery")
    gallery.snapshot(tmp_path / "snapshot")
    try:
        assert from_gallery(tmp_path / "gallery", tmp_path / "out") == 2, "it has an owner"
        assert main(["gallery", "restore", str(tmp_path / "snapshot"), "--store", str(tmp_path / "copy")]) == 0
        kept = tmp_path / "gallery/thumbnails"
        assert from_gallery(tmp_path / "copy", tmp_path / "out", "--thumbnails", kept) == 0
    finally:
        gallery.close()
    assert set(open_dataset(str(tmp_path / "out")).class_names) == {str(person.id) for person in people}


def test_what_cannot_be_written_is_said_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gallery, out = tmp_path / "gallery", tmp_path / "new/out"
    fill(gallery)

    def refused(code: int, message: str, *words: object) -> None:
        assert from_gallery(*words) == code
        err = capsys.readouterr().err.strip().splitlines()[-1]
        assert message in err
        assert not out.parent.exists()

    refused(2, f"there is no store {tmp_path / 'none'}", tmp_path / "none", out)
    refused(2, f"{gallery} has no collection 'staff': name one of people", gallery, out, "--collection", "staff")
    refused(2, "a server has no folder of pictures; give --thumbnails DIR", "postgres:dbname=secret", out)
    refused(2, "there is no such folder", gallery, out, "--thumbnails", tmp_path / "none")
    refused(2, "name a folder, of which plsc data convert makes a .rec", gallery, out.with_suffix(".rec"))
    refused(2, "lies in", gallery, gallery / "thumbnails/out")
    refused(2, "holds the source", gallery, tmp_path, "--overwrite")
    refused(1, "nobody in people has 9 pictures: give a lower --least", gallery, out, "--least", 9)
    shutil.rmtree(gallery / "thumbnails")
    refused(1, "has no picture of anybody in people: they are kept of faces that are enrolled", gallery, out)


def test_an_encrypted_store_takes_its_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = new_key_file(tmp_path / "key")
    store = open_store(tmp_path / "vault", key_file=key)
    store.create_collection("people", DIM, "m")
    (ann,) = ThumbnailStore(store, tmp_path / "kept", keep=True).add_persons(
        "people", [NewPerson(faces(1), "Ann")], "m", [[crop(0, 0)]]
    )
    store.close()
    assert from_gallery(tmp_path / "vault", tmp_path / "out", "--thumbnails", tmp_path / "kept") == 2
    assert "--encrypt" in capsys.readouterr().err
    words = ("--thumbnails", tmp_path / "kept", "--encrypt", key)
    assert from_gallery(tmp_path / "vault", tmp_path / "out", *words) == 0
    assert [path.name for path in (tmp_path / "out" / str(ann.id)).iterdir()] == [f"{ann.faces[0]}.jpg"]


def test_a_store_on_a_server_has_its_pictures_in_a_folder(tmp_path: Path, servers: Servers) -> None:
    spec, kept = f"postgres:{servers.address('postgres')}", tmp_path / "kept"
    with opened_store(spec) as store:
        store.create_collection("staff", DIM, "m")
        new = [NewPerson(faces(2)), NewPerson(faces(1))]
        crops = [[crop(0, 0), crop(0, 1)], [crop(1, 0)]]
        ann, bob = ThumbnailStore(store, kept, keep=True).add_persons("staff", new, "m", crops)
        store.delete_person("staff", bob.id)  # by another process, which leaves the picture behind
    assert from_gallery(spec, tmp_path / "out", "--collection", "staff", "--thumbnails", kept) == 0
    assert list(open_dataset(str(tmp_path / "out")).class_names) == [str(ann.id)]


def test_a_damaged_or_foreign_picture_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gallery = tmp_path / "gallery"
    one, *_ = fill(gallery, persons=2)
    first, second, third = sorted((gallery / "thumbnails").rglob(f"{one.id}-*.jpg"))
    first.write_bytes(b"half")
    secret = tmp_path / "secret.jpg"
    secret.write_bytes(second.read_bytes())
    second.unlink()
    second.symlink_to(secret)
    assert from_gallery(gallery, tmp_path / "out") == 0
    assert [path.name for path in (tmp_path / "out" / str(one.id)).iterdir()] == [third.name.partition("-")[2]]
    assert "without a picture: 3 faces" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_a_table_trained_on_them_knows_the_ids_and_not_the_names(tmp_path: Path) -> None:
    people = fill(tmp_path / "gallery")
    assert from_gallery(tmp_path / "gallery", tmp_path / "people") == 0
    words = ["--data.train", tmp_path / "people", "--steps", 2, "--dynamic.max_classes", 100, "--data.batch_size", 10]
    assert main(["train", "avatars_quickstart", "--out", *map(str, [tmp_path / "run", *words])]) == 0
    report = tmp_path / "table.json"
    assert main(["table", "info", str(tmp_path / "run"), "--names", "--json", str(report)]) == 0
    assert sorted(json.loads(report.read_text())["names"]) == sorted(str(person.id) for person in people)
