"""Verification sets (``.bin``): pairs of encoded images, each with its truth: same identity or not.

The format is insightface's: a pickle of ``(images, is_same)`` with 2N encoded images and N truth values. A pickle is a
program, so :func:`read_pairs` runs it in an unpickler whose only callables are a few inert ones. :func:`make_pairs`
draws a set from labelled images.
"""

import io
import math
import pickle
import pickletools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plsc.data.codec import Encoding, decode_image
from plsc.data.dataset import ImageDataset, encoded_image
from plsc.errors import DataError, UsageError
from plsc.files import atomic_write, check_output, remove_leftovers
from plsc.regular_files import open_regular


@dataclass(frozen=True)
class PairSet:
    """Pairs: 2N encoded ``images``, of which 2i and 2i+1 are pair i, and ``is_same``, bool (N,)."""

    images: Sequence[bytes]
    is_same: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.is_same)


def read_pairs(path: str | Path) -> PairSet:
    """Read a ``.bin`` verification set, written by Python 2 or 3, with images as bytes or uint8 arrays.

    Nothing in the file is executed, and time and memory are linear in its size.

    Raises:
        UsageError: the file does not exist.
        DataError: it is no pickle, uses a global that it may not use, or has content of another shape.
    """
    path = Path(path)
    if not path.is_file():
        raise UsageError(f"there is no {path}; it would be a .bin of verification pairs")
    with open_regular(path) as file:
        content = _unpickled(file.read(), path)
    if not isinstance(content, tuple | list) or len(content) != 2:
        raise DataError(f"{path} is not a verification set: it holds no (images, is_same)")
    images = [_image_bytes(image, path) for image in _items(content[0], path)]
    is_same = np.array([_truth(value, path) for value in _items(content[1], path)], dtype=np.bool_)
    if len(is_same) == 0 or len(images) != 2 * len(is_same):
        raise DataError(f"{path} holds {len(images)} images for {len(is_same)} pairs; it takes two for each")
    return PairSet(images, is_same)


def write_pairs(path: str | Path, images: Sequence[bytes], is_same: Sequence[bool] | NDArray[np.bool_]) -> None:
    """Write 2N encoded images and N truth values as a ``.bin`` that insightface's tools can read, atomically."""
    remove_leftovers(Path(path))
    if len(images) != 2 * len(is_same):
        raise UsageError(f"{len(images)} images do not make {len(is_same)} pairs; give two for each")
    with atomic_write(Path(path)) as tmp_path, tmp_path.open("wb") as file:
        pickle.dump(([bytes(image) for image in images], [bool(same) for same in is_same]), file, protocol=4)


class _Refused(Exception):
    """The pickle uses a global that verification sets do not need."""


def _unpickled(data: bytes, path: Path) -> Any:
    try:
        _check_operations(data)
        return _InertUnpickler(io.BytesIO(data), encoding="bytes").load()
    except _Refused as refused:
        raise DataError(f"{path} asks to run {refused}, as no verification set does; refused") from None
    except DataError as error:
        raise DataError(f"{path} {error}, as no verification set does; refused") from None
    except Exception as error:  # a damaged pickle raises nearly every kind
        kind = type(error).__name__
        raise DataError(f"{path} is not a readable pickle ({kind}); use another copy") from None


_MOST_AXES = 64  # numpy's own limit
# Operations that hash objects of the pickle: that of t = (t, t), nested 60 deep in 300 bytes, takes 2^60 steps.
_HASHING = {"DICT", "EMPTY_DICT", "SETITEM", "SETITEMS", "EMPTY_SET", "ADDITEMS", "FROZENSET"}


def _check_operations(data: bytes) -> None:
    """Refuse operations by which a small pickle takes unbounded time or memory, before any of them runs."""
    for count, (operation, argument, _) in enumerate(pickletools.genops(data)):
        if operation.name in _HASHING:
            raise DataError("holds a dictionary or a set")
        # The unpickler allocates a memo table as long as the largest slot number.
        if "PUT" in operation.name and isinstance(argument, int) and argument > count:
            raise ValueError("memo slot out of range")


class _Array:
    """Stand-in for a numpy array of uint8 or bool, stored flat."""

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
        # Small lengths alone: the product of huge ones takes time.
        if len(shape) > _MOST_AXES or any(type(length) is not int or length > len(self.values) for length in shape):
            raise ValueError("a shape that is none")
        self.shape = tuple(shape)
        if math.prod(self.shape) != len(self.values):
            raise ValueError("array shape and content differ")

    def is_flat(self) -> bool:
        """Return whether at most one axis is longer than 1."""
        return self.values.size == max(self.shape, default=0)


