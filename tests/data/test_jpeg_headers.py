"""One size of a JPEG: what the limit of pixels sees is what libjpeg decodes, whatever stands between its segments."""

import random
import struct
from collections.abc import Iterator
from contextlib import suppress
from functools import cache

import pytest
from PIL import Image
from support.pictures import smooth, stored

from plsc.data import decode_image
from plsc.data.decoders import DECODERS, find_decoder
from plsc.errors import DataError
from plsc.image_files import MAX_SCANS, decode_rgb, jpeg_size, open_header

SIZES = [(64, 48), (40, 56), (16, 24), (8, 8)]  # of all frames here: nothing is large to any reader
GARBAGE = [b"\xff", b"\0", b"\xff\0", b"\xff\xd3", b"\xff\x01", b"\xff\xff\xff", b"ab"]
# Markers that readers take in different ways: stuffed, reserved, restarts, the start and end, extensions, comments.
MARKERS = [0x00, 0x01, 0x02, 0xBF, 0xC4, 0xC8, 0xD0, 0xD8, 0xD9, 0xDC, 0xDE, 0xDF, 0xE1, 0xF0, 0xFE, 0xFF]


def frame(width: int, height: int, marker: int = 0xC0) -> bytes:
    return segment(marker, struct.pack(">BHHB", 8, height, width, 3) + bytes((1, 0x22, 0, 2, 0x11, 1, 3, 0x11, 1)))


def segment(marker: int, content: bytes = b"", length: int | None = None) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(content) + 2 if length is None else length) + content


def pieces(data: bytes) -> list[bytes]:
    """The segments of a sound JPEG from behind its start, the last one with the scan and the end."""
    found, place = [], 2
    while data[place + 1] != 0xDA:
        end = place + 2 + int.from_bytes(data[place + 2 : place + 4], "big")
        found.append(data[place:end])
        place = end
    return [*found, data[place:]]


@cache
def sound(width: int, height: int, progressive: bool) -> tuple[bytes, ...]:
    return tuple(pieces(stored(smooth(width, height), "JPEG", progressive=progressive)))


def jumbled(seed: int) -> bytes:
    """A JPEG with frames, tables and garbage put in anywhere, and markers whose segments seem to cover what follows."""
    draw = random.Random(seed)
    size = draw.choice(SIZES)
    parts = list(sound(*size, draw.random() < 0.3))
    for _ in range(draw.randint(1, 4)):
        place, kind = draw.randrange(len(parts)), draw.randrange(5)
        if kind == 0:
            parts.insert(place, frame(*draw.choice(SIZES), draw.choice((0xC0, 0xC1, 0xC2))))
        elif kind == 1:
            parts.insert(
                place, draw.choice((b"\xff", b"\0", b"\xff\0", b"\xff\xd3", b"\xff\x01", b"\xff\xff\xff", b"ab"))
            )
        elif kind == 2:
            parts.insert(place, segment(draw.choice(MARKERS), length=draw.choice((0, 1, 2))))
        elif kind == 3:  # a comment in which a frame stands, for the reader that comes to its inside
            parts.insert(place, segment(0xFE, frame(*draw.choice(SIZES)) + parts[-1][:14]))
        else:
            covered = b"".join(parts[place : draw.randint(place, len(parts))])
            parts.insert(place, segment(draw.choice(MARKERS), length=min(len(covered) + draw.choice((0, 2, 4)), 65535)))
    return b"\xff\xd8" + b"".join(parts)


def decoded_sizes(data: bytes) -> Iterator[tuple[int, int]]:
    """(width, height) by every decoder that takes the file."""
    for decoder in filter(None, map(find_decoder, DECODERS)):
        with suppress(RuntimeError):
            _, height, width = decoder.decode(data).shape
            yield width, height
    try:
        with open_header(data) as image:
            image.load()
            yield image.size
    except Exception:
        return


def test_the_size_is_the_decoders_or_none() -> None:
    known = 0
    for seed in range(400):
        data = jumbled(seed)
        size = jpeg_size(data)
        if size is not None:
            found = set(decoded_sizes(data))
            assert found <= {size}, seed
            known += bool(found)
    assert known > 25


def hidden(marker: int) -> bytes:
    """64 x 48 pixels to libjpeg; 8 x 8 to who jumps over the segment that ``marker`` seems to begin."""
    *head, scan = pieces(stored(smooth(64, 48), "JPEG"))
    real, decoy = b"".join(head), segment(0xFE, frame(8, 8) + scan[:14])
    return b"\xff\xd8" + segment(marker, length=len(real) + 2 + 4) + real + decoy + scan


def test_a_hidden_frame_is_counted() -> None:
    data = hidden(0x00)
    assert decode_image(data, "x").shape == (3, 48, 64)  # by Pillow, which reads on as libjpeg does
    for decode in (decode_image, lambda data, name, max_pixels: decode_rgb(data, name, max_pixels)):
        with pytest.raises(DataError, match="x has 64 x 48 pixels, more than the 3,071 allowed"):
            decode(data, "x", max_pixels=64 * 48 - 1)


@pytest.mark.parametrize("marker", MARKERS)
def test_no_marker_hides_a_frame(marker: int) -> None:
    with pytest.raises(DataError):
        decode_image(hidden(marker), "x", max_pixels=64 * 48 - 1)


@pytest.mark.parametrize("marker", [0xC0, 0xC1, 0xC2])
def test_a_second_frame_is_refused(marker: int) -> None:
    parts = pieces(stored(smooth(16, 24), "JPEG"))
    for place in range(len(parts)):
        data = b"\xff\xd8" + b"".join([*parts[:place], frame(8, 8, marker), *parts[place:]])
        assert jpeg_size(data) is None
        with pytest.raises(DataError, match="x does not decode"):
            decode_image(data, "x")


def scans_behind(marker: bytes) -> bytes:
    """A JPEG of more scans than are allowed, which a segment of ``marker`` seems to cover all but one.

    Where a restart is due, libjpeg passes over a marker that it does not know, and not over a segment.
    """
    *head, scan = pieces(stored(smooth(64, 48), "JPEG", progressive=True))
    hidden = scan[:14] * (MAX_SCANS + 1)
    restarts = segment(0xDD, b"\0\1")
    covered = marker + struct.pack(">H", len(hidden) + 2)
    return b"\xff\xd8" + b"".join(head) + restarts + scan[:14] + covered + hidden + b"\xff\xd9"


@pytest.mark.parametrize("marker", [b"\xff\x02", b"\xff\xbf"])
def test_no_marker_hides_scans(marker: bytes) -> None:
    with pytest.raises(DataError, match="x is a JPEG of more than 100 scans"):
        decode_image(scans_behind(marker), "x")


def test_scans_behind_tables_alone_are_counted() -> None:
    data = stored(Image.new("RGB", (8, 8)), "JPEG", progressive=True)
    last = data[data.rindex(b"\xff\xda") : -2]
    tables = b"\xff\xd8\xff\xd9"  # which Pillow's libjpeg passes over
    assert decode_image(tables + data, "x").shape == (3, 8, 8)
    with pytest.raises(DataError, match="x is a JPEG of more than 100 scans"):
        decode_image(tables + data[:-2] + last * MAX_SCANS + b"\xff\xd9", "x")
