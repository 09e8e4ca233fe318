"""Errors of searches in a given gallery: against plain counting, and intervals against known truth."""

import json
from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plsc.errors import DataError
from plsc.evaluation.one_to_many import Searches, identification_errors, search_gallery
from plsc.evaluation.probe import LabelledRows
from plsc.tools.entry import main

NORMAL = NormalDist()
SLACK = 2e-6


def part(name, labels, rows, names):
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return LabelledRows(name, unit.astype(np.float32), np.asarray(labels), names)


def drawn_parts(seed, persons, strangers, faces=2, noise=0.9, dim=8):
    """A gallery of some faces a person, two mated probes each, and three of each stranger; labels differ by part."""
    generator = np.random.default_rng(seed)
    centres = generator.normal(size=(persons + strangers, dim))

    def shown(people):
        return centres[people] + noise * generator.normal(size=(len(people), dim))

    enrolled = generator.permutation(np.repeat(np.arange(persons), faces))
    again = np.repeat(np.arange(persons), 2)
    others = np.repeat(np.arange(persons, persons + strangers), 3)
    names = [f"person {number}" for number in range(persons + strangers)]
    return (
        part("gallery", enrolled, shown(enrolled), names),
        part("mated", len(names) - 1 - again, shown(again), names[::-1]),
        part("non-mated", others, shown(others), names),
    )


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 999), st.integers(2, 30), st.integers(1, 60), st.sampled_from([1, 3]), st.sampled_from([1, 5]))
def test_rates_are_those_of_searches_one_by_one(seed, persons, strangers, faces, rank):
    parts = drawn_parts(seed, persons, strangers, faces)
    found = identification_errors(search_gallery(*parts), rank=rank, draws=5)
    named = (([each.class_names[label] for label in each.labels], torch.from_numpy(each.unit)) for each in parts)
    wanted = reference.Searches(*named)  # in float64: scores nearer to each other than SLACK may change places
    for k in (1, 5, 10):
        assert wanted.fnir(-2, k, -SLACK) <= 1 - found[f"rank{k}"] + 1e-9
        assert 1 - found[f"rank{k}"] <= wanted.fnir(-2, k, SLACK) + 1e-9
    for name, point in found["fnir@fpir"].items():
        probes = len(parts[2])
        allowed = int(float(name) * probes + 1e-9)
        assert (point is None) == (allowed < 10)
        if point is not None:
            threshold, matched = point["threshold"], point["false_positives"]
            assert matched <= allowed < round(wanted.fpir(threshold - SLACK) * probes)  # the lowest that holds the rate
            assert round(wanted.fpir(threshold + SLACK) * probes) <= matched
            assert wanted.fnir(threshold, rank, -SLACK) <= point["fnir"] + 1e-9
            assert point["fnir"] <= wanted.fnir(threshold, rank, SLACK) + 1e-9


def test_a_probe_without_an_embedding_finds_nobody():
    gallery, mated, non_mated = drawn_parts(4, 20, 60, noise=0.1)
    whole = identification_errors(search_gallery(gallery, mated, non_mated), draws=5)
    lost = replace(mated, lost=mated.labels[:10]), replace(non_mated, lost=np.repeat(non_mated.labels, 2))
    less = identification_errors(search_gallery(gallery, *lost), draws=5)
    assert (less["mated_probes"], less["non_mated_probes"]) == (50, 540)
    for name in ("rank1", "rank5", "rank10"):
        assert less[name] == pytest.approx(whole[name] * 40 / 50)
    # With three times as many non-mated probes, two thirds of which match nobody, thrice the share may.
    assert less["fnir@fpir"]["1e-1"]["false_positives"] == 54
    assert less["fnir@fpir"]["1e-1"]["fnir"] >= 0.2
    with pytest.raises(DataError, match="is in the gallery"):
        search_gallery(gallery, mated, replace(non_mated, lost=np.array([0])))


def test_a_score_of_many_false_positives_is_above_none_of_them():
    searches = simulated(np.random.default_rng(0), 30, 100)
    tied = replace(searches, best=np.where(searches.best > 0, np.float32(0.5), searches.best))
    point = identification_errors(tied, draws=5)["fnir@fpir"]["1e-1"]
    assert (point["false_positives"], point["interval"]) == (0, None)
    assert point["fnir"] == np.mean(searches.own <= 0.5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mated": 2}, "mated: person 3 is not in the gallery"),
        ({"non-mated": 1}, "non-mated: person 0 is in the gallery"),
        ({"empty": 0}, "gallery holds no labelled picture"),
    ],
)
def test_parts_that_do_not_fit_are_refused(change, message):
    gallery, mated, non_mated = drawn_parts(1, 3, 3)
    if "mated" in change:
        mated = replace(mated, labels=mated.labels - 3)
    elif "non-mated" in change:
        non_mated = replace(non_mated, labels=non_mated.labels - 3)
    else:
        gallery = gallery.take(np.arange(0))
    with pytest.raises(DataError, match=message):
        search_gallery(gallery, mated, non_mated)


