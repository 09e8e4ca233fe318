"""Two models against each other: an old and a new one, each as the one that embeds queries and as the gallery's.

The four cells of Shen et al., "Towards Backward-Compatible Representation Learning" (CVPR 2020): a new model is
compatible with an old one if its queries find more in the old one's gallery than the old one's own do. Independently
trained models share no directions: between them there is nothing but chance.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from plsc.embedding.columns import Float32, Mask
from plsc.embedding.embedder import EmbeddingModel
from plsc.embedding.pipeline import embed_on_ranks
from plsc.errors import DataError, UsageError
from plsc.evaluation.calibration import operating_point
from plsc.evaluation.evaluator import NOT_OF_PAIRS, EvaluationSet, identified, open_set, set_names
from plsc.evaluation.pairs import alternating, verified_pairs
from plsc.evaluation.roc import FARS, Roc
from plsc.evaluation.search import no_retrieval
from plsc.parallel.collectives import on_main
from plsc.parallel.mesh import Mesh

CELLS = ("old/old", "old/new", "new/old", "new/new")  # query's model/gallery's model


def evaluate_cells(
    old: EmbeddingModel,
    new: EmbeddingModel,
    sets: Sequence[str],
    *,
    mesh: Mesh,
    batch_size: int = 64,
    seed: int = 0,
    flip: bool | None = None,
    quiet: bool = False,
) -> dict[str, dict[str, dict[str, Any]]]:
    """Evaluate queries of each model on galleries of each, with the same result on every rank.

    The cells are of the same pairs and probes, and those of one model are what :func:`plsc.evaluation.evaluate` finds:
    of a pair, the first image is the query; of a labelled set, the first image of each identity is in the gallery.

    Args:
        old, new: the models; each takes pictures in the size of its own.
        sets: .bin files of pairs; folders, lists, .rec files and drawn sets of classes not trained on.
        mesh: the ranks that share the work; all must call.
        batch_size: images per call of a model.
        seed: samples pairs and identities as :func:`plsc.evaluation.evaluate` does.
        flip: as there.
        quiet: print no progress.

    Returns:
        By the set's name and the cell ("new/old" is a new query in an old gallery): what
        :func:`plsc.evaluation.evaluate` returns of a set, without "retrieval", and "cosine@far": the threshold that
        holds each false accept rate, None where the pairs do not tell.

    Raises:
        UsageError: the models' embeddings are of different widths; or as :func:`plsc.evaluation.evaluate`.
        DataError: as :func:`plsc.evaluation.evaluate` does.
    """
    check_widths(old, new)
    results = {}
    for source, name in zip(sets, set_names(sets), strict=True):
        rows, readable = [], []
        for model in (old, new):
            data = open_set(source, name, model.preprocessing.image_size)
            flips = data.is_same is not None if flip is None else flip
            embedded = embed_on_ranks(
                model, data.images, name, model.preprocessing, mesh, batch_size=batch_size, flip=flips, quiet=quiet
            )
            rows.append(embedded.rows)
            readable.append(embedded.readable)
        results[name] = on_main(partial(_cells, data, rows, readable, seed), mesh)
    return results


def check_widths(old: EmbeddingModel, new: EmbeddingModel) -> None:
    """Raise UsageError where embeddings of two models are of different widths."""
    if old.embedding_dim != new.embedding_dim:
        raise UsageError(
            f"--old {old.source} gives embeddings of {old.embedding_dim} numbers and --new {new.source} of "
            f"{new.embedding_dim}, which cannot be compared; give models of one width"
        )


def _cells(
    data: EvaluationSet, rows: Sequence[Float32], readable: Sequence[Mask], seed: int
) -> dict[str, dict[str, Any]]:
    by_model, both = dict(zip(("old", "new"), rows, strict=True)), readable[0] & readable[1]
    counts = {"images": len(data.images), "unreadable": int(np.sum(~both))}
    found = {}
    for cell in CELLS:
        query, gallery = (by_model[name] for name in cell.split("/"))
        if data.is_same is not None:
            complete = both[0::2] & both[1::2]
            pairs = alternating(query[0::2][complete], gallery[1::2][complete])
            results, roc = verified_pairs(pairs, data.is_same[complete])
            results |= NOT_OF_PAIRS
        else:
            assert data.labels is not None
            results, roc = identified(query[both], data.labels[both], seed, gallery[both])
        found[cell] = results | {"cosine@far": _thresholds(roc)} | counts
    return found


def _thresholds(roc: Roc) -> dict[str, float | None]:
    """The cosine that holds each false accept rate, by its name; None where the pairs do not tell."""
    points = {name: operating_point(roc, far) for name, far in FARS.items()}
    return {name: None if point is None else point.threshold for name, point in points.items()}


def cells_for_table(cells: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The cells of a set as :func:`plsc.evaluation.report.results_table` takes sets."""
    return {cell: {**values, "retrieval": no_retrieval()} for cell, values in cells.items()}


def check_measured(results: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
    """Raise DataError where no set has two images of one class."""
    if not any(cells[CELLS[0]]["genuine_pairs"] for cells in results.values()):
        names = ", ".join(results)
        raise DataError(f"{names}: no class has two images, so there is nothing to compare; give two or more of each")
