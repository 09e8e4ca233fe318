"""The exact ROC against brute force and cases worked by hand; sampled pairs, and all pairs counted once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plsc.evaluation.evaluator import sample_pairs
from plsc.evaluation.pairs import squared_distances, unit_rows, verified_pairs
from plsc.evaluation.roc import (
    all_pairs_roc,
    area_under_curve,
    equal_error_rate,
    places_in_identities,
    roc_from_counts,
    roc_from_scores,
    sample_identities,
    sampled_curve,
    tar_at_far,
    threshold_that_holds,
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


LABELS = st.lists(st.integers(0, 5), max_size=40).map(lambda labels: np.array(labels, dtype=np.int64))


@given(LABELS, st.integers(0, 5), st.integers(1, 300))
def test_pairs_are_distinct_true_and_as_many_of_each_kind(labels, seed, limit):
    first, second, is_same = sample_pairs(labels, seed, limit)
    assert np.array_equal(labels[first] == labels[second], is_same)
    assert np.all(first != second)
    drawn = {frozenset(pair) for pair in zip(first.tolist(), second.tolist(), strict=True)}
    assert len(drawn) == len(is_same)
    same = sum(int(n * (n - 1) / 2) for n in np.bincount(labels)) if labels.size else 0
    different = len(labels) * (len(labels) - 1) // 2 - same
    assert is_same.tolist() == [True, False] * min(limit, same, different)


def test_a_draw_depends_on_the_seed_alone():
    labels = np.repeat(np.arange(30), 20)
    again, same, other = sample_pairs(labels, 1, 500), sample_pairs(labels, 1, 500), sample_pairs(labels, 2, 500)
    assert np.array_equal(again[0], same[0])
    assert not np.array_equal(same[0], other[0])


def test_every_different_pair_is_as_likely():
    labels = np.array([0, 0, 0, 0, 1, 2, 2])  # 14 different pairs, 7 same ones
    counts = np.zeros((7, 7), dtype=int)
    for seed in range(1500):
        first, second, is_same = sample_pairs(labels, seed, 3)
        np.add.at(counts, (np.minimum(first, second)[~is_same], np.maximum(first, second)[~is_same]), 1)
    seen = counts[np.triu(labels[:, None] != labels[None, :])]
    assert len(seen) == np.count_nonzero(counts) == 14
    assert np.all(np.abs(seen - 4500 / 14) < 5 * np.sqrt(4500 / 14))


def brute(embeddings, labels):
    above = np.triu_indices(len(labels), k=1)
    return (embeddings @ embeddings.T)[above], (labels[:, None] == labels[None, :])[above]


@settings(max_examples=10, deadline=None)
@given(LABELS, st.integers(0, 100))
def test_all_pairs_are_counted_once(labels, seed):
    rows = np.random.default_rng(seed).normal(size=(len(labels), 3))
    embeddings = unit_rows(np.round(rows)).astype(np.float32)  # rounded: many ties
    roc = all_pairs_roc(embeddings, labels)
    scores, is_same = brute(embeddings, labels)
    assert (roc.genuine_pairs, roc.impostor_pairs) == (np.sum(is_same), np.sum(~is_same))
    for threshold, genuine, impostors in zip(roc.thresholds, roc.genuine, roc.impostors, strict=True):
        # Equal cosines differ in float32's last digits, and a bin's edge may part them.
        for counted, kind in ((genuine, scores[is_same]), (impostors, scores[~is_same])):
            assert np.sum(kind > threshold + 1e-6) <= counted <= np.sum(kind > threshold - 1e-6)


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_as_many_pairs_reach_a_threshold_as_are_counted(kind):
    """Products of single numbers, which no order of summing changes; some in steps that edges of bins fall upon."""
    random = np.random.default_rng(0)
    numbers = np.concatenate([random.uniform(-1, 1, 40), [1, 1, 1, 0, 0, 2.0**-22, 3 * 2.0**-22, 0.5]]).astype(
        np.float32
    )
    labels = random.integers(0, 12, len(numbers))
    roc = all_pairs_roc(numbers[:, None], labels)
    above = np.triu_indices(len(labels), k=1)
    scores, is_same = (numbers[:, None] * numbers)[above], (labels[:, None] == labels)[above]
    assert scores.dtype == np.float32
    reached = scores.astype(kind) >= roc.thresholds[:, None].astype(kind)
    assert (reached & is_same).sum(axis=1).tolist() == roc.genuine.tolist()
    assert (reached & ~is_same).sum(axis=1).tolist() == roc.impostors.tolist()


def test_pairs_are_judged_by_scores_as_searches_tell_them():
    random = np.random.default_rng(0)
    rows, is_same = random.standard_normal((400, 8)), random.random(200) < 0.5
    roc = verified_pairs(rows, is_same)[1]
    scores = (1 - squared_distances(rows, 200) / 2).astype(np.float32)
    reached = scores >= roc.thresholds[:, None]
    assert (reached & ~is_same).sum(axis=1).tolist() == roc.impostors.tolist()


def test_a_threshold_holds_though_more_tie_at_the_top():
    roc = roc_from_scores(np.array([0.9] * 5 + [0.5, 0.4]), np.array([False] * 4 + [True, False, True]))
    assert threshold_that_holds(roc, 4) == (0.9, 1)
    threshold, points = threshold_that_holds(roc, 3)
    assert points == 0
    assert np.float32(0.9) < np.float32(threshold) < 0.90001


def test_blocks_do_not_show(monkeypatch):
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 9, 100)
    embeddings = unit_rows(generator.normal(size=(100, 8))).astype(np.float32)
    whole = all_pairs_roc(embeddings, labels)
    monkeypatch.setattr("plsc.evaluation.roc._BLOCK", 30)
    parts = all_pairs_roc(embeddings, labels)
    assert (parts.genuine_pairs, parts.impostor_pairs) == (whole.genuine_pairs, whole.impostor_pairs)
    assert parts.genuine_pairs + parts.impostor_pairs == 4950


@pytest.mark.parametrize("pairs", [0, 45, 1000, 10**8])
def test_a_bound_keeps_whole_identities(pairs):
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(20), np.arange(20) + 1))
    kept = sample_identities(labels, 0, pairs)
    assert len(kept) * (len(kept) - 1) // 2 <= pairs
    assert set(labels[kept].tolist()).isdisjoint(np.delete(labels, kept).tolist())
    assert (len(kept) == len(labels)) == (pairs >= len(labels) * (len(labels) - 1) // 2)


@pytest.mark.parametrize(
    ("sizes", "identities"),
    [([1000] * 3, 3), ([5000] * 2, 2), ([5000, 9000, 2], 3), ([2000] * 60, 20), ([3000] + [1] * 3000, 50)],
)
def test_few_identities_of_very_many_images_keep_both_kinds_of_pairs(sizes, identities):
    labels = np.random.default_rng(1).permutation(np.repeat(np.arange(len(sizes)), sizes))
    for seed in range(5):
        kept = sample_identities(labels, seed, 10**6)  # 1,414 images
        counts = np.bincount(labels[kept])
        assert len(np.unique(kept)) == len(kept) <= 1414
        assert np.count_nonzero(counts) >= min(identities, 14)
        assert counts.max() > 1
        assert np.array_equal(kept, sample_identities(labels, seed, 10**6))


def test_places_count_the_images_of_an_identity_before_each():
    labels = np.array([7, -1, 7, 3, -1, 7])
    assert places_in_identities(labels).tolist() == [0, 0, 1, 0, 1, 2]
    assert places_in_identities(labels[:0]).tolist() == []


def test_a_pairs_later_image_is_compared_by_the_gallerys_row():
    probes, gallery = (
        np.linalg.qr(np.random.default_rng(seed).standard_normal((6, 6)))[0].astype(np.float32) for seed in (0, 1)
    )
    roc = all_pairs_roc(probes, np.array([0, 0, 1, 1, 2, 2]), gallery)
    same = sorted([float(probes[n] @ gallery[n + 1]) for n in (0, 2, 4)], reverse=True)
    reached = roc.thresholds[np.flatnonzero(np.diff(roc.genuine, prepend=0))]
    np.testing.assert_allclose(reached, same, atol=1e-6)
    assert (roc.genuine_pairs, roc.impostor_pairs) == (3, 12)
