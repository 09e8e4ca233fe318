"""The Triton kernel of SGD on the class table: a program takes some whole rows through the entire update.

Import this module only where :func:`plsc.losses.triton_support.runs_on` holds.
"""
# mypy: disable-error-code="untyped-decorator, no-untyped-def, import-untyped"

import triton
import triton.language as tl

_CHANGING = ["first", "first_number", "n", "key", "lr", "momentum", "weight_decay", "factor"]  # never compiled in

# of plsc.head.random_bits
_GOLDEN = tl.constexpr(0x9E3779B9)
_MULTIPLY_1 = tl.constexpr(0x7FEB352D)
_MULTIPLY_2 = tl.constexpr(0x846CA68B)


@triton.jit
def _mix(x):
    """Scramble uint32 numbers one to one, as random_bits does."""
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
def _store(table, place, values, bits, inside, STOCHASTIC: tl.constexpr):
    if table.dtype.element_ty == tl.bfloat16:
        values = _as_bfloat16(values, bits, STOCHASTIC)
    tl.store(table + place, values, mask=inside)


@triton.jit(do_not_specialize=_CHANGING)
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
    place = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_D)
    held = place < n
    inside = held[:, None] & (columns < dim)[None, :]
    rows = place + first if index is None else tl.load(index + place, mask=held, other=0)
    in_table = rows[:, None] * dim + columns[None, :]
    bits = _random_bits(tl.load(numbers + place, mask=held, other=0) + first_number, columns, key)

    w = tl.load(weight + in_table, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gradient + place[:, None] * dim + columns[None, :], mask=inside, other=0.0)
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
