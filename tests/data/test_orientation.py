"""The same bytes give the same pixels in every decoder, turned by their EXIF and by nothing else."""

import importlib.util
import io
import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from PIL import Image, PngImagePlugin
from support.jpeg_decoders import ALL, decoding_by
from support.pictures import stored

from plsc.data.codec import decode_image, to_rgb_tensor
from plsc.image_files import decode_rgb, open_header

Turn = Callable[[Any], Any]
SHORT, LONG, ASCII = 3, 4, 2
PICTURE = np.random.default_rng(0).integers(0, 256, (3, 4, 3), np.uint8).repeat(8, axis=0).repeat(8, axis=1)
XMP = b'<x:xmpmeta><rdf:Description tiff:Orientation="%d"/></x:xmpmeta>'
TURNS: list[Turn] = [  # by orientation
    *(lambda p: p, lambda p: p, np.fliplr, lambda p: np.rot90(p, 2), np.flipud, lambda p: p.swapaxes(0, 1)),
    *(lambda p: np.rot90(p, -1), lambda p: np.rot90(p, 2).swapaxes(0, 1), np.rot90, lambda p: p),
]


def exif(value: int, kind: int = SHORT, order: str = ">", tag: int = 0x0112) -> bytes:
    entry = struct.pack(f"{order}HHI{'I' if kind == LONG else 'Hxx'}", tag, kind, 1, value)
    head = struct.pack(f"{order}HIH", 42, 8, 2) + struct.pack(f"{order}HHII", 0x0100, LONG, 1, 24)
    return b"Exif\0\0" + (b"MM" if order == ">" else b"II") + head + entry + bytes(4)


def prefixed(times: int, content: bytes) -> bytes:
    return b"Exif\0\0" * times + content.removeprefix(b"Exif\0\0")


def xmp(value: int) -> bytes:
    return b"http://ns.adobe.com/xap/1.0/\0" + XMP % value


def jpeg(*contents: bytes, at: bytes = b"") -> bytes:
    """The picture with APP1 segments, in front or before the marker ``at``."""
    data = stored(Image.fromarray(PICTURE), "JPEG", quality=95)
    place = data.index(at) if at else 2
    segments = b"".join(b"\xff\xe1" + struct.pack(">H", len(content) + 2) + content for content in contents)
    return data[:place] + segments + data[place:]


def heic(content: bytes) -> bytes:
    """The picture as iPhones store it: turned by a box of its own, and described by EXIF besides."""
    import pillow_heif

    file = io.BytesIO()
    pillow_heif.from_pillow(Image.fromarray(PICTURE)).save(file, quality=95, exif=content)
    return file.getvalue()


def files() -> Iterator[tuple[str, bytes, int]]:
    """Name, file, and the orientation that it has to be turned by."""
    for kind in (SHORT, LONG):
        for order in "<>":
            for value in range(10):
                yield f"{kind} {order} {value}", jpeg(exif(value, kind, order)), value
    yield "XMP before EXIF", jpeg(xmp(6), exif(6)), 6
    yield "XMP after EXIF that disagrees", jpeg(exif(6), xmp(3)), 6
    yield "XMP before EXIF that disagrees", jpeg(xmp(3), exif(6)), 6
    yield "XMP alone", jpeg(xmp(6)), 1
    yield "XMP and EXIF without orientation", jpeg(exif(6, tag=0x0110), xmp(6)), 1
    for times in (2, 3):
        for order in "<>":
            for value in range(10):
                yield f"prefix {times} times {order} {value}", jpeg(prefixed(times, exif(value, order=order))), value
        for kind in ("PNG", "WEBP"):
            lossless: dict[str, Any] = {"lossless": True} if kind == "WEBP" else {}
            data = stored(Image.fromarray(PICTURE), kind, exif=prefixed(times, exif(8)), **lossless)
            yield f"{kind} of EXIF's prefix {times} times", data, 8
    yield "prefix alone, then EXIF", jpeg(prefixed(2, b""), exif(5)), 5
    yield "prefix twice in the second of two", jpeg(xmp(3), exif(6), prefixed(2, exif(3))), 6
    for between in (b"\0\0", b"\xff\0", b"\xff\xff\xff", b"\xff\xd0"):
        data = jpeg(exif(7), at=b"\xff\xdb")
        yield f"EXIF behind {between.hex()}", data.replace(b"\xff\xe1", between + b"\xff\xe1", 1), 7
    yield "EXIF behind other segments", jpeg(b"", bytes(600), xmp(2), b"Exif", exif(4)), 4
    yield "two EXIF", jpeg(exif(6), exif(3)), 6
    yield "truncated EXIF", jpeg(exif(6)[:-12]), 1
    yield "EXIF of another type", jpeg(exif(6, ASCII)), 1
    yield "EXIF after the frame's header", jpeg(exif(6), at=b"\xff\xda"), 6
    yield "no order of bytes", jpeg(b"Exif\0\0junk" + bytes(40)), 1
    frames = [Image.fromarray(PICTURE), Image.fromarray(255 - PICTURE)]
    yield "MPO", stored(frames[0], "MPO", save_all=True, append_images=frames[1:], exif=exif(6), quality=95), 6
    text = PngImagePlugin.PngInfo()
    text.add_itxt("XML:com.adobe.xmp", (XMP % 6).decode())
    for kind in ("PNG", "WEBP"):
        options: dict[str, Any] = {"lossless": True} if kind == "WEBP" else {}
        yield f"{kind} of EXIF", stored(frames[0], kind, exif=exif(6), **options), 6
        options |= {"pnginfo": text} if kind == "PNG" else {"xmp": XMP % 6}
        yield f"{kind} of XMP", stored(frames[0], kind, **options), 1
        yield f"{kind} of both", stored(frames[0], kind, exif=exif(8), **options), 8
    late = stored(frames[0], "PNG", exif=exif(6))
    start, end = late.index(b"eXIf") - 4, late.index(b"IDAT") - 4
    yield "PNG of EXIF behind its pixels", late[:start] + late[end:-12] + late[start:end] + late[-12:], 6
    profile = PngImagePlugin.PngInfo()
    profile.add_text("Raw profile type exif", f"\nexif\n{len(exif(6)):8}\n{exif(6).hex()}\n")
    yield "PNG of ImageMagick", stored(frames[0], "PNG", pnginfo=profile), 6
    yield "TIFF", stored(frames[0], "TIFF", tiffinfo={0x0112: 6}), 6
    for value in range(1, 9):
        yield f"AVIF {value}", stored(frames[0], "AVIF", quality=95, exif=exif(value)), value
        if importlib.util.find_spec("pillow_heif") is not None:
            yield f"HEIC {value}", heic(exif(value)), value


@pytest.mark.parametrize(("data", "orientation"), [pytest.param(*rest, id=name) for name, *rest in files()])
def test_every_decoder_turns_alike(data: bytes, orientation: int) -> None:
    expected = TURNS[orientation](PICTURE)
    by_pillow = decode_rgb(data, "x", 10**6)
    assert by_pillow.shape == expected.shape
    assert np.abs(by_pillow.astype(int) - expected).mean() < 16  # chroma is subsampled
    for name in ALL:
        with decoding_by(name):
            assert np.array_equal(decode_image(data, "x").permute(1, 2, 0).numpy(), by_pillow), name
    with open_header(data) as image:
        for pixels in (to_rgb_tensor(data), to_rgb_tensor(image)):
            assert (pixels.permute(1, 2, 0).numpy() == by_pillow).all()
