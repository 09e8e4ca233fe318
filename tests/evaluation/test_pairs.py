"""The ten-fold protocol against its definition spelled out in loops, and against cases worked by hand."""

import numpy as np
import pytest

from plsc.errors import DataError
from plsc.evaluation import verification
from plsc.evaluation.pairs import fold_bounds, squared_distances


def spelled_out(embeddings, is_same):
    """Accuracy per fold, as the protocol's text says it: no vectorisation, one threshold after the other."""
    unit = [row / np.linalg.norm(row) for row in embeddings.astype(np.float64)]
    distances = [np.sum((unit[2 * i] - unit[2 * i + 1]) ** 2) for i in range(len(is_same))]
    size, rest = divmod(len(is_same), 10)
    accuracies, start = [], 0
    for fold in range(10):
        end = start + size + (fold < rest)
        others = [i for i in range(len(is_same)) if not start <= i < end]
        best, best_correct = 0.0, -1
        for step in range(400):
            threshold = np.arange(0, 4, 0.01)[step]
            correct = sum((distances[i] < threshold) == is_same[i] for i in others)
            if correct > best_correct:
                best, best_correct = threshold, correct
        accuracies.append(np.mean([(distances[i] < best) == is_same[i] for i in range(start, end)]))
        start = end
    return np.mean(accuracies), np.std(accuracies)


def noisy_pairs(count, noise, seed=0, dim=16):
    generator = np.random.default_rng(seed)
    is_same = generator.random(count) < 0.5
    first = generator.normal(size=(count, dim))
    second = np.where(is_same[:, None], first, generator.normal(size=(count, dim)))
    second = second + noise * generator.normal(size=(count, dim))
    return np.stack([first, second], axis=1).reshape(-1, dim).astype(np.float32), is_same


@pytest.mark.parametrize(("count", "noise"), [(10, 1.0), (23, 1.5), (57, 2.0), (99, 0.5)])
def test_accuracy_is_the_protocols(count, noise):
    embeddings, is_same = noisy_pairs(count, noise, seed=count)
    result = verification(embeddings, is_same)
    mean, std = spelled_out(embeddings, is_same)
    assert result["accuracy"] == pytest.approx(mean)
    assert result["accuracy_std"] == pytest.approx(std)


def at_distance(squared):
    """A pair of unit vectors in the plane with this squared distance."""
    angle = np.arccos(1 - squared / 2)
    return [[1.0, 0.0], [np.cos(angle), np.sin(angle)]]


def test_folds_choose_their_threshold_without_looking_at_themselves():
    # Nine folds of (same at .095, different at 1.005): their best thresholds are .10 … 1.00, the first is taken.
    # The tenth fold's same pair lies at .505: judged at .10 it is wrong, although 1.00 would have been as good.
    pairs = [at_distance(d) for _ in range(9) for d in (0.095, 1.005)] + [at_distance(0.505), at_distance(1.005)]
    result = verification(np.array(pairs).reshape(-1, 2), np.tile([True, False], 10))
    assert result["accuracy"] == pytest.approx((9 * 1.0 + 0.5) / 10)
    squared = (9 * 0.51 + 0.10) / 10  # the others have the tenth to satisfy
    assert result["threshold_cosine"] == pytest.approx(1 - squared / 2)
    assert result["tar@far"] == dict.fromkeys(["1e-1", "1e-2", "1e-3", "1e-4", "1e-5", "1e-6"], None)


def test_the_first_folds_take_the_surplus():
    assert np.diff(fold_bounds(23)).tolist() == [3, 3, 3, 2, 2, 2, 2, 2, 2, 2]
    assert np.diff(fold_bounds(10)).tolist() == [1] * 10


def test_the_folds_tar_uses_the_threshold_of_the_other_folds():
    # 20 pairs a fold, far 1e-3: the threshold lies just where the nearest impostor of the other folds (d = 1) begins.
    pairs, truth = [], []
    for fold in range(10):
        for place in range(10):
            pairs += [at_distance(0.5 if place else 0.9), at_distance(1.0004 if fold else 0.6)]
            truth += [True, False]
    result = verification(np.array(pairs).reshape(-1, 2), np.array(truth))["tar@far_folds"]
    # Fold 0: the others' impostors are all at 1.0004, so it accepts its impostors at .6 (FAR 1) and all same pairs.
    # The others are judged below .6, where fold 0's impostors begin: a tenth of their same pairs (.9) is lost.
    assert result["far"] == pytest.approx(0.1)
    assert result["tar"] == pytest.approx((1.0 + 9 * 0.9) / 10)


@pytest.mark.parametrize("truth", [[True] * 20, [False] * 20, [True, False] * 4])
def test_one_kind_or_fewer_than_ten_pairs_have_no_accuracy(truth):
    result = verification(np.random.default_rng(0).normal(size=(2 * len(truth), 4)), np.array(truth))
    assert result["accuracy"] is result["accuracy_std"] is result["tar@far_folds"] is None
    assert result["impostor_pairs"] == len(truth) - sum(truth)


def test_no_pairs_at_all():
    result = verification(np.empty((0, 4)), np.empty(0, dtype=bool))
    assert result["accuracy"] is result["auc"] is None
    assert result["impostor_pairs"] == 0


@pytest.mark.parametrize("rows", [7, 6])
def test_rows_that_do_not_fit_the_pairs_are_refused(rows):
    with pytest.raises(DataError, match="4 pairs: each needs two rows"):
        verification(np.ones((rows, 3)), np.array([True] * 4))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_value_that_is_not_finite_is_named(value):
    embeddings = np.ones((8, 3))
    embeddings[5, 1] = value
    with pytest.raises(DataError, match="row 5 is not finite"):
        verification(embeddings, np.array([True] * 4))


def test_a_row_of_zeros_is_at_distance_one_from_any_other():
    embeddings, _ = noisy_pairs(20, 1.0)
    embeddings[::2] = 0
    np.testing.assert_allclose(squared_distances(embeddings, 20), 1.0)
