"""The Triton kernels of the two passes and of SGD on the class table.

A program of a pass takes a block of classes and a block of samples. Those kernels exist twice: fed with a product that
was made before, (classes, B) float32 in memory, and making it themselves. A program of the update takes some whole rows
through all of it. Import this module only where :func:`plsc.head.backends.triton_backend.runs_on` holds.
"""
# mypy: disable-error-code="untyped-decorator, no-untyped-def, import-untyped"

import triton
import triton.language as tl

# their values must not specialise the kernel: each would compile it anew
_CHANGING = ["n", "start", "s"]
_CHANGING_UPDATE = ["first", "first_number", "n", "key", "lr", "momentum", "weight_decay", "factor"]

# of plsc.head.low_precision.random_bits
_GOLDEN = tl.constexpr(0x9E3779B9)
_MULTIPLY_1 = tl.constexpr(0x7FEB352D)
_MULTIPLY_2 = tl.constexpr(0x846CA68B)


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


@triton.jit
def _mix(x):
    """Hash uint32 numbers bijectively, as random_bits does."""
    x ^= x >> 16
    x *= tl.full((1,), _MULTIPLY_1, tl.uint32)
    x ^= x >> 15
    x *= tl.full((1,), _MULTIPLY_2, tl.uint32)
    x ^= x >> 16
    return x


@triton.jit
def _random_bits(rows, columns, key):
    """(rows, columns) uint32: what random_bits gives for int64 global ``rows`` and the key of a seed and step."""
    golden = tl.full((1,), _GOLDEN, tl.uint32)
    low = rows.to(tl.uint32) ^ key.to(tl.uint32)
    high = (rows >> 32).to(tl.uint32) * golden
    row_key = _mix(low + high)
    return _mix(row_key[:, None] ^ (columns.to(tl.uint32) * golden)[None, :])


@triton.jit
def _as_bfloat16(values, bits, STOCHASTIC: tl.constexpr):
    """float32 rounded up or down by 16 ``bits``, or to the nearest, ties to even."""
    raw = values.to(tl.uint32, bitcast=True)
    if STOCHASTIC:
        raw += bits
    else:
        raw += 0x7FFF + ((raw >> 16) & 1)
    return (raw >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _as_int8(values, bits, STOCHASTIC: tl.constexpr):
    """float32 rows as int8 with a scale each, as quantize_rows does."""
    scale = tl.max(tl.abs(values), axis=1) / 127
    steps = values / tl.maximum(scale, 1.1754943508222875e-38)[:, None]
    if STOCHASTIC:
        steps += (bits.to(tl.float32) + 0.5) / 65536
    else:
        steps += 32767.5 / 65536
    stored = tl.minimum(tl.maximum(tl.floor(steps), -127.0), 127.0)
    return stored.to(tl.int8), scale


@triton.jit
def _store(table, offset, values, bits, inside, STOCHASTIC: tl.constexpr):
    if table.dtype.element_ty == tl.bfloat16:
        values = _as_bfloat16(values, bits, STOCHASTIC)
    tl.store(table + offset, values, mask=inside)


@triton.jit(do_not_specialize=_CHANGING_UPDATE)
def sgd_rows(
    gradient,
    weight,
    inverse_norm,
    buffer,
    buffer_scale,
    index,
    first,
    numbers,
    first_number,
    n,
    key,
    lr,
    momentum,
    weight_decay,
    factor,
    smallest_norm,
    dim: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NESTEROV: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """Rows ``index`` (None: ``first`` and those after it) take the gradient (n, dim) by their unit rows.

    ``buffer`` is momentum's table or None, ``buffer_scale`` its int8 rows' scales or None; ``numbers`` plus
    ``first_number`` are the rows' numbers in the global table.
    """
    offset = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_D)
    held = offset < n
    inside = held[:, None] & (columns < dim)[None, :]
    rows = offset + first if index is None else tl.load(index + offset, mask=held, other=0)
    in_table = rows[:, None] * dim + columns[None, :]
    bits = _random_bits(tl.load(numbers + offset, mask=held, other=0) + first_number, columns, key)

    w = tl.load(weight + in_table, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gradient + offset[:, None] * dim + columns[None, :], mask=inside, other=0.0)
    rho = tl.load(inverse_norm + rows, mask=held, other=0.0)[:, None]
    unit = w * rho
    g = (g - unit * tl.sum(g * unit, axis=1)[:, None]) * rho * factor  # through the norm: ρ(g − Ŵ⟨g, Ŵ⟩)

    step = g + weight_decay * w
    if buffer is not None:
        m = tl.load(buffer + in_table, mask=inside, other=0).to(tl.float32)
        if buffer_scale is not None:
            m = m * tl.load(buffer_scale + rows, mask=held, other=0.0)[:, None]
        m = m * momentum + step
        if buffer_scale is not None:
            stored, scale = _as_int8(m, bits >> 16, STOCHASTIC)
            tl.store(buffer + in_table, stored, mask=inside)
            tl.store(buffer_scale + rows, scale, mask=held)
        else:
            _store(buffer, in_table, m, bits >> 16, inside, STOCHASTIC)
        step = step + momentum * m if NESTEROV else m
    w = w - lr * step
    if weight.dtype.element_ty == tl.bfloat16:
        kept = _as_bfloat16(w, bits & 0xFFFF, STOCHASTIC)
        tl.store(weight + in_table, kept, mask=inside)
        w = kept.to(tl.float32)
    else:
        tl.store(weight + in_table, w, mask=inside)
    square = tl.sum(tl.where(inside, w.to(tl.float64) * w.to(tl.float64), 0.0), axis=1)  # see renew_norms
    norm = tl.maximum(tl.sqrt(square).to(tl.float32), smallest_norm)
    tl.store(inverse_norm + rows, tl.div_rn(tl.full((BLOCK_N,), 1.0, tl.float32), norm), mask=held)
