"""Evaluating an embedder on whole sets: embeds on all ranks, judges on the first, tells every one."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from plsc.errors import PlscError
from plsc.evaluation.draws import all_pairs_roc, bounded_by_identities, draw_pairs
from plsc.evaluation.embedding import Embed, EmbeddedImages, embed_images
from plsc.evaluation.gallery import identification
from plsc.evaluation.pairs import (
    roc_summary,
    squared_distances,
    ten_folds,
    unit_rows_float32,
    verification,
)
from plsc.evaluation.roc import Roc, roc_from_scores, sampled_curve
from plsc.evaluation.sets import EvaluationSet, open_set, set_names
from plsc.parallel.collectives import broadcast_object
from plsc.parallel.mesh import Mesh

T = TypeVar("T")


def evaluate(
    embed: Embed,
    sets: Sequence[str],
    *,
    image_size: int,
    mesh: Mesh,
    batch_size: int = 64,
    seed: int = 0,
    flip: bool | None = None,
    curves: bool = False,
    quiet: bool = False,
    rocs: dict[str, Roc] | None = None,
) -> dict[str, dict[str, Any]]:
    """Judge ``embed`` on every set; the same answer on every rank and for every number of ranks.

    A .bin set is judged on its own pairs. Identities are judged for accuracy on pairs drawn by ``seed`` (all
    same pairs up to 6,000, and as many different ones); for ``auc``, ``eer`` and ``tar@far`` on all pairs of
    all images (of whole identities drawn by ``seed`` where there are more than 10^8); and by
    :func:`plsc.evaluation.identification`.

    Args:
        embed: maps images uint8 (B, 3, image_size, image_size) on the CPU to embeddings (B, D) anywhere.
        sets: .bin files of pairs; folders, lists, .rec files and ``avatars:…`` of identities not trained on.
        image_size: side of the square images that ``embed`` takes, in pixels.
        mesh: the ranks that share the work; all must call.
        batch_size: images per call of ``embed``.
        seed: draws the pairs for accuracy and the identities unknown to the open set.
        flip: add each image's mirror image to its embedding. None does so for .bin sets, as the LFW protocol has it,
            and not for identities, which are judged as they will be searched (and a mirrored letter is another letter).
        curves: add ``roc`` ({"far", "tar"}) and ``scores`` (histograms of cosines), for drawing.
        quiet: print no progress.
        rocs: filled on the first rank with each set's exact ROC, for :func:`plsc.evaluation.calibration.calibrate`.

    Returns:
        By the set's name (:func:`set_names`), in the order of ``sets``: {"accuracy", "accuracy_std",
        "threshold", "tar@far_folds", "auc", "eer", "tar@far", "impostor_pairs", "genuine_pairs", "rank1",
        "rank5", "open_set", "images", "identities", "unreadable"}, with None for what a set cannot give.

    Raises:
        UsageError, DataError: a set does not exist, is malformed or has too many unreadable images, or an
            embedding is not finite.
    """
    results = {}
    for source, name in zip(sets, set_names(sets), strict=True):
        data = open_set(source, name, image_size)
        embedded = embed_images(
            embed,
            data.images,
            name,
            image_size=image_size,
            mesh=mesh,
            batch_size=batch_size,
            quiet=quiet,
            flip=data.is_same is not None if flip is None else flip,
        )
        judged: list[Roc] = []  # stays on the first rank: an exact ROC is large
        results[name] = on_main(partial(_judge, data, embedded, seed, curves, judged), mesh)
        if rocs is not None and judged:
            rocs[name] = judged[0]
    return results


def on_main(function: Callable[[], T], mesh: Mesh) -> T:
    """Run ``function`` on the first rank and return its answer, or raise its failure, on every one."""
    outcome: tuple[T | None, PlscError | None] = None, None
    if mesh.is_main:
        try:
            outcome = function(), None
        except PlscError as error:
            outcome = None, error
    answer, failure = broadcast_object(outcome, mesh)
    if failure is not None:
        raise failure
    return cast(T, answer)


def _judge(data: EvaluationSet, embedded: EmbeddedImages, seed: int, curves: bool, judged: list[Roc]) -> dict[str, Any]:
    """The set's results; its exact ROC is appended to ``judged``."""
    counts = {"images": len(data.images), "unreadable": int(np.sum(~embedded.readable))}
    if data.is_same is not None:
        result, roc = _judge_pairs(embedded, data.is_same)
    else:
        assert data.labels is not None
        result, roc = _judge_identities(embedded, data.labels, seed)
    judged.append(roc)
    return result | counts | (drawn_curves(roc) if curves else {})


def _judge_pairs(embedded: EmbeddedImages, is_same: NDArray[np.bool_]) -> tuple[dict[str, Any], Roc]:
    whole = embedded.readable[0::2] & embedded.readable[1::2]
    rows, truth = embedded.rows[np.repeat(whole, 2)], is_same[whole]
    result = verification(rows, truth)
    result |= {"rank1": None, "rank5": None, "open_set": None, "identities": None}
    return result, roc_from_scores(1.0 - squared_distances(rows, truth.size) / 2.0, truth)


def _judge_identities(embedded: EmbeddedImages, all_labels: NDArray[np.int64], seed: int) -> tuple[dict[str, Any], Roc]:
    rows, labels = embedded.rows[embedded.readable], all_labels[embedded.readable]
    first, second, is_same = draw_pairs(labels, seed)
    pairs = np.stack([first, second], axis=1).reshape(-1)
    chosen = bounded_by_identities(labels, seed)
    roc = all_pairs_roc(unit_rows_float32(rows[chosen]), labels[chosen])
    result = ten_folds(squared_distances(rows[pairs], is_same.size), is_same) | roc_summary(roc)
    found = identification(rows, labels, seed=seed)
    result |= {key: found[key] for key in ("rank1", "rank5", "open_set")}
    result["identities"] = len(np.unique(labels))
    return result, roc


def drawn_curves(roc: Roc, bins: int = 200) -> dict[str, Any]:
    """``roc`` sampled for a logarithmic axis; ``scores``: counts of same and different pairs by cosine."""
    edges = np.linspace(-1.0, 1.0, bins + 1)
    scores = np.clip(roc.thresholds, -1.0, 1.0)
    histogram = {"edges": edges.tolist()}
    for kind, accepted in (("same", roc.genuine), ("different", roc.impostors)):
        counts = np.histogram(scores, edges, weights=np.diff(accepted, prepend=0))[0]
        histogram[kind] = counts.astype(int).tolist()
    return {"roc": sampled_curve(roc), "scores": histogram}
