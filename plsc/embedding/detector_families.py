"""The families of ONNX detectors that are understood, and what their outputs mean.

Each answers, for each of the strides 8, 16 and 32, rows of scores (n, 1), boxes (n, 4) and five landmarks (n, 10), with
n = anchors * (H/stride) * (W/stride): row by row, the anchors of a cell one after another. So shapes alone identify
the outputs: neither their names nor their order matter, nor whether they have a batch axis. Landmarks are measured in
strides from the cell's upper left corner.

SCRFD has two anchors and boxes as distances from that corner to the four sides, in strides. Guo et al., "Sample and
Computation Redistribution for Efficient Face Detection", 2021.

YuNet has one anchor, two scores (of the class, and of being an object), whose geometric mean counts, and boxes as the
centre's place and the logarithm of width and height, in strides. Wu et al., "YuNet: A Tiny Millisecond-level Face
Detector", 2023; the files from 2023 on.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from plsc.errors import DataError

STRIDES = (8, 16, 32)
SCORE, BOX, POINTS = 1, 4, 10  # widths of a row

Float32 = NDArray[np.float32]


@dataclass(frozen=True)
class Family:
    """What one family's models take and answer.

    Attributes:
        name: in messages.
        scores: outputs with scores at each stride.
        anchors: in each cell.
        threshold: the least score of a face, where the caller names none.
        mean: subtracted from the pixels of 0 to 255.
        std: by which they are divided then.
        bgr: whether blue comes first.
        boxes: (origins (n, 2), answers (n, 4)) -> left, top, right, bottom (n, 4), all in strides.
    """

    name: str
    scores: int
    anchors: int
    threshold: float
    mean: float
    std: float
    bgr: bool
    boxes: Callable[[Float32, Float32], Float32]

    @property
    def outputs(self) -> int:
        """How many there are."""
        return len(STRIDES) * (self.scores + 2)

    def values(self, picture: torch.Tensor) -> Float32:
        """``picture`` uint8 (3, H, W) RGB as the input (1, 3, H, W)."""
        ordered = picture.flip(0) if self.bgr else picture
        values: Float32 = (ordered[None].numpy().astype(np.float32) - self.mean) / self.std
        return values

    def decode(
        self, path: Path, answers: Sequence[ArrayLike], height: int, width: int, threshold: float
    ) -> tuple[Float32, Float32, Float32]:
        """Scores (n,), boxes (n, 4) and landmarks (n, 5, 2), in the input's pixels, of anchors from ``threshold`` on.

        Raises:
            DataError: the answers for a picture of ``height`` by ``width`` have other shapes, or scores outside 0 to 1.
        """
        outputs = self._identified(path, answers, height, width)
        scores, boxes, landmarks = [], [], []
        for stride in STRIDES:
            score = self._score(path, outputs[stride, SCORE])
            chosen = np.flatnonzero(score >= threshold)
            origin = self._origins(height // stride, width // stride)[chosen]
            points = outputs[stride, POINTS][0][chosen].reshape(-1, 5, 2)
            scores.append(score[chosen])
            boxes.append(self.boxes(origin, outputs[stride, BOX][0][chosen]) * stride)
            landmarks.append((origin[:, None] + points) * stride)
        found = np.concatenate(scores), np.concatenate(boxes), np.concatenate(landmarks)
        whole = np.isfinite(found[1]).all(axis=1) & np.isfinite(found[2]).all(axis=(1, 2))
        return found[0][whole], found[1][whole], found[2][whole]

    def _identified(
        self, path: Path, answers: Sequence[ArrayLike], height: int, width: int
    ) -> dict[tuple[int, int], list[Float32]]:
        """{(stride, width of a row): the outputs without a batch axis}."""
        strides = {self.anchors * (height // stride) * (width // stride): stride for stride in STRIDES}
        wanted = {SCORE: self.scores, BOX: 1, POINTS: 1}
        found: dict[tuple[int, int], list[Float32]] = {(s, w): [] for s in STRIDES for w in wanted}
        for answer in map(np.asarray, answers):
            rows = answer[0] if answer.ndim == 3 and len(answer) == 1 else answer
            key = (strides.get(len(rows), 0), rows.shape[-1]) if rows.ndim == 2 else (0, 0)
            if key not in found or len(found[key]) == wanted[key[1]]:
                raise DataError(
                    f"{path} answers {[tuple(np.shape(each)) for each in answers]} for a picture of {width}x{height}; "
                    f"{self.name} answers {sorted(strides, reverse=True)} rows of 1, 4 and 10 each"
                )
            found[key].append(rows.astype(np.float32))
        return found

    def _score(self, path: Path, outputs: list[Float32]) -> Float32:
        rows = np.concatenate(outputs, axis=1)
        if np.any(rows > 1.001) or np.any(rows < -0.001):
            raise DataError(f"{path} answers scores outside 0 to 1; {self.name}'s exports end with a sigmoid")
        score: Float32 = np.clip(rows, 0, None).prod(axis=1) ** np.float32(1 / self.scores)
        return score

    def _origins(self, rows: int, columns: int) -> Float32:
        """(x, y) in strides from which the anchors (anchors * rows * columns, 2) measure."""
        y, x = np.mgrid[0:rows, 0:columns]
        corners = np.stack([x, y], axis=-1).reshape(-1, 2)
        return np.repeat(corners, self.anchors, axis=0).astype(np.float32)


def _from_distances(origin: Float32, sides: Float32) -> Float32:
    return np.concatenate([origin - sides[:, :2], origin + sides[:, 2:]], axis=1)


def _from_centres(origin: Float32, answer: Float32) -> Float32:
    centre = origin + answer[:, :2]
    with np.errstate(over="ignore"):  # what is not finite is left out
        half = np.exp(answer[:, 2:]) / 2
    return np.concatenate([centre - half, centre + half], axis=1)


SCRFD = Family("SCRFD with landmarks", 1, 2, 0.5, 127.5, 128.0, False, _from_distances)
YUNET = Family("YuNet", 2, 1, 0.5, 0.0, 1.0, True, _from_centres)
FAMILIES = {family.outputs: family for family in (SCRFD, YUNET)}
