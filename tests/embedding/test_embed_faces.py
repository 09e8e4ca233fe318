"""plsc embed on whole pictures: aligned by a file of landmarks or by a detector, as if the crops had been given."""

import json
import os
import shutil
from unittest.mock import patch

import numpy as np
import pyarrow
import pytest
import torch
from PIL import Image
from pyarrow import parquet
from support.scrfd import stand_in

from plsc import models
from plsc.data.alignment import TEMPLATE, align_face
from plsc.data.codec import read_image
from plsc.embedding.detector import DetectedLandmarks
from plsc.embedding.embedder import open_embedder
from plsc.embedding.embedding_set import EmbeddingSet
from plsc.errors import DataError
from plsc.tools.entry import main

pytestmark = pytest.mark.live

POINTS = (TEMPLATE - 56) / 32


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    """A model, a detector, four photos (the last without a face) and the landmarks of the first three."""
    root = tmp_path_factory.mktemp("scene")
    torch.manual_seed(0)
    models.save_model(models.create("mobilefacenet", embedding_dim=16, image_size=48), root / "m.safetensors")
    stand_in(root / "d.onnx", shape=(1, 3, 256, 256), points=POINTS, box=(1, 1, 1, 1))
    (root / "photos").mkdir()
    lines = []
    for number in range(4):
        pixels = np.random.default_rng(number).integers(0, 50, (256, 256, 3), dtype=np.uint8)
        x = 32 * (2 + number)
        if number < 3:
            pixels[96:128, x : x + 32, 2] = 250
            lines.append([f"{number}.png", *(TEMPLATE - 56 + [x, 96]).reshape(-1)])
        Image.fromarray(pixels).save(root / "photos" / f"{number}.png")
    (root / "points.csv").write_text("\n".join(",".join(map(str, line)) for line in lines))
    return root


def embed(scene, out, *more):
    return main(["embed", str(scene / "m.safetensors"), "--data", str(scene / "photos"), "--out", str(out), *more])


def crops_embedded(scene):
    embedder = open_embedder(scene / "m.safetensors", device=torch.device("cpu"))
    faces = [
        align_face(read_image(scene / f"photos/{number}.png"), TEMPLATE - 56 + [32 * (2 + number), 96], 48)
        for number in range(3)
    ]
    return embedder(torch.stack(faces)).numpy(), embedder.contract_id


@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.parametrize(("way", "message"), [("landmarks", "has no landmarks"), ("detector", "no face was found")])
def test_rows_are_those_of_the_aligned_crops(way, message, workers, scene, tmp_path):
    given = str(scene / "points.csv") if way == "landmarks" else f"onnx:{scene / 'd.onnx'}"
    assert embed(scene, tmp_path / "emb", f"--{way}", given, "--workers", workers) == 0
    made, (expected, contract) = EmbeddingSet(tmp_path / "emb", verify=True), crops_embedded(scene)
    np.testing.assert_allclose(made.rows(0, 3), expected, atol=1e-4)
    assert not made.rows(3, 4).any()
    assert list(made.errors) == [3]
    assert message in made.errors[3]
    assert "3.png" in made.errors[3]
    assert made.contract_id == contract  # aligned crops embedded later may be compared with these
    assert made.manifest["alignment"].startswith(way)


def test_a_set_is_not_gone_on_with_under_another_alignment(scene, tmp_path, capsys):
    assert embed(scene, tmp_path / "emb", "--landmarks", str(scene / "points.csv")) == 0
    assert embed(scene, tmp_path / "emb", "--landmarks", str(scene / "points.csv")) == 0
    for more in ([], ["--detector", f"onnx:{scene / 'd.onnx'}"]):
        assert embed(scene, tmp_path / "emb", *more) == 2
        assert "was begun with the data" in capsys.readouterr().err


