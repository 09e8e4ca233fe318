"""Every kind of picture becomes uint8 RGB; bombs and rubbish are refused by name."""

import io
import struct
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.pictures import stored

from plsc.data import decode_image, read_image
from plsc.data.codec import encode_image, image_pixels
from plsc.errors import DataError
from plsc.image_files import MAX_SCANS, SUFFIXES, decode_rgb, jpeg_size, open_header, suffix_of
from plsc.models.preprocessing import resize_image


def gradient(width: int = 24, height: int = 16) -> Any:
    rows, columns = np.mgrid[0:height, 0:width]
    pixels = np.stack([columns * 9, rows * 12, np.full_like(rows, 90)], axis=2)
    return Image.fromarray(pixels.astype(np.uint8))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "AVIF", "HEIF"])
def test_formats(kind: str) -> None:
    if kind == "HEIF":
        pytest.importorskip("pillow_heif", reason="needs pillow-heif").register_heif_opener()
    options: dict[str, dict[str, Any]] = {"WEBP": {"lossless": True}, "JPEG": {"quality": 95, "subsampling": 0}}
    options |= {"AVIF": {"quality": 95, "subsampling": "4:4:4"}, "HEIF": {"quality": 95, "chroma": "444"}}
    data = stored(gradient(), kind, **options.get(kind, {}))
    image = decode_image(data, "x")
    assert (image.shape, image.dtype) == ((3, 16, 24), torch.uint8)
    expected = torch.from_numpy(np.array(gradient())).permute(2, 0, 1)
    error = (image.int() - expected.int()).abs().max()
    assert error <= {"JPEG": 12, "GIF": 40, "AVIF": 12, "HEIF": 12}.get(kind, 0)
    assert image_pixels(data) == (16, 24)
    assert suffix_of(data) == SUFFIXES[kind][0]


@pytest.mark.parametrize(
    ("kind", "mode"),
    [("PNG", mode) for mode in ("1", "L", "LA", "P", "RGBA", "I;16")]
    + [("JPEG", mode) for mode in ("L", "RGB", "CMYK")]
    + [("TIFF", mode) for mode in ("1", "L", "LA", "P", "RGBA", "I;16", "I", "CMYK", "F")],
)
def test_modes(kind: str, mode: str) -> None:
    if mode in ("I;16", "I"):
        image: Any = Image.fromarray(np.full((6, 8), 200 << 8, np.uint16 if mode == "I;16" else np.int32))
    else:
        image = Image.new("L", (8, 6), 255 if mode == "1" else 200).convert("L" if mode == "LA" else mode)
        image = image.convert(mode)
    decoded = decode_image(stored(image, kind), "x")
    assert (decoded.shape, decoded.dtype) == ((3, 6, 8), torch.uint8)
    assert (decoded.int() - (255 if mode == "1" else 200)).abs().max() <= 2


def test_transparent_pixels_are_white() -> None:
    ink = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    ink.putpixel((1, 1), (0, 0, 0, 255))
    for image in (ink, ink.convert("LA"), ink.convert("P")):
        decoded = decode_image(stored(image, "PNG"), "x")
        assert decoded[:, 0, 0].tolist() == [255, 255, 255]
        assert decoded[:, 1, 1].tolist() == [0, 0, 0]


def png_of_size(width: int, height: int) -> bytes:
    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def jpeg_of_size(width: int, height: int) -> bytes:
    data = bytearray(stored(gradient(), "JPEG"))
    place = data.index(b"\xff\xc0")
    struct.pack_into(">HH", data, place + 5, height, width)
    return bytes(data)


@pytest.mark.parametrize("size", [(13_000, 13_000), (9_000, 8_000), (60_000, 60_000)])
@pytest.mark.parametrize("make", [png_of_size, jpeg_of_size])
def test_bombs_are_refused_before_decoding(size: tuple[int, int], make: Any) -> None:
    data = make(*size)
    for kind in ("JPEG", "PNG"):  # imports are no pixels
        decode_image(stored(gradient(), kind), "x")
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=r"bomb has .* pixels"):
            decode_image(data, "bomb")
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


def test_the_limit_is_a_parameter() -> None:
    for kind in ("JPEG", "PNG"):
        data = stored(gradient(), kind)
        assert decode_image(data, "x", max_pixels=24 * 16).shape == (3, 16, 24)
        with pytest.raises(DataError, match="x has 24 x 16 pixels"):
            decode_image(data, "x", max_pixels=24 * 16 - 1)


def tiled_tiff(side: int, tile: int) -> bytes:
    body = zlib.compress(bytes(tile * tile))
    fields = {256: side, 257: side, 258: 8, 259: 8, 262: 1, 277: 1, 322: tile, 323: tile, 324: 0, 325: len(body)}
    place = 8 + 2 + 12 * len(fields) + 4
    fields[324] = place
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in fields.items())
    return b"II*\0" + struct.pack("<IH", 8, len(fields)) + entries + bytes(4) + body


