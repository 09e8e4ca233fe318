"""Approximate nearest neighbours by faiss, with parameters chosen from the data and tuned to a recall.

IVF: the rows are clustered into ``nlist`` ≈ 4·√N cells (spherical k-means), and a query reads the ``nprobe`` nearest
cells. HNSW: a graph of neighbours (Malkov & Yashunin, 2018), walked with a candidate list of ``efSearch``. PQ: IVF over
rows compressed to a byte for every four numbers (product quantisation; Jégou et al., 2011), the best of which are
scored again from the float32 rows. "Effort" is nprobe or efSearch, whichever the kind has.

:class:`ApproximateSearch` is the whole search: a faiss structure over most rows, brute force over the few that are held
out of it to measure recall, and an exact search for what the structure cannot answer.
"""

import ctypes
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol, get_args

import numpy as np

from plsc.embedding.columns import check_maps
from plsc.errors import IntegrityError, UsageError, first_line
from plsc.files import pinned_folder
from plsc.index import faiss_gpu
from plsc.index.recall import Recall, RecallMonitor
from plsc.index.rows import Float32, Int64, Mask, RowSource
from plsc.index.scan import ExactSearcher, knn, load_faiss, merge_topk
from plsc.progress import Progress, flush

Kind = Literal["exact", "ivf", "hnsw", "pq"]
KINDS: tuple[Kind, ...] = get_args(Kind)

ROWS_PER_CELL = 64  # of the training sample; k-means gains little from more
MIN_ROWS = {"ivf": 400, "hnsw": 20, "pq": 10_000}  # PQ learns 256 codes from 39 rows each
HNSW_LINKS, HNSW_CONSTRUCTION, HNSW_MAX_EFFORT = 32, 128, 4096
TUNED_FOR = 10  # nearest rows: the effort is tuned, and the recall measured, to find these
# Where at most one row in so many is allowed, those alone are scanned, which is as much cheaper; where more than one in
# so many is asked for, all are.
SCAN_BELOW = 4
_ADDED_AT_ONCE = {"ivf": 65536, "pq": 65536, "hnsw": 4096}  # rows
_RERANK_FACTOR = 10  # compressed rows taken for each one wanted: what compression misorders is among them
_RERANKED_AT_ONCE = 32  # queries whose rows are read together


class RowArray(Protocol):
    """Rows (N, D) float32 that can be sliced and indexed: an array, or something that reads them."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, D)."""

    def __len__(self) -> int: ...

    def __getitem__(self, key: slice | Int64, /) -> Float32: ...


class ApproximateSearch:
    """Approximate search of ``vectors`` (N, D) that never returns fewer rows than there are to find.

    Attributes:
        structure: the faiss index.
        kind: "ivf", "hnsw" or "pq".
        held_out: (H,) rows outside the structure, ascending: the queries that its effort was tuned with.
        recall: as measured when it was tuned.
        monitor: the recall in use, once :meth:`monitor_recall` is called from time to time.
    """

    def __init__(
        self, structure: Any, kind: Kind, vectors: Float32, held_out: Int64, exact: ExactSearcher, recall: Recall
    ) -> None:
        """structure: its id i is the i-th row of ``vectors`` that is not held out; its effort is set."""
        if structure.ntotal + len(held_out) != len(vectors):
            raise UsageError(
                f"the structure has {structure.ntotal} rows and {len(held_out)} are held out, of {len(vectors)}"
            )
        self.structure, self.kind, self.held_out, self.recall = structure, kind, held_out, recall
        self.monitor = RecallMonitor()
        self._vectors, self._exact = vectors, exact
        self._inside = np.delete(np.arange(len(vectors), dtype=np.int64), held_out)
        self._held_out_vectors = RowSource(vectors).take(held_out)

    def __len__(self) -> int:
        return len(self._vectors)

    def search(self, queries: Float32, k: int, *, allowed: Mask | None = None) -> tuple[Float32, Int64]:
        """Find the rows with the largest inner products, approximately.

        A query for which the structure returns too few is searched exactly, and so are all where few rows are allowed.

        Args:
            queries: (Q, D) float32 of length 1.
            k: how many rows for each query.
            allowed: (N,), True for the rows that may be found; None: all.

        Returns:
            Scores (Q, k') float32, best first, and rows (Q, k') int64, k' = min(k, number of rows allowed).
        """
        check_maps(self._vectors)
        count = len(self) if allowed is None else int(np.count_nonzero(allowed))
        k = min(k, count)
        if count * SCAN_BELOW <= len(self) or not k:
            return self._exact.search(queries, k, allowed=allowed)
        held_out, vectors, inside = self.held_out, self._held_out_vectors, None
        if allowed is not None:
            inside, kept = allowed[self._inside], allowed[self.held_out]
            held_out, vectors = held_out[kept], vectors[kept]
        rows = Rows(self._inside, held_out, vectors)
        exact = partial(self._exact.search, k=k, allowed=allowed)
        scores, found = search_all(self.structure, queries, k, rows, exact, allowed=inside)
        self.monitor.record(queries, scores, allowed)
        return scores, found

    def monitor_recall(self) -> None:
        """Ask some of the queries since the last call again, exactly; slow, for a thread that nobody waits for."""
        self.monitor.compare(self._exact)


