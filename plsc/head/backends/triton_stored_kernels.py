"""The Triton kernels of passes that store the weights of rows, (classes·K, B), for a large product.

``row_exponentials`` and ``row_probabilities`` make them of bfloat16 rows of one centre in one go: the products with the
samples never leave a program. For other tables a large product gives the scores (classes·K, B), and ``exponentials``
and ``probabilities`` read each once and write its weight once. Import this module only where
:func:`plsc.head.backends.triton_backend.runs_on` holds.

Arguments that all share, or one of the two kinds:
    rows, features, weights: tensor descriptors of a chunk's rows (n, D), the unit embeddings (B, D), and the result.
    scores: (n·K, B) float32, of a chunk's rows with the samples' unit embeddings; a class's K centres side by side.
    inverse_norm: (n·K,) of the chunk's rows.
    position: (B,) int64, a target's number among the classes of all chunks.
    weights: (n·K, B) of the table's dtype, the result.
    total: (parts, B) float64, to which a program adds the sums of its classes' exponentials.
    start, n: the chunk's first class and how many it has.
    s: of the margin, times log₂ e.
"""
# mypy: disable-error-code="untyped-decorator, no-untyped-def, import-untyped, assignment"
# ruff: noqa: RUF005 (Triton compiles the sum of two tuples, and no starred expression)

import triton
import triton.language as tl

# their values must not specialise a kernel: each would compile it anew. Of B it matters whether 16 divides it.
_CHANGING = ["start", "n", "s"]


@triton.jit
def _logits(scores, inverse_norm, row, b, inside, held, batch, s, CENTERS: tl.constexpr):
    """Logits of each centre of the classes whose first rows are ``row`` (N,), their 1/norms, and the largest logit."""
    logits, norms = (), ()
    largest = tl.full((row.shape[0], b.shape[0]), float("-inf"), dtype=tl.float32)
    for center in tl.static_range(CENTERS):
        rho = tl.load(inverse_norm + row + center, mask=inside, other=0.0)
        at = scores + (row + center)[:, None] * batch + b[None, :]
        logit = tl.load(at, mask=inside[:, None] & held[None, :], other=0.0) * (rho * s)[:, None]
        largest = tl.maximum(largest, logit)
        logits = logits + (logit,)
        norms = norms + (rho,)
    return logits, norms, largest


@triton.jit
def _store_winner(weights, row, b, inside, held, batch, logits, norms, largest, value, CENTERS: tl.constexpr):
    """Store ``value`` (N, B), times 1/norm unless ``norms`` is None, for the first centre of the largest logit."""
    open_ = inside[:, None] & held[None, :]
    is_free = open_
    for center in tl.static_range(CENTERS):
        wins = is_free & (logits[center] == largest)
        is_free = is_free & ~wins
        weight = value if norms is None else value * norms[center][:, None]
        if CENTERS > 1:
            weight = tl.where(wins, weight, 0.0)
        at = weights + (row + center)[:, None] * batch + b[None, :]
        tl.store(at, weight.to(weights.dtype.element_ty), mask=open_)


