"""Estimates of a new model's embeddings from an old one's, for faces of which no picture is kept.

An adapter is learned from the faces that have both embeddings: an affine map (plsc.gallery.migration.linear_map), or
one with a small residual network (plsc.gallery.migration.residual_mlp) where that separates people clearly better, in
each of five folds of held-out identities. The separation of people decides and not the mean cosine: estimates that keep
to the safe middle have a higher cosine and resemble strangers more.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from plsc.embedding.columns import Float32, Float64, Int64, Mask
from plsc.errors import DataError, UsageError, first_line
from plsc.evaluation.pairs import check_finite, unit_rows_float32
from plsc.evaluation.roc import merge_rocs, places_in_identities, roc_from_scores, tar_at_far
from plsc.gallery.migration.linear_map import STRENGTHS, RidgePath
from plsc.gallery.migration.residual_mlp import Training

Kind = Literal["linear", "mlp"]
MINIMUM_FACES, MINIMUM_PERSONS = 50, 10
FOLDS = 5
FAR = 1e-3  # of HeldOut.tar
_FORMAT = "plsc adapter 1"
_SCORED = 600  # faces of a fold, whose pairs grow with their square
_SCORED_OF_PERSON = 20  # so that no fold is scored by one person alone
_MOST_EPOCHS, _PATIENCE = 20, 3
_GAIN = 1.01  # in separation that a residual has to bring: less is not worth a map that bends between what it saw
_AT_A_TIME = 65_536  # rows
_LEAST_SPREAD = 1e-6  # of scores: identical embeddings are no division by zero


@dataclass(frozen=True)
class HeldOut:
    """How well the vectors of persons are estimated whom a fit did not see.

    Attributes:
        faces: that were estimated.
        persons: whose these are.
        cosine: mean, between the estimate and the vector of the new model.
        separation: d', by how many standard deviations of the scores with strangers a face's own score is above their
            mean.
        tar: share of the pairs of two faces of one person that an estimate and a new vector accept, while they accept
            1e-3 of strangers; None without such pairs, or with fewer than 10,000 of strangers.
    """

    faces: int
    persons: int
    cosine: float
    separation: float
    tar: float | None


class Adapter:
    """A map from old to new embeddings.

    Attributes:
        kind: "linear", or "mlp".
        held_out: by kind of adapter, what was measured of those that were tried.
        faces: that it was learned from.
    """

    def __init__(self, arrays: Mapping[str, Float32], held_out: Mapping[str, HeldOut], faces: int) -> None:
        self._arrays = dict(arrays)
        self.kind: Kind = "mlp" if "outer" in arrays else "linear"
        self.held_out, self.faces = dict(held_out), faces

    @property
    def old_dim(self) -> int:
        """Numbers of an old embedding."""
        return int(self._arrays["base"].shape[0])

    @property
    def new_dim(self) -> int:
        """Numbers of a new embedding."""
        return int(self._arrays["base"].shape[1])

    def __call__(self, vectors: Float32) -> Float32:
        """Estimate the new embeddings of ``vectors`` (n, old_dim) of any length but zero: unit float32 (n, new_dim).

        Raises:
            UsageError: they have another width.
            DataError: a row is not finite.
        """
        if vectors.ndim != 2 or vectors.shape[1] != self.old_dim:
            raise UsageError(f"vectors of shape {vectors.shape} do not fit an adapter of {self.old_dim} numbers")
        check_finite(vectors)
        estimated = np.empty((len(vectors), self.new_dim), dtype=np.float32)
        for start in range(0, len(vectors), _AT_A_TIME):
            part = unit_rows_float32(vectors[start : start + _AT_A_TIME])
            estimated[start : start + _AT_A_TIME] = unit_rows_float32(self._map(part))
        return estimated

    def _map(self, rows: Float32) -> Float32:
        mapped: Float32 = rows @ self._arrays["base"] + self._arrays["base_bias"]
        if self.kind == "mlp":
            hidden = np.maximum(rows @ self._arrays["inner"] + self._arrays["inner_bias"], np.float32(0))
            mapped += hidden @ self._arrays["outer"]
        return mapped

    def to_bytes(self) -> bytes:
        """The adapter as a safetensors file: the same adapter gives the same bytes."""
        from safetensors.numpy import save

        figures = {kind: asdict(found) for kind, found in sorted(self.held_out.items())}
        about = json.dumps({"format": _FORMAT, "faces": self.faces, "held_out": figures}, sort_keys=True)
        # As a tensor: the metadata of a safetensors file have no order of their own.
        return save({**self._arrays, "about": np.frombuffer(about.encode(), dtype=np.uint8).copy()})

    @classmethod
    def from_bytes(cls, content: bytes, name: str = "the adapter") -> "Adapter":
        """Read what :meth:`to_bytes` wrote; :class:`DataError`, which begins with ``name``, if it is anything else."""
        from safetensors import SafetensorError
        from safetensors.numpy import load

        try:
            arrays = load(content)
            about = json.loads(arrays.pop("about").tobytes())
            held_out = {kind: HeldOut(**found) for kind, found in about["held_out"].items()}
            is_known = about["format"] == _FORMAT and _fit_together(arrays)
            faces = int(about["faces"])
        except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DataError(
                f"{name} is no adapter of a gallery, or damaged: {first_line(error)}; fit it anew"
            ) from None
        if not is_known:
            raise DataError(f"{name} is no adapter of a gallery that this plsc reads; fit it anew")
        return cls(arrays, held_out, faces)


def _fit_together(arrays: Mapping[str, Any]) -> bool:
    """True if ``arrays`` are those of an adapter, by names, dtypes and shapes, and finite."""
    if arrays.keys() not in ({"base", "base_bias"}, {"base", "base_bias", "inner", "inner_bias", "outer"}):
        return False
    if any(array.dtype != np.float32 or not np.isfinite(array).all() for array in arrays.values()):
        return False
    shapes = {name: array.shape for name, array in arrays.items()}
    if len(shapes["base"]) != 2 or 0 in shapes["base"]:
        return False
    old, new = shapes["base"]
    expected = {"base": (old, new), "base_bias": (new,)}
    if "outer" in shapes:
        hidden = shapes["inner_bias"][0] if len(shapes["inner_bias"]) == 1 else 0
        expected |= {"inner": (old, hidden), "inner_bias": (hidden,), "outer": (hidden, new)}
    return shapes == expected


class _Faces(NamedTuple):
    """Faces that have both embeddings, of unit rows; the fold of each, and which of them are scored."""

    old: Float32
    new: Float32
    persons: Int64
    folds: Int64
    scored: Mask


class _Candidate(NamedTuple):
    """What an adapter does: estimates (n, e) of each face without its fold, and each fold's separation."""

    estimated: Float32
    separations: Float64


