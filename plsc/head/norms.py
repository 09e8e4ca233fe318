"""1/norms of the table's rows, kept beside them."""

import torch
from torch import Tensor

from plsc.head.global_batch import SMALLEST_NORM
from plsc.losses.class_rows import ClassRows


def renew_norms(table: ClassRows, index: slice | Tensor) -> None:
    """Recompute 1/‖W‖ of rows ``index`` of ``table`` from their stored values."""
    wide = torch.promote_types(table.weight.dtype, torch.float32)
    norms: Tensor = torch.linalg.vector_norm(table.weight[index], dim=1, dtype=wide)
    table.inverse_norm[index] = norms.clamp_(min=SMALLEST_NORM).reciprocal_()
