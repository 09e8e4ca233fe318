"""Aligning a face by five landmarks: a similarity transform onto the template that models are trained on."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import grid_sample

from plsc.errors import DataError

# Left eye, right eye, nose, left and right corner of the mouth as (x, y) in an image of 112x112 pixels.
TEMPLATE = np.array(
    [[38.2946, 51.6963], [73.5318, 51.5014], [56.0252, 71.7366], [41.5493, 92.3655], [70.7299, 92.2041]]
)
TEMPLATE_SIZE = 112


def align_face(
    image: torch.Tensor, landmarks: NDArray[np.float64], image_size: int, name: str = "image"
) -> torch.Tensor:
    """The face with ``landmarks`` (5, 2) in ``image`` uint8 (3, H, W), as uint8 (3, image_size, image_size).

    Raises :class:`DataError`, naming ``name``, when the landmarks coincide or are not finite.
    """
    if not np.isfinite(landmarks).all() or np.ptp(landmarks, axis=0).max() < 1e-6:
        raise DataError(f"{name}: its landmarks {landmarks.tolist()} coincide or are not finite")
    return warp(image, similarity_transform(landmarks, TEMPLATE * (image_size / TEMPLATE_SIZE)), image_size)


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
        image[None].float(), torch.from_numpy(grid)[None].float(), mode="bilinear", padding_mode="zeros",
        align_corners=False,
    )
    return moved[0].round_().clamp_(0, 255).to(torch.uint8)
