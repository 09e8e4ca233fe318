"""The Triton kernels of the exact search: no matrix of queries by rows is in memory.

``group_maxima`` multiplies every row with every query and keeps the best score of each group of GROUP rows alone.
``group_scores`` scores all rows of the few groups that may hold one of a query's best. Import this module only where
:func:`plsc.head.backends.triton_backend.runs_on` holds.

Arguments that both share, or one of the two kinds of rows:
    scale, residue: (N,) float32 steps and bounds ρ of rows that are codes (:mod:`plsc.index.codes`).
    step, length: (Q,) float32, of queries that are digits; upper bounds of |q|.
    allowed: (N,) uint8, 0 for rows that may not be found; None: all may.
    n, batch: N and Q.
"""
# mypy: disable-error-code="untyped-decorator, no-untyped-def, import-untyped, assignment"

import triton
import triton.language as tl


@triton.jit
def _upper_score(high, low, step, scale, slack):
    """The highest that a score may be besides the queries' margin, in plsc.index.codes' six roundings."""
    return (128 * high.to(tl.float32) + low.to(tl.float32)) * step * scale + slack


@triton.jit
def _taken(allowed, first_row, slot, n):
    """Which of the rows ``first_row + slot`` exist, and may be found."""
    inside = slot < n - first_row
    if allowed is not None:
        inside = inside & (tl.load(allowed + first_row + slot, mask=inside, other=0) != 0)
    return inside


@triton.jit
def _block(matrix, first, column, count, width, SIDE: tl.constexpr, BLOCK_D: tl.constexpr, DESCRIBED: tl.constexpr):
    """SIDE rows by BLOCK_D columns of a matrix (count, width), zeros behind its last row."""
    if DESCRIBED:
        return matrix.load([first, column])
    else:  # Triton compiles what follows a return
        row, d = first + tl.arange(0, SIDE), column + tl.arange(0, BLOCK_D)
        return tl.load(matrix + row.to(tl.int64)[:, None] * width + d[None, :], mask=(row < count)[:, None], other=0)


