"""The Triton kernel of SGD and AdamW on rows of the class table, and the device functions that it consists of.

A program takes some whole rows through all of an update, as a tile (rows, columns) float32 in registers: every number
is read once and written once. Rounding takes the bits of :func:`plsc.head.low_precision.random_bits`. Import this
module only where :func:`plsc.head.backends.triton_backend.runs_on` holds.

Arguments that both share:
    gradient: the tile's gradient by the unit rows.
    w: the tile's rows.
    weight, inverse_norm: the table, and its 1/norms.
    rows, columns: int64 and int32 numbers of the tile's rows and columns in the table.
    held: which of the rows exist.
    numbers: the rows' numbers in the global table, int64.
    key: of the update's seed and step (:func:`plsc.head.low_precision.rounding_key`).
    factor: multiplies the gradient.
    dim: columns of the table.
    RULE: "sgd", "nesterov" or "adamw".
    first_moment, first_scale, second_moment, second_scale: the rule's tables, and the scales of int8 ones. SGD's
        momentum is the first, None without momentum; other tables and scales that are not there are None.
    step_size, rate1, decay: of SGD the learning rate, the momentum and the weight decay λ; of AdamW lr/(1 − β₁ᵗ),
        1 − β₁ and 1 − lr·λ.
    beta2, rate2, correction2, eps: of AdamW β₂, 1 − β₂, 1 − β₂ᵗ and ε; of SGD None. Differences from 1 that float32
        would round are taken in float64 by the host.
"""
# mypy: disable-error-code="untyped-decorator, no-untyped-def, import-untyped"

import triton
import triton.language as tl

# their values must not specialise a kernel: each would compile it anew
CHANGING_NUMBERS = ["step_size", "rate1", "decay", "beta2", "rate2", "correction2", "eps"]
_CHANGING = ["first", "first_number", "n", "key", "factor", *CHANGING_NUMBERS]

# of plsc.head.low_precision.random_bits
_GOLDEN = tl.constexpr(0x9E3779B9)
_MULTIPLY_1 = tl.constexpr(0x7FEB352D)
_MULTIPLY_2 = tl.constexpr(0x846CA68B)


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
def random_bits(numbers, columns, key):
    """(rows, columns) uint32: what random_bits gives for int64 global row ``numbers`` and the ``key`` of a step."""
    golden = tl.full((1,), _GOLDEN, tl.uint32)
    low = numbers.to(tl.uint32) ^ key.to(tl.uint32)
    high = (numbers >> 32).to(tl.uint32) * golden
    row_key = _mix(low + high)
    return _mix(row_key[:, None] ^ (columns.to(tl.uint32) * golden)[None, :])


