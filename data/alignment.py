"""Aligning a face by five landmarks: a similarity transform onto the template that face models are trained on.

Landmarks are (x, y) in pixels, pixel centres at integers: the left and the right eye (as one sees them in the picture),
the tip of the nose, the left and the right corner of the mouth.
"""

import math

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch.nn.functional import grid_sample, interpolate

from plsc.errors import DataError

ORDER = "left eye, right eye, nose, left and right corner of the mouth"
# Where insightface's crops of 112x112 pixels have them.
TEMPLATE = np.array(
    [[38.2946, 51.6963], [73.5318, 51.5014], [56.0252, 71.7366], [41.5493, 92.3655], [70.7299, 92.2041]]
)
TEMPLATE_SIZE = 112

_FARTHEST = 1e6  # pixels: no picture is so large, and squares of such numbers are still exact enough
_LEAST_FIT = 0.1  # of the landmarks' variance; eyes swapped give 0.05, a full profile 0.5 and more


def align_face(image: torch.Tensor, landmarks: ArrayLike, image_size: int, name: str = "image") -> torch.Tensor:
    """The face with ``landmarks`` (5, 2) in ``image`` uint8 (3, H, W), as uint8 (3, image_size, image_size).

    Sampled bilinearly, black outside the picture. A face more than twice as large as the crop is averaged down first,
    for samples so far apart would alias. The template grows with ``image_size``.

    Raises :class:`DataError`, naming ``name``, as :func:`checked_landmarks` does, and when the landmarks lie as in no
    face, however turned (left and right swapped, say), or the face lies outside the picture.
    """
    points = checked_landmarks(landmarks, name)
    target = TEMPLATE * (image_size / TEMPLATE_SIZE)
    if _fit(points, target) < _LEAST_FIT:
        raise DataError(f"{name}: its landmarks lie as in no face; their order is {ORDER}")
    matrix = similarity_transform(points, target)
    region = _seen_region(matrix, image_size, *image.shape[1:])
    if region is None:
        raise DataError(f"{name}: its landmarks lie outside the picture of {image.shape[2]}x{image.shape[1]} pixels")
    left, top, right, bottom = region
    # Only what the crop shows is converted and filtered, whatever the size of the picture.
    matrix = np.column_stack([matrix[:, :2], matrix @ [left, top, 1]])
    return warp(*_brought_to_scale(image[:, top:bottom, left:right], matrix), image_size)


def checked_landmarks(landmarks: ArrayLike, name: str = "image") -> NDArray[np.float64]:
    """``landmarks`` as float64 (5, 2).

    Raises :class:`DataError` in one line, naming ``name``, when they have another shape, are not finite, lie a million
    pixels away or all within one pixel.
    """
    try:
        points = np.asarray(landmarks, dtype=np.float64)
    except (TypeError, ValueError):
        points = np.empty(0)
    if points.shape != (5, 2):
        raise DataError(f"{name}: landmarks are five points (x, y): {ORDER}")
    if not np.isfinite(points).all() or np.abs(points).max() > _FARTHEST:
        raise DataError(f"{name}: its landmarks {points.tolist()} are not finite, or too far away")
    if np.ptp(points, axis=0).max() < 1:
        raise DataError(f"{name}: its landmarks {points.tolist()} coincide; they are pixels, not shares of the picture")
    return points


