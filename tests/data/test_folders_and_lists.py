"""Folders and lists of image files: their classes, their order, and what is wrong with them."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import plsc
from plsc.data import READERS, ImageDataset, open_dataset
from plsc.data.convert import convert
from plsc.data.dataset import PackedStringColumn, map_names, map_numbers
from plsc.data.folder import SYSTEM_FOLDERS
from plsc.embedding.sources import open_images, open_pictures
from plsc.errors import DataError, UsageError


def put(path: Path, red: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (10, 8), (red, 0, 0)).save(path)


def test_folder_per_identity(tmp_path: Path) -> None:
    for number, name in enumerate(["zoe/b.png", "zoe/a.JPG", "ann/x.webp", "ann/deep/er/y.bmp", "10/z.jpeg"]):
        put(tmp_path / name, number)
    put(tmp_path / ".hidden/q.png")
    put(tmp_path / "ann/._x.png")
    put(tmp_path / "loose.png")
    (tmp_path / "ann/notes.txt").write_text("no image")
    (tmp_path / "empty").mkdir()
    data = open_dataset(tmp_path, image_size=12)
    assert list(data.class_names) == ["10", "ann", "zoe"]
    assert [data.key(i) for i in range(5)] == ["10/z.jpeg", "ann/deep/er/y.bmp", "ann/x.webp", "zoe/a.JPG", "zoe/b.png"]
    assert data.labels.tolist() == [0, 1, 1, 2, 2]
    assert data.num_classes == 3
    assert data.empty_classes == {"empty": ""}
    assert data.image(0).shape == (3, 12, 12)
    assert open_dataset(tmp_path, image_size=None).image(0).shape == (3, 8, 10)


def previews(folder: Path) -> None:
    """What a NAS, macOS and Windows put beside the pictures of two people."""
    for name in ("ann/1.png", "ann/trip/2.png", "bob/3.png"):
        put(folder / name)
    for name in (
        *("@eaDir/ann/SYNOPHOTO_THUMB_XL.jpg", "ann/@eaDir/1.png/SYNOPHOTO_THUMB_M.jpg", "ann/trip/@eaDir/2.png/x.jpg"),
        *("#recycle/old.jpg", ".@__thumb/default1.png", "bob/.thumbnails/3.png", "$Recycle.Bin/S-1/a.jpg"),
        *("System Volume Information/x.png", "lost+found/x.png", "__MACOSX/ann/._1.png", "__MACOSX/ann/1.png"),
    ):
        put(folder / name)


def test_folders_of_systems_are_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    previews(tmp_path / "photo")
    told = "10 hidden or system folders left out: 3 @eaDir, 1 #recycle, 1 $Recycle.Bin, "
    for data in (open_dataset(tmp_path / "photo"), open_dataset(tmp_path / "photo")):
        assert list(data.class_names) == ["ann", "bob"]
        assert [data.key(i) for i in range(len(data))] == ["ann/1.png", "ann/trip/2.png", "bob/3.png"]
    (line,) = caplog.messages
    assert line.startswith(f"{tmp_path / 'photo'}: {told}")
    put(tmp_path / "photo/loose.png")
    pictures = open_pictures(tmp_path / "photo")
    assert [pictures.key(i) for i in range(len(pictures))][2:] == ["bob/3.png", "loose.png"]


def test_who_is_named_nearly_so_is_somebody(tmp_path: Path) -> None:
    names = sorted(["eaDir", "@eaDir2", "recycle", "lost and found", "Recycler Jones"])
    for name in names:
        put(tmp_path / name / "1.png")
    assert list(open_dataset(tmp_path).class_names) == names


def test_a_folder_of_previews_alone_is_said(tmp_path: Path) -> None:
    put(tmp_path / "@eaDir/x/1.png")
    with pytest.raises(
        UsageError, match="no image in any sub-folder, and 1 hidden or system folder left out: 1 @eaDir;"
    ):
        open_dataset(tmp_path)


def test_nobody_is_written_to_a_folder_that_is_passed_over(tmp_path: Path) -> None:
    """A list, or a .rec, may name a class as a system names its folders: what is written is read again."""
    put(tmp_path / "1.png")
    put(tmp_path / "bob/@eaDir/2.png")
    (tmp_path / "list.txt").write_text("1.png\t@eaDir\nbob/@eaDir/2.png\tbob\n")
    convert(open_dataset(tmp_path / "list.txt", image_size=None), tmp_path / "out", quiet=True)
    data = open_dataset(tmp_path / "out")
    assert [data.key(i) for i in range(len(data))] == ["bob/2.png", "class-00000000/1.png"]
    assert len(open_dataset(tmp_path / "out/images.tsv")) == 2


def test_the_page_passes_over_the_same_folders() -> None:
    source = (Path(plsc.__file__).parent / "serve/page/folders.js").read_text()
    (listed,) = re.findall(r"SYSTEM_FOLDERS = new Set\(\[(.*?)\]\)", source, re.DOTALL)
    assert set(re.findall(r'"(.*?)"', listed)) == SYSTEM_FOLDERS


def test_folders_without_images(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no image in any sub-folder"):
        open_dataset(tmp_path)
    (tmp_path / "ann").mkdir()
    (tmp_path / "ann/film.mov").write_bytes(b"")
    told = r"holds no picture, and holds 1 \.mov \(not a picture\); name a folder of pictures \(\.jpg, \.jpeg, "
    with pytest.raises(UsageError, match=told):
        open_images(tmp_path, 16)
    put(tmp_path / "loose.png")
    with pytest.raises(UsageError, match="give each identity a folder of its own"):
        open_dataset(tmp_path)


@pytest.mark.parametrize("name", ["missing", "missing.rec", "missing.txt", "set.zip", "set.bin", "avatars:x"])
def test_what_is_no_data_set(tmp_path: Path, name: str) -> None:
    for file in ("set.zip", "set.bin"):
        (tmp_path / file).touch()
    with pytest.raises(UsageError, match=name):
        open_dataset(name if name.startswith("avatars") else tmp_path / name)


class Read(ImageDataset):
    """What a package's reader may return."""

    def __init__(self, labels: Any) -> None:
        super().__init__("read:x", labels, ["a"], None)

    def key(self, index: int) -> str:
        return str(index)


