"""The compiled kernels as functions of tensors.

The two passes multiply by the best units of the processor that there are for the table's dtype (:func:`products`); the
row update runs on any. Work is cut among torch's number of threads in multiples of the kernels' own blocks, so that no
row's result depends on the cut.
"""

import ctypes
import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plsc.native.build import library

BLOCK = 256  # classes that the kernels work on together
IN_CACHE = 1024  # classes whose gradient a core's cache keeps until the update takes it
_LEAST_FLOAT32_BATCH = 16  # below it PyTorch's products of float32 tables are faster: the kernels fill batches up
_TILE = 32  # what D and the padded batch are multiples of
_KINDS = {None: 0, torch.float32: 1, torch.bfloat16: 2, torch.int8: 3}
_POINTER, _KIND, _INTEGER, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
_ROWS = (_POINTER, _KIND, _POINTER, _POINTER, _INTEGER, _INTEGER)  # table, kind, inverse, index, first, count
# The kernels' parameters, in the order of head_kernels.cpp.
_PARAMETERS = {
    "plsc_products": (_KIND,),
    "plsc_factor_bytes": (_KIND,),
    "plsc_pack": (_POINTER, _KIND, _INTEGER, _INTEGER, _POINTER, _POINTER),
    # columns, batch, dim, s, position, labels, total, pull
    "plsc_first_pass": (*_ROWS, _POINTER, _INTEGER, _INTEGER, _FLOAT, _POINTER, _INTEGER, _POINTER, _POINTER),
    # columns, rows, batch, dim, s, position, labels, log_z, scale, target_grad, gradient
    "plsc_gradient": (*_ROWS, _POINTER, _POINTER, _INTEGER, _INTEGER, _FLOAT, _POINTER, _INTEGER, *[_POINTER] * 4),
    # dim, gradient, factor, lr, momentum, weight_decay, nesterov, state, its kind and scale, key, numbers, first_number
    "plsc_sgd": (
        *(*_ROWS, _INTEGER, _POINTER, _FLOAT, _FLOAT, _FLOAT, _FLOAT, ctypes.c_int),
        *(_POINTER, _KIND, _POINTER, ctypes.c_uint32, _POINTER, _INTEGER),
    ),
}


