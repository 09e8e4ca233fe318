"""The JPEG decoders that plsc chooses from, for tests of what holds by each of them."""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch

from plsc.data.decoders import DECODERS, JpegDecoder

ALL = (*DECODERS, "Pillow")


@contextmanager
def decoding_by(name: str) -> Iterator[None]:
    """Let plsc decode JPEG by one of ALL; where torchcodec is not installed, by what stands in for it."""
    with pytest.MonkeyPatch.context() as patch:
        if name == "torchcodec" and importlib.util.find_spec(name) is None:
            _stand_in(patch)
        decoder = None if name == "Pillow" else JpegDecoder(name, DECODERS[name]())
        patch.setattr("plsc.data.codec.jpeg_decoder", lambda: decoder)
        yield


def _stand_in(patch: pytest.MonkeyPatch) -> None:
    """A torchcodec that turns pictures by the first EXIF: by torchvision, from which torchcodec has it."""
    import torchvision.io  # noqa: F401 (registers the operator)

    decoders: Any = ModuleType("torchcodec.decoders")
    decoders.decode_jpeg = lambda data: torch.ops.image.decode_jpeg(data, 3, True)
    patch.setitem(sys.modules, "torchcodec", ModuleType("torchcodec"))
    patch.setitem(sys.modules, "torchcodec.decoders", decoders)
