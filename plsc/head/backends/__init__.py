"""The implementations of the head's passes and updates, one of which is chosen when a head is made."""

import os
from dataclasses import dataclass, replace

import torch

from plsc.errors import UsageError, first_line
from plsc.head.backends.cpu_backend import CpuBackend
from plsc.head.backends.products import Fp32Precision
from plsc.head.backends.self_check import Shard, why_no_passes, why_no_update
from plsc.head.backends.torch_backend import TorchBackend, Updater, is_bounded
from plsc.head.backends.triton_backend import TritonBackend, is_interpreted, runs_on
from plsc.head.backends.triton_shape import COMPUTED, RowKind, Threshold, measured, threshold
from plsc.head.backends.triton_stored import WIDE_SAMPLES
from plsc.head.backends.triton_tiles import why_no_tile, why_no_tile_on
from plsc.head.update_rules import UpdateKind
from plsc.losses.margins import Margin
from plsc.native import head_kernels
from plsc.parallel.collectives import broadcast_object
from plsc.parallel.mesh import Mesh
from plsc.progress import warn

BACKENDS = ("torch", "cpu", "triton")
_KERNEL_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class HeadShape:
    """The properties of a head that the choice of a backend depends on.

    Attributes:
        device: that computes.
        dtype: of the weights.
        dim: D.
        centers: per class.
        margin: of the softmax.
        fp32_precision: of the products over a float32 table.
        num_classes: of all ranks, which bounds the logits that kernels take; where it is not given, a billion.
        filters_negatives: whether rows are compared with rows, to leave some negatives out.
        exponentials_memory: bytes in which pass 1 may keep a batch's exponentials.
    """

    device: torch.device
    dtype: torch.dtype
    dim: int
    centers: int
    margin: Margin
    fp32_precision: Fp32Precision = "ieee"
    num_classes: int = 10**9
    filters_negatives: bool = False
    exponentials_memory: int = 0

    @property
    def products(self) -> str:
        """The precision of the products, as a part of a reason, where it is a choice: of float32 tables on GPUs."""
        chosen = self.dtype == torch.float32 and (self.device.type == "cuda" or self.fp32_precision != "ieee")
        return f"; float32 products: {self.fp32_precision}" if chosen else ""

    @property
    def row_kind(self) -> RowKind:
        """What the shape of the passes depends on."""
        return RowKind(self.dtype, self.dim, self.centers, self.fp32_precision)

    @property
    def unusual_logits(self) -> str | None:
        """Why no kernel can take the passes: their logits are s·cos but for the targets', in float32."""
        if self.margin.changes_negatives:
            return f"{type(self.margin).__name__} changes the negatives"
        if self.filters_negatives:
            return "what filters negatives compares rows with rows"
        return None if is_bounded(self.margin, self.num_classes) else "logits that need a running maximum"


def choose_backend(shape: HeadShape, requested: str | None = None) -> TorchBackend:
    """Choose the backend of a head, for its whole life.

    Kernels whose passes disagree with float64 on a small shard are not used (:mod:`plsc.head.backends.self_check`):
    PyTorch computes then, and a warning says so.

    Args:
        shape: of the head.
        requested: "torch", "cpu" or "triton"; else the environment's ``PLSC_HEAD_BACKEND``; else the fastest.

    Raises:
        UsageError: the requested one does not exist, or cannot run such a head here; nothing here multiplies in
            ``shape.fp32_precision``; or ``PLSC_CPU`` is wrong.
    """
    backend = select_backend(shape, requested)
    if not backend.takes_passes or _is_too_slow_to_check(backend):
        return backend
    shard = Shard(shape.device, shape.dtype, shape.dim, fp32_precision=shape.fp32_precision)
    problem = why_no_passes(backend, shard)
    if problem is None:
        _check_stored(backend, shard)
        return backend
    reason = f"the passes of the {backend.name} backend disagree with float64 here: {problem}"
    warn("plsc", f"KERNELS SWITCHED OFF: {reason}; PyTorch computes instead (slower); run plsc doctor")
    return fall_back(shape, reason)


