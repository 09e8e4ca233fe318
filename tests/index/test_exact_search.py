"""Which brute force answers is a matter of speed: the answers are the same."""

import numpy as np
import pytest

from plsc.index import exact
from plsc.index.exact import ExactSearch
from plsc.native.scan import load_scan


def rows_of(count, dim, seed=0):
    rows = np.random.default_rng(seed).standard_normal((count, dim))
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize("least", [0, 1 << 22])
def test_answers_before_and_after_the_copy_are_the_same(monkeypatch, least):
    monkeypatch.setattr(exact, "SCAN_FROM", least)
    vectors, queries = rows_of(3000, 40), rows_of(12, 40, 1)
    truth = np.argsort(-(queries.astype(np.float64) @ vectors.T), axis=1)
    search = ExactSearch(vectors)
    for k in (10, 5000):
        for _ in range(3):
            scores, rows = search.search(queries, k)
            np.testing.assert_array_equal(rows[:, :10], truth[:, :10])
            assert rows.shape == scores.shape == (12, min(k, 3000))
    assert (search._scan is not None) == (load_scan() is not None and least == 0)
