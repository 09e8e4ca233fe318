"""Sources of images to embed: any data set that trains, and photos without labels."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from plsc.data import ImageDataset, names_shards, open_dataset
from plsc.data.alignment import AlignedImages, FileLandmarks, Locator
from plsc.data.codec import to_rgb_tensor
from plsc.data.dataset import MAX_BAD_RECORDS, FileDataset
from plsc.data.folder import PictureFiles
from plsc.data.identity import file_stamps
from plsc.errors import UsageError
from plsc.image_files import PICTURE_SUFFIXES
from plsc.models.preprocessing import ImageSize

if TYPE_CHECKING:
    from plsc.data.codec import ImageLike

    ImageSource = ImageLike | Sequence[ImageLike]


class LooseImages(FileDataset):
    """Image files below ``root``, in order of path; keys are the paths below ``root``.

    Files in a sub-folder are of the class of that name; those directly in ``root`` have label -1.

    Args:
        root: the folder.
        names: paths below it.
        image_size: as :class:`plsc.data.ImageDataset`'s.
        may_leave: they may be links that lead out of the folder: the user named each.
    """

    def __init__(self, root: Path, names: list[str], image_size: ImageSize | None, *, may_leave: bool = False) -> None:
        folders = [name.partition("/")[0] if "/" in name else "" for name in names]
        classes = sorted({folder for folder in folders if folder})
        label_of = {"": -1, **{folder: label for label, folder in enumerate(classes)}}
        labels = np.array([label_of[folder] for folder in folders], dtype=np.int64)
        super().__init__(root, names, labels, classes, image_size, may_leave=may_leave)


class ImageList(ImageDataset):
    """Images that a program holds, in their order, without labels; keys are their paths, or their positions.

    Args:
        images: each as :func:`plsc.data.codec.to_rgb_tensor` takes it.
        image_size: size that they are resized to; None leaves each in its own size.

    Raises:
        UsageError: one is no image, or an array of another shape or type.
    """

    def __init__(self, images: "Sequence[ImageLike]", image_size: ImageSize | None) -> None:
        super().__init__("the images", np.full(len(images), -1, dtype=np.int64), [], image_size)
        self._images = images
        for index, image in enumerate(images):
            if not isinstance(image, str | Path | bytes):  # files are read when they are embedded
                to_rgb_tensor(image, self.key(index))

    def picture(self, index: int) -> torch.Tensor:
        """Image ``index`` in its own size."""
        return to_rgb_tensor(self._images[index], self.key(index))

    def key(self, index: int) -> str:
        """The path of image ``index``, or ``image 7``."""
        image = self._images[index]
        return str(image) if isinstance(image, str | Path) else f"image {index}"

    def stamps(self, start: int, stop: int) -> bytes:
        """Return the sizes and times of files, and the hashes of pictures in memory."""
        return b"".join(map(self._stamp, range(start, stop)))

    def _stamp(self, index: int) -> bytes:
        image = self._images[index]
        if isinstance(image, str | Path):
            return file_stamps([str(image)])
        data = image if isinstance(image, bytes) else self.picture(index).numpy().tobytes()
        return hashlib.sha256(data).digest()


def open_images(
    source: "ImageSource",
    image_size: ImageSize,
    *,
    landmarks: str | Path | None = None,
    detector: str | None = None,
    own_labels: bool | None = None,
) -> ImageDataset:
    """Open what :func:`plsc.data.open_dataset` opens, one image, a folder with images directly in it, or a sequence.

    Args:
        source: a path or a drawn set (``avatars:IDSxIMAGES``); one image in memory (bytes, a Pillow image, an array
            (H, W, 3), a tensor (3, H, W)); or a sequence of images, as a list of paths or an array (N, H, W, 3).
        image_size: of the model: the side of squares, or (height, width). Images are taken for aligned crops and
            resized, unless one of the next two aligns them, which gives squares.
        landmarks: a file of landmarks (see :mod:`plsc.data.alignment`).
        detector: a name or ``onnx:FILE`` (see :mod:`plsc.embedding.detector`).
        own_labels: as :func:`plsc.data.open_dataset` takes it; pictures to embed need none.

    Raises:
        UsageError: there is no such source, or both landmarks and a detector are given. Otherwise as
            :class:`plsc.data.alignment.FileLandmarks` and :func:`plsc.embedding.detector.open_detector`.
    """
    if landmarks is None and detector is None:
        return _open(source, image_size, own_labels=own_labels)
    if landmarks is not None and detector is not None:
        raise UsageError("faces are aligned by a file of landmarks or by a detector; give one of them")
    pictures = _open(source, None)
    points = None if landmarks is None else Path(landmarks)
    return AlignedImages(pictures, locator(pictures, points, detector), image_size)


def open_pictures(source: str | Path, *, max_bad_records: int | None = MAX_BAD_RECORDS) -> ImageDataset:
    """Open what :func:`open_images` opens, each picture in its own size; ``max_bad_records`` as of a .rec's opening."""
    return _open(source, None, max_bad_records=max_bad_records)


def locator(pictures: ImageDataset, landmarks: Path | None, detector: str | None) -> Locator:
    """The locator of the faces in ``pictures``: the file of ``landmarks``, or the ``detector`` if that is None."""
    if landmarks is not None:
        return FileLandmarks(landmarks, pictures)
    from plsc.embedding.detector import DetectedLandmarks

    return DetectedLandmarks(detector or "")


def _open(
    source: "ImageSource",
    image_size: ImageSize | None,
    *,
    own_labels: bool | None = None,
    max_bad_records: int | None = MAX_BAD_RECORDS,
) -> ImageDataset:
    if not isinstance(source, str | Path):
        return ImageList(_as_sequence(source), image_size)
    path = Path(source)
    if path.is_file() and path.name.lower().endswith(PICTURE_SUFFIXES):
        return LooseImages(path.parent, [path.name], image_size, may_leave=True)
    if path.is_dir() and not names_shards(path):
        files = PictureFiles(path)
        if files.loose:
            return _loose_images(files, image_size)
        if not own_labels and not any(files.below(name)[0] for name in files.identities):
            raise UsageError(files.without("holds no picture", "name a folder of pictures"))
    return open_dataset(source, image_size=image_size, max_bad_records=max_bad_records, own_labels=own_labels)


def _as_sequence(source: "ImageSource") -> "Sequence[ImageLike]":
    if isinstance(source, np.ndarray | torch.Tensor):
        return list(source) if source.ndim == 4 else [source]
    if isinstance(source, Sequence) and not isinstance(source, bytes):
        return source
    return [cast("ImageLike", source)]  # ImageList refuses what is no image


def _loose_images(files: PictureFiles, image_size: ImageSize | None) -> LooseImages:
    """The pictures directly in a folder and, as in a folder per identity, below its sub-folders."""
    below = [path for name in files.identities for path in files.below(name)[0]]
    files.report()
    images = LooseImages(files.folder, sorted([*files.loose, *below]), image_size)
    images.left_out = dict(files.left_out)
    return images
