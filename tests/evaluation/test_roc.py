"""The exact ROC against counts by brute force, and against cases worked by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plsc.evaluation.roc import (
    area_under_curve,
    equal_error_rate,
    roc_from_counts,
    roc_from_scores,
    sampled_curve,
    tar_at_far,
)

SCORED = st.lists(st.tuples(st.integers(-6, 6), st.booleans()), min_size=1, max_size=60)


def split(pairs):
    scores = np.array([score / 6 for score, _ in pairs])
    return scores, np.array([same for _, same in pairs])


def brute_tar(scores, is_same, far):
    """The best TAR over all thresholds that let in at most far of the impostors."""
    same, different = scores[is_same], scores[~is_same]
    best = 0.0
    for threshold in [*scores, np.inf]:
        if np.sum(different >= threshold) <= far * different.size + 1e-9:
            best = max(best, float(np.mean(same >= threshold)))
    return best


@given(SCORED)
def test_area_is_the_chance_that_a_same_pair_outscores_a_different_one(pairs):
    scores, is_same = split(pairs)
    area = area_under_curve(roc_from_scores(scores, is_same))
    if is_same.all() or not is_same.any():
        assert area is None
        return
    wins = [(s > d) + 0.5 * (s == d) for s in scores[is_same] for d in scores[~is_same]]
    assert area == pytest.approx(np.mean(wins))


@given(SCORED, st.sampled_from([0.5, 0.3, 0.1, 0.05]))
def test_tar_is_the_best_over_all_thresholds_within_the_far(pairs, far):
    scores, is_same = (np.repeat(values, 10) for values in split(pairs))  # in tens, of which each rate needs one
    tar = tar_at_far(roc_from_scores(scores, is_same), far)
    if not is_same.any() or far * np.sum(~is_same) < 10 - 1e-9:
        assert tar is None
    else:
        assert tar == pytest.approx(brute_tar(scores, is_same, far))


@given(SCORED)
def test_a_histogram_gives_the_same_curve_as_the_scores(pairs):
    scores, is_same = split(pairs)
    grid = np.arange(-6, 7) / 6
    places = np.rint(scores * 6).astype(int) + 6
    counted = roc_from_counts(
        grid, np.bincount(places[is_same], minlength=13), np.bincount(places[~is_same], minlength=13)
    )
    sorted_out = roc_from_scores(scores, is_same)
    np.testing.assert_array_equal(counted.genuine, sorted_out.genuine)
    np.testing.assert_array_equal(counted.impostors, sorted_out.impostors)
    np.testing.assert_allclose(counted.thresholds, sorted_out.thresholds)


def test_a_case_worked_by_hand():
    # same: .9 .8 .4 .3   different: .7 .4 .2 .1 (a tie at .4)
    scores = np.array([0.9, 0.8, 0.4, 0.3, 0.7, 0.4, 0.2, 0.1])
    roc = roc_from_scores(scores, np.array([True] * 4 + [False] * 4))
    assert roc.genuine.tolist() == [1, 2, 2, 3, 4, 4, 4]
    assert roc.impostors.tolist() == [0, 0, 1, 2, 2, 3, 4]
    assert area_under_curve(roc) == pytest.approx((4 + 4 + 2.5 + 2) / 16)
    tens = roc_from_scores(np.repeat(scores, 10), np.repeat(np.array([True] * 4 + [False] * 4), 10))
    assert tar_at_far(tens, 0.25) == 0.5
    assert tar_at_far(tens, 0.5) == 1.0
    assert tar_at_far(tens, 0.2) is None
    # From (FAR, FRR) = (.25, .5) to (.5, .25): they meet in the middle.
    assert equal_error_rate(roc) == pytest.approx(0.375)


def test_a_far_of_exactly_ten_impostors_is_told_and_less_is_not():
    scores = np.concatenate([np.full(10, 0.9), np.linspace(0, 0.5, 10_000)])
    roc = roc_from_scores(scores, np.arange(10_010) < 10)
    assert tar_at_far(roc, 1e-3) == 1.0
    assert tar_at_far(roc, 9.99e-4) is None


def test_one_score_for_all_accepts_all_or_nothing():
    roc = roc_from_scores(np.zeros(200), np.arange(200) % 2 == 0)
    assert area_under_curve(roc) == 0.5
    assert tar_at_far(roc, 0.1) == 0.0
    assert equal_error_rate(roc) == pytest.approx(0.5)


def test_no_pairs_give_nothing():
    roc = roc_from_scores(np.empty(0), np.empty(0, dtype=bool))
    assert (roc.genuine_pairs, roc.impostor_pairs) == (0, 0)
    assert area_under_curve(roc) is equal_error_rate(roc) is tar_at_far(roc, 0.1) is sampled_curve(roc) is None


def test_the_drawn_curve_rises_and_ends_at_one():
    generator = np.random.default_rng(0)
    is_same = generator.random(5000) < 0.3
    curve = sampled_curve(roc_from_scores(generator.normal(is_same * 1.0), is_same))
    assert curve is not None
    assert len(curve["far"]) == len(curve["tar"]) > 30
    assert curve["far"][-1] == curve["tar"][-1] == 1.0
    assert np.all(np.diff(curve["tar"]) >= 0)
