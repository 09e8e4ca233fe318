"""Calibration: the cosine threshold of each false-match rate, measured on labelled images, in a file for the service.

The file is JSON with a digest of its own content::

    {"format": "plsc calibration", "version": 1, "contract_id", "model", "sets": [names], "images",
     "impostor_pairs", "genuine_pairs",
     "points": [{"fmr", "threshold", "tmr", "impostors"}, …], "searches": {…}, "seal"}

``fmr`` is the false-match rate that a point guarantees, ``impostors`` the number of different pairs that score at least
``threshold`` (at most ``fmr`` times all of them), ``tmr`` the true-match rate: the share of same pairs that do. The
rates fall from 0.1 by 1, 5, 2 in each decade, as long as ten impostors support each. Pairs share people, so ten pairs
are fewer than ten independent cases: use more people before relying on the last point.

``searches``, which a file may lack, predicts thresholds of searches: :mod:`plsc.evaluation.search_thresholds`.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from plsc.errors import DataError, IntegrityError, UsageError
from plsc.evaluation.roc import MINIMUM_IMPOSTORS, Roc, allowed_impostors, merge_rocs, threshold_that_holds
from plsc.evaluation.search_thresholds import SearchCalibration
from plsc.files import LARGEST_JSON, digest, parse_json, write_json
from plsc.signing import CALIBRATION, read_signed

FORMAT = "plsc calibration"
VERSION = 1
DEFAULT_FMR = 1e-4  # of a service whose operator names none
# Parsed from text: float("5e-05") is nearest to the decimal, 5 * 10.0**-5 need not be.
RATES = (0.1, *(float(f"{digit}e-{power}") for power in range(2, 10) for digit in (5, 2, 1)))
_ROUNDING = 1 + 1e-12  # rates are decimal; see plsc.evaluation.roc.allowed_impostors


@dataclass(frozen=True)
class OperatingPoint:
    """A threshold (a cosine; matches score at least that) and its rates.

    Attributes:
        fmr: the false-match rate that it guarantees.
        threshold: the cosine.
        tmr: the share of same pairs that match.
        impostors: the number of different pairs that match.
    """

    fmr: float
    threshold: float
    tmr: float
    impostors: int


@dataclass(frozen=True)
class Calibration:
    """Operating points of one model, from the highest rate down; the module describes the fields."""

    contract_id: str
    model: str
    sets: tuple[str, ...]
    images: int
    impostor_pairs: int
    genuine_pairs: int
    points: tuple[OperatingPoint, ...]
    searches: SearchCalibration | None = None

    @property
    def default_fmr(self) -> float:
        """The rate that a service keeps where none is named: 1e-4, or the smallest that was measured."""
        return max(DEFAULT_FMR, self.points[-1].fmr)

    def point_at(self, fmr: float) -> OperatingPoint:
        """Return the loosest measured point whose rate is at most ``fmr``: between two points, the stricter.

        Raises:
            UsageError: ``fmr`` is outside (0, 1), or below the smallest rate that the pairs support.
        """
        if not 0 < fmr < 1:
            raise UsageError(f"a false-match rate lies between 0 and 1, not at {fmr:g}")
        for point in self.points:
            if point.fmr <= fmr * _ROUNDING:
                return point
        smallest = self.points[-1].fmr
        raise UsageError(
            f"a false-match rate of {fmr:g} is beyond the evidence: {self.impostor_pairs:,} different pairs support "
            f"{smallest:g} at the least; use that, or calibrate on more people"
        )

    def threshold_at(self, fmr: float) -> float:
        """Return the cosine from which at most ``fmr`` of the different pairs match; raises as :meth:`point_at`."""
        return self.point_at(fmr).threshold


def calibrate(
    rocs: Mapping[str, Roc], *, contract_id: str, model: str, images: int, searches: SearchCalibration | None = None
) -> Calibration:
    """Compute the operating points of all pairs of several sets together.

    Args:
        rocs: each set's exact ROC by its name.
        contract_id: of the embeddings.
        model: the model's name.
        images: number of images that form the pairs.
        searches: what predicts thresholds of searches.

    Raises:
        DataError: the pairs do not even support a rate of 0.1, or there is no same pair.
    """
    roc = merge_rocs(list(rocs.values()))
    if not roc.genuine_pairs:
        raise DataError(f"{', '.join(rocs)}: no two images are the same person's; a calibration needs such pairs")
    points = [point for rate in RATES if (point := operating_point(roc, rate)) is not None]
    if not points:
        raise DataError(
            f"{', '.join(rocs)}: {roc.impostor_pairs:,} different pairs support no false-match rate up to 0.1 "
            f"({MINIMUM_IMPOSTORS} of them must match there); calibrate on more people"
        )
    pairs = roc.impostor_pairs, roc.genuine_pairs
    return Calibration(contract_id, model, tuple(rocs), images, *pairs, tuple(points), searches)


def operating_point(roc: Roc, fmr: float) -> OperatingPoint | None:
    """Find the lowest score of ``roc`` at which at most ``fmr`` of its different pairs match.

    Returns:
        It and its rates; None where fewer than ten different pairs may match, or there is no same pair.
    """
    allowed = allowed_impostors(roc, fmr)
    if allowed < MINIMUM_IMPOSTORS or not roc.genuine_pairs:
        return None
    threshold, point = threshold_that_holds(roc, allowed)
    if not point:  # more impostors than allowed tie at the very top: no score keeps them out
        return None
    tmr = float(roc.genuine[point - 1] / roc.genuine_pairs)
    return OperatingPoint(fmr, threshold, tmr, int(roc.impostors[point - 1]))


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Write ``calibration`` with its digest, atomically; :class:`UsageError` if ``path`` cannot be written."""
    kept = {name: value for name, value in asdict(calibration).items() if value is not None}
    content = {"format": FORMAT, "version": VERSION, **json.loads(json.dumps(kept))}
    write_json(path, {**content, "seal": digest(content)})


