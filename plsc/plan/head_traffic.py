"""Bytes of device memory that the class head reads and writes in a step, added up operation by operation.

An operation reads and writes each of its operands once, as ``tests/gpu_trace`` counts the same step: what a cache
serves is not counted, nor what collectives read and write. A list in a comment names operations in their order. Single
numbers of a sample (its label, its loss) are left out: a fiftieth at 1,024 ranks, where they are most.
"""

from dataclasses import dataclass

from plsc.config import make_margin
from plsc.devices import Device
from plsc.head.backends.torch_backend import is_bounded
from plsc.head.backends.triton_passes import class_parts
from plsc.head.backends.triton_stored import summed_classes
from plsc.plan.memory import (
    PROCESSORS,
    WRITES,
    PassShape,
    chunk_rows,
    fused_tile,
    pass_shape,
    reused_exponentials,
    row_bytes,
    row_kernel_options,
    stored_widths,
)
from plsc.plan.plan_config import PlanConfig
from plsc.plan.table_terms import kept_rows_traffic

_NUMBER = 8  # bytes of a class's number in a list, or of a float64
_FLOAT = 4
# Of each logit, in float32, that CurricularFace changes: cos > φ, t + cos, times cos, the choice of it or cos; 2·cos,
# t + 2·cos, the choice of it or 1.
_NEGATIVES = 5 + 8 + 12 + 13 + 8 + 8 + 9


@dataclass(frozen=True)
class HeadTraffic:
    """Bytes of a step: of what grows with the ``table``, and with the ``samples``."""

    table: int
    samples: int


def head_traffic(run: PlanConfig, device: Device) -> HeadTraffic:
    """Count the bytes of a step of ``run`` on one rank."""
    step = _Step(run, device)
    by_shape = {"fused": _first_fused, "stored": _first_stored, "plain": _first_plain}
    first = step.micro_batches * by_shape[step.shape(1)](step)
    second = _second(step) + _kept_second(step, divides=run.replicas > 1) + _updated(step)
    clipped = _second(step) + _kept_second(step, divides=True) + _gradient_norm(step) if run.clips_head else 0
    return HeadTraffic(
        first + second + clipped + _drawn(step) + _staged(step),
        step.micro_batches * (_samples(step) + (_partial_sums(step) if step.shape(1) == "fused" else 0))
        + _features_again(step),
    )


class _Step:
    """What all counts depend on."""

    def __init__(self, run: PlanConfig, device: Device) -> None:
        self.run, self.device = run, device
        self.dim, self.width, self.micro_batches = run.dim, run.weight_width, run.micro_batches
        self.batch = run.group_batch  # samples of pass 1; pass 2 has those of all micro-batches
        self.visited, self.updated = run.visited_rows, run.updated_rows  # rows of pass 1; of pass 2 and the update
        self.reused = reused_exponentials(run, device)
        self.columns = row_bytes(run.config)  # bytes of a row, by what holds them
        self.state = sum(self.columns.values())  # a row with its norm and the optimizer's state
        self.read = self.columns["class weights"] + self.columns["1/norms"]
        self.is_sampled, self.filter_rows = run.is_sampled, run.filter_rows
        self.is_copied = run.placement != "device"  # rows come from the host's memory
        self.is_streamed = self.is_copied and not self.is_sampled  # each pass copies the whole table, chunk by chunk
        self.is_listed = self.is_sampled and not self.is_copied  # rows are found by a list of their numbers
        self.changes_negatives = make_margin(run.config.head).changes_negatives

    def shape(self, passes: int) -> PassShape:
        """Of pass 1, or 2."""
        return pass_shape(self.run, self.device, passes)

    def chunks(self, passes: int) -> range:
        """The first row of each chunk of a pass that stores something for every chunk."""
        size = chunk_rows(self.run, self.device, passes=passes)
        return range(0, self.run.rows_of(passes), max(size, 1))

    def launches(self, passes: int) -> list[int]:
        """Rows of each launch of a fused pass, which takes a whole table on the device."""
        rows = self.run.rows_of(passes)
        if not self.is_streamed:
            return [rows]
        starts = self.chunks(passes)
        return [min(starts.step, rows - start) for start in starts]


# The passes' rows.


def _first_fused(step: _Step) -> int:
    """Pass 1's kernel: rows, and their list."""
    return step.visited * (step.read + _NUMBER * step.is_listed)


