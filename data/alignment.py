"""Face alignment: a similarity transform of five landmarks onto the template that face models are trained on.

Landmarks are (x, y) in pixels, pixel centres at integers: left and right eye (as seen in the image), tip of the nose,
left and right corner of the mouth. :func:`align_face` cuts out one face, :class:`AlignedImages` the faces of a data
set, with landmarks from a :class:`Locator`. :class:`FileLandmarks` reads them from a file with one line per image, in
any order, in one of three forms, recognised line by line:

    path,x1,y1,x2,y2,x3,y3,x4,y4,x5,y5        CSV; a path with a comma in it stands in "double quotes"
    path<TAB>x1<TAB>y1 … x5<TAB>y5             TSV
    {"path": "ann/1.jpg", "landmarks": [[x1, y1], … [x5, y5]]}       JSON lines

A first line of names (path,x1,…) and empty lines are ignored. Paths are the images' keys: below the folder, as the list
has them, or in a .rec the path in its keys file or the record's number.
"""

import csv
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch.nn.functional import grid_sample, interpolate

from plsc.data.dataset import ImageDataset
from plsc.errors import DataError, UsageError
from plsc.files import sha256
from plsc.models.preprocessing import ImageSize, check_square, size_text
from plsc.text_files import text_lines

ORDER = "left eye, right eye, nose, left and right corner of the mouth"
# Positions in insightface's crops of 112x112 pixels.
TEMPLATE = np.array(
    [[38.2946, 51.6963], [73.5318, 51.5014], [56.0252, 71.7366], [41.5493, 92.3655], [70.7299, 92.2041]]
)
TEMPLATE_SIZE = 112

_MAX_COORDINATE = 1e6  # pixels: no image is so large, and squares of such numbers are still exact enough
_MIN_FIT = 0.1  # share of the landmarks' variance; swapped eyes give 0.05, a full profile 0.5 and more


def align_face(image: torch.Tensor, landmarks: ArrayLike, image_size: int, name: str = "image") -> torch.Tensor:
    """Cut out the face with ``landmarks``, rotated and scaled onto the template.

    Sampled bilinearly, black outside the image. A face more than twice as large as the crop is averaged down first,
    because samples so far apart would alias.

    Args:
        image: uint8 (3, H, W).
        landmarks: (5, 2) in pixels.
        image_size: side of the crop; the template scales with it.
        name: the image's name in error messages.

    Returns:
        uint8 (3, image_size, image_size).

    Raises:
        DataError: as :func:`checked_landmarks`; or the landmarks form no face in any rotation (left and right swapped,
            say), or the face lies outside the image.
    """
    points = checked_landmarks(landmarks, name)
    target = TEMPLATE * (image_size / TEMPLATE_SIZE)
    if _fit(points, target) < _MIN_FIT:
        raise DataError(f"{name}: its landmarks form no face; check their order: {ORDER}")
    matrix = similarity_transform(points, target)
    region = _source_region(matrix, image_size, *image.shape[1:])
    if region is None:
        raise DataError(f"{name}: its landmarks lie outside the image of {image.shape[2]}x{image.shape[1]} pixels")
    left, top, right, bottom = region
    # Only the visible region is converted to float and filtered, whatever the size of the image.
    matrix = np.column_stack([matrix[:, :2], matrix @ [left, top, 1]])
    return warp(*_downscale(image[:, top:bottom, left:right], matrix), image_size)


def checked_landmarks(landmarks: ArrayLike, name: str = "image") -> NDArray[np.float64]:
    """Return ``landmarks`` as float64 (5, 2).

    Raises:
        DataError: they have another shape, are not finite, lie more than a million pixels away, or all within one.
    """
    try:
        points = np.asarray(landmarks, dtype=np.float64)
    except (TypeError, ValueError):
        points = np.empty(0)
    if points.shape != (5, 2):
        raise DataError(f"{name}: landmarks are five points (x, y): {ORDER}")
    if not np.isfinite(points).all() or np.abs(points).max() > _MAX_COORDINATE:
        raise DataError(f"{name}: its landmarks {points.tolist()} are not finite or out of range")
    if np.ptp(points, axis=0).max() < 1:
        raise DataError(f"{name}: its landmarks {points.tolist()} coincide; give pixels, not fractions of the image")
    return points


