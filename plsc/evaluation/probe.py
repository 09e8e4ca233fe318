"""Probes of frozen embeddings: how well a simple classifier tells the classes of a labelled training part.

The kNN probe is that of Wu et al., "Unsupervised Feature Learning via Non-Parametric Instance Discrimination", CVPR
2018, with the numbers of Caron et al., "Emerging Properties in Self-Supervised Vision Transformers" (DINO), ICCV 2021:
each of the 20 nearest training images votes for its class with the weight exp(cosine / 0.07). The linear probe is
multinomial logistic regression on unit rows by L-BFGS, its L2 penalty chosen on a held-out part of the training images,
as Radford et al., "Learning Transferable Visual Models From Natural Language Supervision" (CLIP), ICML 2021, A.3, do.
"""

import importlib.util
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from plsc.embedding.columns import Float32, Float64, Int64
from plsc.errors import DataError, UsageError
from plsc.evaluation.search import parts_of
from plsc.index.scan import ExactSearch

KINDS = ("knn", "linear")
NEIGHBOURS, TEMPERATURE = 20, 0.07
INSTALL = "pip install plsc-torch[cluster]"
PENALTIES = (1.0, 10.0, 100.0, 1000.0)  # inverse, of the sum of the images' losses: scikit-learn's C
_ITERATIONS = 1000
_HELD_OUT = 0.2  # of the training images, to choose the penalty on


@dataclass(frozen=True)
class LabelledRows:
    """Embeddings ``unit`` (N, D) float32 of length 1, with ``labels`` (N,) int64 into ``class_names``.

    ``lost`` are the labels of pictures that gave no embedding.
    """

    name: str
    unit: Float32
    labels: Int64
    class_names: Sequence[str]
    lost: Int64 = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: Int64) -> "LabelledRows":
        """The part of ``rows`` (n,)."""
        return LabelledRows(self.name, self.unit[rows], self.labels[rows], self.class_names)


@dataclass(frozen=True)
class Probe:
    """Which probe of :data:`KINDS`, and for kNN how many neighbours vote, at which temperature."""

    kind: str
    neighbours: int = NEIGHBOURS
    temperature: float = TEMPERATURE


def halved(rows: LabelledRows, seed: int) -> tuple[LabelledRows, LabelledRows]:
    """A training and a test part: half of each class, drawn by ``seed``; of an odd number, the training part has more.

    Raises:
        DataError: no class has two images.
    """
    train, test = _split(rows.labels, 0.5, seed)
    if not len(test):
        raise DataError(f"{rows.name}: no class has two images, one to learn and one to test; give --train")
    return rows.take(train), rows.take(test)


def probe(chosen: Probe, train: LabelledRows, test: LabelledRows, *, seed: int = 0) -> dict[str, Any]:
    """Classify the images of ``test`` by those of ``train``.

    Classes are the same where their names are. Where the scores of two classes are equal, the wrong one ranks first.

    Args:
        chosen: the probe.
        train: images to learn from.
        test: images to classify.
        seed: draws the images on which the linear probe chooses its penalty.

    Returns:
        ``probe``, its settings (``neighbours`` and ``temperature``; ``c`` and ``iterations``), ``train``, the name of
        the training part, ``train_images`` and ``classes`` of it, ``images`` of the test part, ``top1`` and ``top5``,
        the share of these whose class is among the best one and five, and ``unknown``, how many are of classes that
        have no training image, and count as wrong.

    Raises:
        DataError: one part is empty, the training part has a single class, or the parts share no class.
        UsageError: they have other dimensions, or scikit-learn is not installed.
    """
    _check(train, test)
    if chosen.kind == "linear":
        require_regression()
    present, own = np.unique(train.labels, return_inverse=True)
    number = {train.class_names[int(label)]: at for at, label in enumerate(present)}
    wanted = np.array([number.get(test.class_names[label], -1) for label in test.labels.tolist()], dtype=np.int64)
    known = wanted >= 0
    if not known.any():
        raise DataError(f"{test.name} and {train.name} have no class in common; probes need test images of known ones")
    learn = _knn if chosen.kind == "knn" else _linear
    ranks, settings = learn(chosen, train.unit, own.reshape(-1).astype(np.int64), test.unit[known], wanted[known], seed)
    return {
        "probe": chosen.kind,
        **settings,
        "train": train.name,
        "train_images": len(train),
        "classes": len(present),
        "images": len(test),
        "unknown": int(np.sum(~known)),
        "top1": float(np.sum(ranks < 1) / len(test)),
        "top5": float(np.sum(ranks < 5) / len(test)),
    }


def probe_parts(
    chosen: Probe, train: LabelledRows | None, parts: Sequence[LabelledRows], *, seed: int = 0
) -> dict[str, dict[str, Any]]:
    """:func:`probe` of each of ``parts``, by its name; without ``train``, of one half by the other (:func:`halved`)."""
    found = {}
    for part in parts:
        learned, test = halved(part, seed) if train is None else (train, part)
        found[part.name] = probe(chosen, learned, test, seed=seed)
    return found


