"""``plsc embed`` and ``plsc index`` as a person types them, with a real model on drawn faces."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from plsc import models
from plsc.embedding.embedding_set import EmbeddingSet
from plsc.tools.entry import main

PEOPLE = "avatars:12x4"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """model.safetensors and other.safetensors, gallery.emb, gallery.idx and query.png (the first gallery image)."""
    from PIL import Image

    from plsc.data import open_dataset

    folder = tmp_path_factory.mktemp("commands")
    for seed, name in enumerate(("model", "other")):
        torch.manual_seed(seed)
        model = models.create("mobilefacenet", embedding_dim=32, image_size=48).eval()
        models.save_model(model, folder / f"{name}.safetensors")
    run(folder, f"embed @model.safetensors --data {PEOPLE} --out @gallery.emb --workers 0")
    run(folder, "index build @gallery.emb --out @gallery.idx")
    Image.fromarray(open_dataset(PEOPLE, image_size=48).image(0).permute(1, 2, 0).numpy()).save(folder / "query.png")
    return folder


def command(folder: Path, line: str) -> int:
    """The exit code of a command in which @name means folder/name."""
    return main([word.replace("@", f"{folder}/") for word in line.split()])


def run(folder: Path, line: str) -> Any:
    """The JSON result of a command."""
    assert command(folder, f"{line} --json @result.json --overwrite") == 0
    return json.loads((folder / "result.json").read_text())


@pytest.mark.slow
def test_an_image_finds_itself_and_its_class(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = run(folder, "index search @gallery.idx --query @query.png --k 3")
    (query,) = answer["queries"]
    assert query["query"] == "query.png"
    best = query["matches"][0]
    source = EmbeddingSet(folder / "gallery.emb")
    assert (best["key"], best["class"]) == (source.keys[0], source.class_names[int(source.labels[0])])
    assert best["score"] == pytest.approx(1, abs=1e-4)
    assert len(query["matches"]) == 3
    assert best["key"] in capsys.readouterr().out


def test_a_set_finds_itself_whatever_k(folder: Path) -> None:
    answer = run(folder, "index search @gallery.idx --query @gallery.emb --k 1000 --threads 1")
    keys = list(EmbeddingSet(folder / "gallery.emb").keys)
    assert [query["query"] for query in answer["queries"]] == keys
    assert all(len(query["matches"]) == 48 for query in answer["queries"])
    assert [query["matches"][0]["key"] for query in answer["queries"]] == keys
    vectors = EmbeddingSet(folder / "gallery.emb").rows(0, 48).astype(np.float64)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    scores = [[match["score"] for match in query["matches"]] for query in answer["queries"]]
    np.testing.assert_allclose(scores, -np.sort(-(vectors @ vectors.T), axis=1), atol=1e-6)


def test_a_pipe_gets_all_queries_and_a_terminal_the_first(folder, capsys, monkeypatch):
    search = "index search @gallery.idx --query @gallery.emb --k 1"
    keys = list(EmbeddingSet(folder / "gallery.emb").keys)
    assert command(folder, search) == 0
    assert capsys.readouterr().out.splitlines()[::2] == keys
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert command(folder, search) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:-1:2] == keys[:20]
    assert lines[-1] == "… and 28 more queries: a pipe or --json FILE gets all"


def test_flip_is_remembered_by_the_contract(folder: Path) -> None:
    run(folder, f"embed @model.safetensors --data {PEOPLE} --out @flip.emb --flip --workers 0")
    run(folder, "index build @flip.emb --out @flip.idx")
    answer = run(folder, "index search @flip.idx --query @query.png --k 1")
    assert answer["queries"][0]["matches"][0]["score"] == pytest.approx(1, abs=1e-4)


def test_check_says_what_it_measured(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(folder, "index check @gallery.idx")
    assert (result["rows"], result["recall"]["recall@1"], result["recall"]["recall@10"]) == (48, 1.0, 1.0)
    assert "sound; 48 rows of 32" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "code", "text"),
    [
        ("embed @missing.pt --data avatars:3x3 --out @x", 2, "missing.pt does not exist"),
        ("embed @missing.pt --data avatars:3x3 --out @x --nproc 2", 2, "there is no"),
        ("embed @model.safetensors --data avatars:3x3 --out @x --best", 2, "is a file: --best"),
        ("embed @model.safetensors --data @nowhere --out @x", 2, "nowhere"),
        ("embed @model.safetensors --data avatars:3x3 --out /proc/x", 2, "cannot write into /proc/x"),
        ("embed @model.safetensors --data avatars:3x3 --out @x --nproc 0", 2, "--nproc 0"),
        ("embed @model.safetensors --data avatars:3x3 --out @x --batch-size 0", 2, "--batch-size 0"),
        ("embed @model.safetensors --data avatars:3x3 --out @x --workers -1", 2, "--workers -1"),
        ("embed @model.safetensors --data avatars:3x3 --out @x --landmarks p --detector mtcnn", 2, "give one of them"),
        ("embed @model.safetensors --data avatars:3x3 --out @x --detector onnx:no.onnx", 2, "no detector no.onnx"),
        ("embed @model.safetensors --data avatars:3x3 --out @gallery.emb", 2, "begun with the data"),
        ("embed @other.safetensors --data avatars:12x4 --out @gallery.emb", 2, "begun with the model"),
        ("index build @missing --out @x", 2, "there is no folder"),
        ("index build @gallery.emb --out @gallery.emb", 2, "holds no index"),
        ("index build @gallery.emb --out @gallery.emb --overwrite", 2, "holds no index"),
        ("index build @gallery.emb --out @gallery.idx", 2, "gallery.idx exists already: give --overwrite"),
        ("index search @gallery.idx --query @query.png --best", 2, "--model RUN"),
        ("index build @gallery.emb --out @x --recall 7", 2, "recall 7.0"),
        ("index build @gallery.emb --out /proc/x", 2, "cannot write"),
        ("index search @missing --query @query.png", 2, "there is no folder"),
        ("index search @gallery.idx --query @query.png --k 0", 2, "--k 0"),
        ("index search @gallery.idx --query @missing.png", 2, "there is no"),
        ("index search @gallery.idx --query @query.png --model @other.safetensors", 2, "cannot be compared"),
        ("index search @gallery.idx --query @query.png --model @missing", 2, "missing does not exist"),
        ("index check @gallery.idx --threads 0", 2, "--threads 0"),
        ("index check @missing", 2, "there is no folder"),
    ],
)
def test_one_line_for_every_mistake(folder, capsys, argv, code, text):
    assert command(folder, argv) == code
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert text in error
    assert not (folder / "x").exists() or not any((folder / "x").iterdir())


def test_a_broken_query_image_and_a_model_that_moved(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "broken.jpg").write_bytes(b"\xff\xd8 not a picture")
    assert command(folder, "index search @gallery.idx --query @broken.jpg") == 1
    assert "broken.jpg" in capsys.readouterr().err
    (folder / "model.safetensors").rename(folder / "moved.safetensors")
    search = "index search @gallery.idx --query @query.png"
    try:
        assert command(folder, search) == 2
        assert "is not there any more; name it with --model" in capsys.readouterr().err
        assert command(folder, f"{search} --model @moved.safetensors") == 0
    finally:
        (folder / "moved.safetensors").rename(folder / "model.safetensors")


def test_a_query_that_is_no_crop_is_warned_of(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from PIL import Image

    Image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 200, 3), dtype=np.uint8)).save(tmp_path / "raw.png")
    answer = run(folder, f"index search @gallery.idx --query {tmp_path}/raw.png --k 1")
    assert answer["queries"][0]["warning"] == "200x90 pixels are not square"
    assert capsys.readouterr().err == (
        "warning: 1 of 1 picture may not be cropped as the model expects, so that scores mean little; "
        "the first, raw.png: 200x90 pixels are not square (docs/faces.md)\n"
    )
    assert "warning" not in run(folder, "index search @gallery.idx --query @query.png")["queries"][0]


def test_a_damaged_set_is_no_query(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(folder, f"embed @model.safetensors --data {PEOPLE} --out @bad.emb --workers 0")
    for name in ("shard-00000/embeddings.npy", "manifest.json"):
        path = folder / "bad.emb" / name
        sound = path.read_bytes()
        path.write_bytes(sound[:300] + bytes([sound[300] ^ 4]) + sound[301:])
        capsys.readouterr()
        assert command(folder, "index search @gallery.idx --query @bad.emb") == 1
        assert f"{name} is corrupt" in capsys.readouterr().err
        path.write_bytes(sound)


def test_the_former_name_of_max_memory_still_works_and_warns(folder: Path, tmp_path: Path, capsys: Any) -> None:
    for option, warning in (("--max-memory", ""), ("--memory", "plsc: --memory is deprecated: write --max-memory\n")):
        assert command(folder, f"index build @gallery.emb --out {tmp_path}/x {option} 1kB") == 2
        assert capsys.readouterr().err.startswith(f"{warning}plsc index: error: 0 MB of memory are too little")