@pytest.mark.parametrize(
    ("returned", "kind", "message"),
    [
        (Read(np.empty(0, np.int64)), DataError, "read:x holds no image; name another set, or mend its reader"),
        (Read([0, 0]), UsageError, "read:x: its reader's labels are no NumPy array of integers; mend it"),
        (Read(np.zeros(2)), UsageError, "read:x: its reader's labels are no NumPy array of integers; mend it"),
        (None, UsageError, "read:x: its reader returns NoneType, and no plsc.data.ImageDataset; mend it"),
    ],
)
def test_a_reader_without_images_is_named(
    returned: Any, kind: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(READERS, "read", lambda source, size: returned)
    with pytest.raises(kind, match=f"^{re.escape(message)}$"):
        open_dataset("read:x")


def test_a_file_that_vanished_or_broke_is_named(tmp_path: Path) -> None:
    put(tmp_path / "a/1.png")
    put(tmp_path / "a/2.png")
    data = open_dataset(tmp_path)
    (tmp_path / "a/1.png").unlink()
    (tmp_path / "a/2.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    for index, name in enumerate(["1.png", "2.png"]):
        with pytest.raises(DataError, match=name):
            data.image(index)


def test_list_with_numbers(tmp_path: Path) -> None:
    put(tmp_path / "img/a.png", 9)
    put(tmp_path / "elsewhere.png", 7)
    absolute = tmp_path / "elsewhere.png"
    (tmp_path / "l.txt").write_text(f"\ufeffimg/a.png\t100\r\n\n{absolute}\t20\n", encoding="utf-8")
    data = open_dataset(tmp_path / "l.txt", image_size=8)
    assert data.labels.tolist() == [1, 0]
    assert list(data.class_names) == ["20", "100"]
    assert [int(data.image(i)[0, 0, 0]) for i in range(2)] == [9, 7]
    assert data.key(0) == "img/a.png"


def test_list_with_names(tmp_path: Path) -> None:
    (tmp_path / "l.tsv").write_text("c.png\t7\na.png\tzoe\nb.png\t007\nd.png\tÅsa\n", encoding="utf-8")
    data = open_dataset(tmp_path / "l.tsv")
    assert list(data.class_names) == ["007", "7", "zoe", "Åsa"]
    assert data.labels.tolist() == [1, 2, 0, 3]
    data.save_label_map(tmp_path / "map.json")
    with pytest.raises(DataError, match=r"c\.png"):
        data.image(0)


@pytest.mark.parametrize(
    "line", [b"only-a-path", b"a.png b", b"a\tb\tc", b"\t5", b"a.png\t ", b"\xff\xfe\t1", b"a\0.png\t1"]
)
def test_bad_lines_are_named_by_number(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "l.txt").write_bytes(b"ok.png\t1\n\n" + line + b"\nok.png\t2\n")
    with pytest.raises(DataError, match=r"l\.txt line 3"):
        open_dataset(tmp_path / "l.txt")


def test_empty_list(tmp_path: Path) -> None:
    (tmp_path / "l.txt").write_text("\n\n")
    with pytest.raises(DataError, match="lists no image"):
        open_dataset(tmp_path / "l.txt")


@settings(deadline=None, max_examples=60)
@given(st.lists(st.one_of(st.integers(0, 40), st.integers(-(10**17), 10**17)), min_size=1, max_size=60))
def test_numbers_are_mapped_in_order_without_gaps(numbers: list[int]) -> None:
    labels, classes = map_numbers(np.array(numbers, dtype=np.int64))
    assert classes.tolist() == sorted(set(numbers))
    assert classes[labels].tolist() == numbers
    again, names = map_names([str(number) for number in numbers])
    assert again.tolist() == labels.tolist()
    assert list(names) == [str(number) for number in classes]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.text()), st.slices(30))
def test_packed_strings_are_a_sequence(texts: list[str], piece: slice) -> None:
    texts = [text.encode("utf-8", "replace").decode() for text in texts] + ["\udcff"]
    packed = PackedStringColumn.of(texts)
    assert list(packed) == texts
    assert packed[piece] == texts[piece]
    assert packed[-1] == "\udcff"
    with pytest.raises(IndexError):
        packed[len(texts)]