def fit_adapter(old: Float32, new: Float32, persons: Int64, *, seed: int) -> Adapter:
    """Learn an adapter.

    Args:
        old: embeddings (n, d) of the old model, of any length but zero.
        new: embeddings (n, e) of the same faces by the new model.
        persons: whose faces they are, (n,).
        seed: of folds and first weights; with it the result is the same bit for bit on one machine.

    Raises:
        UsageError: shapes that do not fit each other.
        DataError: a row is not finite or of zeros, or there are fewer than 50 faces or 10 persons.
    """
    return fit_with_estimates(old, new, persons, seed=seed)[0]


def fit_with_estimates(old: Float32, new: Float32, persons: Int64, *, seed: int) -> tuple[Adapter, Float32]:
    """Learn an adapter as :func:`fit_adapter`, and estimate each face by one that did not see its person.

    Returns:
        The adapter, of all faces; and float32 unit rows (n, e), by which it can be judged on these very faces.
    """
    faces = _checked(old, new, persons, seed)
    strength, linear = _best_strength(faces)
    epochs, mlp = _best_epochs(faces, strength, seed)
    held_out = {"linear": _measured(faces, linear), "mlp": _measured(faces, mlp)}
    whole = np.ones(len(faces.old), dtype=bool)
    is_clear = mlp.separations.mean() > _GAIN * linear.separations.mean()
    if is_clear and bool(np.all(mlp.separations > linear.separations)):
        training = _training(faces, whole, strength, seed)
        for _ in range(epochs):
            training.epoch()
        return Adapter(training.arrays(), held_out, len(faces.old)), mlp.estimated
    weight, bias = _affine(faces, whole, strength)
    return Adapter({"base": weight, "base_bias": bias}, held_out, len(faces.old)), linear.estimated