def similarity_transform(source: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the least-squares similarity (2, 3) from ``source`` (N, 2) to ``target`` (N, 2): rotation, scale, shift.

    Umeyama, "Least-squares estimation of transformation parameters between two point patterns", 1991, eqs. 40-43.
    """
    source_mean, target_mean = source.mean(axis=0), target.mean(axis=0)
    centred = source - source_mean
    variance = np.mean(np.sum(np.square(centred), axis=1))
    u, singular, vt = np.linalg.svd((target - target_mean).T @ centred / len(source))
    signs = np.array([1.0, np.sign(np.linalg.det(u) * np.linalg.det(vt))])  # for a rotation, never a reflection
    linear = (u * signs) @ vt * (singular @ signs / variance)
    return np.column_stack([linear, target_mean - linear @ source_mean])


def warp(image: torch.Tensor, matrix: NDArray[np.float64], size: int) -> torch.Tensor:
    """Warp ``image`` uint8 (3, H, W) by ``matrix`` (2, 3) to uint8 (3, size, size): bilinear, black outside.

    Pixel centres lie at integer coordinates.
    """
    inverse = np.linalg.inv(matrix[:, :2])
    y, x = np.mgrid[0:size, 0:size]
    origin = (np.stack([x, y], axis=-1) - matrix[:, 2]) @ inverse.T
    height, width = image.shape[1:]
    # grid_sample's coordinates, align_corners=False: -1 and 1 are the outer edges of the outer pixels.
    grid = (2 * origin + 1) / [width, height] - 1
    warped = grid_sample(image[None].float(), torch.from_numpy(grid)[None].float(), align_corners=False)
    return warped[0].round_().clamp_(0, 255).to(torch.uint8)


def _fit(source: NDArray[np.float64], target: NDArray[np.float64]) -> float:
    """Return the share of ``target``'s variance that the best similarity of ``source`` explains, 0 to 1."""
    mapped = source @ (matrix := similarity_transform(source, target))[:, :2].T + matrix[:, 2]
    unexplained = np.sum(np.square(target - mapped)) / np.sum(np.square(target - target.mean(axis=0)))
    return float(1 - unexplained)


def _source_region(matrix: NDArray[np.float64], size: int, height: int, width: int) -> tuple[int, int, int, int] | None:
    """Return the region (left, top, right, bottom) of the image that the crop shows; None if it shows none of it."""
    corners = np.array([[0, 0], [size - 1, 0], [0, size - 1], [size - 1, size - 1]])
    visible = (corners - matrix[:, 2]) @ np.linalg.inv(matrix[:, :2]).T
    margin = 2 + 2 / _scale(matrix)  # reach of the bilinear sample, and of the average over a pixel of the crop
    left, top = np.maximum(np.floor(visible.min(axis=0) - margin), 0).astype(int).tolist()
    right, bottom = np.minimum(np.ceil(visible.max(axis=0) + margin) + 1, [width, height]).astype(int).tolist()
    return (left, top, right, bottom) if left < right and top < bottom else None


def _downscale(image: torch.Tensor, matrix: NDArray[np.float64]) -> tuple[torch.Tensor, NDArray[np.float64]]:
    """Average ``image`` down if ``matrix`` would skip pixels of it; return it and the remaining matrix.

    A bilinear sample covers two pixels a side, so scales down to 1/2 need no averaging and scales from 1/4 down are
    averaged in full. In between, the factor is interpolated so that the crop changes continuously with the face's size.
    """
    scale = _scale(matrix)
    factor = min(max(scale, 4 * scale**2), 1.0)
    height, width = image.shape[1:]
    smaller = (max(math.ceil(height * factor), 2), max(math.ceil(width * factor), 2))  # torch 2.15 fails at 1x1
    if factor == 1 or smaller == (height, width):
        return image, matrix
    reduced = interpolate(image[None], size=smaller, mode="bilinear", antialias=True, align_corners=False)[0]
    # Pixel p of the reduced image has its centre at (p + 1/2) * step - 1/2 of the image.
    step = np.array([width / smaller[1], height / smaller[0]])
    return reduced, np.column_stack([matrix[:, :2] * step, matrix[:, 2] + matrix[:, :2] @ (step / 2 - 0.5)])


def _scale(matrix: NDArray[np.float64]) -> float:
    """Return the crop's pixels per pixel of the image."""
    return math.sqrt(abs(float(np.linalg.det(matrix[:, :2]))))


FIELDS = 10  # numbers per line
FORM = "path,x1,y1,…,x5,y5 (or with tabs, or JSON lines)"


def read_landmarks(path: Path) -> dict[str, tuple[float, ...]]:
    """Read a landmark file: ten numbers by the image's key; :func:`align_face` checks them as points of a face.

    Raises:
        UsageError: there is no such file.
        DataError: a line has another form, or names an image again; the message gives its number.
    """
    if not path.is_file():
        raise UsageError(f"there is no landmark file {path}")
    landmarks: dict[str, tuple[float, ...]] = {}
    for number, name, numbers in _entries(path):
        if name in landmarks:
            raise DataError(f"{path} line {number} names {name[:80]} again; give each image one line")
        landmarks[name] = numbers
    if not landmarks:
        raise DataError(f"{path} holds no landmarks; each line is {FORM}")
    return landmarks


class FileLandmarks:
    """A :class:`Locator` that looks landmarks up in a file.

    Attributes:
        fingerprint: the file's SHA-256.

    Raises:
        DataError: as :func:`read_landmarks`, or the file names none of the data set's images; when called, the image
            has no line.
    """

    def __init__(self, path: Path, dataset: ImageDataset) -> None:
        landmarks = read_landmarks(path)
        self.path = path
        self.fingerprint = f"landmarks {sha256(path)[:16]}"
        missing = (float("nan"),) * FIELDS
        found = (
            landmarks.get(dataset.key(index).removeprefix("./")) or landmarks.get(dataset.record_key(index), missing)
            for index in range(len(dataset))
        )
        rows = np.fromiter(found, dtype=(np.float64, FIELDS), count=len(dataset))
        if np.isnan(rows[:, 0]).all():
            raise DataError(
                f"{path} names none of the {len(dataset):,} images of {dataset.source}: its first line is "
                f"{next(iter(landmarks))[:80]}, and the first image is {dataset.key(0)}"
            )
        self._points: NDArray[np.float64] = rows.reshape(-1, 5, 2)

    def __call__(self, index: int, image: torch.Tensor, name: str) -> NDArray[np.float64]:
        """Return the landmarks (5, 2) of image ``index``; ``name`` is its name in errors."""
        points: NDArray[np.float64] = self._points[index]
        if np.isnan(points).all():
            raise DataError(f"{name}: {self.path} has no landmarks for it")
        return points


def _entries(path: Path) -> Iterator[tuple[int, str, tuple[float, ...]]]:
    """Yield (line number, key, ten numbers) of each line but empty ones and the header."""
    for number, line in text_lines(path):
        if not line.strip():
            continue
        parse = _from_json if line.lstrip().startswith("{") else _from_fields
        try:
            name, values = parse(line)
            if number == 1 and name == "path" and parse is _from_fields:
                continue
            numbers = _numbers(values)
        except (ValueError, TypeError, KeyError, OverflowError, csv.Error, RecursionError):
            raise DataError(f"{path} line {number} is {line.strip()[:80]!r}; each line is {FORM}") from None
        yield number, name.removeprefix("./"), numbers


def _from_fields(line: str) -> tuple[str, Sequence[object]]:
    line = line.rstrip("\r\n")
    name, *values = line.split("\t") if "\t" in line else next(csv.reader([line], strict=True))
    if not name.strip():
        raise ValueError("no path")
    return name, values


def _from_json(line: str) -> tuple[str, Sequence[object]]:
    entry = json.loads(line)
    points = entry["landmarks"]
    if not isinstance(entry["path"], str) or not isinstance(points, list):
        raise TypeError("other types")
    pairs = all(isinstance(point, list) and len(point) == 2 for point in points)
    return entry["path"], [number for point in points for number in point] if pairs else points


def _numbers(values: Sequence[object]) -> tuple[float, ...]:
    if len(values) != FIELDS or any(isinstance(value, bool) for value in values):
        raise ValueError("not ten numbers")
    return tuple(float(value) for value in values)  # type: ignore[arg-type]  # what is no number raises TypeError or ValueError


class Locator(Protocol):
    """Finds a face's landmarks. It is sent to loader processes, so it must pickle.

    Attributes:
        fingerprint: text that identifies the method and its inputs.
    """

    fingerprint: str

    def __call__(self, index: int, image: torch.Tensor, name: str) -> ArrayLike:
        """Return the landmarks (5, 2) of image ``index``, uint8 (3, H, W); :class:`DataError` if it shows no face."""


class AlignedImages(ImageDataset):
    """Faces of ``image_size``, cut out of ``pictures`` by the landmarks that ``locate`` finds.

    Args:
        pictures: images at their stored size (``image_size=None``), which drawn ones do not have.
        locate: finds the landmarks of each.
        image_size: side of the crops in pixels.

    Raises:
        UsageError: ``pictures`` are of another size than the stored one, or ``image_size`` is a pair.

    Reading an image without a face raises :class:`DataError`.
    """

    def __init__(self, pictures: ImageDataset, locate: Locator, image_size: ImageSize) -> None:
        if pictures.image_size is not None:
            raise UsageError(
                f"{pictures.source} gives images of {size_text(pictures.image_size)}, and landmarks are pixels of the "
                "stored ones: name pictures in files, opened with image_size=None"
            )
        side = check_square(image_size, "aligning faces")
        super().__init__(pictures.source, pictures.labels, pictures.class_names, side)
        self.skipped, self.empty_classes = pictures.skipped, pictures.empty_classes
        self.left_out = pictures.left_out
        self.alignment = locate.fingerprint
        self.pictures, self.locate, self.size = pictures, locate, side

    @property
    def faces_found(self) -> int:
        """See :attr:`ImageDataset.faces_found`."""
        return getattr(self.locate, "found", 0)

    def image(self, index: int) -> torch.Tensor:
        """Return face ``index`` as uint8 (3, S, S)."""
        name = f"image {self.key(index)} of {self.source}"
        picture = self.pictures.image(index)
        return align_face(picture, self.locate(index, picture, name), self.size, name)

    def key(self, index: int) -> str:
        """Return the picture's key."""
        return self.pictures.key(index)

    def metadata(self, index: int) -> dict[str, str]:
        """Return the picture's."""
        return self.pictures.metadata(index)

    def sample_ids(self, start: int, stop: int) -> list[str]:
        """Return the pictures' own."""
        return self.pictures.sample_ids(start, stop)

    def stamps(self, start: int, stop: int) -> bytes:
        """Return the pictures' own; ``alignment`` tells of the rest."""
        return self.pictures.stamps(start, stop)
