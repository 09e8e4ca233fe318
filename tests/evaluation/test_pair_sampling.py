"""Drawn pairs are what they claim to be, and all pairs are counted once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plsc.evaluation.pairs import all_pairs_roc, sample_identities, sample_pairs, unit_rows

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


def test_blocks_do_not_show(monkeypatch):
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 9, 100)
    embeddings = unit_rows(generator.normal(size=(100, 8))).astype(np.float32)
    whole = all_pairs_roc(embeddings, labels)
    monkeypatch.setattr("plsc.evaluation.pairs._BLOCK", 30)
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
