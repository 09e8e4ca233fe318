"""Folders as phones make them: every kind of picture is read or named, by every command that opens a folder."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from plsc import image_files, models
from plsc.data import open_dataset
from plsc.embedding.embedding_set import EmbeddingSet
from plsc.errors import DataError, UsageError
from plsc.tools.entry import main

HEIC_IS_READ = "HEIF" not in image_files.unread_formats()


def gradient(width: int, height: int, mode: str = "RGB") -> Any:
    """Red grows to the right."""
    row = np.zeros((1, width, 3), np.uint8)
    row[0, :, 0] = np.linspace(0, 255, width)
    return Image.fromarray(row).resize((width, height)).convert(mode)


def turned(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif.tobytes()


def write(path: Path, image: Any, **options: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix.lower() == ".heic":
        import pillow_heif

        pillow_heif.from_pillow(image).save(path, quality=90, **options)
    else:
        image.save(path, **options)


@pytest.fixture(scope="module")
def phone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three people: Ann with photos, Bob with whatever else there is, Cy with a film alone."""
    folder = tmp_path_factory.mktemp("photos") / "phone"
    write(folder / "ann/portrait.avif", gradient(48, 32), quality=90, exif=turned(6))
    write(folder / "ann/IMG_0002.JPG", gradient(4032, 3024, "L"), quality=60)  # 12 megapixels
    write(folder / "ann/IMG_0003.jpeg", gradient(8064, 6048, "L"), quality=60)  # 48
    write(folder / "ann/upright.jpg", gradient(48, 32), exif=turned(6))
    if HEIC_IS_READ:
        write(folder / "ann/IMG_0001.HEIC", gradient(48, 32), exif=turned(6))
    for name, mode in {"grey.png": "L", "print.jpg": "CMYK", "cut.png": "RGBA", "scan.tif": "RGB"}.items():
        write(folder / "bob" / name, gradient(32, 32, mode))
    write(folder / "bob/old.pgm", gradient(32, 32, "L"))
    write(folder / "bob/moving.gif", gradient(32, 32), save_all=True, append_images=[gradient(32, 32, "L")])
    (folder / "bob/broken.jpg").write_bytes((folder / "bob/print.jpg").read_bytes()[:200])
    os.mkfifo(folder / "bob/9.jpg")
    for name in ("bob/clip.MOV", "cy/clip.mov", "bob/Thumbs.db", "bob/notes.txt", "bob/.DS_Store"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"something else")
    return folder


READ = 10 + HEIC_IS_READ
LEFT_OUT = "2 files left out: 2 .mov (not a picture)"


@pytest.fixture
def source(phone: Path, tmp_path: Path) -> Path:
    """The folder by another name, since a line about it is given once."""
    (tmp_path / "phone").symlink_to(phone)
    return tmp_path / "phone"


def test_check_names_what_is_no_picture(
    source: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    result = source.parent / "check.json"
    assert main(["data", "check", str(source), "--json", str(result)]) == 1
    assert [record.getMessage() for record in caplog.records] == [f"{source}: {LEFT_OUT}"]
    found = json.loads(result.read_text())
    assert (found["images"], found["broken"], found["empty_classes"]) == (READ + 2, 2, ["cy"])
    assert found["files_left_out"] == {".mov": 2, ".db": 1, ".txt": 1}
    out = capsys.readouterr().out
    assert "9.jpg: it is no regular file" in out
    assert f"image bob/broken.jpg of {source}" in out
    assert "empty class: cy, which holds 1 .mov (not a picture)" in out


def test_stats_and_convert_say_what_is_left_out(source: Path, caplog: pytest.LogCaptureFixture) -> None:
    result = source.parent / "result.json"
    assert main(["data", "stats", str(source), "--json", str(result)]) == 0
    assert caplog.messages == [f"{source}: {LEFT_OUT}"]
    assert json.loads(result.read_text())["files_left_out"][".mov"] == 2
    assert main(["data", "convert", str(source), str(source.parent / "out"), "--size", "16"]) == 0
    left_out = [line for line in caplog.messages if line.startswith("left out: ")]
    assert len(left_out) == 2
    assert "9.jpg" in "".join(left_out)
    assert "broken.jpg" in "".join(left_out)
    assert len(open_dataset(source.parent / "out")) == READ
    copied = source.parent / "copied"
    assert main(["data", "convert", str(source), str(copied)]) == 0  # bytes are copied, with their names
    assert {path.name for path in copied.rglob("*.*")} >= {"portrait.avif", "scan.tif", "old.pgm", "moving.gif"}


def test_embed_embeds_every_picture_and_names_the_others(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "loose/x.avif", gradient(32, 32))
    (tmp_path / "loose/people").symlink_to(source)
    models.save_model(models.create("resnet8", embedding_dim=8, image_size=32), tmp_path / "model.safetensors")
    for folder in (source, tmp_path / "loose"):
        out = tmp_path / f"{folder.name}.emb"
        arguments = ["embed", str(tmp_path / "model.safetensors"), "--data", str(folder), "--out", str(out)]
        assert main([*arguments, "--workers", "0", "--allow-outside"]) == 0
        assert caplog.messages.pop() == f"{folder}: {LEFT_OUT}"
        assert "2 images could not be embedded; the first: bob/9.jpg" in capsys.readouterr().out.replace("people/", "")
        assert len(EmbeddingSet(out)) == READ + 2 + (folder != source)


@pytest.fixture
def without_heic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As where pillow-heif is not installed."""
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    monkeypatch.delitem(Image.OPEN, "HEIF", raising=False)
    found = (image_files.unread_formats, image_files.readable_suffixes)
    for function in found:
        function.cache_clear()
    yield
    for function in found:
        function.cache_clear()


@pytest.mark.usefixtures("without_heic")
def test_heic_without_its_reader(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    heic = b"\0\0\0\x18ftypmif1\0\0\0\0mif1heic" + bytes(100)
    (tmp_path / "photos/ann").mkdir(parents=True)
    for name in ("a.heic", "b.HEIC"):
        (tmp_path / "photos/ann" / name).write_bytes(heic)
    reader = "pip install plsc-torch[heic] reads them"
    with pytest.raises(
        UsageError, match=rf"holds 2 \.heic \({reader}\); give each identity".replace("[heic]", ".heic.")
    ):
        open_dataset(tmp_path / "photos")
    write(tmp_path / "photos/bob/1.png", gradient(8, 8))
    assert open_dataset(tmp_path / "photos").empty_classes == {"ann": f"2 .heic ({reader})"}
    open_dataset(tmp_path / "photos")
    assert caplog.messages == [f"{tmp_path / 'photos'}: 2 files left out: 2 .heic ({reader})"]
    (tmp_path / "list.txt").write_text("photos/ann/a.heic\tann\n")
    with pytest.raises(DataError, match=r"a\.heic of .* does not decode \(HEIC; pip install plsc-torch.heic. reads it"):
        open_dataset(tmp_path / "list.txt").image(0)
