"""Checkpoints that were made to harm; hashes fit unless they are the attack: whoever forges a file forges them too."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, ChunkStorageMetadata, MetadataIndex

from plsc.files import describe_content
from untrusted.pickled import DEEP
from untrusted.samples import MANIFESTS, Case, Change, copied, piped


def _rehash(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest.pop("seal", None)
    for name, entry in manifest["files"].items():
        entry |= describe_content((folder / name).read_bytes())
    (folder / "manifest.json").write_text(json.dumps(manifest))


def _in_json(name: str, change: Callable[[dict[str, Any]], object]) -> Change:
    def apply(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        change(content)
        content.pop("seal", None)
        (folder / name).write_text(json.dumps(content))
        if name != "manifest.json":
            _rehash(folder)

    return apply


_in_manifest, _in_state = partial(_in_json, "manifest.json"), partial(_in_json, "state.json")


def _in_metadata(change: Callable[[Any], object]) -> Change:
    def apply(folder: Path) -> None:
        metadata = FileSystemReader(folder).read_metadata()
        change(metadata)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        _rehash(folder)

    return apply


def _metadata(program: bytes) -> Change:
    return lambda folder: ((folder / ".metadata").write_bytes(program), _rehash(folder))


def _first(metadata: Any) -> str:
    return next(name for name in metadata.state_dict_metadata if name.startswith("backbone."))


def _entry(metadata: Any) -> Any:
    return metadata.state_dict_metadata[_first(metadata)]


def _bytes_entry(metadata: Any) -> None:
    entry = BytesStorageMetadata()
    entry.size = _entry(metadata).size  # type: ignore[attr-defined]
    metadata.state_dict_metadata[_first(metadata)] = entry


def _overlapping(metadata: Any) -> None:
    """Two pieces of half the tensor that both begin at its start: the other half would be whatever memory holds."""
    name, entry = _first(metadata), _entry(metadata)
    rows = entry.size[0]
    (whole,) = entry.chunks
    half = torch.Size([rows // 2, *entry.size[1:]])
    shifted = torch.Size([1, *whole.offsets[1:]])
    entry.chunks[:] = [ChunkStorageMetadata(whole.offsets, half), ChunkStorageMetadata(shifted, half)]
    for chunk in entry.chunks:
        metadata.storage_data[MetadataIndex(name, chunk.offsets)] = metadata.storage_data[
            MetadataIndex(name, whole.offsets)
        ]


def _many_pieces(metadata: Any) -> None:
    """300,000 pieces of no rows, beside the one that holds everything."""
    name, entry = _first(metadata), _entry(metadata)
    (whole,) = entry.chunks
    none = torch.Size([0, *entry.size[1:]])
    entry.chunks[:] = [whole] + [ChunkStorageMetadata(whole.offsets, none)] * 300_000
    metadata.storage_data[MetadataIndex(name, whole.offsets)].length = 0


def _resized(*size: int) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        entry = _entry(metadata)
        entry.size = torch.Size(size)
        entry.chunks[0].sizes = entry.size
        entry.chunks[0].offsets = torch.Size([0] * len(size))
        place = metadata.storage_data.pop(MetadataIndex(_first(metadata), torch.Size([0] * 4)))
        metadata.storage_data[MetadataIndex(_first(metadata), entry.chunks[0].offsets)] = place

    return change


def _placed(**changes: object) -> Change:
    def change(metadata: Any) -> None:
        for place in metadata.storage_data.values():
            for name, value in changes.items():
                setattr(place, name, value)

    return _in_metadata(change)


def _cut(folder: Path) -> None:
    path = next(folder.glob("*.distcp"))
    os.truncate(path, path.stat().st_size // 2)
    _rehash(folder)


def _pieces(content: bytes) -> Change:
    """Every piece is ``content``, as far as it fits."""

    def apply(folder: Path) -> None:
        path = next(folder.glob("*.distcp"))
        data = bytearray(path.read_bytes())
        for place in FileSystemReader(folder).read_metadata().storage_data.values():
            data[place.offset : place.offset + place.length] = content[: place.length].ljust(place.length, b"\0")
        path.write_bytes(data)
        _rehash(folder)

    return apply


def _linked(folder: Path) -> None:
    path = next(folder.glob("*.distcp"))
    shutil.move(path, folder.parent / "crafted.target")
    path.symlink_to(folder.parent / "crafted.target")


_TUPLES = b"N" + b"2\x86" * DEEP
_TOUCH = b"cposix\nsystem\n\x8c\x0btouch SHELL\x85R."

CHANGES: dict[str, Change] = {
    **MANIFESTS,
    "a manifest of a list of files": _in_manifest(lambda manifest: manifest.update(files=[])),
    "a name that leads up": _in_manifest(lambda manifest: manifest["files"].update({"../x": {"bytes": 1}})),
    "an absolute name": _in_manifest(lambda manifest: manifest["files"].update({"/etc/passwd": {"bytes": 1}})),
    "a name with an escape": _in_manifest(lambda manifest: manifest["files"].update({"\x1b[2J": {"bytes": 1}})),
    "a size of 10^30": _in_manifest(lambda manifest: manifest["files"]["state.json"].update(bytes=10**30)),
    "metadata that call os.system": _metadata(b"\x80\x04" + _TOUCH),
    "metadata with nested tuples as a key": _metadata(b"\x80\x04}" + _TUPLES + b"K\x01s."),
    "metadata with nested tuples as keys of DICT": _metadata(b"\x80\x04(" + _TUPLES + b"K\x01d."),
    "metadata with nested tuples in a set": _metadata(b"\x80\x04\x8f(" + _TUPLES + b"\x90."),
    "metadata with nested tuples in a frozen set": _metadata(b"\x80\x04(" + _TUPLES + b"\x91."),
    "metadata with nested tuples in an ordered dictionary": _metadata(
        b"\x80\x04ccollections\nOrderedDict\n](" + _TUPLES + b"K\x01\x86e\x85R."
    ),
    "metadata with nested tuples as a path": _metadata(b"\x80\x04cpathlib\nPosixPath\n" + _TUPLES + b"\x85R."),
    "metadata with a memo slot of 2^31": _metadata(b"\x80\x02]r\xff\xff\xff\x7f."),
    "metadata of 100,000 lists in each other": _metadata(b"\x80\x04" + b"](" * 100_000 + b"e" * 100_000 + b"."),
    "metadata that are text": _metadata(b"not a pickle"),
    "metadata of a tensor of bytes": _in_metadata(_bytes_entry),
    "metadata of bytes with pieces": _in_metadata(
        lambda metadata: [
            metadata.state_dict_metadata.update({name: BytesStorageMetadata()})
            for name in list(metadata.state_dict_metadata)
        ]
    ),
    "pieces that overlap": _in_metadata(_overlapping),
    "300,000 empty pieces": _in_metadata(_many_pieces),
    "a tensor of 2^60 numbers": _in_metadata(_resized(1 << 60)),
    "a tensor of more numbers than 64 bits count": _in_metadata(_resized(1 << 40, 1 << 40, 1 << 40)),
    "a tensor of 100,000 axes": _in_metadata(_resized(*[1] * 100_000)),
    "no pieces": _in_metadata(lambda metadata: _entry(metadata).chunks.clear()),
    "pieces nowhere": _in_metadata(lambda metadata: metadata.storage_data.clear()),
    "pieces in another folder": _placed(relative_path="../../../x"),
    "pieces in an absolute path": _placed(relative_path="/etc/passwd"),
    "pieces beyond the file": _placed(offset=1 << 50),
    "pieces before the file": _placed(offset=-8),
    "pieces of a length of text": _placed(length="9"),
    "pieces that a function transforms": _placed(transform_descriptors=("zstd", "eval")),
    "a file that is cut off": _cut,
    "a file that is a link": _linked,
    "a file that is a pipe": lambda folder: piped(next(folder.glob("*.distcp"))),
    "pieces that call os.system": _pieces(b"\x80\x04" + _TOUCH),
    "pieces that are no tensors": _pieces(b"\x80\x04]."),
    "a state of a number": lambda folder: ((folder / "state.json").write_text("7"), _rehash(folder)),
    "a state without a configuration": _in_state(lambda state: state.pop("config")),
    "a state with a configuration of text": _in_state(lambda state: state.update(config="x")),
    "a state with settings of text": _in_state(lambda state: state["config"].update(parallel="x")),
    "a state of another backbone": _in_state(lambda state: state["config"].update(backbone="iresnet_none")),
    "a state of 2^40 dimensions": _in_state(lambda state: state["config"].update(embedding_dim=1 << 40)),
    "a state with images of 2^40 pixels": _in_state(lambda state: state["config"]["data"].update(image_size=1 << 40)),
}


def _read(words: str, change: Change) -> Case:
    return copied(words, "checkpoint", change, "checkpoints/step-00000001")


_exported = partial(_read, "checkpoint export {file} {out}/model.safetensors --centres {out}/c.npy")
_described = partial(_read, "checkpoint info {file}")
_resumed = partial(_read, "train {config} --out {out}/run --resume {file}")


def _without(name: str) -> Change:
    return _in_state(lambda state: state.pop(name))


# What going on alone takes from the small state.
_STATES: dict[str, Change] = {
    f"a state without its {name}": _without(name)
    for name in ("config", "data", "head", "loader", "scaler", "best", "step", "world_size")
} | {
    "a state of a step of text": _in_state(lambda state: state.update(step="1")),
    "a state of a margin of its own": _in_state(lambda state: state["head"]["margin"].update(own=1.0)),
    "a state with a best accuracy of text": _in_state(lambda state: state.update(best={"step": 1, "accuracy": "1"})),
    "a state with savepoints of a number": _in_state(lambda state: state.update(savepoints=1)),
    "a state with tables' files of a number": _in_state(lambda state: state["features"].update(journal=1)),
    "a state with an optimizer of names": _in_state(lambda state: state.update(optimizer={"a.b": 1})),
    "a state with weights frozen by number": _in_state(lambda state: state.update(frozen=[1])),
}
# Resuming takes these from the user, and reads the checkpoint's to say what has changed.
_EXPORT_ONLY = {name for name in CHANGES if name.startswith("a state") and name != "a state of a number"}
_UNDESCRIBED = (
    "a state without a configuration",
    "a state with a configuration of text",
    "a state with settings of text",
)
CASES: dict[str, Case] = {f"{name}, exported": _exported(change) for name, change in CHANGES.items()}
CASES |= {f"{name}, resumed": _resumed(change) for name, change in CHANGES.items() if name not in _EXPORT_ONLY}
CASES |= {f"{name}, resumed": _resumed(change) for name, change in _STATES.items()}
CASES |= {f"{name}, described": _described(change) for name, change in CHANGES.items() if name in _UNDESCRIBED}
