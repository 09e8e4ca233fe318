"""What a move to another model costs a gallery: its true accepts, at the false-match rate that its service has now.

The pairs are those of the gallery's own faces. Its present threshold lets some pairs of different persons match in the
old space; the new threshold lets as many match in the new one, of the very same pairs. Estimated embeddings
(plsc.gallery.migration.adapter) are compared with real ones of the new model, as a search does that meets them: give
estimates by a fit without their person, of :func:`plsc.gallery.migration.adapter.fit_with_estimates`.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from plsc.embedding.columns import Float32, Float64, Int64
from plsc.errors import DataError, UsageError
from plsc.evaluation.pairs import check_finite, unit_rows_float32
from plsc.evaluation.report import aligned, percent
from plsc.evaluation.roc import (
    MINIMUM_IMPOSTORS,
    RATE_ROUNDING,
    Roc,
    all_pairs_roc,
    allowed_impostors,
    area_under_curve,
    places_in_identities,
    sample_identities,
    sampled_curve,
    threshold_above,
    threshold_that_holds,
)
from plsc.gallery.migration.bootstrap import PairScores, impostor_pairs, pair_scores

MINIMUM_PERSONS = 10  # who have two faces
_MOST_FACES = 100  # of a person: ten thousand of one would be half of all pairs
_DRAWS = 500
_PERCENTILES = (2.5, 97.5)
Interval = tuple[float, float]


@dataclass(frozen=True)
class SpaceRates:
    """A space's rates. Intervals hold 95% of the draws of persons.

    Attributes:
        threshold: the cosine from which on the share of the pairs of different persons that match is ``judged_fmr``.
        tar: share of the pairs of a person's faces that match at it.
        tar_interval: of ``tar``; each draw has a threshold of its own.
        used_tar: likewise at one threshold for all rows: the service's in the old space, in the others the stricter of
            theirs.
        used_fmr: share of the pairs of different persons that match at that.
        used_tar_interval: of ``used_tar``.
    """

    threshold: float
    tar: float
    tar_interval: Interval
    used_tar: float
    used_fmr: float
    used_tar_interval: Interval


@dataclass(frozen=True)
class Judgement:
    """What a move costs.

    Attributes:
        fmr: share of the pairs of different persons that match at the service's threshold.
        fmr_bound: what the rate is below with 95% confidence, where fewer than ten pairs match; else the upper end of
            its interval.
        is_supported: at least ten pairs match: the rate is more than chance.
        judged_fmr: the rate at which the spaces are compared: ``fmr``, or where that is not supported the lowest that
            is, at which ten pairs match.
        old_threshold: the service's.
        threshold: the new one, at which as many of these pairs of different persons match as at the old one; where that
            is not supported no more of a person's pairs either, so that a stricter old one has a stricter new one. With
            estimates it is the stricter one of both kinds of rows, so that neither has more false matches.
        spaces: by name, "old", "new" and perhaps "estimated".
        loss: how much smaller the share of a person's pairs that match is than today, of those rows that lose most;
            negative if all gain.
        loss_interval: of ``loss``.
        threshold_loss: likewise from ``old_threshold`` to ``threshold``: other than ``loss`` where those have another
            false-match rate than ``judged_fmr``.
        persons: who were judged.
        faces: of theirs.
        genuine_pairs, impostor_pairs: of these.
        curves: by space, ``{"roc": {"far", "tar"} or None, "auc"}``, as plsc.evaluation.report.roc_figure draws them.
    """

    fmr: float
    fmr_bound: float
    is_supported: bool
    judged_fmr: float
    old_threshold: float
    threshold: float
    spaces: Mapping[str, SpaceRates]
    loss: float
    loss_interval: Interval
    threshold_loss: float
    persons: int
    faces: int
    genuine_pairs: int
    impostor_pairs: int
    curves: Mapping[str, Any]

    @property
    def largest_loss(self) -> float:
        """The larger one of ``loss`` and ``threshold_loss``."""
        return max(self.loss, self.threshold_loss)

    def refuses(self, max_loss: float) -> bool:
        """True if more than ``max_loss`` of a person's pairs would be lost: the measured loss, not its interval's end.

        With few persons the interval ends beyond any loss that one would state.
        """
        return self.largest_loss > max_loss + RATE_ROUNDING

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON can hold it."""
        return {**asdict(self), "warnings": self.warnings()}

    def warnings(self) -> list[str]:
        """What the figures cannot tell, a sentence each."""
        if self.is_supported:
            return []
        matched = round(self.fmr * self.impostor_pairs)
        return [
            f"{matched} of {self.impostor_pairs:,} pairs of different persons match at the old threshold: its "
            f"false-match rate is below {self.fmr_bound:.1e} (95%), and the new one is as strict on these pairs, not "
            f"beyond them; the spaces are compared at FMR {self.judged_fmr:.1e}, and from the old to the new threshold "
            f"TAR loses {self.threshold_loss:.4f}. Take the new threshold from plsc eval --calibration on more people"
        ]

    def table(self) -> str:
        """The rates of all spaces, for a terminal."""
        columns = self.spaces.values()
        rows = [
            ("", *self.spaces),
            (f"TAR at FMR {self.judged_fmr:.1e}, %", *(percent(each.tar) for each in columns)),
            ("  95% of draws of persons", *(_interval(each.tar_interval) for each in columns)),
            ("  threshold, cosine", *(f"{each.threshold:.4f}" for each in columns)),
            ("TAR at one threshold, %", *(percent(each.used_tar) for each in columns)),
            ("  95% of draws of persons", *(_interval(each.used_tar_interval) for each in columns)),
            ("  FMR there", *(f"{each.used_fmr:.1e}" for each in columns)),
        ]
        low, high = self.loss_interval
        lines = [
            aligned(rows),
            f"threshold: {self.old_threshold:.4f} before, {self.threshold:.4f} after",
            f"TAR lost: {self.loss:.4f} ({low:.4f} to {high:.4f}), of {self.genuine_pairs:,} same and "
            f"{self.impostor_pairs:,} different pairs of {self.persons:,} persons",
            *self.warnings(),
        ]
        return "\n".join(lines)