@triton.jit
def round_to_bfloat16(values, bits, STOCHASTIC: tl.constexpr):
    """float32 rounded up or down by 16 ``bits``, or to the nearest, ties to even."""
    raw = values.to(tl.uint32, bitcast=True)
    if STOCHASTIC:
        raw += bits
    else:
        raw += 0x7FFF + ((raw >> 16) & 1)
    return (raw >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def quantize_rows(values, bits, STOCHASTIC: tl.constexpr):
    """float32 rows as int8 with a scale each, as plsc.head.low_precision.quantize_rows does."""
    scale = tl.max(tl.abs(values), axis=1) / 127
    steps = values / tl.maximum(scale, 1.1754943508222875e-38)[:, None]
    if STOCHASTIC:
        steps += (bits.to(tl.float32) + 0.5) / 65536
    else:
        steps += 32767.5 / 65536
    stored = tl.minimum(tl.maximum(tl.floor(steps), -127.0), 127.0)
    return stored.to(tl.int8), scale


@triton.jit
def load_state(table, scale, rows, offset, held, inside):
    """A tile of optimizer state as float32; ``scale`` are the scales of an int8 table's rows, else None."""
    values = tl.load(table + offset, mask=inside, other=0).to(tl.float32)
    if scale is not None:
        values = values * tl.load(scale + rows, mask=held, other=0.0)[:, None]
    return values


@triton.jit
def store_state(table, scale, values, bits, rows, offset, held, inside, STOCHASTIC: tl.constexpr):
    """Round and store a tile of optimizer state, as RowState.write does: by the high half of its ``bits``."""
    if scale is not None:
        stored, row_scale = quantize_rows(values, bits >> 16, STOCHASTIC)
        tl.store(table + offset, stored, mask=inside)
        tl.store(scale + rows, row_scale, mask=held)
    else:
        if table.dtype.element_ty == tl.bfloat16:
            values = round_to_bfloat16(values, bits >> 16, STOCHASTIC)
        tl.store(table + offset, values, mask=inside)


@triton.jit
def store_weight(
    weight, inverse_norm, w, bits, rows, offset, held, inside, smallest_norm, BLOCK_N: tl.constexpr, STOCHASTIC
):
    """Round and store a tile of whole rows by the low half of its ``bits``, and the 1/norms of what was stored."""
    if weight.dtype.element_ty == tl.bfloat16:
        kept = round_to_bfloat16(w, bits & 0xFFFF, STOCHASTIC)
        tl.store(weight + offset, kept, mask=inside)
        w = kept.to(tl.float32)
    else:
        tl.store(weight + offset, w, mask=inside)
    square = tl.sum(tl.where(inside, w.to(tl.float64) * w.to(tl.float64), 0.0), axis=1)  # see renew_norms
    norm = tl.maximum(tl.sqrt(square).to(tl.float32), smallest_norm)
    tl.store(inverse_norm + rows, tl.div_rn(tl.full((BLOCK_N,), 1.0, tl.float32), norm), mask=held)


@triton.jit
def through_norm(gradient, w, rho, BY_ROWS: tl.constexpr):
    """The gradient by whole rows, of that by the unit rows: ρ(g − Ŵ⟨g, Ŵ⟩). ``rho`` are the rows' 1/norms.

    BY_ROWS: ``gradient`` is ρg.
    """
    unit = w * rho[:, None]
    across = gradient - unit * tl.sum(gradient * unit, axis=1)[:, None]
    return across if BY_ROWS else across * rho[:, None]


@triton.jit
def adamw_step(w, g, first, second, rate1, beta2, rate2, step_size, correction2, eps, decay):
    """AdamWRule's arithmetic on a tile: the rows and their moments after the step."""
    first = first + rate1 * (g - first)
    second = second * beta2 + rate2 * g * g
    root = tl.sqrt(second / correction2) + eps
    return w * decay - step_size * (first / root), first, second


@triton.jit
def update_tile(gradient, w, table, state, places, step, dim, BLOCK_N, RULE, STOCHASTIC, BY_ROWS):
    """Update a tile of whole rows in the table, with their moments and norms.

    Args:
        gradient, w: the tile's.
        table: (weight, inverse_norm, …).
        state: (first_moment, first_scale, second_moment, second_scale).
        places: (rows, columns, held, numbers).
        step: (key, factor, smallest_norm, step_size, rate1, decay, beta2, rate2, correction2, eps).
        dim, BLOCK_N, RULE, STOCHASTIC: constants of the compiler, as are all names in capitals.
    """
    weight, inverse_norm = table[0], table[1]
    first_moment, first_scale, second_moment, second_scale = state
    rows, columns, held, numbers = places
    key, factor, smallest_norm, step_size, rate1, decay, beta2, rate2, correction2, eps = step
    inside = held[:, None] & (columns < dim)[None, :]
    offset = rows[:, None] * dim + columns[None, :]
    bits = random_bits(numbers, columns, key)
    g = through_norm(gradient, w, tl.load(inverse_norm + rows, mask=held, other=0.0), BY_ROWS) * factor
    if RULE == "adamw":
        first = load_state(first_moment, first_scale, rows, offset, held, inside)
        second = load_state(second_moment, second_scale, rows, offset, held, inside)
        w, first, second = adamw_step(w, g, first, second, rate1, beta2, rate2, step_size, correction2, eps, decay)
        store_state(first_moment, first_scale, first, bits, rows, offset, held, inside, STOCHASTIC)
        store_state(second_moment, second_scale, second, bits, rows, offset, held, inside, STOCHASTIC)
    else:
        move = g + decay * w
        if first_moment is not None:
            first = load_state(first_moment, first_scale, rows, offset, held, inside) * rate1 + move
            store_state(first_moment, first_scale, first, bits, rows, offset, held, inside, STOCHASTIC)
            move = move + rate1 * first if RULE == "nesterov" else first
        w -= step_size * move
    store_weight(weight, inverse_norm, w, bits, rows, offset, held, inside, smallest_norm, BLOCK_N, STOCHASTIC)


@triton.jit
def _program_rows(index, first, numbers, first_number, n, skip, BLOCK_N: tl.constexpr):
    """A program's positions among the n rows, which of them are updated, their rows in the table and global numbers.

    Rows are those of ``index``, or ``first`` and those after it where it is None. None is updated where ``skip``, a
    float32 number in memory, is given and not 0.
    """
    position = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    if skip is not None:
        n = tl.where(tl.load(skip) == 0, n, 0)
    held = position < n
    rows = position + first if index is None else tl.load(index + position, mask=held, other=0)
    return position, held, rows, tl.load(numbers + position, mask=held, other=0) + first_number


@triton.jit
def _load_tile(table, rows, columns, held, dim: tl.constexpr):
    """Whole rows of a table as float32, 0 past its ends."""
    inside = held[:, None] & (columns < dim)[None, :]
    return tl.load(table + rows[:, None] * dim + columns[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=_CHANGING)
def update_rows(
    gradient,
    weight,
    inverse_norm,
    first_moment,
    first_scale,
    second_moment,
    second_scale,
    index,
    first,
    numbers,
    first_number,
    n,
    skip,
    key,
    factor,
    smallest_norm,
    step_size,
    rate1,
    decay,
    beta2,
    rate2,
    correction2,
    eps,
    dim: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BY_ROWS: tl.constexpr,
    RULE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """Update n rows by the gradient (n, dim) by their unit rows; ``numbers`` + ``first_number`` are global.

    BY_ROWS: by the unit rows, times their 1/norms.
    """
    columns = tl.arange(0, BLOCK_D)
    position, held, rows, global_numbers = _program_rows(index, first, numbers, first_number, n, skip, BLOCK_N)
    tile_gradient = _load_tile(gradient, position, columns, held, dim)
    state = (first_moment, first_scale, second_moment, second_scale)
    step = (key, factor, smallest_norm, step_size, rate1, decay, beta2, rate2, correction2, eps)
    places = (rows, columns, held, global_numbers)
    w = _load_tile(weight, rows, columns, held, dim)
    table = weight, inverse_norm
    update_tile(tile_gradient, w, table, state, places, step, dim, BLOCK_N, RULE, STOCHASTIC, BY_ROWS)