@pytest.mark.parametrize("way", ["landmarks", "detector"])
def test_a_photo_finds_itself_among_aligned_faces_by_the_detector_alone(way, scene, tmp_path, capsys):
    detector = f"onnx:{scene / 'd.onnx'}"
    given = str(scene / "points.csv") if way == "landmarks" else detector
    assert embed(scene, tmp_path / "emb", f"--{way}", given, "--workers", "0") == 0
    assert main(["index", "build", str(tmp_path / "emb"), "--out", str(tmp_path / "idx")]) == 0
    photo, result = str(scene / "photos/1.png"), tmp_path / "result.json"
    search = ["index", "search", str(tmp_path / "idx"), "--query", photo, "--k", "3"]
    capsys.readouterr()
    assert main(search) == 2
    error = capsys.readouterr().err
    assert f"idx is of faces that were aligned ({way} " in error
    assert "give --detector" in error
    assert error.count("\n") == 1
    assert main([*search, "--detector", detector, "--json", str(result)]) == 0
    best = json.loads(result.read_text())["queries"][0]["matches"][0]
    assert (best["key"], best["score"]) == ("1.png", pytest.approx(1, abs=1e-4))
    assert main([*search[:3], "--query", str(tmp_path / "emb")]) == 0
    assert main([*search[:3], "--query", str(tmp_path / "emb"), "--detector", detector]) == 2
    assert main([*search, "--detector", detector, "--server", "http://127.0.0.1:1"]) == 2
    capsys.readouterr()
    assert main(["gallery", "import", str(tmp_path / "store"), "faces", str(tmp_path / "emb")]) == 0
    assert f"its faces were aligned ({way} " in capsys.readouterr().err


@pytest.mark.slow
def test_ranks_align_as_one_process_does(scene, tmp_path):
    given = ["--detector", f"onnx:{scene / 'd.onnx'}", "--workers", "0"]
    assert embed(scene, tmp_path / "one", *given) == 0
    result = tmp_path / "result.json"
    assert embed(scene, tmp_path / "two", *given, "--nproc", "2", "--json", str(result)) == 0
    np.testing.assert_array_equal(EmbeddingSet(tmp_path / "one").rows(0, 4), EmbeddingSet(tmp_path / "two").rows(0, 4))
    assert json.loads(result.read_text())["errors"] == 1


@pytest.fixture(scope="module")
def crowd(scene, tmp_path_factory):
    """Photos of two faces, of none, and of one, and the points of the faces, the best score first."""
    folder = tmp_path_factory.mktemp("crowd")
    faces = {"a.png": [2, 5], "b.png": [], "c/c.png": [3]}
    for name, columns in faces.items():
        pixels = np.random.default_rng(len(name)).integers(0, 50, (256, 256, 3), dtype=np.uint8)
        for place, column in enumerate(columns):
            pixels[96:128, 32 * column : 32 * column + 32, 2] = 250 - 10 * place
        (folder / name).parent.mkdir(exist_ok=True)
        Image.fromarray(pixels).save(folder / name)
    return folder, faces


def embed_crowd(scene, crowd, out, *more):
    given = ["--data", str(crowd[0]), "--out", str(out), "--detector", f"onnx:{scene / 'd.onnx'}", *more]
    return main(["embed", str(scene / "m.safetensors"), *given])


@pytest.mark.parametrize("workers", ["0", "2"])
def test_every_face_has_a_row(workers, scene, crowd, tmp_path, capsys):
    out = tmp_path / "emb"
    assert embed_crowd(scene, crowd, out, "--faces", "all", "--workers", workers) == 0
    made = EmbeddingSet(out, verify=True)
    assert list(made.keys) == ["a.png#1", "a.png#2", "b.png", "c/c.png#1"]
    assert list(made.errors) == [2]
    assert "no face was found" in made.errors[2]
    assert made.manifest["alignment"].endswith(", every face")
    assert [made.labels[row] for row in range(4)] == [-1, -1, -1, 0]
    embedder = open_embedder(scene / "m.safetensors", device=torch.device("cpu"))
    crops = [
        align_face(read_image(crowd[0] / name), TEMPLATE - 56 + [32 * column, 96], 48)
        for name, columns in crowd[1].items()
        for column in columns
    ]
    np.testing.assert_allclose(made.rows(0, 4)[[0, 1, 3]], embedder(torch.stack(crops)).numpy(), atol=1e-4)
    assert "several faces" not in capsys.readouterr().out
    assert embed_crowd(scene, crowd, out, "--faces", "all", "--workers", workers) == 0
    assert "0 embedded now" in capsys.readouterr().out
    assert embed_crowd(scene, crowd, out, "--workers", workers) == 2


def test_the_default_says_how_many_pictures_showed_several_faces(scene, crowd, tmp_path, capsys):
    result = tmp_path / "result.json"
    assert embed_crowd(scene, crowd, tmp_path / "emb", "--workers", "0", "--json", str(result)) == 0
    assert "1 image showed several faces; the row is of the largest (--faces all)" in capsys.readouterr().out
    assert json.loads(result.read_text())["several"] == 1
    assert list(EmbeddingSet(tmp_path / "emb").keys) == ["a.png", "b.png", "c/c.png"]


