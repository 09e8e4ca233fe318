"""The exact search on a GPU against float64: by Triton's kernels where they run, and by torch."""

import numpy as np
import pytest

from plsc.index.scan import PRECISIONS, ExactScan

pytestmark = pytest.mark.gpu


def unit(rows):
    return (rows / np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("queries", [1, 300])
@pytest.mark.parametrize("share", [None, 0.3])
def test_the_answers_are_the_ranking_in_float64(precision, queries, share):
    generator = np.random.default_rng(0)
    vectors, asked = (unit(generator.standard_normal((count, 200))) for count in (40_000, queries))
    vectors[::500] = vectors[7]  # ties
    asked[0] = vectors[7]
    allowed = None if share is None else generator.random(len(vectors)) < share
    exact = asked.astype(np.float64) @ vectors.astype(np.float64).T
    if allowed is not None:
        exact[:, ~allowed] = -np.inf
    rows = np.argsort(-exact, axis=1, kind="stable")[:, :10]
    rows[0] = np.flatnonzero((vectors == vectors[7]).all(1) & (True if allowed is None else allowed))[:10]
    scan = ExactScan(vectors, precision=precision, device="cuda")
    by_torch = getattr(scan._scan, "by_torch", scan._scan)
    for way in (scan._scan, by_torch):
        scan._scan = way
        scores, found = scan.search(asked, 10, allowed=allowed)
        np.testing.assert_array_equal(found, rows)
        np.testing.assert_allclose(scores, np.take_along_axis(exact, rows, axis=1), atol=1e-7)
