"""Exact searches in centres, or in the points themselves, for many points: on a GPU where that pays, else on the CPU.

Both answer by the float64 ranking, ties by number (:mod:`plsc.index.scan`), so that clusters do not depend on the
device. Of different rows whose sums are apart by less than float64's rounding, either may come first, as on CPUs with
and without a compiler.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from plsc.embedding.columns import Float32, Int64, Mask
from plsc.head.backends.triton_backend import runs_on
from plsc.index.faiss_gpu import LEAST_PRODUCTS
from plsc.index.scan import ExactScan
from plsc.index.triton_scan import has_groups
from plsc.native.scan import load_scan
from plsc.progress import warn

_QUERIES = 512  # that a CPU searches for at once: their panels stay in the second-level cache
# On a GPU, whose scan cuts them by their memory: at D = 512 into two calls, each with seven waits of the host.
_GPU_QUERIES = 4096


class SearchDevice:
    """Where a process searches; from the moment on at which a GPU's memory does not suffice, the CPU.

    Args:
        device: "cpu" or "cuda:N".

    Attributes:
        device: the present one.
    """

    def __init__(self, device: str | torch.device = "cpu") -> None:
        self.device = torch.device(device)

    def takes(self, rows: Float32, k: int, queries: int) -> bool:
        """Whether the GPU finds the ``k`` nearest of ``rows`` (N, D) to each of so many ``queries``.

        Without the kernels, which need four groups of 64 rows for each of the ``k``, torch would list candidates there
        and the host rank them, one query after the other. For few rows the CPU's compiled scan takes less time.
        """
        pays = queries * rows.size >= LEAST_PRODUCTS
        return pays and has_groups(len(rows), k) and runs_on(self.device)

    def leave(self, rows: Float32) -> None:
        """Let the CPU search from now on, since the GPU's memory does not hold ``rows`` and what a search needs."""
        what = (
            f"{len(rows):,} rows of {rows.shape[1]:,} and a search of them do not fit into the memory of {self.device}"
        )
        warn("plsc", f"{what}; the CPU searches instead")
        self.device = torch.device("cpu")


class Scan:
    """Exact search in ``rows`` (N, D) float32 of length 1, which are kept, not copied, on the CPU.

    Args:
        rows: what is searched.
        k: the most neighbours that are asked for.
        queries: how many there will be, about.
        where: decides on the device.
        precision: on the CPU; None: bfloat16 where the processor multiplies it, else float32. On a GPU it is float32,
            whose candidates the GPU ranks itself; others leave the host to rank those of each query.
    """

    def __init__(self, rows: Float32, k: int, queries: int, where: SearchDevice, precision: str | None = None) -> None:
        self._rows, self._where, self._precision = rows, where, precision
        self._on_gpu: ExactScan | None = None
        self._on_cpu: ExactScan | None = None
        if where.takes(rows, k, queries):
            with self._while_memory_lasts():
                scan = ExactScan(rows, precision="fp32", device=str(where.device))
                if scan.backend == "triton":  # its kernels agree with float64
                    scan.search(rows[:_GPU_QUERIES], k)  # so that memory is short here, if it is, and not on the way
                    self._on_gpu = scan

    @property
    def is_on_gpu(self) -> bool:
        """Whether the next search is on the GPU."""
        return self._on_gpu is not None

    @property
    def block(self) -> int:
        """Queries that are best searched for at once."""
        return _GPU_QUERIES if self.is_on_gpu else _QUERIES

    def search(self, queries: Float32, k: int, *, allowed: Mask | None = None) -> tuple[Float32, Int64]:
        """Find the ``k`` nearest rows, as :meth:`plsc.index.scan.ExactScan.search` does."""
        if self._on_gpu is not None:
            with self._while_memory_lasts():
                return self._on_gpu.search(queries, k, allowed=allowed)
        if self._on_cpu is None:
            kernel = load_scan()
            rounds = kernel is not None and kernel.rounds_queries
            self._on_cpu = ExactScan(self._rows, precision=self._precision or ("bf16" if rounds else "fp32"))
        return self._on_cpu.search(queries, k, allowed=allowed)

    @contextmanager
    def _while_memory_lasts(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # torch's, CUDA's and Triton's differ in type, and all say so
            if "out of memory" not in str(error):
                raise
            self._on_gpu = None
            self._where.leave(self._rows)
