"""One rank of a world that does not exist: its process groups, and the components of its run on fake tensors."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.parallel.distributed as ddp
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.optim import optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import _disable_current_modes

from gpu_trace.tracer import Tracer
from plsc.config import Config, class_tables
from plsc.data.dataset import ImageDataset
from plsc.features.tables.joined import JoinedDataset
from plsc.head import class_table
from plsc.head.class_table import ClassRows
from plsc.head.host_memory import HostMemory
from plsc.parallel.mesh import Mesh, device_mesh, with_head_groups
from plsc.parallel.strategies import ddp as strategy
from plsc.parallel.strategies.ddp import data_parallel
from plsc.train import components
from plsc.train.components import TrainComponents

GPUS_PER_NODE = 8


class BlankImages(ImageDataset):
    """A data set of as many classes as one likes, whose images are never read."""

    def __init__(self, classes: int, images: int, size: int) -> None:
        super().__init__("blank", np.arange(images) % classes, range(classes), size)  # type: ignore[arg-type]

    def image(self, index: int) -> Tensor:
        """A black image."""
        return torch.zeros(3, self.image_size or 1, self.image_size or 1, dtype=torch.uint8)

    def key(self, index: int) -> str:
        """Its number."""
        return str(index)


@contextmanager
def fake_rank(rank: int, ranks: int, head_ranks: int) -> Iterator[Mesh]:
    """Be ``rank`` of ``ranks`` GPUs, whose collectives return at once and leave what they were given."""
    device = torch.device("cuda", 0)
    if ranks == 1:
        yield Mesh(0, 1, 0, device)
        return
    new_group = dist.new_group

    def fake_group(members: Sequence[int] | None = None, *args: Any, **options: Any) -> Any:
        wanted = options.pop("backend", None)
        options.pop("timeout", None)
        group = new_group(members, backend="fake", **options)
        if wanted == "gloo" and isinstance(group, dist.ProcessGroup):
            Tracer.backends[group.group_name] = "gloo"
        return group

    _forget_meshes(device)
    with ExitStack() as patches:
        patches.enter_context(patch.object(dist, "new_group", fake_group))
        patches.enter_context(patch.object(dist, "all_gather_object", _gather_copies))
        patches.enter_context(patch.object(dist, "broadcast_object_list", lambda *args, **options: None))
        dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
        try:
            mesh = Mesh(rank, ranks, rank % GPUS_PER_NODE, device, dist.group.WORLD)
            yield with_head_groups(mesh, head_ranks)
        finally:
            dist.destroy_process_group()
            Tracer.backends.clear()


def _forget_meshes(device: torch.device) -> None:
    """Clear what DTensor has cached by mesh, on this thread and the autograd engine's: all ranks' meshes are equal."""
    _clear_sharding_prop_cache()
    number = torch.zeros((), device=device, requires_grad=True)
    number.register_hook(lambda gradient: _clear_sharding_prop_cache())
    (2 * number).backward()


def _gather_copies(everyone: list[Any], value: Any, *args: Any, **options: Any) -> None:
    everyone[:] = [value] * len(everyone)


@contextmanager
def fake_components() -> Iterator[None]:
    """Let a run's components be built, and step, where tensors have no memory.

    Left out, because it needs values of other ranks or takes too long: DDP's check of its parameters, its all-reduce
    hook's future and the reordering of its buckets; the first values of the table and of linear layers, which are drawn
    until they lie within bounds; all but the first of the table's first norms.
    ``Module._apply`` and deepcopy look at a tensor's memory. torch's optimizers take fake tensors for real ones, and
    so their foreach path. The threads that copy rows of a host table run when they are waited for: as late as they
    can, so that as many copies are alive as ever can be.
    """
    with ExitStack() as patches:
        for target, name, substitute in (
            (ddp, "_verify_param_shape_across_processes", lambda *args, **options: None),
            (ddp, "_sync_module_states", lambda *args, **options: None),
            (nn.Module, "_apply", _apply),
            (nn.init, "trunc_normal_", lambda tensor, *args, **options: tensor),
            (strategy, "data_parallel", _data_parallel),
            (class_table, "renew_norms", _renew_first_norms),
            (_foreach_utils, "_foreach_supported_types", [*_foreach_utils._foreach_supported_types, FakeTensor]),
            (optimizer, "_foreach_supported_types", [*optimizer._foreach_supported_types, FakeTensor]),
        ):
            patches.enter_context(patch.object(target, name, substitute))
        for module in ("plsc.head.class_table", "plsc.head.host_table"):
            patches.enter_context(patch(f"{module}.normal_rows", lambda *args, **options: iter(())))
        patches.enter_context(patch("plsc.head.staging.ThreadPoolExecutor", LateExecutor))
        # the ranks of a DeviceMesh are numbers in tensors
        for name in ("__init__", "__getitem__"):
            patches.enter_context(patch.object(DeviceMesh, name, _really(getattr(DeviceMesh, name))))
        patches.enter_context(patch("plsc.parallel.strategies.layout.device_mesh", _really(device_mesh)))
        # DTensor finds out an operation's shapes on whole tensors without data, which no device ever holds
        shapes_of = ShardingPropagator._propagate_tensor_meta_non_cached
        patches.enter_context(patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", _really(shapes_of)))
        patches.enter_context(patch.object(FakeTensor, "__deepcopy__", _deepcopy, create=True))
        for name in ("table", "numbers"):
            patches.enter_context(patch.object(HostMemory, name, _really(getattr(HostMemory, name))))
        yield


def _deepcopy(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    copied = tensor.detach().clone()
    memo[id(tensor)] = nn.Parameter(copied, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copied
    return memo[id(tensor)]


def _really(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` outside of the trace: host memory is real, and pinned under its address."""

    def call(*args: Any, **options: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **options)

    return call


