"""The judgement of a move to another model, against pairs that are formed one by one."""

import json
from itertools import combinations

import numpy as np
import pytest
from support.spaces import people, rotation, unit

from plsc.errors import DataError, UsageError
from plsc.evaluation.report import roc_figure
from plsc.evaluation.roc import all_pairs_roc
from plsc.gallery.migration import judgement
from plsc.gallery.migration.bootstrap import impostor_pairs, pair_scores
from plsc.gallery.migration.judgement import judge

DIM = 12


def worse(rows, noise, seed=7):
    return unit(rows @ rotation(DIM, DIM) + noise * np.random.default_rng(seed).standard_normal(rows.shape))


def gallery(count=60, faces=4):
    old, persons = people(count, faces, DIM, noise=0.4)
    return old, worse(old, 0.1), worse(old, 0.2, seed=8), persons


def scores_of(probes, others, persons):
    """Scores of same and of different persons' pairs, in float64, the later face of each pair by ``others``."""
    kinds = {True: [], False: []}
    for first, second in combinations(range(len(persons)), 2):
        kinds[persons[first] == persons[second]].append(probes[first].astype(float) @ others[second].astype(float))
    return np.sort(kinds[True])[::-1], np.sort(kinds[False])[::-1]


def rate(scores, threshold):
    return float(np.mean(scores >= threshold - 5e-7))  # cosines are counted in bins of that width


def tar_at(own, strangers, allowed):
    return float(np.mean(own > strangers[allowed] + 5e-7))


def test_rates_are_those_of_pairs_formed_one_by_one():
    old, new, estimated, persons = gallery()
    found = judge(2 * old, new, persons, threshold=0.6, estimated=estimated)
    pairs = {
        name: scores_of(*spaces, persons)
        for name, spaces in (("old", (old, old)), ("new", (new, new)), ("estimated", (new, estimated)))
    }
    own, strangers = pairs["old"]
    matched = int(np.sum(strangers >= 0.6))
    assert matched > 10
    assert found.is_supported
    assert (found.persons, found.faces, found.genuine_pairs, found.impostor_pairs) == (60, 240, 360, 28320)
    assert found.fmr == found.judged_fmr == pytest.approx(matched / len(strangers), rel=1e-12)
    assert found.spaces["old"].used_tar == pytest.approx(rate(own, 0.6), abs=1e-12)
    for name in pairs:
        assert found.spaces[name].tar == pytest.approx(tar_at(*pairs[name], matched), abs=1e-12), name
        assert rate(pairs[name][1], found.spaces[name].threshold) <= found.fmr + 1e-12
    assert found.threshold == max(found.spaces[name].threshold for name in ("new", "estimated"))
    for name in ("new", "estimated"):
        assert found.spaces[name].used_tar == pytest.approx(rate(pairs[name][0], found.threshold), abs=1e-12)
        assert found.spaces[name].used_fmr == pytest.approx(rate(pairs[name][1], found.threshold), abs=1e-12)
        assert found.spaces[name].used_fmr <= found.fmr
    lost = found.spaces["old"].used_tar - found.spaces["estimated"].used_tar
    assert found.loss == pytest.approx(lost)
    assert found.refuses(lost - 1e-9)
    assert not found.refuses(lost + 1e-9)
    assert found.loss_interval[0] < found.loss < found.loss_interval[1]


def test_a_threshold_that_nobody_false_passes_stays_as_strict_as_it_was():
    """Where too few pairs of different persons match to tell, the same share of a person's own does, or fewer."""
    old, new, _, persons = gallery(count=12)
    own, strangers = scores_of(new, new, persons)
    former, thresholds = scores_of(old, old, persons)[0], []
    for threshold in (0.75, 0.85, 0.95):
        found = judge(old, new, persons, threshold=threshold)
        assert not found.is_supported
        assert rate(own, found.threshold) <= rate(former, threshold) + 1e-12
        assert rate(strangers, found.threshold) <= found.fmr + 1e-12
        lost = rate(former, threshold) - rate(own, found.threshold)
        assert found.threshold_loss == pytest.approx(lost, abs=1e-12)
        assert found.largest_loss == max(found.loss, found.threshold_loss)
        assert f"TAR loses {lost:.4f}" in found.warnings()[0]
        thresholds.append(found.threshold)
    assert thresholds == sorted(set(thresholds))


def test_a_loss_at_the_thresholds_in_force_is_refused():
    old, new, _, persons = gallery(count=12)
    found = judge(old, new, persons, threshold=0.6, new_threshold=0.99)
    assert found.threshold == 0.99
    assert found.threshold_loss > found.loss + 0.1
    assert found.refuses(found.loss)
    assert not found.refuses(found.threshold_loss)


def test_draws_count_pairs_as_if_the_persons_had_come_that_often():
    old, new, _, persons = gallery(count=12, faces=3)
    roc = all_pairs_roc(old, persons, new)
    assert (roc.genuine_pairs, roc.impostor_pairs) == (36, 594)
    found = pair_scores(old, new, persons, roc, 40, np.random.default_rng(0))
    times = np.random.default_rng(1).integers(0, 3, 12).astype(float)
    own, strangers = [], []
    copies = [(person, copy) for person in range(12) for copy in range(int(times[person]))]
    for (first, one), (second, other) in combinations(copies, 2):
        if first != second:  # never a face with its own copy
            left, right = (np.flatnonzero(persons == person) for person in (first, second))
            strangers += (old[left] @ new[right].T).ravel().tolist()
        assert (first, one) != (second, other)
    for person, _ in copies:
        rows = np.flatnonzero(persons == person)
        own += [old[a] @ new[b] for a, b in combinations(rows, 2)]
    own, strangers = np.sort(own)[::-1], np.sort(strangers)[::-1]
    assert impostor_pairs(times, np.full(12, 3)) == len(strangers)
    assert found.matched(times, float(strangers[30])) == np.sum(strangers >= strangers[30] - 1e-6)
    limit = found.threshold(times, 25)
    assert np.sum(strangers > limit + 1e-6) <= 25 < np.sum(strangers >= limit - 1e-6)
    assert found.accepted(times, 0.7) == pytest.approx(np.mean(own > 0.7))