class _Space(NamedTuple):
    roc: Roc
    scores: PairScores

    def at_count(self, allowed: int) -> tuple[float, float]:
        """The lowest threshold at which at most ``allowed`` pairs of different persons match, and TAR there."""
        threshold, points = threshold_that_holds(self.roc, allowed)
        return threshold, float(self.roc.genuine[points - 1] / self.roc.genuine_pairs) if points else 0.0

    def at_tar(self, tar: float) -> float:
        """The lowest threshold at which no larger share of a person's pairs matches."""
        points = int(np.searchsorted(self.roc.genuine, round(tar * self.roc.genuine_pairs), side="right"))
        return float(self.roc.thresholds[points - 1]) if points else threshold_above(self.roc)

    def at_threshold(self, threshold: float) -> tuple[float, int]:
        """TAR at a threshold, and how many pairs of different persons match."""
        points = int(np.searchsorted(-self.roc.thresholds, -threshold, side="right"))
        if not points:
            return 0.0, 0
        return float(self.roc.genuine[points - 1] / self.roc.genuine_pairs), int(self.roc.impostors[points - 1])


def judge(
    old: Float32,
    new: Float32,
    persons: Int64,
    *,
    threshold: float | None,
    new_threshold: float | None = None,
    fmr: float = 1e-3,
    estimated: Float32 | None = None,
    seed: int = 0,
) -> Judgement:
    """Judge a move by faces that have embeddings of both models.

    Beyond 10^8 pairs, persons are sampled, and beyond 100 faces of a person, those.

    Args:
        old: embeddings (n, d) of the old model.
        new: embeddings (n, e) of the same faces by the new one.
        persons: whose faces they are, (n,).
        threshold: the service's, a cosine of the old model. None: the one of ``fmr``.
        new_threshold: of the new model; None: the one that fits the service's.
        fmr: without a threshold, the false-match rate to judge at.
        estimated: embeddings (n, e) by an adapter that did not see their persons.
        seed: of samples and draws.

    Raises:
        UsageError: shapes that do not fit each other, or a rate outside (0, 1).
        DataError: a row is not finite, or fewer than ten persons have two faces.
    """
    by_name = {"old": (old, old), "new": (new, new)} | ({} if estimated is None else {"estimated": (new, estimated)})
    _check(by_name, persons, fmr)
    rows = _chosen(persons, seed)
    numbers = np.unique(persons[rows], return_inverse=True)[1]
    faces = np.bincount(numbers)
    if np.sum(faces > 1) < MINIMUM_PERSONS:
        raise DataError(
            f"a move is judged by {MINIMUM_PERSONS} persons at the least who have two faces with embeddings of both "
            f"models, and there are {np.sum(faces > 1)}; enrol second pictures"
        )
    unit = {id(each): unit_rows_float32(each[rows]) for pair in by_name.values() for each in pair}  # each of them once
    units = {name: (unit[id(probes)], unit[id(gallery)]) for name, (probes, gallery) in by_name.items()}
    rocs = {name: all_pairs_roc(probes, numbers, gallery) for name, (probes, gallery) in units.items()}
    allowed = allowed_impostors(rocs["old"], fmr) if threshold is None else _matched(rocs["old"], threshold)
    random = np.random.default_rng(seed)
    spaces = {
        name: _Space(
            rocs[name], pair_scores(probes, gallery, numbers, rocs[name], max(allowed, MINIMUM_IMPOSTORS), random)
        )
        for name, (probes, gallery) in units.items()
    }
    anchor = threshold if allowed >= MINIMUM_IMPOSTORS else None
    draws = _draws(spaces, faces, anchor, max(allowed, MINIMUM_IMPOSTORS), random)
    return _judged(spaces, faces, (threshold, new_threshold), allowed, draws)


def _matched(roc: Roc, threshold: float) -> int:
    points = int(np.searchsorted(-roc.thresholds, -threshold, side="right"))
    return int(roc.impostors[points - 1]) if points else 0