def _checked(old: Float32, new: Float32, persons: Int64, seed: int) -> _Faces:
    if old.ndim != 2 or new.ndim != 2 or not len(old) == len(new) == persons.size or persons.ndim != 1:
        shapes = f"{old.shape}, {new.shape} and {persons.shape}"
        raise UsageError(f"embeddings of shapes {shapes} are no old and new ones of the same faces and their persons")
    names, numbers = np.unique(persons, return_inverse=True)
    if len(old) < MINIMUM_FACES or len(names) < MINIMUM_PERSONS:
        raise DataError(
            f"an adapter is learned from {MINIMUM_FACES} faces of {MINIMUM_PERSONS} persons at the least that have "
            f"embeddings of both models, and there are {len(old):,} of {len(names):,}; enrol more with pictures"
        )
    for rows in (old, new):
        check_finite(rows)
        empty = np.flatnonzero(~rows.any(axis=1))
        if empty.size:
            raise DataError(f"embeddings: row {empty[0]} is of zeros alone; leave that face out")
    order = np.random.default_rng(seed).permutation(len(names))
    folds = np.empty(len(names), dtype=np.int64)
    folds[order] = np.arange(len(names)) % FOLDS
    scored = places_in_identities(numbers) < _SCORED_OF_PERSON
    return _Faces(unit_rows_float32(old), unit_rows_float32(new), numbers.astype(np.int64), folds[numbers], scored)


def _affine(faces: _Faces, seen: Mask, strength: float) -> tuple[Float32, Float32]:
    weight, bias = RidgePath(faces.old[seen], faces.new[seen]).at(strength)
    return weight.astype(np.float32), bias.astype(np.float32)


def _best_strength(faces: _Faces) -> tuple[float, _Candidate]:
    """The strength of the prior that separates held-out persons best, and what it estimates."""
    paths = [RidgePath(faces.old[faces.folds != fold], faces.new[faces.folds != fold]) for fold in range(FOLDS)]

    def estimate(strength: float) -> Callable[[int, Float32], Float32]:
        def of_fold(fold: int, rows: Float32) -> Float32:
            weight, bias = paths[fold].at(strength)
            return (rows @ weight + bias).astype(np.float32)

        return of_fold

    found = ((strength, _held_out(faces, estimate(strength))) for strength in STRENGTHS)  # two are held at once
    return max(found, key=lambda pair: float(pair[1].separations.mean()))


def _training(faces: _Faces, seen: Mask, strength: float, seed: int) -> Training:
    base = _affine(faces, seen, strength)
    return Training(base, faces.old, faces.new, faces.persons, np.flatnonzero(seen), seed)


def _best_epochs(faces: _Faces, strength: float, seed: int) -> tuple[int, _Candidate]:
    """The number of epochs after which residuals separate held-out persons best, and what they estimate.

    The folds' trainings go on together, so that one number is chosen for all, as it will be for all faces.
    """
    trainings = [_training(faces, faces.folds != fold, strength, seed) for fold in range(FOLDS)]
    best: tuple[int, _Candidate] | None = None
    for epoch in range(1, _MOST_EPOCHS + 1):
        for training in trainings:
            training.epoch()
        found = _held_out(faces, lambda fold, rows: trainings[fold].estimate(rows))
        if best is None or found.separations.mean() > best[1].separations.mean():
            best = epoch, found
        elif epoch - best[0] >= _PATIENCE:
            break
    assert best is not None
    return best


def _held_out(faces: _Faces, estimate: Callable[[int, Float32], Float32]) -> _Candidate:
    """Estimate each fold by ``estimate(fold, rows)``, which did not see it, and measure the separation."""
    estimated, separations = np.empty_like(faces.new), np.empty(FOLDS)
    for fold in range(FOLDS):
        rows = np.flatnonzero(faces.folds == fold)
        estimated[rows] = unit_rows_float32(estimate(fold, faces.old[rows]))
        scores, is_same = _fold_scores(faces, estimated, fold)
        strangers = scores[~is_same]
        own = float(np.diagonal(scores).mean())
        separations[fold] = (own - float(strangers.mean())) / max(float(strangers.std()), _LEAST_SPREAD)
    return _Candidate(estimated, separations)


def _measured(faces: _Faces, candidate: _Candidate) -> HeldOut:
    rocs = []
    for fold in range(FOLDS):
        scores, is_same = _fold_scores(faces, candidate.estimated, fold)
        others = ~np.eye(len(scores), dtype=bool)
        rocs.append(roc_from_scores(scores[others], is_same[others]))
    cosine = float(np.einsum("ij,ij->i", candidate.estimated, faces.new).mean())
    counts = len(faces.old), len(np.unique(faces.persons))
    return HeldOut(*counts, cosine, float(candidate.separations.mean()), tar_at_far(merge_rocs(rocs), FAR))


def _fold_scores(faces: _Faces, estimated: Float32, fold: int) -> tuple[Float32, Mask]:
    """Scores (s, s) of a fold's estimates with its new vectors, and which are of the same person."""
    rows = np.flatnonzero((faces.folds == fold) & faces.scored)[:_SCORED]
    persons = faces.persons[rows]
    return estimated[rows] @ faces.new[rows].T, persons[:, None] == persons[None, :]