def read_calibration(path: str | Path) -> Calibration:
    """Read a file of :func:`write_calibration`.

    Raises:
        DataError: there is no such file, or it is no calibration, or of another version.
        IntegrityError: its content does not match its digest; or it is not signed, where :mod:`plsc.signing` asks for
            that.
    """
    how = "`plsc eval MODEL --data DIR --calibration FILE` writes one"
    if not Path(path).exists():
        raise DataError(f"{path} does not exist; {how}")
    content = parse_json(read_signed(Path(path), CALIBRATION, LARGEST_JSON), Path(path))
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise DataError(f"{path} is no calibration; {how}")
    seal = content.pop("seal", None)
    try:
        sound = seal == digest(content)
    except ValueError:  # NaN and infinities, which JSON does not have
        sound = False
    if not sound:
        raise IntegrityError(f"{path} is corrupt (its content is not what was sealed); make it again with plsc eval")
    if content.get("version") != VERSION:
        raise DataError(f"{path} is of version {content.get('version')}; this plsc reads calibrations of {VERSION}")
    return _parsed(path, content)


def _parsed(path: str | Path, content: dict[str, Any]) -> Calibration:
    """Check the types of the fields, which a matching digest does not guarantee."""
    from pydantic import TypeAdapter, ValidationError

    try:
        calibration = TypeAdapter(Calibration).validate_json(json.dumps(content), strict=True)
        reason = "" if calibration.searches is None else calibration.searches.flaw()
    except ValidationError as error:
        first = error.errors()[0]
        reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    rates = [] if reason else [point.fmr for point in calibration.points]
    if not rates or rates != sorted(rates, reverse=True):
        raise IntegrityError(
            f"{path} holds no sound calibration ({reason or 'its rates do not fall'}); make it again with plsc eval"
        )
    return calibration
