"""More classes out of what is at hand: every class turned by 90, 180 and 270 degrees is another one."""

from collections.abc import Sequence

import numpy as np
import torch

from plsc.data.dataset import ImageDataset
from plsc.data.lazy_strings import LazyStrings

TURNS = 4


class TurnedDataset(ImageDataset):
    """Every image of ``dataset`` in four positions; classes 4c … 4c + 3 are its class c, turned by 0 … 270 degrees.

    For what means something else when it is turned, as letters do, and where classes are few: the features then have
    to tell four times as many apart (Santoro et al., "Meta-learning with memory-augmented neural networks", 2016,
    section 4.1). ``dataset`` gives square images.
    """

    def __init__(self, dataset: ImageDataset) -> None:
        labels = (dataset.labels[:, None] * TURNS + np.arange(TURNS)).reshape(-1)
        super().__init__(dataset.source, labels, _TurnedNames(dataset.class_names), dataset.image_size)
        self.dataset = dataset
        self.skipped, self.empty_classes, self.alignment = dataset.skipped, dataset.empty_classes, dataset.alignment

    def image(self, index: int) -> torch.Tensor:
        """Image ``index // 4`` of the data set, turned ``index % 4`` times."""
        place, turns = divmod(index, TURNS)
        return torch.rot90(self.dataset.image(place), turns, (1, 2))

    def key(self, index: int) -> str:
        """The image's own key, with the angle."""
        return _turned(self.dataset.key(index // TURNS), index % TURNS)


class _TurnedNames(LazyStrings):
    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def __len__(self) -> int:
        return TURNS * len(self._names)

    def at(self, position: int) -> str:
        """The class's name, with the angle."""
        return _turned(self._names[position // TURNS], position % TURNS)


def _turned(name: str, turns: int) -> str:
    return f"{name} turned by {90 * turns}" if turns else name
