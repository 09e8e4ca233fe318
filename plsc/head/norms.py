"""1/norms of the table's rows, kept beside them."""

import torch
from torch import Tensor

from plsc.head.global_batch import SMALLEST_NORM
from plsc.losses.class_rows import ClassRows

WIDENED_ROWS = 4096  # at a time


def renew_norms(table: ClassRows, index: slice | Tensor) -> None:
    """Recompute 1/‖W‖ of rows ``index`` of ``table`` from their stored values.

    Sums are taken in float64 and then rounded, as the updates' kernels do: whoever takes them, in whatever order, the
    float32 norm is the same, and a resumed run goes on as one that never stopped.
    """
    rows = table.weight[index]
    norms = torch.empty(len(rows), dtype=torch.float64, device=rows.device)  # whole: small results in between
    for part, out in zip(rows.split(WIDENED_ROWS), norms.split(WIDENED_ROWS), strict=True):  # would split the heap
        torch.linalg.vector_norm(part, dim=1, dtype=torch.float64, out=out)
    table.inverse_norm[index] = norms.to(table.inverse_norm.dtype).clamp_(min=SMALLEST_NORM).reciprocal_()
