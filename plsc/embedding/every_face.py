"""Every face of whole pictures as a data set of its own: a row for each face, the largest of a picture first."""

import hashlib
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

from plsc.data import ImageDataset
from plsc.data.alignment import AlignedImages, align_face
from plsc.data.identity import contents_id, samples_id
from plsc.data.loader import map_in_workers, report_killed_workers
from plsc.embedding.columns import Float32
from plsc.embedding.detector import DetectedLandmarks
from plsc.errors import DataError, PlscError, UsageError
from plsc.files import atomic_write, make_folder
from plsc.parallel import Mesh
from plsc.parallel.collectives import all_gather_object, on_main
from plsc.progress import Progress
from plsc.regular_files import map_npy


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


class _FaceBlocks:
    """The faces of pictures, kept in ``folder`` block by block: a call that was killed looks for no others again.

    Blocks depend on the number of pictures alone. The name of one is a hash of the detector and of the pictures, their
    files' sizes and times included: one of other pictures is not found.
    """

    def __init__(self, folder: Path, images: AlignedImages) -> None:
        self._folder, self._images, self._id = folder, images, samples_id(images)
        self._rows = 1 << min(max((len(images) // 256).bit_length(), 4), 10)  # some 256 blocks, of 16 to 1,024 pictures

    def __len__(self) -> int:
        return -(-len(self._images) // self._rows)

    def rows(self, block: int) -> range:
        """The pictures of ``block``."""
        return range(block * self._rows, min((block + 1) * self._rows, len(self._images)))

    def path(self, block: int) -> Path:
        """Where the faces of ``block`` are kept: float32 (faces, 11), a picture's place in the block and 5 points."""
        rows = self.rows(block)
        name = f"{self._id} {rows} {contents_id(self._images, rows.start, rows.stop)}"
        return self._folder / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.npy"


def _read_faces(path: Path, pictures: int) -> list[Float32] | None:
    """The landmarks (n, 5, 2) of the faces in each picture of a block; None where they are not kept whole."""
    try:
        faces = map_npy(path, "faces")
    except DataError:
        return None
    return [faces[faces[:, 0] == place, 1:].reshape(-1, 5, 2) for place in range(pictures)]


def _write_faces(path: Path, landmarks: Sequence[Float32]) -> None:
    """Keep the landmarks (n, 5, 2) of the faces in each picture of a block; raises :class:`UsageError`."""
    places = np.repeat(np.arange(len(landmarks), dtype=np.float32), [len(points) for points in landmarks])
    faces = np.column_stack([places, np.concatenate(landmarks).reshape(-1, 10)])
    with atomic_write(path) as tmp_path, tmp_path.open("wb") as file:
        np.save(file, faces.astype(np.float32), allow_pickle=False)


@contextmanager
def every_face(images: ImageDataset, mesh: Mesh, workers: int, folder: Path) -> Iterator[EveryFace]:
    """Find all faces in the pictures of ``images``; the ranks share the work, and all call.

    Args:
        images: what :func:`plsc.embedding.sources.open_images` opened with a detector.
        workers: decoding processes of each rank.
        folder: keeps what was found, for a call that goes on with a killed one; removed where the block ends well.

    Raises:
        UsageError: they were opened without; or ``folder`` cannot be written.
    """
    if not isinstance(images, AlignedImages) or not isinstance(images.locate, DetectedLandmarks):
        raise UsageError("--faces all needs --detector, which finds them")
    on_main(lambda: make_folder(folder), mesh)
    blocks = _FaceBlocks(folder, images)
    own = range(mesh.rank, len(blocks), mesh.world_size)
    # before pictures are read: one that is replaced meanwhile is of another state than its block's name says
    paths = {block: blocks.path(block) for block in own}
    kept = {block: _read_faces(path, len(blocks.rows(block))) for block, path in paths.items()}
    found = {block: landmarks for block, landmarks in kept.items() if landmarks is not None}
    missing = [block for block in own if block not in found]
    pictures = sum(len(blocks.rows(block)) for block in own)
    done = sum(map(len, found.values()))
    progress = Progress("finding faces", pictures, done=done, quiet=not mesh.is_main)
    rows = [row for block in missing for row in blocks.rows(block)]
    with report_killed_workers():
        finder = iter(map_in_workers(_Finder(images.pictures, images.locate), rows, workers if rows else 0))
        for block in missing:
            found[block] = []
            for points in islice(finder, len(blocks.rows(block))):
                found[block].append(points)
                progress.advance()
            _write_faces(paths[block], found[block])
    progress.finish()
    every = {number: part for parts in all_gather_object(found, mesh) for number, part in parts.items()}
    yield EveryFace(images, [points for block in range(len(blocks)) for points in every[block]])
    on_main(lambda: shutil.rmtree(folder, ignore_errors=True), mesh)
