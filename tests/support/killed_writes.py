"""A process that is killed at one of its writes."""

import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import torch


def kill_at_write(writes: int, more: Iterable[tuple[type, str]] = ()) -> None:
    """Kill this process once so many writes to files or table were made: the next is not made, or is torn.

    Args:
        writes: how many.
        more: methods that write too.
    """
    left, pwrite = writes, os.pwrite

    def is_last() -> bool:
        nonlocal left
        left -= 1
        return left < 0

    def counted(original: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            if is_last():
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **named)

        return call

    def torn(descriptor: int, data: Any, offset: int) -> int:
        if is_last():
            pwrite(descriptor, data[: len(data) // 2], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        return pwrite(descriptor, data, offset)

    mock.patch.object(os, "pwrite", torn).start()
    for owner, name in ((Path, "replace"), (Path, "unlink"), (torch.Tensor, "index_copy_"), *more):
        mock.patch.object(owner, name, counted(getattr(owner, name))).start()
