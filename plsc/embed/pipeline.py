"""Images in, embeddings out, and the model busy: it has its next batch before the answers to the last are used."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from plsc.errors import DataError

BATCHES_AHEAD = 2  # one that the model computes, one that waits for it
Embedded = tuple[npt.NDArray[np.float32], dict[int, str]]  # rows (B, D), and {place in the batch: why there is none}


@dataclass
class Waits:
    """Seconds that were spent waiting for images, and for the model: the larger one says what binds."""

    images: float = 0.0
    model: float = 0.0


def embedded_batches(embed: Callable[[Tensor], Tensor], stream: Iterator[Any], waits: Waits) -> Iterator[Embedded]:
    """What ``embed`` makes of each batch of ``stream`` (images (B, 3, S, S), {place: why it cannot be had}), in order.

    ``embed`` (images to (B, D) on the CPU) runs in a thread of its own. Raises what it raises, and :class:`DataError`
    when a decoding process dies.
    """
    running: deque[tuple[Future[Tensor], dict[int, str]]] = deque()
    with ThreadPoolExecutor(1) as model:
        while True:
            began = time.monotonic()
            batch = _next(stream) if len(running) < BATCHES_AHEAD else None
            waits.images += time.monotonic() - began
            if batch is not None:
                running.append((model.submit(embed, batch[0]), batch[1]))
            elif running:
                future, unread = running.popleft()
                began = time.monotonic()
                vectors = future.result().numpy()
                waits.model += time.monotonic() - began
                yield vectors, unread
            else:
                return


def _next(stream: Iterator[Any]) -> Any:
    """The next batch; None when there is no more."""
    try:
        return next(stream, None)
    except RuntimeError as error:
        if "exited unexpectedly" not in str(error):
            raise
        raise DataError("a decoding process was killed, perhaps for want of memory; use fewer --workers") from None
