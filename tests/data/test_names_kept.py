"""Conversions keep the images' names, never replace an output unasked, and survive a kill at any moment."""

import json
import os
import signal
import warnings
from pathlib import Path

import pytest
from support.pictures import picture

from plsc.data import open_dataset, read_image
from plsc.data.convert import convert
from plsc.data.dataset import EncodedDataset, ImageDataset
from plsc.errors import DataError
from plsc.tools.entry import main

NAMES = ["a/NAME_0001.png", "a/2021/NAME_0013.jpg", "b b/ü.PNG", "b b/x.jpeg"]


@pytest.fixture
def faces(tmp_path: Path) -> Path:
    for seed, name in enumerate(NAMES):
        picture(tmp_path / "faces" / name, seed)
    return tmp_path / "faces"


def run(*argv: object) -> int:
    return main(["data", *map(str, argv)])


def keys(source: Path) -> list[str]:
    data = open_dataset(source, image_size=None)
    return [data.key(index) for index in range(len(data))]


def test_there_and_back_gives_the_same_files(faces: Path, tmp_path: Path) -> None:
    out, result = tmp_path / "x/faces.rec", tmp_path / "result.json"
    assert run("convert", faces, out, "--json", result) == 0
    assert json.loads(result.read_text()) == {"out": str(out), "images": 4, "classes": 2, "left_out": 0}
    assert (tmp_path / "x/property").read_text() == "2,12,12\n"
    assert run("convert", tmp_path / "x", tmp_path / "back") == 0
    assert contents(out) == contents(tmp_path / "back") == contents(faces)
    for name in NAMES:
        assert (tmp_path / "back" / name).read_bytes() == (faces / name).read_bytes()
    lines = (tmp_path / "back/images.tsv").read_text(encoding="utf-8").splitlines()
    assert lines[0].split("\t") == ["a/2021/NAME_0013.jpg", "a", "a/2021/NAME_0013.jpg"]
    assert keys(tmp_path / "back/images.tsv") == keys(faces)
    text = out.with_name("faces.keys.tsv").read_text(encoding="utf-8").splitlines()
    assert text[:2] == ["key\tclass\tpath", "1\ta\ta/2021/NAME_0013.jpg"]
    out.with_name("faces.keys.tsv").unlink()
    assert keys(out) == ["1", "2", "3", "4"]


def test_the_suffix_follows_the_format(faces: Path, tmp_path: Path) -> None:
    assert run("convert", faces, tmp_path / "out", "--size", 8) == 0
    assert keys(tmp_path / "out") == ["a/2021/NAME_0013.jpg", "a/NAME_0001.jpg", "b b/x.jpeg", "b b/ü.jpg"]
    lines = (tmp_path / "out/images.tsv").read_text(encoding="utf-8").splitlines()
    assert lines[1].split("\t") == ["a/NAME_0001.jpg", "a", "a/NAME_0001.png"]


def test_names_that_collide_lose_no_image(tmp_path: Path) -> None:
    names = ["x.bmp", "x.jpg", "x.png", "x.png.jpg", "x.webp"]
    for seed, name in enumerate(names):
        picture(tmp_path / "in/a" / name, seed)
    assert run("convert", tmp_path / "in", tmp_path / "out", "--size", 12) == 0
    made = {path.name for path in (tmp_path / "out/a").iterdir()}
    assert made == {"x.jpg", "x.bmp.jpg", "x.png.jpg", "x.png-2.jpg", "x.webp.jpg"}
    pairs = [line.split("\t") for line in (tmp_path / "out/images.tsv").read_text().splitlines()]
    for name, _, source in pairs:
        expected = open_dataset(tmp_path / "in", image_size=12).image(sorted(names).index(Path(source).name))
        assert (read_image(tmp_path / "out" / name).float() - expected.float()).abs().mean() < 12
    assert {source: name for name, _, source in pairs}["a/x.jpg"] == "a/x.jpg"


def test_names_of_lists_stay_in_the_output(tmp_path: Path) -> None:
    inside = picture(tmp_path / "pics/p/one.png", 1)
    listed = [("pics/p/one.png", "p"), (str(inside), "p"), ("pics/p/../p/one.png", "q"), ("pics/p/one.png", "q")]
    (tmp_path / "l.txt").write_text("".join(f"{path}\t{label}\n" for path, label in listed))
    assert run("convert", tmp_path / "l.txt", tmp_path / "out") == 0
    assert sorted(keys(tmp_path / "out")) == ["p/one.png", "p/one.png.png", "q/one.png", "q/pics/p/one.png"]


HOSTILE = [
    "\tx", "\nx", "\rx", "x\ty", "\ufeffx", " x", "x ", " ", "\x1cx", "x\x85", "\xa0", "images.tsv", "\udcffx", "\\",
    "ü",
]  # fmt: skip


def test_a_written_list_is_read_whatever_the_names_are(tmp_path: Path) -> None:
    names = [*(f"{name}/one.png" for name in (*HOSTILE, "x")), *(f"z/{name}.png" for name in (*HOSTILE, "x"))]
    for seed, name in enumerate(names):
        picture(tmp_path / "in" / name, seed)
    given = open_dataset(tmp_path / "in", image_size=None)
    assert len(given) == len(names)
    for source, out in ((tmp_path / "in", "out"), (tmp_path / "out/images.tsv", "again"), (tmp_path / "x.rec", "back")):
        assert run("convert", tmp_path / "in", tmp_path / "x.rec", "--overwrite") == 0
        assert keys(tmp_path / "x.rec") == keys(tmp_path / "in")
        assert run("convert", source, tmp_path / out) == 0
        for form in (tmp_path / out, tmp_path / out / "images.tsv"):
            found = open_dataset(form, image_size=None)
            assert classes(found) == classes(given)


