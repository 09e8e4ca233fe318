"""Landmarks in files and by detectors: what is cut out of pictures, for training and for embedding."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support.scrfd import stand_in

from plsc.data import open_dataset, read_image
from plsc.data.alignment import TEMPLATE, AlignedImages, FileLandmarks, align_face, read_landmarks
from plsc.embedding.sources import open_pictures
from plsc.errors import DataError, UsageError
from plsc.tools.entry import main

POINTS = (TEMPLATE - 56) / 32  # of the stand-in detector: a crop around the upper left corner of a blue cell


def place(number):
    """Where the upper left corner of the crop of photo ``number`` lies."""
    return 32 * (2 + number % 3) - 56, 32 * 3 - 56


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """Two people, three photos each of 256x256 pixels: noise, with a blue cell where the detector shall look."""
    folder = tmp_path_factory.mktemp("photos")
    for name in ("ann", "bob, jr"):
        (folder / name).mkdir()
        for number in range(3):
            pixels = np.random.default_rng([len(name), number]).integers(0, 50, (256, 256, 3), dtype=np.uint8)
            left, top = place(number)
            pixels[top + 56 : top + 88, left + 56 : left + 88, 2] = 250
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
    return folder


def lines(photos: Path):
    """(key, ten numbers) of every photo."""
    for path in sorted(photos.rglob("*.png")):
        left, top = place(int(path.stem))
        yield path.relative_to(photos).as_posix(), (TEMPLATE + np.array([left, top])).reshape(-1).tolist()


def written(target: Path, rows, form: str, header: bool = False) -> Path:
    with target.open("w", newline="", encoding="utf-8") as file:
        if form == "json":
            for key, numbers in rows:
                file.write(json.dumps({"path": key, "landmarks": np.reshape(numbers, (5, 2)).tolist()}) + "\n")
            return target
        writer = csv.writer(file, delimiter="\t" if form == "tsv" else ",")
        if header:
            writer.writerow(["path", *(f"{axis}{i}" for i in range(1, 6) for axis in "xy")])
        writer.writerows([key, *numbers] for key, numbers in rows)
    return target


def cut_out(photos: Path, key: str) -> torch.Tensor:
    """The crop by plain slicing: the landmarks are the template's, moved by whole pixels."""
    left, top = place(int(Path(key).stem))
    return read_image(photos / key)[:, top : top + 112, left : left + 112]


@pytest.mark.parametrize("form", ["csv", "tsv", "json"])
@pytest.mark.parametrize("header", [False, True])
def test_every_form_is_read(form, header, photos, tmp_path):
    rows = list(lines(photos))
    assert read_landmarks(written(tmp_path / "points", rows, form, header)) == {k: tuple(v) for k, v in rows}


