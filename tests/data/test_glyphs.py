"""Glyphs are the same in every process, show their characters, and are selected as their specification says."""

import hashlib
import json
import pickle
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from fontTools.ttLib import TTCollection, TTFont
from fontTools.ttLib.tables.DefaultTable import DefaultTable
from PIL import Image, ImageDraw, ImageFont

from plsc.data import TrainLoader, has_reader, open_dataset
from plsc.data.glyphs import fonts, unihan
from plsc.data.glyphs.fonts import Font, characters_of, installed_fonts, typefaces
from plsc.data.transforms import RotatedDataset
from plsc.errors import DataError, UsageError
from plsc.tools.entry import main

LETTERS = "41-5A+61-7A"
TWO = "fonts=DejaVuSans+DejaVuSerif"
DIGEST = """
import hashlib
from plsc.data import open_dataset
data = open_dataset("glyphs:41-4A:fonts=DejaVuSans+DejaVuSerif:variants=2", image_size=40)
digest = hashlib.sha256()
for i in reversed(range(len(data))):
    digest.update(data.image(i).numpy().tobytes())
print(digest.hexdigest())
"""
HAN = pytest.mark.skipif(
    not {"ukai", "uming", "HanaMinA"} <= {font.name for font in installed_fonts()}
    or not Path("/usr/share/unicode/Unihan_Readings.txt.bz2").exists(),
    reason="Han fonts or Unihan are not here: apt-get install fonts-hanazono fonts-arphic-u* unicode-data",
)


