"""Images that tell their own number, and count how often they are read."""

import numpy as np
import torch

from plsc.data import ImageDataset
from plsc.errors import DataError


class Numbered(ImageDataset):
    """Noise in five classes, with the image's number in its first two channels; those in ``bad`` cannot be read."""

    def __init__(self, count: int = 30, bad: frozenset[int] = frozenset(), size: int = 8) -> None:
        super().__init__("numbered", np.arange(count, dtype=np.int64) % 5, [str(n) for n in range(5)], size)
        self.bad, self.reads = bad, 0

    def key(self, index: int) -> str:
        return f"n{index}"

    def image(self, index: int) -> torch.Tensor:
        self.reads += 1
        if index in self.bad:
            raise DataError(f"n{index} is broken")
        assert isinstance(self.image_size, int)
        noise = torch.Generator().manual_seed(index)
        image = torch.randint(0, 256, (3, self.image_size, self.image_size), dtype=torch.uint8, generator=noise)
        image[0] = index % 256
        image[1] = index // 256
        return image
