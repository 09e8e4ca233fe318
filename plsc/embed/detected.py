"""Landmarks from a detector, for data sets that are read by several processes."""

from pathlib import Path
from typing import Any

import torch

from plsc.embed.detector import PREFIX, Detector, Float32, open_detector
from plsc.files import sha256


class DetectedLandmarks:
    """Finds the main face of each picture, on the CPU of the process that decodes it.

    fingerprint: the detector file's SHA-256. Making it opens the detector once, so that a wrong one is refused at the
    start; each process opens its own when it first needs it. Raises as :func:`plsc.embed.detector.open_detector`.
    """

    def __init__(self, spec: str) -> None:
        open_detector(spec)
        self.spec = spec
        self.fingerprint = f"detector {sha256(Path(spec.removeprefix(PREFIX)))[:16]}"
        self._detector: Detector | None = None

    def __call__(self, index: int, image: torch.Tensor, name: str) -> Float32:
        """The landmarks (5, 2) of the main face of ``image`` uint8 (3, H, W); DataError when there is none."""
        if self._detector is None:
            self._detector = open_detector(self.spec)
        return self._detector.main_face(image, name).landmarks

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_detector": None}
