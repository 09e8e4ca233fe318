"""Counts what a training step does to a device: launches, bytes, host waits, collectives, memory; and what is wrong.

All of it is seen where PyTorch dispatches an operation. Places are ``file:function`` of the innermost frame of the
project, so that they stay when lines move.
"""

import functools
import sys
import traceback
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any, ClassVar, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import plsc
from gpu_trace.races import Races, written_arguments

ROOT = Path(plsc.__file__).parents[1]
BACKWARD = "backbone, backward"  # no frame of the project is on the stack of the autograd engine's threads

# Tensors made of tensors: what DTensor and functional collectives return.
_WRAPPERS = (DTensor, AsyncCollectiveTensor)
_COLLECTIVES = ("c10d", "_c10d_functional")
_NCCL_NAMES = {
    "_c10d_functional::all_gather_into_tensor": "allgather",
    "_c10d_functional::reduce_scatter_tensor": "reduce_scatter",
    "_c10d_functional::all_reduce": "allreduce",
}
_NO_KERNEL = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias", "view",
    "_unsafe_view", "_reshape_alias", "lift_fresh", "set_", "resize_", "record_stream",
}  # fmt: skip
# Their results have a size that the host must learn from the device.
_SIZED_BY_VALUES = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive"}
_GATHERS = {"index", "index_select", "gather", "embedding"}
_SCATTERS = {"index_put_", "index_put", "_index_put_impl_", "index_copy_", "index_add_", "scatter_", "scatter_add_"}


@functools.lru_cache(maxsize=4096)
def _label(code: CodeType) -> str | None:
    """``file:function`` of the project's code, None for other code."""
    path = Path(code.co_filename)
    if not path.is_relative_to(ROOT) or "site-packages" in path.parts:
        return None
    relative = path.relative_to(ROOT)
    if relative.parts[0] == "tests":
        return None
    return f"{relative}:{code.co_qualname.split('.<locals>')[0]}"


def place(beyond: str = "") -> str:
    """The innermost function of the project on the stack, outside of the file ``beyond``."""
    frame = sys._getframe(1)
    while frame is not None:
        label = _label(frame.f_code)
        if label is not None and not (beyond and label.startswith(beyond)):
            return label
        frame = frame.f_back  # type: ignore[assignment]
    return BACKWARD


