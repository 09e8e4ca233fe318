"""The rows that a scan reads: a bfloat16 copy made by chunks, or the float32 rows themselves."""

import mmap

import numpy as np
import torch
from torch import Tensor

from plsc.index.bounds import RowBounds
from plsc.index.exact import Float32
from plsc.index.row_source import RowSource
from plsc.native.scan import PADDED_TO


class KeptRows:
    """``vectors`` (N, D), and what is scanned in their place.

    Attributes:
        source: reads the float32 rows.
        copy: (N, stride) tensor on ``device``, bfloat16 with stride the next multiple of 32 from D on and zeros
            behind D, or float32 for a GPU; None: the vectors themselves are scanned.
        bounds: of the rows, before and after rounding.
    """

    def __init__(self, vectors: Float32, precision: str, device: torch.device) -> None:
        self.vectors, self.device = vectors, device
        self.source = RowSource(vectors)
        self.bounds = RowBounds()
        self.copy: Tensor | None = None
        count, dim = vectors.shape
        if precision == "bf16":
            self.copy = _zeros(count, -(-dim // PADDED_TO) * PADDED_TO, device)
        elif device.type != "cpu":
            self.copy = torch.empty(count, dim, device=device)
        for start, part in self.source.chunks():
            self._take(start, torch.from_numpy(part))

    @property
    def memory_bytes(self) -> int:
        """Of what is scanned."""
        return self.vectors.nbytes if self.copy is None else self.copy.nbytes

    def _take(self, start: int, exact: Tensor) -> None:
        if self.copy is None:
            self.bounds.take(start, exact, exact)
            return
        kept = exact.to(self.copy.dtype)
        self.bounds.take(start, exact, kept)
        self.copy[start : start + len(exact), : exact.shape[1]] = kept.to(self.device)


def _zeros(count: int, stride: int, device: torch.device) -> Tensor:
    """A bfloat16 tensor; on a CPU in large pages where the system has them, for scans read it from end to end."""
    if device.type != "cpu" or not count:
        return torch.zeros(count, stride, dtype=torch.bfloat16, device=device)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory = mmap.mmap(-1, count * stride * 2, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared ones get none
        memory.madvise(mmap.MADV_HUGEPAGE)
    else:
        memory = mmap.mmap(-1, count * stride * 2)
    return torch.from_numpy(np.frombuffer(memory, dtype=np.uint16)).view(torch.bfloat16).view(count, stride)
