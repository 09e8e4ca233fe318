"""The Triton kernels of the two passes, in the shape of attention whose keys and values are both the class rows.

Scores, exponentials and the second product of a pass stay inside one program: no (classes, B) matrix is stored. Pass 1
is FlashAttention's forward with a fixed maximum of 0, which bounded logits allow: a program takes some samples through
many classes. In pass 2 it takes some classes through all samples. Import this module only where
:func:`plsc.head.backends.triton_backend.runs_on` holds.

D is cut into tiles, as are the accumulators. With FLIPPED the
accumulators are transposed, columns of D along the rows of the matrix unit: tensor memory and Hopper's instructions
take 64 rows or more, however few samples or classes a program has. Triton gives the warps of a product that feeds
another one block of rows each (of columns, where there are more of those), so that a block with too few of them is
computed several times: see :mod:`plsc.head.backends.triton_tiles`.
"""
# mypy: disable-error-code="untyped-decorator, no-untyped-def, import-untyped, assignment"
# ruff: noqa: RUF005 (Triton compiles the sum of two tuples, and no starred expression)

import triton
import triton.language as tl

# their values must not specialise the kernel: each would compile it anew
_CHANGING = ["first", "start", "n", "batch", "s"]


@triton.jit
def _along(values, AXIS: tl.constexpr):
    """A vector as a matrix of one column (AXIS 0) or one row (AXIS 1)."""
    return values[:, None] if AXIS == 0 else values[None, :]


@triton.jit
def _as_tf32(values):
    """float32 rounded to the nearest TF32, half away from zero: the matrix unit alone would cut off."""
    raw = values.to(tl.uint32, bitcast=True)
    return ((raw + 0x1000) & 0xFFFFE000).to(tl.float32, bitcast=True)


@triton.jit
def _product(a, b, total, PRECISION: tl.constexpr, WIDEN: tl.constexpr):
    """total + a·b, summed in float32. WIDEN is for the interpreter, whose dot knows no bfloat16."""
    if a.dtype == tl.bfloat16:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total) if WIDEN else tl.dot(a, b, total)
    elif PRECISION == "bf16x3":
        a_high, b_high = a.to(tl.bfloat16), b.to(tl.bfloat16)
        a_low, b_low = (a - a_high.to(tl.float32)).to(tl.bfloat16), (b - b_high.to(tl.float32)).to(tl.bfloat16)
        total = _product(a_low, b_high, total, PRECISION, WIDEN)
        total = _product(a_high, b_low, total, PRECISION, WIDEN)
        return _product(a_high, b_high, total, PRECISION, WIDEN)
    elif PRECISION == "tf32":
        return tl.dot(_as_tf32(a), _as_tf32(b), total, input_precision="tf32")
    else:
        return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def _scores(tiles, held, ROWS: tl.constexpr, HELD: tl.constexpr, FLIPPED, PRECISION, WIDEN):
    """The product of ``ROWS`` rows with the ``HELD`` rows of a program, both as tiles of D: by theirs if FLIPPED."""
    total = tl.zeros((ROWS, HELD) if FLIPPED else (HELD, ROWS), dtype=tl.float32)
    for tile in tl.static_range(len(held)):
        if FLIPPED:
            total = _product(tiles[tile], tl.trans(held[tile]), total, PRECISION, WIDEN)
        else:
            total = _product(held[tile], tl.trans(tiles[tile]), total, PRECISION, WIDEN)
    return total


@triton.jit
def _accumulated(totals, weights, values, FLIPPED: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr):
    """Every tile of ``totals`` + weights·values; FLIPPED: + valuesᵀ·weights, of weights that are transposed already."""
    new = ()
    for tile in tl.static_range(len(totals)):
        if FLIPPED:
            total = _product(tl.trans(values[tile]), weights, totals[tile], PRECISION, WIDEN)
        else:
            total = _product(weights, values[tile], totals[tile], PRECISION, WIDEN)
        new = new + (total,)
    return new


