"""Face detection in whole pictures by a model that the user brings: an ONNX file with SCRFD's outputs.

No weights are shipped. The file is one that insightface publishes as SCRFD with landmarks (scrfd_500m_bnkps and
larger, det_500m, det_10g): one input 1x3xHxW, RGB, (x - 127.5)/128; nine outputs, with or without a batch axis, in any
order and of any names: for each of the strides 8, 16 and 32 the scores (n, 1), the distances to a box's sides (n, 4)
and to five landmarks (n, 10), in strides, with n = 2 * (H/stride) * (W/stride): row by row, two anchors in each cell,
all measured from the cell's upper left corner. So the shapes alone identify each output.
Guo et al., "Sample and Computation Redistribution for Efficient Face Detection", 2021.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from plsc.data.alignment import align_face
from plsc.embedding.onnx_engine import INPUT_TYPES, load_graph, open_session, run_session, try_model
from plsc.errors import DataError, UsageError
from plsc.files import sha256
from plsc.signing import require_signed

STRIDES = (8, 16, 32)
ANCHORS = 2
KINDS = {1: "scores", 4: "boxes", 10: "landmarks"}  # by the width of a row
MEAN, STD = 127.5, 128.0
# Sides of the input where the model leaves them free. Faces that fill the picture are too large for its anchors at 640
# pixels, so a picture in which none is found there is tried again at 128.
FREE_SIDES = (640, 128)
PREFIX = "onnx:"

Float32 = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Face:
    """A face, in pixels of the picture.

    Attributes:
        box: float32 (4,): left, top, right, bottom; clipped to the picture.
        score: 0 to 1, the detector's confidence.
        landmarks: float32 (5, 2), see :mod:`plsc.data.alignment`.
    """

    box: Float32
    score: float
    landmarks: Float32

    @property
    def area(self) -> float:
        """Of the box, in pixels."""
        return float((self.box[2] - self.box[0]) * (self.box[3] - self.box[1]))


class Detector:
    """An SCRFD model, made by :func:`open_detector`; thread-safe.

    Args:
        path: of the ONNX file.
        device: where it runs.
        threshold: the least score of a face.
        overlap: of two boxes whose intersection over union exceeds it, the better one is kept.
        trusted: leave out the trial of :mod:`plsc.embedding.onnx_trial`.
    """

    def __init__(
        self,
        path: Path,
        device: torch.device,
        threshold: float = 0.5,
        overlap: float = 0.4,
        *,
        trusted: bool = False,
    ) -> None:
        self.source, self.threshold, self.overlap = f"{PREFIX}{path}", threshold, overlap
        self._path = path
        load_graph(path)
        if not trusted:
            try_model(path, (FREE_SIDES[-1],) * 2)
        self._session = open_session(path, device)
        self._input, self._dtype, sides = _input_of(path, self._session.get_inputs())
        self._outputs = [output.name for output in self._session.get_outputs()]
        if len(self._outputs) != len(STRIDES) * len(KINDS):
            raise DataError(
                f"{path} has {len(self._outputs)} outputs; SCRFD with landmarks has nine: scores, boxes and landmarks "
                "at the strides 8, 16 and 32"
            )
        free = None in sides
        self._sizes = [(sides[0] or side, sides[1] or side) for side in (FREE_SIDES if free else FREE_SIDES[:1])]
        height, width = self._sizes[-1]
        self._detect(torch.zeros(3, height, width, dtype=torch.uint8), height, width)  # a wrong model fails now

    def faces(self, image: torch.Tensor) -> list[Face]:
        """Find the faces in ``image`` uint8 (3, H, W) RGB, best score first.

        Raises:
            UsageError: another shape or type.
            DataError: the model does not run, or its outputs are not SCRFD's.
        """
        if image.dtype != torch.uint8 or image.dim() != 3 or image.shape[0] != 3 or 0 in image.shape:
            raise UsageError(f"faces are looked for in uint8 (3, H, W), not in {image.dtype} {tuple(image.shape)}")
        for height, width in self._sizes:
            if faces := self._detect(image, height, width):
                return faces
        return []

    def main_face(self, image: torch.Tensor, name: str = "image") -> Face:
        """The largest face in ``image``; :class:`DataError`, naming ``name``, if there is none."""
        faces = self.faces(image)
        if not faces:
            raise DataError(f"{name}: no face was found")
        return max(faces, key=lambda face: face.area)

    def aligned(self, image: torch.Tensor, image_size: int, name: str = "image") -> torch.Tensor:
        """:meth:`main_face`, aligned: uint8 (3, image_size, image_size); :class:`DataError` when there is none."""
        return align_face(image, self.main_face(image, name).landmarks, image_size, name)

    def _detect(self, image: torch.Tensor, height: int, width: int) -> list[Face]:
        """The faces that the model finds in ``image`` at ``height`` by ``width`` pixels."""
        picture, scale = _letterboxed(image, height, width)
        values = ((picture[None].numpy().astype(np.float32) - MEAN) / STD).astype(self._dtype)
        answers = run_session(self._path, self._session, self._outputs, {self._input: values})
        scores, boxes, landmarks = _decoded(self._path, answers, height, width, self.threshold)
        sides = np.tile(image.shape[:0:-1], 2).astype(np.float32)
        boxes = np.clip(boxes / np.tile(scale, 2), 0, sides)
        landmarks = landmarks / scale
        kept = _without_overlaps(boxes, scores, self.overlap)
        return [Face(boxes[index], float(scores[index]), landmarks[index]) for index in kept]


class DetectedLandmarks:
    """A locator that finds the main face of each picture, on the CPU of the process that decodes it.

    Making it opens the detector once, so that a wrong file is refused at the start; each decoding process opens its
    own when it first needs it. Raises as :func:`open_detector`.

    Attributes:
        fingerprint: of the detector's file.
    """

    def __init__(self, spec: str) -> None:
        open_detector(spec)
        self.spec = spec
        self.fingerprint = f"detector {sha256(Path(spec.removeprefix(PREFIX)))[:16]}"
        self._detector: Detector | None = None

    def __call__(self, index: int, image: torch.Tensor, name: str) -> Float32:
        """The landmarks (5, 2) of the main face of ``image`` uint8 (3, H, W); DataError if there is none."""
        if self._detector is None:
            self._detector = open_detector(self.spec, trusted=True)  # tried when this was made
        return self._detector.main_face(image, name).landmarks

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_detector": None}  # a session cannot be pickled for a worker


def open_detector(
    spec: str,
    *,
    device: torch.device | None = None,
    threshold: float = 0.5,
    overlap: float = 0.4,
    trusted: bool = False,
) -> Detector:
    """Open a detector.

    Args:
        spec: ``onnx:FILE``.
        device: where it runs; None: the CPU.
        threshold: the least score of a face.
        overlap: of two boxes whose intersection over union exceeds it, the better one is kept.
        trusted: leave out the first trial in a process of its own.

    Raises:
        UsageError: ``spec`` is of another form, or there is no such file.
        DataError: the file is corrupt, cannot be run, or is no SCRFD with landmarks.
    """
    if not spec.startswith(PREFIX) or spec == PREFIX:
        raise UsageError(f"a detector is named {PREFIX}FILE, not {spec!r}")
    path = Path(spec.removeprefix(PREFIX))
    if not path.is_file():
        raise UsageError(f"there is no detector {path}; none is shipped: name an SCRFD model with landmarks")
    require_signed(path)
    return Detector(path, device or torch.device("cpu"), threshold, overlap, trusted=trusted)


def _input_of(path: Path, inputs: list[Any]) -> tuple[str, Any, tuple[int | None, int | None]]:
    """The input's name, its type, and (height, width) where they are fixed."""
    if len(inputs) != 1 or len(inputs[0].shape) != 4 or inputs[0].type not in INPUT_TYPES:
        shapes = ", ".join(f"{entry.name} {entry.type} {entry.shape}" for entry in inputs) or "nothing"
        raise DataError(f"{path} takes {shapes}; SCRFD takes one picture of floats (1, 3, H, W)")
    picture = inputs[0]
    batch, channels, height, width = (dim if isinstance(dim, int) and dim > 0 else None for dim in picture.shape)
    if batch not in (1, None) or channels not in (3, None) or INPUT_TYPES[picture.type] is np.uint8:
        raise DataError(f"{path} takes {picture.type} {picture.shape}; SCRFD takes one picture of floats (1, 3, H, W)")
    for side in (height, width):
        if side is not None and side % STRIDES[-1]:
            raise DataError(f"{path} takes pictures of {width}x{height}; SCRFD's sides are multiples of {STRIDES[-1]}")
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