class _DType:
    """Stand-in for a numpy dtype; only its code matters."""

    __slots__ = ("code",)

    def __init__(self, code: Any, align: Any = False, copy: Any = False) -> None:
        # Nothing but text: str() of nested tuples would take exponential time, as their hash does.
        if not isinstance(code, str | bytes):
            raise ValueError("a dtype code that is no text")
        self.code = code.decode("ascii") if isinstance(code, bytes) else code

    def __setstate__(self, state: Any) -> None:
        """Ignore byte order and flags, which one-byte values do not have."""


def _kind(dtype: Any) -> type[np.generic]:
    if not isinstance(dtype, _DType) or dtype.code not in ("u1", "|u1", "b1", "|b1", "?"):
        raise ValueError("an array of neither uint8 nor bool")
    return np.uint8 if "u1" in dtype.code else np.bool_


class _Inert:
    """A function that a pickle may call. It checks its arguments, and BUILD can change nothing of it."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)

    def __setstate__(self, state: Any) -> None:
        raise ValueError("a state for a function")


def _reconstruct(subtype: Any, shape: Any, code: Any) -> _Array:
    if subtype is not _NDARRAY:
        raise ValueError("a subclass of numpy's array")
    return _Array()


def _from_buffer(buffer: Any, dtype: Any, shape: Any, order: Any = "C", axis_order: Any = None) -> _Array:
    array = _Array()
    array.fill(buffer, dtype, shape if isinstance(shape, tuple) else (shape,))
    return array


def _scalar(dtype: Any, raw: Any) -> bool:
    return bool(np.frombuffer(bytes(memoryview(raw)), dtype=_kind(dtype)).item())


def _encode(text: Any, encoding: Any) -> bytes:
    if not isinstance(text, str) or encoding not in ("latin1", b"latin1"):
        raise ValueError("an encoding other than latin1")
    return text.encode("latin1")


_NDARRAY, _EMPTY_BYTES = object(), _Inert(lambda: b"")  # the first one stands for the class
_GLOBALS: dict[tuple[str, str], object] = {
    ("numpy", "ndarray"): _NDARRAY,
    ("numpy", "dtype"): _Inert(_DType),
    ("_codecs", "encode"): _Inert(_encode),
    ("__builtin__", "bytes"): _EMPTY_BYTES,
    ("builtins", "bytes"): _EMPTY_BYTES,
}
for _core in ("numpy.core", "numpy._core"):
    _GLOBALS[f"{_core}.multiarray", "_reconstruct"] = _Inert(_reconstruct)
    _GLOBALS[f"{_core}.multiarray", "scalar"] = _Inert(_scalar)
    _GLOBALS[f"{_core}.numeric", "_frombuffer"] = _Inert(_from_buffer)


class _InertUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return one of the inert objects above; every other global is refused by name."""
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
    if isinstance(image, _Array) and image.values.dtype == np.uint8 and image.is_flat():
        return image.raw
    raise DataError(f"{path} holds an image that is not an encoded one; store JPEG or PNG bytes")


def _truth(value: Any, path: Path) -> bool:
    if isinstance(value, bool | np.bool_) or (isinstance(value, int | np.integer) and value in (0, 1)):
        return bool(value)
    raise DataError(f"{path} holds a truth value that is neither true nor false")