class Reranked:
    """A faiss IVF index of compressed rows whose best are scored again in float32; used as a faiss index is.

    Attributes:
        index: the faiss index.
        base: (N, D) the rows, read by number where they are needed.
    """

    def __init__(self, index: Any, base: RowArray) -> None:
        self.index, self.base = index, base

    def __getattr__(self, name: str) -> Any:
        return getattr(self.index, name)

    def search(self, queries: Float32, k: int, **options: Any) -> tuple[Float32, Int64]:
        """Scores and rows (Q, k), best first, by float32 products; row -1 where no more were found."""
        rows: Int64 = self.index.search(queries, min(_RERANK_FACTOR * k, self.ntotal), **options)[1]
        scores = np.full(rows.shape, -np.inf, dtype=np.float32)
        for start in range(0, len(queries), _RERANKED_AT_ONCE):
            part = slice(start, start + _RERANKED_AT_ONCE)
            scores[part] = self._scores(queries[part], rows[part])
        order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        return np.take_along_axis(scores, order, axis=1), np.take_along_axis(rows, order, axis=1)

    def _scores(self, queries: Float32, rows: Int64) -> Float32:
        needed, positions = np.unique(rows[rows >= 0], return_inverse=True)
        vectors = np.asarray(self.base[needed])
        query = np.nonzero(rows >= 0)[0]
        scores = np.full(rows.shape, -np.inf, dtype=np.float32)
        scores[rows >= 0] = faiss_gpu.pair_scores(vectors, positions, queries, query)
        return scores


def faiss_index(structure: Any) -> Any:
    """The faiss index itself: of a :class:`Reranked`, what it wraps."""
    return structure.index if isinstance(structure, Reranked) else structure


@dataclass(frozen=True)
class Rows:
    """What is searched.

    Attributes:
        inside: (n,) numbers of the structure's rows; None: they are those of the structure.
        held_out: (H,) numbers of rows outside the structure that may be found.
        vectors: (H, D) those rows.
    """

    inside: Int64 | None
    held_out: Int64
    vectors: Float32


def search_all(
    structure: Any,
    queries: Float32,
    k: int,
    rows: Rows,
    exact: Callable[[Float32], tuple[Float32, Int64]],
    *,
    allowed: Mask | None = None,
) -> tuple[Float32, Int64]:
    """Search a structure and the rows held out of it; exactly, where the structure comes up with fewer than there are.

    Rows that are not allowed are dropped from what the structure finds among all. A search for allowed rows alone would
    end in cells or links near the query, however few of those rows lie there, and miss the nearest of those elsewhere.

    Args:
        structure: over n rows.
        queries: (Q, D) float32 of length 1.
        k: how many rows for each query, at most as many as may be found.
        rows: of the structure, and beside it.
        exact: finds the ``k`` best rows of all that are allowed, for some of the queries.
        allowed: (n,), True for the rows of the structure that may be found; None: all.

    Returns:
        Scores and numbers of rows (Q, k), best first.
    """
    count = int(structure.ntotal if allowed is None else np.count_nonzero(allowed))
    wanted = min(k, count)
    share = count / max(1, int(structure.ntotal))
    # As many as hold those wanted where allowed rows lie among the others by chance, but for some of a hundred queries.
    asked = math.ceil((wanted + 3 * math.sqrt(wanted * (1 - share))) / share) if wanted else 0
    if asked * SCAN_BELOW > structure.ntotal:
        return exact(queries)
    scores, found = search(structure, queries, asked)
    is_found = found >= 0 if allowed is None else (found >= 0) & allowed[found]
    best = np.argsort(~is_found, axis=1, kind="stable")[:, :wanted]
    short = np.count_nonzero(is_found, axis=1) < wanted
    scores, found = np.take_along_axis(scores, best, axis=1), np.take_along_axis(found, best, axis=1)
    beside = knn(queries, rows.vectors, k)
    numbers = found if rows.inside is None else rows.inside[found]
    scores, found = merge_topk((scores, numbers), (beside[0], rows.held_out[beside[1]]), k)
    if short.any():
        scores[short], found[short] = exact(queries[short])
    return scores, found


