"""PyTorch's files (.pt, .pth, .pt2) that were made to harm."""

import io
import json
import os
import pickle
import zipfile
from typing import Any

import torch

from untrusted.pickled import DEEP
from untrusted.samples import EMBED, Content, Samples, crafted, members_of, packed

_TUPLES = b"Nq\x05" + b"".join(b"h\x05h\x05\x86q\x05" for _ in range(DEEP))


class _Shell:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch SHELL",)


def _saved(value: object, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def _state(samples: Samples) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(samples.model)


def _program(program: bytes) -> bytes:
    """A zip archive of torch.save whose pickle is ``program``."""
    return packed({"archive/data.pkl": program, "archive/version": b"3\n", "archive/data/0": bytes(64)})


def _legacy(program: bytes) -> bytes:
    """The form of torch before 1.6: several pickles in a row."""
    head = [0x1950A86A20F9469CFC6C, 1001, {"protocol_version": 1001, "little_endian": True, "type_sizes": {}}]
    return b"".join(pickle.dumps(value, protocol=2) for value in head) + program + pickle.dumps([], protocol=2)


def _bomb(size: int) -> bytes:
    """A state_dict whose only storage inflates to ``size`` bytes of zeros."""
    members = members_of(_saved({"w": torch.zeros(4)}))
    name = next(name for name in members if name.endswith("/data/0"))
    program = next(name for name in members if name.endswith("data.pkl"))
    members[program] = members[program].replace(b"K\x04\x85", b"J" + (size // 4).to_bytes(4, "little") + b"\x85")
    members[name] = bytes(size)
    return packed(members, zipfile.ZIP_DEFLATED)


def _repeated(count: int) -> bytes:
    """An archive whose directory has one stored megabyte ``count`` times."""
    members = members_of(_saved({f"w{n}": torch.zeros(1) for n in range(count)}))
    with zipfile.ZipFile(file := io.BytesIO(), "w") as archive:
        archive.writestr("archive/data/0", bytes(1 << 20))
        (first,) = archive.filelist
        for name, content in members.items():
            if "/data/" not in name:
                archive.writestr(name, content)
        for number in range(1, count):
            entry = zipfile.ZipInfo(f"archive/data/{number}")
            entry.header_offset, entry.CRC = first.header_offset, first.CRC
            entry.compress_size = entry.file_size = first.file_size
            archive.filelist.append(entry)
            archive.NameToInfo[entry.filename] = entry
        archive._didModify = True  # type: ignore[attr-defined]
    return file.getvalue()


def _view(size: tuple[int, ...], dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """A tensor of many numbers that all lie in one place."""
    return torch.zeros(1, dtype=dtype).expand(size)


def _wide(samples: Samples) -> bytes:
    state = _state(samples)
    name = next(name for name in reversed(state) if state[name].dim() == 2)
    return _saved({**state, name: _view((1 << 34, state[name].shape[1]))})


def _sparse() -> torch.Tensor:
    indices, values = torch.zeros(2, 1, dtype=torch.int64), torch.ones(1)
    return torch.sparse_coo_tensor(indices, values, (1 << 30, 1 << 30), check_invariants=True)


def _meta(samples: Samples) -> bytes:
    return _saved({name: tensor.to("meta") for name, tensor in _state(samples).items()})


def _cut(samples: Samples) -> bytes:
    content = _saved(_state(samples))
    return content[: len(content) // 2]


def _hollow(samples: Samples) -> bytes:
    """The end of a zip file that tells of more than there is."""
    content = _saved(_state(samples))
    return content[:1000] + content[-len(content) // 2 :]


def _no_directory(samples: Samples) -> bytes:
    return _saved(_state(samples)).replace(b"PK\1\2", b"PK\1\3")


def _misnamed(samples: Samples) -> bytes:
    """The directory's name of a member is no UTF-8."""
    return b"data\xffpkl".join(_saved(_state(samples)).rsplit(b"data.pkl", 1))


def _short(samples: Samples) -> bytes:
    """Storages of a byte each."""
    members = members_of(_saved(_state(samples)))
    return packed({name: content[:1] if "/data/" in name else content for name, content in members.items()})


def _short_shard() -> bytes:
    """Rows of a class table, whose storage has a byte."""
    members = members_of(_saved({"weight": torch.zeros(4, 4)}))
    return packed({name: content[:1] if "/data/" in name else content for name, content in members.items()})


def _inflated_program() -> bytes:
    members = {"m/archive_format": b"pt2", "m/archive_version": b"0", "m/byteorder": b"little"}
    return packed({**members, "m/models/model.json": b" " * (1 << 30)}, zipfile.ZIP_DEFLATED)


def _deep_program() -> bytes:
    graph = {"expr_str": "(" * 5000 + "1" + ")" * 5000}
    members = {"m/archive_format": b"pt2", "m/models/model.json": json.dumps(graph).encode()}
    return packed(members)


CONTENTS: dict[str, Content] = {
    "an empty file": b"",
    "os.system in a zip": _saved(_Shell()),
    "os.system in the form before zip": _saved(_Shell(), _use_new_zipfile_serialization=False),
    "os.system in a bare pickle": pickle.dumps(_Shell()),
    "os.system among tensors": lambda samples: _saved({**_state(samples), "x": _Shell()}),
    "1 MB that inflates to 1 GiB": lambda _: _bomb(1 << 30),
    "a megabyte a thousand times": lambda _: _repeated(1000),
    "nested tuples as a key": _program(b"\x80\x02}q\x01(" + _TUPLES + b"K\x01u."),
    "nested tuples as a key, in the form before zip": _legacy(b"\x80\x02}q\x01(" + _TUPLES + b"K\x01u."),
    "nested tuples in an ordered dictionary": _program(
        b"\x80\x02ccollections\nOrderedDict\n](" + _TUPLES + b"K\x01\x86e\x85R."
    ),
    "100,000 lists in each other": _program(b"\x80\x02" + b"](" * 100_000 + b"e" * 100_000 + b"."),
    "a long integer of 100 kB": _program(b"\x80\x02\x8b" + (100_000).to_bytes(4, "little") + b"\x7f" * 100_000 + b"."),
    "2^43 numbers in two bytes": _wide,
    "tensors without storage": _meta,
    "a tensor of 2^60 numbers": lambda _: _saved({"fc.weight": _view((1 << 30, 1 << 30), torch.float32)}),
    "a sparse tensor": lambda _: _saved({"w": _sparse()}),
    "storages that are cut off": _short,
    "a file that is cut off": _cut,
    "a file without its middle": _hollow,
    "a directory of other entries": _no_directory,
    "a member's name that is no UTF-8": _misnamed,
    "a list": lambda _: _saved([torch.zeros(3)]),
    "keys with an escape": lambda _: _saved({"\x1b[2J": 7}),
}
SHARDS: dict[str, Content] = {  # of arcface_torch, which are mapped
    "os.system in a shard": _saved({"weight": torch.zeros(4, 4), "x": _Shell()}),
    "os.system in a shard before zip": _saved(_Shell(), _use_new_zipfile_serialization=False),
    "a shard that inflates to 1 GiB": lambda _: _bomb(1 << 30),
    "a shard of 2^60 numbers": lambda _: _saved({"weight": _view((1 << 30, 1 << 30), torch.float32)}),
    "a sparse shard": lambda _: _saved({"weight": _sparse()}),
    "a shard without storage": lambda _: _saved({"weight": torch.zeros(4, 4, device="meta")}),
    "a shard whose storage is cut off": lambda _: _short_shard(),
    "a shard that is no state_dict": lambda _: _saved([torch.zeros(3)]),
    "nested tuples in a shard": _program(b"\x80\x02}q\x01(" + _TUPLES + b"K\x01u."),
}
JOIN = "table import {file} {out}/out.safetensors"
TRAIN = "train {config} --out {out}/run --init-weights {file}"
CASES = {name: crafted(EMBED, "crafted.pt", content) for name, content in CONTENTS.items()} | {
    **{name: crafted(JOIN, "softmax_fc_gpu_0.pt", content) for name, content in SHARDS.items()},
    "a checkpoint of arcface_torch that is a list": crafted(JOIN, "checkpoint_gpu_0.pt", _saved([torch.zeros(3)])),
    "2^43 numbers in two bytes, trained": crafted(TRAIN, "crafted.pt", _wide),
    "1 MB that inflates to 1 GiB, trained": crafted(TRAIN, "crafted.pt", lambda _: _bomb(1 << 30)),
    "a program that inflates to 1 GiB": crafted(EMBED, "crafted.pt2", lambda _: _inflated_program()),
    "a program with an expression nested deeply": crafted(EMBED, "crafted.pt2", _deep_program()),
    "os.system in a zip named .bin": crafted(EMBED, "crafted.bin", _saved(_Shell())),
    "os.system in a zip named .ckpt": crafted(EMBED, "crafted.ckpt", _saved(_Shell())),
}
