"""Probes of frozen embeddings: kNN votes and logistic regression, against float64, and plsc eval --probe."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.clusters import write_set

from plsc.errors import DataError
from plsc.evaluation.probe import LabelledRows, Probe, halved, probe
from plsc.tools.entry import main

PICTURES = "avatars:6x4@900"


def drawn(rows: int, classes: int, seed: int, noise: float = 1.6, dim: int = 16) -> LabelledRows:
    """Rows around the centres of ``classes``, the same ones for every seed."""
    centres = np.random.default_rng(0).standard_normal((classes, dim))
    random = np.random.default_rng(seed)
    labels = random.integers(0, classes, rows)
    vectors = centres[labels] + noise * random.standard_normal((rows, dim))
    unit = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    return LabelledRows(f"seed{seed}", unit, labels.astype(np.int64), [f"c{label}" for label in range(classes)])


def shares(scores: NDArray[np.float64], labels: NDArray[np.int64]) -> tuple[float, float]:
    """Top-1 and top-5 of scores (Q, C)."""
    order = np.argsort(-scores, axis=1)
    return float((order[:, :1] == labels[:, None]).mean()), float((order[:, :5] == labels[:, None]).any(axis=1).mean())


@pytest.mark.parametrize(("neighbours", "temperature"), [(1, 0.07), (20, 0.07), (200, 0.002), (1000, 10.0)])
def test_knn_votes_are_those_of_float64(neighbours: int, temperature: float) -> None:
    train, test = drawn(600, 12, 1), drawn(150, 12, 2)
    cosines = test.unit.astype(np.float64) @ train.unit.astype(np.float64).T
    votes = np.zeros((len(test), 12))
    for query, row in enumerate(cosines):
        for place in np.argsort(-row)[:neighbours]:
            votes[query, train.labels[place]] += np.exp((row[place] - row.max()) / temperature)
    votes[votes == 0] = -1 - np.arange((votes == 0).sum())  # a class without a vote is never right
    right = np.take_along_axis(votes, test.labels[:, None], axis=1)[:, 0] > 0
    top1, top5 = ((np.argsort(-votes, axis=1)[:, :k] == test.labels[:, None]).any(axis=1) & right for k in (1, 5))
    found = probe(Probe("knn", neighbours, temperature), train, test)
    assert found["neighbours"] == min(neighbours, 600)
    assert (found["top1"], found["top5"]) == pytest.approx((top1.mean(), top5.mean()))


def regression(train: LabelledRows, penalty: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Weights and biases that minimise ``penalty`` times the sum of losses plus half the square of the weights."""
    rows, labels = torch.from_numpy(train.unit).double(), torch.from_numpy(train.labels)
    weights = torch.zeros(12, rows.shape[1], dtype=torch.float64, requires_grad=True)
    biases = torch.zeros(12, dtype=torch.float64, requires_grad=True)
    steps = torch.optim.LBFGS([weights, biases], max_iter=500, tolerance_grad=1e-9, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        steps.zero_grad()
        losses = torch.nn.functional.cross_entropy(rows @ weights.T + biases, labels, reduction="sum")
        loss = penalty * losses + (weights**2).sum() / 2
        loss.backward()
        return loss

    steps.step(closure)  # type: ignore[no-untyped-call]
    return weights.detach().numpy(), biases.detach().numpy()


def test_the_linear_probe_is_logistic_regression() -> None:
    pytest.importorskip("sklearn")
    train, test = drawn(300, 12, 1), drawn(200, 12, 2)
    found = probe(Probe("linear"), train, test)
    weights, biases = regression(train, found["c"])
    expected = shares(test.unit @ weights.T + biases, test.labels)
    assert (found["top1"], found["top5"]) == pytest.approx(expected, abs=0.011)  # two images near a boundary
    assert found["top1"] > 0.5


def test_classes_are_the_same_by_name_and_unknown_ones_count_as_wrong() -> None:
    train, test = drawn(400, 8, 1, noise=0.1), drawn(100, 8, 2, noise=0.1)
    names = [f"c{label}" for label in range(7, -1, -1)]
    turned = LabelledRows("turned", test.unit, 7 - test.labels, names)
    assert probe(Probe("knn"), train, turned)["top1"] == 1.0
    fewer = train.take(np.flatnonzero(train.labels < 6))
    found, unknown = probe(Probe("knn"), fewer, turned), int((test.labels >= 6).sum())
    assert (found["unknown"], found["classes"]) == (unknown, 6)
    assert found["top1"] == found["top5"] == pytest.approx(1 - unknown / 100)
    with pytest.raises(DataError, match="no class in common"):
        probe(Probe("knn"), fewer, turned.take(np.flatnonzero(test.labels >= 6)))


def test_halves_have_each_image_once_and_are_drawn_by_seed() -> None:
    whole = drawn(101, 9, 3)
    train, test = halved(whole, 0)
    both = np.concatenate([train.unit, test.unit])
    assert sorted(map(bytes, both)) == sorted(map(bytes, whole.unit))
    sizes = [np.bincount(part.labels, minlength=9) for part in (train, test)]
    assert set((sizes[0] - sizes[1]).tolist()) <= {0, 1}
    assert not np.array_equal(halved(whole, 1)[1].unit, test.unit)
    with pytest.raises(DataError, match="no class has two images"):
        halved(whole.take(np.unique(whole.labels, return_index=True)[1]), 0)


@pytest.fixture
def sets(tmp_path: Path) -> Path:
    """A folder with embedding sets train.emb and test.emb of twelve classes, and other.emb of another model."""
    for name, seed in (("train", 1), ("test", 2), ("other", 3)):
        rows = drawn(240, 12, seed, noise=0.5)
        write_set(tmp_path / f"{name}.emb", 4 * rows.unit, rows.labels, contract="other" if name == "other" else "m")
    return tmp_path


def run(words: Sequence[str], out: Path) -> Any:
    assert main(["eval", *words, "--json", str(out), "--overwrite"]) == 0
    return json.loads(out.read_text())


@pytest.mark.parametrize("kind", ["knn", "linear"])
def test_it_probes_embedding_sets_without_a_model(kind: str, sets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if kind == "linear":
        pytest.importorskip("sklearn")
    words = ["--probe", kind, "--train", str(sets / "train.emb"), "--data", str(sets / "test.emb")]
    result = run(words, sets / "result.json")
    expected = probe(Probe(kind), drawn(240, 12, 1, noise=0.5), drawn(240, 12, 2, noise=0.5))
    assert result == {"model": None, "sets": {"test.emb": {**expected, "train": "train.emb"}}}
    assert f"test.emb: top-1 {100 * expected['top1']:.2f}%" in capsys.readouterr().out


def test_sets_of_several_models_are_each_halved(sets: Path) -> None:
    result = run(["--probe", "knn", "--data", str(sets / "test.emb"), str(sets / "other.emb")], sets / "result.json")
    for name, seed in (("test.emb", 2), ("other.emb", 3)):
        expected = probe(Probe("knn"), *halved(drawn(240, 12, seed, noise=0.5), 0))
        assert result["sets"][name] == {**expected, "train": name}


@pytest.mark.live
@pytest.mark.slow
def test_pictures_are_embedded_on_any_number_of_ranks(tmp_path: Path) -> None:
    words = ["raw-pixels", "--probe", "knn", "--data", PICTURES, "--image-size", "32", "--neighbours", "3"]
    result = run(words, tmp_path / "one.json")
    found = result["sets"][PICTURES]
    assert (found["train_images"], found["images"], found["classes"], found["neighbours"]) == (12, 12, 6, 3)
    assert main(["eval", *words, "--json", str(tmp_path / "two.json"), "--nproc", "2"]) == 0
    assert json.loads((tmp_path / "two.json").read_text()) == result


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["raw-pixels", "--data", PICTURES, "--train", PICTURES], "--train is an option of --probe"),
        (["--data", PICTURES], "MODEL is missing"),
        (["--probe", "knn", "--data", PICTURES], f"MODEL is missing, to embed {PICTURES}"),
        (["raw-pixels", "--probe", "knn"], "nothing to probe"),
        (
            ["raw-pixels", "--probe", "knn", "--data", PICTURES, "--plot", "roc.png"],
            "--plot is not an option of --probe",
        ),
        (["raw-pixels", "--probe", "knn", "--data", PICTURES, "--train", "nowhere"], "there is no nowhere"),
        (["raw-pixels", "--probe", "knn", "--data", PICTURES, "--temperature", "0"], "--temperature 0: it must be"),
        (["--probe", "knn", "--train", "SETS/train.emb", "--data", "SETS/other.emb"], "another model or preprocessing"),
        (
            ["raw-pixels", "--probe", "knn", "--train", "SETS/train.emb", "--data", PICTURES],
            "pixels are none; name the model",
        ),
    ],
)
def test_wrong_arguments_are_named(
    words: list[str], message: str, sets: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", *(word.replace("SETS", str(sets)) for word in words)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("plsc eval: error: ")
    assert message in error
    assert error.count("\n") == 1


def test_the_linear_probe_says_what_it_needs(
    sets: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["eval", "--probe", "linear", "--data", str(sets / "test.emb")]) == 2
    assert "scikit-learn: pip install plsc-torch[cluster]" in capsys.readouterr().err
    words = ["--probe", "linear", "--neighbours", "3", "--data", str(sets / "test.emb")]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: "found")
    assert main(["eval", *words]) == 2
    assert "--neighbours is an option of --probe knn" in capsys.readouterr().err
