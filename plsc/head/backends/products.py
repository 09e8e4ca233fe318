"""Matrix products with the accumulation that the softmax needs."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from plsc.head.class_table import Chunk

# How float32 factors are multiplied: as they are, rounded to TF32 (11 bits), or each as the sum of two bfloat16 numbers
# (16 bits), in three products. The names are PyTorch's (torch.backends.cuda.matmul.fp32_precision) and Triton's.
Fp32Precision = Literal["ieee", "tf32", "bf16x3"]

_COPIED_CLASSES = 2048  # of pass 2 at a time, where their rows are copied to float32
_GATHERED_ROWS = 512  # of scattered rows, copied at a time


def product(a: Tensor, b: Tensor, fp32_precision: Fp32Precision = "ieee", *, out: Tensor | None = None) -> Tensor:
    """(n, k) @ (k, m). bfloat16 factors are multiplied as they are and summed and returned in float32.

    float32 and float64 factors give their own dtype. Logits must never be rounded to bfloat16: at s = 64 that is an
    error of up to 1/8.

    Args:
        a, b: the factors, of one dtype.
        fp32_precision: of float32 factors on a GPU, whatever torch's own setting is. PyTorch has no "bf16x3": it is
            computed as "ieee".
        out: where the result goes, if given.
    """
    if a.dtype == torch.float32 and a.is_cuda:
        with _precision_set(torch.backends.cuda.matmul, "tf32" if fp32_precision == "tf32" else "ieee"):
            return torch.mm(a, b, out=out)
    if a.dtype != torch.bfloat16:
        return torch.mm(a, b, out=out)
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32, out=out)
    with _bfloat16_units():
        return torch.mm(a.float(), b.float(), out=out)


def copied_classes(classes: int, dtype: torch.dtype, device: torch.device) -> int:
    """Pass 2's classes at a time, at most ``classes``. Each has its own gradient: bits do not depend on it."""
    return min(classes, _COPIED_CLASSES) if _copies_factors(dtype, device) else classes


def _copies_factors(dtype: torch.dtype, device: torch.device) -> bool:
    return dtype == torch.bfloat16 and device.type == "cpu"


class ChunkProducts:
    """:func:`product` for the chunks of one pass, whose memory they share: its peak does not grow with the table.

    PyTorch's CPU has no product of bfloat16 factors with a float32 result, so they are copied to float32 first. Those
    copies are larger than the factors; made anew for every product, they would be most of what a step allocates.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, fp32_precision: Fp32Precision = "ieee") -> None:
        self._copies_factors = _copies_factors(dtype, device)
        self._dtype, self._fp32_precision = dtype, fp32_precision
        self._buffers: dict[str, Tensor] = {}

    def factor(self, name: str, values: Tensor) -> Tensor:
        """``values`` as :meth:`multiply` takes them, valid until the next factor of this name."""
        return self._buffer(name, values.shape).copy_(values) if self._copies_factors else values

    def rows(self, chunk: Chunk) -> Tensor:
        """The chunk's rows (n·K, D) as a factor, as :meth:`factor` gives them; scattered ones are gathered in parts."""
        if not self._copies_factors or isinstance(chunk.index, slice):
            return self.factor("weight", chunk.weight)
        rows = self._buffer("weight", torch.Size((len(chunk.index), chunk.table.weight.shape[1])))
        for index, part in zip(chunk.index.split(_GATHERED_ROWS), rows.split(_GATHERED_ROWS), strict=True):
            part.copy_(chunk.table.weight[index])
        return rows

    def rounded_factor(self, values: Tensor, out: Tensor | None = None) -> Tensor:
        """``values`` (float32 or float64) rounded to the table's dtype, as a factor. May overwrite ``values``.

        ``out`` of that dtype, if given, holds the rounded values too.
        """
        rounded = values.to(self._dtype) if out is None else out.copy_(values)
        return values.copy_(rounded) if self._copies_factors else rounded

    def multiply(self, name: str, a: Tensor, b: Tensor) -> Tensor:
        """``a @ b`` of factors, float32 or float64, valid until the next product of this name."""
        if not self._copies_factors:
            return product(a, b, self._fp32_precision)
        with _bfloat16_units():
            return torch.mm(a, b, out=self._buffer(name, torch.Size((a.shape[0], b.shape[1]))))

    def _buffer(self, name: str, shape: torch.Size) -> Tensor:
        """Float32 memory of this shape; what was in it is lost."""
        if name not in self._buffers or self._buffers[name].numel() < shape.numel():
            self._buffers[name] = torch.empty(shape.numel())
        return self._buffers[name][: shape.numel()].view(shape)


def _bfloat16_units() -> AbstractContextManager[None]:
    """Let the CPU's float32 product use its bfloat16 units, exact here because the factors are bfloat16 numbers."""
    return _precision_set(torch.backends.mkldnn.matmul, "bf16")  # type: ignore[attr-defined]


@contextmanager
def _precision_set(settings: Any, precision: str) -> Iterator[None]:
    """Set torch's precision of float32 products on one kind of device, and set it back."""
    before = settings.fp32_precision
    settings.fp32_precision = precision
    try:
        yield
    finally:
        settings.fp32_precision = before
