"""What a lower precision costs a model: the true accepts that it loses on labelled pictures, and its new threshold.

Both precisions are judged on the same pictures of people none of whose pictures the lower one was calibrated on.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from plsc.data import ImageDataset, open_dataset
from plsc.embedding.columns import Int64
from plsc.embedding.embedder import Engine
from plsc.embedding.pipeline import decoded_ahead
from plsc.errors import DataError
from plsc.evaluation.calibration import OperatingPoint, operating_point
from plsc.evaluation.evaluator import EvaluationSet, evaluate
from plsc.evaluation.roc import RATE_ROUNDING, Roc
from plsc.models.preprocessing import Preprocessing
from plsc.parallel.mesh import Mesh

RATES = (1e-4, 1e-3, 1e-2)  # false accept rates: the first that the different pairs support is judged at
CALIBRATION_BATCH = 16


@dataclass(frozen=True)
class PrecisionLoss:
    """Two precisions on the same pairs.

    Attributes:
        far: the false accept rate of both thresholds.
        reference: threshold and rates in float32.
        reduced: in the lower precision.
        reference_accuracy: of the LFW protocol, in float32; None with fewer than ten pairs of a kind.
        reduced_accuracy: in the lower precision.
        genuine_pairs: that were judged.
        impostor_pairs: likewise.
    """

    far: float
    reference: OperatingPoint
    reduced: OperatingPoint
    reference_accuracy: float | None
    reduced_accuracy: float | None
    genuine_pairs: int
    impostor_pairs: int

    @property
    def tar_lost(self) -> float:
        """Share of the same pairs that the lower precision accepts less of; negative if it accepts more."""
        return self.reference.tmr - self.reduced.tmr

    def lines(self, precision: str) -> list[str]:
        """Describe them for people; ``precision`` is the lower one's name."""
        lines = [
            f"{name}: TAR {point.tmr:.4f} at FAR {self.far:g} from the cosine {point.threshold:.4f} on"
            + ("" if accuracy is None else f", accuracy {accuracy:.4f}")
            for name, point, accuracy in (
                ("fp32", self.reference, self.reference_accuracy),
                (precision, self.reduced, self.reduced_accuracy),
            )
        ]
        pairs = f"{self.genuine_pairs:,} same and {self.impostor_pairs:,} different pairs"
        return [*lines, f"TAR lost: {self.tar_lost:.4f}, of {pairs}"]

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as ``plsc export --json`` writes them."""
        return {
            "far": self.far,
            "tar_fp32": self.reference.tmr,
            "tar": self.reduced.tmr,
            "tar_lost": self.tar_lost,
            "threshold_fp32": self.reference.threshold,
            "threshold": self.reduced.threshold,
            "accuracy_fp32": self.reference_accuracy,
            "accuracy": self.reduced_accuracy,
            "genuine_pairs": self.genuine_pairs,
            "impostor_pairs": self.impostor_pairs,
        }


@dataclass(frozen=True)
class _Part:
    """Some images of a data set."""

    dataset: ImageDataset
    indices: Int64

    def __len__(self) -> int:
        return len(self.indices)

    def picture(self, index: int) -> torch.Tensor:
        return self.dataset.picture(int(self.indices[index]))

    def key(self, index: int) -> str:
        return self.dataset.key(int(self.indices[index]))


class JudgedPictures:
    """Labelled pictures, of which some calibrate and the others, of other people, judge.

    Args:
        source: anything that :func:`plsc.data.open_dataset` opens.
        preprocessing: of the model.
        calibration: pictures for that, whole people's until there are so many, and at most half of the people's.

    Raises:
        UsageError, DataError: as :func:`plsc.data.open_dataset`.
    """

    def __init__(self, source: str, preprocessing: Preprocessing, calibration: int) -> None:
        self._preprocessing = preprocessing
        dataset = open_dataset(source, image_size=preprocessing.image_size, interpolation=preprocessing.interpolation)
        order = np.random.default_rng(0).permutation(dataset.num_classes)
        counts = np.cumsum(np.bincount(dataset.labels, minlength=dataset.num_classes)[order])
        people = min(int(np.searchsorted(counts, calibration)) + 1, len(order) // 2) if calibration else 0
        calibrates = np.isin(dataset.labels, order[:people])
        self._calibration = _Part(dataset, np.flatnonzero(calibrates)[:calibration])
        judged = np.flatnonzero(~calibrates)
        self._judged = EvaluationSet(source, _Part(dataset, judged), labels=dataset.labels[judged])

    def batches(self) -> Iterator[torch.Tensor]:
        """Yield those that calibrate, uint8 (B, 3, H, W); unreadable ones are left out."""
        starts = range(0, len(self._calibration), CALIBRATION_BATCH)
        ranges = [range(start, min(start + CALIBRATION_BATCH, len(self._calibration))) for start in starts]
        for batch in decoded_ahead(self._calibration, ranges, self._preprocessing):
            readable = [place for place in range(len(batch.images)) if place not in batch.errors]
            if readable:
                yield batch.images[readable]

    def loss(self, reference: Engine, reduced: Engine, most: float) -> PrecisionLoss:
        """Judge both, at the lowest of :data:`RATES` that the pairs support.

        Args:
            reference: the model in float32.
            reduced: in the lower precision.
            most: TAR that it may lose.

        Raises:
            DataError: it loses more; there are too few pairs to tell; too many pictures cannot be read.
        """
        judged = [self._evaluated(engine, quiet=engine is reduced) for engine in (reference, reduced)]
        rocs = [roc for _, roc in judged]
        roc = rocs[0]
        if roc.genuine_pairs * (most + RATE_ROUNDING) < 1:
            raise DataError(
                f"{self._judged.name}: {roc.genuine_pairs:,} same pairs cannot tell a loss of {most:g}; give pictures "
                "of more people, two and more of each"
            )
        for far in RATES:
            points = [point for each in rocs if (point := operating_point(each, far)) is not None]
            if len(points) == 2:
                break
        else:
            raise DataError(
                f"{self._judged.name}: {roc.impostor_pairs:,} different pairs support no false accept rate of "
                f"{RATES[-1]:g}, or too many of them have one score; give pictures of more people"
            )
        accuracies = [accuracy for accuracy, _ in judged]
        found = PrecisionLoss(
            far, points[0], points[1], accuracies[0], accuracies[1], roc.genuine_pairs, roc.impostor_pairs
        )
        if found.tar_lost > most + RATE_ROUNDING:
            raise DataError(
                f"it loses {found.tar_lost:.4f} of TAR at FAR {far:g} ({found.reference.tmr:.4f} in fp32, "
                f"{found.reduced.tmr:.4f} in {reduced.precision}), and {most:g} is the most"
            )
        return found

    def _evaluated(self, engine: Engine, *, quiet: bool) -> tuple[float | None, Roc]:
        rocs: dict[str, Roc] = {}
        results = evaluate(
            engine.run,
            [self._judged],
            image_size=self._preprocessing.image_size,
            interpolation=self._preprocessing.interpolation,
            mesh=Mesh(0, 1, 0, torch.device("cpu")),
            quiet=quiet,
            rocs=rocs,
        )
        ((name, result),) = results.items()
        return result["accuracy"], rocs[name]
