"""Memory of a rank: the bytes that stay, and the most that a step needs on top; and the disk that a run takes."""

import functools
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from plsc.config import Config, DataConfig, ParallelConfig, make_margin
from plsc.devices import Device
from plsc.head.backends import HeadShape, why_no_triton_passes
from plsc.head.backends.products import Fp32Precision
from plsc.head.backends.triton_passes import scratch_bytes
from plsc.head.backends.triton_tiles import Pass, Tile, shipped_tile
from plsc.head.class_table import NORM_BLOCK_ROWS, default_chunk_size, overlapped_chunk_size
from plsc.head.sharded_head import ShardedHead
from plsc.head.undo_journal import journal_bytes
from plsc.parallel.mesh import Mesh
from plsc.plan.backbone import BackboneProfile
from plsc.plan.backbone_memory import BackboneMemory, backbone_memory, state_bytes
from plsc.plan.plan_config import PlanConfig
from plsc.train.components import make_head, make_head_optimizer

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
_PASSES: tuple[Pass, Pass] = ("first", "second")
_NORM_COPIES = 3  # likewise for the gradient's norm: gradient, unit rows, and their product
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


def row_bytes(config: Config) -> dict[str, int]:
    """Bytes that one row of the table takes, by what holds them: read off the head and its optimizer themselves."""
    return _row_bytes(replace(config, parallel=ParallelConfig(), data=DataConfig(), backbone=""))


@functools.cache
def _row_bytes(config: Config) -> dict[str, int]:
    head = _one_row(config)
    optimizer = make_head_optimizer(config, head, head.mesh.world_size)
    parts = {"class weights": head.weight.nbytes}
    for name, shard in optimizer.sharded_state().items():
        parts[_state_label(name)] = shard.blocks[0].local.nbytes
    norm_dtype = torch.promote_types(head.weight.dtype, torch.float32)
    return {**parts, "1/norms": norm_dtype.itemsize}


def plan_memory(setup: PlanConfig, profile: BackboneProfile, device: Device) -> Memory:
    """The bytes of ``setup``'s fullest rank. ``profile`` is the backbone's at the setup's batch and precision."""
    last = setup.pp - 1
    with_head = _memory_of(setup, backbone_memory(setup, profile, device, last), device)
    if last == 0:
        return with_head
    first = _memory_of(setup, backbone_memory(setup, profile, device, 0), device, has_head=False)
    return max(first, with_head, key=lambda memory: memory.total)


def _memory_of(setup: PlanConfig, backbone: BackboneMemory, device: Device, *, has_head: bool = True) -> Memory:
    table = {name: size * setup.rows for name, size in row_bytes(setup.config).items()} if has_head else {}
    stored = sum(size for name, size in table.items() if name != "1/norms" and not setup.config.head.journal)
    stored += backbone.stored
    host = 0
    if setup.placement != "device":
        host, table = sum(table.values()), {}
    kept = {**table, **backbone.kept}
    phases = _phases(setup, backbone, device, has_head=has_head)
    allowed = {}
    if device.kind == "cuda":
        allowed["CUDA context and libraries"] = CONTEXT_BYTES + (NCCL_BYTES if setup.world > 1 else 0)
        allowed["allocator's fragments"] = int(FRAGMENTED_SHARE * max(phases.values()))
    return Memory(kept, phases, allowed, host, backbone.host, stored)


def head_memory(setup: PlanConfig, device: Device) -> tuple[int, int]:
    """Bytes of a rank's resident table with its state, and the most that a step of the head takes on top of it."""
    table = sum(row_bytes(setup.config).values()) * setup.rows
    first = chunk_rows(setup, device, setup.group_batch, passes=1)
    second = chunk_rows(setup, device, setup.group_batch * setup.micro_batches)
    passes = [_block(setup, device, first, passes=1), _block(setup, device, second, passes=2) + _member(setup)]
    return table, _waiting(setup) + max(passes)