def _renew_first_norms(table: ClassRows, index: slice | Tensor) -> None:
    """The norms of a new table are taken block by block, all alike: one shows what each does."""
    if not isinstance(index, slice) or not index.start:
        _RENEW_NORMS(table, index)


_RENEW_NORMS = class_table.renew_norms


def build(config: Config, classes: int | dict[str, int], mesh: Mesh) -> TrainComponents:
    """The components of a run of ``config`` over ``classes`` classes, or over those of each of several tables."""
    images = max(2 * config.data.batch_size * mesh.world_size * config.optim.accumulate, 2)
    size = config.data.preprocessing.image_size
    if isinstance(classes, int):
        dataset: ImageDataset = BlankImages(classes, images, size)
    else:
        parts = {name: BlankImages(count, images, size) for name, count in classes.items()}
        shares = [table.share for table in class_tables(config)]
        dataset = JoinedDataset(parts, shares, list(classes.values()))
    with patch("plsc.train.components.on_main", lambda work, mesh: {}):  # no rank tells the others of names here
        return components.build(config, dataset, mesh)


def _apply(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    for child in module.children():
        _apply(child, fn)
    for name, parameter in module._parameters.items():
        before = None if parameter is None else parameter.detach()
        if before is not None and (after := fn(before)) is not before:
            module._parameters[name] = nn.Parameter(after, parameter.requires_grad)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = fn(buffer)
    return module


def _data_parallel(module: nn.Module, mesh: Mesh, *args: Any) -> nn.Module:
    net = data_parallel(module, mesh, *args)
    if isinstance(net, ddp.DistributedDataParallel):
        net.register_comm_hook(mesh.group, _reduce)
        net.reducer = _Reducer(net.reducer)
    return net


def _reduce(group: dist.ProcessGroup | None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    buffer = bucket.buffer()
    dist.all_reduce(buffer, group=group)
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(buffer)
    return done


class _Reducer:
    """DDP's reducer, which is not to wait for the ranks to agree on another order of its buckets."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return (lambda *args: False) if name == "_rebuild_buckets" else getattr(self._reducer, name)


class LateExecutor:
    """An executor without threads: a task runs when its result is asked for."""

    tracer: Tracer | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def submit(self, task: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        """Return a future that runs ``task`` when it is waited for."""
        return _LateFuture(self, task, arguments)


class _LateFuture(Future[Any]):
    def __init__(self, thread: LateExecutor, task: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        super().__init__()
        self._task, self._arguments = task, arguments
        assert LateExecutor.tracer is not None
        self._thread, self._since = thread, LateExecutor.tracer.races.knowledge()

    def result(self, timeout: float | None = None) -> Any:
        if not self.done():
            tracer = LateExecutor.tracer
            assert tracer is not None
            tracer.in_background, before = True, tracer.in_background
            try:
                with tracer.races.on_thread(self._thread, self._since):
                    self.set_result(self._task(*self._arguments))
            finally:
                tracer.in_background = before
        return super().result(timeout)