def _first_stored(step: _Step) -> int:
    """Pass 1 with stored weights: those, and the rows that both products and the norms' two factors read."""
    logit = _stored_logit(step) + 2 * _NUMBER / summed_classes(row_kernel_options(step.run))
    return int(step.visited * (logit * step.batch + step.columns["class weights"] + _listed_rows(step) + _FLOAT))


def _first_plain(step: _Step) -> int:
    """Pass 1 by PyTorch: its logits, and the rows that both products and the norms' two factors read."""
    # the weighted logits are divided by norms; product read; exp, its sum
    logit = _logits(step) + 8 + _rounded(step) + step.width + 8 + 4
    logit += 0 if is_bounded(make_margin(step.run.config.head), step.run.classes) else 4 + 8  # maximum, taken off
    logit += 12 if step.changes_negatives else 0  # times the slope
    return step.visited * (logit * step.batch + step.columns["class weights"] + _plain_rows(step) + 2 * _FLOAT)


def _second(step: _Step) -> int:
    """Pass 2: by kernels, or by PyTorch with its logits."""
    gradient, rows = step.dim * _FLOAT, step.updated - step.reused
    if step.shape(2) == "stored":
        logits = _stored_logit(step) * step.batch * step.micro_batches
        return rows * (logits + _listed_rows(step) + _FLOAT + gradient)
    if step.shape(2) == "fused":
        return rows * (step.read + _NUMBER * step.is_listed + gradient)
    slope = 12 if step.changes_negatives else 0
    clamped = 8 if step.filter_rows else 0
    # log Z taken off, exp, times the scale, the slope; rounded; product read
    logit = _logits(step) + 8 + 8 + clamped + 8 + slope + _rounded(step) + step.width
    return rows * (logit * step.batch * step.micro_batches + _plain_rows(step) + _FLOAT + gradient)


def _kept_second(step: _Step, *, divides: bool) -> int:
    """Pass 2 of rows whose exponentials were kept: those are read, gradients of batches added, and maybe divided."""
    batches = step.micro_batches
    number = _FLOAT * batches + 12 * (batches - 1) + (8 if divides or step.shape(2) == "plain" else 0)
    gradient = step.dim * number + _FLOAT
    return step.reused * (step.width * step.batch * batches + gradient)


def _updated(step: _Step) -> int:
    """The update of rows whose gradient is stored: it, all of a row there and back, their numbers in the shard."""
    row = 2 * step.state + kept_rows_traffic(step.run, step.state)
    return step.updated * (step.dim * _FLOAT + row + _local_numbers(step))


def _gradient_norm(step: _Step) -> int:
    """The square of the gradient's norm, from each row's and its part along the row (plsc.head.backends)."""
    row = 4 + 4 + step.width + 4 + 4  # its norm; times the row, its sum
    # 1/norm; norm, its square; sum, times 1/norm; taken off, no less than 0, square of 1/norm, times it; summed
    numbers = 12 + 8 + 16 + 8 + 24 + 32 + 16 + 16 + 24 + 8
    listed = _listed_rows(step) - step.columns["class weights"] if step.shape(2) == "fused" and step.is_listed else 0
    return step.updated * (row * step.dim + numbers + listed)


def _stored_logit(step: _Step) -> int:
    """Of each logit between the products of a pass: what is stored, written and read."""
    return 2 * sum(stored_widths(step.run))


def _logits(step: _Step) -> int:
    """Of each logit of PyTorch's passes: product, divided by norms, the margin of negatives, times s; a filter's."""
    changed = _NEGATIVES if step.changes_negatives else 0
    filtered = 4 + 8 + 5 + 9  # product written, divided by norms, compared, and what is near taken out
    return 4 + 8 + changed + 8 + filtered * step.filter_rows


def _rounded(step: _Step) -> int:
    """Of each float32 logit that is rounded as a factor of a product."""
    return 0 if step.width == _FLOAT else _FLOAT + step.width


def _listed_rows(step: _Step) -> int:
    """Of each row as the factor of a product: read, where it is listed after it was copied with its norm."""
    weights = step.columns["class weights"]
    return weights + (2 * step.read + 2 * _NUMBER if step.is_listed else 0)


def _plain_rows(step: _Step) -> int:
    """Of each row as the factor of PyTorch's products: of the logits, and of a filter."""
    return _listed_rows(step) + step.filter_rows * (step.columns["class weights"] + _FLOAT)


def _local_numbers(step: _Step) -> int:
    """Of each row's number in the shard, by which its rounding is drawn: made, moved for a copied chunk, and read."""
    if step.is_sampled:
        return 2 * _NUMBER if step.is_listed else _NUMBER
    return (4 if step.is_copied else 2) * _NUMBER


