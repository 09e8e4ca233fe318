"""faiss on a GPU, where its package for GPUs is installed: the cells of IVF structures, and large exact searches.

What a build spends its time with is finding the nearest of many centroids, in k-means and for every row that is added.
That alone runs on the GPU. The structure itself stays faiss' on the CPU, so that files, budgets of memory, tuning and
searches are the same with and without one. faiss-gpu and faiss-cpu share the module ``faiss``: docs/install.md.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from plsc.index.rows import Float32, Int64

_TEMPORARY_BYTES = 256 << 20  # of the GPU's memory that faiss keeps; by itself it would take up to 1.5 GiB
_PINNED_BYTES = 32 << 20  # of the host's, likewise: 256 MiB
_MOST_NEIGHBOURS = 2048  # that faiss selects on a GPU
_VECTORS_AT_ONCE, _QUERIES_AT_ONCE = 1 << 30, 128 << 20  # bytes on the GPU, in an exact search
# Work below which copying the rows to the GPU would take longer than they take on the CPU. Estimated, not measured.
LEAST_PRODUCTS = 1 << 34  # multiplications of an exact search
_LEAST_PAIRS = 1 << 22  # numbers of the rows that are scored again
_lock = threading.Lock()  # faiss' resources of a GPU are for one thread at a time

Add = Callable[[Float32, Int64], object]


def why_not() -> str | None:
    """Why faiss computes on the CPU here; None where it has a GPU."""
    if find_spec("faiss") is None:
        return "faiss is not installed"
    import faiss

    if not hasattr(faiss, "StandardGpuResources"):
        return "faiss-cpu is installed, and the extra [gpu] brings faiss for GPUs"
    return None if faiss.get_num_gpus() else "faiss sees no GPU"


@cache
def _resources() -> Any:
    import faiss

    resources = faiss.StandardGpuResources()
    resources.setTempMemory(_TEMPORARY_BYTES)
    resources.setPinnedMemory(_PINNED_BYTES)
    return resources


def _on_gpu(index: Any) -> Any:
    """A copy of a faiss index in the first GPU's memory."""
    import faiss

    return faiss.index_cpu_to_gpu(_resources(), 0, index)


@contextmanager
def training(structure: Any) -> Iterator[None]:
    """Let k-means look for the nearest centroids of an IVF ``structure``, and of its codes, on the GPU within."""
    if why_not() is not None:
        yield
        return
    import faiss

    with _lock:
        cells = structure.clustering_index = _on_gpu(faiss.IndexFlatIP(structure.d))
        codes = None
        if hasattr(structure, "pq"):
            codes = structure.pq.assign_index = _on_gpu(faiss.IndexFlatL2(structure.pq.dsub))
        try:
            yield
        finally:  # faiss keeps pointers to them, and no reference
            structure.clustering_index = None
            if codes is not None:
                structure.pq.assign_index = None
            del cells, codes


def adder(index: Any) -> Add:
    """Return a function that adds rows (n, D) with their ids (n,) to a trained faiss ``index``.

    The GPU finds the cell that each row of an IVF index goes into.
    """
    if not hasattr(index, "nprobe"):
        return lambda rows, ids: index.add(rows)  # which numbers rows by itself
    if why_not() is not None:
        add: Add = index.add_with_ids
        return add
    import faiss
    from faiss.contrib.ivf_tools import add_preassigned

    with _lock:
        cells = _on_gpu(faiss.downcast_index(index.quantizer))

    def add_to_cells(rows: Float32, ids: Int64) -> None:
        with _lock:
            nearest = cells.search(rows, 1)[1]
        add_preassigned(index, rows, np.ascontiguousarray(nearest[:, 0], dtype=np.int64), ids)

    return add_to_cells


def takes_search(queries: Float32, base: Float32, k: int) -> bool:
    """Whether a search of ``queries`` (Q, D) for ``k`` of ``base`` (N, D) is one for the GPU, and there is one."""
    return len(queries) * base.size >= LEAST_PRODUCTS and k <= _MOST_NEIGHBOURS and why_not() is None


def knn(queries: Float32, base: Float32, k: int) -> tuple[Float32, Int64]:
    """Scores and rows (Q, k) of the largest inner products, best first; ``base`` goes to the GPU part by part."""
    import faiss

    with _lock:
        scores, rows = faiss.knn_gpu(
            _resources(),
            np.ascontiguousarray(queries),
            np.asarray(base),
            k,
            metric=faiss.METRIC_INNER_PRODUCT,
            device=0,
            vectorsMemoryLimit=_VECTORS_AT_ONCE,
            queriesMemoryLimit=_QUERIES_AT_ONCE,
        )
    return scores, rows


def pair_scores(vectors: Float32, positions: Int64, queries: Float32, numbers: Int64) -> Float32:
    """Inner products (n,) of ``vectors`` (N, D) at ``positions`` (n,) with ``queries`` (Q, D) at ``numbers`` (n,)."""
    if len(positions) * vectors.shape[1] < _LEAST_PAIRS or why_not() is not None or not torch.cuda.is_available():
        scores: Float32 = np.einsum("nd,nd->n", vectors[positions], queries[numbers])
        return scores
    return _pair_scores_on(torch.device("cuda", 0), vectors, positions, queries, numbers)


def _pair_scores_on(
    device: torch.device, vectors: Float32, positions: Int64, queries: Float32, numbers: Int64
) -> Float32:
    """:func:`pair_scores` by torch. A row that several queries found is copied to the device once."""
    rows, asked = (torch.from_numpy(np.array(values)).to(device) for values in (vectors, queries))
    at, of = (torch.from_numpy(values).to(device) for values in (positions, numbers))
    scores: Float32 = (rows[at] * asked[of]).sum(1).cpu().numpy()
    return scores