def test_empty_lines_dots_and_a_byte_order_mark_are_passed_over(tmp_path):
    line = "1,2,3,4,5,6,7,8,9,10\r\n"
    (tmp_path / "p.csv").write_bytes(f"\ufeffpath,x1\r\n\r\n./a b/ü.jpg,{line}".encode().replace(b"path,x1\r\n", b""))
    assert list(read_landmarks(tmp_path / "p.csv")) == ["a b/ü.jpg"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a.jpg,1,2,3", "line 1"),
        ("a.jpg" + ",1" * 11, "line 1"),
        ("a.jpg" + ",1" * 10 + "\nb.jpg" + ",1" * 9 + ",x", "line 2"),
        ("a.jpg" + ",1" * 10 + "\n\na.jpg" + ",2" * 10, "line 3 names a.jpg again"),
        (",1,2,3,4,5,6,7,8,9,10", "line 1"),
        ('{"path": "a.jpg"}', "line 1"),
        ('{"path": "a.jpg", "landmarks": [[1, 2], [3, 4]]}', "line 1"),
        ('{"path": 7, "landmarks": [1,2,3,4,5,6,7,8,9,10]}', "line 1"),
        ('{"path": "a", "landmarks": {"x": 1}}', "line 1"),
        ('{"path": "a", "landmarks": [true,2,3,4,5,6,7,8,9,10]}', "line 1"),
        ('{"path": "a", "landmarks": [null,2,3,4,5,6,7,8,9,10]}', "line 1"),
        ('{"path"', "line 1"),
        ("[" * 5000, "line 1"),
        ('{"a":' * 5000, "line 1"),
        ('"a.jpg,1,2', "line 1"),
        ("", "holds no landmarks"),
        ("path,x1,y1,x2,y2,x3,y3,x4,y4,x5,y5\n", "holds no landmarks"),
        (b"\xff\xfe\x00", "not UTF-8"),
    ],
)
def test_a_file_of_another_form_is_one_line(text, message, tmp_path):
    (tmp_path / "p.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError, match=message) as caught:
        read_landmarks(tmp_path / "p.csv")
    assert "p.csv" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_knows_none_of_the_images_shows_both_names(photos, tmp_path):
    path = written(tmp_path / "p.csv", [("/data/ann/0.png", range(10))], "csv")
    with pytest.raises(DataError, match=r"its first line is /data/ann/0\.png, and the first image is ann/0\.png"):
        FileLandmarks(path, open_dataset(photos, image_size=None))
    with pytest.raises(UsageError, match="no landmark file"):
        FileLandmarks(tmp_path / "none.csv", open_dataset(photos, image_size=None))


def test_faces_are_cut_where_the_file_says_and_a_missing_line_is_that_images_error(photos, tmp_path):
    rows = list(lines(photos))
    rows[1] = (rows[1][0], [float("nan")] * 10)
    rows[2] = (rows[2][0], [7.0] * 10)
    rows[3] = (rows[3][0], ["1e400"] * 10)
    pictures = open_dataset(photos, image_size=None)
    faces = AlignedImages(pictures, FileLandmarks(written(tmp_path / "p.tsv", rows[1:], "tsv"), pictures), 112)
    assert (len(faces), faces.image_size, faces.class_names[1]) == (6, 112, "bob, jr")
    for index, message in (
        (0, "has no landmarks for it"),
        (1, "no landmarks|not finite"),
        (2, "coincide"),
        (3, "are not finite"),
    ):
        with pytest.raises(DataError, match=message) as caught:
            faces.image(index)
        assert faces.key(index) in str(caught.value)
    for index in range(4, 6):
        assert torch.equal(faces.image(index), cut_out(photos, faces.key(index)))


def test_landmarks_need_pictures_as_they_are_stored(photos, tmp_path):
    pictures = open_dataset(photos, image_size=64)
    locate = FileLandmarks(written(tmp_path / "p.csv", lines(photos), "csv"), pictures)
    with pytest.raises(UsageError, match=r"gives images of 64x64, .*: name pictures in files, opened with image_size"):
        AlignedImages(pictures, locate, 112)


def test_drawn_pictures_are_not_aligned(tmp_path, capsys):
    points = written(tmp_path / "p.csv", [("avatar-0/0", range(10))], "csv")
    assert main(["data", "align", "avatars:2x1", "--out", str(tmp_path / "out"), "--landmarks", str(points)]) == 2
    assert "plsc data: error: avatars:2x1 gives images of 112x112" in capsys.readouterr().err


def align(source: Path, out: Path, points: Path, *more: str) -> int:
    argv = ["data", "align", str(source), "--out", str(out), "--landmarks", str(points), "--encoding", "png"]
    return main([*argv, *more])


@pytest.mark.live
@pytest.mark.parametrize("target", ["faces.rec", "faces"])
@pytest.mark.parametrize("workers", ["0", "2"])
def test_data_align_writes_crops_for_training(target, workers, photos, tmp_path, capsys):
    points = written(tmp_path / "p.csv", list(lines(photos))[1:], "csv", header=True)
    assert align(photos, tmp_path / target, points, "--workers", workers) == 0
    assert "5 faces of 2 classes, 1 picture left out" in capsys.readouterr().out
    made = open_dataset(tmp_path / target, image_size=None)
    keys = [key for key, _ in lines(photos)][1:]
    assert made.labels.tolist() == [0, 0, 1, 1, 1]
    assert all(torch.equal(made.image(i), cut_out(photos, key)) for i, key in enumerate(keys))
    assert list(made.class_names) == ["ann", "bob, jr"]
    assert [made.key(i) for i in range(5)] == keys
    blank = written(tmp_path / "blank.csv", [(key, [5.0] * 10) for key in keys], "csv")
    assert align(photos, tmp_path / "none", blank, "--max-bad-records", "2") == 1
    assert "more than 2 images" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_photos_in_no_sub_folder_are_aligned_too(photos, tmp_path, capsys):
    flat = tmp_path / "flat"
    flat.mkdir()
    names = {"0.png": photos / "ann/0.png", "1.png": photos / "ann/1.png"}
    for name, path in names.items():
        (flat / name).write_bytes(path.read_bytes())
    points = written(
        tmp_path / "p.csv", [(key.partition("/")[2], rest) for key, rest in list(lines(photos))[:2]], "csv"
    )
    assert align(flat, tmp_path / "faces", points) == 0
    assert f"{tmp_path / 'faces'}: 2 faces\n" in capsys.readouterr().out
    made = open_pictures(tmp_path / "faces")
    assert [made.key(i) for i in range(len(made))] == list(names)
    assert all(torch.equal(made.image(i), cut_out(photos, f"ann/{name}")) for i, name in enumerate(names))
    assert align(flat, tmp_path / "faces", points, "--overwrite") == 0
    assert align(flat, tmp_path / "faces.rec", points) == 2  # whose pictures have classes
    assert "give each identity a folder of its own" in capsys.readouterr().err


def test_photos_beside_sub_folders_are_aligned_with_them(photos, tmp_path):
    mixed = tmp_path / "mixed"
    (mixed / "0.png").mkdir(parents=True)  # a person whose name is that of a crop
    for name in ("0.jpg", "0.png/0.png"):
        Image.open(photos / "ann/0.png").save(mixed / name)
    (_, numbers), *_ = lines(photos)
    points = written(tmp_path / "p.csv", [("0.jpg", numbers), ("0.png/0.png", numbers)], "csv")
    assert align(mixed, tmp_path / "faces", points) == 0
    assert (tmp_path / "faces/0.png").is_file()
    made = open_dataset(tmp_path / "faces/images.tsv", image_size=None)
    assert len(made) == 1
    assert torch.equal(made.image(0), cut_out(photos, "ann/0.png"))


def test_records_may_be_named_by_their_numbers(photos, tmp_path):
    assert main(["data", "convert", str(photos), str(tmp_path / "photos.rec")]) == 0
    rows = [(str(number), numbers) for number, (_, numbers) in enumerate(lines(photos), 1)]
    points = written(tmp_path / "p.json", rows, "json")
    assert align(tmp_path / "photos.rec", tmp_path / "faces.rec", points) == 0
    made = open_dataset(tmp_path / "faces.rec", image_size=None)
    assert len(made) == 6
    assert all(torch.equal(made.image(i), cut_out(photos, key)) for i, (key, _) in enumerate(lines(photos)))


@pytest.mark.live
@pytest.mark.parametrize("workers", ["0", "2"])
def test_data_align_finds_faces_by_a_detector(workers, photos, tmp_path):
    detector = stand_in(tmp_path / "d.onnx", shape=(1, 3, 256, 256), points=POINTS, box=(1, 1, 1, 1))
    argv = ["data", "align", str(photos), "--out", str(tmp_path / "faces"), "--detector", f"onnx:{detector}"]
    assert main([*argv, "--size", "56", "--encoding", "png", "--workers", workers]) == 0
    made = open_dataset(tmp_path / "faces", image_size=None)
    for i, (key, numbers) in enumerate(lines(photos)):
        expected = align_face(read_image(photos / key), np.reshape(numbers, (5, 2)), 56)
        assert (made.image(i).int() - expected.int()).abs().max() <= 2
