"""Whichever library decodes JPEG, pixels and refusals are the same."""

import io
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.jpeg_decoders import ALL, decoding_by
from support.pictures import smooth, stored

from plsc.data import decode_image, decoders
from plsc.errors import DataError
from plsc.image_files import MAX_SCANS

SIZES = [(112, 112), (1, 1), (7, 13), (40, 33)]
WAYS: list[dict[str, Any]] = [
    *({"subsampling": number} for number in (0, 1, 2)),  # 4:4:4, 4:2:2, 4:2:0
    {"restart_marker_blocks": 1},
    {"keep_rgb": True},
]


def coloured(width: int, height: int) -> Any:
    """A picture whose channels differ."""
    grey = np.array(smooth(width, height))[..., 0]
    return Image.fromarray(np.stack([grey, grey[::-1], 255 - grey[:, ::-1]], axis=2))


def files() -> Iterator[bytes]:
    for size in SIZES:
        for progressive in (False, True):
            for way in WAYS:
                yield stored(coloured(*size), "JPEG", quality=90, progressive=progressive, **way)
            for mode in ("L", "CMYK"):
                yield stored(coloured(*size).convert(mode), "JPEG", progressive=progressive)


@pytest.mark.parametrize("name", ALL)
def test_pixels_are_the_same_bit_by_bit(name: str) -> None:
    with decoding_by(name):
        for data in files():
            with Image.open(io.BytesIO(data)) as image:
                expected = np.array(image.convert("RGB"))
            assert np.array_equal(decode_image(data, "x").permute(1, 2, 0).numpy(), expected)


def damaged(seed: int) -> bytes:
    """A JPEG that ends early, or lacks, has more or has other bytes somewhere."""
    draw = random.Random(seed)
    size = draw.choice([(40, 33), (16, 24)])
    data = bytearray(stored(coloured(*size), "JPEG", progressive=draw.random() < 0.3))
    place = draw.randrange(2, len(data))
    kind = draw.randrange(4)
    if kind == 0:
        del data[place:]
    elif kind == 1:
        del data[place : place + draw.randint(1, 30)]
    elif kind == 2:
        data[place:place] = draw.randbytes(draw.randint(1, 9))
    else:
        data[place] = draw.randrange(256)
    return bytes(data)


def result(data: bytes) -> Any:
    """The pixels, or None of what is refused."""
    try:
        return decode_image(data, "x").tolist()
    except DataError:
        return None


def test_the_same_damaged_files_are_refused() -> None:
    found = {}
    for name in ALL:
        with decoding_by(name):
            found[name] = [result(damaged(seed)) for seed in range(300)]
    refused = found["Pillow"].count(None)
    assert 50 < refused < 250
    for name in ALL:
        assert found[name] == found["Pillow"], name


@pytest.mark.parametrize("name", ALL)
def test_limits_hold_for_each(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = stored(coloured(40, 33), "JPEG", progressive=True)
    scan = data[data.rindex(b"\xff\xda") : -2]
    with decoding_by(name):
        with pytest.raises(DataError, match="x has 40 x 33 pixels"):
            decode_image(data, "x", max_pixels=40 * 33 - 1)
        with pytest.raises(DataError, match="x is a JPEG of more than 100 scans"):
            decode_image(data[:-2] + scan * MAX_SCANS + data[-2:], "x")
        if name == "Pillow":  # which checks the size of what it decoded against the limit
            return
        monkeypatch.setattr("plsc.image_files.jpeg_size", lambda data: (8, 8))
        with pytest.raises(DataError, match="x decodes to another size than its header's"):
            decode_image(data, "x")


def missing() -> decoders.Decode:
    raise ImportError("not installed")


def removed() -> decoders.Decode:
    return torch.ops.image.decode_jpeg_that_was_removed  # type: ignore[no-any-return]


def built_for_another_torch() -> decoders.Decode:
    raise OSError("undefined symbol")


def here() -> decoders.Decode:
    return lambda data: torch.zeros(3, 1, 1, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("installed", "chosen"),
    [
        ({"a": here, "b": here}, "a"),
        ({"a": removed, "b": here}, "b"),
        ({"a": missing, "b": built_for_another_torch, "c": here}, "c"),
        ({"a": removed, "b": missing}, None),
    ],
)
def test_the_first_that_works_is_chosen(installed: Any, chosen: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoders, "DECODERS", installed)
    for cached in (decoders.find_decoder, decoders.jpeg_decoder):
        monkeypatch.setattr(decoders, cached.__name__, cached.__wrapped__)
    found = decoders.jpeg_decoder()
    assert (found and found.name) == chosen
