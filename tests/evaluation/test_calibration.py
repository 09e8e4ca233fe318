"""Calibrations: thresholds against plain counting, files that keep their word, the command that writes them."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plsc.embedding.embedder import open_embedder
from plsc.errors import DataError, IntegrityError, UsageError
from plsc.evaluation.calibration import Calibration, OperatingPoint, calibrate, read_calibration, write_calibration
from plsc.evaluation.roc import roc_from_scores
from plsc.files import digest
from plsc.tools.entry import main


def scored(seed: int, impostors: int, genuine: int, levels: int = 10**9):
    """Scores of pairs, and which are the same person's; few ``levels`` make many ties."""
    generator = np.random.default_rng(seed)
    different = np.round(generator.normal(0.0, 0.2, impostors) * levels) / levels
    same = np.round(generator.normal(0.5, 0.2, genuine) * levels) / levels
    return np.concatenate([different, same]), np.arange(impostors + genuine) >= impostors


def made(*sets) -> Calibration:
    rocs = {f"set {i}": roc_from_scores(scores, truth) for i, (scores, truth) in enumerate(sets)}
    return calibrate(rocs, contract_id="c0ffee", model="runs/first", images=77)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.integers(100, 3000), st.integers(1, 200), st.sampled_from([5, 20, 300, 10**9]))
def test_each_threshold_is_the_lowest_that_keeps_the_rate(seed, impostors, genuine, levels):
    scores, truth = scored(seed, impostors, genuine, levels)
    different, same = scores[~truth], scores[truth]
    try:
        calibration = made((scores, truth))
    except DataError:  # ties at the very top let in more than a tenth
        assert np.mean(different >= scores.max()) > 0.1
        return
    for point in calibration.points:
        accepted = different >= point.threshold
        assert accepted.sum() == point.impostors
        assert accepted.sum() <= point.fmr * impostors * (1 + 1e-9)
        assert round(point.fmr * impostors, 6) >= 10
        assert point.tmr == pytest.approx(np.mean(same >= point.threshold))
        lower = scores[scores < point.threshold]
        if lower.size:  # the next score down lets in too many
            assert np.sum(different >= lower.max()) > point.fmr * impostors * (1 - 1e-9)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**31), st.floats(1e-6, 0.9))
def test_between_points_the_threshold_holds_the_rate_that_was_asked_for(seed, fmr):
    scores, truth = scored(seed, 5000, 50)
    calibration = made((scores, truth))
    if fmr < calibration.points[-1].fmr:
        with pytest.raises(UsageError, match=r"beyond the evidence: 5,000 different pairs support 0\.002"):
            calibration.threshold_at(fmr)
    else:
        assert np.mean(scores[~truth] >= calibration.threshold_at(fmr)) <= fmr


def test_rates_go_as_far_as_ten_impostors_reach_and_rise_in_threshold():
    calibration = made(scored(1, 10_000, 100))
    assert [point.fmr for point in calibration.points] == [0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001]
    assert np.all(np.diff([point.threshold for point in calibration.points]) > 0)
    assert np.all(np.diff([point.tmr for point in calibration.points]) <= 0)
    assert calibration.threshold_at(0.5) == calibration.points[0].threshold
    assert calibration.threshold_at(0.002) == calibration.points[5].threshold
    assert calibration.threshold_at(0.0019) == calibration.points[6].threshold
    assert calibration.default_fmr == 0.001  # the smallest that was measured
    assert replace(calibration, points=(*calibration.points, OperatingPoint(1e-5, 0.9, 0.1, 10))).default_fmr == 1e-4


def test_several_sets_count_as_one_heap_of_pairs():
    one, two = scored(2, 3000, 100, 50), scored(3, 4000, 10, 50)
    heap = np.concatenate([one[0], two[0]]), np.concatenate([one[1], two[1]])
    together = made(one, two)
    assert (together.sets, together.impostor_pairs, together.genuine_pairs) == (("set 0", "set 1"), 7000, 110)
    assert together.points == made(heap).points


@pytest.mark.parametrize("fmr", [0.0, 1.0, -0.1, 2.0, float("nan")])
def test_a_rate_that_is_none_is_refused(fmr):
    with pytest.raises(UsageError, match="between 0 and 1"):
        made(scored(1, 1000, 10)).threshold_at(fmr)


@pytest.mark.parametrize(("impostors", "genuine", "message"), [(99, 10, "99 different pairs"), (500, 0, "no two")])
def test_too_few_pairs_are_refused(impostors, genuine, message):
    with pytest.raises(DataError, match=message):
        made(scored(1, impostors, genuine))