@pytest.fixture
def in_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A folder in the place of the system's, beside matplotlib's fonts."""
    caches = (installed_fonts, typefaces)
    monkeypatch.setattr(fonts, "_FOLDERS", (tmp_path / "fonts",))
    (tmp_path / "fonts").mkdir()
    for cached in caches:
        cached.cache_clear()
    yield tmp_path / "fonts"
    for cached in caches:
        cached.cache_clear()


def dejavu(name: str) -> Font:
    return next(font for font in installed_fonts() if font.name == name)


def without_characters(path: Path) -> bytes:
    """A font whose table of characters is damaged."""
    content = bytearray(path.read_bytes())
    with path.open("rb") as file, TTFont(file) as tables:
        start = tables.reader.tables["cmap"].offset
    content[start : start + 200] = b"\xff" * 200
    return bytes(content)


def plain(font: Font, code: int, side: int) -> torch.Tensor:
    """A character in the middle of a picture, as Pillow draws it."""
    picture = Image.new("L", (side, side), 255)
    face = ImageFont.truetype(str(font.path), round(0.8 * side))
    left, top, right, bottom = face.getbbox(chr(code))
    ImageDraw.Draw(picture).text(((side - left - right) / 2, (side - top - bottom) / 2), chr(code), 0, font=face)
    return torch.from_numpy(np.array(picture)).float()


def unit(pictures: list[torch.Tensor]) -> torch.Tensor:
    flat = torch.stack(pictures).flatten(1)
    return torch.nn.functional.normalize(flat - flat.mean(dim=1, keepdim=True), dim=1)


def codes_of(spec: str) -> set[str]:
    data = open_dataset(spec, image_size=16)
    assert set(data.labels.tolist()) == set(range(data.num_classes))
    return set(data.class_names)


@pytest.mark.live
@pytest.mark.slow
def test_another_process_draws_the_same_pixels_in_another_order() -> None:
    data = open_dataset(f"glyphs:41-4A:{TWO}:variants=2", image_size=40)
    pictures = [data.image(index).numpy().tobytes() for index in range(len(data))]
    assert len(set(pictures)) == len(pictures) == 40
    digest = hashlib.sha256(b"".join(reversed(pictures))).hexdigest()
    other = subprocess.run([sys.executable, "-c", DIGEST], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == digest


def test_a_picture_is_the_same_in_any_selection_that_has_it() -> None:
    data = open_dataset(f"glyphs:{LETTERS}:{TWO}:variants=3", image_size=32)
    alone = open_dataset("glyphs:67:fonts=DejaVuSerif:variants=2", image_size=32)
    again = pickle.loads(pickle.dumps(data))
    index = [data.key(index) for index in range(len(data))].index("U+0067/DejaVuSerif/1")
    assert alone.key(1) == "U+0067/DejaVuSerif/1"
    assert torch.equal(data.image(index), alone.image(1))
    assert torch.equal(again.image(index), alone.image(1))
    assert data.class_names[data.labels[index]] == "U+0067 g"
    with pytest.raises(IndexError, match="no picture 2"):
        alone.image(2)


def test_pictures_show_their_characters() -> None:
    data = open_dataset(f"glyphs:41-5A:{TWO}:variants=4", image_size=48)
    references = unit(
        [plain(dejavu(name), code, 48) for code in range(0x41, 0x5B) for name in ("DejaVuSans", "DejaVuSerif")]
    )
    drawn = unit([data.image(index)[0].float() for index in range(len(data))])
    nearest = (drawn @ references.T).argmax(dim=1).numpy() // 2
    assert np.mean(nearest == data.labels) > 0.7  # one in 26 by chance; they are turned, sheared and scaled


@pytest.mark.parametrize("size", [16, 33, 64, 112, (48, 32)])
def test_any_size_gives_grey_pictures_that_hold_the_whole_glyph(size: int) -> None:
    data = open_dataset("glyphs:4D+69+2014+3a9:fonts=DejaVuSans:variants=3", image_size=size)
    for index in range(len(data)):
        picture = data.image(index)
        assert picture.shape == (3, *(size if isinstance(size, tuple) else (size, size)))
        assert picture.dtype == torch.uint8
        assert torch.equal(picture[0], picture[2])
        assert picture.is_contiguous()
        paper = int(picture.max())
        assert paper - int(picture.min()) > 60
        if isinstance(size, int):
            border = torch.cat([picture[0, 0], picture[0, -1], picture[0, :, 0], picture[0, :, -1]])
            assert border.min() >= paper - 60


def test_characters_are_those_that_the_fonts_draw() -> None:
    ft2font = pytest.importorskip("matplotlib.ft2font")
    font = dejavu("DejaVuSans")
    mapped = set(ft2font.FT2Font(str(font.path)).get_charmap())
    has = set(characters_of(font).tolist())
    assert has <= mapped
    assert {0x41, 0x3A9, 0x2014} <= has
    face = ImageFont.truetype(str(font.path), 40, layout_engine=ImageFont.Layout.BASIC)
    assert all(face.getmask(chr(code)).getbbox() is None for code in sorted(mapped - has))  # spaces
    assert {0x20, 0xA0} <= mapped - has


def test_selections_divide_and_nest(in_folder: Path) -> None:
    block = "glyphs:370-3FF+400-52F"
    everything = codes_of(block)
    seen, unseen = codes_of(f"{block}:part=seen"), codes_of(f"{block}:part=unseen")
    assert seen | unseen == everything
    assert not seen & unseen
    assert 0.05 < len(unseen) / len(everything) < 0.17
    some, more = codes_of(f"{block}:part=seen:characters=20"), codes_of(f"{block}:part=seen:characters=60")
    assert (len(some), len(more)) == (20, 60)
    assert some < more < seen
    # Other fonts draw the same characters where those are chosen by how many fonts have them.
    by, rest = (codes_of(f"{block}:least_fonts=3:characters=90:fonts={one}DejaVuSansMono") for one in ("", "-"))
    assert by <= rest
    assert len(rest) == 90
    counts = sum(
        np.isin([int(name[2:6], 16) for name in rest], characters_of(font)).astype(int) for font in typefaces()
    )
    assert counts.min() >= 3


def test_one_regular_font_stands_for_a_typeface(in_folder: Path) -> None:
    names = [font.name for font in typefaces()]
    assert {"DejaVuSans", "DejaVuSansMono", "DejaVuSerif"} <= set(names)
    assert not any("Bold" in name or "Oblique" in name for name in names)
    data = open_dataset("glyphs:41:fonts=DejaVuSans-Bold+dejavu serif", image_size=16)
    assert [data.key(index) for index in range(2)] == ["U+0041/DejaVuSans-Bold/0", "U+0041/DejaVuSerif/0"]
    left = open_dataset("glyphs:41:fonts=-DejaVuSans+DejaVu Serif", image_size=16)
    assert {font.name for font in left.fonts} == set(names) - {"DejaVuSans", "DejaVuSerif"}
    assert Font(Path("x.ttc"), "Noto Sans CJK JP", (0, 0, 0, 0)).typeface == "Noto Sans CJK"
    for family in ("Noto Sans CJK JP Light", "Noto Sans CJK JP Semi Condensed Bold Italic"):
        assert Font(Path("x.ttc"), family.replace("Semi ", ""), (0, 0, 0, 0)).typeface == "Noto Sans CJK"
    assert Font(Path("x.ttf"), "Black", (0, 0, 0, 0)).typeface == "Black"


@pytest.mark.parametrize("name", ["DejaVuSans-Bold", "DejaVuSans-BoldOblique", "dejavu sans", "DejaVu Sans"])
def test_a_typeface_is_held_out_by_any_cut_of_it(in_folder: Path, name: str) -> None:
    names = {font.name for font in typefaces()}
    left = open_dataset(f"glyphs:41:fonts=-{name}", image_size=16)
    assert {font.name for font in left.fonts} == names - {"DejaVuSans"}


def drawn_font(family: str, square: int = 500) -> Any:
    """A font whose one letter is a square."""
    pen = TTGlyphPen(None)
    for turn, point in enumerate(((0, 0), (0, square), (square, square), (square, 0))):
        (pen.lineTo if turn else pen.moveTo)(point)
    pen.closePath()
    builder = FontBuilder(1000, isTTF=True)
    builder.setupGlyphOrder([".notdef", "A"])
    builder.setupCharacterMap({0x41: "A"})
    square_glyph = pen.glyph()
    builder.setupGlyf({".notdef": square_glyph, "A": square_glyph})
    builder.setupHorizontalMetrics({".notdef": (600, 0), "A": (600, 0)})
    builder.setupHorizontalHeader(ascent=800, descent=-200)
    builder.setupNameTable({"familyName": family, "styleName": "Regular"})
    builder.setupOS2(usWeightClass=400, usWidthClass=5)
    builder.setupPost()
    return builder.font


def test_a_typeface_is_held_out_by_any_font_of_its_collection(in_folder: Path) -> None:
    collection = TTCollection()
    collection.fonts = [drawn_font("Brush CN"), drawn_font("Brush TW"), drawn_font("Pencil CN")]
    collection.save(in_folder / "hands.ttc")
    drawn_font("Brush CN Bold").save(in_folder / "brush-b.ttf")
    drawn_font("Pencil HK Light").save(in_folder / "pencil.ttf")
    everything = {font.name for font in open_dataset("glyphs:41", image_size=16).fonts}
    assert "hands" in everything
    both = {"hands", "pencil"}
    for name, gone in {"hands": both, "Brush TW": both, "Brush": both, "pencil": both, "brush-b": {"hands"}}.items():
        left = {font.name for font in open_dataset(f"glyphs:41:fonts=-{name}", image_size=16).fonts}
        assert everything - left == gone, name
    with pytest.raises(UsageError, match="no font 'Brush TW' is installed; did you mean"):  # the first alone is drawn
        open_dataset("glyphs:41:fonts=Brush TW")


def test_packages_that_are_missing_are_named_at_once(in_folder: Path) -> None:
    for name in ("uming", "HanaMinA"):
        drawn_font(name).save(in_folder / f"{name}.ttf")
    for name in ("ukai", "NotoSerifCJK-Regular"):  # uming resembles the first
        with pytest.raises(UsageError) as caught:
            open_dataset(f"glyphs:han:fonts=-{name}")
        assert str(caught.value).endswith(
            f"no font '{name}' is installed; apt-get install fonts-babelstone-han fonts-ipamj-mincho fonts-arphic-ukai "
            "fonts-wqy-zenhei fonts-horai-umefont fonts-noto-cjk (116 MB)"
        )


def test_a_font_that_draws_outside_of_its_em_is_refused(in_folder: Path) -> None:
    drawn_font("Large", 32_000).save(in_folder / "large.ttf")
    with pytest.raises(DataError, match=r"large\.ttf draws U\+0041 outside of its em; leave the font out"):
        open_dataset("glyphs:41:fonts=large", image_size=16).image(0)


def test_a_font_that_lists_more_characters_than_there_are_has_none(in_folder: Path) -> None:
    font = drawn_font("Long")
    groups = struct.pack(">III", 0, 0x10FFFF, 1) * 2
    subtable = struct.pack(">HHIII", 12, 0, 16 + len(groups), 0, 2) + groups
    table = DefaultTable("cmap")
    table.data = struct.pack(">HHHHI", 0, 1, 3, 10, 12) + subtable
    font["cmap"] = table
    font.save(in_folder / "long.ttf")
    assert len(characters_of(dejavu("long"))) == 0


def test_damaged_names_are_passed_over_in_silence(in_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    drawn_font("Whole").save(in_folder / "whole.ttf")
    content = bytearray((in_folder / "whole.ttf").read_bytes())
    with (in_folder / "whole.ttf").open("rb") as file, TTFont(file) as tables:
        start = tables.reader.tables["name"].offset
    content[start + 14 : start + 18] = b"\x7f\xff\x7f\xff"  # the length and place of the first name
    (in_folder / "whole.ttf").write_bytes(content)
    installed_fonts.cache_clear()
    assert len(open_dataset("glyphs:41", image_size=16)) > 3
    assert not caplog.messages


def test_fonts_are_those_of_the_folders_alone(in_folder: Path, tmp_path: Path) -> None:
    source = dejavu("DejaVuSans").path
    shutil.copy(source, tmp_path / "outside.ttf")
    shutil.copy(source, in_folder / "inside.ttf")
    (in_folder / "link.ttf").symlink_to(tmp_path / "outside.ttf")
    (in_folder / "again.ttf").symlink_to(in_folder / "inside.ttf")
    (in_folder / "damaged.ttf").write_bytes(source.read_bytes()[:900])
    (in_folder / "no_characters.ttf").write_bytes(without_characters(source))
    (in_folder / "none.otf").write_bytes(b"")
    installed_fonts.cache_clear()
    names = {font.name for font in installed_fonts()}
    assert "inside" in names
    assert not names & {"outside", "link", "again", "damaged", "none", "cmr10"}
    with pytest.raises(UsageError, match="no font '/etc/x' is installed"):
        open_dataset("glyphs:41:fonts=/etc/x")
    assert len(characters_of(dejavu("no_characters"))) == 0
    data = open_dataset("glyphs:41:fonts=inside", image_size=16)
    (in_folder / "inside.ttf").unlink()
    with pytest.raises(DataError, match=r"inside\.ttf cannot draw U\+0041"):
        data.image(0)


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("glyphs:", "is not glyphs:BLOCK"),
        ("glyphs:hna", "a block is han, kana or a range as 4E00-9FFF, not 'hna'; did you mean han?"),
        ("glyphs:41-", "a range as 4E00-9FFF"),
        ("glyphs:41-5Z", "a range as 4E00-9FFF"),
        ("glyphs:han:font=ukai", "there is no key 'font'; did you mean fonts?"),
        ("glyphs:41:seed=3", "there is no key 'seed'; the form is glyphs:BLOCK"),
        ("glyphs:41:variants", "variants takes one value, once"),
        ("glyphs:41:variants=2:variants=3", "variants takes one value, once"),
        ("glyphs:41:variants=0", "variants takes a number of at least 1, not '0'"),
        ("glyphs:41:characters=２", "characters takes a number"),
        ("glyphs:41:part=sene", "part is seen or unseen, not 'sene'; did you mean seen?"),
        ("glyphs:41:fonts=DejaVuSanz", "no font 'DejaVuSanz' is installed; did you mean DejaVuSans?"),
        ("glyphs:41:fonts=+", r"no font '' is installed; apt-get install fonts-hanazono .* \(146 MB\)$"),
        ("glyphs:41:fonts=-", "no font '' is installed; apt-get install fonts-hanazono "),
        ("glyphs:41:fonts=-DejaVuSanz", "no font 'DejaVuSanz' is installed; did you mean DejaVuSans?"),
        ("glyphs:E000-E001:fonts=DejaVuSerif", r"apt-get install fonts-hanazono .* \(146 MB\) brings Han fonts"),
        ("glyphs:41:least_fonts=900", "no character is left that so many installed fonts have"),
        ("glyphs:41-5A:fonts=DejaVuSans:variants=900000000", "at most 1,000,000,000 pictures"),
        ("glyphs:41:labels=character+radicals", "labels are character, .*, not 'radicals'; did you mean radical?"),
        ("glyphs:41:labels=radical", "labels begin with character"),
        ("glyphs:41:labels=character+radical+radical", "each is there once"),
    ],
)
def test_a_wrong_specification_is_refused_in_one_line(in_folder: Path, spec: str, why: str) -> None:
    with pytest.raises(UsageError, match=why) as caught:
        open_dataset(spec, image_size=16)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("size", [15, 513])
def test_a_size_out_of_range_is_refused(size: int) -> None:
    with pytest.raises(UsageError, match=f"image_size {size}"):
        open_dataset("glyphs:41:fonts=DejaVuSans", image_size=size)


def test_without_fonttools_its_name_is_said(in_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fontTools.ttLib", None)
    with pytest.raises(UsageError, match="pip install fonttools"):
        open_dataset("glyphs:41", image_size=16)


def test_drawn_sets_are_told_from_paths() -> None:
    assert has_reader("glyphs:han")
    assert has_reader("avatars:2x3")
    assert not any(has_reader(path) for path in ("glyphs", "faces:1x2", Path("avatars"), "./glyphs:han", ""))


@pytest.fixture
def unihan_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Unihan's files, in which letters have radicals, strokes and readings as characters do."""
    monkeypatch.setattr(unihan, "_FOLDER", tmp_path)
    unihan._unihan.cache_clear()
    (tmp_path / "Unihan_IRGSources.txt").write_text(
        "# Unihan\nU+0041\tkRSUnicode\t9.5 30.2\nU+0042\tkRSUnicode\t9'.12\nU+0043\tkRSUnicode\t120.4\n"
        "U+0041\tkTotalStrokes\t7\nU+0042\tkTotalStrokes\t12 11\nU+0043\tkTotalStrokes\t7\n"
    )
    (tmp_path / "Unihan_Readings.txt").write_text(
        "U+0041\tkMandarin\tlǜ lù\nU+0041\tkJapaneseOn\tRYO\nU+0043\tkMandarin\tzhōng\n"
    )
    yield tmp_path
    unihan._unihan.cache_clear()


