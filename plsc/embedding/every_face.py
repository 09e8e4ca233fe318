"""Every face of whole pictures as a data set of its own: a row for each face, the largest of a picture first."""

from collections.abc import Sequence

import numpy as np
import torch
from torch.utils.data import Dataset

from plsc.data import ImageDataset
from plsc.data.alignment import AlignedImages, align_face
from plsc.data.loader import map_in_workers
from plsc.embedding.columns import Float32
from plsc.embedding.detector import DetectedLandmarks
from plsc.errors import PlscError, UsageError
from plsc.parallel import Mesh
from plsc.parallel.collectives import all_gather_object
from plsc.progress import Progress


class EveryFace(AlignedImages):
    """All faces in the pictures of ``images``; keys are the pictures' with ``#1``, ``#2`` and so on.

    A picture in which none was found has one row under its own key, and reading that raises :class:`DataError`.

    Args:
        images: the largest face of each picture, found by a detector.
        landmarks: of the faces in each picture, (n, 5, 2).
    """

    def __init__(self, images: AlignedImages, landmarks: Sequence[Float32]) -> None:
        super().__init__(images.pictures, images.locate, images.size)
        counts = [max(len(points), 1) for points in landmarks]
        self._owners = np.repeat(np.arange(len(landmarks)), counts)
        self._first = np.cumsum([0, *counts[:-1]])
        self._landmarks = landmarks
        self.labels, self.alignment = images.labels[self._owners], f"{images.alignment}, every face"

    def image(self, index: int) -> torch.Tensor:
        """Return face ``index`` as uint8 (3, S, S)."""
        owner, name = int(self._owners[index]), f"image {self.key(index)} of {self.source}"
        picture, found = self.pictures.image(owner), self._landmarks[owner]
        points = found[index - self._first[owner]] if len(found) else self.locate(owner, picture, name)
        return align_face(picture, points, self.size, name)

    def key(self, index: int) -> str:
        """Return the picture's key, and the face's number behind it."""
        owner = int(self._owners[index])
        number = f"#{index - self._first[owner] + 1}" if len(self._landmarks[owner]) else ""
        return self.pictures.key(owner) + number

    def metadata(self, index: int) -> dict[str, str]:
        """Return the picture's."""
        return self.pictures.metadata(int(self._owners[index]))

    @property
    def faces_found(self) -> int:
        """None are left out."""
        return 0

    def sample_ids(self, start: int, stop: int) -> list[str]:
        """Return the keys."""
        return [self.key(index) for index in range(start, stop)]

    def stamps(self, start: int, stop: int) -> bytes:
        """Return those of the pictures that the faces are in."""
        return self.pictures.stamps(int(self._owners[start]), int(self._owners[stop - 1]) + 1)


class _Finder(Dataset[Float32]):
    """Maps a row to the landmarks (n, 5, 2) of the faces in its picture, none where it cannot be read."""

    def __init__(self, pictures: ImageDataset, locate: DetectedLandmarks) -> None:
        self._pictures, self._locate = pictures, locate

    def __getitem__(self, row: int) -> Float32:
        try:
            return np.stack([face.landmarks for face in self._locate.numbered(self._pictures.image(row))])
        except (PlscError, OSError):
            return np.empty((0, 5, 2), np.float32)


def every_face(images: ImageDataset, mesh: Mesh, workers: int) -> EveryFace:
    """Find all faces in the pictures of ``images``; the ranks share the work, and all call.

    Args:
        images: what :func:`plsc.embedding.sources.open_images` opened with a detector.
        workers: decoding processes of each rank.

    Raises:
        UsageError: they were opened without.
    """
    if not isinstance(images, AlignedImages) or not isinstance(images.locate, DetectedLandmarks):
        raise UsageError("--faces all needs --detector, which finds them")
    own = range(mesh.rank, len(images), mesh.world_size)
    progress, found = Progress("finding faces", len(own), quiet=not mesh.is_main), []
    for points in map_in_workers(_Finder(images.pictures, images.locate), own, workers):
        found.append(points)
        progress.advance(1)
    progress.finish()
    parts = all_gather_object(found, mesh)
    return EveryFace(images, [parts[row % mesh.world_size][row // mesh.world_size] for row in range(len(images))])