def classes(data: ImageDataset) -> set[frozenset[bytes]]:
    """The pictures of each class."""
    pixels = [data.image(index).numpy().tobytes() for index in range(len(data))]
    return {
        frozenset(image for image, label in zip(pixels, data.labels, strict=True) if label == wanted)
        for wanted in range(data.num_classes)
    }


def test_a_foreign_keys_file_is_named(faces: Path, tmp_path: Path) -> None:
    assert run("convert", faces, tmp_path / "x.rec") == 0
    for text in ("", "key\tclass\tpath\n", "key\tclass\tpath\n1\ta\tx.jpg\n7\ta\ty.jpg\n", "nonsense\n"):
        (tmp_path / "x.keys.tsv").write_text(text)
        with pytest.raises(DataError, match=r"x\.keys\.tsv"):
            keys(tmp_path / "x.rec")


@pytest.mark.parametrize("out", ["x.rec", "folder", "pairs.bin"])
def test_an_output_is_replaced_only_when_asked(
    out: str, faces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["pairs" if out.endswith(".bin") else "convert", faces, tmp_path / out]
    argv += ["--pairs", "2"] if out.endswith(".bin") else []
    assert run(*argv) == 0
    before = state(tmp_path)
    capsys.readouterr()
    assert run(*argv, "--size", 8) == 2
    assert (
        capsys.readouterr().err
        == f"plsc data: error: {tmp_path / out} exists already: give --overwrite to replace it\n"
    )
    assert state(tmp_path) == before
    assert run(*argv, "--size", 8, "--overwrite") == 0
    after = state(tmp_path)
    assert after != before
    assert not [name for name in after if "/." in f"/{name}"]


def test_companions_of_a_rec_are_outputs_too(faces: Path, tmp_path: Path) -> None:
    (tmp_path / "x.classes.json").write_text("{}")
    assert run("convert", faces, tmp_path / "x.rec") == 2
    assert not (tmp_path / "x.rec").exists()
    (tmp_path / "x.classes.json").unlink()
    assert run("convert", faces, tmp_path / "x.rec") == 0
    assert run("convert", faces, tmp_path / "y.rec", "--size", 8) == 0
    assert (tmp_path / "property").read_text() == "2,12,12\n"  # x.rec's


def test_what_plsc_did_not_write_is_never_replaced(
    faces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/mine.jpg").touch()
    assert run("convert", faces, tmp_path / "photos", "--overwrite") == 2
    assert "was not written by plsc" in capsys.readouterr().err
    assert (tmp_path / "photos/mine.jpg").exists()


def test_a_failure_leaves_neither_folder_nor_file(tmp_path: Path) -> None:
    (tmp_path / "in/a").mkdir(parents=True)
    (tmp_path / "in/a/broken.jpg").write_bytes(b"no image")
    assert run("convert", tmp_path / "in", tmp_path / "new/x.rec") == 1
    assert run("convert", tmp_path / "in", tmp_path / "new/out") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def state(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def killed_while(convert_it: object, calls: int) -> bool:
    """Run in a process that kills itself before its ``calls``-th rename or removal; False if it ended before."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of fork beside threads, which the child does not use
        child = os.fork()
    if child == 0:
        count = 0

        def counting(method: str) -> None:
            original = getattr(Path, method)

            def wrapper(self: Path, *args: object, **options: object) -> object:
                nonlocal count
                count += 1
                if count == calls:
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(self, *args, **options)

            setattr(Path, method, wrapper)

        for method in ("replace", "unlink"):
            counting(method)
        try:
            convert_it()  # type: ignore[operator]
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.live
@pytest.mark.slow
@pytest.mark.parametrize("out", ["x.rec", "folder"])
def test_a_kill_leaves_the_old_or_the_new_and_no_mixture(out: str, faces: Path, tmp_path: Path) -> None:
    target = tmp_path / "out" / out
    new = tmp_path / "new"
    for seed, name in enumerate(["c/1.png", "c/2.png", "d/3.png", "e/4.png", "e/5.png"]):
        picture(new / name, 100 + seed)
    expected = {tuple(contents(faces)), tuple(contents(new))}
    for calls in range(1, 20):
        convert(open_dataset(faces, image_size=None), target, quiet=True, overwrite=True)
        killed = killed_while(
            lambda: convert(open_dataset(new, image_size=None), target, quiet=True, overwrite=True), calls
        )
        found = contents(target)
        if out == "x.rec":  # numbers stand for names that were lost, never another file's names
            images = tuple(data for _, _, data in found)
            (whole,) = [each for each in expected if tuple(data for _, _, data in each) == images]
            for (name, key, _), (own_name, own_key, _) in zip(found, whole, strict=True):
                assert name in (own_name, *"012")
                assert key in (own_key, *"12345")
        else:
            assert tuple(found) in expected
        if not killed:
            break
    assert not killed
    assert calls > 1
    assert tuple(found) == tuple(contents(new))
    assert not list((tmp_path / "out").glob(".*.tmp"))


def contents(source: Path) -> list[tuple[str, str, bytes]]:
    data = open_dataset(source, image_size=None)
    assert isinstance(data, EncodedDataset)
    return [(data.class_names[int(data.labels[i])], data.key(i), data.encoded(i)) for i in range(len(data))]
