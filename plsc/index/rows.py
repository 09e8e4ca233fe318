"""Rows as searches take them: checked, of unit length, read from their file, ranked exactly where few are left."""

import mmap
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from plsc.embedding.columns import Float32 as Float32
from plsc.embedding.columns import Float64, is_of_file, written_over
from plsc.embedding.columns import Int64 as Int64
from plsc.embedding.columns import Mask as Mask
from plsc.embedding.columns import searchable as searchable
from plsc.errors import UsageError, first_line

# Squared lengths in this range neither underflow nor overflow in float64 on the way; others are rescaled first.
_SMALLEST_SQUARE, _LARGEST_SQUARE = 1e-250, 1e250
_CHUNK_BYTES = 4 << 20  # about a second-level cache, since a chunk is passed over several times
_RANKED_AT_ONCE = 4096  # rows


def unit_vectors(vectors: npt.ArrayLike, dim: int) -> Float32:
    """Normalise vectors to unit length.

    Args:
        vectors: (n, dim) numbers of any scale; an empty list means n = 0.
        dim: the expected length of a row.

    Returns:
        (n, dim) float32, each row of Euclidean length 1.

    Raises:
        UsageError: another shape or type; a row that is zero, NaN or infinite, named by its position.
    """
    array = as_array(vectors)
    if array.size == 0 and array.ndim == 1:
        return np.empty((0, dim), dtype=np.float32)
    if array.ndim != 2 or array.shape[1] != dim or array.dtype.kind not in "fiu":
        raise UsageError(f"vectors are {array.dtype}{list(array.shape)}; they are numbers of shape [n, {dim}]")
    vectors_f64 = array.astype(np.float64, order="C")
    squares = np.einsum("nd,nd->n", vectors_f64, vectors_f64)
    if not ((squares > _SMALLEST_SQUARE) & (squares < _LARGEST_SQUARE)).all():
        vectors_f64 = _rescaled(vectors_f64)
        squares = np.einsum("nd,nd->n", vectors_f64, vectors_f64)
    unit: Float32 = (vectors_f64 / np.sqrt(squares)[:, None]).astype(np.float32)
    return unit


def as_array(values: Any) -> npt.NDArray[Any]:
    """``values`` as an array; :class:`UsageError` for rows of different lengths, and tensors that numpy cannot hold."""
    try:
        return np.asarray(values.detach() if hasattr(values, "detach") else values)
    except ValueError:
        raise UsageError("vectors are rows of different lengths; they are numbers of shape [n, D]") from None
    except TypeError as error:  # of a tensor in bfloat16, or on a GPU
        raise UsageError(f"vectors are numbers that numpy holds, in ordinary memory: {first_line(error)}") from None


def _rescaled(vectors: Float64) -> Float64:
    """``vectors`` (n, D), each row divided by its largest magnitude, so that squares of 1e-300 or 1e300 are exact."""
    finite = np.isfinite(vectors).all(axis=1)
    if not finite.all():
        raise UsageError(f"vector {int(np.flatnonzero(~finite)[0])} holds NaN or infinity")
    largest = np.abs(vectors).max(axis=1, initial=0.0, keepdims=True)
    if not largest.all():
        raise UsageError(f"vector {int(np.flatnonzero(largest[:, 0] == 0)[0])} is zero, which has no direction")
    scaled: Float64 = vectors / largest
    return scaled


class RowSource:
    """Read access to ``vectors`` (N, D) float32 in C order: by pread where they map a file, else from memory.

    Pages that are read through a memory map count as resident in this process, and millions of rows read one by one
    would fill it; pread leaves them in the system's cache.

    Attributes:
        descriptor: the open file, or None.
        offset: bytes from the beginning of the file to the first row.
    """

    def __init__(self, vectors: Float32) -> None:
        self.vectors = vectors
        self._row_bytes = 4 * int(vectors.shape[1])
        self.descriptor, self.offset = _mapped_file(vectors)
        self._name = str(getattr(vectors, "filename", ""))
        if self.descriptor is not None:
            weakref.finalize(self, os.close, self.descriptor)

    def chunks(self) -> Iterator[tuple[int, Float32]]:
        """Yield (first row, copy of the rows from there), about 4 MiB each, until all rows are covered."""
        count = max(1, _CHUNK_BYTES // max(1, self._row_bytes))
        for start in range(0, len(self.vectors), count):
            yield start, self._range(start, min(start + count, len(self.vectors)))

    def take(self, rows: Int64) -> Float32:
        """Copy ``rows`` (n,) into an array (n, D)."""
        if self.descriptor is None or not len(rows):
            return np.array(self.vectors[rows], subok=False)
        if int(rows[-1]) - int(rows[0]) == len(rows) - 1 and bool((np.diff(rows) == 1).all()):
            return self._range(int(rows[0]), int(rows[-1]) + 1)
        return np.concatenate([self._range(row, row + 1) for row in rows.tolist()])

    def _range(self, start: int, stop: int) -> Float32:
        if self.descriptor is None:
            return np.array(self.vectors[start:stop], subok=False)
        rows = np.empty((stop - start, self.vectors.shape[1]), dtype=np.float32)
        left, offset = rows.reshape(-1).view(np.uint8).data, self.offset + start * self._row_bytes
        while left:  # pread may return less than was asked for
            count = os.preadv(self.descriptor, [left], offset)
            if not count:
                raise written_over(self._name)
            left, offset = left[count:], offset + count
        return rows


def rank(query: Float32, source: RowSource, rows: Int64, k: int) -> tuple[Float32, Int64]:
    """Rank candidate rows by their float64 inner products with a query.

    Equal rows get equal scores, because the products of each row are added up in the same order; a matrix product
    does not promise that.

    Args:
        query: (D,).
        source: the rows.
        rows: (n,) candidates, ascending.
        k: how many to return, at most n.

    Returns:
        Scores (k,) float32, best first, and their rows (k,); ties by row number.
    """
    scores = np.empty(len(rows))
    query_f64 = query.astype(np.float64)
    for start in range(0, len(rows), _RANKED_AT_ONCE):
        part = slice(start, start + _RANKED_AT_ONCE)
        scores[part] = (source.take(rows[part]).astype(np.float64) * query_f64).sum(axis=1)
    positions = np.arange(len(scores))
    if k < len(scores):
        least = np.partition(scores, len(scores) - k)[len(scores) - k]
        positions = np.flatnonzero(scores >= least)
    order = positions[np.argsort(-scores[positions], kind="stable")][:k]
    return scores[order].astype(np.float32), rows[order]


def _mapped_file(vectors: Float32) -> tuple[int | None, int]:
    """An open descriptor and the offset of the first row, if ``vectors`` is a plain map of an existing file."""
    base = getattr(vectors, "_mmap", None)
    if not isinstance(vectors, np.memmap) or base is None or vectors.mode not in ("r", "r+") or not vectors.size:
        return None, 0  # a private (copy-on-write) map may differ from its file
    name = vectors.filename
    if not isinstance(name, str | os.PathLike) or not hasattr(os, "preadv"):
        return None, 0
    # np.memmap maps from the page boundary below its offset; a slice of it begins later than the map does.
    map_start = vectors.offset - vectors.offset % mmap.ALLOCATIONGRANULARITY
    offset = map_start + vectors.ctypes.data - np.frombuffer(base, np.uint8).ctypes.data
    try:
        descriptor = os.open(Path(name), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None, 0
    if os.fstat(descriptor).st_size < offset + vectors.nbytes or not is_of_file(vectors, descriptor):
        os.close(descriptor)
        return None, 0
    return descriptor, offset
