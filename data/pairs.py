"""Verification sets (``.bin``): pairs of encoded images, and whether each pair shows the same identity.

The format is insightface's: a pickle of ``(images, is_same)`` with 2N encoded images and N truth values.
A pickle is a program, so it is read with one that knows no function but the few below, all of them inert.
"""

import io
import pickle
import pickletools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plsc.errors import DataError, UsageError
from plsc.files import atomic_write


@dataclass(frozen=True)
class PairSet:
    """images: 2N encoded images, of which 2i and 2i+1 are pair i; is_same: (N,) bool."""

    images: Sequence[bytes]
    is_same: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.is_same)


def read_pairs(path: str | Path) -> PairSet:
    """Read a ``.bin`` verification set, written by Python 2 or 3, with images as bytes or uint8 arrays.

    Nothing in the file is executed. Raises UsageError if the file does not exist, and DataError naming what
    is wrong with it: no pickle, a global that it may not use, or content of another shape.
    """
    path = Path(path)
    if not path.is_file():
        raise UsageError(f"there is no {path}; it would be a .bin of verification pairs")
    content = _unpickled(path.read_bytes(), path)
    if not isinstance(content, tuple | list) or len(content) != 2:
        raise DataError(f"{path} is not a verification set: it holds no (images, is_same)")
    images = [_image_bytes(image, path) for image in _items(content[0], path)]
    is_same = np.array([_truth(value, path) for value in _items(content[1], path)], dtype=np.bool_)
    if len(is_same) == 0 or len(images) != 2 * len(is_same):
        raise DataError(f"{path} holds {len(images)} images for {len(is_same)} pairs; it takes two for each")
    return PairSet(images, is_same)


def write_pairs(path: str | Path, images: Sequence[bytes], is_same: Sequence[bool] | NDArray[np.bool_]) -> None:
    """Write 2N encoded images and N truth values as a ``.bin`` that insightface's tools read too."""
    if len(images) != 2 * len(is_same):
        raise UsageError(f"{len(images)} images do not make {len(is_same)} pairs; give two for each")
    with atomic_write(Path(path)) as tmp_path, tmp_path.open("wb") as file:
        pickle.dump(([bytes(image) for image in images], [bool(same) for same in is_same]), file, protocol=4)


class _Refused(Exception):
    """The pickle asks for a global that verification sets do not need."""


def _unpickled(data: bytes, path: Path) -> Any:
    try:
        _check_memo(data)
        return _InertUnpickler(io.BytesIO(data), encoding="bytes").load()
    except _Refused as refused:
        raise DataError(f"{path} asks to run {refused}, as no verification set does; refused") from None
    except Exception as error:  # a damaged pickle raises nearly every kind
        kind = type(error).__name__
        raise DataError(f"{path} is not a readable pickle ({kind}); use another copy") from None


def _check_memo(data: bytes) -> None:
    """Refuse slot numbers beyond any need: the unpickler would allocate a table that long."""
    for count, (operation, argument, _) in enumerate(pickletools.genops(data)):
        if "PUT" in operation.name and isinstance(argument, int) and argument > count:
            raise ValueError("memo slot out of range")


class _Array:
    """Stands in for a numpy array; holds plain uint8 or bool values, flat, and nothing else."""

    __slots__ = ("raw", "shape", "values")

    def __init__(self) -> None:
        self.shape: tuple[int, ...] = (0,)
        self.raw = b""
        self.values: NDArray[Any] = np.empty(0, dtype=np.uint8)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, _, raw = state
        self.fill(raw, dtype, shape)

    def fill(self, raw: Any, dtype: Any, shape: tuple[int, ...]) -> None:
        self.raw = raw if isinstance(raw, bytes) else bytes(memoryview(raw))
        self.values = np.frombuffer(self.raw, dtype=_kind(dtype))
        self.shape = tuple(int(length) for length in shape)
        if int(np.prod(self.shape, dtype=object)) != len(self.values):
            raise ValueError("array shape and content differ")


