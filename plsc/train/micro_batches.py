"""This rank's micro-batches, in groups of an optimizer step, and the loss of the run's class table over one."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from plsc.data.loader import TrainLoader
from plsc.parallel.strategies import Strategy
from plsc.train.tables import TrainedTable


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
    :meth:`ClassLoss.split`.
    """
    group: list[MicroBatch] = []
    for images, labels in loader:
        group.append(MicroBatch(images, labels, loader.sizes, loader.indices, split(labels, loader)))
        if len(group) == accumulate:
            yield group
            group = []
    if group:
        yield group


class LossOfTable(NamedTuple):
    """The mean ``loss`` of a micro-batch's samples for class table ``number``: ``share`` of all that the step has."""

    number: int
    loss: Tensor
    share: float


class ClassLoss:
    """The loss of a run's only class table; a feature that has several derives its own.

    Args:
        tables: of the run.
        strategy: that takes the backbone through steps.
    """

    def __init__(self, tables: Sequence[TrainedTable], strategy: Strategy) -> None:
        self.tables, self.strategy = tables, strategy
        self.is_on_device = all(table.head.placement == "device" for table in tables)

    def split(self, labels: Tensor, loader: TrainLoader) -> Any:
        """What each table takes of the batch that ``loader`` yielded last, which has ``labels``; None: the whole."""
        return None

    def losses(
        self,
        embeddings: Tensor,
        labels: Tensor,
        sizes: Sequence[int],
        batch: MicroBatch,
        group: Sequence[MicroBatch],
    ) -> list[LossOfTable]:
        """The losses of the tables for which a micro-batch has samples.

        Args:
            embeddings: this rank's (b, D), float32.
            labels: (b,) or (b, K) of the data's classes.
            sizes: b of every rank of the head.
            batch: that these are of, perhaps a part of it.
            group: all micro-batches of the step.
        """
        share = sum(sizes) / sum(each.size for each in group)
        return [LossOfTable(0, self.tables[0].head(embeddings, labels, sizes), share)] if any(sizes) else []

    def prefetch(self, loader: TrainLoader, upcoming: MicroBatch | None) -> None:
        """Prefetch the next batch's rows of tables that are not on the device, during this batch's backward pass.

        ``upcoming`` is that batch where the step holds it; else the loader knows its labels.
        """
        if self.is_on_device or not self.strategy.prefetches:
            return
        labels = loader.next_labels if upcoming is None else upcoming.labels
        if labels is not None:
            self.fetch_rows(labels, loader, upcoming)

    def fetch_rows(self, labels: Tensor, loader: TrainLoader, upcoming: MicroBatch | None) -> None:
        """Do so for a batch of these ``labels``, as :meth:`prefetch` has it."""
        sizes = (loader.next_sizes or []) if upcoming is None else upcoming.sizes
        # a strategy may split a batch otherwise than the loader
        self.tables[0].head.prefetch(*self.strategy.head_share(labels, sizes))