def require_regression() -> None:
    """:class:`UsageError` unless the linear probe's library is installed."""
    if importlib.util.find_spec("sklearn") is None:
        raise UsageError(f"--probe linear needs the package scikit-learn: {INSTALL}")


def _check(train: LabelledRows, test: LabelledRows) -> None:
    for part in (train, test):
        if not len(part):
            raise DataError(f"{part.name} has no labelled embedding")
    if train.unit.shape[1] != test.unit.shape[1]:
        sizes = f"{test.name} holds vectors of {test.unit.shape[1]} and {train.name} of {train.unit.shape[1]}"
        raise UsageError(f"{sizes}; embed both by one model")
    if train.labels.min() == train.labels.max():
        raise DataError(f"{train.name} has a single class; a probe tells classes from each other")


def _split(labels: Int64, share: float, seed: int) -> tuple[Int64, Int64]:
    """Rows of two parts, ascending: ``share`` of each class, rounded down, is in the second, but one of two or more."""
    shuffled = np.random.default_rng(seed).permutation(len(labels))
    order = shuffled[np.argsort(labels[shuffled], kind="stable")]
    ordered = labels[order]
    begin, end = (np.searchsorted(ordered, ordered, side=side) for side in ("left", "right"))
    size = end - begin
    taken = np.where(size > 1, np.maximum(size * share, 1).astype(np.int64), 0)
    second = np.arange(len(labels)) - begin < taken
    return np.sort(order[~second]).astype(np.int64), np.sort(order[second]).astype(np.int64)


Ranks = tuple[Int64, dict[str, Any]]  # how many wrong classes score as much as the right one, by image; settings


def _knn(chosen: Probe, train: Float32, labels: Int64, test: Float32, wanted: Int64, seed: int) -> Ranks:
    del seed  # nothing is drawn
    search, k = ExactSearch(train), min(chosen.neighbours, len(train))
    parts = parts_of(len(test), k * k)
    found = [_votes(*search.search(test[part], k), labels, wanted[part], chosen.temperature) for part in parts]
    return np.concatenate(found), {"neighbours": k, "temperature": chosen.temperature}


def _votes(scores: Float32, rows: Int64, labels: Int64, wanted: Int64, temperature: float) -> Int64:
    """Ranks (Q,) of the ``wanted`` classes by the votes of neighbours ``rows`` (Q, k); no vote is the last rank."""
    voted = labels[rows]
    weights = np.exp((scores.astype(np.float64) - scores[:, :1]) / temperature)  # relative to the nearest: no overflow
    same = voted[:, :, None] == voted[:, None, :]
    votes = (same * weights[:, None, :]).sum(axis=2)
    is_first = ~np.tril(same, -1).any(axis=2)  # a class counts once
    right = voted == wanted[:, None]
    own = np.where(right, votes, 0.0).max(axis=1)
    better = (is_first & ~right & (votes >= own[:, None])).sum(axis=1)
    ranks: Int64 = np.where(right.any(axis=1), better, len(labels))
    return ranks


def _linear(chosen: Probe, train: Float32, labels: Int64, test: Float32, wanted: Int64, seed: int) -> Ranks:
    del chosen  # it has no settings
    fitted, held_out = _split(labels, _HELD_OUT, seed)
    penalty = PENALTIES[len(PENALTIES) // 2]
    if len(held_out) and len(np.unique(labels[fitted])) > 1:
        hits = []
        for each in PENALTIES:
            model = _regression(train[fitted], labels[fitted], each)
            hits.append(int(np.sum(_model_ranks(model, train[held_out], labels[held_out]) < 1)))
        penalty = PENALTIES[int(np.argmax(hits))]
    model = _regression(train, labels, penalty)
    return _model_ranks(model, test, wanted), {"c": penalty, "iterations": int(model.n_iter_.max())}


def _regression(rows: Float32, labels: Int64, penalty: float) -> Any:
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(C=penalty, max_iter=_ITERATIONS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the result says how many iterations it took
        return model.fit(rows, labels)


def _model_ranks(model: Any, rows: Float32, wanted: Int64) -> Int64:
    """Ranks (Q,) of the ``wanted`` classes, which the model knows, by its scores."""
    score: Callable[[Float32], Float64] = model.predict_log_proba
    columns = np.searchsorted(model.classes_, wanted)
    ranks = []
    for part in parts_of(len(rows), len(model.classes_)):
        scores = score(rows[part])
        own = np.take_along_axis(scores, columns[part, None], axis=1)
        ranks.append((scores >= own).sum(axis=1) - 1)
    return np.concatenate(ranks).astype(np.int64)
