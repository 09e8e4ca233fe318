"""``plsc data`` from the outside: what it writes, what it says, and its exit codes."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from support.pictures import stored

from plsc.data import open_dataset, read_image, read_pairs
from plsc.data.dataset import EncodedDataset
from plsc.data.pairs import make_pairs
from plsc.errors import UsageError
from plsc.tools.entry import main


@pytest.fixture
def faces(tmp_path: Path) -> Path:
    """Three identities with 4, 3 and 2 images, no two alike."""
    folder = tmp_path / "faces"
    for label, (name, count) in enumerate({"ann": 4, "bob": 3, "zoe": 2}.items()):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            pixels = np.random.default_rng([label, number]).integers(0, 256, (12, 10, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.{'png' if number % 2 else 'jpg'}")
    return folder


def contents(source: Path) -> list[tuple[str, bytes]]:
    data = open_dataset(source, image_size=None)
    assert isinstance(data, EncodedDataset)
    return [(data.class_names[int(data.labels[i])], data.encoded(i)) for i in range(len(data))]


def test_convert_resizes(faces: Path, tmp_path: Path) -> None:
    arguments = ["--size", "16", "--encoding", "png"]
    assert main(["data", "convert", str(faces), str(tmp_path / "small"), *arguments]) == 0
    shown = open_dataset(tmp_path / "small", image_size=None)
    expected = open_dataset(faces, image_size=16)
    assert all((shown.image(i) == expected.image(i)).all() for i in range(9))
    assert read_image(tmp_path / "small/ann/0.png").shape == (3, 16, 16)


def test_convert_the_built_in_drawings(tmp_path: Path) -> None:
    assert main(["data", "convert", "avatars:2x2", str(tmp_path / "a.rec"), "--size", "32"]) == 0
    assert open_dataset(tmp_path / "a.rec", image_size=None).image(3).shape == (3, 32, 32)


def test_convert_leaves_out_what_is_broken(faces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (faces / "ann/0.jpg").write_bytes(b"no image")
    shutil.rmtree(faces / "zoe")
    (faces / "zoe").mkdir()
    (faces / "zoe/1.png").write_bytes(b"")
    assert main(["data", "convert", str(faces), str(tmp_path / "x.rec")]) == 0
    assert "6 images of 2 classes, 2 left out" in capsys.readouterr().out
    assert list(open_dataset(tmp_path / "x.rec").class_names) == ["ann", "bob"]
    assert main(["data", "convert", str(faces), str(tmp_path / "y.rec"), "--max-bad-records", "1"]) == 1
    assert not (tmp_path / "y.rec").exists()


def test_class_names_do_not_leave_the_folder(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "i.png")
    names = ["../../evil", "/etc", "..", "a/b", ".x", "fine", "FINE", "å" * 150, "nul\x01"]
    (tmp_path / "l.txt").write_text("".join(f"i.png\t{name}\n" for name in names), encoding="utf-8")
    assert main(["data", "convert", str(tmp_path / "l.txt"), str(tmp_path / "out/put")]) == 0
    made = open_dataset(tmp_path / "out/put")
    assert made.num_classes == len(names)
    assert {"FINE", "nul\x01"} < set(made.class_names)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["i.png", "l.txt", "out"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["put"]


@pytest.mark.live
def test_check_finds_everything(faces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    assert main(["data", "check", str(faces), "--json", str(report)]) == 0
    assert json.loads(report.read_text())["broken"] == 0
    (faces / "bob/1.png").write_bytes((faces / "bob/1.png").read_bytes()[:60])
    shutil.copy(faces / "ann/0.jpg", faces / "ann/9.jpg")
    shutil.copy(faces / "ann/0.jpg", faces / "zoe/9.jpg")
    (faces / "nobody").mkdir()
    for workers in ("0", "2"):
        assert main(["data", "check", str(faces), "--json", str(report), "--overwrite", "--workers", workers]) == 1
        result = json.loads(report.read_text())
        counts = {name: result[name] for name in ("images", "broken", "duplicates", "duplicates_across_classes")}
        assert counts == {"images": 11, "broken": 1, "duplicates": 2, "duplicates_across_classes": 1}
        assert [item["key"] for item in result["broken_images"]] == ["bob/1.png"]
        assert result["duplicate_images"] == [
            {"key": "ann/9.jpg", "same_as": "ann/0.jpg"},
            {"key": "zoe/9.jpg", "same_as": "ann/0.jpg"},
        ]
        assert result["empty_classes"] == ["nobody"]
    shown = capsys.readouterr()
    assert "broken: bob/1.png" in shown.out
    assert "1 broken, 2 duplicates (1 across classes), 1 empty class;" in shown.err


def test_check_of_a_damaged_rec(faces: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.rec"
    assert main(["data", "convert", str(faces), str(path)]) == 0
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert main(["data", "check", str(path), "--json", str(tmp_path / "r.json")]) == 1
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["images"] == 9
    assert result["broken"] == 9 - len(open_dataset(path))
    assert all(item["key"].isdigit() for item in result["broken_images"])


def test_stats(faces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "s.json"
    picture = tmp_path / "s.png"
    assert main(["data", "--json", str(out), "stats", str(faces), "--plot", str(picture)]) == 0
    result = json.loads(out.read_text())
    assert result["images_per_class"] == {"min": 2, "median": 3.0, "mean": 3.0, "max": 4}
    assert result["histogram"] == [{"from": 2, "to": 2, "classes": 1}, {"from": 3, "to": 4, "classes": 2}]
    assert (result["images"], result["classes"], result["largest_class"]) == (9, 3, "ann")
    assert "3–4" in capsys.readouterr().out
    assert read_image(picture).shape[0] == 3


def test_stats_of_large_classes(tmp_path: Path) -> None:
    out = tmp_path / "s.json"
    assert main(["data", "stats", "avatars:1x12345", "--json", str(out)]) == 0
    assert json.loads(out.read_text())["histogram"] == [{"from": 10000, "to": 99999, "classes": 1}]


def test_pairs(faces: Path, tmp_path: Path) -> None:
    made = [tmp_path / f"{name}.bin" for name in "abc"]
    for path, seed in zip(made, (1, 1, 2), strict=True):
        assert main(["data", "pairs", str(faces), str(path), "--pairs", "8", "--seed", str(seed)]) == 0
    assert made[0].read_bytes() == made[1].read_bytes()
    assert made[0].read_bytes() != made[2].read_bytes()
    names = {data: name for name, data in contents(faces)}
    pairs = read_pairs(made[0])
    assert pairs.is_same.tolist() == [True, False] * 4
    for number, same in enumerate(pairs.is_same):
        left, right = pairs.images[2 * number : 2 * number + 2]
        assert left != right
        assert (names[left] == names[right]) == same


@settings(max_examples=80)
@given(counts=st.lists(st.integers(1, 6), min_size=2, max_size=6), pairs=st.integers(2, 40), seed=st.integers(0, 9))
def test_no_pair_is_drawn_twice(tmp_path: Path, counts: list[int], pairs: int, seed: int) -> None:
    data = FlatImages(counts)
    labels = data.labels
    possible_same = sum(count * (count - 1) // 2 for count in counts)
    possible_different = (len(labels) ** 2 - sum(count**2 for count in counts)) // 2
    if (pairs + 1) // 2 > possible_same or pairs // 2 > possible_different:
        with pytest.raises(UsageError, match="request fewer"):
            make_pairs(data, tmp_path / "x.bin", pairs=pairs, seed=seed, overwrite=True)
        return
    make_pairs(data, tmp_path / "x.bin", pairs=pairs, seed=seed, encoding="png", overwrite=True)
    found = read_pairs(tmp_path / "x.bin")
    number = {data.png(index): index for index in range(len(data))}
    drawn = [frozenset({number[a], number[b]}) for a, b in zip(found.images[::2], found.images[1::2], strict=True)]
    assert len(set(drawn)) == pairs
    for pair, same in zip(drawn, found.is_same, strict=True):
        a, b = pair
        assert (labels[a] == labels[b]) == same


class FlatImages(EncodedDataset):
    """One-colour images, so many of each class."""

    def __init__(self, counts: list[int]) -> None:
        labels = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
        super().__init__("flat", np.random.default_rng(0).permutation(labels), [str(c) for c in counts], None)
        self._stored = [self.png(index) for index in range(len(labels))]

    def png(self, index: int) -> bytes:
        return stored(Image.new("RGB", (2, 2), (index, 0, 0)), "PNG")

    def key(self, index: int) -> str:
        return str(index)

    def encoded(self, index: int) -> bytes:
        return self._stored[index]


MISTAKES: list[tuple[list[Any], int, str]] = [
    (["check", "nowhere"], 2, "nowhere"),
    (["stats", "nowhere.rec"], 2, "nowhere.rec"),
    (["stats", "FACES", "--plot", "x.txt"], 2, "x.txt"),
    (["stats", "FACES", "--plot", "no/such/x.png"], 2, "x.png"),
    (["convert", "FACES", "FACES"], 2, "holds the source"),
    (["convert", "FACES", "FACES", "--overwrite"], 2, "holds the source"),
    (["convert", "FACES", "x.rec", "--size", "0"], 2, "--size"),
    (["convert", "FACES", "x.rec", "--max-bad-records", "-1"], 2, "--max-bad-records"),
    (["pairs", "FACES", "x.bin", "--pairs", "1"], 2, "1 pairs"),
    (["pairs", "FACES", "x.bin", "--pairs", "6000"], 2, "request fewer"),
    (["pairs", "FACES", "x.pkl"], 2, "x.pkl"),
    (["pairs", "FACES", "x.bin", "--seed", "-1"], 2, "--seed"),
    (["check", "FACES", "--workers", "-1"], 2, "--workers"),
    (["align", "FACES", "--out", "x"], 2, "required"),
    (["align", "FACES", "--out", "x", "--landmarks", "none.csv"], 2, "no landmark file none.csv"),
    (["align", "FACES", "--out", "x", "--detector", "d.onnx"], 2, "did you mean onnx:d.onnx?"),
    (["align", "FACES", "--out", "x", "--detector", "mtcn"], 2, "not 'mtcn'; did you mean mtcnn?"),
    (["align", "FACES", "--out", "x", "--detector", "onnx:none.onnx"], 2, "there is no detector none.onnx"),
    (["align", "FACES", "--out", "x", "--landmarks", "a", "--detector", "onnx:b"], 2, "not allowed with"),
    (["align", "FACES", "--out", "x", "--landmarks", "p", "--size", "0"], 2, "--size 0: it must be at least 1"),
    (
        ["align", "FACES", "--out", "x", "--landmarks", "p", "--workers", "-1"],
        2,
        "--workers -1: it must",
    ),
]


@pytest.mark.parametrize(("arguments", "code", "why"), MISTAKES)
def test_mistakes(
    arguments: list[str],
    code: int,
    why: str,
    faces: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["data", *(str(faces) if word == "FACES" else word for word in arguments)]) == code
    shown = capsys.readouterr().err
    assert re.match(r"plsc data( [a-z]+)?: error: ", shown)
    assert why in shown
    assert len(shown.splitlines()) == 1
    assert not Path("x").exists()
