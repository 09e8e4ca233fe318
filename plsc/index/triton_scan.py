"""The exact scan by Triton's kernels: every row is multiplied in low precision, and no matrix of scores is stored.

The rows lie in groups of 64. A first kernel keeps the best low-precision score of every group. No score is off by more
than e (:func:`plsc.index.scan_copy.query_error`, :mod:`plsc.index.codes`), and the k best groups hold k rows: the k-th
best group's score T less e is at most the k-th best exact score. So a row of the k best has a score of T − 2e or more,
its group has, and a second kernel scores the rows of those groups alone. What stays above T − 2e are the candidates.

Their scores are float64 sums where the GPU has the float32 rows, and rank them where no two are so close that another
order of adding could swap or round them otherwise. All other candidates are ranked as by every other scan
(:func:`plsc.index.rows.rank`), and queries with very many by the scan that torch multiplies for.
"""
# mypy: disable-error-code="import-untyped"

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plsc.head.backends.self_check import Deviation, plain_arithmetic, problem_of
from plsc.head.backends.triton_backend import is_interpreted, runs_on
from plsc.head.backends.triton_tiles import device_kind, processor_count
from plsc.index import codes
from plsc.index.rows import Float32, Int64, Mask, rank
from plsc.index.scan_copy import ScanCopy, query_error, signed, sum_error
from plsc.progress import warn

GROUP = 64  # rows; divides BLOCK_N
_LEAST_GROUPS = 4  # for each row to find: of fewer, most would hold a candidate
_MAXIMA = 1 << 27  # best scores of groups in memory at once
_PAIRS = 1 << 18  # of a query and a group whose rows are scored
_PROGRAMS = 2  # of the first one for each of the device's processors
_FEW_QUERIES, _QUERIES, _CODED_QUERIES = 16, 128, 64  # in a block; coded ones have two digits each
_F64_ERROR = 2.0**-53
# As in the head's kernels that multiply such blocks (triton_stored.py). BLOCK_D is in bytes.
_BLOCKS: dict[str, dict[str, int]] = {
    "sm_80": {"BLOCK_N": 128, "BLOCK_D": 64, "num_warps": 8, "num_stages": 3},
    "sm_89": {"BLOCK_N": 128, "BLOCK_D": 64, "num_warps": 8, "num_stages": 3},
    "sm_90": {"BLOCK_N": 128, "BLOCK_D": 64, "num_warps": 4, "num_stages": 4},
    "sm_100": {"BLOCK_N": 128, "BLOCK_D": 128, "num_warps": 8, "num_stages": 2},
    "cpu": {"BLOCK_N": 128, "BLOCK_D": 128},
}


def fused(copy: ScanCopy, by_torch: Any) -> "FusedScan | None":
    """The scan of ``copy`` by kernels, or None where none run, or where they disagree with float64: a warning says so.

    ``by_torch``, the same scan by torch, answers what the kernels do not.
    """
    if not runs_on(copy.device):
        return None
    precision = "int8" if copy.codes is not None or copy.signed_codes is not None else "fp32"
    if copy.rows is not None and copy.rows.dtype == torch.bfloat16:
        precision = "bf16"
    problem = None if is_interpreted() else why_not_trusted(copy.device, precision, copy.vectors.shape[1])
    if problem is None:
        return FusedScan(copy, by_torch)
    reason = f"the kernels of the exact search disagree with float64 here: {problem}"
    warn("plsc", f"KERNELS SWITCHED OFF: {reason}; PyTorch searches instead (slower); run plsc doctor")
    return None