def _check_stored(backend: TorchBackend, shard: Shard) -> None:
    """Let passes whose kernels disagree with float64 where weights are stored store none."""
    if not isinstance(backend, TritonBackend) or backend.stored_from is None:
        return
    problem = why_no_passes(backend.in_shape(stored=True), shard)
    if problem is not None:
        warn("plsc", f"KERNELS SWITCHED OFF: passes with stored weights disagree with float64 here: {problem}")
        backend.stored_from = None


def agree_on_shape(backend: TorchBackend, shape: HeadShape, mesh: Mesh) -> None:
    """Measure from how many samples on ``backend`` is to store logits, where that was computed only. Every rank calls.

    All ranks take what the first one finds.
    """
    if shape.device.type != "cuda":
        return
    found = backend.stored_from if isinstance(backend, TritonBackend) else None
    if mesh.is_main and isinstance(backend, TritonBackend) and found is not None and found.source == COMPUTED:
        stored = backend.in_shape(stored=True), backend.in_shape(stored=True, is_wide=True)
        try:
            found = measured(shape.device, shape.row_kind, backend.in_shape(stored=False), stored)
        except Exception as error:  # of memory, a compiler or a driver: what is computed will do
            why = f"{type(error).__name__}: {first_line(error)}"
            warn("plsc", f"the shapes of the head's passes could not be timed ({why}): {found}")
        torch.cuda.empty_cache()  # in front of a table that may fill the device
    found = broadcast_object(found, mesh)
    if isinstance(backend, TritonBackend) and backend.stored_from is not None and found is not None:
        backend.stored_from = found
        if found.is_wide:
            _check_wide(backend, found, shape)


def _check_wide(backend: TritonBackend, found: Threshold, shape: HeadShape) -> None:
    """Let passes whose kernels disagree with float64 in wide blocks take the others."""
    shard = Shard(shape.device, shape.dtype, shape.dim, batch=WIDE_SAMPLES)
    problem = why_no_passes(backend.in_shape(stored=True, is_wide=True), shard)
    if problem is not None:
        warn("plsc", f"KERNELS SWITCHED OFF: wide blocks of the passes disagree with float64 here: {problem}")
        backend.stored_from = replace(found, is_wide=False)


def select_backend(shape: HeadShape, requested: str | None = None) -> TorchBackend:
    """:func:`choose_backend` without a look at what the kernels compute."""
    backend = _selected(shape, requested)
    backend.exponentials_memory = shape.exponentials_memory
    return backend


def _selected(shape: HeadShape, requested: str | None) -> TorchBackend:
    requested = requested or os.environ.get("PLSC_HEAD_BACKEND") or None
    if requested not in (None, *BACKENDS):
        raise UsageError(f"head backend {requested!r} does not exist: give {', '.join(BACKENDS)}")
    if requested == "torch":
        return _torch(shape, "requested")
    missing = {"triton": _why_not_triton(shape), "cpu": _why_not_cpu(shape)}
    for name, make in (("triton", _triton), ("cpu", _cpu)):
        if requested in (None, name) and missing[name] is None:
            return make(shape)
    if requested is not None:
        raise UsageError(f"head backend {requested!r} cannot run here, {missing[requested]}: unset it for one that can")
    return _torch(shape, str(missing["cpu" if shape.device.type == "cpu" else "triton"]))


def _why_not_triton(shape: HeadShape) -> str | None:
    if shape.dtype not in _KERNEL_DTYPES:
        return f"no kernels for {shape.dtype}"
    return None if runs_on(shape.device) else f"Triton does not run on {shape.device}"


def _why_not_cpu(shape: HeadShape) -> str | None:
    if shape.device.type != "cpu":
        return f"the head computes on {shape.device}"
    if shape.dtype not in _KERNEL_DTYPES:
        return f"no kernels for {shape.dtype}"
    if os.environ.get("PLSC_NATIVE") == "0":
        return "PLSC_NATIVE=0"
    return None if head_kernels.is_compiled() else "no compiler"