def whole_blocks(classes: int) -> int:
    """``classes`` rounded up to a multiple of BLOCK."""
    return -(-classes // BLOCK) * BLOCK


def is_compiled() -> bool:
    """Return whether :class:`Sgd` can run here."""
    return library() is not None


def products(dtype: torch.dtype) -> str | None:
    """What multiplies tables of ``dtype`` (float32 or bfloat16) in the passes; None: no kernels are compiled.

    "amx" (Intel's matrix tiles), "avx512-bf16" and "neon-bf16" (dot products of pairs) take bfloat16 factors; "avx512",
    "avx2" and "neon" multiply and add float32, to which they widen bfloat16 rows; "portable" is slower than PyTorch.
    """
    if not is_compiled():
        return None
    name: bytes = _call("plsc_products", _KINDS[dtype])
    return name.decode()


def why_no_passes(dtype: torch.dtype, dim: int) -> str | None:
    """The reason why the passes cannot take tables of this dtype and width; None if they can."""
    if dim % _TILE:
        return f"D is no multiple of {_TILE}"
    return "no AVX2 or NEON" if products(dtype) in (None, "portable") else None


def least_batch(dtype: torch.dtype) -> int:
    """The samples from which on the passes over tables of ``dtype`` are faster than PyTorch's."""
    return _LEAST_FLOAT32_BATCH if dtype == torch.float32 else 1


@dataclass(frozen=True)
class Table:
    """The rows (n, D) that a call takes: those at ``index`` (int64), or ``count`` of them from ``first`` on."""

    weight: Tensor
    inverse_norm: Tensor
    index: Tensor | None
    first: int
    count: int

    @classmethod
    def visiting(cls, weight: Tensor, inverse_norm: Tensor, index: slice | Tensor) -> "Table":
        """The rows that ``index``, consecutive or a list, selects."""
        if isinstance(index, slice):
            first, stop, _ = index.indices(weight.shape[0])
            return cls(weight, inverse_norm, None, first, stop - first)
        return cls(weight, inverse_norm, index.contiguous(), 0, index.numel())

    def part(self, start: int, stop: int) -> tuple[Tensor | int | None, ...]:
        """A kernel's first arguments, for the rows at positions [start, stop)."""
        table = self.weight, _KINDS[self.weight.dtype], self.inverse_norm
        if self.index is None:
            return *table, None, self.first + start, stop - start
        return *table, self.index[start:], 0, stop - start


class PackedBatch:
    """Unit features (B, D) laid out as factors of the products, B filled up to a multiple of 32 with zeros.

    Args:
        features: (B, D) of the table's dtype, float32 or bfloat16.
        position: (B,) or (B, K) int64, the targets' indices among the selected classes, −1 for none.
    """

    def __init__(self, features: Tensor, position: Tensor) -> None:
        self.batch, self.dim = features.shape
        self.padded = -(-self.batch // _TILE) * _TILE
        padded = features.new_zeros(self.padded, self.dim)
        padded[: self.batch] = features
        kind = _KINDS[features.dtype]
        dtype = torch.float32 if _call("plsc_factor_bytes", kind) == 4 else torch.bfloat16
        self.columns, self.rows = (torch.empty_like(padded, dtype=dtype) for _ in range(2))
        self.position = self.pad(position, -1)
        _call("plsc_pack", padded, kind, self.padded, self.dim, self.columns, self.rows)

    def pad(self, values: Tensor, filling: float = 0) -> Tensor:
        """Values (B,) or (B, K) filled up to the padded batch."""
        of_labels = (0,) * (2 * values.dim() - 2)
        return torch.nn.functional.pad(values, (*of_labels, 0, self.padded - self.batch), value=filling).contiguous()

    def arguments(self, s: float, first: int) -> tuple[Any, ...]:
        """A kernel's arguments from the batch's size on; ``first`` is the position of the first row that it visits."""
        return self.padded, self.dim, s, self.position - first, self.position.numel() // max(self.padded, 1)


class FirstPass:
    """Σ exp(s·cos) over the selected classes but each sample's target, and Σ exp(s·cos)·ρ·W where ``with_grad``."""

    def __init__(self, batch: PackedBatch, s: float, with_grad: bool) -> None:
        self._batch, self._s = batch, s
        threads = max(torch.get_num_threads(), 1)
        self._totals = torch.zeros(threads, batch.padded, dtype=torch.float64)
        self._grads = torch.zeros(threads, batch.padded, batch.dim) if with_grad else None

    def add(self, table: Table, position: int) -> None:
        """Add rows whose first is at ``position`` among the classes that the batch's positions count."""
        batch = self._batch

        def work(thread: int, start: int, stop: int) -> None:
            samples = batch.columns, *batch.arguments(self._s, position + start)
            pull = None if self._grads is None else self._grads[thread]
            _call("plsc_first_pass", *table.part(start, stop), *samples, self._totals[thread], pull)

        _in_threads(work, table.count)

    def result(self) -> tuple[Tensor, Tensor | None]:
        """The sums (B,) in float64, and (B, D) in float32 or None."""
        count = self._batch.batch
        return self._totals.sum(0)[:count], None if self._grads is None else self._grads.sum(0)[:count]


def gradient(
    table: Table, batch: PackedBatch, s: float, position: int, derivatives: tuple[Tensor, Tensor, Tensor], out: Tensor
) -> Tensor:
    """Σ_b P·x of some rows, (count, D) float32: P = scale·exp(s·cos − log_z), and target_grad for targets.

    Args:
        table: the rows.
        batch: the samples.
        s: the logits' scale.
        position: of the first of these rows among the classes that the batch's positions count.
        derivatives: log_z, scale and target_grad, padded and float32, see :meth:`PackedBatch.pad`.
        out: scratch, float32, with room for the rows filled up to a multiple of :data:`BLOCK`. The result is a part.
    """

    def work(thread: int, start: int, stop: int) -> None:
        samples = batch.columns, batch.rows, *batch.arguments(s, position + start)
        _call("plsc_gradient", *table.part(start, stop), *samples, *derivatives, out[start:])

    _in_threads(work, table.count)
    return out[: table.count]


@dataclass(frozen=True)
class Sgd:
    """A step of torch.optim.SGD on rows, whose gradient ``factor`` multiplies.

    ``key`` is of the random bits, see :func:`plsc.head.low_precision.rounding_key`.
    """

    factor: float
    lr: float
    momentum: float
    weight_decay: float
    nesterov: bool
    key: int

    def update(
        self, table: Table, gradient: Tensor, state: Tensor | None, scale: Tensor | None, numbers: Tensor, first: int
    ) -> None:
        """Change rows, their momentum and their 1/norms in place.

        Args:
            table: the rows.
            gradient: (count, D) float32, by the rows divided by their norms.
            state: the momentum (rows, D) in float32, bfloat16 or int8 (with ``scale`` (rows,)), or None.
            scale: of an int8 momentum.
            numbers: (count,) int64, the rows' numbers in the whole table less ``first``; they key the bits.
            first: see there.
        """
        step = float(self.factor), float(self.lr), float(self.momentum), float(self.weight_decay), self.nesterov
        kept = state, _KINDS[None if state is None else state.dtype], scale

        def work(thread: int, start: int, stop: int) -> None:
            rows, dim = table.part(start, stop), table.weight.shape[1]
            _call("plsc_sgd", *rows, dim, gradient[start:], *step, *kept, self.key, numbers[start:], first)

        _in_threads(work, table.count)
        torch.autograd.graph.increment_version(table.weight)


def _call(name: str, *arguments: Tensor | float | None) -> Any:
    """Call a kernel; of tensors it gets the addresses, so that the caller keeps them until it returns."""
    pointers = [each.data_ptr() if isinstance(each, Tensor) else each for each in arguments]
    return _kernel(name, os.environ.get("PLSC_CPU"))(*pointers)


@functools.cache  # a step calls dozens, and the library stays
def _kernel(name: str, path: str | None) -> Any:
    """A kernel of the library for ``path``, which PLSC_CPU names."""
    compiled = library()
    assert compiled is not None
    kernel = getattr(compiled, name)
    if kernel.argtypes is None:
        kernel.restype = {"plsc_products": ctypes.c_char_p, "plsc_factor_bytes": ctypes.c_int}.get(name)
        kernel.argtypes = _PARAMETERS[name]
    return kernel


def _in_threads(work: Callable[[int, int, int], None], count: int) -> None:
    """``work(thread, start, stop)`` over [0, count), cut among torch's threads at multiples of BLOCK."""
    blocks = -(-count // BLOCK)
    threads = min(torch.get_num_threads(), blocks)
    if threads <= 1:
        return work(0, 0, count)
    cuts = [min(blocks * i // threads * BLOCK, count) for i in range(threads + 1)]
    for _ in _pool(threads).map(work, range(threads), cuts[:-1], cuts[1:]):
        pass  # map() raises what a thread raised only where its results are taken


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="plsc-head")
