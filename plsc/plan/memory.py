"""Memory of a rank: the bytes that stay, and the most that a step needs on top; and the disk that a run takes."""

import functools
from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, cast

import torch

from plsc.config import Config, DataConfig, ParallelConfig, make_margin
from plsc.devices import Device
from plsc.feature_config import DiskTerm
from plsc.head.backends import HeadShape, why_no_triton_passes, why_not_fused
from plsc.head.backends.kept_exponentials import ALIGNED, kept_classes
from plsc.head.backends.products import Fp32Precision
from plsc.head.backends.torch_backend import is_bounded
from plsc.head.backends.triton_passes import scratch_bytes
from plsc.head.backends.triton_shape import computed as stored_from
from plsc.head.backends.triton_stored import row_options, summed_classes
from plsc.head.backends.triton_tiles import Tile, gpu_kind, shipped_tile
from plsc.head.class_table import NORM_BLOCK_ROWS, default_chunk_size
from plsc.head.options import exponentials_bytes
from plsc.parallel.mesh import Mesh
from plsc.plan.backbone import BackboneProfile
from plsc.plan.backbone_memory import BackboneMemory, backbone_memory, state_bytes
from plsc.plan.plan_config import PlanConfig
from plsc.plan.table_terms import kept_rows_memory, replicas_chunk
from plsc.train.tables import make_head, make_head_optimizer

# The CUDA context, cuBLAS' and cuDNN's workspaces; NCCL's buffers where there are several ranks. Not computed: allowed.
CONTEXT_BYTES = 1 << 30
NCCL_BYTES = 512 << 20
# What an allocator holds back in pieces too small for the next request, as a share of what a step takes and returns.
FRAGMENTED_SHARE = 0.05
# Copies of a chunk's rows in float32 that the update in plain PyTorch has at a time: gradient, unit rows, weights,
# state, random bits and what is computed from them. The fused kernels have the gradient alone.
_PLAIN_COPIES = 7
PROCESSORS = 132  # of an H100
_HOPPER_SHARED = 227 << 10  # bytes of shared memory that a block of threads may have there
_FLOAT = 4
PassShape = Literal["plain", "fused", "stored"]
WRITES = 3  # copies of rows of a host table whose updates return, at most; one more is in use, and one fetched ahead


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank: ``kept`` all the time, ``phases`` of a step in turn, ``allowed`` but not computed.

    ``host`` is what its share of the table takes of its machine's memory, or disk, and ``offloaded`` its share of the
    backbone; ``checkpoint`` what the first rank writes of the state, and copies to its machine's memory before
    (:mod:`plsc.train.checkpoint_writer`).
    """

    kept: dict[str, int]
    phases: dict[str, int]
    allowed: dict[str, int]
    host: int = 0
    offloaded: int = 0
    checkpoint: int = 0

    @property
    def computed(self) -> int:
        """The step's peak without allowances: what ``tests/gpu_trace`` finds on fake tensors, within 3%.

        That trace knows neither the allocator's rounding and fragments nor the memory of CUDA and NCCL.
        """
        return sum(self.kept.values()) + max(self.phases.values())

    @property
    def total(self) -> int:
        """Bytes that the device must have."""
        return self.computed + sum(self.allowed.values())

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        values = asdict(self)
        values["step_phases"] = values.pop("phases")
        return {**values, "computed": self.computed, "total": self.total}


def row_bytes(config: Config) -> dict[str, int]:
    """Bytes that one row of the table takes, by what holds them: read off the head and its optimizer themselves."""
    return _row_bytes(replace(config, parallel=ParallelConfig(), data=DataConfig(), backbone=""))


def row_size(run: PlanConfig) -> int:
    """Bytes of a row of the run's table, with its state and norm."""
    return sum(row_bytes(run.config).values())


