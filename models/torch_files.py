"""PyTorch's files, checked before torch.load reads them: what they would take, and whether anything could be hidden.

``weights_only`` keeps torch.load from running what a file asks for. It does not limit memory, since an archive may be
compressed, nor time: the hash of t = (t, t), nested 60 deep in 300 bytes, takes 2^60 steps.
"""

import argparse
import os
import pickle
import pickletools
import re
import struct
import warnings
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from plsc.errors import DataError, first_line
from plsc.files import pinned

_END, _END_BYTES = b"PK\5\6", 22  # of an archive's directory
_LOCATOR, _LOCATOR_BYTES = b"PK\6\7", 20  # of the larger one of archives beyond 4 GiB,
_LARGE_END_BYTES = 56  # which stands before it
_LARGEST_PROGRAM = 64 << 20  # a pickle has some 200 bytes for each tensor
_LARGEST_TUPLE = 10_000  # items, with all that lie in them
_LEGACY_PICKLES = 5  # magic number, protocol, system, content, keys of the storages
_SHARED = 4  # how many times a file's bytes may appear in its tensors
_CHECKPOINT = re.compile(r"step-\d+")  # the folder of a checkpoint of plsc train, in …
_CHECKPOINTS = "checkpoints"  # … this one of a run


def checkpoint_hint(path: Path) -> str:
    """What writes the model of a checkpoint of ``plsc train`` that was named in its place; "" of anything else."""
    inside = path if path.is_dir() else path.parent
    if _CHECKPOINT.fullmatch(inside.name):
        found = inside
    elif path.is_dir() and (path.name == _CHECKPOINTS or (path / _CHECKPOINTS).is_dir()):
        found = path
    else:
        return ""
    return f"; of a checkpoint, `plsc checkpoint export {found} model.safetensors` writes the model"


def check_torch_file(file: BinaryIO) -> None:
    """Check an open file of torch.save, in the present form or that before torch 1.6, and go back to its beginning.

    Raises:
        DataError: an archive is compressed, its members overlap or its directory is ambiguous; or a pickle nests tuples
            so that their hash takes for ever.
    """
    path = Path(file.name)
    if zipfile.is_zipfile(file):
        for program in _archived_programs(file, path):
            _check_tuples(program, path)
    else:
        file.seek(0)
        for _ in range(_LEGACY_PICKLES):
            if not _check_tuples(file, path):
                break
    file.seek(0)


def load_torch_file(file: BinaryIO, *, mapped: bool = False) -> Any:
    """Load an open file of torch.save, on the CPU: tensors in plain containers, which are checked by the caller.

    Args:
        file: is read from its beginning, after :func:`check_torch_file`.
        mapped: the tensors lie in the file, and not in memory, if it has the form since torch 1.6.

    Raises:
        DataError: it holds other objects, or is corrupt.
    """
    path = Path(file.name)
    check_torch_file(file)
    try:
        is_mapped = mapped and zipfile.is_zipfile(file)
        file.seek(0)
        # timm's training checkpoints hold their arguments as a Namespace, a plain container of values.
        with warnings.catch_warnings(), torch.serialization.safe_globals([argparse.Namespace]):
            warnings.simplefilter("ignore")  # it warns of pickles that are refused below
            source = pinned(file) if is_mapped else file
            loaded = torch.load(source, map_location="cpu", weights_only=True, mmap=is_mapped)
    except pickle.UnpicklingError:
        raise DataError(
            f"{path} is refused: it is no plain state_dict of tensors "
            "(it holds pickled objects, or is corrupt); save model.state_dict() instead"
        ) from None
    except Exception as error:  # torch.load raises nearly every kind on arbitrary bytes
        if isinstance(error, OSError) and error.filename is not None:  # an OSError without one is of the content
            raise
        raise DataError(f"{path} is truncated or corrupt, or no PyTorch file: {first_line(error)}") from None
    if is_mapped:
        _check_storages(loaded, file)
    return loaded


def _check_storages(loaded: Any, file: BinaryIO) -> None:
    """Refuse mapped storages that are no members of the archive: torch takes what lies behind one that is too short."""
    with zipfile.ZipFile(file) as archive:
        members = Counter(entry.file_size for entry in archive.infolist() if "/data/" in entry.filename)
    storages = {storage.data_ptr(): storage for storage in map(Tensor.untyped_storage, _dense_tensors(loaded))}
    if Counter(storage.nbytes() for storage in storages.values() if storage.nbytes()) - members:
        raise DataError(f"{file.name} is truncated or corrupt: its members are not as long as its tensors")


