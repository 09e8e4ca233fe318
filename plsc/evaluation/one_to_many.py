"""Errors of searches in a given gallery, in the terms of ISO/IEC 19795-1: FNIR at FPIR, and rank-k.

A mated probe shows an enrolled person, a non-mated one does not. The score of a person is that of the best face, as in
``plsc serve``. FPIR(N, T) is the share of non-mated probes whose best score reaches T among N persons; FNIR(N, R, T)
that of mated probes whose own person is not among the R best, or below T (NIST IR 8271, section 3). Intervals are of
95%: percentiles of a bootstrap that draws persons, with all their pictures, for pictures of one person err together.
They hold for this gallery, and other probes like these.

A probe that gave no embedding finds nobody: a mated one is missed, a non-mated one no false positive.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from plsc.embedding.columns import Float32, Float64, Int64, Mask
from plsc.errors import DataError
from plsc.evaluation.probe import LabelledRows
from plsc.evaluation.roc import MINIMUM_IMPOSTORS, Roc, all_pairs_roc, sample_identities
from plsc.evaluation.search import FPIRS, parts_of
from plsc.progress import printable

RANKS = (1, 5, 10)
MINIMUM_PERSONS = 20  # who err, and who do not, on each side of an interval: with fewer it misses the truth too often
DRAWS = 1000
_PERCENTILES = (2.5, 97.5)


@dataclass(frozen=True)
class Searches:
    """What searches of a gallery of ``persons`` persons with ``faces`` faces found.

    Of M mated probes, ``own`` float32 (M,) is the score of their person, ``better`` int64 (M,) how many others score at
    least that, ``mated`` int64 (M,) the person; of U non-mated ones, ``best`` float32 (U,) is the best score and
    ``non_mated`` int64 (U,) the person.
    """

    persons: int
    faces: int
    own: Float32
    better: Int64
    mated: Int64
    best: Float32
    non_mated: Int64


def search_gallery(gallery: LabelledRows, mated: LabelledRows, non_mated: LabelledRows) -> Searches:
    """Search for all probes in ``gallery``. Persons of different parts are the same where their names are.

    Raises:
        DataError: a part is empty, a mated probe's person is not enrolled, or a non-mated one's is.
    """
    for part in (gallery, mated, non_mated):
        if not len(part):
            raise DataError(f"{part.name} holds no labelled picture with an embedding")
    order = np.argsort(gallery.labels, kind="stable")
    enrolled, first = np.unique(gallery.labels[order], return_index=True)
    place = {gallery.class_names[label]: number for number, label in enumerate(enrolled)}
    probed = np.concatenate([mated.labels, mated.lost])
    own = np.array([place.get(mated.class_names[label], -1) for label in probed])
    if (own < 0).any():
        name = printable(mated.class_names[probed[int(np.argmin(own))]])
        raise DataError(f"{mated.name}: {name} is not in the gallery {gallery.name}; mated probes show enrolled people")
    for label in np.unique(np.concatenate([non_mated.labels, non_mated.lost])):
        if non_mated.class_names[label] in place:
            name = printable(non_mated.class_names[label])
            raise DataError(f"{non_mated.name}: {name} is in the gallery {gallery.name}; non-mated probes show others")
    faces = gallery.unit[order]
    scores = np.full(len(own), -np.inf, dtype=np.float32)
    better = np.full(len(own), max(len(enrolled), *RANKS), dtype=np.int64)
    embedded = slice(len(mated))
    for rows, found in person_scores(mated.unit, faces, first):
        reached = np.take_along_axis(found, own[embedded][rows, None], axis=1)
        scores[embedded][rows] = reached[:, 0]
        better[embedded][rows] = np.sum(found >= reached, axis=1) - 1
    maxima = [found.max(axis=1) for _, found in person_scores(non_mated.unit, faces, first)]
    best = np.concatenate([*maxima, np.full(len(non_mated.lost), -1, dtype=np.float32)])
    strangers = np.concatenate([non_mated.labels, non_mated.lost])
    return Searches(len(enrolled), len(faces), scores, better, own, best, strangers)


def person_scores(probes: Float32, faces: Float32, first: Int64) -> Iterator[tuple[slice, Float32]]:
    """Yield a part of the probes and their score of each person, whose faces begin at ``first``."""
    for part in parts_of(len(probes), len(faces)):
        yield part, np.maximum.reduceat(probes[part] @ faces.T, first, axis=1)


def pair_roc(parts: Sequence[LabelledRows], seed: int = 0) -> Roc:
    """The exact ROC of all pairs of all pictures, sampled by ``seed`` where there are more than 10^8."""
    names = np.concatenate([np.asarray(part.class_names)[part.labels] for part in parts])
    labels = np.unique(names, return_inverse=True)[1].astype(np.int64)
    sample = sample_identities(labels, seed)
    return all_pairs_roc(np.concatenate([part.unit for part in parts])[sample], labels[sample])


def identification_errors(searches: Searches, *, rank: int = 1, seed: int = 0, draws: int = DRAWS) -> dict[str, Any]:
    """Compute FNIR at FPIR 1e-1, 1e-2 and 1e-3, and rank-1, 5 and 10 of the mated probes.

    Args:
        searches: of all probes.
        rank: R, among whose best a mated probe's person has to be.
        seed: draws the persons of the bootstrap.
        draws: their number.

    Returns:
        "persons", "faces", "rank"; "mated_probes", "mated_persons", "non_mated_probes" and "non_mated_persons";
        "rank1", "rank5" and "rank10"; "intervals" of these three; "fnir@fpir": {"threshold", "fnir", "interval",
        "false_positives"} by the rate, or None where fewer than ten non-mated probes may match. An interval is
        None where fewer than 20 persons are false positives, misses, or found.
    """
    generator = np.random.default_rng(seed)
    hits = {f"rank{k}": np.where(searches.better < k, 1.0, 0.0) for k in RANKS}
    reached = np.where(searches.better < rank, searches.own, -np.inf)
    thresholds = {name: _threshold(searches.best, fpir) for name, fpir in FPIRS.items()}
    drawn = _bootstrap(searches, hits, reached, generator, draws)
    points: dict[str, Any] = {}
    for name, threshold in thresholds.items():
        if threshold is None:
            points[name] = None
            continue
        missed, matched = reached < threshold, searches.best >= threshold
        told = _is_told(missed, searches.mated) and _persons(matched, searches.non_mated) >= MINIMUM_PERSONS
        points[name] = {
            "threshold": threshold,
            "fnir": float(missed.mean()),
            "interval": _interval(drawn[name]) if told else None,
            "false_positives": int(matched.sum()),
        }
    return {
        "persons": searches.persons,
        "faces": searches.faces,
        "rank": rank,
        "mated_probes": len(searches.own),
        "mated_persons": len(np.unique(searches.mated)),
        "non_mated_probes": len(searches.best),
        "non_mated_persons": len(np.unique(searches.non_mated)),
        **{name: float(hit.mean()) for name, hit in hits.items()},
        "intervals": {
            name: _interval(drawn[name]) if _is_told(hit == 0, searches.mated) else None for name, hit in hits.items()
        },
        "fnir@fpir": points,
    }


def _threshold(best: Float32, fpir: float) -> float | None:
    """The lowest cosine that at most ``fpir`` of ``best`` reach; None where fewer than ten may."""
    allowed = int(fpir * len(best) * (1 + 1e-12))
    if allowed < MINIMUM_IMPOSTORS:
        return None
    return float(np.nextafter(np.sort(best)[::-1][allowed], np.float32(np.inf)))


def _persons(chosen: Mask, persons: Int64) -> int:
    return len(np.unique(persons[chosen]))


def _is_told(missed: Mask, persons: Int64) -> bool:
    """Whether persons enough err, and persons enough do not."""
    return min(_persons(missed, persons), _persons(~missed, persons)) >= MINIMUM_PERSONS


def _interval(values: Float64) -> list[float]:
    low, high = np.percentile(values, _PERCENTILES)
    return [float(low), float(high)]


def _bootstrap(
    searches: Searches, hits: dict[str, Float64], reached: Float64, generator: np.random.Generator, draws: int
) -> dict[str, Float64]:
    """Return (draws,) of each rank and each FPIR: what other persons, drawn out of these, would have given."""
    falling, rising = np.argsort(-searches.best, kind="stable"), np.argsort(reached, kind="stable")
    strangers, mates = searches.non_mated[falling], searches.mated[rising]
    best, scores = searches.best[falling], reached[rising]
    found: dict[str, list[Float64]] = {name: [] for name in (*hits, *FPIRS)}
    for part in parts_of(draws, len(best) + len(scores)):
        size = len(range(*part.indices(draws)))
        accepted = np.cumsum(_weights(strangers, size, generator), axis=1)
        weights = _weights(mates, size, generator)
        missed = np.pad(np.cumsum(weights, axis=1), ((0, 0), (1, 0)))
        for name, hit in hits.items():
            found[name].append(weights @ hit[rising] / missed[:, -1])
        allowed = np.array([*FPIRS.values()]) * (1 + 1e-12)
        over = [np.searchsorted(row, allowed * row[-1], side="right") for row in accepted]  # the first one too many
        below = np.searchsorted(scores, best[np.array(over)], side="right")
        for name, place in zip(FPIRS, below.T, strict=True):
            found[name].append(missed[np.arange(size), place] / missed[:, -1])
    return {name: np.concatenate(values) for name, values in found.items()}


def _weights(persons: Int64, draws: int, generator: np.random.Generator) -> Int64:
    """How often each probe (n,) of ``persons`` is drawn, (draws, n): as often as its person."""
    number = np.unique(persons, return_inverse=True)[1]
    people = int(number.max()) + 1
    return generator.multinomial(people, np.full(people, 1 / people), size=draws)[:, number]
