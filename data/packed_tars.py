"""Compressed tars, which are unpacked once to be converted: no picture in them is at a place of its own."""

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from plsc.data.shards import find_shards, split_options
from plsc.errors import DataError, UsageError, first_line
from plsc.files import new_folder, remove_leftovers, storage_errors
from plsc.progress import note
from plsc.regular_files import open_regular

PACKED_SUFFIXES = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
_SPECIFIED = "tars:"
_TEMPORARY = "unpacked-tars"
_AT_ONCE = 1 << 20  # bytes
_PACKERS = {b"\x1f\x8b": "gzip", b"BZh": "bz2", b"\xfd7zXZ\0": "lzma", b"\x28\xb5\x2f\xfd": "compression.zstd"}


def packer_of(file: BufferedReader) -> str | None:
    """The module that unpacks a file, by its first bytes, whatever its name is; None where it is not compressed."""
    first = file.peek(8)
    return next((module for magic, module in _PACKERS.items() if first.startswith(magic)), None)


@contextmanager
def unpacked_tars(source: str, out: Path) -> Iterator[str]:
    """Yield ``source``; of compressed tars, one of the same tars unpacked beside ``out`` while the block runs.

    Raises:
        UsageError: this Python has no module for the compression.
        DataError: a tar cannot be unpacked.
        StorageError: the disk is full.
    """
    path, _ = split_options(source.removeprefix(_SPECIFIED))
    shards = find_shards(path, (".tar", *PACKED_SUFFIXES)) or []
    if not any(shard.is_file() and _is_packed(shard) for shard in shards):
        yield source
        return
    with new_folder(out.absolute().parent) as folder:
        remove_leftovers(folder / _TEMPORARY)
        with TemporaryDirectory(prefix=f".{_TEMPORARY}.", suffix=f".{os.getpid()}.tmp", dir=folder) as temporary:
            plain = [_unpacked(shard, Path(temporary, f"{number}.tar")) for number, shard in enumerate(shards)]
            names = Path(temporary, "shards.list")
            names.write_bytes(b"".join(os.fsencode(shard.absolute()) + b"\n" for shard in plain))
            yield f"{_SPECIFIED}{names}{source.removeprefix(_SPECIFIED).removeprefix(path)}"


def _is_packed(shard: Path) -> bool:
    with open_regular(shard) as file:
        return packer_of(file) is not None


def _unpacked(shard: Path, target: Path) -> Path:
    with open_regular(shard) as file:
        name = packer_of(file)
        if name is None:
            return shard
        try:
            packer = importlib.import_module(name)
        except ImportError:
            raise UsageError(f"{shard}: this Python has no {name}, 3.14 does; unpack it yourself") from None
        note(f"plsc: unpacking {shard} beside the output")
        with storage_errors(target), packer.open(file, "rb") as content, target.open("wb") as unpacked:
            while piece := _piece(content, shard):
                unpacked.write(piece)
    return target


def _piece(content: Any, shard: Path) -> bytes:
    try:
        return bytes(content.read(_AT_ONCE))
    except Exception as error:  # each library has its own
        raise DataError(f"{shard} cannot be unpacked: {first_line(error)}; use another copy") from None
