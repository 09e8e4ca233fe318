"""Approximate search by faiss, with its parameters chosen from the data and tuned to a recall.

IVF: the rows are clustered into ``nlist`` ≈ 4·√N cells (spherical k-means), and a query reads the ``nprobe``
nearest cells. HNSW: a graph of neighbours (Malkov & Yashunin, 2018), walked with a candidate list of
``efSearch``. PQ: IVF over rows compressed to a byte for every four numbers (product quantisation; Jégou et al., 2011),
whose best are scored again from the float32 rows.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from plsc.errors import UsageError
from plsc.index.exact import Float32, Int64, load_faiss
from plsc.index.faiss_output import stdout_kept
from plsc.index.recall import Recall, Target, recall_of
from plsc.index.refined import Refined
from plsc.progress import Progress

Kind = Literal["exact", "ivf", "hnsw", "pq"]

CHUNK = 65536
ROWS_PER_CELL = 64  # of the training sample; k-means gains little from more
LEAST_ROWS = {"ivf": 400, "hnsw": 20, "pq": 10_000}  # PQ learns 256 codes from 39 rows each
HNSW_LINKS, HNSW_CONSTRUCTION, HNSW_WIDEST = 32, 128, 4096


class Base(Protocol):
    """Rows (N, D) float32 that can be sliced and indexed: an array, or something that reads them."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, D)."""

    def __len__(self) -> int: ...

    def __getitem__(self, key: slice | Int64, /) -> Float32: ...


def train_and_add(kind: Kind, base: Base, seed: int, *, quiet: bool) -> Any:
    """Build the faiss index of ``kind`` over ``base`` (N, D), whose faiss ids are the row numbers."""
    structure = _empty_hnsw(base.shape[1]) if kind == "hnsw" else trained_ivf(kind, base, seed)
    progress = Progress(f"index ({kind})", len(base), "rows", quiet=quiet)
    together = 4096 if kind == "hnsw" else CHUNK
    for start in range(0, len(base), together):
        part = base[start : start + together]
        structure.add(np.ascontiguousarray(part))
        progress.advance(len(part))
    progress.finish()
    return structure


def tune(structure: Any, kind: Kind, queries: Float32, truth: Float32, target: Target) -> tuple[int, Recall]:
    """Find the smallest effort (nprobe or efSearch) whose recall meets ``target``, and set it.

    queries (Q, D); truth (Q, <=10): the exact scores over the same rows. Doubles the effort until it suffices, then
    bisects. Raises :class:`UsageError` if no effort suffices.
    """
    k = truth.shape[1]

    def measure(effort: int) -> Recall:
        set_effort(structure, kind, effort)
        return recall_of(structure.search(queries, k)[0], truth)

    least = 16 if kind == "hnsw" else 1
    effort, recall = smallest_effort(measure, least, most_effort(structure, kind), target)
    if not target.met_by(recall):
        raise UsageError(
            f"{kind} finds {target.reached(recall):.4f} of the nearest rows at most, and --recall asks for "
            f"{target.share}; ask for less, or for --kind exact"
        )
    set_effort(structure, kind, effort)
    return effort, recall


