"""Launches of Triton kernels: noted, their operands checked and counted, nothing run."""

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from gpu_trace.tracer import Tracer, place
from gpu_trace.triton_ir import Access, accesses, intermediate

_TYPES = {
    torch.float64: "*fp64", torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.bool: "*i1",
    torch.int64: "*i64", torch.int32: "*i32", torch.int16: "*i16", torch.int8: "*i8", torch.uint8: "*u8",
}  # fmt: skip


@contextmanager
def launches_recorded(tracer: Tracer) -> Iterator[None]:
    """Hand every launch to ``tracer`` within."""
    from triton.runtime.jit import JITFunction

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        arguments = dict(zip(kernel.arg_names, args, strict=False))
        arguments |= {name: value for name, value in options.items() if name in kernel.arg_names}
        _record(tracer, kernel, arguments, tuple(grid(arguments) if callable(grid) else grid))

    with patch.object(JITFunction, "run", run):
        yield


def _record(tracer: Tracer, kernel: Any, arguments: dict[str, Any], grid: tuple[int, ...]) -> None:
    name, counts = kernel.fn.__name__, tracer.counts
    counts.triton[name] += 1
    counts.launches[place()] += 1
    described = {argument for argument, value in arguments.items() if _is_descriptor(value)}  # with strides
    tensors = {
        argument: value.base if argument in described else value
        for argument, value in arguments.items()
        if argument in described or isinstance(value, Tensor)
    }
    strided = any("stride" in argument for argument in arguments)
    for argument, tensor in tensors.items():
        if tensor.device.type != "cuda":
            tracer.problem(f"{name}({argument}) is on {tensor.device.type}")
        if not (tensor.is_contiguous() or strided or argument in described):
            tracer.problem(f"{name}({argument}) is not contiguous, its strides are {tuple(tensor.stride())}")
    tracer.launched(list(tensors.values()))
    if not tracer.is_last_step:  # all steps launch alike
        return
    for argument, access in _accesses(kernel, *_signature(kernel, arguments), grid).items():
        tensor = tensors[argument]
        reached = access.elements(_reachable(tensor, tensors))
        counts.moved[f"{place()} {name}"] += reached * tensor.element_size()
        if access.wraps:
            tracer.problem(f"{name}({argument}): on the way to an address, {access.wraps}")


def _is_descriptor(value: object) -> bool:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return isinstance(value, TensorDescriptor)


def _reachable(tensor: Tensor, tensors: Mapping[str, Tensor]) -> int:
    """Elements of an operand that a launch can touch: of a table's columns no more than the rows of its ``index``.

    Intervals know nothing of the numbers in a list. It has no repeats, and programs that take the same rows follow each
    other, so that the cache serves them.
    """
    index, table = tensors.get("index"), tensors.get("weight")
    if index is None or table is None or not len(table) or tensor is index or tensor.shape[:1] != table.shape[:1]:
        return tensor.numel()
    return min(len(index), len(table)) * (tensor.numel() // len(table))


def _signature(
    kernel: Any, arguments: Mapping[str, Any]
) -> tuple[tuple[tuple[str, str], ...], tuple[tuple[str, Any], ...], tuple[tuple[str, int | None], ...]]:
    """The arguments' types, the values of those that are constants, and those of integers (None of a pointer)."""
    types, constants, values = [], [], []
    for parameter in kernel.params:
        name = parameter.name
        value = arguments.get(name, parameter.default)
        if parameter.is_constexpr or value is None:
            types.append((name, "constexpr"))
            constants.append((name, value))
        elif isinstance(value, Tensor):
            types.append((name, _TYPES[value.dtype]))
            values.append((name, None))
        elif _is_descriptor(value):
            block = ", ".join(map(str, value.block_shape))
            types.append((name, f"tensordesc<{_TYPES[value.base.dtype][1:]}[{block}]>"))
            values.append((name, None))
        elif isinstance(value, int):
            types.append((name, "i1" if isinstance(value, bool) else "i32" if abs(value) < 2**31 else "i64"))
            values.append((name, int(value)))
        else:
            types.append((name, "fp32"))
    return tuple(types), tuple(constants), tuple(values)


@functools.lru_cache(maxsize=65536)
def _accesses(
    kernel: Any,
    signature: tuple[tuple[str, str], ...],
    constants: tuple[tuple[str, Any], ...],
    values: tuple[tuple[str, int | None], ...],
    grid: tuple[int, ...],
) -> dict[str, Access]:
    return accesses(intermediate(kernel, signature, constants), dict(values), grid)