class _DType:
    """Stands in for a numpy dtype; only its code matters."""

    __slots__ = ("code",)

    def __init__(self, code: Any) -> None:
        self.code = code.decode("ascii") if isinstance(code, bytes) else str(code)

    def __setstate__(self, state: Any) -> None:
        """Byte order and flags, which one-byte values do not have."""


def _kind(dtype: Any) -> type[np.generic]:
    if not isinstance(dtype, _DType) or dtype.code not in ("u1", "|u1", "b1", "|b1", "?"):
        raise ValueError("an array of neither uint8 nor bool")
    return np.uint8 if "u1" in dtype.code else np.bool_


# What a pickle may call, as slotless objects: it can change none of them, and each checks what it is given.
class _Inert:
    __slots__ = ()


class _NdarrayType(_Inert):
    pass


class _MakeDType(_Inert):
    def __call__(self, code: Any, align: Any = False, copy: Any = False) -> _DType:
        return _DType(code)


class _Reconstruct(_Inert):
    def __call__(self, subtype: Any, shape: Any, code: Any) -> _Array:
        if not isinstance(subtype, _NdarrayType):
            raise ValueError("a subclass of numpy's array")
        return _Array()


class _FromBuffer(_Inert):
    def __call__(self, buffer: Any, dtype: Any, shape: Any, order: Any = "C", axis_order: Any = None) -> _Array:
        array = _Array()
        array.fill(buffer, dtype, shape if isinstance(shape, tuple) else (shape,))
        return array


class _Scalar(_Inert):
    def __call__(self, dtype: Any, raw: Any) -> bool:
        values = np.frombuffer(bytes(memoryview(raw)), dtype=_kind(dtype))
        return bool(values.item())


class _Encode(_Inert):
    def __call__(self, text: Any, encoding: Any) -> bytes:
        if not isinstance(text, str) or encoding not in ("latin1", b"latin1"):
            raise ValueError("an encoding other than latin1")
        return text.encode("latin1")


class _EmptyBytes(_Inert):
    def __call__(self) -> bytes:
        return b""


_GLOBALS: dict[tuple[str, str], _Inert] = {
    ("numpy", "ndarray"): _NdarrayType(),
    ("numpy", "dtype"): _MakeDType(),
    ("_codecs", "encode"): _Encode(),
    ("__builtin__", "bytes"): _EmptyBytes(),
    ("builtins", "bytes"): _EmptyBytes(),
} | {
    (f"numpy.{core}.{module}", name): inert
    for core in ("core", "_core")
    for module, name, inert in (
        ("multiarray", "_reconstruct", _Reconstruct()),
        ("multiarray", "scalar", _Scalar()),
        ("numeric", "_frombuffer", _FromBuffer()),
    )
}


class _InertUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """One of the inert objects above; every other global is refused by name."""
        try:
            return _GLOBALS[module, name]
        except KeyError:
            raise _Refused(f"{module}.{name}") from None


def _items(values: Any, path: Path) -> list[Any]:
    if isinstance(values, _Array):
        return list(values.values)
    if not isinstance(values, list | tuple):
        raise DataError(f"{path} is not a verification set: a {type(values).__name__} where a list belongs")
    return list(values)


def _image_bytes(image: Any, path: Path) -> bytes:
    if isinstance(image, bytes):
        return image
    if isinstance(image, _Array) and image.values.dtype == np.uint8 and image.values.size == max(image.shape):
        return image.raw
    raise DataError(f"{path} holds an image that is not an encoded one; store JPEG or PNG bytes")


def _truth(value: Any, path: Path) -> bool:
    if isinstance(value, bool | np.bool_) or (isinstance(value, int | np.integer) and value in (0, 1)):
        return bool(value)
    raise DataError(f"{path} holds a truth value that is neither true nor false")
