"""Thresholds by a collection's size: held in galleries of other people, kept in files that may not lie."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plsc.errors import IntegrityError, UsageError
from plsc.evaluation.calibration import Calibration, OperatingPoint, read_calibration, write_calibration
from plsc.evaluation.probe import LabelledRows
from plsc.evaluation.search_thresholds import SearchCalibration, SearchThresholds, calibrate_searches
from plsc.files import digest
from plsc.tools.entry import main

POINTS = (OperatingPoint(1e-2, 0.31, 0.9, 100),)


def people(seed: int, count: int, faces: int = 1) -> LabelledRows:
    """Faces of people, some of whom look like many others: each leans to one direction by a part of its own."""
    generator = np.random.default_rng(seed)
    rows = generator.normal(size=(count, 512)) / np.sqrt(512)
    rows[:, 0] += np.abs(0.1 * generator.normal(size=count))
    if faces > 1:
        rows = np.repeat(rows, faces, axis=0) + 0.6 * generator.normal(size=(count * faces, 512)) / np.sqrt(512)
    unit = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    labels = np.repeat(np.arange(count), faces)
    return LabelledRows(f"set {seed}", unit, labels, [f"{seed}/{number}" for number in range(count)])


@pytest.fixture(scope="module")
def searches() -> SearchCalibration:
    found = calibrate_searches(people(1, 1500), people(2, 1000))
    assert found is not None
    return found


def found_fpir(gallery: LabelledRows, strangers: LabelledRows, threshold: float) -> float:
    return float(np.mean((strangers.unit @ gallery.unit.T).max(axis=1) >= threshold))


@pytest.mark.parametrize("persons", [1, 20, 500, 5000])
@pytest.mark.parametrize("fpir", [0.1, 0.01])
def test_the_rate_is_found_in_galleries_of_other_people(searches, persons, fpir):
    by_size, strangers = SearchThresholds(searches, fpir), people(3, 2000)
    galleries = [people(10 + number, persons) for number in range(60 if persons == 1 else 4)]
    found = np.mean([found_fpir(each, strangers, by_size.threshold(persons, persons)) for each in galleries])
    assert found == pytest.approx(fpir, rel=0.3)  # the tail is of 4,500 scores, and 2,000 strangers are a sample


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 10**7), min_size=2, max_size=6), st.floats(1e-6, 0.99), st.floats(1e-6, 0.99))
def test_thresholds_rise_with_people_and_fall_with_the_rate(searches, sizes, one, other):
    strict, loose = (SearchThresholds(searches, rate) for rate in sorted((one, other)))
    for by_size in (strict, loose):
        found = [by_size.threshold(size, size) for size in sorted(sizes)]
        assert all(low <= high for low, high in pairwise(found))
    assert all(strict.threshold(size, size) >= loose.threshold(size, size) for size in sizes)


def test_more_faces_a_person_than_in_the_calibration_count_as_more_people():
    gallery, strangers = people(4, 600, faces=2), people(5, 400)
    found = calibrate_searches(gallery, strangers)
    assert found is not None
    assert found.faces_each == 2
    by_size = SearchThresholds(found, 0.1)
    assert by_size.threshold(100, 100) == by_size.threshold(100, 200) < by_size.threshold(100, 202)
    assert by_size.size(100, 1000) == 500
    assert by_size.threshold(12_301, 0) == by_size.threshold(12_400, 0) < by_size.threshold(12_401, 0)
    more = people(6, 600, faces=10)  # of whom a threshold for as many people would let in more than a tenth
    held, missed = (found_fpir(more, people(7, 2000), by_size.threshold(600, faces)) for faces in (6000, 1200))
    assert held <= 0.1 < missed


def test_beyond_the_evidence_a_rate_of_one_person_is_refused(searches):
    assert searches.scores == 1_500_000
    assert (searches.persons_at(0.1), searches.persons_at(1e-3), SearchThresholds(searches, 1e-6).persons) == (
        150_000,
        1500,
        1,
    )
    with pytest.raises(UsageError, match="an FPIR of 1e-07 is beyond the evidence: 1,500,000 compared scores"):
        SearchThresholds(searches, 1e-7)
    for rate in (0.0, 1.0, -0.1, float("nan")):
        with pytest.raises(UsageError, match="between 0 and 1"):
            SearchThresholds(searches, rate)


def test_too_few_people_or_pictures_that_are_all_alike_predict_nothing():
    assert calibrate_searches(people(1, 499), people(2, 500)) is None
    assert calibrate_searches(people(1, 500), people(2, 99)) is None
    alike = LabelledRows("alike", np.ones((500, 1), dtype=np.float32), np.arange(500), [str(n) for n in range(500)])
    assert calibrate_searches(alike, alike) is None


def calibration(searches: SearchCalibration | None) -> Calibration:
    return Calibration("c", "m", ("s",), 10, 20_000, 30, POINTS, searches)


def test_a_file_holds_what_predicts_and_one_without_it_is_as_before(searches, tmp_path):
    path = tmp_path / "c.json"
    write_calibration(path, calibration(searches))
    assert read_calibration(path) == calibration(searches)
    assert path.stat().st_size < 100_000
    write_calibration(path, calibration(None))
    assert "searches" not in json.loads(path.read_text())
    assert read_calibration(path) == calibration(None)


@pytest.mark.parametrize(
    "change",
    [
        {"mean": []},
        {"mean": [0.1] * 1001, "deviation": [0.1] * 1001},
        {"mean": [0.1, 0.2]},
        {"mean": "x"},
        {"mean": [2.0] * 1000},
        {"deviation": [0.0] * 1000},
        {"deviation": [-0.1] * 1000},
        {"deviation": [1e-300] * 1000},
        {"body": [0.0] * 99},
        {"body": [1.0, *[0.0] * 99]},
        {"body": [*[0.0] * 99, 1e300]},
        {"share": 0.0},
        {"share": 1.5},
        {"scale": 0.0},
        {"scale": -1.0},
        {"shape": 0.0},
        {"shape": 1e6},
        {"shape": None},
        {"scores": 0},
        {"scores": 10**30},
        {"scores": 1.5},
        {"faces_each": 0.0},
        {"faces_each": -2},
    ],
    ids=lambda change: f"{next(iter(change))} {str(next(iter(change.values())))[:12]}",
)
def test_a_sealed_file_with_other_numbers_is_refused_in_one_line(searches, change, tmp_path):
    path = tmp_path / "c.json"
    write_calibration(path, calibration(searches))
    content = json.loads(path.read_text())
    content.pop("seal")
    content["searches"] |= change
    path.write_text(json.dumps({**content, "seal": digest(content)}))
    with pytest.raises(IntegrityError, match="holds no sound calibration") as refused:
        read_calibration(path)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400


def test_infinite_numbers_are_no_json(searches, tmp_path):
    path = tmp_path / "c.json"
    write_calibration(path, calibration(replace(searches, shape=0.25)))
    path.write_text(path.read_text().replace("0.25", "1e999"))
    with pytest.raises(IntegrityError, match="is corrupt"):
        read_calibration(path)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from plsc.models import create, save_model

    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    torch.manual_seed(0)
    save_model(create("resnet8", embedding_dim=16, image_size=32), path)
    return path


def searched(model: Path, gallery: int, strangers: int) -> list[str]:
    parts = ["--gallery", f"avatars:{gallery}x1@900", "--mated", "avatars:20x2@900"]
    return ["eval", str(model), *parts, "--non-mated", f"avatars:{strangers}x1@90000"]


@pytest.mark.slow
def test_the_command_keeps_what_it_predicts_beside_the_rates_of_pairs(model, tmp_path, capsys):
    out = tmp_path / "c.json"
    assert main([*searched(model, 500, 100), "--calibration", str(out)]) == 0
    printed = capsys.readouterr().out
    assert f"calibrated: {out} holds false-match rates down to" in printed
    assert "predicted: FPIR 1e-3 up to 50 persons, from 50,000 scores" in printed
    found = read_calibration(out)
    assert found.searches is not None
    assert (found.searches.scores, found.searches.faces_each, len(found.searches.mean)) == (50_000, 1.0, 100)
    assert found.images == 640
    assert found.impostor_pairs + found.genuine_pairs == 640 * 639 // 2
    assert found.genuine_pairs == 20 * 3  # the two pictures and the enrolled one
    assert main([*searched(model, 500, 100), "--calibration", str(out)]) == 2
    assert "exists" in capsys.readouterr().err


def test_a_gallery_too_small_to_predict_says_so(model, tmp_path, capsys):
    out = tmp_path / "c.json"
    assert main([*searched(model, 30, 30), "--calibration", str(out)]) == 0
    assert f"warning: {out} predicts no FPIR: that takes 500 enrolled persons" in capsys.readouterr().err
    assert read_calibration(out).searches is None


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        (["raw-pixels"], "raw-pixels has no embeddings"),
        ([], "give MODEL"),
        (["m", "--calibration", "nowhere/c.json"], "name a file in a folder"),
    ],
)
def test_a_wrong_request_is_one_line(given_, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("g.emb", "m.emb", "u.emb"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr("plsc.evaluation.probe_parts.is_embedding_set", lambda source: True)
    parts = ["--gallery", "g.emb", "--mated", "m.emb", "--non-mated", "u.emb"]
    assert main(["eval", *parts, "--calibration", "c.json", *given_]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
