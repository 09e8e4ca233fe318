"""What every backbone is: a module from normalised images to embeddings, which knows how it was built."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from plsc.errors import UsageError

SIZE_STEP = 16  # every convolutional family halves the image four times
SMALLEST_SIZE = 32
# Backbones take (x - PIXEL_MEAN) / PIXEL_STD of pixel values 0 to 255, which is arcface_torch's (x/255 - 0.5)/0.5.
PIXEL_MEAN = PIXEL_STD = 127.5


class Backbone(nn.Module):
    """Maps (B, 3, S, S) float32 images, (x - 127.5)/127.5, to (B, D) embeddings that are not normalised.

    Attributes:
        name: the name that :func:`plsc.models.create` knows it by.
        embedding_dim: D.
        image_size: S, in pixels.
        options: the further keywords that it was created with, as JSON can hold them.
    """

    def __init__(self, name: str, embedding_dim: int, image_size: int) -> None:
        super().__init__()
        self.name = name
        self.embedding_dim = embedding_dim
        self.image_size = image_size
        self.options: dict[str, Any] = {}


def check_geometry(embedding_dim: int, image_size: int) -> None:
    """Raise :class:`UsageError` unless both numbers can make a backbone."""
    if not isinstance(embedding_dim, int) or isinstance(embedding_dim, bool) or embedding_dim < 1:
        raise UsageError(f"embedding_dim is {embedding_dim!r}; it has to be a whole number of 1 or more")
    whole = isinstance(image_size, int) and not isinstance(image_size, bool)
    if not whole or image_size < SMALLEST_SIZE or image_size % SIZE_STEP:
        near = "112"
        if whole:
            near = str(max(SMALLEST_SIZE, round(image_size / SIZE_STEP) * SIZE_STEP))
        raise UsageError(
            f"image_size is {image_size!r}; it has to be a multiple of {SIZE_STEP} from {SMALLEST_SIZE} up: try {near}"
        )


def in_full_precision(module: Callable[[Tensor], Tensor], x: Tensor, dtype: torch.dtype) -> Tensor:
    """``module(x)`` in ``dtype`` (that of its weights), also inside an autocast region.

    The last layers decide the embedding's direction, so they are spared the rounding of bf16.
    """
    # No conversion to the same type: an exported program would keep it, and with it a check of the type.
    x = x if x.dtype == dtype else x.to(dtype)
    kind = x.device.type  # the meta device knows no autocast
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return module(x)
    with torch.autocast(kind, enabled=False):
        return module(x)


def recomputed(block: nn.Module, x: Tensor) -> Tensor:
    """``block(x)`` without keeping its activations: the backward pass computes them again.

    The second run leaves the running statistics of batch normalisation alone: each batch counts once.
    """
    contexts = partial(_recompute_contexts, block)
    result: Tensor = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
    return result


def _recompute_contexts(
    block: nn.Module,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), _frozen_statistics(block)


@contextmanager
def _frozen_statistics(block: nn.Module) -> Iterator[None]:
    norms = [module for module in block.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    before = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:  # momentum 0 keeps the statistics, and the same tensors are saved for backward
        norm.momentum = 0.0
        norm.num_batches_tracked = None if norm.num_batches_tracked is None else norm.num_batches_tracked.clone()
    try:
        yield
    finally:
        for norm, (momentum, counter) in zip(norms, before, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, counter