def search(structure: Any, queries: Float32, k: int) -> tuple[Float32, Int64]:
    """Search a structure alone.

    Returns:
        Scores and rows (Q, min(k, n)), best first; row -1 with score −inf where it came up with fewer. The effort is
        what ten rows were found with; it grows as more are to be found, since they lie as much farther away. Ten are
        asked for where fewer are wanted: with a list of one, walks along links end early.
    """
    asked = min(max(k, TUNED_FOR), int(structure.ntotal))
    options = {} if asked <= TUNED_FOR else {"params": _parameters(structure, asked / TUNED_FOR)}
    scores, rows = structure.search(np.ascontiguousarray(queries), asked, **options)
    return np.where(rows >= 0, scores, -np.inf).astype(np.float32)[:, :k], rows[:, :k]


def _parameters(structure: Any, factor: float) -> Any:
    """Parameters of a search with ``factor`` times the effort."""
    faiss = load_faiss()
    if hasattr(structure, "nprobe"):
        return faiss.SearchParametersIVF(nprobe=min(math.ceil(int(structure.nprobe) * factor), int(structure.nlist)))
    effort = min(math.ceil(structure.hnsw.efSearch * factor), int(structure.ntotal))
    return faiss.SearchParametersHNSW(efSearch=effort)


def train_and_add(kind: Kind, base: RowArray, seed: int, *, quiet: bool) -> Any:
    """Build the structure of ``kind`` over ``base`` (N, D) in memory; its faiss ids are the row numbers."""
    if kind == "hnsw":
        structure = load_faiss().IndexHNSWFlat(base.shape[1], HNSW_LINKS, load_faiss().METRIC_INNER_PRODUCT)
        structure.hnsw.efConstruction = HNSW_CONSTRUCTION
    else:
        structure = train_ivf(kind, base, seed)
    progress = Progress(f"index ({kind})", len(base), "rows", quiet=quiet)
    add_rows(faiss_index(structure), base, range(0, len(base), _ADDED_AT_ONCE[kind]), progress)
    progress.finish()
    return structure


def add_rows(index: Any, base: RowArray, starts: range, progress: Progress) -> None:
    """Add rows of ``base`` from ``starts.start`` to ``starts.stop``, a step at once, under their numbers."""
    add = faiss_gpu.adder(index)
    for start in starts:
        rows = np.ascontiguousarray(base[start : min(start + starts.step, starts.stop)])
        add(rows, np.arange(start, start + len(rows), dtype=np.int64))
        progress.advance(len(rows))