def smallest_effort(measure: Callable[[int], Recall], least: int, most: int, target: Target) -> tuple[int, Recall]:
    """Smallest effort in [least, most], within a sixteenth, that meets ``target``; ``most`` if none does.

    Takes recall to grow with the effort.
    """
    low, effort = least - 1, least
    recall = measure(effort)
    while not target.met_by(recall) and effort < most:
        low, effort = effort, min(effort * 2, most)
        recall = measure(effort)
    high = effort
    while high - low > max(1, low // 16):
        middle = (low + high) // 2
        tried = measure(middle)
        if target.met_by(tried):
            high, recall = middle, tried
        else:
            low = middle
    return high, recall


def most_effort(structure: Any, kind: Kind) -> int:
    """The effort at which nothing is left to gain (IVF: every cell) or to try."""
    return HNSW_WIDEST if kind == "hnsw" else int(structure.nlist)


def set_effort(structure: Any, kind: Kind, effort: int) -> None:
    """Set nprobe or efSearch."""
    if kind == "hnsw":
        structure.hnsw.efSearch = effort
    else:
        structure.nprobe = effort


def parameters(structure: Any, kind: Kind, effort: int) -> dict[str, int]:
    """What was chosen, as the manifest holds it."""
    if kind == "hnsw":
        return {"links": HNSW_LINKS, "efConstruction": HNSW_CONSTRUCTION, "efSearch": effort}
    cells = {"nlist": int(structure.nlist), "nprobe": effort}
    return cells | {"bytes": int(structure.index.pq.M)} if kind == "pq" else cells


def save(structure: Any, path: Path) -> None:
    """Write a faiss index."""
    load_faiss().write_index(structure.index if isinstance(structure, Refined) else structure, str(path))


def load(path: Path, kind: Kind, chosen: dict[str, int], base: Base) -> Any:
    """Read the index of ``base`` (N, D), its hash verified: faiss itself takes a damaged file without a word,
    or crashes."""
    faiss = load_faiss()
    with stdout_kept():
        read = faiss.read_index(str(path), faiss.IO_FLAG_ONDISK_SAME_DIR | faiss.IO_FLAG_READ_ONLY)
    structure = Refined(read, base) if kind == "pq" else read
    set_effort(structure, kind, chosen["efSearch" if kind == "hnsw" else "nprobe"])
    return structure


def found(
    structure: Any, queries: Float32, k: int, *, allowed: npt.NDArray[np.bool_] | None = None
) -> tuple[Float32, Int64]:
    """Scores and rows (Q, k); row -1 with score −inf where the structure came up with fewer than ``k``.

    allowed: (N,) bool, the rows that may be found; the others are passed over while cells or links are walked, with as
    much more effort as there are fewer rows, for the k best of them lie as much farther away.
    """
    more = {} if allowed is None else {"params": _selecting(structure, allowed)}
    scores, rows = structure.search(np.ascontiguousarray(queries), k, **more)
    return np.where(rows >= 0, scores, -np.inf).astype(np.float32), rows


def _selecting(structure: Any, allowed: npt.NDArray[np.bool_]) -> Any:
    faiss = load_faiss()
    selector = faiss.IDSelectorBitmap(np.packbits(allowed, bitorder="little"))
    times = len(allowed) / max(1, int(np.count_nonzero(allowed)))
    if hasattr(structure, "nprobe"):
        return faiss.SearchParametersIVF(
            sel=selector, nprobe=min(math.ceil(int(structure.nprobe) * times), int(structure.nlist))
        )
    return faiss.SearchParametersHNSW(sel=selector, efSearch=math.ceil(structure.hnsw.efSearch * times))


def cell_count(rows: int) -> int:
    """nlist for ``rows`` rows: 4·√N, and never so many that a cell has fewer than 39 rows to learn from."""
    return max(1, min(round(4 * math.sqrt(rows)), rows // 39))


def code_bytes(dim: int) -> int:
    """Bytes of a compressed row: one for four numbers, or for as few more as divide ``dim`` evenly."""
    return max(parts for parts in range(1, max(1, dim // 4) + 1) if dim % parts == 0)


def trained_ivf(kind: Kind, base: Base, seed: int, *, most: int | None = None) -> Any:
    """An empty IVF index ("ivf" or "pq") whose cells and codes were learnt from a sample of up to ``most`` rows."""
    faiss = load_faiss()
    most = len(base) if most is None else most
    cells, dim = max(1, min(cell_count(len(base)), most // 39)), base.shape[1]
    nearest_cell, metric = faiss.IndexFlatIP(dim), faiss.METRIC_INNER_PRODUCT
    if kind == "pq":
        structure = faiss.IndexIVFPQ(nearest_cell, dim, cells, code_bytes(dim), 8, metric)
        structure.pq.cp.seed = seed
    else:
        structure = faiss.IndexIVFFlat(nearest_cell, dim, cells, metric)
    structure.cp.spherical, structure.cp.seed, structure.cp.max_points_per_centroid = (
        True,
        seed,
        ROWS_PER_CELL,
    )
    wanted = min(len(base), most, max(cells * ROWS_PER_CELL, LEAST_ROWS[kind]))
    sample = np.sort(np.random.default_rng(seed).choice(len(base), wanted, replace=False))
    structure.train(np.ascontiguousarray(base[sample]))
    return Refined(structure, base) if kind == "pq" else structure


def _empty_hnsw(dim: int) -> Any:
    faiss = load_faiss()
    structure = faiss.IndexHNSWFlat(dim, HNSW_LINKS, faiss.METRIC_INNER_PRODUCT)
    structure.hnsw.efConstruction = HNSW_CONSTRUCTION
    return structure