@triton.jit
def _store_best(maxima, scores, taken, group, query, groups, batch, GROUP: tl.constexpr):
    """Store the largest of ``scores`` (Q, rows) of each group, from number ``group`` on; −inf of an empty one."""
    parts = tl.reshape(
        tl.where(taken[None, :], scores, float("-inf")), (scores.shape[0], scores.shape[1] // GROUP, GROUP)
    )
    group += tl.arange(0, scores.shape[1] // GROUP)
    at = maxima + query.to(tl.int64)[:, None] * groups + group[None, :]
    tl.store(at, tl.max(parts, axis=2), mask=(query < batch)[:, None] & (group < groups)[None, :])


@triton.jit(do_not_specialize=["n", "batch", "groups"])
def group_maxima(
    rows,
    queries,
    scale,
    residue,
    step,
    length,
    allowed,
    highest,
    lowest,
    n,
    batch,
    groups,
    width: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DESCRIBED: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """The best score of each group of rows as ``highest`` (Q, groups) float32; ``lowest`` likewise, of codes.

    A block of rows is read again for each block of queries, one after the other, which the second-level cache serves.

    Args of its own:
        rows, queries: (N, width) and (Q, width), bfloat16; or codes, int8, and both digits of the queries, (2·Q,
            width), the high ones of all first.
        lowest: the least that a score may be, where ``highest`` is the most; None where rows are no codes.
        width: of the rows, a multiple of BLOCK_D.
        DESCRIBED: ``rows`` and ``queries`` are tensor descriptors.
        WIDEN: for the interpreter, whose dot knows no bfloat16.
    """
    CODES: tl.constexpr = lowest is not None
    blocks, asked = tl.cdiv(batch, BLOCK_Q), 2 * batch if CODES else batch
    slot, column = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_Q)
    for number in tl.range(tl.program_id(0), tl.cdiv(n, BLOCK_N) * blocks, tl.num_programs(0), flatten=True):
        first_row, first_query = (number // blocks) * BLOCK_N, (number % blocks) * BLOCK_Q
        products = tl.zeros((BLOCK_Q, BLOCK_N), dtype=tl.int32 if CODES else tl.float32)
        low = products
        for at in range(0, width, BLOCK_D):
            x = _block(rows, first_row, at, n, width, BLOCK_N, BLOCK_D, DESCRIBED)
            q = _block(queries, first_query, at, asked, width, BLOCK_Q, BLOCK_D, DESCRIBED)
            if WIDEN and not CODES:
                x, q = x.to(tl.float32), q.to(tl.float32)
            products = tl.dot(q, x.T, products, out_dtype=products.dtype)
            if CODES:
                q = _block(queries, batch + first_query, at, asked, width, BLOCK_Q, BLOCK_D, DESCRIBED)
                low = tl.dot(q, x.T, low, out_dtype=tl.int32)
        taken, query, group = _taken(allowed, first_row, slot, n), first_query + column, first_row // GROUP
        if CODES:
            of_row = tl.load(scale + first_row + slot, mask=taken, other=0.0)
            bound = tl.load(residue + first_row + slot, mask=taken, other=0.0)
            of_query = tl.load(step + query, mask=query < batch, other=0.0)
            slack = tl.load(length + query, mask=query < batch, other=0.0)[:, None] * bound[None, :]
            scores = _upper_score(products, low, of_query[:, None], of_row[None, :], slack)
            _store_best(lowest, scores - 2 * slack, taken, group, query, groups, batch, GROUP)
        else:
            scores = products
        _store_best(highest, scores, taken, group, query, groups, batch, GROUP)


@triton.jit(do_not_specialize=["n", "batch"])
def group_scores(
    rows,
    queries,
    scale,
    residue,
    step,
    length,
    allowed,
    of_query,
    of_group,
    scores,
    n,
    batch,
    row_stride,
    dim,
    GROUP: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Scores (P, GROUP) of all rows of a group with one query, a pair to a program; −inf for rows not to be found.

    Args of its own:
        rows: (N, row_stride) float32, bfloat16, or codes of int8.
        queries: (Q, dim) float32; digits (2·Q, row_stride) int8 for codes.
        of_query, of_group: (P,) int64, the pairs.
        scores: float64 sums; the highest that a score may be, float32, of codes.
        dim: of the rows, without what pads them.
    """
    CODES: tl.constexpr = scale is not None
    pair = tl.program_id(0).to(tl.int64)
    query, first_row = tl.load(of_query + pair), tl.load(of_group + pair) * GROUP
    slot, d = tl.arange(0, GROUP), tl.arange(0, BLOCK_D)
    taken = _taken(allowed, first_row, slot, n)
    at = rows + (first_row + slot)[:, None] * row_stride + d[None, :]
    total = tl.zeros((GROUP, BLOCK_D), dtype=tl.int32 if CODES else tl.float64)
    low_total = total
    for column in range(0, dim, BLOCK_D):
        inside = d < dim - column
        x = tl.load(at + column, mask=taken[:, None] & inside[None, :], other=0)
        if CODES:
            digit = queries + query * row_stride + column + d
            high = tl.load(digit, mask=inside, other=0)
            low = tl.load(digit + batch.to(tl.int64) * row_stride, mask=inside, other=0)
            total += x.to(tl.int32) * high.to(tl.int32)[None, :]
            low_total += x.to(tl.int32) * low.to(tl.int32)[None, :]
        else:
            q = tl.load(queries + query * dim + column + d, mask=inside, other=0.0)
            total += x.to(tl.float64) * q.to(tl.float64)[None, :]
    found = tl.sum(total, axis=1)
    if CODES:
        slack = tl.load(length + query) * tl.load(residue + first_row + slot, mask=taken, other=0.0)
        of_row = tl.load(scale + first_row + slot, mask=taken, other=0.0)
        found = _upper_score(found, tl.sum(low_total, axis=1), tl.load(step + query), of_row, slack)
    tl.store(scores + pair * GROUP + slot, tl.where(taken, found, float("-inf")))