@functools.cache
def _row_bytes(config: Config) -> dict[str, int]:
    single = replace(config, head=replace(config.head, centers=1, placement="device"), features=())
    head = make_head(single, 1, Mesh(0, 1, 0, torch.device("meta")))
    optimizer = make_head_optimizer(config, head, head.mesh.world_size)
    parts = {"class weights": head.weight.nbytes}
    for name, shard in optimizer.sharded_state().items():
        label = "int8 scales" if name.endswith("_scale") else name.replace("_", " ")
        parts[label] = shard.blocks[0].local.nbytes
    norm_dtype = torch.promote_types(head.weight.dtype, torch.float32)
    return {**parts, "1/norms": norm_dtype.itemsize}


def plan_memory(run: PlanConfig, profile: BackboneProfile, device: Device) -> Memory:
    """The bytes of ``run``'s fullest rank. ``profile`` is the backbone's at the run's batch and precision."""
    last = run.pp - 1
    with_head = _memory_of(run, backbone_memory(run, profile, device, last), device)
    if last == 0:
        return with_head
    first = _memory_of(run, backbone_memory(run, profile, device, 0), device, has_head=False)
    return max(first, with_head, key=lambda memory: memory.total)


def _memory_of(run: PlanConfig, backbone: BackboneMemory, device: Device, *, has_head: bool = True) -> Memory:
    kept, stored, host = Counter[str](), backbone.stored, 0
    for table in run.tables if has_head else ():
        parts = {name: size * table.rows for name, size in row_bytes(table.config).items()}
        if table.fixed:
            kept[table.fixed] = sum(parts.values())
            continue
        if not (table.placement == "mmap" and table.config.keeps_tables):
            stored += sum(size for name, size in parts.items() if name != "1/norms")
        if table.placement != "device":
            host += sum(parts.values())
        else:
            kept.update(parts)
    kept.update(backbone.kept)
    phases = _phases(run, backbone, device, has_head=has_head)
    allowed = {}
    if device.kind == "cuda":
        allowed["CUDA context and libraries"] = CONTEXT_BYTES + (NCCL_BYTES if run.world > 1 else 0)
        allowed["allocator's fragments"] = int(FRAGMENTED_SHARE * max(phases.values()))
    return Memory(dict(kept), phases, allowed, host, backbone.host, stored)


def head_memory(run: PlanConfig, device: Device) -> tuple[int, int]:
    """Bytes of a rank's resident table with its state, and the most that a step of the head takes on top of it."""
    table = row_size(run) * run.rows
    passes = [_block(run, device, passes=1), _block(run, device, passes=2) + _member(run)]
    return table, _waiting(run, device) + max(passes)


def chunk_rows(run: PlanConfig, device: Device, *, passes: int = 2) -> int:
    """Rows that pass 1, or pass 2, has in hand at a time."""
    head = run.config.head
    classes = default_chunk_size(run.samples_of(passes), run.dim, head.centers, device.kind)
    if passes == 2:
        classes, _ = replicas_chunk(run, classes)
    return min(classes * head.centers, run.rows_of(passes))


def _phases(run: PlanConfig, backbone: BackboneMemory, device: Device, *, has_head: bool) -> dict[str, int]:
    """Return what each part of a step holds on top, activations included."""
    if not has_head:
        return {
            "backbone, backward pass": backbone.backward,
            "backbone, update": backbone.gradients + backbone.update,
        }
    tables = run.tables  # all batches wait for pass 2, and the tables have it one after another
    waiting, staged = sum(_waiting(table, device) for table in tables), Counter[str]()
    for table in tables:
        staged.update(_staged(table, device))
    widened = max(min(table.rows, NORM_BLOCK_ROWS) for table in tables) * run.dim * 8
    after = backbone.gradients + waiting + sum(map(_member, tables))
    first = max(_block(table, device, passes=1) for table in tables)
    second = max(_block(each, device, passes=2) + kept_rows_memory(each, row_size(each)) for each in tables)
    phases = {
        "head, first pass": backbone.forward + waiting + first + staged["first"],
        "backbone, backward pass": backbone.backward + waiting + staged["between"],
        "head, second pass": after + second + staged["second"],
        "backbone, update": backbone.gradients + backbone.update + staged["between"],
        "head, first norms": backbone.forward + waiting + widened,
    }
    if run.clips_head:
        norm = max(_block(table, device, passes=2, updates=False) for table in tables)
        phases["head, gradient's norm"] = after + norm + staged["norm"]
    return phases