def similarity_transform(source: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rotation, scale and shift (2, 3) that take ``source`` (N, 2) nearest to ``target`` in least squares.

    Umeyama, "Least-squares estimation of transformation parameters between two point patterns", 1991, eqs.
    40-43.
    """
    source_mean, target_mean = source.mean(axis=0), target.mean(axis=0)
    centred = source - source_mean
    variance = np.mean(np.sum(np.square(centred), axis=1))
    u, singular, vt = np.linalg.svd((target - target_mean).T @ centred / len(source))
    signs = np.array([1.0, np.sign(np.linalg.det(u) * np.linalg.det(vt))])  # a rotation, never a reflection
    linear = (u * signs) @ vt * (singular @ signs / variance)
    return np.column_stack([linear, target_mean - linear @ source_mean])


def warp(image: torch.Tensor, matrix: NDArray[np.float64], size: int) -> torch.Tensor:
    """``image`` uint8 (3, H, W) moved by ``matrix`` (2, 3) to uint8 (3, size, size): bilinear, black outside.

    Pixel centres lie at integer coordinates.
    """
    inverse = np.linalg.inv(matrix[:, :2])
    y, x = np.mgrid[0:size, 0:size]
    origin = (np.stack([x, y], axis=-1) - matrix[:, 2]) @ inverse.T
    height, width = image.shape[1:]
    # grid_sample's coordinates, align_corners=False: -1 and 1 are the outer edges of the outer pixels.
    grid = (2 * origin + 1) / [width, height] - 1
    moved = grid_sample(
        image[None].float(),
        torch.from_numpy(grid)[None].float(),
        mode="bilinear",
        padding_mode="zeros",
        align_corners=False,
    )
    return moved[0].round_().clamp_(0, 255).to(torch.uint8)


def _fit(source: NDArray[np.float64], target: NDArray[np.float64]) -> float:
    """The share of ``target``'s variance that the best similarity of ``source`` explains, 0 to 1."""
    mapped = source @ (matrix := similarity_transform(source, target))[:, :2].T + matrix[:, 2]
    unexplained = np.sum(np.square(target - mapped)) / np.sum(np.square(target - target.mean(axis=0)))
    return float(1 - unexplained)


def _seen_region(matrix: NDArray[np.float64], size: int, height: int, width: int) -> tuple[int, int, int, int] | None:
    """The part of the picture (left, top, right, bottom) that the crop's pixels are made of; None if there is none."""
    corners = np.array([[0, 0], [size - 1, 0], [0, size - 1], [size - 1, size - 1]])
    seen = (corners - matrix[:, 2]) @ np.linalg.inv(matrix[:, :2]).T
    margin = 2 + 2 / _scale(matrix)  # of the bilinear sample, and of the average over a crop's pixel
    left, top = np.maximum(np.floor(seen.min(axis=0) - margin), 0).astype(int).tolist()
    right, bottom = np.minimum(np.ceil(seen.max(axis=0) + margin) + 1, [width, height]).astype(int).tolist()
    return (left, top, right, bottom) if left < right and top < bottom else None


def _brought_to_scale(image: torch.Tensor, matrix: NDArray[np.float64]) -> tuple[torch.Tensor, NDArray[np.float64]]:
    """``image``, averaged down where ``matrix`` would skip pixels of it, and the matrix that is left to apply.

    A bilinear sample sees two pixels a side. So nothing is done down to a scale of 1/2, the whole scale is averaged
    from 1/4 on, and what lies between leads over, so that a face hardly larger gives a crop hardly different.
    """
    scale = _scale(matrix)
    factor = min(max(scale, 4 * scale**2), 1.0)
    height, width = image.shape[1:]
    smaller = (max(math.ceil(height * factor), 2), max(math.ceil(width * factor), 2))  # torch 2.15 fails at 1x1
    if factor == 1 or smaller == (height, width):
        return image, matrix
    reduced = interpolate(image[None], size=smaller, mode="bilinear", antialias=True, align_corners=False)[0]
    # The reduced picture's pixel p has its centre at (p + 1/2) * step - 1/2 of the picture.
    step = np.array([width / smaller[1], height / smaller[0]])
    return reduced, np.column_stack([matrix[:, :2] * step, matrix[:, 2] + matrix[:, :2] @ (step / 2 - 0.5)])


def _scale(matrix: NDArray[np.float64]) -> float:
    """Crop pixels per picture pixel."""
    return math.sqrt(abs(float(np.linalg.det(matrix[:, :2]))))
