"""The nearest centre against float64: sizes, ties, near ties, bounds of all others; iterations against full scans."""

import numpy as np
import pytest
import torch

from plsc.cluster import assignment, scan
from plsc.cluster.assignment import Assigner, Nearest, Points
from plsc.cluster.means import Sums
from plsc.index import scan as index_scan


def unit(rows):
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def drawn(count, dim, seed=0):
    """Rows in groups; some are equal, some nearly so, and some have one large coordinate."""
    random = np.random.default_rng(seed)
    rows = random.standard_normal((8, dim))[random.integers(0, 8, count)] + 0.5 * random.standard_normal((count, dim))
    rows[6::7] = rows[5 : len(rows) - 1 : 7][: len(rows[6::7])]
    rows[3::11] = rows[0] + 1e-5 * random.standard_normal(rows[3::11].shape)
    rows[4::13, 0] += 20
    return unit(rows)


@pytest.fixture(params=["compiled", "by torch"])
def way(request, monkeypatch):
    """The scan's kernels where there is a compiler; and without."""
    if request.param == "by torch":
        for module in (assignment, scan, index_scan):
            monkeypatch.setattr(module, "load_scan", lambda: None)


@pytest.mark.parametrize("dim", [3, 64, 100])
@pytest.mark.parametrize("count", [1, 2, 12, 13, 200])
@pytest.mark.usefixtures("way")
def test_nearest_is_float64s_and_no_other_is_nearer_than_the_bound(count, dim):
    centres, points = drawn(count, dim), drawn(333, dim, 1)
    exact = points.astype(np.float64) @ centres.astype(np.float64).T
    cosines, found, others = Nearest(centres).find(points)
    own = exact[np.arange(len(points)), found]
    assert (exact.max(axis=1) - own < 1e-12).all()
    np.testing.assert_allclose(cosines, own, atol=1e-6)
    for centre in found:  # of equal centres the first
        assert not any((centres[before] == centres[centre]).all() for before in range(centre))
    exact[np.arange(len(points)), found] = -np.inf
    assert (others >= exact.max(axis=1) - 1e-6).all()


@pytest.mark.usefixtures("way")
def test_what_reaches_a_known_cosine_is_found_and_nothing_else_is_missed():
    centres, points = drawn(90, 48), drawn(300, 48, 1)
    exact = points.astype(np.float64) @ centres.astype(np.float64).T
    known = exact.max(axis=1) + np.where(np.arange(300) % 2, 0, 0.05)
    _, found, others = Nearest(centres).find(points, known)
    _, alone, _ = Nearest(centres).find(points)
    np.testing.assert_array_equal(found[1::2], alone[1::2])
    is_none = found < 0
    assert (others[is_none] > exact.max(axis=1)[is_none] - 1e-6).all()


@pytest.mark.usefixtures("way")
def test_of_very_many_equal_centres_the_first_is_nearest():
    centres = np.repeat(drawn(1, 16), 5000, axis=0)
    points = drawn(3, 16, 1)
    centres[:2] = -centres[0]
    cosines, found, others = Nearest(centres).find(points)
    assert found.tolist() == [2 if cosine > 0 else 0 for cosine in points @ centres[2]]
    assert (others >= cosines - 1e-6).all()


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("threads", [1, 3])
def test_bounds_and_threads_change_no_label(threads):
    before = torch.get_num_threads()
    points = drawn(3000, 40)
    assigner, sums = Assigner(Points.of(points)), Sums(60, 40)
    centres, left_out = points[:60].copy(), 0
    try:
        torch.set_num_threads(threads)
        for iteration in range(12):
            changed, former = assigner.assign(centres)
            whole = Assigner(Points.of(points))
            whole.assign(centres)
            np.testing.assert_array_equal(assigner.labels, whole.labels)
            np.testing.assert_array_equal(assigner.cosines, whole.cosines)
            left_out += whole.compared - assigner.compared
            sums.move(assigner.points, changed, former, assigner.labels)
            centres = sums.centres(centres)
            if iteration == 6:  # one jumps, as a re-seeded one does
                centres[3] = points[11]
    finally:
        torch.set_num_threads(before)
    assert left_out > 0
