"""Which library decodes JPEG: torchvision's operator, else torchcodec, else Pillow.

All three are libjpeg-turbo with the same settings: they give the same pixels, and refuse the same files.
`benchmarks/jpeg_decoders.py` compares them, and others that give other pixels or take what these refuse.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch

Decode = Callable[[bytes], torch.Tensor]

_RGB = 3  # torchvision's ImageReadMode.RGB
# A JPEG's start, and EXIF without an orientation. torchcodec turns by a file's first EXIF, and has no option not to.
_UPRIGHT = b"\xff\xd8\xff\xe1\x00\x08Exif\0\0"


class JpegDecoder(NamedTuple):
    """A decoder of baseline and progressive JPEG.

    Attributes:
        name: of its library.
        decode: a file to its pixels, uint8 (3, H, W) RGB as they are stored: EXIF does not turn them. It raises
            RuntimeError for a file that is broken or ends early.
    """

    name: str
    decode: Decode


def _torchvision() -> Decode:
    """The operator itself: the functions around it are deprecated since torchvision 0.29."""
    import torchvision.io  # noqa: F401 (registers the operator)

    operator = torch.ops.image.decode_jpeg
    return lambda data: operator(torch.frombuffer(bytearray(data), dtype=torch.uint8), _RGB, False)


def _torchcodec() -> Decode:
    from torchcodec.decoders import decode_jpeg  # since 0.16

    def decode(data: bytes) -> torch.Tensor:
        upright = bytearray(_UPRIGHT)
        upright += memoryview(data)[2:]
        pixels: torch.Tensor = decode_jpeg(torch.frombuffer(upright, dtype=torch.uint8))
        return pixels

    return decode


DECODERS = {"torchvision": _torchvision, "torchcodec": _torchcodec}  # the fastest first


@cache
def find_decoder(name: str) -> JpegDecoder | None:
    """The decoder ``name`` of :data:`DECODERS`; None where its library is not installed, is too old, or fails."""
    try:
        return JpegDecoder(name, DECODERS[name]())
    except (ImportError, AttributeError, OSError, RuntimeError):  # the last two: of libraries built for another torch
        return None


@cache
def jpeg_decoder() -> JpegDecoder | None:
    """The first of :data:`DECODERS` that is here; None: Pillow decodes."""
    return next(filter(None, map(find_decoder, DECODERS)), None)


def decoder_name() -> str:
    """The library that decodes JPEG here."""
    decoder = jpeg_decoder()
    return "Pillow" if decoder is None else decoder.name
