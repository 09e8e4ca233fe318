"""Activation checkpointing (Chen et al., 2016): blocks whose activations the backward pass computes a second time.

A block is checkpointed in place: the module keeps its class, its name and its keys, so that optimizers, checkpoints and
whatever wraps the backbone find it as it was. Values do not change: random numbers are drawn again as they were, and
batch normalisation counts each batch once.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Segment(NamedTuple):
    """A part of a backbone that can be checkpointed: a method of a module, which is called once in a forward pass."""

    module: nn.Module
    method: str = "forward"

    @property
    def function(self) -> Any:
        """The method as the module's class defines it."""
        return partial(getattr(type(self.module), self.method), self.module)


def innermost_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the modules, themselves of several layers, in a Sequential or ModuleList, without such lists in them."""
    found: list[nn.Module] = []
    for child in module.children():
        inner = innermost_blocks(child)
        if not inner and isinstance(module, nn.Sequential | nn.ModuleList) and next(child.children(), None) is not None:
            inner = [child]
        found += inner
    return found


def every_kth(segments: Sequence[Segment], every: int) -> list[Segment]:
    """Return the ``every``-th segment, the one after as many again, and so on (torchtitan's selective option)."""
    return list(segments[every - 1 :: every])


def recompute_in_backward(segments: Sequence[Segment]) -> None:
    """Let the backward pass recompute what ``segments`` would store, where they train."""
    for segment in segments:
        setattr(segment.module, segment.method, partial(_run, *segment))


def compute_once(backbone: nn.Module) -> nn.Module:
    """Undo :func:`recompute_in_backward` in ``backbone``, not wrapped, and return it."""
    for module in backbone.modules():
        for name in [name for name, value in vars(module).items() if _is_recomputed(value)]:
            delattr(module, name)
    return backbone


def recomputed_blocks(backbone: nn.Module) -> int:
    """Return how many parts of ``backbone``, wrapped or not, the backward pass computes again."""
    values = (value for module in backbone.modules() for value in vars(module).values())
    return sum(map(_is_recomputed, values))


def _is_recomputed(value: Any) -> bool:
    return isinstance(value, partial) and value.func is _run


def _run(module: nn.Module, method: str, /, *args: Any, **kwargs: Any) -> Any:
    function = Segment(module, method).function
    if not (module.training and torch.is_grad_enabled()):
        return function(*args, **kwargs)
    if torch.compiler.is_compiling():  # the compiler moves updates of buffers out of what it recomputes
        return checkpoint(function, *args, use_reentrant=False, **kwargs)
    return checkpoint(function, *args, use_reentrant=False, context_fn=partial(_contexts, module), **kwargs)


def _contexts(module: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), _frozen_statistics(module)


@contextmanager
def _frozen_statistics(module: nn.Module) -> Iterator[None]:
    norms = [layer for layer in module.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
    saved = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    # Momentum 0 instead of evaluation mode: checkpoint requires that the same tensors are saved for backward.
    for norm in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for norm, (momentum, counter) in zip(norms, saved, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, counter
