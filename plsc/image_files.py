"""Encoded images to RGB pixels by Pillow, without torch: a process that only decodes takes 40 MB.

Every file is hostile: pixels and scans are counted before anything is decoded.

A picture is turned upright by the orientation in its EXIF, as browsers show it: XMP is ignored. It is read here alone,
so that every decoder gives the same pixels. Two kinds are turned while they are loaded, by what they have besides EXIF:
TIFF by Pillow, HEIC by pillow-heif. Pillow hands on an AVIF's turning as EXIF.
"""

import importlib.util
import io
import re
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from plsc.errors import DataError

Pixels = npt.NDArray[np.uint8]
Segment = tuple[int, int, int]  # of a JPEG: marker, start and end of its content

MAX_SCANS = 100  # of a progressive JPEG; encoders write about 10, and each costs as much as a whole baseline image

# Formats that Pillow may open: pixels only, nothing that runs an interpreter (EPS) or reads other files. How their
# files begin; and their suffixes, in lower case, the usual one first. HEIF is pillow-heif's.
_KINDS = {
    "JPEG": (rb"\xff\xd8\xff", ".jpg .jpeg .jfif"),
    "PNG": (rb"\x89PNG\r\n\x1a\n", ".png"),
    "WEBP": (rb"RIFF", ".webp"),
    "BMP": (rb"BM", ".bmp"),
    "GIF": (rb"GIF8", ".gif"),
    "TIFF": (rb"II\*\0|MM\0\*", ".tiff .tif"),
    "PPM": (rb"P[1-6][\s#]", ".pnm .pgm .ppm .pbm"),
    "AVIF": (rb"....ftypavi[fs]", ".avif"),
    "HEIF": (rb"(?!)", ".heic .heif .hif"),  # by is_heic
}
SUFFIXES = {name: tuple(suffixes.split()) for name, (_, suffixes) in _KINDS.items()}
_SIGNATURES = {name: re.compile(signature, re.DOTALL) for name, (signature, _) in _KINDS.items()}
FORMATS = tuple(SUFFIXES)
PICTURE_SUFFIXES = tuple(suffix for suffixes in SUFFIXES.values() for suffix in suffixes)  # whether read here or not
_HEIC_BRANDS = {brand + kind for brand in (b"hei", b"hev") for kind in (b"c", b"x", b"m", b"s")}
_LONGEST_FTYP = 256  # bytes of the first box that are looked at: 60 brands
_EXIF = b"Exif\0\0"
_EXIF_PREFIXES = re.compile(rb"\A(?:Exif\0\0)+")  # some phones write two; Pillow and browsers skip all
_ORIENTATION, _SHORT, _LONG = 0x0112, 3, 4  # a tag, and types of its value
_TRANSPOSES = (  # by orientation, from 2 on: names in Pillow's Image.Transpose
    *("FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM"),
    *("TRANSPOSE", "ROTATE_270", "TRANSVERSE", "ROTATE_90"),
)
_DIVISORS = (1, 2, 4, 8)  # of a JPEG's sides: libjpeg skips the rest of each 8x8 block's frequencies
_TILE_WIDTH, _TILE_LENGTH = 322, 323  # tags of a TIFF
_HEIF_SIZE = b"ispe\0"  # the box of an image's size, and its version (ISO/IEC 23008-12, 6.5.3.2)
_BYTE_ORDERS = {b"II*\0": "<", b"MM\0*": ">"}
_MARKER = re.compile(rb"\xff+[^\x00\xff\xd0-\xd7]")  # in a JPEG's coded data: neither a stuffed byte nor a restart
_FRAMES = frozenset((0xC0, 0xC1, 0xC2, 0xC9, 0xCA))  # those that every libjpeg decodes
_SCAN, _END = 0xDA, 0xD9
_FRAME_BYTES = 6  # of a frame header's content; each component adds 3
# Markers after whose segments libjpeg reads on; what stands after others it reads in another way, or not at all.
_SEGMENTS = _FRAMES | {0xC4, 0xCC, _SCAN, 0xDB, 0xDC, 0xDD, *range(0xE0, 0xF0), 0xFE}


class TooLargeError(DataError):
    """An image has more pixels than are allowed."""


class PixelLimits(NamedTuple):
    """Limits on width x height: of an image as it is decoded, of a JPEG's header, and of another's.

    The last two may be more than the first: such images are made smaller.
    """

    decoded: int
    jpeg: int
    whole: int


