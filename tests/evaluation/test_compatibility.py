"""Four cells: queries of an old and a new model in the gallery of each."""

import json

import numpy as np
import pytest
import torch

from plsc.data.codec import encode_image
from plsc.evaluation.compatibility import CELLS, _cells, evaluate_cells
from plsc.evaluation.evaluator import EvaluationSet, evaluate
from plsc.models import create
from plsc.models.preprocessing import Preprocessing
from plsc.tools.entry import main

SET = "avatars:8x4@900"


def embeddings(seed, labels):
    """Two models' embeddings of the same pictures, with some noise: they have a part of the directions in common."""
    generator = np.random.default_rng(seed)
    centres = generator.normal(size=(labels.max() + 1, 12))
    rows = [centres[labels] * scale + generator.normal(size=(len(labels), 12)) * 1.3 for scale in (1.0, 2.0)]
    return [each.astype(np.float32) for each in rows]


def unit(rows):
    return rows.astype(np.float64) / np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)


def expected(query, gallery, labels, far):
    """TAR at FAR over pairs of an earlier query and a later gallery picture, and rank-1, by plain loops."""
    scores = unit(query) @ unit(gallery).T
    upper = np.triu(np.ones_like(scores, dtype=bool), 1)
    same = labels[:, None] == labels[None]
    impostors = np.sort(scores[upper & ~same])[::-1]
    threshold = impostors[int(far * len(impostors))]  # the one that is too many
    tar = np.mean(scores[upper & same] > threshold)
    first = {label: int(np.flatnonzero(labels == label)[0]) for label in np.unique(labels)}
    probes = [index for index in range(len(labels)) if index not in first.values()]
    hits = []
    for probe in probes:
        found = max(first, key=lambda label: scores[probe, first[label]])
        hits.append(found == labels[probe])
    return tar, np.mean(hits)


def test_the_cells_are_those_of_plain_loops():
    labels = np.random.default_rng(0).integers(0, 40, 200)
    both = embeddings(1, labels)
    readable = [np.ones(200, dtype=bool), np.ones(200, dtype=bool)]
    readable[1][[3, 77]] = False
    data = EvaluationSet("x", np.zeros(200), labels=labels, class_names=[])
    cells = _cells(data, both, readable, 0)
    kept = readable[1]
    for cell, (query, gallery) in zip(CELLS, [(0, 0), (0, 1), (1, 0), (1, 1)], strict=True):
        found = cells[cell]
        tar, rank1 = expected(both[query][kept], both[gallery][kept], labels[kept], 1e-2)
        assert found["tar@far"]["1e-2"] == pytest.approx(tar, abs=1e-3)
        scores, same = unit(both[query][kept]) @ unit(both[gallery][kept]).T, labels[kept, None] == labels[None, kept]
        impostors = scores[np.triu(~same, 1)]
        cosine = found["cosine@far"]["1e-2"]
        assert np.mean(impostors >= cosine) <= 1e-2 < np.mean(impostors >= cosine - 1e-2), "the lowest that holds it"
        assert found["rank1"] == pytest.approx(rank1)
        assert (found["images"], found["unreadable"]) == (200, 2)
    assert len({cells[cell]["rank1"] for cell in CELLS}) > 1
    assert cells["old/new"]["rank1"] != cells["new/old"]["rank1"]


@pytest.mark.filterwarnings("error")
def test_a_set_without_same_pairs_has_no_thresholds():
    both = embeddings(1, np.arange(60))
    data = EvaluationSet("x", np.zeros(60), labels=np.arange(60), class_names=[])
    assert set(_cells(data, both, [np.ones(60, dtype=bool)] * 2, 0)["new/old"]["cosine@far"].values()) == {None}


def test_pairs_have_the_query_first():
    both = [rows.reshape(-1, 12) for rows in embeddings(2, np.repeat(np.arange(60), 2))]
    is_same = np.arange(60) % 2 == 0
    for rows in both:
        rows[1::2] = np.where(is_same[:, None], rows[1::2], np.roll(rows[1::2], 2, axis=0))
    data = EvaluationSet("pairs", np.zeros(120), is_same=is_same)
    cells = _cells(data, both, [np.ones(120, dtype=bool)] * 2, 0)
    for cell, (query, gallery) in zip(CELLS, [(0, 0), (0, 1), (1, 0), (1, 1)], strict=True):
        scores = np.sum(unit(both[query])[0::2] * unit(both[gallery])[1::2], axis=1)
        same, other = scores[is_same], scores[~is_same]
        auc = np.mean([np.mean(each > other) for each in same])
        assert cells[cell]["auc"] == pytest.approx(auc)