@pytest.mark.parametrize("workers", ["0", "2"])
def test_crops_and_queries_say_how_many_are_the_largest_of_several(workers, scene, crowd, tmp_path, capsys):
    detector = ["--detector", f"onnx:{scene / 'd.onnx'}"]
    assert main(["data", "align", str(crowd[0]), "--out", str(tmp_path / "x"), *detector, "--workers", workers]) == 0
    assert "2 faces of 1 class, 1 of them the largest of several, 1 picture left out" in capsys.readouterr().out
    assert embed_crowd(scene, crowd, tmp_path / "emb", "--workers", "0") == 0
    assert main(["index", "build", str(tmp_path / "emb"), "--out", str(tmp_path / "idx")]) == 0
    capsys.readouterr()
    assert main(["index", "search", str(tmp_path / "idx"), "--query", str(crowd[0] / "a.png"), *detector]) == 0
    assert "1 picture showed several faces; the largest is searched for" in capsys.readouterr().err


def test_every_face_has_its_pictures_metadata(scene, crowd, tmp_path):
    names = list(crowd[1])
    columns = {"image": [(crowd[0] / name).read_bytes() for name in names], "key": names, "site": ["x", "y", "z"]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "crowd.parquet")
    source = (tmp_path / "crowd.parquet", None)
    assert embed_crowd(scene, source, tmp_path / "emb", "--faces", "all", "--workers", "0") == 0
    made = EmbeddingSet(tmp_path / "emb")
    assert list(made.keys) == ["a.png#1", "a.png#2", "b.png", "c/c.png#1"]
    assert [made.metadata(row) for row in range(4)] == [{"site": site} for site in "xxyz"]


@pytest.fixture
def searched(monkeypatch):
    """The names of the pictures that the detector was given; it fails after ``searched.limit`` of them.

    Each time ``searched.replaced`` counts as another picture.
    """

    class Searched(list):
        limit, replaced = 1 << 20, None

    names, whole = Searched(), DetectedLandmarks.numbered

    def numbered(self, image, name="image"):
        names.append(name)
        if len(names) > names.limit:
            raise MemoryError
        if names.replaced is not None:
            os.utime(names.replaced, ns=(0, len(names)))
        return whole(self, image, name)

    monkeypatch.setattr(DetectedLandmarks, "numbered", numbered)
    return names


def test_faces_that_a_killed_call_found_are_not_looked_for_again(scene, crowd, tmp_path, searched):
    photos, out = tmp_path / "photos", tmp_path / "emb"
    photos.mkdir()
    for number in range(20):  # a block of 16, and one of 4
        shutil.copy(crowd[0] / ["a.png", "c/c.png"][number % 2], photos / f"{number:02}.png")
    kept = tmp_path / ".emb.faces"

    def searched_by_a_call(code):
        searched.clear()
        assert embed_crowd(scene, (photos, None), out, "--faces", "all", "--workers", "0") == code
        return len(searched)

    searched.limit = 18
    with pytest.raises(MemoryError):
        searched_by_a_call(1)
    assert len(list(kept.iterdir())) == 1
    searched.limit = 20
    with patch("plsc.embedding.extract.extract", side_effect=DataError("killed here")):
        assert searched_by_a_call(1) == 4
        assert searched_by_a_call(1) == 0
        os.utime(photos / "00.png", ns=(0, 0))
        assert searched_by_a_call(1) == 16
        os.utime(photos / "01.png", ns=(0, 0))
        searched.replaced = photos / "02.png"  # while the block is searched
        assert searched_by_a_call(1) == 16
        searched.replaced = None
        assert searched_by_a_call(1) == 16
    min(kept.iterdir(), key=lambda path: path.stat().st_size).write_bytes(b"\x93NUMPY")
    assert searched_by_a_call(0) == 4
    assert not kept.exists()
    faces = [(f"{number:02}.png", ("#1", "#2")[: 2 - number % 2]) for number in range(20)]
    assert list(EmbeddingSet(out, verify=True).keys) == [name + number for name, numbers in faces for number in numbers]


def test_every_face_needs_a_detector(scene, tmp_path, capsys):
    assert embed(scene, tmp_path / "emb", "--faces", "all") == 2
    assert "--faces all needs --detector" in capsys.readouterr().err


@pytest.mark.slow
def test_ranks_find_every_face_as_one_process_does(scene, crowd, tmp_path):
    for name, more in (("one", []), ("two", ["--nproc", "2"])):
        assert embed_crowd(scene, crowd, tmp_path / name, "--faces", "all", "--workers", "0", *more) == 0
    one, two = EmbeddingSet(tmp_path / "one"), EmbeddingSet(tmp_path / "two")
    assert list(one.keys) == list(two.keys)
    np.testing.assert_array_equal(one.rows(0, 4), two.rows(0, 4))
