"""A data set of whole pictures, given as aligned faces."""

from typing import Protocol

import torch
from numpy.typing import ArrayLike

from plsc.data.alignment import align_face
from plsc.data.dataset import ImageDataset


class Locator(Protocol):
    """Says where a face's landmarks lie. Handed to loader processes: it must pickle.

    identity: text that tells this way of finding them from every other.
    """

    identity: str

    def __call__(self, index: int, image: torch.Tensor, name: str) -> ArrayLike:
        """Landmarks (5, 2) of image ``index``, pixels uint8 (3, H, W); DataError naming ``name`` if there are none."""


class AlignedImages(ImageDataset):
    """The images of ``pictures``, which keep their stored size, as faces of ``image_size`` aligned by ``locate``.

    An image without a face, or without landmarks, raises DataError when it is asked for.
    """

    def __init__(self, pictures: ImageDataset, locate: Locator, image_size: int) -> None:
        if pictures.image_size is not None:
            raise ValueError("landmarks are pixels of the pictures as they are stored: open them with image_size=None")
        super().__init__(pictures.source, pictures.labels, pictures.class_names, image_size)
        self.skipped, self.empty_classes = pictures.skipped, pictures.empty_classes
        self.alignment = locate.identity
        self._pictures, self._locate, self._size = pictures, locate, image_size

    def image(self, index: int) -> torch.Tensor:
        """Face ``index`` as uint8 (3, S, S)."""
        name = f"image {self.key(index)} of {self.source}"
        picture = self._pictures.image(index)
        return align_face(picture, self._locate(index, picture, name), self._size, name)

    def key(self, index: int) -> str:
        """What a person calls the picture."""
        return self._pictures.key(index)
