"""plsc.Embedder: the bits of plsc embed in batches of any size and form, and one model in a process."""

import json
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.scrfd import stand_in

import plsc
from plsc import models
from plsc.data.alignment import TEMPLATE
from plsc.data.codec import encode_image
from plsc.embedding import row_batches
from plsc.embedding.embedding_set import EmbeddingSet
from plsc.errors import UsageError
from plsc.tools.entry import main

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

COUNT, BROKEN = 21, 5  # more than the 16 of a step on a CPU


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, pictures of which one is broken, and what plsc embed makes of them."""
    folder = tmp_path_factory.mktemp("rows")
    torch.manual_seed(0)
    models.save_model(models.create("resnet8", embedding_dim=16, image_size=32), folder / "model.safetensors")
    for number in range(COUNT):
        path = folder / "photos" / f"c{number // 11}" / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = torch.randint(256, (3, 40, 40), generator=torch.Generator().manual_seed(number)).byte()
        path.write_bytes(b"broken" if number == BROKEN else encode_image(pixels, "png"))
    assert command(folder, folder / "set") == 0
    return folder


def command(folder: Path, out: Path, *more: str) -> int:
    given = ["--data", str(folder / "photos"), "--workers", "0", "--out", str(out)]
    return main(["embed", str(folder / "model.safetensors"), *given, *more])


@pytest.fixture
def made(folder: Path) -> EmbeddingSet:
    return EmbeddingSet(folder / "set")


@pytest.fixture
def embed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> plsc.Embedder:
    monkeypatch.setattr(row_batches, "_models", {})
    return plsc.Embedder(folder / "model.safetensors", device="cpu")


def paths(folder: Path, made: EmbeddingSet) -> list[str]:
    return [str(folder / "photos" / key) for key in made.keys]


def bits(rows: Any) -> bytes:
    return np.ascontiguousarray(rows, dtype=np.float32).tobytes()


@pytest.mark.parametrize("size", [1, 7, COUNT])
def test_batches_of_any_size_have_the_bits_of_plsc_embed(
    folder: Path, made: EmbeddingSet, embed: plsc.Embedder, size: int
) -> None:
    files, found = paths(folder, made), []
    for start in reversed(range(0, COUNT, size)):
        batch = {"path": np.array(files[start : start + size]), "key": made.keys[start : start + size]}
        found.insert(0, embed(batch))
    assert bits(np.concatenate([part["embedding"] for part in found])) == bits(made.rows(0, COUNT))
    assert [key for part in found for key in part["key"]] == list(made.keys)
    errors = [text for part in found for text in part["error"]]
    assert [row for row, text in enumerate(errors) if text is not None] == list(made.errors) == [BROKEN]
    assert "does not decode" in errors[BROKEN]


def test_options_are_those_of_plsc_embed(folder: Path, tmp_path: Path) -> None:
    assert command(folder, tmp_path / "set", "--flip", "--dtype", "float16", "--batch-size", "3") == 0
    made = EmbeddingSet(tmp_path / "set")
    embed = plsc.Embedder(folder / "model.safetensors", flip=True, dtype="float16", batch_size=3, device="cpu")
    found = embed({"path": paths(folder, made)})["embedding"]
    assert found.dtype == np.float16
    assert found.tobytes() == made.rows(0, COUNT).astype(np.float16).tobytes()


def test_pictures_come_as_bytes_as_hugging_face_has_them_and_in_memory(
    folder: Path, made: EmbeddingSet, embed: plsc.Embedder
) -> None:
    files = [Path(path) for path in paths(folder, made)]
    contents = [path.read_bytes() for path in files]
    forms: dict[str, list[Any]] = {
        "bytes": contents,
        "of a file": [{"bytes": None, "path": str(path)} for path in files],
        "of bytes": [{"bytes": content, "path": None} for content in contents],
        "nothing": [None, *contents[1:]],
    }
    expected = made.rows(0, COUNT)
    for form, pictures in forms.items():
        first = int(form == "nothing")
        found = embed({"image": np.array([*pictures, None], dtype=object)[:-1], "label": range(COUNT)})
        assert bits(found["embedding"][first:]) == bits(expected[first:]), form
        assert ("key" in found) == (form == "of a file")
        assert list(found["label"]) == list(range(COUNT))
        assert sum(text is not None for text in found["error"]) == 1 + first
    pixels = np.zeros((2, 32, 32, 3), np.uint8)
    assert bits(embed({"image": pixels})["embedding"]) == bits(
        embed({"image": torch.zeros(2, 3, 32, 32).byte()})["embedding"]
    )


def test_an_arrow_table_becomes_rows_of_an_embedding_set(
    folder: Path, made: EmbeddingSet, embed: plsc.Embedder, tmp_path: Path
) -> None:
    given = pa.table(
        {"key": list(made.keys), "path": paths(folder, made), "label": ["a"] * COUNT, "city": ["Bern"] * COUNT}
    )
    found = embed(given)
    assert found.column_names == ["key", "label", "city", "embedding", "error"]
    pq.write_table(found, tmp_path / "rows.parquet")
    read = EmbeddingSet(tmp_path / "rows.parquet")
    assert bits(read.rows(0, COUNT)) == bits(made.rows(0, COUNT))
    assert (list(read.keys), list(read.errors), read.contract_id) == (list(made.keys), [BROKEN], made.contract_id)
    assert read.metadata(0) == {"city": "Bern"}
    empty = embed(given.slice(0, 0))
    assert (empty.num_rows, empty.schema) == (0, found.schema)
    assert main(["index", "build", str(tmp_path / "rows.parquet"), "--out", str(tmp_path / "idx")]) == 0


def test_a_process_opens_a_model_once_for_all_that_are_alike(
    folder: Path, embed: plsc.Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []
    former = row_batches.open_embedder
    monkeypatch.setattr(
        row_batches, "open_embedder", lambda *args, **more: opened.append(args) or former(*args, **more)
    )
    batch = {"path": [str(folder / "photos" / "c0" / "00.png")]}
    sent = pickle.dumps(embed)
    assert len(sent) < 1000
    assert not opened
    for same in (embed, pickle.loads(sent), plsc.Embedder(folder / "model.safetensors", device="cpu")):
        same(batch)
    assert len(opened) == 1
    plsc.Embedder(folder / "model.safetensors", device="cpu", flip=True)(batch)
    assert len(opened) == 2


def test_a_forked_process_is_told_that_the_model_would_hang(
    folder: Path, embed: plsc.Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = {"path": [str(folder / "photos" / "c0" / "00.png")]}
    embed(batch)
    monkeypatch.setattr(row_batches.os, "getpid", lambda: -1)
    with pytest.raises(UsageError, match=r"forked from one that has embedded.*spawn"):
        embed(batch)


def test_a_relative_path_of_a_model_is_found_from_other_folders(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(folder)
    embed = plsc.Embedder("model.safetensors", device="cpu")
    monkeypatch.chdir(tmp_path)
    assert embed({"path": []})["embedding"].shape == (0, 16)


@pytest.mark.live
def test_a_detector_finds_the_faces_that_plsc_embed_finds(tmp_path: Path, folder: Path) -> None:
    stand_in(tmp_path / "d.onnx", shape=(1, 3, 256, 256), points=(TEMPLATE - 56) / 32, box=(1, 1, 1, 1))
    for number in range(3):  # the last without a face
        pixels = torch.zeros(3, 256, 256, dtype=torch.uint8)
        pixels[2, 96:128, 32 * (2 + number) : 32 * (3 + number)] = 250 if number < 2 else 0
        (tmp_path / "photos").mkdir(exist_ok=True)
        (tmp_path / "photos" / f"{number}.png").write_bytes(encode_image(pixels, "png"))
    model, detector, out = str(folder / "model.safetensors"), f"onnx:{tmp_path / 'd.onnx'}", tmp_path / "set"
    command = ["embed", model, "--data", str(tmp_path / "photos"), "--detector", detector, "--workers", "0"]
    assert main([*command, "--out", str(out)]) == 0
    made, embed = EmbeddingSet(out), plsc.Embedder(model, detector=detector)
    found = embed(pa.table({"path": [str(tmp_path / "photos" / key) for key in made.keys]}))
    assert bits(np.stack(found["embedding"].to_pylist())) == bits(made.rows(0, 3))
    assert made.rows(0, 2).any(axis=1).all()
    assert [text is not None for text in found["error"].to_pylist()] == [False, False, True]
    assert json.loads(found.schema.metadata[b"plsc"])["alignment"] == made.manifest["alignment"]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"img": [b""], "label": [1]}, "has the columns img, label: rename the one of encoded pictures to 'image', or"),
        ({}, "has the columns none: rename"),
        ({"image": [3]}, "the column 'image' holds int, and no pictures: give their files' bytes, or a column 'path'"),
        ({"image": [[[0, 0, 0]]]}, "the column 'image' holds list"),
    ],
)
def test_a_batch_without_pictures_names_the_column_and_the_mend(embed: plsc.Embedder, batch: Any, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        embed(batch)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("nowhere.safetensors", {}, "nowhere.safetensors does not exist"),
        (".", {}, "is no run directory"),
        ("sface", {"dtype": "float64"}, "no dtype 'float64'"),
        ("sface", {"batch_size": 0}, "batch_size"),
    ],
)
def test_what_no_model_or_option_is_is_told_at_once(model: str, options: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        plsc.Embedder(model if model == "sface" else tmp_path / model, **options)


def test_datasets_map_it(folder: Path, made: EmbeddingSet, embed: plsc.Embedder) -> None:
    datasets = pytest.importorskip("datasets")
    rows = {"key": list(made.keys), "image": paths(folder, made)}
    pictures = datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image()).with_format("arrow")
    found = pictures.map(embed, batched=True, batch_size=4, writer_batch_size=4, keep_in_memory=True).with_format(None)
    assert bits(found["embedding"]) == bits(made.rows(0, COUNT))
    assert [text is not None for text in found["error"]] == [row == BROKEN for row in range(COUNT)]
    assert list(found["key"]) == list(made.keys)