@triton.jit
def _is_winner(logits, AXIS: tl.constexpr, SLOTS: tl.constexpr, OTHERS: tl.constexpr, CENTERS: tl.constexpr):
    """Whether a logit is the first largest of its class's ``CENTERS``, which lie side by side along ``AXIS``."""
    center = tl.arange(0, CENTERS)
    if AXIS == 0:
        grouped = tl.reshape(logits, (SLOTS // CENTERS, CENTERS, OTHERS))
        _, best = tl.max(grouped, axis=1, return_indices=True)
        winner = center[None, :, None] == best[:, None, :]
        return tl.reshape(winner, (SLOTS, OTHERS))
    else:
        grouped = tl.reshape(logits, (OTHERS, SLOTS // CENTERS, CENTERS))
        _, best = tl.max(grouped, axis=2, return_indices=True)
        winner = center[None, None, :] == best[:, :, None]
        return tl.reshape(winner, (OTHERS, SLOTS))


@triton.jit
def _rows(table, position, inside, slot, dim, CENTERS, SLOTS, TILE):
    """Where the rows in the slots from class ``position`` on begin, and their 1/norms; 0 where not ``inside``."""
    weight, inverse_norm, index, first = table
    d = tl.arange(0, TILE)
    row = (slot // SLOTS) * CENTERS + slot % SLOTS
    if index is None:
        at = weight + (first + position * CENTERS) * dim + (row[:, None] * dim + d[None, :])
        rho = tl.load(inverse_norm + first + position * CENTERS + row, mask=inside, other=0.0)
    else:
        listed = tl.load(index + position * CENTERS + row, mask=inside, other=0)
        at = weight + listed[:, None] * dim + d[None, :]
        rho = tl.load(inverse_norm + listed, mask=inside, other=0.0)
    return at, rho


@triton.jit
def _tiles(at, inside, dim, TILE):
    """Rows that begin at ``at``, as tiles of D; zeros where not ``inside``."""
    tiles = ()
    for tile in tl.static_range(dim // TILE):
        tiles = tiles + (tl.load(at + tile * TILE, mask=inside[:, None], other=0.0),)
    return tiles


@triton.jit(do_not_specialize=[*_CHANGING, "per"])
def first_pass(
    weight,
    features,
    inverse_norm,
    index,
    position,
    total,
    pull,
    first,
    start,
    n,
    batch,
    per,
    s,
    dim: tl.constexpr,
    CENTERS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SUMMED: tl.constexpr,
    FLIPPED: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
    LABELS: tl.constexpr,
):
    """Sums over ``per`` classes to a program: of exponentials, and of the rows that they weigh unless ``pull`` is None.

    A program adds to its row of ``total`` every SUMMED classes. Programs of the same classes follow each other, so that
    the second-level cache serves their rows. A class takes a power of two of slots, one for each of its centres and
    some empty ones.
    """
    TILES: tl.constexpr = dim // TILE
    SLOTS: tl.constexpr = triton.next_power_of_2(CENTERS)
    CLASSES: tl.constexpr = BLOCK_N // SLOTS
    SAMPLE_AXIS: tl.constexpr = 1 if FLIPPED else 0
    CLASS_AXIS: tl.constexpr = 0 if FLIPPED else 1
    blocks = tl.cdiv(batch, BLOCK_B)
    split = (tl.program_id(0) // blocks).to(tl.int64)
    first_sample = ((tl.program_id(0) % blocks) * BLOCK_B).to(tl.int64)
    b, slot, d = tl.arange(0, BLOCK_B), tl.arange(0, BLOCK_N), tl.arange(0, TILE)
    held = b < batch - first_sample
    begin = split * per
    count = tl.minimum(n - begin, per).to(tl.int32)
    targets = ()
    for label in tl.static_range(LABELS):
        target = tl.load(position + label * batch + first_sample + b, mask=held, other=-1) - start - begin
        targets = targets + (tl.where((target >= 0) & (target < count), target, -1).to(tl.int32),)
    x = _tiles(features + first_sample * dim + (b[:, None] * dim + d[None, :]), held, dim, TILE)
    pulls = ()
    for _ in tl.static_range(TILES):
        pulls = pulls + (tl.zeros((TILE, BLOCK_B) if FLIPPED else (BLOCK_B, TILE), dtype=tl.float32),)
    sample = split * batch + first_sample
    sum_at = total + sample + b
    sums = tl.zeros((BLOCK_B,), dtype=tl.float32)
    table = (weight, inverse_norm, index, first)
    for done in range(0, count, CLASSES):
        inside = (slot // SLOTS < count - done) & (slot % SLOTS < CENTERS)
        w_at, rho = _rows(table, begin + done, inside, slot, dim, CENTERS, SLOTS, TILE)
        w = _tiles(w_at, inside, dim, TILE)
        scores = _scores(w, x, BLOCK_N, BLOCK_B, FLIPPED, PRECISION, WIDEN)
        logits = scores * _along(rho * s, CLASS_AXIS)
        counted = _along(inside, CLASS_AXIS)
        for label in tl.static_range(LABELS):
            own = _along(slot // SLOTS + done, CLASS_AXIS) == _along(targets[label], SAMPLE_AXIS)
            counted = counted & ~own
        if CENTERS > 1:
            logits = tl.where(_along(inside, CLASS_AXIS), logits, float("-inf"))
            counted = counted & _is_winner(logits, CLASS_AXIS, BLOCK_N, BLOCK_B, SLOTS)
        e = tl.where(counted, tl.exp2(logits), 0.0)
        sums += tl.sum(e, axis=CLASS_AXIS)
        if done % SUMMED == SUMMED - CLASSES:
            tl.atomic_add(sum_at, sums.to(tl.float64), mask=held, sem="relaxed")
            sums = tl.zeros((BLOCK_B,), dtype=tl.float32)
        if pull is not None:
            weights = (e * _along(rho, CLASS_AXIS)).to(weight.dtype.element_ty)
            pulls = _accumulated(pulls, weights, w, FLIPPED, PRECISION, WIDEN)
    tl.atomic_add(sum_at, sums.to(tl.float64), mask=held, sem="relaxed")
    if pull is not None:
        at = pull + sample * dim + (_along(b, SAMPLE_AXIS) * dim + _along(d, CLASS_AXIS))
        for tile in tl.static_range(TILES):
            tl.store(at + tile * TILE, pulls[tile], mask=_along(held, SAMPLE_AXIS))


@triton.jit
def _gradient_tiles(table, samples, start, n, dim, CENTERS, TILE, BLOCK_B, BLOCK_N, FLIPPED, PRECISION, WIDEN, LABELS):
    """The gradient by the unit rows of a program's classes, summed over all samples, as tiles of D."""
    features, position, log_z, scale, target_grad, member, batch, s = samples
    TILES: tl.constexpr = dim // TILE
    SLOTS: tl.constexpr = triton.next_power_of_2(CENTERS)
    SAMPLE_AXIS: tl.constexpr = 0 if FLIPPED else 1
    CLASS_AXIS: tl.constexpr = 1 if FLIPPED else 0
    begin = tl.program_id(0).to(tl.int64) * (BLOCK_N // SLOTS)
    b, slot, d = tl.arange(0, BLOCK_B), tl.arange(0, BLOCK_N), tl.arange(0, TILE)
    inside = (slot // SLOTS < n - begin) & (slot % SLOTS < CENTERS)
    w_at, rho = _rows(table, begin, inside, slot, dim, CENTERS, SLOTS, TILE)
    w = _tiles(w_at, inside, dim, TILE)
    totals = ()
    for _ in tl.static_range(TILES):
        totals = totals + (tl.zeros((TILE, BLOCK_N) if FLIPPED else (BLOCK_N, TILE), dtype=tl.float32),)
    for sample in range(0, batch.to(tl.int64), BLOCK_B):
        held = b < batch - sample
        x_at = features + sample * dim + (b[:, None] * dim + d[None, :])
        x = _tiles(x_at, held, dim, TILE)
        scores = _scores(x, w, BLOCK_B, BLOCK_N, FLIPPED, PRECISION, WIDEN)
        logits = scores * _along(rho * s, CLASS_AXIS)
        share = tl.load(scale + sample + b, mask=held, other=0.0)
        p = tl.exp2(logits - _along(tl.load(log_z + sample + b, mask=held, other=0.0), SAMPLE_AXIS))
        p *= _along(share, SAMPLE_AXIS)
        if member is not None:
            at = member + (start + begin) * batch + sample
            at += _along(slot // SLOTS, CLASS_AXIS).to(tl.int64) * batch + _along(b, SAMPLE_AXIS)
            taken = tl.load(at, mask=_along(inside, CLASS_AXIS) & _along(held, SAMPLE_AXIS), other=0)
            p = tl.where(taken != 0, p, 0.0)
        for label in tl.static_range(LABELS):
            at_label = label * batch + sample + b
            target = (tl.load(position + at_label, mask=held, other=-1) - start - begin).to(tl.int32)
            pull = tl.load(target_grad + at_label, mask=held, other=0.0)
            own = _along(slot // SLOTS, CLASS_AXIS) == _along(target, SAMPLE_AXIS)
            p = tl.where(own, _along(pull, SAMPLE_AXIS), p)
        if CENTERS > 1:
            logits = tl.where(_along(inside, CLASS_AXIS), logits, float("-inf"))
            p = tl.where(_is_winner(logits, CLASS_AXIS, BLOCK_N, BLOCK_B, SLOTS), p, 0.0)
        totals = _accumulated(totals, p.to(table[0].dtype.element_ty), x, FLIPPED, PRECISION, WIDEN)
    return totals


@triton.jit(do_not_specialize=_CHANGING)
def gradient_pass(
    weight,
    features,
    inverse_norm,
    index,
    position,
    log_z,
    scale,
    target_grad,
    member,
    first,
    start,
    n,
    batch,
    s,
    gradient,
    dim: tl.constexpr,
    CENTERS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FLIPPED: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
    LABELS: tl.constexpr,
):
    """Pass 2: the gradient by the unit rows, (n·K, D) float32."""
    table = (weight, inverse_norm, index, first)
    samples = (features, position, log_z, scale, target_grad, member, batch, s)
    totals = _gradient_tiles(
        table, samples, start, n, dim, CENTERS, TILE, BLOCK_B, BLOCK_N, FLIPPED, PRECISION, WIDEN, LABELS
    )
    SLOTS: tl.constexpr = triton.next_power_of_2(CENTERS)
    slot, begin = tl.arange(0, BLOCK_N), tl.program_id(0).to(tl.int64) * (BLOCK_N // SLOTS)
    held = (slot // SLOTS < n - begin) & (slot % SLOTS < CENTERS)
    at = (begin + slot // SLOTS) * CENTERS + slot % SLOTS
    columns = tl.arange(0, TILE)
    for tile in tl.static_range(dim // TILE):
        values = tl.trans(totals[tile]) if FLIPPED else totals[tile]
        tl.store(gradient + at[:, None] * dim + tile * TILE + columns[None, :], values, mask=held[:, None])
