"""Memory of a rank: the bytes that stay, and the most that a step needs on top."""

import functools
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from plsc.config import Config, DataConfig, ParallelConfig, make_margin
from plsc.devices import Device
from plsc.head.backends import HeadShape, why_no_triton_passes
from plsc.head.backends.products import Fp32Precision
from plsc.head.backends.triton_passes import scratch_bytes
from plsc.head.backends.triton_tiles import shipped_tile
from plsc.head.class_table import NORM_BLOCK_ROWS, default_chunk_size, overlapped_chunk_size
from plsc.head.sharded_head import ShardedHead
from plsc.parallel.mesh import Mesh
from plsc.plan.backbone import BackboneProfile
from plsc.plan.backbone_memory import BackboneMemory, backbone_memory
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
_PROCESSORS = 132  # of an H100, and the shared memory that a block of threads may have there
_HOPPER_SHARED = 227 << 10
_NORM_COPIES = 3  # likewise for the gradient's norm: gradient, unit rows, and their product
_WRITES = 3  # copies of rows of a host table whose updates return, at most; one more is in use, and one fetched ahead


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
    stored = sum(size for name, size in table.items() if name != "1/norms") + backbone.stored
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
    passes = [_block(setup, device, first, passes=1), _block(setup, device, second, passes=2)]
    return table, _waiting(setup) + max(passes)


def chunk_rows(setup: PlanConfig, device: Device, samples: int, *, passes: int = 2) -> int:
    """Rows that a pass over ``samples`` has in hand at a time."""
    head, dim = setup.config.head, setup.config.embedding_dim
    classes = default_chunk_size(samples, dim, head.centers, device.kind)
    if passes == 2 and _overlaps_sums(setup):
        classes = overlapped_chunk_size(classes, setup.visited_rows // head.centers)
    return min(classes * head.centers, setup.visited_rows)


def _overlaps_sums(setup: PlanConfig) -> bool:
    """Return whether a chunk's gradient is summed over replicas while the next one is computed."""
    return setup.replicas > 1 and setup.placement == "device"


def _one_row(config: Config) -> ShardedHead:
    single = replace(config, head=replace(config.head, centers=1, placement="device"))
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
    return {
        "head, first pass": backbone.forward + waiting + _block(setup, device, first, passes=1) + staged["first"],
        "backbone, backward pass": backbone.backward + waiting + staged["between"],
        "head, second pass": backbone.gradients + waiting + _block(setup, device, second, passes=2) + staged["second"],
        "backbone, update": backbone.gradients + backbone.update + staged["between"],
        "head, first norms": backbone.forward + waiting + widened,
    }


def _waiting(setup: PlanConfig) -> int:
    """What pass 2 needs of each micro-batch: its embeddings, gathered, and the numbers of sampled classes."""
    embeddings = setup.group_batch * setup.config.embedding_dim * setup.weight_width
    sampled = 8 * setup.visited_rows if setup.config.head.sample_rate < 1 else 0
    return setup.micro_batches * (embeddings + sampled)


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


def fused_block(setup: PlanConfig, rows: int, *, passes: int) -> int:
    """The scratch of Triton's passes: pass 1's sums by parts of the classes; gradients on their way to the update."""
    samples, dim = setup.group_batch, setup.config.embedding_dim
    dtype = torch.float32 if setup.weight_width == 4 else torch.bfloat16
    first, second = (
        shipped_tile(which, (9, 0), _HOPPER_SHARED, dtype, dim, _precision(setup)) for which in ("first", "second")
    )
    both = samples, samples * setup.micro_batches
    scratch = scratch_bytes(both, setup.visited_rows, dim, (first, second), _PROCESSORS)
    if passes == 1:
        return scratch[0]
    stored = [_gradients(setup, rows)] if stores_gradient(setup) else [scratch[1]]
    return max([*stored, *([_NORM_COPIES * rows * dim * 4] if clips_head(setup) else [])])


def _gradients(setup: PlanConfig, rows: int) -> int:
    """Float32 gradients of chunks of rows: the one that is made, the one that is updated, one that replicas sum."""
    at_once = min((3 if _overlaps_sums(setup) else 2) * rows, setup.visited_rows)
    return at_once * setup.config.embedding_dim * 4


def _block(setup: PlanConfig, device: Device, rows: int, *, passes: int) -> int:
    """A chunk's scratch: its (rows, B) block in float32, rounded for the product; its rows' gradient and copies."""
    if has_fused_passes(setup, device):
        return fused_block(setup, rows, passes=passes)
    samples = setup.group_batch * (setup.micro_batches if passes == 2 else 1)
    width = setup.weight_width
    rounded = width if width < 4 else 0
    block = rows * samples * (4 + rounded)
    wide_rows = rows * setup.config.embedding_dim * 4
    gathered = rows * setup.config.embedding_dim * width if setup.config.head.sample_rate < 1 else 0
    if passes == 1:
        return block + gathered + 2 * _sums(setup)
    if clips_head(setup):
        return block + gathered + max(_NORM_COPIES * wide_rows, _gradients(setup, rows))
    return block + gathered + max(_gradients(setup, rows), 0 if device.has_kernels else _PLAIN_COPIES * wide_rows)


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
        return dict.fromkeys(("first", "between", "second"), (_WRITES + 2) * setup.visited_rows * whole)
    rows = chunk_rows(setup, device, setup.group_batch * setup.micro_batches)
    return {
        "first": rows * (_WRITES * whole + 2 * read),
        "between": rows * _WRITES * whole,
        "second": rows * (_WRITES + 2) * whole,
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
