"""What a data set is: the same whatever form it has and wherever it lies, and another where anything in it is."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.numbered_images import Numbered
from support.pictures import picture

from plsc.data import ImageDataset, identity, open_dataset
from plsc.data.alignment import AlignedImages
from plsc.data.convert import convert
from plsc.data.identity import contents_id, file_stamps, samples, samples_id
from plsc.data.relabelled import RelabelledDataset
from plsc.data.transforms import RotatedDataset
from plsc.errors import DataError
from plsc.features.tables.joined import JoinedDataset


@pytest.fixture
def people(tmp_path: Path) -> Path:
    """Three people with 3, 2 and 1 pictures."""
    for name, count in {"ann": 3, "bob": 2, "ümit": 1}.items():
        for number in range(count):
            picture(tmp_path / "people" / name / f"{number} {name}.png", seed=ord(name[0]) + number)
    return tmp_path / "people"


def forms(people: Path) -> dict[str, ImageDataset]:
    folder = open_dataset(people)
    np.save(people.with_name("labels.npy"), np.array([1, -1, 0, -1, 0, 1]))
    convert(open_dataset(people, image_size=None), people.with_name("set.rec"), quiet=True, overwrite=True)
    return {
        "folder": folder,
        "rec": open_dataset(people.with_name("set.rec")),
        "rotated": RotatedDataset(folder),
        "joined": JoinedDataset({"a": Numbered(7, size=112), "b": folder}, [1, 1], [5, 3]),
        "relabelled": RelabelledDataset(folder, people.with_name("labels.npy")),
        "aligned": AlignedImages(open_dataset(people, image_size=None), type("", (), {"fingerprint": "f"})(), 112),
        "avatars": open_dataset("avatars:3x4@5"),
    }


def test_blocks_of_keys_are_the_keys(people: Path) -> None:
    for name, data in forms(people).items():
        whole = [data.key(index) for index in range(len(data))]
        for start, stop in [(0, len(data)), (0, 1), (1, len(data)), (2, 4)]:
            assert data.sample_ids(start, stop) == whole[start:stop], name


def test_the_form_and_the_place_do_not_matter(people: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = forms(people)
    assert samples(found["rec"]) == samples(found["folder"])
    people.rename(people.with_name("moved"))
    assert samples(open_dataset(people.with_name("moved"))) == samples(found["folder"])
    monkeypatch.setattr(identity, "_AT_ONCE", 2)
    for data in found.values():
        monkeypatch.setattr(identity, "_AT_ONCE", 2)
        in_blocks = samples(data)
        monkeypatch.undo()
        assert samples(data) == in_blocks


def test_a_list_is_the_same_under_another_mount(tmp_path: Path) -> None:
    found = []
    for root in ("/data/faces", "/mnt/3/faces", "../faces", "."):
        lines = [f"{root}/{name}/{number}.jpg\t{name}\n" for name in ("ann", "bob") for number in range(2)]
        (tmp_path / "list.txt").write_text("".join(lines))
        found.append(open_dataset(tmp_path / "list.txt"))
    assert len({str(samples(data)) for data in found}) == 1
    assert len({samples_id(data) for data in found}) == 4


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "bob").rename(folder / "bert"),
        lambda folder: (folder / "ann/0 ann.png").rename(folder / "ann/00.png"),
        lambda folder: (folder / "ann/0 ann.png").rename(folder / "bob/9.png"),
        lambda folder: (folder / "ann/0 ann.png").unlink(),
    ],
)
def test_another_name_is_another_set(change: Callable[[Path], object], people: Path) -> None:
    before = open_dataset(people)
    change(people)
    assert samples_id(open_dataset(people)) != samples_id(before)
    assert samples(open_dataset(people)) != samples(before)


def test_contents_are_told_by_size_and_time(people: Path) -> None:
    for name, data in forms(people).items():
        if name in ("rec", "avatars"):
            continue
        file = people / "ann/2 ann.png"
        before, first = contents_id(data), contents_id(data, 0, 1)
        assert contents_id(data) == before
        os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))
        assert contents_id(data) != before, name
        assert contents_id(data, 0, 1) == first, name
        before = contents_id(data)
        content = file.read_bytes()
        file.unlink()
        assert contents_id(data) != before, name
        file.write_bytes(content)


def test_many_files_are_looked_at_side_by_side(tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{number}") for number in range(2500)]
    for path in paths[::500]:
        Path(path).write_bytes(b"x")
    stamps = np.frombuffer(file_stamps(paths), dtype=np.int64).reshape(-1, 2)
    assert np.flatnonzero(stamps[:, 0] == 1).tolist() == [0, 500, 1000, 1500, 2000]
    assert (stamps[stamps[:, 0] != 1] == -1).all()
    assert file_stamps(["no\0name"]) == file_stamps(["nowhere"])


def test_a_damaged_list_of_keys_is_named(people: Path) -> None:
    data = forms(people)["rec"]
    lines = people.with_name("set.keys.tsv").read_text().splitlines(keepends=True)
    people.with_name("set.keys.tsv").write_text("".join([*lines[:3], lines[4], lines[3], *lines[5:]]))
    with pytest.raises(DataError, match=r"set\.keys\.tsv has no line for record 3 in its place"):
        samples(data)