def place_of(error: BaseException) -> str:
    """The innermost function of the project that an error came through."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return next(filter(None, (_label(frame.f_code) for frame in reversed(frames))), BACKWARD)


class Collective(NamedTuple):
    """A collective over the ranks range(``first``, ``stop``, ``step``), of ``size`` bytes, in and out.

    A send or recv is one of two ranks. Those that are issued together have a number of their ``batch``, others 0.
    """

    first: int
    stop: int
    step: int
    name: str
    dtypes: str
    size: int
    place: str
    batch: int = 0

    @property
    def ranks(self) -> range:
        """The ranks that have to call it."""
        return range(self.first, self.stop, self.step)

    @property
    def is_between_two(self) -> bool:
        """True for a send or recv."""
        return self.name in ("send", "recv")

    @property
    def kind(self) -> tuple[object, ...]:
        """What its ranks have to agree on."""
        return self[:6]

    def __str__(self) -> str:
        return f"{self.name} of {self.dtypes} over {len(self.ranks)} ranks"


@dataclass
class Counts:
    """What one traced step did, as seen by one rank. Everything but ``collectives`` is keyed by place or kernel."""

    waits: Counter[str] = field(default_factory=Counter)
    copies: Counter[str] = field(default_factory=Counter)
    launches: Counter[str] = field(default_factory=Counter)
    triton: Counter[str] = field(default_factory=Counter)
    moved: Counter[str] = field(default_factory=Counter)
    collectives: list[Collective] = field(default_factory=list)
    problems: Counter[str] = field(default_factory=Counter)
    peak: int = 0
    peak_place: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dict(vars(self))


class Tracer(TorchDispatchMode):
    """Records every operation on fake CUDA tensors, under a FakeTensorMode that is entered before it.

    Fake tensors have no values. Where the host asks for one of the device's, a number is 0, a truth False, and of a
    tensor with a row per rank the first column is the ranks' batch sizes. A number of the host (AdamW's steps) is 1. A
    selection by a mask over samples keeps ``samples_kept`` of them, one over anything larger keeps all; of rows,
    those in which two lists meet (nonzero) are ``share_kept``.

    Args:
        sizes: the ranks' batch sizes.
        samples_kept: samples of the global batch that belong to a shard.
        share_kept: the share of the classes that a batch visits, and so of the rows that it shares with another.
    """

    def __init__(self, sizes: list[int], samples_kept: int, share_kept: float = 1.0) -> None:
        super().__init__()
        self.sizes, self.samples_kept, self.share_kept = sizes, samples_kept, share_kept
        self.counts = Counts()
        self.live = 0
        self.in_background = False
        self.batch, self.batches = 0, 0
        self.step, self.is_last_step = 0, False
        self.races = Races(self._raced)
        self._sizes: weakref.WeakKeyDictionary[torch.UntypedStorage, list[int]] = weakref.WeakKeyDictionary()  # on it
        self._tables: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()  # in host memory
        self._pinned: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def begin_step(self, *, last: bool) -> None:
        """Forget what was counted so far; memory in use stays, and the peak and the problems with it."""
        self.is_last_step = last
        before = self.counts
        self.step += 1
        self.counts = Counts(problems=before.problems, peak=before.peak, peak_place=before.peak_place)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, _WRAPPERS) for kind in types):
            return NotImplemented  # what they hold passes here next
        kwargs = kwargs or {}
        name = func._overloadpacket._qualified_op_name.removeprefix("aten::")
        if func.namespace == "prim":
            return func(*args, **kwargs)
        self._check_devices(func, name, [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)])
        answer = self._answer(name, args)
        out = func(*args, **kwargs) if answer is None else answer[0]
        self._record(func, name, args, kwargs, out)
        return out

    def _check_devices(self, func: Any, name: str, taken: list[Tensor]) -> None:
        """A kernel reads no tensor of the host but a number. Noted first: fake tensors refuse most mixtures at once."""
        devices = sorted({tensor.device.type for tensor in taken if tensor.dim() > 0})
        if len(devices) > 1 and name not in ("copy_", "_to_copy", "set_") and func.namespace not in _COLLECTIVES:
            self.problem(f"{name} of tensors on {' and '.join(devices)}")

    def problem(self, text: str) -> None:
        """Note what must not be, and where."""
        self.counts.problems[f"{place()}: {text}"] += 1

    def _raced(self, line: str) -> None:
        self.counts.problems[line] += 1

    # What depends on values.

    def _answer(self, name: str, args: tuple[Any, ...]) -> tuple[Any] | None:
        """The result of an operation that fake tensors cannot compute, in a tuple; None for all others."""
        if name == "_local_scalar_dense":
            self._wait_for(args[0], "item")
            return (_zero(args[0].dtype) if args[0].device.type == "cuda" else 1,)
        if name == "equal":
            self._wait_for(args[0], "equal")
            return (True,)
        if name in _SIZED_BY_VALUES:
            self._wait_for(args[0], name.strip("_2"))
            return (self._selected(name, args),)
        if name == "index" and any(isinstance(i, Tensor) and i.dtype == torch.bool for i in args[1]):
            self._wait_for(args[0], "index by a mask")
            mask = next(i for i in args[1] if i is not None)
            return (args[0].new_empty((self._kept(mask), *args[0].shape[mask.dim() :])),)
        return None

    def _selected(self, name: str, args: tuple[Any, ...]) -> Any:
        values = args[0]
        if name == "nonzero":
            return values.new_empty((self._kept(values, self.share_kept), values.dim()), dtype=torch.int64)
        if name == "masked_select":
            return values.new_empty(self._kept(args[1]))
        count = values.new_empty(0, dtype=torch.int64)
        return values.new_empty(values.numel()), count, count.clone()

    def _kept(self, mask: Tensor, share: float = 1.0) -> int:
        if mask.numel() <= sum(self.sizes):
            return min(self.samples_kept, mask.numel())
        return round(share * mask.numel())

    def tolist(self, tensor: Tensor) -> Any:
        """The values of a tensor of which the host asks for all."""
        self._wait_for(tensor, "tolist")
        rows = tensor.shape[0] if tensor.dim() else -1
        if rows == len(self.sizes) and tensor.dtype == torch.int64 and tensor.dim() <= 2:
            rest = [0] * (tensor[0].numel() - 1) if tensor.dim() == 2 else []
            return [[size, *rest] for size in self.sizes] if tensor.dim() == 2 else list(self.sizes)
        return _zeros(tuple(tensor.shape), _zero(tensor.dtype))

    def wait(self, what: str) -> None:
        """Count a place where the host waits."""
        target = self.counts.copies if self.in_background else self.counts.waits
        target[f"{place()} {what}" + (", by a transfer thread" if self.in_background else "")] += 1

    def _wait_for(self, tensor: Tensor, what: str) -> None:
        if tensor.device.type == "cuda":
            self.wait(what)
            self.races.wait_for(_current_stream())
        elif isinstance(tensor, FakeTensor):
            self.races.use(None, [tensor.untyped_storage()], [], place())

    # What an operation does.

    def _record(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        made = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        taken = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        for tensor in made:
            self._enter(tensor)
        if func.namespace in _COLLECTIVES:
            if not name.startswith("_c10d_functional::wait_tensor"):
                self._collective(name, args, [*taken, *made] if func.namespace == "_c10d_functional" else taken)
            return
        if name == "_pin_memory" or kwargs.get("pin_memory"):
            self._pinned.update(tensor.untyped_storage() for tensor in made)
        if name == "lift_fresh" and made and made[0].device.type == "cuda" and place() != BACKWARD:
            self.wait("tensor of a number")
        devices = {t.device.type for t in (*taken, *made)}
        if func.is_view and not all(isinstance(tensor, FakeTensor) for tensor in taken):
            self._tables.update(tensor.untyped_storage() for tensor in made)
        if func.is_view or name in _NO_KERNEL:
            return
        where = place()
        self._use(taken, [*made, *tree_leaves(written_arguments(func, args, kwargs))], where, "cuda" in devices)
        if name in ("_to_copy", "copy_") and len(devices) > 1:
            self._copy(name, args, kwargs, taken, made)
        if "cuda" in devices:
            self.counts.launches[where] += 1
            read = [tensor for tensor in taken if tensor is not kwargs.get("out")]
            self.counts.moved[f"{where} {name}"] += _bytes(name, read, made)

    def _use(self, taken: list[Tensor], written: list[Any], where: str, on_device: bool) -> None:
        """Note which storages an operation reads and writes.

        But for tables in host memory, which are real: rows are read while others, or older ones, are written, and what
        is on its way is forwarded (:mod:`plsc.head.staging`).
        """
        fake = {id(t): t.untyped_storage() for t in (*taken, *written) if isinstance(t, FakeTensor)}
        kept = {key: storage for key, storage in fake.items() if storage not in self._tables}
        stored = {key for key in map(id, written) if key in kept}
        stream = _current_stream() if on_device else None
        read = [storage for key, storage in kept.items() if key not in stored]
        self.races.use(stream, read, [kept[key] for key in stored], where)

    def launched(self, tensors: list[Tensor]) -> None:
        """Note a launch of a kernel that may write each of its operands."""
        self._use([], tensors, place(), on_device=True)

    def _copy(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], taken: list[Tensor], made: list[Tensor]
    ) -> None:
        """A copy between host and device: whether the host waits for it."""
        target, source = (args[0], args[1]) if name == "copy_" else (made[0], taken[0])
        asked = bool(args[2] if name == "copy_" and len(args) > 2 else kwargs.get("non_blocking"))
        upwards = source.device.type == "cpu"
        # From pageable memory the driver copies by itself first, without waiting for the device; to it, it waits.
        asynchronous = asked and (upwards or name == "_to_copy" or self._is_pinned(target))
        kind = f"{'H2D' if upwards else 'D2H'} copy"
        if asynchronous:
            pinned = ", pageable" if upwards and not self._is_pinned(source) else ""
            self.counts.copies[f"{place()} {kind}{pinned}"] += source.nbytes
        else:
            self.wait(f"blocking {kind}")
            self.races.wait_for(_current_stream())

    def _collective(self, name: str, args: tuple[Any, ...], taken: list[Tensor]) -> None:
        name = _NCCL_NAMES.get(name, name.removeprefix("c10d::").strip("_").removesuffix("_base"))
        group = next(filter(None, map(_group_of, reversed(args))), None)
        ranks = dist.get_process_group_ranks(group)
        if name in ("send", "recv"):
            ranks = sorted([dist.get_rank(), ranks[args[2]]])
        kind = self.backends.get(group.group_name, "nccl") if group is not None else "nccl"
        wanted = "cpu" if kind == "gloo" else "cuda"
        for tensor in taken:
            if tensor.device.type != wanted:
                self.problem(f"{name} of a tensor on {tensor.device.type} over {kind}")
            if not tensor.is_contiguous():
                self.problem(f"{name} of a tensor that is not contiguous")
        if kind == "gloo":
            self.wait(f"{name} between hosts")
        dtypes = "+".join(sorted({str(t.dtype).removeprefix("torch.") for t in taken}))
        size = sum(tensor.nbytes for tensor in taken)
        step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
        caller = place(beyond="plsc/parallel/collectives.py")
        where = ranks[0], ranks[-1] + 1, step
        self.counts.collectives.append(Collective(*where, name, dtypes, size, caller, self.batch))

    backends: ClassVar[dict[str, str]] = {}  # of process groups by name, where it is not NCCL

    # Memory.

    def _is_pinned(self, tensor: Tensor) -> bool:
        """Fake tensors have no address that the driver could be asked about."""
        if isinstance(tensor, FakeTensor):
            return tensor.untyped_storage() in self._pinned
        return tensor.is_pinned()

    def _enter(self, tensor: Tensor) -> None:
        if tensor.device.type != "cuda":
            return
        storage = tensor.untyped_storage()
        if storage not in self._sizes:
            size = self._sizes[storage] = [0]
            weakref.finalize(storage, self._resize, size, 0).atexit = False
            self._resize(size, storage.nbytes())

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Note that a storage has another size: so FSDP2 frees what it has gathered, and takes it again."""
        if storage in self._sizes:
            self._resize(self._sizes[storage], storage.nbytes())

    def _resize(self, size: list[int], to: int) -> None:
        self.live += to - size[0]
        size[0] = to
        if self.live > self.counts.peak:
            self.counts.peak, self.counts.peak_place = self.live, place()


