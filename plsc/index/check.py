"""Checking an index: every byte, every count, and whether it still finds what it found when it was built."""

from pathlib import Path
from typing import Any

import numpy as np

from plsc.errors import IntegrityError
from plsc.files import manifest_value
from plsc.index import ann
from plsc.index.exact import ExactSearch
from plsc.index.index import Index
from plsc.index.recall import Recall, recall_of
from plsc.index.tuning import exact_recall

LENGTH_TOLERANCE = 1e-3
RECALL_TOLERANCE = 0.005  # k-means and graphs are built by several threads, but what is stored answers alike
_CHECKED_AT_ONCE = 65536  # rows


def check(folder: str | Path) -> dict[str, Any]:
    """Verify an index and measure its recall again.

    Returns:
        "rows", "kind", "dim", "contract_id", "recall" (as measured now) and "recall_stored".

    Raises:
        DataError: ``folder`` is no index.
        IntegrityError: the first thing that is wrong.
    """
    index = Index.open(folder)
    _check_vectors(index)
    _check_columns(index)
    stored = _stored_recall(index)
    measured = measure_recall(index)
    for name, value in (("recall@1", measured.at_1), ("recall@10", measured.at_10)):
        if value < stored[name] - RECALL_TOLERANCE:
            raise IntegrityError(
                f"{index.folder} has {name} {value:.4f} and was built with {stored[name]:.4f}; build it again"
            )
    return {
        "rows": len(index),
        "kind": index.kind,
        "dim": index.dim,
        "contract_id": index.contract_id,
        "recall": measured.as_json(),
        "recall_stored": stored,
    }


def _stored_recall(index: Index) -> dict[str, Any]:
    stored = manifest_value(index.folder, index.manifest, "recall", dict)
    for name in ("recall@1", "recall@10"):
        manifest_value(index.folder, stored, name, float)
    return stored


def measure_recall(index: Index) -> Recall:
    """Recall on the rows held out of the structure; of an exact index, on its own rows against float64."""
    if index.structure is None:
        return exact_recall(index.vectors)
    queries = np.array(index.held_out_vectors)
    truth = ExactSearch(index.base).search(queries, 10)[0]
    return recall_of(ann.search(index.structure, queries, truth.shape[1])[0], truth)


def _check_vectors(index: Index) -> None:
    for start in range(0, len(index), _CHECKED_AT_ONCE):
        lengths = np.linalg.norm(index.vectors[start : start + _CHECKED_AT_ONCE], axis=1)
        wrong = np.flatnonzero(~(np.abs(lengths - 1) < LENGTH_TOLERANCE))  # negated so that NaN is wrong too
        if len(wrong):
            raise IntegrityError(
                f"{index.folder}: row {start + int(wrong[0])} is not of length 1; build the index again"
            )


def _check_columns(index: Index) -> None:
    if len(np.unique(index.ids)) != len(index):
        raise IntegrityError(f"{index.folder} uses an id twice; build the index again")
