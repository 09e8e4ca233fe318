"""Matrix products with the accumulation that the softmax needs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def product(a: Tensor, b: Tensor) -> Tensor:
    """(n, k) @ (k, m). bfloat16 factors are multiplied as they are and summed and returned in float32.

    float32 and float64 factors give their own dtype. Logits must never be rounded to bfloat16: at s = 64 that is an
    error of up to 1/8.
    """
    if a.dtype != torch.bfloat16:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    with _bfloat16_units():
        return a.float() @ b.float()


@contextmanager
def _bfloat16_units() -> Iterator[None]:
    """Let the CPU's float32 product use its bfloat16 units, exact here because the factors are bfloat16 numbers."""
    settings: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = settings.fp32_precision
    settings.fp32_precision = "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before