def _waiting(run: PlanConfig, device: Device) -> int:
    """What pass 2 needs of each micro-batch: embeddings, gathered, its filter's rows, sampled classes, exponentials."""
    if run.fixed:  # there is no pass 2
        return 0
    embeddings = run.group_batch * run.dim * run.weight_width * (1 + run.filter_rows)
    sampled = 8 * run.visited_rows if run.is_sampled else 0
    exponentials = _kept_exponentials(run, device) * run.group_batch * run.weight_width
    return run.micro_batches * (embeddings + sampled + exponentials)


def _kept_exponentials(run: PlanConfig, device: Device) -> int:
    """Classes whose exponentials pass 1 keeps of each micro-batch for pass 2."""
    head = run.config.head
    memory, margin = exponentials_bytes(head.exponentials_memory), make_margin(head)
    unusual = margin.changes_negatives or margin.separates_positives or run.filter_rows or head.centers > 1
    if not memory or unusual or run.group_batch % ALIGNED or device.kind != "cuda" or not run.updated_rows:
        return 0
    if pass_shape(run, device, 1) == "fused" or not is_bounded(margin, run.rows_of(1)):
        return 0
    chunk = default_chunk_size(run.group_batch, run.dim, 1, device.kind)
    return kept_classes(memory, run.group_batch * run.weight_width, run.rows_of(1), chunk)


def reused_exponentials(run: PlanConfig, device: Device) -> int:
    """Classes that pass 2 takes by them: none where its micro-batches have visited different ones."""
    return _kept_exponentials(run, device) if run.micro_batches == 1 or not run.is_sampled else 0


def _member(run: PlanConfig) -> int:
    """Bytes of the boolean mask (rows, B) that says which rows each sample of several micro-batches visits; else 0."""
    if not run.is_sampled or run.micro_batches == 1:
        return 0
    return run.updated_rows // run.config.head.centers * run.group_batch * run.micro_batches


def pass_shape(run: PlanConfig, device: Device, passes: int) -> PassShape:
    """What makes pass 1, or 2: PyTorch ("plain"), or Triton's kernels, "fused" or with logits "stored".

    From how many samples on they are stored is computed, as for an H100.
    """
    head, (dtype, precision) = run.config.head, _numbers(run)
    margin, filters = make_margin(head), run.filter_rows > 0
    shape = HeadShape(torch.device("cuda"), dtype, run.dim, head.centers, margin, precision, run.classes, filters)
    if not device.has_kernels or device.kind != "cuda" or why_no_triton_passes(shape) is not None:
        return "plain"
    not_fused = why_not_fused(shape)
    if margin.separates_positives:  # several labels to a sample, which stored passes do not take
        return "fused" if not_fused is None else "plain"
    if not shape.row_kind.can_be_stored:
        return "fused"
    least = 0 if not_fused else stored_from((9, 0), _HOPPER_SHARED, shape.row_kind)
    return "stored" if run.samples_of(passes) >= least else "fused"


def _numbers(run: PlanConfig) -> tuple[torch.dtype, Fp32Precision]:
    """The table's dtype, and the precision of its products."""
    dtype = torch.float32 if run.weight_width == _FLOAT else torch.bfloat16
    return dtype, cast(Fp32Precision, run.config.head.fp32_precision)


def row_kernel_options(run: PlanConfig) -> dict[str, Any] | None:
    """Of the kernels that multiply the table's rows on an H100; None: scores are stored."""
    kind = gpu_kind((9, 0), _HOPPER_SHARED)
    return row_options(kind, _numbers(run)[0], run.dim, run.config.head.centers)