def _check_torchs_products(shape: HeadShape, reason: str) -> None:
    """UsageError unless PyTorch multiplies float32 tables in ``shape.fp32_precision``."""
    precision = shape.fp32_precision
    if precision == "ieee" or shape.dtype != torch.float32 or shape.device.type == "meta":
        return
    if shape.device.type != "cuda":
        raise UsageError(f'fp32_precision "{precision}" is for GPUs, and this head computes on a CPU: give "ieee"')
    if precision != "tf32":
        raise UsageError(f'fp32_precision "{precision}" needs Triton\'s passes ({reason}): give "tf32" or "ieee"')


def _torch(shape: HeadShape, reason: str) -> TorchBackend:
    _check_torchs_products(shape, reason)
    return TorchBackend(reason + shape.products, shape.fp32_precision)


def why_not_fused(shape: HeadShape) -> str | None:
    """The reason why Triton's passes over such a head's rows have to store their logits; None: they need not."""
    missing = why_no_tile(shape.dim, shape.centers, shape.dtype)
    missing = missing or why_no_tile_on(shape.device, shape.dim, shape.dtype)
    if shape.dtype == torch.float32 and shape.device.type == "cuda":
        if shape.fp32_precision == "ieee":
            return missing or "matrix units do not multiply float32 exactly"
        if shape.fp32_precision == "tf32":
            return missing or "the kernels would compute TF32 scores two to four times"
    return missing


def why_no_triton_passes(shape: HeadShape) -> str | None:
    """The reason why PyTorch takes the passes of such a head on a GPU; None: Triton's kernels do, in either shape."""
    return shape.unusual_logits or (None if shape.row_kind.can_be_stored else why_not_fused(shape))


def _triton(shape: HeadShape) -> TritonBackend:
    not_fused = why_not_fused(shape)
    stored_from = threshold(shape.device, shape.row_kind, not_fused)
    unusual = shape.unusual_logits or (not_fused if stored_from is None else None)
    reason = f"on {shape.device}" + ("" if unusual is None else f"; passes by torch: {unusual}")
    if unusual is not None:
        _check_torchs_products(shape, unusual)
    return TritonBackend(
        reason + shape.products,
        dim=shape.dim,
        with_passes=unusual is None,
        fp32_precision=shape.fp32_precision,
        stored_from=stored_from if unusual is None else None,
    )


def _cpu(shape: HeadShape) -> CpuBackend:
    _check_torchs_products(shape, "")
    several = "several centres to a class" if shape.centers > 1 else None
    missing = several or shape.unusual_logits or head_kernels.why_no_passes(shape.dtype, shape.dim)
    if missing is not None:
        return CpuBackend(f"compiled SGD; passes by torch: {missing}", with_passes=False)
    least = head_kernels.least_batch(shape.dtype)
    smaller = f"; passes of fewer than {least} samples by torch" if least > 1 else ""
    return CpuBackend(f"compiled passes ({head_kernels.products(shape.dtype)}) and SGD{smaller}", with_passes=True)


def fall_back(shape: HeadShape, reason: str) -> TorchBackend:
    """PyTorch's backend in place of kernels that are not to be used. It lacks "bf16x3", and is more exact instead."""
    known = replace(shape, fp32_precision="tf32" if shape.fp32_precision == "tf32" else "ieee")
    backend = TorchBackend(reason + known.products, known.fp32_precision)
    backend.exponentials_memory = shape.exponentials_memory
    return backend


def choose_updater(backend: TorchBackend, kind: UpdateKind, shard: Shard) -> Updater:
    """Choose how an optimizer updates a head's rows: by a kernel of ``backend`` if it agrees with float64, or by torch.

    Args:
        backend: of the head; its reason says so where its kernel is not used.
        kind: of the updates.
        shard: a small one such as the head's.
    """
    problem = None if _is_too_slow_to_check(backend) else why_no_update(backend, kind, shard)
    if problem is None:
        return backend.updater(kind)
    name = type(kind.rule).__name__
    reason = f"the {name} kernel of the {backend.name} backend disagrees with float64 here: {problem}"
    warn("plsc", f"KERNEL SWITCHED OFF: {reason}; PyTorch updates instead (slower); run plsc doctor")
    return backend.without_kernel(reason)


def _is_too_slow_to_check(backend: TorchBackend) -> bool:
    return backend.name == "triton" and is_interpreted()  # the interpreter takes seconds, and is there for tests
