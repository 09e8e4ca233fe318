"""A module of a few weights and no layers, as ranks exchange them, and the bytes that collectives are given."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

Shapes = dict[str, tuple[int, ...]]


def draw(shapes: Shapes, seed: int) -> dict[str, Tensor]:
    """Float64 numbers for each weight."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).double() for name, shape in shapes.items()}


class Weights(nn.Module):
    """Weights, "conv" in channels_last, whose loss is the sum of ``loss(weight, given)`` over the inputs by name."""

    def __init__(self, shapes: Shapes, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self._loss = loss
        for name, start in draw(shapes, 0).items():
            self.register_parameter(name, nn.Parameter(start.float()))
        self.conv.data = self.conv.data.contiguous(memory_format=torch.channels_last)

    def forward(self, given: dict[str, Tensor]) -> Tensor:
        return torch.stack([self._loss(self.get_parameter(name), each) for name, each in given.items()]).sum()


@contextmanager
def counted_bytes(*collectives: tuple[Any, str]) -> Iterator[list[int]]:
    """The bytes of each tensor that is given to these functions, (module, name), within."""
    sent: list[int] = []

    def counting(collective: Any) -> Any:
        def call(tensor: Tensor, *args: Any, **options: Any) -> Any:
            sent.append(tensor.numel() * tensor.element_size())
            return collective(tensor, *args, **options)

        return call

    patches = [mock.patch.object(module, name, counting(getattr(module, name))) for module, name in collectives]
    for patch in patches:
        patch.start()
    try:
        yield sent
    finally:
        for patch in patches:
            patch.stop()


def bytes_of_steps(
    net: nn.Module, exchange: Any, inputs: Iterable[dict[str, Tensor]], *collectives: tuple[Any, str]
) -> list[tuple[int, int]]:
    """(bytes given to ``collectives``, bytes foretold by ``exchange``) of a step on each of the inputs."""
    counts = []
    for step, given in enumerate(inputs):
        with counted_bytes(*collectives) as sent:
            exchange.begin(step)
            net({name: each.float() for name, each in given.items()}).backward()
            exchange.commit_or_undo(torch.tensor(0.0))
        counts.append((sum(sent), exchange.sent_bytes(net.parameters(), step)))
    return counts