def test_a_part_of_the_highest_scores_stands_for_all(monkeypatch):
    old, new, estimated, persons = gallery()
    whole = judge(old, new, persons, threshold=0.5, estimated=estimated)
    monkeypatch.setattr("plsc.gallery.migration.bootstrap._MOST_KEPT", 1500)
    part = judge(old, new, persons, threshold=0.5, estimated=estimated)
    assert part.spaces["new"].tar == whole.spaces["new"].tar
    for name in whole.spaces:
        np.testing.assert_allclose(part.spaces[name].tar_interval, whole.spaces[name].tar_interval, atol=0.02)
    assert part.fmr_bound == pytest.approx(whole.fmr_bound, rel=0.1)


def test_too_few_pairs_match_to_tell_a_rate():
    old, new, _, persons = gallery()
    strangers = scores_of(old, old, persons)[1]
    found = judge(old, new, persons, threshold=0.999)
    assert (found.fmr, found.is_supported) == (0, False)
    assert found.fmr_bound == pytest.approx(2.996 / len(strangers), rel=1e-3)
    assert found.judged_fmr == pytest.approx(10 / len(strangers))
    new_own, new_strangers = scores_of(new, new, persons)
    assert found.threshold > new_strangers[0]
    assert found.spaces["new"].tar == pytest.approx(tar_at(new_own, new_strangers, 10))
    assert "0 of 28,320 pairs" in found.warnings()[0]
    assert found.warnings()[0] in found.table()
    two = judge(old, new, persons, threshold=float(strangers[1]) - 1e-6)
    assert two.fmr == pytest.approx(2 / len(strangers))
    assert two.fmr_bound == pytest.approx(6.296 / len(strangers), rel=1e-3)  # of Poisson's tables


def test_without_a_threshold_a_rate_is_taken():
    old, new, _, persons = gallery()
    found = judge(old, new, persons, threshold=None, fmr=0.01)
    own, strangers = scores_of(old, old, persons)
    assert found.fmr == 283 / 28320
    assert found.spaces["old"].used_tar == found.spaces["old"].tar == pytest.approx(tar_at(own, strangers, 283))
    assert found.old_threshold == found.spaces["old"].threshold > strangers[283]


def test_the_same_space_loses_nothing_and_more_persons_narrow_the_interval():
    widths = []
    for count in (15, 150):
        old, new, _, persons = gallery(count)
        assert judge(old, old, persons, threshold=None, fmr=0.02).loss_interval == (0, 0)
        low, high = judge(old, new, persons, threshold=None, fmr=0.02).loss_interval
        widths.append(high - low)
    assert widths[1] < 0.6 * widths[0]


def test_its_values_are_json_and_its_curves_are_drawn(tmp_path):
    old, new, estimated, persons = gallery()
    found, again = (judge(old, new, persons, threshold=0.6, estimated=estimated) for _ in range(2))
    text = json.dumps(found.to_dict(), allow_nan=False)
    assert text == json.dumps(again.to_dict())
    read = json.loads(text)
    assert read["spaces"]["new"]["tar"] == found.spaces["new"].tar
    assert len(read["curves"]["old"]["roc"]["far"]) < 100
    roc_figure(found.curves, tmp_path / "roc.svg")
    assert "estimated" in found.table().splitlines()[0]
    assert f"{found.threshold:.4f} after" in found.table()


def test_one_person_of_many_faces_does_not_decide(monkeypatch):
    monkeypatch.setattr(judgement, "_MOST_FACES", 5)
    old, persons = people(30, 4, DIM)
    crowd, _ = people(1, 300, DIM, seed=2)
    found = judge(np.vstack([old, crowd]), np.vstack([old, crowd]), np.append(persons, [99] * 300), threshold=0.5)
    assert (found.persons, found.faces) == (31, 125)


def test_what_cannot_be_judged_is_refused():
    old, new, estimated, persons = gallery(count=20, faces=2)
    single = np.where(persons < 9, persons, np.arange(len(persons)) + 100)
    with pytest.raises(DataError, match=r"10 persons at the least who have two faces.*there are 9;"):
        judge(old, new, single, threshold=0.5)
    with pytest.raises(DataError, match="there are 0;"):
        judge(old[:0], new[:0], persons[:0], threshold=0.5)
    with pytest.raises(UsageError, match=r"estimated embeddings of shape \(39, 12\) do not fit 40 faces"):
        judge(old, new, persons, threshold=0.5, estimated=estimated[1:])
    with pytest.raises(UsageError, match="between 0 and 1, not at 2"):
        judge(old, new, persons, threshold=None, fmr=2)
    new[3] = np.inf
    with pytest.raises(DataError, match="row 3 is not finite"):
        judge(old, new, persons, threshold=0.5)