def simulated(generator, persons, strangers, pictures=3, own=2.7, effect=0.7):
    """Scores with a person's own effect, which is a share ``effect`` of their variance of 1."""

    def scores(people):
        each = np.repeat(np.arange(people), pictures)
        values = np.sqrt(effect) * generator.normal(size=people)[each]
        return (values + np.sqrt(1 - effect) * generator.normal(size=len(each))).astype(np.float32), each

    (mates, mated), (best, non_mated) = scores(persons), scores(strangers)
    return Searches(1, 1, mates + np.float32(own), np.zeros(len(mates), dtype=np.int64), mated, best, non_mated)


def covered(sets, persons, strangers, draws, by_picture=False):
    """By FPIR, the intervals given and the share of them that hold the true FNIR."""
    generator, hits = np.random.default_rng(5), {"1e-1": [], "1e-2": [], "1e-3": []}
    for seed in range(sets):
        searches = simulated(generator, persons, strangers)
        if by_picture:
            alone = {"mated": np.arange(len(searches.own)), "non_mated": np.arange(len(searches.best))}
            searches = replace(searches, **alone)
        for name, point in identification_errors(searches, seed=seed, draws=draws)["fnir@fpir"].items():
            if point is not None and point["interval"] is not None:
                low, high = point["interval"]
                hits[name].append(low <= NORMAL.cdf(NORMAL.inv_cdf(1 - float(name)) - 2.7) <= high)
    return {name: (len(found), np.mean(found)) for name, found in hits.items() if found}


def test_intervals_draw_persons_and_not_pictures():
    searches = simulated(np.random.default_rng(2), 150, 400)
    alone = replace(searches, mated=np.arange(len(searches.own)), non_mated=np.arange(len(searches.best)))
    wide, narrow = (identification_errors(each, draws=200)["fnir@fpir"]["1e-1"] for each in (searches, alone))
    assert wide["fnir"] == narrow["fnir"]
    assert wide["interval"][0] < wide["fnir"] < wide["interval"][1]
    assert np.ptp(wide["interval"]) > 1.15 * np.ptp(narrow["interval"])


@pytest.mark.exhaustive
def test_intervals_hold_the_truth_in_95_of_100_sets():
    found = covered(500, 200, 1200, 200)
    assert set(found) == {"1e-1", "1e-2"}  # 1e-3 allows three false positives
    for given_, share in found.values():
        assert given_ > 300
        assert 0.93 <= share <= 0.97
    assert covered(150, 200, 400, 200, by_picture=True)["1e-1"][1] < 0.92


def test_a_person_behind_a_stranger_is_missed_at_rank_1_and_found_at_rank_2():
    mates, strangers = np.arange(40), np.arange(100)
    own, best = np.full(40, 0.9, dtype=np.float32), np.linspace(0, 0.5, 100, dtype=np.float32)
    searches = Searches(40, 40, own, mates % 2, mates, best, strangers)
    one, two = (identification_errors(searches, rank=rank, draws=5)["fnir@fpir"]["1e-1"] for rank in (1, 2))
    assert (one["fnir"], two["fnir"]) == (0.5, 0.0)


def test_few_persons_who_err_give_no_interval():
    found = identification_errors(simulated(np.random.default_rng(3), 100, 60, own=9.0), draws=50)
    assert found["fnir@fpir"]["1e-1"]["interval"] is None
    assert found["fnir@fpir"]["1e-1"]["fnir"] < 0.05
    assert found["fnir@fpir"]["1e-2"] is found["fnir@fpir"]["1e-3"] is None
    assert found["intervals"] == {"rank1": None, "rank5": None, "rank10": None}


def test_the_command_prints_and_writes_what_it_found(tmp_path, capsys):
    out = tmp_path / "searches.json"
    argv = ["eval", "raw-pixels", "--image-size", "32", "--gallery", "avatars:8x2@900", "--mated", "avatars:8x3@900"]
    assert main([*argv, "--non-mated", "avatars:25x4@950", "--json", str(out)]) == 0
    found = json.loads(out.read_text())["searches"]
    assert (found["persons"], found["faces"], found["mated_probes"], found["non_mated_probes"]) == (8, 16, 24, 100)
    assert found["fnir@fpir"]["1e-1"]["false_positives"] <= 10
    printed = capsys.readouterr().out
    assert "FNIR at FPIR 1e-1" in printed
    assert "gallery: 8 persons, 16 faces; mated: 24 probes of 8; non-mated: 100 probes of 25" in printed


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["m", "--gallery", "avatars:2x2"], "give all three"),
        (["m", "--gallery", "g", "--mated", "m", "--non-mated", "n", "--data", "d"], "--data does not go with"),
        (["--gallery", "avatars:2x2", "--mated", "avatars:2x2", "--non-mated", "avatars:2x2"], "MODEL is missing"),
        (["m", "--gallery", "g", "--mated", "m", "--non-mated", "n"], "there is no g"),
    ],
)
def test_a_wrong_request_is_one_line(argv, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["eval", *argv]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