def stored_widths(run: PlanConfig) -> list[int]:
    """Bytes of what is stored of each logit between the products of a pass: its score, if that is, and its weight."""
    return [run.weight_width] if row_kernel_options(run) is not None else [_FLOAT, run.weight_width]


def fused_tile(run: PlanConfig) -> Tile:
    """Of Triton's first fused pass on an H100."""
    dtype, precision = _numbers(run)
    head = run.config.head  # rows that are fetched lie side by side on the device
    is_general = head.centers > 1 or (run.is_sampled and head.placement == "device")
    return shipped_tile("first", (9, 0), _HOPPER_SHARED, dtype, run.dim, precision, is_general=is_general)


def _partial_sums(run: PlanConfig) -> int:
    """Bytes of the first pass of Triton's fused kernels: sums by parts of the classes."""
    return scratch_bytes(run.samples_of(1), run.rows_of(1), run.dim, fused_tile(run), PROCESSORS)


def _gradients(run: PlanConfig, rows: int) -> int:
    """Float32 gradients of chunks of rows: the one that is made, the one that is updated, one that replicas sum."""
    _, chunks = replicas_chunk(run, rows)
    return min(chunks * rows, run.updated_rows) * run.dim * _FLOAT


def _block(run: PlanConfig, device: Device, *, passes: int, updates: bool = True) -> int:
    """A chunk's scratch: that of the kernels, or of PyTorch's passes; pass 2 may run for a norm, without updates."""
    rows, shape = chunk_rows(run, device, passes=passes), pass_shape(run, device, passes)
    if shape == "stored":
        kept = _kept_exponentials(run, device) if passes == 1 else reused_exponentials(run, device)
        return _stored_block(run, rows, passes=passes, all_kept=kept == run.rows_of(passes))
    if shape == "fused":
        return _gradients(run, rows) if passes == 2 else _partial_sums(run)
    if passes == 1:
        sums = run.group_batch * run.dim * _FLOAT  # of rows that are pulled together
        return _plain_block(run, rows, passes=1) + 2 * sums
    return _plain_block(run, rows, passes=2, copies=0 if device.has_kernels or not updates else _PLAIN_COPIES)


def _stored_block(run: PlanConfig, rows: int, *, passes: int, all_kept: bool) -> int:
    """A chunk's scratch where kernels store weights, and maybe scores: both, sums, copies of listed rows.

    ``all_kept``: weights are in the memory of exponentials, and pass 2 makes no others.
    """
    samples, dim, width = run.samples_of(passes), run.dim, run.weight_width
    *scores, weight = stored_widths(run)
    scratch = rows * samples * (weight * (not all_kept) + sum(scores) * (passes == 1 or not all_kept))
    if all_kept and passes == 2 and run.micro_batches > 1:
        scratch += rows * dim * _FLOAT  # a batch's gradient, which is added to those before it
    copied = dim * width if run.is_sampled and run.placement == "device" else 0
    if passes == 2:  # the last chunk's copies live until its rows are updated
        return scratch + min(2 * rows, run.updated_rows) * copied + _gradients(run, rows)
    sums = rows // (summed_classes(row_kernel_options(run)) * run.config.head.centers) * 8
    return scratch + rows * copied + samples * (sums + 2 * dim * _FLOAT)


def _plain_block(run: PlanConfig, rows: int, *, passes: int, copies: int = 0) -> int:
    """The scratch of PyTorch's passes, which store (rows, B) blocks of logits: a chunk's beside what the last one left.

    Args:
        run: the run.
        rows: of a chunk.
        passes: 1, or 2, which makes the rows' gradients.
        copies: of a chunk's rows, gradient included, that its update makes.
    """
    samples = run.samples_of(passes)
    width, dim = run.weight_width, run.dim
    following = min(rows, run.rows_of(passes) - rows)  # whose logits are made beside this chunk's
    kept, made = _logit_bytes(run, passes)
    rounded = width if width < _FLOAT else 0
    copied = dim * width if run.is_sampled else 0
    product = samples * (kept + rounded) + copied
    next_logits = rows * (samples * kept + copied) + following * (samples * made + copied)
    if passes == 1:
        return max(rows * product, next_logits)
    wide = dim * _FLOAT
    first = rows * (product + max(copies, 1) * wide)
    later = following * product + max(_gradients(run, rows), copies * following * wide)
    return max(first, later, next_logits + rows * wide)