def has_groups(count: int, k: int) -> bool:
    """Whether ``count`` rows are enough for the kernels to find the ``k`` best; of fewer, torch does."""
    return -(-count // GROUP) >= _LEAST_GROUPS * k


def block_options(kind: str, *, is_coded: bool, queries: int) -> dict[str, Any]:
    """Constants and options of ``group_maxima`` for a kind of GPU and so many queries."""
    options: dict[str, Any] = dict(_BLOCKS[kind])
    options["BLOCK_D"] //= 1 if is_coded else 2
    return options | {
        "BLOCK_Q": _FEW_QUERIES if queries <= _FEW_QUERIES else _CODED_QUERIES if is_coded else _QUERIES,
        "GROUP": GROUP,
        "DESCRIBED": kind not in ("sm_80", "sm_89"),  # which read blocks by TMA; Triton makes single loads for others
        "WIDEN": kind == "cpu",
        "enable_fp_fusion": True,  # a product and a sum may be rounded once
    }


def pair_options() -> dict[str, Any]:
    """Constants and options of ``group_scores``."""
    return {"GROUP": GROUP, "BLOCK_D": 64, "num_warps": 4, "enable_fp_fusion": True}


@dataclass(frozen=True)
class _Asked:
    """Queries (Q, D) on the device.

    Attributes:
        exact: (Q, D) float32, or digits (2·Q, width) int8, the high ones of all first.
        low: what is multiplied: (Q, width) bfloat16, or the digits.
        margin: (Q,) float32, 2·e.
        steps, lengths: (Q,) float32 of digits, else None.
    """

    exact: Tensor
    low: Tensor
    margin: Tensor
    steps: Tensor | None = None
    lengths: Tensor | None = None


@dataclass(frozen=True)
class _Candidates:
    """Rows that may be among a query's best, by query and row, ascending.

    Attributes:
        query, row: (n,) int64.
        score: (n,), of the second kernel.
        crowded: (Q,), queries of which there are too many, and none here.
    """

    query: Tensor
    row: Tensor
    score: Tensor
    crowded: Tensor


class FusedScan:
    """Scan by kernels.

    Attributes:
        by_torch: the same scan by torch.
    """

    def __init__(self, copy: ScanCopy, by_torch: Any) -> None:
        self._copy, self.by_torch = copy, by_torch
        self._is_coded = copy.codes is not None or copy.signed_codes is not None
        self._exact: Tensor | None = None  # the float32 rows, where the device has them
        if copy.signed_codes is not None:
            self._low = copy.signed_codes
        elif copy.codes is not None:
            self._low = signed(torch.from_numpy(np.array(copy.codes.codes, subok=False)))
        else:
            if copy.rows is None or copy.rows.dtype == torch.float32:
                self._exact = torch.from_numpy(np.array(copy.vectors, subok=False)) if copy.rows is None else copy.rows
            self._low, self._bounds = copy.round_rows(self._exact)

    def search(self, queries: Float32, k: int, allowed: Mask | None, count: int) -> tuple[Float32, Int64]:
        """Scores and rows (Q, k), 0 < k <= ``count``, the number of rows ``allowed``."""
        groups = self._groups
        if not has_groups(len(self._copy.vectors), k):
            answer: tuple[Float32, Int64] = self.by_torch.search(queries, k, allowed, count)
            return answer
        mask = None
        if allowed is not None:
            mask = torch.from_numpy(np.require(allowed, requirements="W")).view(torch.uint8).to(self._copy.device)
        scores = np.empty((len(queries), k), dtype=np.float32)
        rows = np.empty((len(queries), k), dtype=np.int64)
        step = max(1, min(_MAXIMA // groups, _PAIRS // (2 * _LEAST_GROUPS * k)))
        for start in range(0, len(queries), step):
            part = slice(start, start + step)
            crowded = self._answer(queries[part], k, mask, scores[part], rows[part]) + start
            if len(crowded):
                scores[crowded], rows[crowded] = self.by_torch.search(queries[crowded], k, allowed, count)
        return scores, rows

    @property
    def _groups(self) -> int:
        return -(-len(self._copy.vectors) // GROUP)

    def _answer(self, queries: Float32, k: int, mask: Tensor | None, scores: Float32, rows: Int64) -> Int64:
        """Fill ``scores`` and ``rows`` (Q, k); returns the queries (n,) that are crowded, whose places stay as is."""
        asked = self._asked(queries)
        found = self._candidates(asked, k, mask)
        is_open = ~found.crowded
        if self._exact is not None:
            best, numbers, is_clear = self._ranked(asked, found, k)
            scores[:], rows[:] = best.cpu().numpy(), numbers.cpu().numpy()
            is_open &= ~is_clear
        is_open, is_crowded = torch.stack([is_open, found.crowded]).cpu().numpy()
        left = np.flatnonzero(is_open)
        if len(left):
            of_query, row = torch.stack([found.query, found.row]).cpu().numpy()
            ends = np.searchsorted(of_query, np.arange(len(queries) + 1))
            for query in left:
                own = row[ends[query] : ends[query + 1]]
                scores[query], rows[query] = rank(queries[query], self._copy.source, own, k)
        return np.flatnonzero(is_crowded)

    def _asked(self, queries: Float32) -> _Asked:
        device = self._copy.device
        if self._is_coded:
            coded = codes.encode_queries(queries, self._copy.code_maxima)
            digits, *others = (
                torch.from_numpy(part).to(device) for part in (coded.digits, coded.margin, coded.steps, coded.lengths)
            )
            digits = digits.transpose(0, 1).flatten(0, 1)
            return _Asked(digits, digits, *others)
        exact, dim = torch.from_numpy(np.require(queries, requirements="W")).to(device), queries.shape[1]
        low = torch.nn.functional.pad(exact.bfloat16(), (0, self._low.shape[1] - dim))
        # matrix units align the numbers that they add at a time: once more the error of adding one by one
        error = query_error(exact, low[:, :dim], self._bounds) + exact.norm(dim=1) * sum_error(dim, self._bounds)
        return _Asked(exact, low, 2 * error)

    def _candidates(self, asked: _Asked, k: int, mask: Tensor | None) -> _Candidates:
        highest, lowest = self.maxima(asked, mask)
        threshold = lowest.topk(k, dim=1).values[:, -1] - asked.margin
        picked = (highest >= threshold[:, None]) & (highest > -torch.inf)
        # Where the margin overflowed, or is no number, scores may be none.
        crowded = (picked.sum(1) > _PAIRS // len(picked)) | ~(asked.margin < torch.inf)
        of_query, of_group = (picked & ~crowded[:, None]).nonzero(as_tuple=True)
        scores = self.scores(asked, of_query, of_group, mask)
        keep = (scores >= threshold[of_query, None]) & (scores > -torch.inf)
        pair, slot = keep.nonzero(as_tuple=True)
        return _Candidates(of_query[pair], of_group[pair] * GROUP + slot, scores[pair, slot], crowded)

    def maxima(self, asked: _Asked, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """The most, and the least, that the best score of every group may be (Q, groups); the same without codes."""
        from plsc.index import triton_scan_kernels as kernels

        device, queries = self._copy.device, len(asked.margin)
        options = block_options(device_kind(device), is_coded=self._is_coded, queries=queries)
        highest = torch.empty(queries, self._groups, device=device)
        lowest = torch.empty_like(highest) if self._is_coded else None
        blocks = -(-len(self._copy.vectors) // options["BLOCK_N"]) * -(-queries // options["BLOCK_Q"])
        with torch.cuda.device_of(highest):
            kernels.group_maxima[(min(blocks, _PROGRAMS * processor_count(device)),)](
                rows=_operand(self._low, "BLOCK_N", options),
                queries=_operand(asked.low, "BLOCK_Q", options),
                **self._bounded(asked, mask),
                highest=highest,
                lowest=lowest,
                groups=self._groups,
                width=self._low.shape[1],
                **options,
            )
        return highest, highest if lowest is None else lowest

    def scores(self, asked: _Asked, of_query: Tensor, of_group: Tensor, mask: Tensor | None) -> Tensor:
        """Scores (P, GROUP) of the rows of groups with a query each; the most that they may be, by codes."""
        from plsc.index import triton_scan_kernels as kernels

        rows = self._low if self._exact is None else self._exact
        dtype = torch.float32 if self._is_coded else torch.float64
        scores = torch.empty(len(of_query), GROUP, device=rows.device, dtype=dtype)
        if len(of_query):
            with torch.cuda.device_of(scores):
                kernels.group_scores[(len(of_query),)](
                    rows=rows,
                    queries=asked.exact,
                    **self._bounded(asked, mask),
                    of_query=of_query,
                    of_group=of_group,
                    scores=scores,
                    row_stride=rows.stride(0),
                    dim=self._copy.vectors.shape[1],
                    **pair_options(),
                )
        return scores

    def _bounded(self, asked: _Asked, mask: Tensor | None) -> dict[str, Any]:
        """The arguments that both kernels share."""
        scale, residue = self._copy.code_bounds if self._is_coded else (None, None)
        shared = {"scale": scale, "residue": residue, "step": asked.steps, "length": asked.lengths, "allowed": mask}
        return shared | {"n": len(self._copy.vectors), "batch": len(asked.margin)}

    def _ranked(self, asked: _Asked, found: _Candidates, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """The best by the candidates' float64 scores (Q, k), their rows, and for which queries that is certain (Q,)."""
        device = found.query.device
        ends = torch.searchsorted(found.query, torch.arange(len(asked.exact) + 1, device=device))
        place = torch.arange(len(found.query), device=device) - ends[found.query]
        shape = len(asked.exact), max(k + 1, int(ends.diff().max()))
        table = torch.full(shape, -torch.inf, dtype=torch.float64, device=device)
        numbers = torch.zeros(shape, dtype=torch.int64, device=device)
        table[found.query, place], numbers[found.query, place] = found.score, found.row
        best, order = table.sort(dim=1, descending=True, stable=True)
        # Any sum in float64 is off by less than a half of this: so far apart, two orders of adding rank alike.
        lengths, dim = asked.exact.double().norm(dim=1, keepdim=True), asked.exact.shape[1]
        error = 2 * (dim + 16) * _F64_ERROR * self._bounds.longest * lengths
        top, gap = best[:, :k], best[:, :k] - best[:, 1 : k + 1]
        is_clear = (gap > 2 * error) & ((top - error).float() == (top + error).float())
        return top.float(), numbers.gather(1, order[:, :k]), is_clear.all(1)


def _operand(matrix: Tensor, side: str, options: dict[str, Any]) -> Any:
    """A matrix as ``group_maxima`` takes it: where it is read in blocks, its tensor descriptor."""
    if not options["DESCRIBED"]:
        return matrix
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(matrix, [options[side], options["BLOCK_D"]])


# The check -----------------------------------------------------------------------------------------------------------


@cache
def why_not_trusted(device: torch.device, precision: str, dim: int) -> str | None:
    """The reason not to trust the kernels for rows of ``dim`` in a precision on a GPU; None: they agree with float64.

    ``PLSC_SELF_CHECK=0`` leaves the check out.
    """
    if os.environ.get("PLSC_SELF_CHECK") == "0":
        return None
    return problem_of(lambda: list(check(device, precision, dim)))


def check(device: torch.device, precision: str, dim: int) -> Iterator[Deviation]:
    """Compare both kernels' scores of 300 rows with float64: for 20 queries, and for one that may find half the rows.

    Returns:
        How far beyond what it may be the exact score is, and how far the range of codes goes, in units of the bounds.
    """
    generator = np.random.default_rng(0)
    numbers = generator.standard_normal((320, dim))
    numbers /= np.linalg.norm(numbers, axis=1, keepdims=True) * 1.001
    rows, queries = numbers[:300].astype(np.float32), numbers[300:].astype(np.float32)
    queries = np.ldexp(queries, -np.frexp(np.abs(queries).max(axis=1, keepdims=True))[1])  # as a search scales them
    some = generator.random(300) < 0.5
    some[GROUP : 2 * GROUP] = False
    with plain_arithmetic(device):
        scan = FusedScan(ScanCopy(rows, precision, device), None)
        for count, mask in ((20, np.ones(300, dtype=bool)), (1, some)):
            asked = scan._asked(queries[:count])
            allowed = None if mask.all() else torch.from_numpy(mask).view(torch.uint8).to(device)
            exact = np.where(mask, queries[:count].astype(np.float64) @ rows.T.astype(np.float64), -np.inf)
            yield from _deviations(scan, asked, allowed, torch.from_numpy(exact).to(device))


def _deviations(scan: FusedScan, asked: _Asked, allowed: Tensor | None, exact: Tensor) -> Iterator[Deviation]:
    """Of the kernels' scores of ``exact`` ones (Q, N) float64, −inf where a row is not allowed."""
    count, groups = len(exact), scan._groups
    by_group = torch.nn.functional.pad(exact, (0, groups * GROUP - exact.shape[1]), value=-torch.inf)
    by_group = by_group.view(count, groups, GROUP)
    highest, lowest = scan.maxima(asked, allowed)
    pairs = torch.arange(count * groups, device=exact.device)
    scores = scan.scores(asked, pairs // groups, pairs % groups, allowed).view(by_group.shape)
    error, spread = asked.margin.double() / 2, torch.zeros(count, device=exact.device)
    if asked.lengths is not None:
        spread = 2 * asked.lengths * scan._copy.code_bounds[1].max()
    for name, above, below, want in (
        ("best scores of groups", highest, lowest, by_group.amax(2)),
        ("scores of rows", scores.flatten(1), scores.flatten(1) - spread[:, None], by_group.flatten(1)),
    ):
        known = want > -torch.inf
        off = torch.maximum(want - above, below - want) / error[:, None]
        yield Deviation(name, float(off[known].max()), 1.0)
        wide = (above - below - 1.001 * spread[:, None]) / error[:, None]
        yield Deviation(f"range of {name}", float(wide[known].max()), 1.0)
        yield Deviation(f"{name} not to be found", float((above[~known] > -torch.inf).sum()), 0.0)
