"""Verification sets of LFW's own form: pairs.txt and pictures by name."""

from pathlib import Path

import pytest
from support.pictures import picture

from plsc.data import read_pairs
from plsc.data.pair_list import read_pair_list
from plsc.errors import DataError
from plsc.evaluation.pairs import fold_bounds
from plsc.tools.entry import main


def run(*argv: object) -> int:
    return main(["data", *map(str, argv)])


LIST = (
    """10\t1
person-a\t1\t2
person-a\t1\tperson-b\t3
"""
    + "person-b\t1\t3\nperson-b\t2\tperson-a\t2\n" * 9
)


@pytest.fixture
def faces(tmp_path: Path) -> Path:
    for seed, name in enumerate(["person-a_0001", "person-a_0002", "person-b_0001", "person-b_0002", "person-b_0003"]):
        picture(tmp_path / "faces" / name.split("_")[0] / f"{name}.png", seed)
    (tmp_path / "pairs.txt").write_text(LIST)
    return tmp_path / "faces"


def image(faces: Path, name: str) -> bytes:
    return (faces / name.split("_")[0] / f"{name}.png").read_bytes()


@pytest.mark.parametrize("source", ["folder", "rec", "flat"])
def test_the_lists_pairs_in_the_lists_order(
    source: str, faces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = faces
    if source == "rec":
        data = tmp_path / "faces.rec"
        assert run("convert", faces, data) == 0
    if source == "flat":
        data = tmp_path / "flat"
        data.mkdir()
        for path in faces.rglob("*.png"):
            (data / path.name).write_bytes(path.read_bytes())
    capsys.readouterr()
    assert run("pairs", data, tmp_path / "lfw.bin", "--list", tmp_path / "pairs.txt") == 0
    assert capsys.readouterr().out == (
        f"{tmp_path / 'lfw.bin'}: 20 pairs, 10 of them the same identity, from 5 images of 2 identities, in 10 folds\n"
    )
    made = read_pairs(tmp_path / "lfw.bin")
    assert made.is_same.tolist() == [True, False] * 10
    assert [made.images[i] for i in range(4)] == [
        image(faces, name) for name in ("person-a_0001", "person-a_0002", "person-a_0001", "person-b_0003")
    ]
    assert fold_bounds(len(made)).tolist() == list(range(0, 21, 2))  # the list's own folds


def test_missing_pictures_are_counted_and_named(
    faces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (faces / "person-b/person-b_0002.png").unlink()
    assert run("pairs", faces, tmp_path / "x.bin", "--list", tmp_path / "pairs.txt") == 1
    assert "1 of the list's 5 images are missing in" in (error := capsys.readouterr().err)
    assert "person-b_0002; add them" in error
    assert run("pairs", faces, tmp_path / "y.bin", "--list", tmp_path / "pairs.txt", "--skip-missing") == 0
    assert "11 pairs, 10 of them the same identity, from 4 images of 2 identities, 9 pairs left out" in (
        capsys.readouterr().out
    )
    assert read_pairs(tmp_path / "y.bin").is_same.tolist() == [True, False] + [True] * 9
    assert run("pairs", "avatars:3x3", tmp_path / "x.bin", "--list", tmp_path / "pairs.txt") == 1
    assert "its first is avatar-0/0" in capsys.readouterr().err
    assert not (tmp_path / "x.bin").exists()


def test_a_name_that_two_images_have_is_refused(
    faces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture(faces / "person-a/old/person-a_0001.jpg")
    assert run("pairs", faces, tmp_path / "x.bin", "--list", tmp_path / "pairs.txt") == 1
    assert "two images named person-a_0001" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "lists no pair"),
        ("10 300\n", "lists no pair"),
        ("2\t1\na\t1\t2\n", "announces 2 folds of 1 same and 1 different pairs, and lists 1 pair"),
        ("a 1\n", "line 1"),
        ("a 1 2\na 1 b x\n", "line 2"),
        ("a 1 2\n\na 1 b 2 3\n", "line 3"),
    ],
)
def test_a_list_of_another_form_is_one_line(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text(text)
    with pytest.raises(DataError, match=message):
        read_pair_list(tmp_path / "p.txt")


def test_blanks_and_a_missing_first_line_are_read(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("a 1 2\nb 3 c 4\n")
    pairs = read_pair_list(tmp_path / "p.txt")
    assert (pairs.names, pairs.folds) == ([("a_0001", "a_0002"), ("b_0003", "c_0004")], 0)


def test_options_of_drawn_pairs_do_not_go_with_a_list(faces: Path, tmp_path: Path) -> None:
    assert run("pairs", faces, tmp_path / "x.bin", "--list", tmp_path / "pairs.txt", "--pairs", 6) == 2
    assert run("pairs", faces, tmp_path / "x.bin", "--list", tmp_path / "none.txt") == 2
    assert run("pairs", faces, tmp_path / "x.bin", "--skip-missing") == 2
