"""Identification against searches spelled out one probe at a time; retrieval against the oracle, query by query."""

import numpy as np
import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plsc.errors import DataError
from plsc.evaluation import identification
from plsc.evaluation.pairs import unit_rows_float32
from plsc.evaluation.search import no_retrieval, retrieval


def spelled_out(embeddings, labels):
    """Rank-1 and rank-5 by sorting the gallery for each probe, the probe's own identity last among equals."""
    unit = embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)
    gallery = {label: unit[list(labels).index(label)] for label in labels}
    firsts = {list(labels).index(label) for label in gallery}
    ranks = []
    for probe in [i for i in range(len(labels)) if i not in firsts]:
        scores = {label: float(unit[probe] @ vector) for label, vector in gallery.items()}
        others = [score for label, score in scores.items() if label != labels[probe]]
        ranks.append(sum(score >= scores[labels[probe]] for score in others))
    return [float(np.mean([rank < k for rank in ranks])) for k in (1, 5)] if ranks else [None, None]


def clusters(sizes, noise, seed=0, dim=12):
    generator = np.random.default_rng(seed)
    labels = generator.permutation(np.repeat(np.arange(len(sizes)), sizes))
    return generator.normal(size=(len(sizes), dim))[labels] + noise * generator.normal(size=(len(labels), dim)), labels


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=12), st.sampled_from([0.1, 1.0, 3.0]), st.integers(0, 99))
def test_ranks_are_those_of_a_search_probe_by_probe(sizes, noise, seed):
    embeddings, labels = clusters(sizes, noise, seed)
    result = identification(embeddings, labels)
    assert [result["rank1"], result["rank5"]] == pytest.approx(spelled_out(embeddings, labels))
    assert result["gallery"] == len(sizes)
    assert result["probes"] == len(labels) - len(sizes)


def test_one_vector_for_everything_finds_nothing():
    result = identification(np.ones((30, 4)), np.arange(30) % 10)
    assert result["rank1"] == result["rank5"] == 0.0


def test_chunks_do_not_show(monkeypatch):
    embeddings, labels = clusters([5] * 40, 1.0)
    whole = identification(embeddings, labels)
    monkeypatch.setattr("plsc.evaluation.search._SCORES", 90)
    assert identification(embeddings, labels) == whole


def test_open_set_spelled_out():
    embeddings, labels = clusters([6] * 50, 1.2)
    result = identification(embeddings, labels, unknown_share=0.4, seed=3)["open_set"]
    unknown = np.random.default_rng(3).permutation(50)[:20]
    unit = embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)
    first = np.array([np.flatnonzero(labels == label)[0] for label in range(50)])
    known = np.setdiff1d(np.arange(50), unknown)
    strangers = np.isin(labels, unknown)
    alarms = (unit[strangers] @ unit[first[known]].T).max(axis=1)
    mates = np.setdiff1d(np.flatnonzero(~strangers), first)
    scores = unit[mates] @ unit[first[known]].T
    right = known[scores.argmax(axis=1)] == labels[mates]
    assert result["unknown_probes"] == 120
    assert result["known_probes"] == len(mates) == 150
    for name, fpir in (("1e-1", 0.1), ("1e-2", 0.01)):
        best = max(
            np.mean(right & (scores.max(axis=1) >= t)) for t in scores.max(axis=1) if np.mean(alarms >= t) <= fpir
        )
        assert result["tpir@fpir"][name] == pytest.approx(best)
    assert result["tpir@fpir"]["1e-3"] is None  # 120 strangers cannot show one in a thousand


def test_open_set_of_one_identity():
    alone = identification(*clusters([10], 0.01))
    assert alone["rank1"] == 1.0  # a gallery of one leaves no choice
    assert set(alone["open_set"]["tpir@fpir"].values()) == {None}


def test_bad_input_is_named():
    with pytest.raises(DataError, match="do not fit 3 labels"):
        identification(np.ones((4, 2)), np.arange(3))
    broken = np.ones((4, 2))
    broken[2] = np.nan
    with pytest.raises(DataError, match="row 2 is not finite"):
        identification(broken, np.arange(4))
    assert identification(np.empty((0, 2)), np.empty(0, dtype=np.int64))["rank1"] is None


@settings(max_examples=25, derandomize=True)  # float32 may rank two that are alike the other way
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


def test_retrieval_of_one_vector_for_everything_finds_nothing():
    result = retrieval(np.ones((30, 1), np.float32), np.repeat(np.arange(3), 10))
    assert [result[name] for name in ("recall@1", "recall@10", "map@r", "r_precision")] == [0.0] * 4


def test_blocks_do_not_show_and_queries_are_sampled(monkeypatch):
    embeddings, labels = clusters([7, 3, 1, 12, 5], 1.0)
    unit = unit_rows_float32(embeddings)
    whole = retrieval(unit, labels)
    monkeypatch.setattr("plsc.evaluation.search._SCORES", 60)
    assert retrieval(unit, labels) == pytest.approx(whole)
    sampled = retrieval(unit, labels, max_scores=10 * len(labels))
    assert sampled["queries"] == 10
    assert sampled == retrieval(unit, labels, max_scores=10 * len(labels))


def test_a_set_without_a_second_image_gives_none():
    assert retrieval(np.eye(3, dtype=np.float32), np.arange(3)) == no_retrieval()