class Shrunk(NamedTuple):
    """An image, uint8 (H, W, 3), whose sides were divided by ``divisor``: 1, 2, 4 or 8, rounded up.

    Pixel (x, y) of the file's picture lies in pixel ((x + shift[0]) // divisor, (y + shift[1]) // divisor).
    """

    pixels: Pixels
    divisor: int
    shift: tuple[int, int] = (0, 0)


@cache
def unread_formats() -> dict[str, str]:
    """Of formats that this installation does not read: what does, by the format's name."""
    from PIL import features

    missing = {}
    if not features.check("avif"):
        missing["AVIF"] = "Pillow 11.3 or later reads them"
    if importlib.util.find_spec("pillow_heif") is None:
        missing["HEIF"] = "pip install plsc-torch[heic] reads them"
    return missing


@cache
def readable_suffixes() -> tuple[str, ...]:
    """The suffixes, in lower case, of picture files that this installation reads."""
    readable = [suffixes for name, suffixes in SUFFIXES.items() if name not in unread_formats()]
    return tuple(suffix for suffixes in readable for suffix in suffixes)


def is_heic(data: bytes) -> bool:
    """Whether a file is HEIF of the brands that HEVC is for (ISO/IEC 23008-12, B.4), by its first box."""
    if data[4:8] != b"ftyp":
        return False
    end = min(int.from_bytes(data[:4], "big"), _LONGEST_FTYP)
    return not _HEIC_BRANDS.isdisjoint([data[place : place + 4] for place in range(8, end, 4)])


def suffix_of(data: bytes) -> str | None:
    """Return the usual file suffix for an encoded image by its first bytes; None if they are no image's."""
    if is_heic(data):
        return SUFFIXES["HEIF"][0]
    return next((SUFFIXES[name][0] for name, signature in _SIGNATURES.items() if signature.match(data)), None)


def decode_rgb(data: bytes, name: str, max_pixels: int, formats: tuple[str, ...] = FORMATS) -> Pixels:
    """Decode an image, of several frames the first.

    Grey becomes RGB, 16 bits become 8, and transparent pixels are composited on white.

    Args:
        data: the encoded file.
        name: the image's name in error messages.
        max_pixels: limit on width x height, checked in the header before memory is allocated.
        formats: those that are taken.

    Returns:
        uint8 (H, W, 3) RGB, rotated upright by its EXIF orientation.

    Raises:
        TooLargeError: it has more than ``max_pixels`` pixels.
        DataError: it does not decode.
    """
    return decode_shrunk(data, name, PixelLimits(max_pixels, max_pixels, max_pixels), formats).pixels


def decode_shrunk(data: bytes, name: str, limits: PixelLimits, formats: tuple[str, ...] = FORMATS) -> Shrunk:
    """Decode as :func:`decode_rgb`; an image with more than ``limits.decoded`` pixels as much smaller as fits them.

    libjpeg shrinks a JPEG while it decodes, in the memory and a part of the time that the smaller image takes. Others
    are decoded whole, in up to 16 bytes a pixel, and then shrunk.

    Raises:
        TooLargeError, DataError: as :func:`decode_rgb`.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with open_header(data, formats) as image:
            size, is_jpeg = image.size, image.format in ("JPEG", "MPO")
            check_pixels(size[0], size[1], name, limits.jpeg if is_jpeg else limits.whole)
            for inner in _inner_sizes(image, data):
                check_pixels(*inner, name, limits.whole)
            check_scans(data, name)
            divisor = _divisor(size, name, limits.decoded)
            if is_jpeg and divisor > 1:
                image.draft(None, (max(size[0] // divisor, 1), max(size[1] // divisor, 1)))
            pixels = to_rgb(image, 1 if is_jpeg else divisor)
            check_pixels(pixels.shape[1], pixels.shape[0], name, limits.decoded)  # a decoder may find another size
            return Shrunk(pixels, divisor, _shift(size, divisor, exif_orientation(_exif_of(image))))
    except Image.DecompressionBombError:
        raise TooLargeError(f"{name} has more than the {limits.whole:,} pixels allowed; shrink it first") from None
    except DataError:
        raise
    except Exception as error:  # Pillow's decoders raise nearly every kind on hostile bytes
        detail = "no known image format" if isinstance(error, UnidentifiedImageError) else str(error)
        raise DataError(f"{name} does not decode ({detail[:120]}); replace or remove it") from None


def _divisor(size: tuple[int, int], name: str, max_pixels: int) -> int:
    """What the sides (width, height) are divided by, so that the image holds ``max_pixels``."""
    width, height = size
    for divisor in _DIVISORS:
        if -(-width // divisor) * -(-height // divisor) <= max_pixels:
            return divisor
    check_pixels(width, height, name, max_pixels)
    return 1


def _inner_sizes(image: Any, data: bytes) -> Iterator[tuple[int, int]]:
    """Yield the sizes (width, height) of what a decoder makes whole besides the picture, which is a part of it."""
    if image.format == "TIFF" and _TILE_WIDTH in image.tag_v2:
        yield image.tag_v2[_TILE_WIDTH], image.tag_v2.get(_TILE_LENGTH, 1)
    elif image.format == "HEIF":  # a crop shows a part of an image, and a grid's own size need not be the file's
        place = data.find(_HEIF_SIZE)
        while place >= 0:
            width, height = (int.from_bytes(data[place + at : place + at + 4], "big") for at in (8, 12))
            yield width, height
            place = data.find(_HEIF_SIZE, place + 1)
        if grid := image.info.get("tiling"):
            yield grid["image_width"], grid["image_height"]


def _shift(size: tuple[int, int], divisor: int, orientation: int) -> tuple[int, int]:
    """:attr:`Shrunk.shift`: rounding up adds to the file's right and lower side, which turning may put first."""
    width, height = size if orientation < 5 else size[::-1]
    return -width % divisor * (orientation in (2, 3, 6, 7)), -height % divisor * (orientation in (3, 4, 7, 8))


