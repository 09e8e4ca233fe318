"""Files of safetensors that were made to harm."""

import json
import struct
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save

from plsc.models import create
from plsc.models.weights import model_metadata
from untrusted.samples import EMBED, Content, Samples, crafted


def _file(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def _tensors(**entries: Any) -> bytes:
    return _file(json.dumps(entries).encode(), bytes(64))


def _entry(begin: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def _described(**changes: str) -> Content:
    """A sound model with other metadata."""

    def make(samples: Samples) -> bytes:
        with safe_open(samples.model, framework="pt") as file:
            metadata = dict(file.metadata())
        return save(load_file(samples.model), {**metadata, **changes})

    return make


def _zeros_of(name: str, image_size: int, **options: Any) -> Content:
    """A file of zeros that fit a model of timm, for images of ``image_size``."""

    def make(_: Samples) -> bytes:
        with torch.device("meta"):
            model = create(name, embedding_dim=8, image_size=image_size, **options)
        state = {key: torch.zeros(tensor.shape, dtype=tensor.dtype) for key, tensor in model.state_dict().items()}
        return save(state, model_metadata(model))

    return make


CONTENTS: dict[str, Content] = {
    "an empty file": b"",
    "a header of 2^63 bytes": _file(b"{}", length=2**63),
    "a header of 2^64 - 1 bytes": _file(b"{}", length=2**64 - 1),
    "a header longer than the file": _file(b"{}", length=10**7),
    "a header nested deeply": _file(b'{"a":' + b"[" * 100_000),
    "a header of 90 MB": _file(b'{"a":"' + b"x" * 90_000_000 + b'"}'),
    "a million tensors of nothing": _file(
        b"{" + b",".join(b'"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' % n for n in range(1_000_000)) + b"}"
    ),
    "overlapping tensors": _tensors(a=_entry(0, 64, [16]), b=_entry(0, 64, [16])),
    "a tensor beyond the file": _tensors(a=_entry(0, 1 << 40, [1 << 38])),
    "a tensor with its end before its beginning": _tensors(a=_entry(64, 0, [16])),
    "a shape that overflows": _tensors(a=_entry(0, 64, [1 << 32, 1 << 32, 1 << 32])),
    "a tensor of more axes than torch has": _tensors(a=_entry(0, 4, [1] * 100_000), b=_entry(4, 64, [15])),
    "a name twice": _file(
        b'{"a":{"dtype":"F32","shape":[16],"data_offsets":[0,64]},"a":{"dtype":"F32","shape":[8],"data_offsets":[0,32]}}',
        bytes(64),
    ),
    "a type that nobody has": _tensors(a=_entry(0, 64, [16], "F7")),
    "no tensors": _tensors(__metadata__={"format": "plsc-backbone-1", "name": "resnet8"}),
    "options nested deeply": _described(options="[" * 100_000),
    "an image size nested deeply": _described(image_size="[" * 100_000),
    "an image size of 2^40": _described(image_size=str(2**40)),
    "an image size of a million digits": _described(image_size="9" * 1_000_000),
    "2^50 dimensions": _described(embedding_dim=str(2**50)),
    "a million digits of dimensions": _described(embedding_dim="9" * 1_000_000),
    "a mean nested deeply": _described(mean="[" * 100_000),
    "a mean of 10^400": _described(mean="1" + "0" * 400),
    "a model of timm that is wide": _described(
        name="timm:vit_tiny_patch16_224", options='{"embed_dim": 30000, "depth": 12}'
    ),
    "a model of timm that is deep": _described(name="timm:vit_tiny_patch16_224", options='{"depth": 1000000}'),
    "tables of a model of timm that no weights show": _zeros_of(  # 8 bytes for each pair of the window's 6,400 pixels
        "timm:swin_tiny_patch4_window7_224", 80, embed_dim=4, depths=[1], num_heads=[1], window_size=80, patch_size=1
    ),
    "a model of timm for pictures of 3,008 pixels": _zeros_of("timm:test_byobnet", 3008),
    "a model of timm of large maps": _zeros_of(  # 1,024 channels at each of 224 x 224 places
        "timm:test_convnext", 224, dims=[256, 8, 8, 8], depths=[1, 1, 1, 1], patch_size=1
    ),
    "a model of timm with options of code": _described(
        name="timm:vit_tiny_patch16_224", options='{"norm_layer": "os.system"}'
    ),
    "a model of timm that fetches": _described(name="timm:hf-hub:evil/model"),
    "a model of timm in a local folder": _described(name="timm:local-dir:/etc"),
    "an unknown model": _described(name="\x1b[2Jevil"),
}
CASES = {name: crafted(EMBED, "crafted.safetensors", content) for name, content in CONTENTS.items()}
