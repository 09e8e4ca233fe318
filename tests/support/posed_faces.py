"""Smooth pictures of faces at a known pose, for tests of alignment and of what follows it."""

import numpy as np
import numpy.typing as npt
import torch

from plsc.data.alignment import TEMPLATE, similarity_transform, warp

Float64 = npt.NDArray[np.float64]


def move(points: Float64, angle: float, scale: float, shift: list[float]) -> Float64:
    """Rotate, scale and then shift points (N, 2)."""
    rotation = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    moved: Float64 = scale * points @ rotation.T + shift
    return moved


def face(identity: int, size: int = 112) -> Float64:
    """Draw a picture (size, size, 3) so smooth that two interpolations change little."""
    generator = np.random.default_rng(identity)
    y, x = np.mgrid[0:size, 0:size] / size
    waves = [np.sin(generator.normal(scale=4) * x + generator.normal(scale=4) * y + c) for c in range(3)]
    return 127 + 100 * np.stack(waves, axis=-1)


def photograph(
    picture: Float64, angle: float, scale: float, shift: list[float], size: int = 200
) -> tuple[torch.Tensor, Float64]:
    """Return a photo (3, size, size) with the face at that pose, and the face's landmarks (5, 2) in it."""
    landmarks = move(TEMPLATE, angle, scale, shift)
    image = torch.from_numpy(picture.astype(np.uint8)).permute(2, 0, 1)
    return warp(image, similarity_transform(TEMPLATE, landmarks), size), landmarks
