"""This rank's micro-batches, in groups of an optimizer step."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from plsc.data.loader import TrainLoader


@dataclass(frozen=True)
class MicroBatch:
    """This rank's ``images`` uint8 (b, 3, S, S) and ``labels`` (b,) of a global batch, of which ranks have ``sizes``.

    Both lie on the CPU, in pinned memory where a GPU computes. ``indices`` (b,) are the images' in the data set.
    ``split`` is what each class table takes of it, where there are several; None: the whole.
    """

    images: Tensor
    labels: Tensor
    sizes: Sequence[int]
    indices: Sequence[int] = ()
    split: Any = None

    @property
    def size(self) -> int:
        """Samples of the global batch."""
        return sum(self.sizes)


def micro_batches(
    loader: TrainLoader, accumulate: int, split: Callable[[Tensor, TrainLoader], Any]
) -> Iterator[list[MicroBatch]]:
    """The rest of the loader's epoch in groups of ``accumulate``; the last group may be shorter.

    When a group is yielded, the loader's position is the one after it. ``split`` is
    :meth:`plsc.train.class_loss.ClassLoss.split`.
    """
    group: list[MicroBatch] = []
    for images, labels in loader:
        group.append(MicroBatch(images, labels, loader.sizes, loader.indices, split(labels, loader)))
        if len(group) == accumulate:
            yield group
            group = []
    if group:
        yield group