def _decoded(
    path: Path, answers: Sequence[ArrayLike], height: int, width: int, threshold: float
) -> tuple[Float32, Float32, Float32]:
    """Scores (n,), boxes (n, 4) and landmarks (n, 5, 2), in the input's pixels, of anchors from ``threshold`` on."""
    outputs = _identified(path, answers, height, width)
    scores, boxes, landmarks = [], [], []
    for stride in STRIDES:
        score = outputs["scores", stride][:, 0]
        if np.any(score > 1.001) or np.any(score < -0.001):
            raise DataError(f"{path} answers scores outside 0 to 1; SCRFD's exports end with a sigmoid")
        chosen = np.flatnonzero(score >= threshold)
        origin = _origins(height // stride, width // stride, stride)[chosen]
        distances = outputs["boxes", stride][chosen] * stride
        points = outputs["landmarks", stride][chosen].reshape(-1, 5, 2) * stride
        scores.append(score[chosen])
        boxes.append(np.concatenate([origin - distances[:, :2], origin + distances[:, 2:]], axis=1))
        landmarks.append(origin[:, None] + points)
    found = np.concatenate(scores), np.concatenate(boxes), np.concatenate(landmarks)
    whole = np.isfinite(found[1]).all(axis=1) & np.isfinite(found[2]).all(axis=(1, 2))
    return found[0][whole], found[1][whole], found[2][whole]


def _identified(path: Path, answers: Sequence[ArrayLike], height: int, width: int) -> dict[tuple[str, int], Float32]:
    """{(kind, stride): output without a batch axis}, identified by their shapes."""
    strides = {ANCHORS * (height // stride) * (width // stride): stride for stride in STRIDES}
    found: dict[tuple[str, int], Float32] = {}
    for answer in map(np.asarray, answers):
        rows = answer[0] if answer.ndim == 3 and len(answer) == 1 else answer
        kind = KINDS.get(rows.shape[-1]) if rows.ndim == 2 else None
        stride = strides.get(len(rows)) if kind else None
        if kind is None or stride is None or (kind, stride) in found:
            raise DataError(
                f"{path} answers {[tuple(np.shape(each)) for each in answers]} for a picture of {width}x{height}; "
                f"SCRFD with landmarks answers {sorted(strides, reverse=True)} rows of 1, 4 and 10 each"
            )
        found[kind, stride] = rows.astype(np.float32)
    return found


def _origins(rows: int, columns: int, stride: int) -> Float32:
    """(x, y) in pixels from which the anchors (2 * rows * columns, 2) measure."""
    y, x = np.mgrid[0:rows, 0:columns]
    corners = np.stack([x, y], axis=-1).reshape(-1, 2) * stride
    return np.repeat(corners, ANCHORS, axis=0).astype(np.float32)


def _without_overlaps(boxes: Float32, scores: Float32, overlap: float) -> list[int]:
    """Indices of the boxes that non-maximum suppression keeps, best first."""
    from torchvision.ops import nms

    # Sorted here, so that equal scores keep the order of the anchors on every machine.
    order = np.argsort(-scores, kind="stable")
    kept = nms(torch.from_numpy(boxes[order]), torch.from_numpy(scores[order]), overlap)
    indices: list[int] = order[kept.numpy()].tolist()
    return indices
