"""Retrieval against the oracle, which ranks all images for one query at a time."""

import numpy as np
import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plsc.evaluation import retrieval as module
from plsc.evaluation.pairs import unit_rows_float32
from plsc.evaluation.retrieval import no_retrieval, retrieval


def clusters(sizes, noise, seed=0, dim=12):
    generator = np.random.default_rng(seed)
    labels = generator.permutation(np.repeat(np.arange(len(sizes)), sizes))
    return generator.normal(size=(len(sizes), dim))[labels] + noise * generator.normal(size=(len(labels), dim)), labels


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 15), min_size=1, max_size=8), st.sampled_from([0.3, 1.0, 3.0]), st.integers(0, 99))
def test_figures_are_those_of_the_oracle(sizes, noise, seed):
    embeddings, labels = clusters(sizes, noise, seed)
    result = retrieval(unit_rows_float32(embeddings), labels)
    expected = reference.retrieval(torch.from_numpy(embeddings), labels.tolist())
    assert result == pytest.approx(no_retrieval() | expected | {"queries": sum(size for size in sizes if size > 1)})


def test_known_figures():
    """Three of a class around one stranger: by hand, from the definitions."""
    angles = np.deg2rad([0.0, 10.0, 25.0, 14.0])
    unit = unit_rows_float32(np.stack([np.cos(angles), np.sin(angles)], axis=1))
    result = retrieval(unit, np.array([0, 0, 0, 1]))
    # 0 finds 10 (own), then 14; 10 finds 14, then 0; 25 finds 14, then 10. R is 2.
    assert result["recall@1"] == pytest.approx(1 / 3)
    assert result["recall@5"] == result["recall@10"] == 1.0
    assert result["r_precision"] == pytest.approx((1 + 1 + 1) / 6)
    assert result["map@r"] == pytest.approx((1 + 1 / 2 + 1 / 2) / 6)


def test_one_vector_for_everything_finds_nothing():
    result = retrieval(np.ones((30, 1), np.float32), np.repeat(np.arange(3), 10))
    assert [result[name] for name in ("recall@1", "recall@10", "map@r", "r_precision")] == [0.0] * 4


def test_blocks_do_not_show_and_queries_are_sampled(monkeypatch):
    embeddings, labels = clusters([7, 3, 1, 12, 5], 1.0)
    unit = unit_rows_float32(embeddings)
    whole = retrieval(unit, labels)
    monkeypatch.setattr(module, "_SCORES", 60)
    assert retrieval(unit, labels) == pytest.approx(whole)
    sampled = retrieval(unit, labels, max_scores=10 * len(labels))
    assert sampled["queries"] == 10
    assert sampled == retrieval(unit, labels, max_scores=10 * len(labels))


def test_a_set_without_a_second_image_gives_none():
    assert retrieval(np.eye(3, dtype=np.float32), np.arange(3)) == no_retrieval()
