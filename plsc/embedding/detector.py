"""Face detection in whole pictures: detectors by name, and those that the user brings as ONNX files.

No weights are shipped. ``mtcnn`` takes those of an installed package (:mod:`plsc.embedding.mtcnn`), ``yunet`` the file
of another (:mod:`plsc.embedding.known_models`), ``onnx:FILE`` is a file with the outputs of SCRFD or YuNet
(:mod:`plsc.embedding.onnx_detector`).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from plsc.data.alignment import align_face
from plsc.embedding.columns import Float32
from plsc.embedding.known_models import YUNET, packaged_file
from plsc.errors import DataError, UsageError
from plsc.nearest import did_you_mean

MTCNN, PREFIX = "mtcnn", "onnx:"


@dataclass(frozen=True, eq=False)
class Face:
    """A face, in pixels of the picture.

    Attributes:
        box: float32 (4,): left, top, right, bottom; clipped to the picture.
        score: 0 to 1, the detector's confidence.
        landmarks: float32 (5, 2), see :mod:`plsc.data.alignment`.
        number: its place among the picture's faces, the largest first, from 1; 0 where it was given none.
    """

    box: Float32
    score: float
    landmarks: Float32
    number: int = 0

    @property
    def area(self) -> float:
        """Of the box, in pixels."""
        return float((self.box[2] - self.box[0]) * (self.box[3] - self.box[1]))


class Detector(ABC):
    """A detector, made by :func:`open_detector`; thread-safe.

    Time and memory of a picture are bounded whatever its size: each kind of detector looks at it scaled down.

    Attributes:
        fingerprint: of the weights.
    """

    fingerprint: str

    @abstractmethod
    def find(self, image: torch.Tensor) -> list[Face]:
        """Find the faces in ``image`` uint8 (3, H, W) RGB, H and W at least 1, best score first."""

    def faces(self, image: torch.Tensor) -> list[Face]:
        """Find the faces in ``image`` uint8 (3, H, W) RGB, best score first.

        Raises:
            UsageError: another shape or type.
            DataError: the model does not run, or its outputs are not a detector's.
        """
        if image.dtype != torch.uint8 or image.dim() != 3 or image.shape[0] != 3 or 0 in image.shape:
            raise UsageError(f"faces are looked for in uint8 (3, H, W), not in {image.dtype} {tuple(image.shape)}")
        return self.find(image)

    def numbered(self, image: torch.Tensor, name: str = "image") -> list[Face]:
        """:meth:`faces` with their numbers, the largest first; :class:`DataError`, naming ``name``, without any."""
        faces = sorted(self.faces(image), key=lambda face: -face.area)
        if not faces:
            raise DataError(f"{name}: no face was found")
        return [replace(face, number=number) for number, face in enumerate(faces, 1)]

    def main_face(self, image: torch.Tensor, name: str = "image") -> Face:
        """The largest face in ``image``; :class:`DataError`, naming ``name``, if there is none."""
        return self.numbered(image, name)[0]

    def aligned(self, image: torch.Tensor, image_size: int, name: str = "image") -> torch.Tensor:
        """:meth:`main_face`, aligned: uint8 (3, image_size, image_size); :class:`DataError` when there is none."""
        return align_face(image, self.main_face(image, name).landmarks, image_size, name)


class DetectedLandmarks:
    """A locator that finds the main face of each picture, on the CPU of the process that decodes it.

    Making it opens the detector once, so that a wrong file is refused at the start; each decoding process opens its
    own when it first needs it. Raises as :func:`open_detector`.

    Attributes:
        fingerprint: of the detector.
        found: how many faces the picture of the last call shows.
    """

    found = 0

    def __init__(self, spec: str) -> None:
        self.spec = spec
        self._file_fingerprint = open_detector(spec).fingerprint
        self.fingerprint = f"detector {self._file_fingerprint}"
        self._detector: Detector | None = None

    def __call__(self, index: int, image: torch.Tensor, name: str) -> Float32:
        """The landmarks (5, 2) of the main face of ``image`` uint8 (3, H, W); DataError if there is none."""
        faces = self.numbered(image, name)
        self.found = len(faces)
        return faces[0].landmarks

    def numbered(self, image: torch.Tensor, name: str = "image") -> list[Face]:
        """As :meth:`Detector.numbered`."""
        if self._detector is None:
            self._detector = open_detector(self.spec, tried=self._file_fingerprint)  # when this was made
        return self._detector.numbered(image, name)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_detector": None}  # a session cannot be pickled for a worker


def open_detector(spec: str, *, threshold: float | None = None, tried: str | None = None) -> Detector:
    """Open a detector, which runs on the CPU.

    Args:
        spec: ``mtcnn``, ``yunet`` or ``onnx:FILE``.
        threshold: the least score of a face; None: the detector's own.
        tried: the fingerprint of a file that was tried in a process of its own already; another file is refused.

    Raises:
        UsageError: there is no such detector or file, or its extra is not installed.
        DataError: the file is corrupt, cannot be run, or is no detector with landmarks.
        IntegrityError: it is not signed, where :mod:`plsc.signing` asks for that.
    """
    if spec == MTCNN:
        from plsc.embedding.mtcnn import MtcnnDetector

        return MtcnnDetector(threshold)
    if spec != YUNET and (not spec.startswith(PREFIX) or spec == PREFIX):
        near = did_you_mean(spec, [MTCNN, YUNET])
        meant = f"; did you mean {PREFIX}{spec}?" if spec.lower().endswith(".onnx") else near
        raise UsageError(f"a detector is named {MTCNN}, {YUNET} or {PREFIX}FILE, not {spec!r}{meant}")
    path = packaged_file(YUNET) if spec == YUNET else Path(spec.removeprefix(PREFIX))
    if not path.is_file():
        raise UsageError(f"there is no detector {path}; without a file, there are {MTCNN} and {YUNET}")
    from plsc.embedding.onnx_detector import OnnxDetector

    return OnnxDetector(path, threshold, tried)
