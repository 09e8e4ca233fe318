"""Exact search by scanning every row: candidates in low precision, the answer in float64.

Codes of 8 bits have a quarter of the bytes of the float32 rows, a bfloat16 copy a half, and both multiply many times as
fast. Their scores are off by no more than a bound that follows from the rounding errors themselves (Cauchy-Schwarz,
:mod:`plsc.index.codes` and :func:`plsc.index.scan_copy.query_error`). Every row within twice that bound of the k-th
best score is a candidate, and candidates are scored again from the float32 rows in float64. So the answer is the
ranking of a float64 scan, however close rows lie; where very many are that close, all of them are scored in float64.

:class:`ExactScan` is what callers use. It chooses one of three backends when it is made: :class:`NativeScan` (C++, on a
CPU with a compiler), :class:`plsc.index.triton_scan.FusedScan` (on a GPU with Triton) or :class:`TorchScan`
(elsewhere). :class:`ExactSearch` leaves few rows or queries to faiss' brute force, which needs no copy.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from plsc.embedding.columns import check_maps
from plsc.errors import UsageError
from plsc.index import codes, faiss_gpu
from plsc.index.rows import Float32, Int64, Mask, rank
from plsc.index.scan_copy import ScanCopy, query_error, signed
from plsc.native.scan import LowQueries, Rows, ScanKernel, load_scan

PRECISIONS = ("int8", "bf16", "fp32")
AUTO = "auto"
# Rows per matrix product of faiss: with its own 1,024 the products are too small for several threads, and 65,536 is no
# faster than this but holds a gigabyte of scores at once (faiss multiplies 4,096 queries by a block).
DATABASE_BLOCK = 16384
SCAN_FROM = 1 << 22  # numbers in the rows
COPY_AFTER = 16  # queries that faiss answers before a copy is worth making
_UNCOPIED_QUERIES = 64  # compared at once with a block of rows

_RESULTS = 1 << 20  # rows returned by one pass of a backend, over all its queries, and numbers in these
_CANDIDATES = 1 << 22  # kept at once over all queries (native: by each thread)
_SCORES = 1 << 22  # in one matrix product of the torch backend
_ONE_THREAD_BELOW = 1 << 21  # multiplications; starting a second thread costs more than it saves
_WHOLE_ROWS, _WHOLE_QUERIES = 32, 32  # that a product of bytes on a GPU takes at a time
_EXACT_SUM = 2048  # products of 64 and 127 whose sum float32 holds: it stays below 2**24
_BF16_ROUNDING = 2.0**-8  # relative, of a score that a bfloat16 product of torch returns
_FACTORS_ROUNDING = 2.0**-6  # at least, relative, of float32 factors that torch rounds to bfloat16 or TF32


class ExactScan:
    """Exact k-nearest-neighbour search over the rows of ``vectors`` (N, D); immutable once made.

    Args:
        vectors: float32 in C order, rows of length 1 or less, usually a memory map. Kept, not copied: candidates are
            read for every answer, from the map's file where there is one.
        precision: "int8" scans codes of 1 byte a number, "bf16" a copy of 2 bytes a number, "fp32" ``vectors``
            themselves; "auto" is :func:`best_precision`.
        device: "cpu", or "cuda", which keeps what is scanned in the GPU's memory: for "fp32" with Triton that is also
            a copy in bfloat16.
        row_codes: of the vectors, where they have been made before; used for "int8" on a CPU.

    Attributes:
        precision: the one that is scanned in.
        backend: "native", "triton" or "torch", the implementation that was chosen.
        products: the unit that multiplies the rows, by :class:`plsc.native.scan.ScanKernel`'s names, or the backend.

    Raises:
        UsageError: another shape, type or precision, or rows too wide for codes.
        DataError: a row that is not finite.
    """

    def __init__(
        self,
        vectors: Float32,
        *,
        precision: str = AUTO,
        device: str = "cpu",
        row_codes: codes.RowCodes | None = None,
    ) -> None:
        if vectors.ndim != 2 or vectors.dtype != np.float32 or not vectors.flags.c_contiguous:
            raise UsageError(f"a scan takes float32 rows in C order, not {vectors.dtype}{list(vectors.shape)}")
        if precision not in (AUTO, *PRECISIONS):
            raise UsageError(f"no precision {precision!r}; it is one of {', '.join((AUTO, *PRECISIONS))}")
        if precision == AUTO:
            precision = best_precision(vectors.shape[1], device)
        if precision == "int8" and vectors.shape[1] > codes.LARGEST_DIM:
            raise UsageError(f"int8 takes rows of up to {codes.LARGEST_DIM:,} numbers; give bf16 or fp32")
        self.precision = precision
        self._vectors = vectors
        self._maps = [array for array in (vectors, row_codes and row_codes.codes) if isinstance(array, np.memmap)]
        self._copy = ScanCopy(vectors, precision, torch.device(device), row_codes)
        is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        kernel = load_scan() if self._copy.device.type == "cpu" and not is_interpreted else None
        by_torch = TorchCodeScan(self._copy) if precision == "int8" else TorchScan(self._copy)
        self._scan: ScanBackend = by_torch if kernel is None else NativeScan(self._copy, kernel)
        self.backend = "torch" if kernel is None else "native"
        self.products = "torch" if kernel is None else kernel.products[precision]
        if self._copy.device.type == "cuda" or is_interpreted:
            from plsc.index.triton_scan import fused  # which imports the head's kernels

            scan = fused(self._copy, by_torch)
            if scan is not None:
                self._scan, self.backend, self.products = scan, "triton", "triton"

    def __len__(self) -> int:
        return len(self._vectors)

    @property
    def memory_bytes(self) -> int:
        """Bytes that a scan reads: of the copy, or of the float32 rows themselves."""
        return self._copy.memory_bytes

    def search(self, queries: Float32, k: int, *, allowed: Mask | None = None) -> tuple[Float32, Int64]:
        """Find the rows with the largest inner products.

        Args:
            queries: (Q, D), finite.
            k: how many rows for each query.
            allowed: (N,), True for the rows that may be found; None: all.

        Returns:
            Scores (Q, k') float32, best first, and rows (Q, k') int64 with ties by row number,
            k' = min(k, number of rows allowed).

        Raises:
            UsageError: k < 0, queries that are not finite, or arguments that do not fit the rows.
            IntegrityError: a file of theirs was cut, or written over.
        """
        self._check(queries, k, allowed)
        check_maps(*self._maps)
        if allowed is not None:
            allowed = None if allowed.all() else np.ascontiguousarray(allowed)
        count = len(self) if allowed is None else int(np.count_nonzero(allowed))
        k = min(k, count)
        scores = np.empty((len(queries), k), dtype=np.float32)
        rows = np.empty((len(queries), k), dtype=np.int64)
        step = max(1, _RESULTS // max(1, k, queries.shape[1]))
        for start in range(0, len(queries) if k else 0, step):
            part = slice(start, start + step)
            # A power of two changes no ranking; without it, squares and products of short queries are 0 in float32.
            exponents = np.frexp(np.abs(queries[part]).max(axis=1, initial=0.0, keepdims=True))[1]
            found, rows[part] = self._scan.search(np.ldexp(queries[part], -exponents), k, allowed, count)
            scores[part] = np.ldexp(found, exponents)
        return scores, rows

    def _check(self, queries: Float32, k: int, allowed: Mask | None) -> None:
        dim = self._vectors.shape[1]
        if queries.ndim != 2 or queries.shape[1] != dim or queries.dtype != np.float32:
            raise UsageError(f"queries are {queries.dtype}{list(queries.shape)}; the scan takes float32 [Q, {dim}]")
        if not np.isfinite(queries).all():
            raise UsageError("a query holds NaN or infinity; the scan takes finite numbers")
        if k < 0:
            raise UsageError(f"k is {k}; it counts neighbours")
        if allowed is not None and (allowed.shape != (len(self),) or allowed.dtype != np.bool_):
            raise UsageError(f"allowed is {allowed.dtype}{list(allowed.shape)}; it takes bool [{len(self)}]")


def best_precision(dim: int, device: str = "cpu") -> str:
    """What "auto" is: "int8" where a compiled scan multiplies bytes, and rows of ``dim`` fit it, else "bf16"."""
    kernel = load_scan() if device == "cpu" else None
    has_bytes = kernel is not None and kernel.products["int8"] != "portable"
    return "int8" if has_bytes and dim <= codes.LARGEST_DIM else "bf16"


class ScanBackend(Protocol):
    """An implementation of the scan."""

    def search(self, queries: Float32, k: int, allowed: Mask | None, count: int) -> tuple[Float32, Int64]:
        """Scores and rows (Q, k), 0 < k <= ``count``, the number of rows ``allowed``."""


class NativeScan:
    """Scan by compiled kernels (plsc/native/scan_kernels.cpp), with as many threads as torch uses."""

    def __init__(self, copy: ScanCopy, kernel: ScanKernel) -> None:
        self._kernel, self._copy = kernel, copy
        # Where the processor multiplies bfloat16 numbers, queries are rounded too; elsewhere, rows are widened.
        self._rounds_queries = copy.rows is not None and kernel.rounds_queries
        base: Any = copy.vectors
        if copy.codes is not None:
            base = copy.codes.codes
        elif copy.rows is not None:
            base = copy.rows.view(torch.uint16).numpy()
        bounds = None if copy.codes is None else copy.code_bounds.numpy()
        file = (copy.source.descriptor, copy.source.offset)
        self._rows = Rows(np.asarray(copy.vectors), np.asarray(base), *file, bounds)

    def search(self, queries: Float32, k: int, allowed: Mask | None, count: int) -> tuple[Float32, Int64]:
        """Scores and rows (Q, k), 0 < k <= ``count``, the number of rows ``allowed``."""
        index = None
        if allowed is not None and 2 * count < len(allowed):  # few: visit them alone instead of testing every row
            index, allowed = np.flatnonzero(allowed).astype(np.int64), None
        low, margin = self._low(queries)
        score_all = 4 * k >= count  # then a first pass in low precision would exclude next to nothing
        multiplications = count * len(queries) * queries.shape[1]
        scores, rows, _ = self._kernel(
            replace(self._rows, base=None) if score_all else self._rows,
            queries,
            None if score_all else low,
            margin,
            k,
            index=index,
            allowed=allowed,
            most=max(4 * k, _CANDIDATES // len(queries)),
            threads=1 if multiplications < _ONE_THREAD_BELOW else torch.get_num_threads(),
        )
        return scores, rows

    def _low(self, queries: Float32) -> tuple[LowQueries | None, Float32]:
        """The queries in the precision of the rows, None for float32, and twice what a score may be off (Q,)."""
        if self._copy.codes is not None:
            coded = codes.encode_queries(queries, self._copy.code_maxima)
            return LowQueries(coded.digits, coded.steps, coded.lengths), coded.margin
        exact = torch.from_numpy(np.array(queries))
        rounded = exact.bfloat16() if self._rounds_queries else exact
        margin = (2 * query_error(exact, rounded, self._copy.bounds)).numpy()
        return LowQueries(rounded.view(torch.uint16).numpy()) if self._rounds_queries else None, margin


class TorchScan:
    """Scan by PyTorch's matrix products, on the device of the copy."""

    def __init__(self, copy: ScanCopy) -> None:
        self._copy = copy

    def search(self, queries: Float32, k: int, allowed: Mask | None, count: int) -> tuple[Float32, Int64]:
        """Scores and rows (Q, k), 0 < k <= ``count``, the number of rows ``allowed``."""
        all_rows = np.arange(len(self._copy.vectors)) if allowed is None else np.flatnonzero(allowed)
        shortlists: Sequence[Int64 | None] = [None] * len(queries)
        if 4 * k < count:  # otherwise a first pass in low precision would exclude next to nothing
            shortlists = self._shortlists(queries, k, allowed)
        scores = np.empty((len(queries), k), dtype=np.float32)
        rows = np.empty((len(queries), k), dtype=np.int64)
        for position, shortlist in enumerate(shortlists):
            candidates = all_rows if shortlist is None else shortlist
            scores[position], rows[position] = rank(queries[position], self._copy.source, candidates, k)
        return scores, rows

    def _shortlists(self, queries: Float32, k: int, allowed: Mask | None) -> list[Int64 | None]:
        """For each query the rows (n,), ascending, that may be among its best ``k``; None where too many may."""
        device, copy = self._copy.device, self._copy.rows
        exact = torch.from_numpy(np.array(queries)).to(device)
        rounded = exact if copy is None else exact.to(copy.dtype)
        error = query_error(exact, rounded, self._copy.bounds)
        if rounded.dtype == torch.bfloat16:
            error = error + _BF16_ROUNDING * self._copy.bounds.longest * exact.norm(dim=1)
        elif _rounds_float32(device):
            error = error + _FACTORS_ROUNDING * self._copy.bounds.longest * exact.norm(dim=1)
        pool = _CandidatePool(k, 2 * error)
        mask = None if allowed is None else torch.from_numpy(np.array(allowed)).to(device)
        step = max(1, _SCORES // max(1, len(queries)))
        for start in range(0, len(self._copy.vectors), step):
            scores = (rounded @ self._range(start, start + step).T).float()
            if mask is not None:
                scores.masked_fill_(~mask[start : start + step], -torch.inf)
            pool.add(start, scores)
        return pool.finish()

    def _range(self, start: int, stop: int) -> Tensor:
        if self._copy.rows is not None:
            return self._copy.rows[start:stop, : self._copy.vectors.shape[1]]
        return torch.from_numpy(np.array(self._copy.vectors[start:stop], subok=False))


def _rounds_float32(device: torch.device) -> bool:
    """Whether torch's settings let it round float32 factors; pinning them would change them for other threads too."""
    settings: Any = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    return settings.matmul.fp32_precision not in ("ieee", "none")


class TorchCodeScan(TorchScan):
    """The same by codes, which are multiplied by both digits of the queries."""

    def _shortlists(self, queries: Float32, k: int, allowed: Mask | None) -> list[Int64 | None]:
        copy, count, device = self._copy, len(self._copy.vectors), self._copy.device
        coded = codes.encode_queries(queries, copy.code_maxima)
        digits = torch.from_numpy(coded.digits).transpose(0, 1).flatten(0, 1).to(device)
        of_queries = (coded.steps, coded.lengths, coded.margin)
        steps, lengths, margin = (torch.from_numpy(part).to(device) for part in of_queries)
        mask = None if allowed is None else torch.from_numpy(np.array(allowed)).to(device)
        pool = _CandidatePool(k, margin)
        largest = len(digits) if digits.is_cuda else max(digits.shape)  # a CPU's product copies the rows as float32
        step = max(1, _SCORES // largest // _WHOLE_ROWS) * _WHOLE_ROWS
        for start in range(0, count, step):
            rows = slice(start, min(start + step, count))
            high, low = _multiply_bytes(digits, self._codes(start, start + step)).chunk(2)
            scale, residue = copy.code_bounds[:2, rows]
            slack = lengths[:, None] * residue
            scores = (128 * high + low)[:, : rows.stop - start] * steps[:, None] * scale + slack
            if mask is not None:
                scores.masked_fill_(~mask[rows], -torch.inf)
            pool.add(start, scores, scores - 2 * slack)
        return pool.finish()

    def _codes(self, start: int, stop: int) -> Tensor:
        copy = self._copy
        if copy.signed_codes is not None:
            return copy.signed_codes[start:stop]
        assert copy.codes is not None, "the rows are coded"
        return signed(torch.from_numpy(np.array(copy.codes.codes[start:stop], subok=False)))


def _multiply_bytes(digits: Tensor, codes: Tensor) -> Tensor:
    """``digits @ codes.T`` of int8 numbers, up to 64 and 127, in float32: the exact sums, rounded once.

    A CPU multiplies them as float32 numbers, which also torch's faster settings leave as they are, for 127 has 7 bits.
    ``torch._int_mm`` is wrong on CPUs without VNNI: it adds pairs of products in 16 bits, and saturates.
    """
    if digits.is_cuda:
        padded = torch.nn.functional.pad(digits, (0, 0, 0, -len(digits) % _WHOLE_QUERIES))
        return torch._int_mm(padded, codes.T)[: len(digits)].float()
    total = torch.zeros(len(digits), len(codes), dtype=torch.int32)
    for part, others in zip(digits.split(_EXACT_SUM, dim=1), codes.split(_EXACT_SUM, dim=1), strict=True):
        total += (part.float() @ others.float().T).int()
    return total.float()


class _CandidatePool:
    """Collects, chunk by chunk of the rows, those that may still be among the best ``k`` of each query."""

    def __init__(self, k: int, margin: Tensor) -> None:
        """margin: (Q,), the distance below the k-th best score at which a row may still be one of the best k."""
        self._k, self._margin = k, margin
        self._best = torch.full((len(margin), k), -torch.inf, device=margin.device)
        self._queries: list[Tensor] = []
        self._rows: list[Tensor] = []
        self._scores: list[Tensor] = []
        # Queries with too many candidates: theirs are dropped, and the caller scores every row in float64 instead.
        # The same where the margin overflowed, or is no number: then scores may be none.
        self._crowded = ~(margin < torch.inf)

    def add(self, start: int, scores: Tensor, lowest: Tensor | None = None) -> None:
        """Take the rows from ``start`` on.

        Args:
            start: the first row's number.
            scores: (Q, n), −inf for those that are not allowed.
            lowest: (Q, n), of rows that have bounds of their own, whose scores are the highest; None: the scores.
        """
        top = (scores if lowest is None else lowest).topk(min(self._k, scores.shape[1]), dim=1).values
        self._best = torch.cat([self._best, top], dim=1).topk(self._k, dim=1).values
        keep = (scores >= self._threshold()[:, None]) & (scores > -torch.inf)
        queries, rows = keep.nonzero(as_tuple=True)
        self._queries.append(queries)
        self._rows.append(rows + start)
        self._scores.append(scores[queries, rows])
        if sum(map(len, self._rows)) > _CANDIDATES:
            self._prune()

    def finish(self) -> list[Int64 | None]:
        """Rows (n,) ascending for each query; None for one that has too many."""
        self._prune()
        queries, rows = self._queries[0].cpu().numpy(), self._rows[0].cpu().numpy()
        order = np.lexsort((rows, queries))
        parts = np.split(rows[order], np.cumsum(np.bincount(queries, minlength=len(self._margin)))[:-1])
        crowded = self._crowded.tolist()
        return [None if many else part for many, part in zip(crowded, parts, strict=True)]

    def _threshold(self) -> Tensor:
        return torch.where(self._crowded, torch.inf, self._best[:, -1] - self._margin)

    def _prune(self) -> None:
        queries, rows, scores = map(torch.cat, (self._queries, self._rows, self._scores))
        keep = scores >= self._threshold()[queries]
        if int(keep.sum()) > _CANDIDATES // 2:
            counts = torch.bincount(queries[keep], minlength=len(self._margin))
            self._crowded |= counts > max(4 * self._k, _CANDIDATES // (2 * len(self._margin)))
            keep &= ~self._crowded[queries]
        self._queries, self._rows, self._scores = [queries[keep]], [rows[keep]], [scores[keep]]


class ExactSearcher(Protocol):
    """Exact search over all rows; :class:`plsc.index.scan.ExactScan` is one."""

    def search(self, queries: Float32, k: int, *, allowed: Mask | None = None) -> tuple[Float32, Int64]:
        """Scores and rows (Q, min(k, rows allowed)), best first."""


def load_faiss() -> Any:
    """Import faiss, set up for large matrix products."""
    import faiss

    faiss.cvar.distance_compute_blas_database_bs = DATABASE_BLOCK
    return faiss


def knn(queries: Float32, base: Float32, k: int) -> tuple[Float32, Int64]:
    """Find the rows of ``base`` (N, D) with the largest inner products with each of ``queries`` (Q, D), by faiss.

    It does so on a GPU where it has one and the rows and queries are many (:func:`plsc.index.faiss_gpu.takes_search`).

    Returns:
        Scores (Q, min(k, N)) float32, best first, and rows (Q, min(k, N)) int64.
    """
    k = min(k, len(base))
    if not k or not len(queries):
        return np.empty((len(queries), k), dtype=np.float32), np.empty((len(queries), k), dtype=np.int64)
    if faiss_gpu.takes_search(queries, base, k):
        return faiss_gpu.knn(queries, base, k)
    faiss = load_faiss()
    scores, rows = faiss.knn(np.ascontiguousarray(queries), np.asarray(base), k, metric=faiss.METRIC_INNER_PRODUCT)
    return scores, rows


def merge_topk(first: tuple[Float32, Int64], second: tuple[Float32, Int64], k: int) -> tuple[Float32, Int64]:
    """Merge two results (scores, rows) of the same queries into the best ``k``; row -1 (score −inf) stands for none."""
    scores = np.concatenate([first[0], second[0]], axis=1)
    rows = np.concatenate([first[1], second[1]], axis=1)
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(scores, order, axis=1), np.take_along_axis(rows, order, axis=1)


class ExactSearch:
    """Exact search of ``vectors`` (N, D) float32 of length 1; the scan's copy is made once enough queries came.

    Milliseconds of a search for 10 rows on one thread, by :class:`ExactScan` in bfloat16 and by faiss 1.15 with its
    block size tuned, D = 512, a processor with AMX:

        rows         1 query         32 queries        256 queries
        1,000        0.23 / 0.09     0.5 / 1.2         3.4 / 12
        5,000        0.45 / 0.34     1.1 / 15          10 / 57
        20,000       1.0 / 1.2       2.7 / 58          18 / 201
        100,000      12 / 19         14 / 595          50 / 1,046

    The copy of 100,000 rows takes 0.2 s, as long as faiss needs for ten single queries. So faiss answers all queries
    for up to 8,192 rows of 512 numbers and where no compiler is installed, and otherwise the first 16.

    faiss ranks by float32 scores: rows whose cosines differ by less than about D·2⁻²² are in no order, equal ones
    too, and any of them may be the last of the k. The scan's answers are the float64 ranking.
    """

    def __init__(self, vectors: Float32, *, may_copy: bool = True) -> None:
        """Where it may not copy, the rows are read as they lie in their file, a few queries at a time."""
        self._vectors, self._may_copy = vectors, may_copy
        self._scan: ExactScan | None = None
        self._queries = 0

    def search(self, queries: Float32, k: int) -> tuple[Float32, Int64]:
        """Scores (Q, min(k, N)) float32, best first, and rows (Q, min(k, N)) int64, for queries (Q, D) of length 1."""
        check_maps(self._vectors)
        if faiss_gpu.takes_search(queries, self._vectors, k):
            return knn(queries, self._vectors, k)
        self._queries += len(queries)
        is_worth_it = self._vectors.size >= SCAN_FROM and self._queries > COPY_AFTER
        if self._scan is None and self._may_copy and is_worth_it and load_scan() is not None:
            self._scan = ExactScan(self._vectors)
        if self._scan is not None:
            return self._scan.search(queries, k)
        if self._may_copy:
            return knn(queries, self._vectors, k)
        starts = range(0, max(1, len(queries)), _UNCOPIED_QUERIES)
        parts = [knn(queries[start : start + _UNCOPIED_QUERIES], self._vectors, k) for start in starts]
        return np.concatenate([scores for scores, _ in parts]), np.concatenate([rows for _, rows in parts])