# What surrounds the passes.


def _drawn(step: _Step) -> int:
    """Partial FC's draw: a number for every class, targets' raised, the largest found; sorted, and labels looked up."""
    if not step.is_sampled:
        return 0
    owned = step.run.rows // step.run.config.head.centers
    visited, updated = (rows // step.run.config.head.centers for rows in (step.visited, step.updated))
    drawn = (4 + 8 + 4) * owned + (12 + 24) * visited
    looked_up = _NUMBER * (visited * step.micro_batches + updated)
    # joined and sorted, and each searched for which samples visited it: a boolean that is written, and read by the pass
    joined = updated * (4 * _NUMBER + 2 * step.batch * step.micro_batches) if step.micro_batches > 1 else 0
    return step.micro_batches * drawn + looked_up + joined


def _staged(step: _Step) -> int:
    """Rows of a table in host memory that are written when they arrive, read when they return, and forwarded.

    Updates are taken to be on their way back for as long as they may be (plsc.head.staging).
    """
    if not step.is_copied:
        return 0
    if not step.is_sampled:
        passes = step.micro_batches + step.run.clips_head
        chunks = step.chunks(2)
        # a pass of few chunks is over before the updates of the last step have returned
        late = step.state if len(chunks) <= WRITES + 1 else 0
        last = step.updated - chunks[-min(WRITES, len(chunks))] if chunks else 0
        forwarded = 2 * last * (passes * step.read + late)
        return step.run.rows * (passes * step.read + 2 * step.state) + forwarded
    share, stages = step.visited / step.run.rows, WRITES + 1
    # rows in common: looked up, bounded, taken, compared, found; their numbers there
    common = (24 + 16 + 24 + 17 + 1) + (8 + 24) * share
    forwarded = int(step.visited * stages * (common + share * (5 * step.state + 2 * _NUMBER * len(step.columns))))
    return step.micro_batches * (step.visited * step.state + forwarded) + step.updated * (step.state + 2 * _NUMBER)


# The samples.


def _samples(step: _Step) -> int:
    """Of a micro-batch's gathered embeddings: their unit vectors, their own classes' rows, and the gradient by them."""
    width, centers = step.width, step.run.config.head.centers
    widened = 0 if width == _FLOAT else width + _FLOAT
    number = 2 * width if step.run.head_ranks > 1 else 0  # unpacked
    exact = _FLOAT if width < _FLOAT else 8  # of the type that holds their products
    number += centers * (2 * width + width + width + 4 * exact) + 2 * width  # rows; norms, copies, products, sums
    number += 8 + 8  # divided by Z, times s/B
    number += 2 * width + widened + 12  # rows, in float32, weighed and added
    number += 2 * width  # joined for pass 2
    # this rank's own: norm, unit vector, rounded; norm, unit vector, gradient through the norm, times the loss's
    own = 4 + 8 + 4 + width + 4 + 16 + 20 + 12 + 4 + 8
    return step.dim * (step.batch * number + step.batch // step.run.head_ranks * own)


def _partial_sums(step: _Step) -> int:
    """Of a micro-batch: pass 1's sums over parts of the classes, written by the kernel and added up."""
    blocks, total = -(-step.batch // fused_tile(step.run).samples), 0
    for number, rows in enumerate(step.launches(1)):
        tile, centers = fused_tile(step.run), step.run.config.head.centers
        _, parts = class_parts(max(rows // centers, 1), blocks, tile.classes(centers), PROCESSORS)
        added = 16 if number else 12  # to float32, or to what the chunks before gave
        each = step.dim * (2 * _FLOAT * parts + 8 + added) if parts > 1 else step.dim * (_FLOAT + (12 if number else 0))
        total += step.batch * (each + 2 * _NUMBER * parts)
    return total


def _features_again(step: _Step) -> int:
    """The embeddings as the passes read them for each chunk, and what PyTorch's first pass adds for each."""
    features = step.batch * step.micro_batches * step.dim * step.width
    summed = step.batch * step.micro_batches * step.dim * (_FLOAT + 12)
    second = len(step.chunks(2)) * (1 + step.run.clips_head) * (1 if step.shape(2) == "fused" else 2)
    if step.shape(1) == "fused":
        return features * (len(step.launches(1)) + second)
    zeros = step.batch * step.micro_batches * step.dim * _FLOAT + features  # made like them, which counts as read
    return features * (len(step.chunks(1)) + second) + zeros + summed * len(step.chunks(1))
