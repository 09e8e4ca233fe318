"""Detectors that the user brings: ONNX files with the outputs of SCRFD or YuNet, run by onnxruntime.

The files are those that insightface publishes as SCRFD with landmarks (scrfd_500m_bnkps and larger, det_500m, det_10g),
and those that OpenCV publishes as YuNet (face_detection_yunet_2023mar and later). One input 1x3xHxW of floats; what the
outputs mean is in :mod:`plsc.embedding.detector_families`.
"""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from plsc.embedding.detector import Detector, Face, Float32
from plsc.embedding.detector_families import FAMILIES, STRIDES, Family
from plsc.embedding.onnx_engine import (
    INPUT_TYPES,
    GraphValue,
    graph_inputs,
    graph_values,
    load_graph,
    open_session,
    run_session,
    try_model,
)
from plsc.embedding.trial import Inputs
from plsc.errors import DataError
from plsc.signing import MODEL, is_asked_for, read_signed

# Sides of the input where the model leaves them free. Faces that fill the picture are too large for its anchors at 640
# pixels, so a picture in which none is found there is tried again at 128.
FREE_SIDES = (640, 128)
OVERLAP = 0.4  # intersection over union


class OnnxDetector(Detector):
    """A model of one of the families, made by :func:`plsc.embedding.detector.open_detector`.

    Args:
        path: of the ONNX file.
        device: where it runs.
        threshold: the least score of a face; None: the family's.
        overlap: of two boxes whose intersection over union exceeds it, the better one is kept; None: 0.4.
        tried: the fingerprint of the file that has passed its trial already; None: it is tried
            (:mod:`plsc.embedding.trial`).
    """

    def __init__(
        self, path: Path, device: torch.device, threshold: float | None, overlap: float | None, *, tried: str | None
    ) -> None:
        self._path = path
        content = read_signed(path, MODEL)
        self.fingerprint = hashlib.sha256(content).hexdigest()[:16]
        if tried not in (None, self.fingerprint):
            raise DataError(f"{path} is not the file that it was at the start; begin again")
        model = load_graph(path, content, trusted=is_asked_for())
        inputs, outputs = graph_inputs(model), graph_values(model.graph.output)
        self._family = _family(path, inputs, outputs)
        self._threshold = self._family.threshold if threshold is None else threshold
        self._overlap = OVERLAP if overlap is None else overlap
        self._input, self._dtype, sides = _input_of(path, inputs, self._family)
        self._outputs = [output.name for output in outputs]
        free = None in sides
        self._sizes = [(sides[0] or side, sides[1] or side) for side in (FREE_SIDES if free else FREE_SIDES[:1])]
        if tried is None and not is_asked_for():
            shapes = tuple((1, 3, height, width) for height, width in self._sizes)
            try_model(path, content, Inputs(self._input, np.dtype(self._dtype).name, shapes))
        self._session = open_session(path, content, device)
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
        kept = _without_overlaps(boxes, scores, self._overlap)
        return [Face(boxes[index], float(scores[index]), landmarks[index]) for index in kept]


def _family(path: Path, inputs: list[GraphValue], outputs: list[GraphValue]) -> Family:
    if len(outputs) == 1 and len(inputs) == 1 and len(inputs[0].shape) == 4 and len(outputs[0].shape) in (0, 2):
        *_, height, width = inputs[0].shape  # an output's may be left to onnxruntime
        raise DataError(f"{path} is an embedding model ({width}x{height}, one output), no detector")
    if len(outputs) not in FAMILIES:
        raise DataError(
            f"{path} has {len(outputs)} outputs; SCRFD with landmarks has nine, scores, boxes and landmarks "
            "at the strides 8, 16 and 32, and YuNet has twelve"
        )
    return FAMILIES[len(outputs)]


def _input_of(path: Path, inputs: list[GraphValue], family: Family) -> tuple[str, Any, tuple[int | None, int | None]]:
    """The input's name, its type, and (height, width) where they are fixed."""
    expected = f"{family.name} takes one picture of floats (1, 3, H, W)"
    if len(inputs) != 1 or len(inputs[0].shape) != 4 or inputs[0].type not in INPUT_TYPES:
        shapes = ", ".join(f"{entry.name} {entry.type} {entry.shape}" for entry in inputs) or "nothing"
        raise DataError(f"{path} takes {shapes}; {expected}")
    picture = inputs[0]
    batch, channels, height, width = (dim if isinstance(dim, int) and dim > 0 else None for dim in picture.shape)
    if batch not in (1, None) or channels not in (3, None) or INPUT_TYPES[picture.type] is np.uint8:
        raise DataError(f"{path} takes {picture.type} {picture.shape}; {expected}")
    for side in (height, width):
        if side is not None and side % STRIDES[-1]:
            raise DataError(
                f"{path} takes pictures of {width}x{height}; {family.name} has sides that are multiples of "
                f"{STRIDES[-1]}"
            )
    return picture.name, INPUT_TYPES[picture.type], (height, width)


def _letterboxed(image: torch.Tensor, height: int, width: int) -> tuple[torch.Tensor, Float32]:
    """``image`` scaled to fit (3, height, width), black to the right or below, and the scale (2,) of x and y."""
    from plsc.data.codec import resize_image

    rows, columns = image.shape[1:]
    factor = min(height / rows, width / columns)
    fitted = (max(round(rows * factor), 1), max(round(columns * factor), 1))
    picture = torch.zeros(3, height, width, dtype=torch.uint8)
    picture[:, : fitted[0], : fitted[1]] = resize_image(image, fitted)
    return picture, np.array([fitted[1] / columns, fitted[0] / rows], dtype=np.float32)


def _without_overlaps(boxes: Float32, scores: Float32, overlap: float) -> list[int]:
    """Indices of the boxes that non-maximum suppression keeps, best first."""
    from torchvision.ops import nms

    # Sorted here, so that equal scores keep the order of the anchors on every machine.
    order = np.argsort(-scores, kind="stable")
    kept = nms(torch.from_numpy(boxes[order]), torch.from_numpy(scores[order]), overlap)
    indices: list[int] = order[kept.numpy()].tolist()
    return indices