def check_pixels(width: int, height: int, name: str, max_pixels: int) -> None:
    """:class:`TooLargeError` beyond the limit, :class:`DataError` for an image without pixels."""
    if width * height > max_pixels:
        raise TooLargeError(
            f"{name} has {width} x {height} pixels, more than the {max_pixels:,} allowed; shrink it first"
        )
    if width * height == 0:
        raise DataError(f"{name} has {width} x {height} pixels; replace or remove it")


def check_scans(data: bytes, name: str) -> None:
    """:class:`DataError` for a JPEG of more than :data:`MAX_SCANS` scans: 42 bytes can cost 12 ms each."""
    # The bytes of the marker are an upper bound: they may also stand in other segments and after the end.
    if data.startswith(b"\xff\xd8") and data.count(b"\xff\xda") > MAX_SCANS and _count_scans(data) > MAX_SCANS:
        raise DataError(f"{name} is a JPEG of more than {MAX_SCANS} scans; save it again")


def jpeg_size(data: bytes) -> tuple[int, int] | None:
    """Return (width, height) from a JPEG's frame header (ITU T.81, B.2.2), as libjpeg decodes it.

    None where libjpeg might find another one, or none: Pillow has to open the file. It finds the size of others too,
    but in a third of the time that decoding a 112x112 image takes.
    """
    frames = [(start, end) for marker, start, end in _segments(data) if marker in _FRAMES]
    if len(frames) != 1:
        return None
    start, end = frames[0]
    if end - start < _FRAME_BYTES or end - start != _FRAME_BYTES + 3 * data[start + 5]:
        return None
    return int.from_bytes(data[start + 3 : start + 5], "big"), int.from_bytes(data[start + 1 : start + 3], "big")


def jpeg_exif(data: bytes) -> bytes:
    """Return the EXIF of a JPEG that has a :func:`jpeg_size`, several segments joined; empty if it has none."""
    if _EXIF not in data:  # so it is in most crops; the search takes 1 us
        return b""
    parts = [data[start:end] for marker, start, end in _segments(data) if marker == 0xE1]
    return b"".join([part.removeprefix(_EXIF) for part in parts if part.startswith(_EXIF)])


def exif_orientation(exif: bytes) -> int:
    """Return the orientation, 1 (upright) to 8, that a picture's EXIF gives; 1 if that has none, or is damaged.

    The value is a SHORT. A LONG counts as well, as in Pillow, though EXIF does not allow it.
    """
    tiff = _EXIF_PREFIXES.sub(b"", exif)
    order = _BYTE_ORDERS.get(tiff[:4])
    if order is None:
        return 1
    with suppress(struct.error):  # it ends early
        (start,) = struct.unpack_from(f"{order}I", tiff, 4)
        (entries,) = struct.unpack_from(f"{order}H", tiff, start)
        for place in range(start + 2, start + 2 + 12 * entries, 12):
            tag, kind, count = struct.unpack_from(f"{order}HHI", tiff, place)
            if tag == _ORIENTATION:
                (value,) = struct.unpack_from(f"{order}I" if kind == _LONG else f"{order}H", tiff, place + 8)
                return value if kind in (_SHORT, _LONG) and count == 1 and 1 <= value <= 8 else 1
    return 1