def _logit_bytes(run: PlanConfig, passes: int) -> tuple[int, int]:
    """Bytes that PyTorch's passes hold of each logit from its chunk to the next, and while it is made."""
    if not make_margin(run.config.head).changes_negatives:
        filtered = _FLOAT + 1 if run.filter_rows else 0  # a row's cosine, and whether it is near
        return _FLOAT, _FLOAT + filtered
    # z and its slope, in pass 1 times each other; cosine, comparison, changed cosine, slope and what it is chosen from
    return (3 if passes == 1 else 2) * _FLOAT, 4 * _FLOAT + 1


def _staged(run: PlanConfig, device: Device) -> dict[str, int]:
    """Copies of rows of a table in host memory, during both passes and ``between`` them, and in pass 2 for the norm.

    Sampled rows are fetched once for both passes, and the next batch's ahead of them; without sampling, each pass
    fetches a chunk while it computes on the one before, the first pass without the optimizer's state. Updates of the
    last few are on their way back meanwhile.
    """
    if run.placement == "device":
        return {"first": 0, "between": 0, "norm": 0, "second": 0}
    row = row_bytes(run.config)
    whole, read = sum(row.values()), row["class weights"] + row["1/norms"]
    if run.is_sampled:
        return dict.fromkeys(("first", "between", "norm", "second"), (WRITES + 2) * run.visited_rows * whole)
    rows = chunk_rows(run, device)
    return {
        "first": rows * (WRITES * whole + 2 * read),
        "between": rows * WRITES * whole,
        "norm": rows * (WRITES * whole + 3 * read),  # the last chunk's until the next gradient is there
        "second": rows * (WRITES + 2) * whole,
    }


@dataclass(frozen=True)
class Disk:
    """Bytes on disk at most, or about.

    Attributes:
        table: of a rank's files, where the table lies in mapped files; else 0.
        of_features: of a rank, what its features take besides.
        checkpoint: of one checkpoint, of all ranks together.
        checkpoints: that are there at a time: those that ``checkpoint.keep`` keeps by number, and the next one.
    """

    table: int
    of_features: list[DiskTerm]
    checkpoint: int
    checkpoints: int

    def as_dict(self) -> dict[str, int]:
        """For JSON."""
        others = {term.name: term.nbytes for term in self.of_features}
        return {"table": self.table, **others, "checkpoint": self.checkpoint, "checkpoints": self.checkpoints}


def plan_disk(run: PlanConfig, profile: BackboneProfile) -> Disk:
    """The disk that ``run`` takes; ``profile`` is the backbone's. ``checkpoint.keep.every_hours`` is not counted."""
    config = run.config
    keep = config.checkpoint.keep
    files, stored = 0, 0
    of_features: list[DiskTerm] = []
    for table in (table for table in run.tables if not table.fixed):
        row, is_mapped = row_size(table), table.placement == "mmap"
        files += table.rows * row if is_mapped else 0
        of_features += [term for section in config.features_on for term in section.planned_disk(table, row)]
        if not (is_mapped and config.keeps_tables):
            stored += table.classes * table.config.head.centers * (row - row_bytes(table.config)["1/norms"])
    trained = [parameter for parameter in profile.parameters if parameter.is_trained]
    weights = profile.weights + profile.buffers
    backbone = (2 if config.ema_decay else 1) * weights + state_bytes(run, trained)
    return Disk(files, of_features, backbone + stored, keep.last + keep.best + 1)
