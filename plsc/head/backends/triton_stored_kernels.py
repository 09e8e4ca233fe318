"""The Triton kernels between the products of passes that store their logits: from scores to the weights of rows.

A chunk's scores (classes·K, B) come from a large product and its weights go into one; each kernel reads the first once
and writes the second once. Import this module only where :func:`plsc.head.backends.triton_backend.runs_on` holds.

Arguments that both share:
    scores: (n·K, B) float32, of a chunk's rows with the samples' unit embeddings; a class's K centres side by side.
    inverse_norm: (n·K,) of the chunk's rows.
    position: (B,) int64, a target's number among the classes of all chunks.
    weights: (n·K, B) of the table's dtype, the result.
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