def test_further_labels_are_classes_after_the_characters(unihan_folder: Path) -> None:
    spec = f"glyphs:41-44:{TWO}:variants=2:labels=character+radical+strokes+reading"
    with pytest.raises(UsageError, match="has 4 labels a picture, and one is wanted"):
        open_dataset(spec)
    data = open_dataset(spec, image_size=16, label_columns=None)
    assert list(data.class_names) == [
        *("U+0041 A", "U+0042 B", "U+0043 C", "U+0044 D"),
        *("radical 9", "radical 120", "strokes 7", "strokes 12", "reading lü", "reading zhong"),
    ]
    assert data.num_classes == 10
    assert data.labels[::4].tolist() == [[0, 4, 6, 8], [1, 4, 7, -1], [2, 5, 6, 9], [3, -1, -1, -1]]
    assert np.array_equal(data.labels, data.labels[::4].repeat(4, axis=0))
    loader = TrainLoader(data, batch_size=6, rank=0, world_size=1, seed=0, augment="none", cache=None)
    images, labels = next(iter(loader))
    assert images.shape == (6, 3, 16, 16)
    assert torch.equal(labels, torch.from_numpy(data.labels[loader.indices]))


@pytest.mark.slow
def test_a_run_trains_on_every_label(unihan_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = f"glyphs:41-46:{TWO}:variants=4:labels=character+radical+strokes"
    small = {"steps": 3, "data.image_size": 32, "data.batch_size": 8, "data.workers": 0, "optim.warmup_steps": 0}
    small |= {"data.train": source, "log.to": "[]", "log.every_steps": 1}
    options = [word for key, value in small.items() for word in (f"--{key}", str(value))]
    assert main(["train", "avatars_quickstart", *options, "--eval.sets", f"glyphs:61-66:{TWO}", "--out", "run"]) == 0
    classes = json.loads(Path("run/classes.json").read_text())["classes"]
    assert classes[5:] == ["U+0046 F", "radical 9", "radical 120", "strokes 7", "strokes 12"]
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 3
    assert np.isfinite(losses).all()
    with pytest.raises(UsageError, match="one label a picture"):
        RotatedDataset(open_dataset(source, image_size=16, label_columns=None))


@pytest.mark.slow
def test_without_unihan_its_package_is_named(unihan_folder: Path) -> None:
    (unihan_folder / "Unihan_Readings.txt").unlink()
    with pytest.raises(UsageError, match="apt-get install unicode-data"):
        open_dataset("glyphs:41:labels=character+strokes", label_columns=None)


@HAN
@pytest.mark.slow
def test_han_characters_of_the_systems_fonts() -> None:
    spec = "glyphs:han:least_fonts=3:fonts=ukai+uming+HanaMinA:labels=character+radical+strokes+reading"
    data = open_dataset(spec, image_size=48, label_columns=None)
    names = list(data.class_names)
    assert sum(name.startswith("radical") for name in names) == 214
    row = data.labels[np.flatnonzero(data.labels[:, 0] == names.index("U+4E2D 中"))]
    assert [[names[label] for label in labels[1:]] for labels in row] == [
        ["radical 2", "strokes 4", "reading zhong"]
    ] * 3
    assert 30_000 < np.unique(data.labels[:, 0]).size < 45_000
    pictures = [data.image(index) for index in np.flatnonzero(data.labels[:, 0] == names.index("U+4E2D 中"))]
    assert all(picture.float().std() > 10 for picture in pictures)


@HAN
def test_characters_without_a_drawing_are_left_out() -> None:
    font = dejavu("ukai")
    face = ImageFont.truetype(str(font.path), 40)
    mapped = {0x359E, 0x360E, 0x4E2D}  # the font maps the first two to blank glyphs
    assert {code for code in mapped if face.getmask(chr(code)).getbbox()} == {0x4E2D}
    assert mapped & set(characters_of(font).tolist()) == {0x4E2D}
