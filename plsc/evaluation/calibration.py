"""Which cosine threshold holds a false-match rate: measured on labelled images, kept in a file for the service.

The file is JSON, sealed by its own hash::

    {"format": "plsc calibration", "version": 1, "contract_id", "model", "sets": [names], "images",
     "impostor_pairs", "genuine_pairs",
     "points": [{"fmr", "threshold", "tmr", "impostors"}, …], "seal"}

``fmr`` is the false-match rate that a point promises, ``impostors`` the different pairs that score at least
``threshold`` (at most ``fmr`` times all of them), ``tmr`` the true-match rate: the share of same pairs that do. The
rates fall from 0.1 by 1, 5, 2 in each decade, as far as ten impostors stand behind each. Pairs of images share people,
so that ten pairs are fewer than ten independent cases: take more people before trusting the last point.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from plsc.errors import DataError, IntegrityError, UsageError
from plsc.evaluation.roc import Roc, merge_rocs
from plsc.files import digest, read_json, write_json

FORMAT = "plsc calibration"
VERSION = 1
MINIMUM_IMPOSTORS = 10
# Written as they are said: 5e-05 is a float nearest to the decimal, 5 * 10.0**-5 need not be.
RATES = (0.1, *(float(f"{digit}e-{power}") for power in range(2, 10) for digit in (5, 2, 1)))
_ROUNDING = 1 + 1e-12  # rates are given in decimal; see plsc.evaluation.roc.tar_at_far


@dataclass(frozen=True)
class OperatingPoint:
    """At ``threshold`` (a cosine; matches score at least that) ``impostors`` different pairs match.

    ``fmr``: the false-match rate that holds there; ``tmr``: the share of same pairs that match.
    """

    fmr: float
    threshold: float
    tmr: float
    impostors: int


@dataclass(frozen=True)
class Calibration:
    """Operating points of one model, ``points`` from the highest rate down; see the module for the other fields."""

    contract_id: str
    model: str
    sets: tuple[str, ...]
    images: int
    impostor_pairs: int
    genuine_pairs: int
    points: tuple[OperatingPoint, ...]

    def point_at(self, fmr: float) -> OperatingPoint:
        """The loosest measured point whose rate is at most ``fmr``: between two points, the stricter.

        Raises :class:`UsageError` when ``fmr`` lies outside (0, 1), or below the smallest rate that the pairs support.
        """
        if not 0 < fmr < 1:
            raise UsageError(f"a false-match rate lies between 0 and 1, not at {fmr:g}")
        for point in self.points:
            if point.fmr <= fmr * _ROUNDING:
                return point
        smallest = self.points[-1].fmr
        raise UsageError(
            f"a false-match rate of {fmr:g} is beyond the evidence: {self.impostor_pairs:,} different pairs support "
            f"{smallest:g} at the least; ask for that, or calibrate on more people"
        )

    def threshold_at(self, fmr: float) -> float:
        """The cosine at and above which at most ``fmr`` of the different pairs match; raises as :meth:`point_at`."""
        return self.point_at(fmr).threshold


def calibrate(rocs: Mapping[str, Roc], *, contract_id: str, model: str, images: int) -> Calibration:
    """The operating points of all pairs of the sets named in ``rocs`` together.

    ``images``: how many images the pairs are made of. Raises :class:`DataError` when the pairs do not even support a
    rate of 0.1, or there is no same pair.
    """
    roc = merge_rocs(list(rocs.values()))
    if not roc.genuine_pairs:
        raise DataError(f"{', '.join(rocs)}: no two images are the same person's; a calibration needs such pairs")
    points = [point for rate in RATES if (point := _operating_point(roc, rate)) is not None]
    if not points:
        raise DataError(
            f"{', '.join(rocs)}: {roc.impostor_pairs:,} different pairs support no false-match rate up to 0.1 "
            f"({MINIMUM_IMPOSTORS} of them must match there); calibrate on more people"
        )
    return Calibration(contract_id, model, tuple(rocs), images, roc.impostor_pairs, roc.genuine_pairs, tuple(points))


def _operating_point(roc: Roc, fmr: float) -> OperatingPoint | None:
    """The lowest score at which at most ``fmr`` of the different pairs match; None without enough of them."""
    allowed = int(fmr * roc.impostor_pairs * _ROUNDING)
    if allowed < MINIMUM_IMPOSTORS:
        return None
    reached = int(np.searchsorted(roc.impostors, allowed, side="right"))
    if not reached:  # more impostors than allowed tie at the very top: no score keeps them out
        return None
    place = reached - 1
    tmr = float(roc.genuine[place] / roc.genuine_pairs)
    return OperatingPoint(fmr, float(roc.thresholds[place]), tmr, int(roc.impostors[place]))


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Write ``calibration`` with its seal, atomically; :class:`UsageError` if that cannot be."""
    content = {"format": FORMAT, "version": VERSION, **json.loads(json.dumps(asdict(calibration)))}
    write_json(path, {**content, "seal": digest(content)})


def read_calibration(path: str | Path) -> Calibration:
    """Read what :func:`write_calibration` wrote.

    Raises :class:`DataError` if there is no such file, or it is something else or of another version, and
    :class:`IntegrityError` if it was changed after it was sealed.
    """
    content = read_json(Path(path))
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise DataError(f"{path} is no calibration; `plsc eval MODEL --data DIR --calibration FILE` writes one")
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
    """The fields in their types; a file that was sealed with others is refused."""
    try:
        return Calibration(
            contract_id=_as(str, content["contract_id"]),
            model=_as(str, content["model"]),
            sets=tuple(_as(str, name) for name in _as(list, content["sets"])),
            images=_as(int, content["images"]),
            impostor_pairs=_as(int, content["impostor_pairs"]),
            genuine_pairs=_as(int, content["genuine_pairs"]),
            points=_points(content["points"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise IntegrityError(f"{path} holds no sound calibration ({error}); make it again with plsc eval") from None


def _points(values: Sequence[Mapping[str, Any]]) -> tuple[OperatingPoint, ...]:
    points = tuple(
        OperatingPoint(
            float(value["fmr"]), float(value["threshold"]), float(value["tmr"]), _as(int, value["impostors"])
        )
        for value in values
    )
    rates = [point.fmr for point in points]
    if not rates or rates != sorted(rates, reverse=True):
        raise ValueError("its rates do not fall")
    return points


def _as(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value