def make_pairs(
    dataset: ImageDataset,
    out: Path,
    *,
    pairs: int,
    seed: int = 0,
    encoding: Encoding = "jpeg",
    overwrite: bool = False,
) -> dict[str, Any]:
    """Draw a verification set of ``pairs`` distinct pairs, half of one identity each, and write it as a ``.bin``.

    Same and different pairs alternate, so that each of the protocol's ten unshuffled folds has equally many of both.

    Args:
        dataset: labelled images; they are copied as stored if its ``image_size`` is None, otherwise resized and
            re-encoded.
        out: the file to write.
        pairs: number of pairs, at least 2.
        seed: determines the draw.
        encoding: of re-encoded images.
        overwrite: replace ``out`` if it exists.

    Returns:
        ``{"out", "pairs", "same", "images", "identities"}``.

    Raises:
        UsageError: the data set does not have that many pairs, or ``out`` exists.
        DataError: an image does not decode.
    """
    check_output(out, overwrite=overwrite)
    if pairs < 2:
        raise UsageError(f"{pairs} pairs are too few; ask for at least 2")
    draws = _PairSampler(dataset.labels, np.random.default_rng(seed), dataset.source)
    same = draws.same((pairs + 1) // 2)
    different = draws.different(pairs // 2)
    drawn = np.empty((pairs, 2), dtype=np.int64)
    drawn[0::2], drawn[1::2] = same, different
    used = np.unique(drawn)
    images = {int(index): encoded_and_checked(dataset, int(index), encoding) for index in used}
    drawn_images = [images[int(index)] for index in drawn.reshape(-1)]
    write_pairs(out, drawn_images, np.arange(pairs) % 2 == 0)
    return {
        "out": str(out),
        "pairs": pairs,
        "same": len(same),
        "images": len(used),
        "identities": len(np.unique(dataset.labels[used])),
    }


def encoded_and_checked(dataset: ImageDataset, index: int, encoding: Encoding) -> bytes:
    """Return image ``index`` as :func:`plsc.data.dataset.encoded_image`; :class:`DataError` if it does not decode."""
    data = encoded_image(dataset, index, encoding)
    decode_image(data, f"image {dataset.key(index)} of {dataset.source}")
    return data


class _PairSampler:
    """Draws pairs of images, uniformly over identities: one with a thousand images is drawn as often as any other."""

    def __init__(self, labels: NDArray[np.int64], rng: np.random.Generator, source: str) -> None:
        self._rng, self._source = rng, source
        self._order = np.argsort(labels, kind="stable")
        counts = np.bincount(labels)
        self._counts = counts[counts > 0]  # of each identity
        self._starts = np.cumsum(self._counts) - self._counts
        self._ends = np.repeat(self._starts + self._counts, self._counts)  # one past each image's own identity

    def same(self, count: int) -> NDArray[np.int64]:
        """Draw ``count`` distinct pairs int64 (count, 2) of images of one identity."""
        following = np.arange(1, len(self._order) + 1)
        return self._drawn(count, "the same identity", following, self._ends - following, self._draw_same)

    def different(self, count: int) -> NDArray[np.int64]:
        """Draw ``count`` distinct pairs int64 (count, 2) of images of two identities."""
        others = len(self._order) - self._ends
        return self._drawn(count, "different identities", self._ends, others, self._draw_different)

    def _drawn(
        self,
        count: int,
        kind: str,
        begin: NDArray[np.int64],
        others: NDArray[np.int64],
        draw: Callable[[int], NDArray[np.int64]],
    ) -> NDArray[np.int64]:
        """Draw pairs, where image p forms those with the images from begin[p] on, others[p] of them.

        If nearly all are wanted, they are listed and chosen among: ``draw`` would mostly repeat itself. Otherwise it is
        called until ``count`` pairs differ, which keep the order in which they first came.
        """
        possible = int(others.sum())
        if possible < count:
            raise UsageError(
                f"{self._source} has {possible:,} pairs of {kind}, but {count:,} are requested; request fewer pairs"
            )
        if possible < 4 * count:
            rows = np.repeat(np.arange(len(others)), others)
            columns = begin[rows] + np.arange(possible) - np.repeat(np.cumsum(others) - others, others)
            chosen = self._rng.permutation(possible)[:count]
            listed: NDArray[np.int64] = self._order[np.stack([rows[chosen], columns[chosen]], axis=1)]
            return listed
        pairs = np.empty((0, 2), dtype=np.int64)
        while len(pairs) < count:
            pairs = np.concatenate([pairs, np.sort(draw(count), axis=1)])
            pairs = pairs[np.sort(np.unique(pairs, axis=0, return_index=True)[1])]
        return pairs[:count]

    def _draw_same(self, count: int) -> NDArray[np.int64]:
        identity = self._rng.choice(np.flatnonzero(self._counts > 1), count)
        first = self._rng.integers(self._counts[identity])
        other = self._rng.integers(self._counts[identity] - 1)
        positions = self._starts[identity][:, None] + np.stack([first, other + (other >= first)], axis=1)
        pairs: NDArray[np.int64] = self._order[positions]
        return pairs

    def _draw_different(self, count: int) -> NDArray[np.int64]:
        first = self._rng.integers(len(self._counts), size=count)
        other = self._rng.integers(len(self._counts) - 1, size=count)
        identity = np.stack([first, other + (other >= first)], axis=1)
        positions = self._starts[identity] + self._rng.integers(self._counts[identity])
        pairs: NDArray[np.int64] = self._order[positions]
        return pairs