def chunk_rows(setup: PlanConfig, device: Device, samples: int, *, passes: int = 2) -> int:
    """Rows that a pass over ``samples`` has in hand at a time."""
    head, dim = setup.config.head, setup.config.embedding_dim
    classes = default_chunk_size(samples, dim, head.centers, device.kind)
    if passes == 2 and _overlaps_sums(setup):
        classes = overlapped_chunk_size(classes, setup.updated_rows // head.centers)
    return min(classes * head.centers, _rows_of(setup, passes))


def _rows_of(setup: PlanConfig, passes: int) -> int:
    """Rows that pass 1, or pass 2, goes over."""
    return setup.updated_rows if passes == 2 else setup.visited_rows


def _overlaps_sums(setup: PlanConfig) -> bool:
    """Return whether a chunk's gradient is summed over replicas while the next one is computed."""
    return setup.replicas > 1 and setup.placement == "device"


def _one_row(config: Config) -> ShardedHead:
    single = replace(config, head=replace(config.head, centers=1, placement="device", journal=False))
    return make_head(single, 1, Mesh(0, 1, 0, torch.device("meta")))


def _state_label(name: str) -> str:
    return {"momentum_scale": "int8 scales", "first_moment_scale": "int8 scales"}.get(name, name.replace("_", " "))


def _phases(setup: PlanConfig, backbone: BackboneMemory, device: Device, *, has_head: bool) -> dict[str, int]:
    """Return what each part of a step holds on top, activations included."""
    if not has_head:
        return {
            "backbone, backward pass": backbone.backward,
            "backbone, update": backbone.gradients + backbone.update,
        }
    waiting, staged = _waiting(setup), _staged(setup, device)
    first = chunk_rows(setup, device, setup.group_batch, passes=1)
    second = chunk_rows(setup, device, setup.group_batch * setup.micro_batches)
    widened = min(setup.rows, NORM_BLOCK_ROWS) * setup.config.embedding_dim * 8
    after = backbone.gradients + waiting + _member(setup)
    phases = {
        "head, first pass": backbone.forward + waiting + _block(setup, device, first, passes=1) + staged["first"],
        "backbone, backward pass": backbone.backward + waiting + staged["between"],
        "head, second pass": after + _block(setup, device, second, passes=2) + staged["second"],
        "backbone, update": backbone.gradients + backbone.update + staged["between"],
        "head, first norms": backbone.forward + waiting + widened,
    }
    if clips_head(setup):
        phases["head, gradient's norm"] = after + _norm_block(setup, device, second) + staged["first"]
    return phases


def _waiting(setup: PlanConfig) -> int:
    """What pass 2 needs of each micro-batch: its embeddings, gathered, and the numbers of sampled classes."""
    embeddings = setup.group_batch * setup.config.embedding_dim * setup.weight_width
    sampled = 8 * setup.visited_rows if setup.config.head.sample_rate < 1 else 0
    return setup.micro_batches * (embeddings + sampled)


def _member(setup: PlanConfig) -> int:
    """Bytes of the boolean mask (rows, B) that says which rows each sample of several micro-batches visits; else 0."""
    if setup.config.head.sample_rate >= 1 or setup.micro_batches == 1:
        return 0
    return setup.updated_rows // setup.config.head.centers * setup.group_batch * setup.micro_batches


def _sums(setup: PlanConfig) -> int:
    """(B, D) float32: rows that are pulled together."""
    return setup.group_batch * setup.config.embedding_dim * 4


def has_fused_passes(setup: PlanConfig, device: Device) -> bool:
    """Whether the head's passes are Triton's kernels, which store no (classes, B) block."""
    head = setup.config.head
    weights = {"float32": torch.float32, "bfloat16": torch.bfloat16}[head.weight_dtype]
    shape = HeadShape(
        torch.device("cuda"), weights, setup.config.embedding_dim, head.centers, make_margin(head), _precision(setup)
    )
    return device.has_kernels and device.kind == "cuda" and why_no_triton_passes(shape) is None


def _precision(setup: PlanConfig) -> Fp32Precision:
    return cast(Fp32Precision, setup.config.head.fp32_precision)


def stores_gradient(setup: PlanConfig) -> bool:
    """Whether the rows' gradient is stored before the update, as replicas must sum it."""
    return setup.replicas > 1


def clips_head(setup: PlanConfig) -> bool:
    """Whether pass 2 runs once more before the update, for the norm of the gradient."""
    return setup.config.optim.clip_head and setup.config.optim.clip_norm > 0


def fused_tiles(setup: PlanConfig) -> tuple[Tile, Tile]:
    """Of Triton's first and second pass on an H100."""
    dtype = torch.float32 if setup.weight_width == 4 else torch.bfloat16
    dim, precision = setup.config.embedding_dim, _precision(setup)
    first, second = (shipped_tile(which, (9, 0), _HOPPER_SHARED, dtype, dim, precision) for which in _PASSES)
    return first, second


def fused_block(setup: PlanConfig, rows: int, *, passes: int) -> int:
    """The scratch of Triton's passes: pass 1's sums by parts of the classes; gradients on their way to the update."""
    samples, dim = setup.group_batch, setup.config.embedding_dim
    both = samples, samples * setup.micro_batches
    scratch = scratch_bytes(both, _rows_of(setup, passes), dim, fused_tiles(setup), PROCESSORS)
    if passes == 1:
        return scratch[0]
    return _gradients(setup, rows) if stores_gradient(setup) else scratch[1]


def _gradients(setup: PlanConfig, rows: int) -> int:
    """Float32 gradients of chunks of rows: the one that is made, the one that is updated, one that replicas sum."""
    at_once = min((3 if _overlaps_sums(setup) else 2) * rows, setup.updated_rows)
    return at_once * setup.config.embedding_dim * 4


def _block(setup: PlanConfig, device: Device, rows: int, *, passes: int) -> int:
    """A chunk's scratch: that of the kernels, or of PyTorch's passes."""
    if has_fused_passes(setup, device):
        return fused_block(setup, rows, passes=passes)
    if passes == 1:
        return _plain_block(setup, rows, passes=1) + 2 * _sums(setup)
    return _plain_block(setup, rows, passes=2, copies=0 if device.has_kernels else _PLAIN_COPIES)


def _norm_block(setup: PlanConfig, device: Device, rows: int) -> int:
    """A chunk's scratch where pass 2 runs for the norm of its gradient alone."""
    if not has_fused_passes(setup, device):
        return _plain_block(setup, rows, passes=2, copies=_NORM_COPIES)
    return max(_NORM_COPIES * rows * setup.config.embedding_dim * _FLOAT, _gradients(setup, rows))


def _plain_block(setup: PlanConfig, rows: int, *, passes: int, copies: int = 0) -> int:
    """The scratch of PyTorch's passes, which store (rows, B) blocks of logits: a chunk's beside what the last one left.

    Args:
        setup: the run.
        rows: of a chunk.
        passes: 1, or 2, which makes the rows' gradients.
        copies: of a chunk's rows, gradient included, that its update or norm makes.
    """
    samples = setup.group_batch * (setup.micro_batches if passes == 2 else 1)
    width, dim = setup.weight_width, setup.config.embedding_dim
    following = min(rows, _rows_of(setup, passes) - rows)  # whose logits are made beside this chunk's
    kept, made = _logit_bytes(setup, passes)
    rounded = width if width < _FLOAT else 0
    copied = dim * width if setup.config.head.sample_rate < 1 else 0
    product = samples * (kept + rounded) + copied
    next_logits = rows * (samples * kept + copied) + following * (samples * made + copied)
    if passes == 1:
        return max(rows * product, next_logits)
    wide = dim * _FLOAT
    first = rows * (product + max(copies, 1) * wide)
    later = following * product + max(_gradients(setup, rows), copies * following * wide)
    return max(first, later, next_logits + rows * wide)


def _logit_bytes(setup: PlanConfig, passes: int) -> tuple[int, int]:
    """Bytes that PyTorch's passes hold of each logit from its chunk to the next, and while it is made."""
    if not make_margin(setup.config.head).changes_negatives:
        return _FLOAT, _FLOAT
    # z and its slope, in pass 1 times each other; cosine, comparison, changed cosine, slope and what it is chosen from
    return (3 if passes == 1 else 2) * _FLOAT, 4 * _FLOAT + 1


def _staged(setup: PlanConfig, device: Device) -> dict[str, int]:
    """Copies of rows of a table in host memory, during both passes and ``between`` them.

    Sampled rows are fetched once for both passes, and the next batch's ahead of them; without sampling, each pass
    fetches a chunk while it computes on the one before, the first pass without the optimizer's state. Updates of the
    last few are on their way back meanwhile.
    """
    if setup.placement == "device":
        return {"first": 0, "between": 0, "second": 0}
    row = row_bytes(setup.config)
    whole, read = sum(row.values()), row["class weights"] + row["1/norms"]
    if setup.config.head.sample_rate < 1:
        return dict.fromkeys(("first", "between", "second"), (WRITES + 2) * setup.visited_rows * whole)
    rows = chunk_rows(setup, device, setup.group_batch * setup.micro_batches)
    return {
        "first": rows * (WRITES * whole + 2 * read),
        "between": rows * WRITES * whole,
        "second": rows * (WRITES + 2) * whole,
    }


def as_dict(memory: Memory) -> dict[str, Any]:
    """For JSON."""
    return {
        "kept": memory.kept,
        "step_phases": memory.phases,
        "allowed": memory.allowed,
        "computed": memory.computed,
        "total": memory.total,
        "host": memory.host,
        "offloaded": memory.offloaded,
        "checkpoint": memory.checkpoint,
    }


@dataclass(frozen=True)
class Disk:
    """Bytes on disk at most, or about.

    Attributes:
        table: of a rank's files, where the table lies in mapped files; else 0.
        journals: of what a rank's rows held at the savepoints that can be gone back to; 0 without ``head.journal``.
        checkpoint: of one checkpoint, of all ranks together.
        checkpoints: that are there at a time: those that ``checkpoint.keep`` keeps by number, and the next one.
    """

    table: int
    journals: int
    checkpoint: int
    checkpoints: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "table": self.table,
            "journals": self.journals,
            "checkpoint": self.checkpoint,
            "checkpoints": self.checkpoints,
        }


def plan_disk(setup: PlanConfig, profile: BackboneProfile) -> Disk:
    """The disk that ``setup`` takes; ``profile`` is the backbone's. ``checkpoint.keep.every_hours`` is not counted."""
    config = setup.config
    columns = row_bytes(config)
    row, is_mapped = sum(columns.values()), setup.placement == "mmap"
    keep = config.checkpoint.keep
    journals = 0
    if is_mapped and config.head.journal:
        steps = 0 if config.checkpoint.every_minutes else config.checkpoint.every_steps
        share = setup.updated_rows / max(setup.rows, 1)
        journals = (keep.last + 1) * journal_bytes(setup.rows, row, share, steps)
    stored_rows = 0 if is_mapped and config.head.journal else setup.classes * config.head.centers
    trained = [parameter for parameter in profile.parameters if parameter.is_trained]
    weights = profile.weights + profile.buffers
    backbone = (2 if config.ema_decay else 1) * weights + state_bytes(setup, trained)
    checkpoint = backbone + stored_rows * (row - columns["1/norms"])
    return Disk(setup.rows * row if is_mapped else 0, journals, checkpoint, keep.last + keep.best + 1)