@triton.jit(do_not_specialize=[*_CHANGING, "per"])
def exponentials(
    scores,
    inverse_norm,
    position,
    total,
    weights,
    start,
    n,
    batch,
    per,
    s,
    CENTERS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Pass 1: exp(z)·ρ as ``weights`` unless that is None, targets left out; their sums, ``per`` classes to a program.

    Sums are float32 within a program, and added to its row of ``total`` (parts, B) float64.
    """
    blocks = tl.cdiv(batch, BLOCK_B)
    part = (tl.program_id(0) // blocks).to(tl.int64)
    b = ((tl.program_id(0) % blocks) * BLOCK_B).to(tl.int64) + tl.arange(0, BLOCK_B)
    held = b < batch
    target = tl.load(position + b, mask=held, other=-1) - start
    begin = part * per
    sums = tl.zeros((BLOCK_B,), dtype=tl.float32)
    for done in range(0, tl.minimum(n - begin, per).to(tl.int32), BLOCK_N):
        number = begin + done + tl.arange(0, BLOCK_N)
        inside = number < n
        row = number * CENTERS
        logits, norms, largest = _logits(scores, inverse_norm, row, b, inside, held, batch, s, CENTERS)
        counted = inside[:, None] & (number[:, None] != target[None, :])
        e = tl.where(counted, tl.exp2(largest), 0.0)
        sums += tl.sum(e, axis=0)
        if weights is not None:
            _store_winner(weights, row, b, inside, held, batch, logits, norms, largest, e, CENTERS)
    tl.atomic_add(total + part * batch + b, sums.to(tl.float64), mask=held, sem="relaxed")


@triton.jit(do_not_specialize=_CHANGING)
def probabilities(
    scores,
    inverse_norm,
    position,
    log_z,
    scale,
    target_grad,
    member,
    weights,
    start,
    n,
    batch,
    s,
    CENTERS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Pass 2: scale·exp(z − log Z) as ``weights``, 0 where ``member`` (of all chunks) is 0, of targets ``target_grad``.

    A program takes BLOCK_N classes through BLOCK_B samples.
    """
    blocks = tl.cdiv(batch, BLOCK_B)
    b = ((tl.program_id(0) % blocks) * BLOCK_B).to(tl.int64) + tl.arange(0, BLOCK_B)
    number = (tl.program_id(0) // blocks).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    held, inside = b < batch, number < n
    row = number * CENTERS
    logits, _, largest = _logits(scores, inverse_norm, row, b, inside, held, batch, s, CENTERS)
    p = tl.exp2(largest - tl.load(log_z + b, mask=held, other=0.0)[None, :])
    p *= tl.load(scale + b, mask=held, other=0.0)[None, :]
    if member is not None:
        at = member + (start + number)[:, None] * batch + b[None, :]
        p = tl.where(tl.load(at, mask=inside[:, None] & held[None, :], other=0) != 0, p, 0.0)
    target = tl.load(position + b, mask=held, other=-1) - start
    own = number[:, None] == target[None, :]
    p = tl.where(own, tl.load(target_grad + b, mask=held, other=0.0)[None, :], p)
    _store_winner(weights, row, b, inside, held, batch, logits, None, largest, p, CENTERS)


@triton.jit
def _products(rows, features, first_row, first_sample, dim, BLOCK_N, BLOCK_B, BLOCK_D, WIDEN):
    """(BLOCK_N, BLOCK_B) float32 products of rows with samples, 0 past the ends of either.

    WIDEN is for the interpreter, whose dot knows no bfloat16.
    """
    total = tl.zeros((BLOCK_N, BLOCK_B), dtype=tl.float32)
    for column in range(0, dim, BLOCK_D):
        w, x = rows.load([first_row, column]), features.load([first_sample, column])
        if WIDEN:
            w, x = w.to(tl.float32), x.to(tl.float32)
        total = tl.dot(w, x.T, total)
    return total


@triton.jit(do_not_specialize=_CHANGING)
def row_exponentials(
    rows,
    features,
    inverse_norm,
    position,
    total,
    weights,
    start,
    n,
    batch,
    s,
    dim: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Pass 1: see :func:`exponentials`. Programs go through all blocks of BLOCK_N classes and BLOCK_B samples.

    The rows of a block of classes are read again for each block of samples, one after the other, which the second-level
    cache serves; the next block's are on their way while this one's exponentials are taken.
    """
    blocks = tl.cdiv(batch, BLOCK_B)
    slot, column = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_B)
    for number in tl.range(tl.program_id(0), tl.cdiv(n, BLOCK_N) * blocks, tl.num_programs(0), flatten=True):
        first_row, first_sample = (number // blocks) * BLOCK_N, (number % blocks) * BLOCK_B
        products = _products(rows, features, first_row, first_sample, dim, BLOCK_N, BLOCK_B, BLOCK_D, WIDEN)
        inside, held = slot < n - first_row, column < batch - first_sample
        rho = tl.load(inverse_norm + first_row + slot, mask=inside, other=0.0)
        target = (tl.load(position + first_sample + column, mask=held, other=-1) - start - first_row).to(tl.int32)
        e = tl.exp2(products * (rho * s)[:, None] + tl.where(inside, 0.0, float("-inf"))[:, None])
        e = tl.where(slot[:, None] == target[None, :], 0.0, e)
        at = total + (number // blocks).to(tl.int64) * batch + first_sample + column
        tl.atomic_add(at, tl.sum(e, axis=0).to(tl.float64), mask=held, sem="relaxed")
        if weights is not None:
            weights.store([first_row, first_sample], (e * rho[:, None]).to(weights.dtype))


@triton.jit(do_not_specialize=_CHANGING)
def row_probabilities(
    rows,
    features,
    inverse_norm,
    position,
    log_z,
    scale,
    target_grad,
    member,
    weights,
    start,
    n,
    batch,
    s,
    dim: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Pass 2: see :func:`probabilities`, and :func:`row_exponentials` for the programs."""
    blocks = tl.cdiv(batch, BLOCK_B)
    slot, column = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_B)
    for number in tl.range(tl.program_id(0), tl.cdiv(n, BLOCK_N) * blocks, tl.num_programs(0), flatten=True):
        first_row, first_sample = (number // blocks) * BLOCK_N, (number % blocks) * BLOCK_B
        products = _products(rows, features, first_row, first_sample, dim, BLOCK_N, BLOCK_B, BLOCK_D, WIDEN)
        inside, b = slot < n - first_row, first_sample + column
        held = b < batch
        rho = tl.load(inverse_norm + first_row + slot, mask=inside, other=0.0)
        log_normaliser = tl.load(log_z + b, mask=held, other=0.0)
        p = tl.exp2(products * (rho * s)[:, None] - log_normaliser[None, :])
        p *= tl.load(scale + b, mask=held, other=0.0)[None, :]
        if member is not None:
            at = member + (start + first_row + slot.to(tl.int64))[:, None] * batch + b[None, :]
            p = tl.where(tl.load(at, mask=inside[:, None] & held[None, :], other=0) != 0, p, 0.0)
        target = (tl.load(position + b, mask=held, other=-1) - start - first_row).to(tl.int32)
        pull = tl.load(target_grad + b, mask=held, other=0.0)
        p = tl.where(slot[:, None] == target[None, :], pull[None, :], p)
        weights.store([first_row, first_sample], p.to(weights.dtype))
