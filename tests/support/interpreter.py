"""A process in which Triton's kernels are interpreted on the CPU, started once per test session."""

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch

from support.hermetic import harness


class Interpreter:
    """``interpreter(function, *args)``: the result of a module's function, called where TRITON_INTERPRET=1.

    A process of its own, because the variable must be set before triton is imported, and would lead all other tests
    through the kernels too.
    """

    def __init__(self) -> None:
        self._pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_prepare)

    @harness()
    def __call__(self, function: Any, *args: Any, **options: Any) -> Any:
        """Call and wait; exceptions come through."""
        return self._pool.submit(function, *args, **options).result()

    def close(self) -> None:
        """End the process."""
        self._pool.shutdown()


def _prepare() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
