"""Launches of Triton kernels: noted, their operands checked, nothing run."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor

from gpu_trace.tracer import Tracer, place


@contextmanager
def launches_recorded(tracer: Tracer) -> Iterator[None]:
    """Hand every launch to ``tracer`` within."""
    from triton.runtime.jit import JITFunction

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        name = kernel.fn.__name__
        arguments = dict(zip(kernel.arg_names, args, strict=False)) | {
            k: v for k, v in options.items() if k in kernel.arg_names
        }
        tracer.counts.triton[name] += 1
        tracer.counts.launches[place()] += 1
        strided = any("stride" in argument for argument in arguments)
        for argument, tensor in arguments.items():
            if isinstance(tensor, Tensor):
                if tensor.device.type != "cuda":
                    tracer.problem(f"{name}({argument}) is on {tensor.device.type}")
                if not (tensor.is_contiguous() or strided):
                    tracer.problem(f"{name}({argument}) is not contiguous, strides {tuple(tensor.stride())}")

    with patch.object(JITFunction, "run", run):
        yield