def _dense_tensors(value: Any) -> Iterator[Tensor]:
    """The tensors on the CPU in dictionaries, lists and tuples, which may hold each other."""
    waiting, seen = [value], set()
    while waiting:
        each = waiting.pop()
        if isinstance(each, Tensor):
            if each.layout == torch.strided and each.device.type == "cpu" and not each.is_nested:
                yield each
        elif isinstance(each, dict | list | tuple) and id(each) not in seen:
            seen.add(id(each))
            waiting += each.values() if isinstance(each, dict) else each


def archive_names(file: Path | BinaryIO) -> list[str]:
    """The names in a zip archive; none of other files, nor of a damaged one, which :func:`check_torch_file` refuses."""
    if not zipfile.is_zipfile(file):
        return []
    try:
        with zipfile.ZipFile(file) as archive:
            return archive.namelist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError):
        return []


def check_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Raise :class:`DataError` for a tensor that is more than the file holds, or holds nothing at all."""
    total = 0
    for key, tensor in tensors.items():
        count = tensor.numel() * tensor.element_size()
        plain = not (tensor.is_sparse or tensor.is_sparse_csr or tensor.is_quantized or tensor.is_nested)
        if not plain or tensor.device.type != "cpu" or count > tensor.untyped_storage().nbytes():
            raise DataError(f"{path} is no plain state_dict: {key!r} has no storage of its own; save it again")
        total += count
    if total > _SHARED * path.stat().st_size:
        raise DataError(f"{path} is no plain state_dict: its tensors share their storage; save it again")


def _archived_programs(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """Check an archive, and yield its pickles."""
    size = file.seek(0, os.SEEK_END)
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
                raise DataError(f"{path} is refused: it is compressed, as torch.save never does; save it again")
            if sum(entry.file_size for entry in entries) > size or not _has_plain_end(file, size):
                raise DataError(f"{path} is refused: its members overlap, or it has two directories; save it again")
            for entry in entries:
                if entry.filename.endswith("data.pkl"):
                    if entry.file_size > _LARGEST_PROGRAM:
                        raise DataError(f"{path} is refused: its pickle has {entry.file_size:,} bytes")
                    yield archive.read(entry)
    except (zipfile.BadZipFile, ValueError, EOFError, NotImplementedError, OverflowError) as error:
        raise DataError(f"{path} is truncated or corrupt: {str(error)[:200]}") from None


def _has_plain_end(file: BinaryIO, size: int) -> bool:
    """Return whether every reader finds the directory that Python found: the file's last bytes say where it lies."""
    tail_bytes = min(size, _END_BYTES + _LOCATOR_BYTES)
    file.seek(size - tail_bytes)
    tail = file.read(tail_bytes)
    locator = tail[:-_END_BYTES]
    if tail[-_END_BYTES:][:4] != _END:
        return False
    if locator[:4] != _LOCATOR:
        return True
    (place,) = struct.unpack("<Q", locator[8:16])
    return bool(place == size - _END_BYTES - _LOCATOR_BYTES - _LARGE_END_BYTES)


def _check_tuples(program: bytes | BinaryIO, path: Path) -> bool:
    """Refuse tuples that hold others many times over; returns whether the pickle comes to its end.

    The stack is followed with the number of items in each tuple, and in all tuples within; what is no pickle is left to
    torch, which says so.
    """
    stack: list[int] = []
    marks: list[int] = []
    memo: dict[int, int] = {}
    try:
        for operation, argument, _ in pickletools.genops(program):
            name = operation.name
            if name == "MARK":
                marks.append(len(stack))
            elif name in ("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"):
                first = marks.pop() if name == "TUPLE" else len(stack) - int(name[-1])
                stack[first:] = [1 + sum(stack[first:])]
                if stack[-1] > _LARGEST_TUPLE:
                    raise DataError(f"{path} is refused: it holds tuples in tuples, as no state_dict does")
            elif name in ("GET", "BINGET", "LONG_BINGET"):
                stack.append(memo[int(str(argument))])
            elif name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
                memo[len(memo) if argument is None else int(argument)] = stack[-1]
            elif name == "DUP":
                stack.append(stack[-1])
            elif name == "STOP":
                return True
            else:
                _follow(operation, stack, marks)
    except (ValueError, LookupError, TypeError):
        pass
    return False


def _follow(operation: pickletools.OpcodeInfo, stack: list[int], marks: list[int]) -> None:
    """Take from the stack what an operation takes, and put a single item for each that it leaves."""
    if pickletools.markobject in operation.stack_before:
        below = operation.stack_before.index(pickletools.markobject)
        del stack[marks.pop() :]
    else:
        below = len(operation.stack_before)
    if below:
        del stack[-below:]
    stack += [1] * len(operation.stack_after)