def _group_of(argument: Any) -> ProcessGroup | None:
    if isinstance(argument, str):
        group: ProcessGroup = _resolve_process_group(argument)
        return group
    is_group = isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type())
    return ProcessGroup.unbox(argument) if is_group else None


def _current_stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def _zero(dtype: torch.dtype) -> Any:
    return False if dtype == torch.bool else 0.0 if dtype.is_floating_point else 0


def _zeros(shape: tuple[int, ...], value: Any) -> Any:
    return [_zeros(shape[1:], value) for _ in range(shape[0])] if shape else value


def _own_bytes(tensor: Tensor) -> int:
    """Bytes that a tensor spans: an expanded one has no more than its storage."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def _bytes(name: str, taken: list[Tensor], made: list[Tensor]) -> int:
    """Bytes of device memory that an operation has to read and write, each operand once."""
    if name in _GATHERS:
        return 2 * sum(map(_own_bytes, made)) + sum(map(_own_bytes, taken[1:]))
    if name in _SCATTERS:
        return sum(map(_own_bytes, taken[1:])) + 2 * _own_bytes(taken[-1])
    if name in ("fill_", "zero_", "copy_", "normal_", "uniform_"):
        taken = taken[1:]
    return sum(_own_bytes(tensor) for tensor in (*taken, *made) if tensor.device.type == "cuda")


@contextmanager
def traced(tracer: Tracer) -> Iterator[None]:
    """Trace within; synchronisations that are no operations are counted too."""

    races = tracer.races
    record, wait = torch.cuda.Event.record, torch.cuda.Event.wait

    def record_event(event: Any, stream: Any = None) -> None:
        event.step = tracer.step
        event.knowledge = races.knowledge(_current_stream() if stream is None else stream.cuda_stream)
        record(event, *([] if stream is None else [stream]))

    def wait_event(event: Any, stream: Any = None) -> None:
        races.learn(event.knowledge, _current_stream() if stream is None else stream.cuda_stream)
        wait(event, *([] if stream is None else [stream]))

    def synchronize_event(event: Any) -> None:
        now = getattr(event, "step", tracer.step) == tracer.step
        tracer.wait("synchronize of an event" + ("" if now else " of the step before"))
        races.learn(event.knowledge)

    def synchronize_stream(stream: Any) -> None:
        tracer.wait("synchronize of a stream")
        races.wait_for(stream.cuda_stream)

    def synchronize_device(*args: Any) -> None:
        tracer.wait("synchronize")
        races.wait_for_all()

    def scale(scaler: torch.amp.GradScaler) -> float:
        if scaler.is_enabled():
            tracer.wait("scale")
        return 65536.0

    batch_isend_irecv = dist.batch_isend_irecv

    def exchange_batch(operations: Any) -> Any:
        tracer.batches += 1
        tracer.batch = tracer.batches
        try:
            return batch_isend_irecv(operations)
        finally:
            tracer.batch = 0

    resize = torch.UntypedStorage.resize_

    def resize_storage(storage: torch.UntypedStorage, size: int) -> None:
        resize(storage, size)
        tracer.resized(storage)

    with (
        patch.object(torch.UntypedStorage, "resize_", resize_storage),
        patch.object(dist, "batch_isend_irecv", exchange_batch),
        patch.object(FakeTensor, "tolist", lambda tensor: tracer.tolist(tensor)),
        patch.object(torch.cuda, "synchronize", synchronize_device),
        patch.object(torch.cuda.Stream, "synchronize", synchronize_stream),
        patch.object(torch.cuda.Event, "record", record_event),
        patch.object(torch.cuda.Event, "wait", wait_event),
        patch.object(torch.cuda.Event, "synchronize", synchronize_event),
        patch.object(torch.amp.GradScaler, "get_scale", scale),
        tracer,
    ):
        yield
