"""Pictures of several faces, drawn on black, and a detector that finds them: what it cuts out is what was drawn."""

import io
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from plsc.data.alignment import TEMPLATE, TEMPLATE_SIZE
from plsc.embedding.detector import Detector, Face

Pixels = npt.NDArray[np.uint8]
GAP = 4


class DrawnDetector(Detector):
    """Finds the squares without black pixels that lie in rows on black; those of one pixel's width form no face."""

    fingerprint = "drawn"

    def find(self, image: torch.Tensor) -> list[Face]:
        """See :meth:`Detector.find`."""
        lit = image.numpy().any(axis=0)
        found = []
        for top, bottom in _runs(lit.any(axis=1)):
            for left, right in _runs(lit[top:bottom].any(axis=0)):
                height = int(lit[top:bottom, left:right].any(axis=1).sum())
                box = np.array([left, top, right, top + height], np.float32)
                points = TEMPLATE * ((right - left) / TEMPLATE_SIZE) + [left, top]
                found.append(Face(box, 0.9, points.astype(np.float32)))
        return found


def _runs(lit: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """(start, stop) of each run of True."""
    edges = np.flatnonzero(np.diff(np.r_[False, lit, False])).tolist()
    return zip(edges[::2], edges[1::2], strict=True)


def group(faces: Sequence[Pixels], columns: int = 4) -> Pixels:
    """A picture of square faces (S, S, 3), in rows of ``columns``, on black."""
    side = max(len(face) for face in faces) + GAP
    rows = -(-len(faces) // columns)
    picture = np.zeros((rows * side + GAP, columns * side + GAP, 3), np.uint8)
    for place, face in enumerate(faces):
        top, left = GAP + place // columns * side, GAP + place % columns * side
        picture[top : top + len(face), left : left + len(face)] = np.maximum(face, 1)
    return picture


def larger(face: Pixels, times: int = 2) -> Pixels:
    """The same face of ``times`` the side, of which the crop is the face itself."""
    return face.repeat(times, axis=0).repeat(times, axis=1)


def png(picture: Pixels) -> bytes:
    """The picture as a PNG file."""
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "PNG")
    return file.getvalue()