def test_a_tie_at_the_top_of_too_many_impostors_ends_the_rates():
    scores = np.concatenate([np.full(60, 1.0), np.linspace(-0.5, 0.5, 940), np.full(10, 0.8)])
    calibration = made((scores, np.arange(1010) >= 1000))
    assert [point.fmr for point in calibration.points] == [0.1]


def test_a_file_holds_what_was_written(tmp_path):
    calibration = made(scored(4, 20_000, 300))
    write_calibration(tmp_path / "c.json", calibration)
    assert read_calibration(tmp_path / "c.json") == calibration
    assert list(tmp_path.iterdir()) == [tmp_path / "c.json"]


def test_any_change_to_the_file_is_noticed(tmp_path):
    path = tmp_path / "c.json"
    write_calibration(path, made(scored(4, 2000, 30)))
    content = json.loads(path.read_text())
    for changed in (
        content | {"contract_id": "other"},
        content | {"points": content["points"][:-1]},
        content | {"points": [{**point, "threshold": 0.0} for point in content["points"]]},
        content | {"images": float("nan")},
        {key: value for key, value in content.items() if key != "seal"},
    ):
        path.write_text(json.dumps(changed))
        with pytest.raises(IntegrityError, match=r"c\.json is corrupt"):
            read_calibration(path)


@pytest.mark.parametrize(
    "change",
    [
        {"points": []},
        {"points": None},
        {"points": [{"fmr": 0.1}]},
        {"points": "x"},
        {"contract_id": 7},
        {"images": "7"},
        {"points": [{"fmr": r, "threshold": 0.1, "tmr": 1, "impostors": 10} for r in (0.01, 0.1)]},
        {"points": [{"fmr": 0.1, "threshold": None, "tmr": 1, "impostors": 10}]},
    ],
)
def test_a_sealed_file_with_other_fields_is_refused_in_one_line(change, tmp_path):
    path = tmp_path / "c.json"
    write_calibration(path, made(scored(4, 2000, 30)))
    content = {**json.loads(path.read_text()), **change}
    content.pop("seal")
    path.write_text(json.dumps({**content, "seal": digest(content)}))
    with pytest.raises(IntegrityError, match="no sound calibration"):
        read_calibration(path)


LATER = {"format": "plsc calibration", "version": 2}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not readable as JSON"),
        ("[]", "is no calibration"),
        ('{"format": "x"}', "is no calibration"),
        (json.dumps({**LATER, "seal": digest(LATER)}), "version 2"),
    ],
)
def test_something_else_is_refused(text, message, tmp_path):
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(DataError, match=message):
        read_calibration(tmp_path / "c.json")
    with pytest.raises(DataError, match="does not exist"):
        read_calibration(tmp_path / "none.json")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    from plsc import models

    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    models.save_model(models.create("mobilefacenet", embedding_dim=16, image_size=48), path)
    return path


def test_the_command_calibrates_on_the_cosines_of_single_images(model, tmp_path, capsys):
    from plsc.data import open_dataset

    out = tmp_path / "c.json"
    assert main(["eval", str(model), "--data", "avatars:12x4@900", "--calibration", str(out)]) == 0
    assert "calibrated" in capsys.readouterr().out
    calibration, embedder = read_calibration(out), open_embedder(model)
    assert calibration.contract_id == embedder.contract_id
    assert (calibration.images, calibration.sets) == (48, ("avatars:12x4@900",))
    images = open_dataset("avatars:12x4@900", image_size=48)
    rows = embedder(torch.stack([images.image(i) for i in range(48)])).double().numpy()
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    first, second = np.triu_indices(48, k=1)
    cosines, same = np.sum(rows[first] * rows[second], axis=1), images.labels[first] == images.labels[second]
    assert (calibration.impostor_pairs, calibration.genuine_pairs) == (int(np.sum(~same)), int(np.sum(same)))
    for point in calibration.points:
        near = 1e-6  # the command counts cosines in bins
        assert np.sum(cosines[~same] >= point.threshold + near) <= point.impostors
        assert np.sum(cosines[~same] >= point.threshold - near) >= point.impostors
        assert np.sum(cosines[~same] >= point.threshold + near) <= point.fmr * calibration.impostor_pairs


def test_mirror_images_make_another_contract(model, tmp_path):
    out = tmp_path / "c.json"
    argv = ["eval", str(model), "--data", "avatars:12x3@900", "--calibration", str(out), "--flip", "yes"]
    assert main(argv) == 0
    assert read_calibration(out).contract_id == open_embedder(model).contract_id + "+flip"