def heic(side: int, shown: int, tile: int | None) -> bytes:
    """Grey; ``shown`` pixels of a side's ``side`` by the header, because it is cropped, or a grid of tiles says so."""
    import pillow_heif

    file = io.BytesIO()
    box = struct.pack(">I4s8I", 40, b"clap", shown, 1, shown, 1, 0, 1, 0, 1)  # as long as the profile's
    options = {"icc_profile": bytes(28)} if tile is None else {"tile_size": tile}
    pillow_heif.from_pillow(Image.new("RGB", (side, side), "grey")).save(file, **options)
    data = file.getvalue()
    if tile is not None:
        return data.replace(struct.pack(">II", side, side), struct.pack(">II", shown, shown))
    place = data.index(b"prof") - 8
    return data[:place] + box + data[place + len(box) :]


def test_what_is_larger_than_the_picture_in_it_is_counted() -> None:
    assert decode_image(tiled_tiff(8, 64), "x", max_pixels=64 * 64).shape == (3, 8, 8)
    with pytest.raises(DataError, match="x has 64 x 64 pixels, more than the 4,095 allowed"):
        decode_image(tiled_tiff(8, 64), "x", max_pixels=64 * 64 - 1)


@pytest.mark.parametrize("tile", [None, 64])
def test_a_heic_larger_than_what_it_shows_is_counted(tile: int | None) -> None:
    pytest.importorskip("pillow_heif", reason="needs pillow-heif")
    data = heic(128, 64, tile)
    assert image_pixels(data) == (64, 64)
    with open_header(data) as image:
        if tile and not image.info.get("tiling"):
            pytest.skip("this pillow-heif does not tell of grids")
    if tile is None:
        assert decode_image(data, "x", max_pixels=128 * 128).shape == (3, 64, 64)
    with pytest.raises(DataError, match="x has 128 x 128 pixels, more than the 16,383 allowed"):
        decode_image(data, "x", max_pixels=128 * 128 - 1)


@pytest.mark.parametrize("data", [b"", b"\xff\xd8\xff", b"text", b"%!PS-Adobe-3.0 EPSF-3.0\n", b"\x89PNG\r\n\x1a\n"])
def test_no_images(data: bytes) -> None:
    with pytest.raises(DataError, match="thing"):
        decode_image(data, "thing")
    with pytest.raises(DataError):
        image_pixels(data)


def test_jpeg_header_agrees_with_pillow() -> None:
    for options in ({}, {"progressive": True}, {"exif": b"Exif\0\0" + bytes(500)}, {"comment": b"\xff\xc0" * 40}):
        data = stored(gradient(31, 7), "JPEG", **options)
        assert jpeg_size(data) == (31, 7)


def test_read_image(tmp_path: Path) -> None:
    gradient().save(tmp_path / "x.png")
    assert read_image(tmp_path / "x.png").shape == (3, 16, 24)
    with pytest.raises(DataError, match=r"nowhere\.png"):
        read_image(tmp_path / "nowhere.png")


def test_resize_and_encode() -> None:
    image = torch.from_numpy(np.array(gradient(40, 20))).permute(2, 0, 1)
    assert resize_image(image, 10).shape == (3, 10, 10)
    same = resize_image(image[:, :, :20], 20)
    assert torch.equal(same, image[:, :, :20])
    assert torch.equal(decode_image(encode_image(image, "png"), "x"), image)
    assert (decode_image(encode_image(image, "jpeg"), "x").int() - image.int()).abs().float().mean() < 2


def scans(count: int, tail: bytes = b"") -> bytes:
    """A progressive JPEG whose last scan occurs ``count`` times more; ``tail`` follows its end."""
    data = stored(gradient(), "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    return data[:-2] + data[last:-2] * count + data[-2:] + tail


def test_scans_of_a_jpeg_are_limited() -> None:
    for decode in (lambda data: decode_image(data, "x"), lambda data: decode_rgb(data, "x", 10_000)):
        assert decode(scans(MAX_SCANS // 2)) is not None
        with pytest.raises(DataError, match="x is a JPEG of more than 100 scans"):
            decode(scans(MAX_SCANS + 1))
        # what follows the end, as a film behind a phone's still, is no scan of this image
        assert decode(scans(0, tail=b"\xff\xda\0\x02" * 1000)) is not None
        # nor is what stands in a comment
        assert decode(stored(gradient(), "JPEG", comment=b"\xff\xda" * 1000)) is not None


def test_the_first_frame_counts() -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue", "lime")]
    for kind in ("WEBP", "PNG", "GIF"):
        data = stored(frames[0], kind, save_all=True, append_images=frames[1:], duration=10)
        assert decode_image(data, "x")[:, 4, 4].tolist()[0] > 250