def _check(by_name: Mapping[str, tuple[Float32, Float32]], persons: Int64, fmr: float) -> None:
    if not 0 < fmr < 1:
        raise UsageError(f"a false-match rate lies between 0 and 1, not at {fmr:g}")
    for name, pair in by_name.items():
        for rows in pair:
            if rows.ndim != 2 or rows.shape != (len(persons), pair[0].shape[1]):
                raise UsageError(f"{name} embeddings of shape {rows.shape} do not fit {len(persons):,} faces")
            check_finite(rows)


def _chosen(persons: Int64, seed: int) -> Int64:
    """The faces that are judged, ascending."""
    order = np.random.default_rng(seed).permutation(len(persons))
    kept = np.sort(order[places_in_identities(persons[order]) < _MOST_FACES])
    return kept[sample_identities(persons[kept], seed)]


def _judged(
    spaces: Mapping[str, _Space],
    faces: Int64,
    given: tuple[float | None, float | None],
    allowed: int,
    draws: Mapping[str, Float64],
) -> Judgement:
    threshold, new = given
    is_supported, judged = allowed >= MINIMUM_IMPOSTORS, max(allowed, MINIMUM_IMPOSTORS)
    own = {name: space.at_count(judged) for name, space in spaces.items()}
    later = [name for name in spaces if name != "old"]
    used = dict.fromkeys(later, max(own[name][0] for name in later))
    used["old"] = threshold if threshold is not None and is_supported else own["old"][0]
    pairs = spaces["old"].roc.impostor_pairs
    rates = {}
    for name, space in spaces.items():
        used_tar, matched = space.at_threshold(used[name])
        own_interval, used_interval = map(_percentiles, draws[name].T)
        rates[name] = SpaceRates(*own[name], own_interval, used_tar, matched / pairs, used_interval)
    losses = draws["old"][:, 1] - np.min([draws[name][:, 1] for name in later], axis=0)
    old = spaces["old"].at_count(allowed)[0] if threshold is None else threshold
    accepted, _ = spaces["old"].at_threshold(old)
    if new is None:
        new = max(spaces[name].at_count(allowed)[0] for name in later)
        if threshold is not None and not is_supported:
            new = max(new, *(spaces[name].at_tar(accepted) for name in later))
    return Judgement(
        fmr=allowed / pairs,
        fmr_bound=_percentiles(draws["fmr"])[1] if is_supported else _poisson_bound(allowed) / pairs,
        is_supported=is_supported,
        judged_fmr=judged / pairs,
        old_threshold=old,
        threshold=new,
        spaces=rates,
        loss=rates["old"].used_tar - min(rates[name].used_tar for name in later),
        loss_interval=_percentiles(losses),
        threshold_loss=accepted - min(spaces[name].at_threshold(new)[0] for name in later),
        persons=len(faces),
        faces=int(faces.sum()),
        genuine_pairs=spaces["old"].roc.genuine_pairs,
        impostor_pairs=pairs,
        curves={
            name: {"roc": sampled_curve(space.roc), "auc": area_under_curve(space.roc)}
            for name, space in spaces.items()
        },
    )


def _draws(
    spaces: Mapping[str, _Space], faces: Int64, threshold: float | None, allowed: int, random: np.random.Generator
) -> dict[str, Float64]:
    """For each draw of persons: by space (draws, 2) TAR at its own threshold and at the one for all; "fmr" (draws,)."""
    found = {name: np.empty((_DRAWS, 2)) for name in spaces} | {"fmr": np.empty(_DRAWS)}
    fmr = allowed / spaces["old"].roc.impostor_pairs
    for draw in range(_DRAWS):
        times = np.bincount(random.integers(len(faces), size=len(faces)), minlength=len(faces)).astype(np.float64)
        pairs = impostor_pairs(times, faces)
        rate = fmr if threshold is None else spaces["old"].scores.matched(times, threshold) / max(pairs, 1.0)
        limits = {name: space.scores.threshold(times, rate * pairs) for name, space in spaces.items()}
        used = dict.fromkeys(spaces, max(limit for name, limit in limits.items() if name != "old"))
        # Limits are what does not match any more, a service's threshold is what does.
        used["old"] = limits["old"] if threshold is None else float(np.nextafter(threshold, -2))
        found["fmr"][draw] = rate
        for name, space in spaces.items():
            found[name][draw] = [space.scores.accepted(times, above) for above in (limits[name], used[name])]
    return found


def _percentiles(values: Float64) -> Interval:
    low, high = np.percentile(values, _PERCENTILES)
    return float(low), float(high)


def _interval(interval: Interval) -> str:
    return f"{percent(interval[0])} to {percent(interval[1])}"


def _poisson_bound(count: int) -> float:
    """The expected number at which ``count`` events or fewer have a chance of 5%: 3 for none, the rule of three."""
    low, high = float(count), 20.0 + 3 * count
    for _ in range(60):
        middle = (low + high) / 2
        chance = math.exp(-middle) * sum(middle**events / math.factorial(events) for events in range(count + 1))
        low, high = (middle, high) if chance > 0.05 else (low, middle)
    return high
