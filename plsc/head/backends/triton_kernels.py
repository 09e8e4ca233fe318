"""The Triton kernels of the two passes over the class table.

A program of a pass takes a block of classes and a block of samples. Those kernels exist twice: fed with a product that
was made before, (classes, B) float32 in memory, and making it themselves. Import this module only where
:func:`plsc.head.backends.triton_backend.runs_on` holds.
"""
# mypy: disable-error-code="untyped-decorator, no-untyped-def, import-untyped"

import triton
import triton.language as tl

# their values must not specialise the kernel: each would compile it anew
_CHANGING = ["n", "start", "s"]


@triton.jit
def _block(batch, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr):
    """This program's block of classes, the classes in it (both int64) and its samples.

    Blocks of samples run fastest, so that programs at work together share their rows.
    """
    blocks = tl.cdiv(batch, BLOCK_B)
    program = tl.program_id(0)
    block = (program // blocks).to(tl.int64)
    classes = block * BLOCK_N + tl.arange(0, BLOCK_N)
    samples = (program % blocks) * BLOCK_B + tl.arange(0, BLOCK_B)
    return block, classes, samples


@triton.jit
def _loaded(logits, classes, samples, n, batch):
    """A block of a product W·xᵀ made before."""
    inside = (classes < n)[:, None] & (samples < batch)[None, :]
    return tl.load(logits + classes[:, None] * batch + samples[None, :], mask=inside, other=0.0)


@triton.jit
def _multiplied(
    weight,
    features,
    classes,
    samples,
    n,
    batch,
    dim: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """The same block, from weight (n, dim) and features (batch, dim), summed in float32.

    Rows past the ends repeat the last: what comes of them is never stored. WIDEN is for the interpreter, whose dot
    knows no bfloat16.
    """
    k = tl.arange(0, BLOCK_K)
    left = weight + tl.minimum(classes, n - 1)[:, None] * dim + k[None, :]
    right = features + tl.minimum(samples, batch - 1).to(tl.int64)[None, :] * dim + k[:, None]
    total = tl.zeros((BLOCK_N, BLOCK_B), dtype=tl.float32)
    for first in range(0, dim, BLOCK_K):
        if dim % BLOCK_K == 0:
            a = tl.load(left)
            b = tl.load(right)
        else:
            a = tl.load(left, mask=(k < dim - first)[None, :], other=0.0)
            b = tl.load(right, mask=(k < dim - first)[:, None], other=0.0)
        if WIDEN:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        total = tl.dot(a, b, total)
        left += BLOCK_K
        right += BLOCK_K
    return total


@triton.jit
def _store_exponentials(product, block, classes, samples, inverse_norm, position, out, partial, n, batch, start, s):
    """e = exp(s·ρ·product), 0 for targets: stores e·ρ, and this block's sum of e by sample."""
    inside = (classes < n)[:, None] & (samples < batch)[None, :]
    rho = tl.load(inverse_norm + classes, mask=classes < n, other=0.0)[:, None]
    target = (tl.load(position + samples, mask=samples < batch, other=-1) - start).to(tl.int32)
    e = tl.where(inside & (classes.to(tl.int32)[:, None] != target[None, :]), tl.exp(product * (rho * s)), 0.0)
    offset = classes[:, None] * batch + samples[None, :]
    tl.store(out + offset, (e * rho).to(out.dtype.element_ty), mask=inside)
    tl.store(partial + block * batch + samples, tl.sum(e, axis=0), mask=samples < batch)


@triton.jit
def _store_probabilities(product, classes, samples, inverse_norm, log_z, scale, out, n, batch, s):
    """Stores exp(s·ρ·product − log Z)·scale."""
    held = samples < batch
    rho = tl.load(inverse_norm + classes, mask=classes < n, other=0.0)[:, None]
    log_total = tl.load(log_z + samples, mask=held, other=0.0)[None, :]
    by_cosine = tl.load(scale + samples, mask=held, other=0.0)[None, :]
    p = tl.exp(product * (rho * s) - log_total) * by_cosine
    offset = classes[:, None] * batch + samples[None, :]
    tl.store(out + offset, p.to(out.dtype.element_ty), mask=(classes < n)[:, None] & held[None, :])


@triton.jit(do_not_specialize=_CHANGING)
def scatter_targets(values, position, out, n, batch, start, BLOCK_B: tl.constexpr):
    """Replace the entries of ``out`` (n, batch) where class and sample belong together by ``values`` (batch,).

    A launch of its own: inside the kernels of pass 2 it would cost them registers that they lack.
    """
    samples = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    held = samples < batch
    target = tl.load(position + samples, mask=held, other=-1) - start
    value = tl.load(values + samples, mask=held, other=0.0).to(out.dtype.element_ty)
    tl.store(out + target * batch + samples, value, mask=held & (target >= 0) & (target < n))


@triton.jit(do_not_specialize=_CHANGING)
def exponentials_of_logits(
    logits,
    inverse_norm,
    position,
    out,
    partial,
    n,
    batch,
    start,
    s,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """Pass 1 behind a product made before."""
    block, classes, samples = _block(batch, BLOCK_N, BLOCK_B)
    product = _loaded(logits, classes, samples, n, batch)
    _store_exponentials(product, block, classes, samples, inverse_norm, position, out, partial, n, batch, start, s)


@triton.jit(do_not_specialize=_CHANGING)
def exponentials_of_product(
    weight,
    features,
    inverse_norm,
    position,
    out,
    partial,
    n,
    batch,
    dim: tl.constexpr,
    start,
    s,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Pass 1, with its product."""
    block, classes, samples = _block(batch, BLOCK_N, BLOCK_B)
    product = _multiplied(weight, features, classes, samples, n, batch, dim, BLOCK_N, BLOCK_B, BLOCK_K, WIDEN)
    _store_exponentials(product, block, classes, samples, inverse_norm, position, out, partial, n, batch, start, s)


@triton.jit(do_not_specialize=_CHANGING)
def probabilities_of_logits(
    logits,
    inverse_norm,
    log_z,
    scale,
    out,
    n,
    batch,
    s,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """Pass 2 behind a product made before."""
    _, classes, samples = _block(batch, BLOCK_N, BLOCK_B)
    product = _loaded(logits, classes, samples, n, batch)
    _store_probabilities(product, classes, samples, inverse_norm, log_z, scale, out, n, batch, s)


@triton.jit(do_not_specialize=_CHANGING)
def probabilities_of_product(
    weight,
    features,
    inverse_norm,
    log_z,
    scale,
    out,
    n,
    batch,
    dim: tl.constexpr,
    s,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Pass 2, with its product."""
    _, classes, samples = _block(batch, BLOCK_N, BLOCK_B)
    product = _multiplied(weight, features, classes, samples, n, batch, dim, BLOCK_N, BLOCK_B, BLOCK_K, WIDEN)
    _store_probabilities(product, classes, samples, inverse_norm, log_z, scale, out, n, batch, s)