def train_ivf(kind: Kind, base: RowArray, seed: int, *, max_rows: int | None = None) -> Any:
    """Make an empty IVF structure ("ivf" or "pq"), its cells and codes learnt from a sample of up to ``max_rows``."""
    faiss = load_faiss()
    max_rows = len(base) if max_rows is None else max_rows
    cells, dim = max(1, min(cell_count(len(base)), max_rows // 39)), base.shape[1]
    quantizer, metric = faiss.IndexFlatIP(dim), faiss.METRIC_INNER_PRODUCT
    if kind == "pq":
        structure = faiss.IndexIVFPQ(quantizer, dim, cells, code_bytes(dim), 8, metric)
        structure.pq.cp.seed = seed
    else:
        structure = faiss.IndexIVFFlat(quantizer, dim, cells, metric)
    clustering = structure.cp
    clustering.spherical, clustering.seed, clustering.max_points_per_centroid = True, seed, ROWS_PER_CELL
    wanted = min(len(base), max_rows, max(cells * ROWS_PER_CELL, MIN_ROWS[kind]))
    sample = np.sort(np.random.default_rng(seed).choice(len(base), wanted, replace=False))
    with faiss_gpu.training(structure):
        structure.train(np.ascontiguousarray(base[sample]))
    return Reranked(structure, base) if kind == "pq" else structure


def cell_count(rows: int) -> int:
    """nlist for ``rows`` rows: 4·√N, but never so many that a cell has fewer than 39 rows to learn from."""
    return max(1, min(round(4 * math.sqrt(rows)), rows // 39))


def code_bytes(dim: int) -> int:
    """Bytes of a compressed row: one for four numbers, or for as few more as divide ``dim`` evenly."""
    return max(parts for parts in range(1, max(1, dim // 4) + 1) if dim % parts == 0)


def set_effort(structure: Any, kind: Kind, effort: int) -> None:
    """Set nprobe or efSearch."""
    if kind == "hnsw":
        structure.hnsw.efSearch = effort
    else:
        faiss_index(structure).nprobe = effort


def parameters(structure: Any, kind: Kind, effort: int) -> dict[str, int]:
    """The structure's parameters in the form of the manifest."""
    if kind == "hnsw":
        return {"links": HNSW_LINKS, "efConstruction": HNSW_CONSTRUCTION, "efSearch": effort}
    cells = {"nlist": int(structure.nlist), "nprobe": effort}
    return cells | {"bytes": int(structure.index.pq.M)} if kind == "pq" else cells


def save(structure: Any, path: Path) -> None:
    """Write the structure as a faiss index file."""
    load_faiss().write_index(faiss_index(structure), str(path))


def load(files: Sequence[BinaryIO], kind: Kind, parameters: dict[str, int], base: RowArray) -> Any:
    """Read the structure over ``base`` (N, D) from its open files, and set its effort.

    The caller has verified the files' hashes: faiss itself reads a damaged file without complaint, or crashes.

    Raises:
        IntegrityError: it is no structure of faiss, or of other rows.
    """
    faiss = load_faiss()
    # What a file announces is allocated before it is read, so nothing in it may announce much more than the files hold.
    # The tables that it computes for product quantisation are up to 32 times the centroids that they are made of.
    held = 32 * sum(os.fstat(file.fileno()).st_size for file in files) + (64 << 20)
    if hasattr(faiss, "set_deserialization_vector_byte_limit"):  # earlier versions have a limit of 1 TB
        faiss.set_deserialization_vector_byte_limit(held)
    path = Path(files[0].name)
    try:
        with stdout_to_stderr(), pinned_folder(files) as folder:
            flags = faiss.IO_FLAG_ONDISK_SAME_DIR | faiss.IO_FLAG_READ_ONLY
            index = faiss.read_index(str(folder / path.name), flags)
        structure = Reranked(index, base) if kind == "pq" else index
        if (index.ntotal, index.d) != base.shape:
            raise IntegrityError(f"{path} holds {index.ntotal} rows of {index.d} and not {base.shape}; build it again")
        set_effort(structure, kind, parameters["efSearch" if kind == "hnsw" else "nprobe"])
        disable_prefetch(structure)
    except (RuntimeError, MemoryError, AttributeError, TypeError) as error:  # faiss' own, and of another structure
        reason = first_line(error).rpartition(": ")[2]  # behind faiss' C++ names and places
        raise IntegrityError(f"{path} is corrupt: {reason}; use another copy") from None
    return structure


def disable_prefetch(structure: Any) -> None:
    """Let each search read mapped cells by itself: faiss would start 32 threads to fetch them, for every search."""
    faiss = load_faiss()
    index = faiss_index(structure)
    lists = faiss.downcast_InvertedLists(index.invlists) if hasattr(index, "invlists") else None
    if isinstance(lists, faiss.OnDiskInvertedLists):
        lists.prefetch_nthread = 0


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Send what is printed on stdout meanwhile to stderr, by C++ too: faiss prints the names and sizes of its files."""
    flush_c = ctypes.CDLL(None).fflush
    flush()
    flush_c(None)
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        flush_c(None)
        os.dup2(saved, 1)
        os.close(saved)