class Model:
    """As an embedder: the picture's coarse pixels, turned by a matrix of its own."""

    def __init__(self, seed, width=24):
        self.source, self.embedding_dim = f"model {seed}", width
        self.turn = torch.randn(3 * 16 * 16, width, generator=torch.Generator().manual_seed(seed))
        self.preprocessing = Preprocessing(32)

    def __call__(self, images):
        small = torch.nn.functional.avg_pool2d(images.float(), 2).flatten(1)
        return (small - small.mean(1, keepdim=True)) @ self.turn


def four_cells(mesh):
    found = evaluate_cells(Model(1), Model(2), [SET], mesh=mesh, quiet=True)
    alone = evaluate(Model(2), [SET], image_size=32, mesh=mesh, quiet=True)
    return found[SET], alone[SET]


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_the_cells_of_one_model_are_its_own_evaluation(ranks, world):
    for cells, alone in ranks(world, four_cells):
        assert list(cells) == list(CELLS)
        thresholds = cells["new/new"].pop("cosine@far")
        assert {name for name, cosine in thresholds.items() if cosine is None} == {
            name for name, tar in alone["tar@far"].items() if tar is None
        }
        assert {name: alone[name] for name in cells["new/new"]} == cells["new/new"]
        assert cells["old/new"]["impostor_pairs"] == alone["impostor_pairs"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two models of 16 numbers, and one of 8."""
    folder = tmp_path_factory.mktemp("models")
    for name, width in (("old", 16), ("new", 16), ("narrow", 8)):
        torch.manual_seed(len(name))
        net = create("resnet7", embedding_dim=width, image_size=32)
        from plsc.models.weights import save_model

        save_model(net, folder / f"{name}.safetensors")
    return folder


def test_the_command_prints_and_writes_four_cells(models, tmp_path, capsys):
    argv = ["eval", "--old", str(models / "old.safetensors"), "--new", str(models / "new.safetensors"), "--data", SET]
    assert main([*argv, "--json", str(tmp_path / "out.json")]) == 0
    printed = capsys.readouterr().out
    assert f"{SET}, by query/gallery:" in printed
    header = next(line for line in printed.splitlines() if "old/new" in line)
    assert header.split() == list(CELLS)
    written = json.loads((tmp_path / "out.json").read_text())
    assert set(written) == {"old", "new", "contract_ids", "sets"}
    assert list(written["sets"][SET]) == list(CELLS)
    assert f"{100 * written['sets'][SET]['new/old']['rank1']:.2f}" in printed


def test_what_cannot_be_compared_is_refused(models, tmp_path, capsys):
    old, new, narrow = (str(models / f"{name}.safetensors") for name in ("old", "new", "narrow"))
    cases = [
        (["--old", old, "--new", narrow], 2, f"--old {old} gives embeddings of 16 numbers and --new {narrow} of 8"),
        (["--old", old], 2, "--old goes with --new: give both models"),
        (["--new", new], 2, "--new goes with --old: give both models"),
        ([new, "--old", old, "--new", new], 2, f"--old and --new take the place of MODEL; leave {new} out"),
        (["--old", "raw-pixels", "--new", new], 2, "--old: raw-pixels has no gallery to search"),
        (["--old", old, "--new", new, "--plot", "x.png"], 2, "--plot is an option for one model"),
        (["--old", old, "--new", new, "--pairs", "x.bin"], 2, "--old and --new with --pairs: say --flip no, or"),
        (["--old", old, "--new", new, "--probe", "knn"], 2, "--probe is an option for one model"),
    ]
    for argv, code, message in cases:
        assert main(["eval", *argv, "--data", SET]) == code
        error = capsys.readouterr().err
        assert f"plsc eval: error: {message}" in error
    (tmp_path / "a").mkdir()
    (tmp_path / "a/0.png").write_bytes(encode_image(torch.zeros(3, 32, 32, dtype=torch.uint8), "png"))
    assert main(["eval", "--old", old, "--new", new, "--data", str(tmp_path)]) == 1
    assert "no class has two images" in capsys.readouterr().err
