"""Thresholds predicted for larger galleries: against a known truth, by an integral of its own in float64."""

import math

import numpy as np
import pytest

from plsc.evaluation.larger_galleries import fit_impostors, predict_thresholds, sample_impostors
from plsc.evaluation.probe import LabelledRows

RATES = {"1e-1": 0.1, "1e-2": 0.01}
SIZES = (1000, 3000, 10_000)


def simulated(seed, people, enrolled, pictures=2):
    """Scores whose mean and deviation are each probe person's own."""
    generator = np.random.default_rng(seed)
    each = np.repeat(np.arange(people), pictures)
    mean, deviation = effects(generator, people)
    noise = generator.normal(size=(len(each), enrolled))
    return (mean[each, None] + deviation[each, None] * noise).astype(np.float32), each


def effects(generator, people):
    return 0.05 * generator.normal(size=people), 0.1 * np.exp(0.1 * generator.normal(size=people))


def true_fpir(persons, threshold):
    """1 - (1 - Q((t - m) / d))^N for many probes' m and d, one at a time."""
    mean, deviation = effects(np.random.default_rng(9), 3000)
    tails = [0.5 * math.erfc((threshold - m) / d / math.sqrt(2)) for m, d in zip(mean, deviation, strict=True)]
    return math.fsum(-math.expm1(persons * math.log1p(-tail)) for tail in tails) / len(tails)


def holds(predicted, size, name):
    """Whether the interval of a threshold holds the true one: FPIR falls as the threshold rises."""
    low, high = predicted[str(size)][name]["interval"]
    return true_fpir(size, high) <= RATES[name] <= true_fpir(size, low)


def test_one_tail_for_all_probes_would_be_wrong_and_each_probes_own_is_right():
    scores, _ = simulated(0, 300, 600)
    fitted = fit_impostors(scores)
    for size, rate in ((size, rate) for size in SIZES for rate in (0.1, 0.3)):
        threshold = fitted.threshold(size, rate)
        assert fitted.fpir(size, threshold) == pytest.approx(rate, abs=1e-6)
        assert true_fpir(size, threshold) == pytest.approx(rate, rel=0.2)
    shuffled = np.random.default_rng(1).permuted(scores.ravel()).reshape(scores.shape)
    alike = fit_impostors(shuffled)
    assert true_fpir(3000, alike.threshold(3000, 0.3)) < 0.2  # it misses by a third


def test_what_the_scores_cannot_tell_is_none():
    scores, persons = simulated(0, 100, 500, pictures=1)
    found = predict_thresholds(scores, persons, sizes=(499, 500, 4999, 5001), draws=2)
    assert found["499"] == {"1e-1": None, "1e-2": None, "1e-3": None}
    assert found["500"]["1e-1"] is not None
    assert found["4999"]["1e-1"] is not None
    assert found["4999"]["1e-2"] is found["5001"]["1e-1"] is None
    assert predict_thresholds(scores[:, :499], persons, sizes=(600,), draws=2)["600"]["1e-1"] is None


def test_a_predicted_threshold_lies_in_its_interval():
    scores, persons = simulated(4, 150, 500)
    found = predict_thresholds(scores, persons, sizes=(1000,), draws=30)["1000"]["1e-1"]
    assert found["interval"][0] < found["threshold"] < found["interval"][1]


def test_a_persons_score_is_that_of_the_best_face():
    unit = np.eye(4, dtype=np.float32)
    gallery = LabelledRows("gallery", unit[[0, 1, 2]], np.array([7, 3, 7]), [str(n) for n in range(9)])
    probes = LabelledRows("non-mated", unit[[2, 3, 1]], np.array([1, 2, 2]), gallery.class_names)
    scores, persons = sample_impostors(gallery, probes)
    assert sorted(map(tuple, scores.T.tolist())) == [(0, 0, 1), (1, 0, 0)]
    assert persons.tolist() == [1, 2, 2]


@pytest.mark.exhaustive
def test_intervals_hold_the_true_threshold_at_three_sizes():
    held = []
    for seed in range(24):
        found = predict_thresholds(*simulated(seed, 200, 600), seed=seed, sizes=SIZES, draws=40)
        held += [holds(found, size, "1e-1") for size in (1000, 3000, 10_000)]
    assert np.mean(held) > 0.85
