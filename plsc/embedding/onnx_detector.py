"""Detectors that the user brings: ONNX files with the outputs of SCRFD or YuNet, run by onnxruntime.

The files are those that insightface publishes as SCRFD with landmarks (scrfd_500m_bnkps and larger, det_500m, det_10g),
and those that OpenCV publishes as YuNet (face_detection_yunet_2023mar and later). They take 1x3xHxW floats.

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

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from plsc.embedding import onnx_model
from plsc.embedding.columns import Float32
from plsc.embedding.detector import Detector, Face
from plsc.embedding.known_models import read_model
from plsc.embedding.onnx_session import CPU, open_session, run_session
from plsc.errors import DataError
from plsc.models.preprocessing import resize_image
from plsc.models.trial import Inputs, require_trial
from plsc.signing import is_asked_for

STRIDES = (8, 16, 32)
SCORE, BOX, POINTS = 1, 4, 10  # widths of a row


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
# Sides of the input where the model leaves them free. Faces that fill the picture are too large for its anchors at 640
# pixels, so a picture in which none is found there is tried again at 128.
FREE_SIDES = (640, 128)
OVERLAP = 0.4  # intersection over union: of two boxes that overlap by more, the better one is kept


class OnnxDetector(Detector):
    """A model of one of the families, made by :func:`plsc.embedding.detector.open_detector`.

    Args:
        path: of the ONNX file.
        threshold: the least score of a face; None: the family's.
        tried: the fingerprint of the file that has passed its trial already; None: it is tried
            (:mod:`plsc.models.trial`).
    """

    def __init__(self, path: Path, threshold: float | None, tried: str | None) -> None:
        self._path = path
        content, known = read_model(path)
        trusted = is_asked_for() or known is not None
        self.fingerprint = hashlib.sha256(content).hexdigest()[:16]
        if tried not in (None, self.fingerprint):
            raise DataError(f"{path} is not the file that it was at the start; begin again")
        model, content = onnx_model.load_graph(path, content, trusted=trusted)
        inputs, outputs = map(onnx_model.graph_values, (model.graph.input, model.graph.output))
        self._family = _family(path, inputs, outputs)
        self._threshold = self._family.threshold if threshold is None else threshold
        self._input, self._dtype, sides = _input_of(path, inputs, self._family)
        self._outputs = [output.name for output in outputs]
        free = None in sides
        self._sizes = [(sides[0] or side, sides[1] or side) for side in (FREE_SIDES if free else FREE_SIDES[:1])]
        if tried is None and not trusted:
            shapes = tuple((1, 3, height, width) for height, width in self._sizes)
            require_trial(path, "onnx", content, Inputs(self._input, np.dtype(self._dtype).name, shapes))
        self._session = open_session(path, content, [CPU])
        height, width = self._sizes[-1]
        self._detect(torch.zeros(3, height, width, dtype=torch.uint8), height, width)  # a wrong model fails now

    def find(self, image: torch.Tensor) -> list[Face]:
        """See :meth:`Detector.find`."""
        for height, width in self._sizes:
            if faces := self._detect(image, height, width):
                return faces
        return []

    def _detect(self, image: torch.Tensor, height: int, width: int) -> list[Face]:
        """The faces that the model finds in ``image`` at ``height`` by ``width`` pixels."""
        picture, scale = _letterboxed(image, height, width)
        values = self._family.values(picture).astype(self._dtype)
        answers = run_session(self._path, self._session, self._outputs, {self._input: values})
        scores, boxes, landmarks = self._family.decode(self._path, answers, height, width, self._threshold)
        sides = np.tile(image.shape[:0:-1], 2).astype(np.float32)
        boxes = np.clip(boxes / np.tile(scale, 2), 0, sides)
        landmarks = landmarks / scale
        kept = _without_overlaps(boxes, scores)
        return [Face(boxes[index], float(scores[index]), landmarks[index]) for index in kept]


def _family(path: Path, inputs: list[onnx_model.GraphValue], outputs: list[onnx_model.GraphValue]) -> Family:
    if len(outputs) == 1 and len(inputs) == 1 and len(inputs[0].shape) == 4 and len(outputs[0].shape) in (0, 2):
        *_, height, width = inputs[0].shape  # an output's may be left to onnxruntime
        raise DataError(f"{path} is an embedding model ({width}x{height}, one output), no detector")
    if len(outputs) not in FAMILIES:
        raise DataError(
            f"{path} has {len(outputs)} outputs; SCRFD with landmarks has nine, scores, boxes and landmarks "
            "at the strides 8, 16 and 32, and YuNet has twelve"
        )
    return FAMILIES[len(outputs)]


def _input_of(
    path: Path, inputs: list[onnx_model.GraphValue], family: Family
) -> tuple[str, Any, tuple[int | None, int | None]]:
    """The input's name, its type, and (height, width) where they are fixed."""
    expected = f"{family.name} takes one picture of floats (1, 3, H, W)"
    if len(inputs) != 1 or len(inputs[0].shape) != 4 or inputs[0].type not in onnx_model.INPUT_TYPES:
        shapes = ", ".join(f"{entry.name} {entry.type} {entry.shape}" for entry in inputs) or "nothing"
        raise DataError(f"{path} takes {shapes}; {expected}")
    picture = inputs[0]
    batch, channels, height, width = (dim if isinstance(dim, int) and dim > 0 else None for dim in picture.shape)
    if batch not in (1, None) or channels not in (3, None) or onnx_model.INPUT_TYPES[picture.type] is np.uint8:
        raise DataError(f"{path} takes {picture.type} {picture.shape}; {expected}")
    for side in (height, width):
        if side is not None and side % STRIDES[-1]:
            raise DataError(
                f"{path} takes pictures of {width}x{height}; {family.name} has sides that are multiples of "
                f"{STRIDES[-1]}"
            )
    return picture.name, onnx_model.INPUT_TYPES[picture.type], (height, width)


def _letterboxed(image: torch.Tensor, height: int, width: int) -> tuple[torch.Tensor, Float32]:
    """``image`` scaled to fit (3, height, width), black to the right or below, and the scale (2,) of x and y."""
    rows, columns = image.shape[1:]
    factor = min(height / rows, width / columns)
    fitted = (max(round(rows * factor), 1), max(round(columns * factor), 1))
    picture = torch.zeros(3, height, width, dtype=torch.uint8)
    picture[:, : fitted[0], : fitted[1]] = resize_image(image, fitted)
    return picture, np.array([fitted[1] / columns, fitted[0] / rows], dtype=np.float32)


def _without_overlaps(boxes: Float32, scores: Float32) -> list[int]:
    """Indices of the boxes that non-maximum suppression keeps, best first."""
    from torchvision.ops import nms

    # Sorted here, so that equal scores keep the order of the anchors on every machine.
    order = np.argsort(-scores, kind="stable")
    kept = nms(torch.from_numpy(boxes[order]), torch.from_numpy(scores[order]), OVERLAP)
    indices: list[int] = order[kept.numpy()].tolist()
    return indices