@contextmanager
def open_header(data: bytes, formats: tuple[str, ...] = FORMATS) -> Iterator[Any]:
    """Open a Pillow image, reading only its header, with Pillow's warnings off.

    ImportError tells of HEIC without pillow-heif.
    """
    from PIL import Image, TiffImagePlugin, WebPImagePlugin  # noqa: F401 (the plugins register themselves)

    if "HEIF" in formats:
        formats = _heif_reader() if is_heic(data) else tuple(name for name in formats if name != "HEIF")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns at its own pixel limit and about odd palettes
        with Image.open(io.BytesIO(data), formats=formats) as image:
            yield image


def _heif_reader() -> tuple[str]:
    """Let Pillow open HEIF, by pillow-heif; returns its name of the format.

    libheif bounds the decoder's memory by the size that the header gives.
    """
    from PIL import Image

    if "HEIF" not in Image.OPEN:
        try:
            import pillow_heif
        except ImportError:
            raise ImportError("HEIC; pip install plsc-torch[heic] reads it") from None
        pillow_heif.register_heif_opener(thumbnails=False, depth_images=False, aux_images=False, decode_threads=1)
    return ("HEIF",)


def to_rgb(image: Any, divisor: int = 1) -> Pixels:
    """Convert a Pillow image, of several frames the present one, to uint8 (H, W, 3), upright, transparent on white.

    Its sides are divided by ``divisor`` first, rounded up: each pixel is the mean of divisor x divisor.
    """
    from PIL import Image

    image.load()  # a PNG's EXIF may follow its pixels
    orientation = exif_orientation(_exif_of(image))
    if image.mode.startswith("I"):  # 16 bits a pixel, or 32 that hold 16
        image = Image.fromarray((np.clip(np.asarray(image), 0, 65535) >> 8).astype(np.uint8))
    elif image.mode == "F":
        image = Image.fromarray(np.nan_to_num(np.asarray(image)).clip(0, 255).astype(np.uint8))
    if divisor > 1:
        if image.mode in ("1", "P", "PA"):  # a mean of a palette's numbers is no colour
            image = image.convert("RGBA" if image.has_transparency_data else "RGB")
        image = image.reduce(divisor)
    if orientation > 1:
        image = image.transpose(Image.Transpose[_TRANSPOSES[orientation - 2]])
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return np.array(image if image.mode == "RGB" else image.convert("RGB"))


def _exif_of(image: Any) -> bytes:
    """The EXIF that Pillow found, without the orientation that it takes from XMP; none of HEIF, which is upright."""
    if image.format == "HEIF":
        return b""
    exif, profile = image.info.get("exif"), image.info.get("Raw profile type exif")
    if exif is None and isinstance(profile, str):  # ImageMagick's form in a PNG: three lines of header, then hex
        with suppress(ValueError):
            exif = bytes.fromhex("".join(profile.split("\n")[3:]))
    return exif if isinstance(exif, bytes) else b""


def _segments(data: bytes) -> list[Segment]:
    """Return the segments of a JPEG to its first scan's header; none where libjpeg might read others.

    libjpeg passes over bytes between segments, and has markers without a length and others that it refuses. A reader
    that follows it in part takes for a size what libjpeg takes for the inside of a segment. So this one ends at
    whatever is no plain segment.
    """
    found: list[Segment] = []
    position = 2 if data.startswith(b"\xff\xd8\xff") else len(data)
    while position + 4 <= len(data) and data[position] == 0xFF:
        marker = data[position + 1]
        if marker == 0xFF:  # fill byte
            position += 1
            continue
        length = data[position + 2] << 8 | data[position + 3]
        start, position = position + 4, position + 2 + length
        if marker not in _SEGMENTS or length < 2 or position > len(data):
            return []
        found.append((marker, start, position))
        if marker == _SCAN:
            return found
    return []


def _count_scans(data: bytes) -> int:
    """Scans of a JPEG up to its end, counted no further than the limit needs; never fewer than libjpeg decodes."""
    scans, position = 0, 2
    while scans <= MAX_SCANS and (found := _MARKER.search(data, position)) is not None:
        marker, position = data[found.end() - 1], found.end()
        if marker == _END and scans:  # what follows the image is other data; what follows tables alone is the image
            break
        scans += marker == _SCAN
        if marker in _SEGMENTS:  # after others libjpeg goes on at once, where it goes on
            position += int.from_bytes(data[position : position + 2], "big")
    return scans
