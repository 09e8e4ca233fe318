"""Which images to embed: any data set that trains, and photos of whom nobody has said who they are."""

import os
from pathlib import Path

import numpy as np

from plsc.data import ImageDataset, open_dataset
from plsc.data.alignment import AlignedImages, FileLandmarks, Locator
from plsc.data.codec import IMAGE_SUFFIXES, read_bytes
from plsc.data.dataset import EncodedDataset
from plsc.data.string_column import PackedStringColumn
from plsc.errors import UsageError


class LooseImages(EncodedDataset):
    """Image files below ``root``, in order of path: those in a sub-folder are of the class of that name, the others -1.

    Keys are the paths below ``root``.
    """

    def __init__(self, root: Path, names: list[str], image_size: int | None) -> None:
        folders = [name.partition("/")[0] if "/" in name else "" for name in names]
        classes = sorted({folder for folder in folders if folder})
        places = {"": -1, **{folder: place for place, folder in enumerate(classes)}}
        labels = np.array([places[folder] for folder in folders], dtype=np.int64)
        super().__init__(str(root), labels, classes, image_size)
        self.root, self._names = root, PackedStringColumn(names)

    def encoded(self, index: int) -> bytes:
        """The bytes of file ``index``."""
        return read_bytes(self.root / self.key(index))

    def key(self, index: int) -> str:
        """The path of file ``index`` below the root."""
        return self._names[index]


def open_images(
    source: str | Path, image_size: int, *, landmarks: Path | None = None, detector: str | None = None
) -> ImageDataset:
    """Open what :func:`plsc.data.open_dataset` opens, and also one image file, or a folder in which images lie loose.

    Images are taken for aligned faces and resized to ``image_size``, unless ``landmarks`` (a file: see
    :mod:`plsc.data.alignment`) or a ``detector`` (``onnx:FILE``) says where the faces are in them.

    Raises :class:`UsageError` if there is nothing of the kind, or both are given, and as
    :class:`plsc.data.alignment.FileLandmarks` and :func:`plsc.embed.detector.open_detector`.
    """
    if landmarks is None and detector is None:
        return _open(source, image_size)
    if landmarks is not None and detector is not None:
        raise UsageError("faces are aligned by a file of landmarks or by a detector; give one of them")
    pictures = _open(source, None)
    return AlignedImages(pictures, locator(pictures, landmarks, detector), image_size)


def open_pictures(source: str | Path) -> ImageDataset:
    """Open what :func:`open_images` opens, every picture in the size that it has."""
    return _open(source, None)


def locator(pictures: ImageDataset, landmarks: Path | None, detector: str | None) -> Locator:
    """What finds the faces of ``pictures``: the file of ``landmarks``, or the ``detector`` where that is None."""
    if landmarks is not None:
        return FileLandmarks(landmarks, pictures)
    from plsc.embed.detected import DetectedLandmarks

    return DetectedLandmarks(detector or "")


def _open(source: str | Path, image_size: int | None) -> ImageDataset:
    path = Path(source)
    if path.is_file() and _is_image(path.name):
        return LooseImages(path.parent, [path.name], image_size)
    if path.is_dir() and any(_is_image(entry.name) for entry in path.iterdir()) and not any(path.glob("*.rec")):
        return LooseImages(path, _images_below(path), image_size)
    return open_dataset(source, image_size=image_size)


def _is_image(name: str) -> bool:
    return name.lower().endswith(IMAGE_SUFFIXES) and not name.startswith(".")


def _images_below(root: Path) -> list[str]:
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [(Path(folder) / name).relative_to(root).as_posix() for name in files if _is_image(name)]
    return sorted(found)
