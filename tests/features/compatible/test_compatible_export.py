"""`plsc export --compatible-with`: what a file states of a run with compatible.with, and who takes it."""

import json
import shutil
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch

from plsc.data import open_dataset
from plsc.data.codec import encode_image
from plsc.embedding.embedder import open_embedder
from plsc.embedding.embedding_set import EmbeddingSet
from plsc.embedding.onnx_fingerprint import fingerprint
from plsc.models import create
from plsc.models.weights import save_model
from plsc.tools.entry import main

pytestmark = pytest.mark.slow

SIZE = 32


def run(folder: Path, line: str) -> int:
    """The exit code of a command in which @name means folder/name."""
    return main([word.replace("@", f"{folder}/") for word in line.split()])


def train(folder: Path, options: str) -> None:
    """Train a small model, on the CPU."""
    (folder / "small.toml").write_text('backbone = "resnet7"\nembedding_dim = 16\nprecision = "fp32"\n')
    data = f"--data.train avatars:4x3 --data.image_size {SIZE} --data.batch_size 6 --data.workers 0"
    assert run(folder, f"train @small.toml {data} --optim.warmup_steps 0 --out {options}") == 0


def make_run(folder: Path, seed: int, config: str, width: int = 16) -> None:
    """What a training leaves, with random weights."""
    folder.mkdir()
    torch.manual_seed(seed)
    save_model(create("resnet7", embedding_dim=width, image_size=SIZE), folder / "model.safetensors")
    (folder / "config.toml").write_text(config)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs, their exports, and an index by the old model."""
    folder = tmp_path_factory.mktemp("compatible")
    train(folder, "@old --steps 2")
    make_run(folder / "narrow", 2, "", width=8)
    train(folder, "@new --steps 1 --compatible.with @old")
    assert run(folder, "export @old --format onnx --out @old.onnx") == 0
    assert run(folder, "embed @old.onnx --data avatars:4x3 --out @old.emb --workers 0") == 0
    assert run(folder, "index build @old.emb --out @old.idx") == 0
    make_run(folder / "newer", 4, f'[compatible]\nwith = "{folder}/old.emb"\n')
    assert run(folder, "export @new --format onnx --out @new.onnx --compatible-with @old.onnx --json @new.json") == 0
    picture = open_dataset("avatars:4x3", image_size=SIZE).image(5)
    (folder / "query.png").write_bytes(encode_image(picture, "png"))
    return folder


def found(folder: Path, query: str, capsys: Any) -> list[Any]:
    assert run(folder, f"index search @old.idx {query} --k 2 --json @found.json --overwrite") == 0
    return list(json.loads((folder / "found.json").read_text())["queries"])


def test_the_file_states_it_and_searches_the_old_index(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = open_embedder(folder / "old.onnx"), open_embedder(folder / "new.onnx")
    assert old.compatible_with == ()
    assert new.compatible_with == (old.contract_id,)
    assert new.contract_id == open_embedder(folder / "new").contract_id, "what it states is no part of its own id"
    assert json.loads((folder / "new.json").read_text())["compatible_with"] == [old.contract_id]
    assert len(found(folder, "--query @query.png --model @new.onnx", capsys)[0]["matches"]) == 2
    assert run(folder, "embed @new.onnx --data avatars:4x3 --out @new.emb --workers 0") == 0
    assert EmbeddingSet(folder / "new.emb").compatible_with == [old.contract_id]
    assert len(found(folder, "--query @new.emb", capsys)) == 12
    assert run(folder, "index search @old.idx --query @query.png --model @new") == 2
    assert "cannot be compared" in capsys.readouterr().err
    assert run(folder, "index build @old.emb @new.emb --out @both.idx") == 2
    assert run(folder, "export @new.onnx --format onnx --precision fp16 --out @new16.onnx --tolerance 1") == 0
    assert open_embedder(folder / "new16.onnx").compatible_with == (old.contract_id,)


def test_other_weights_do_not_inherit_the_statement(folder: Path, tmp_path: Path) -> None:
    model = onnx.load(str(folder / "new.onnx"))
    weight = next(one for one in model.graph.initializer if len(one.raw_data) > 1000)
    weight.raw_data = bytes(4) + weight.raw_data[4:]
    onnx.save(model, str(tmp_path / "changed.onnx"))
    assert open_embedder(tmp_path / "changed.onnx").compatible_with == ()
    stated = {entry.key: entry for entry in model.metadata_props}
    stated["plsc.fingerprint"].value = fingerprint(model)
    stated["plsc.compatible_with"].value = "0123456789abcdef, anything"
    onnx.save(model, str(tmp_path / "odd.onnx"))
    assert run(tmp_path, "embed @odd.onnx --data avatars:4x3 --out @odd.emb --workers 0") == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("@old --compatible-with @new", "old is no run that was trained with compatible.with"),
        ("@new/model.safetensors --compatible-with @old", "is no run that was trained with compatible.with"),
        ("@new --compatible-with @narrow", "gives 8 numbers"),
        ("@new --compatible-with @new", "is the model itself"),
        ("@new --compatible-with @missing", "missing does not exist"),
        ("@new --compatible-with @newer", "did not make"),
        ("@newer --compatible-with @new", "did not make"),
        ("@new.onnx --precision fp16 --compatible-with @old", "new.onnx keeps what it states itself"),
    ],
)
def test_what_the_training_does_not_tell_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    assert run(folder, f"export {line} --format onnx --out @refused.onnx") == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (folder / "refused.onnx").exists()


@pytest.mark.exhaustive
def test_several_models_and_centres_that_are_gone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = "export @newer --format onnx --out @newer.onnx --compatible-with @old @new"
    assert run(folder, line) == 0
    ids = [open_embedder(folder / name).contract_id for name in ("old", "new")]
    assert open_embedder(folder / "newer.onnx").compatible_with == tuple(ids)
    assert f"compatible with galleries of {', '.join(ids)}" in capsys.readouterr().out
    make_run(folder / "last", 5, '[compatible]\nwith = "gone.emb"\n')
    assert run(folder, "export @last --format onnx --out @last.onnx --compatible-with @new") == 0
    assert run(folder, "export @new --format torch --out @x.pt2 --compatible-with @old") == 2
    assert "--compatible-with is an option of --format onnx" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_the_model_is_the_one_of_the_step_whose_centres_the_run_has(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("old", "new"):
        shutil.copytree(folder / name, tmp_path / name)
    (tmp_path / "new/config.toml").write_text(f'[compatible]\nwith = "{tmp_path}/old"\n')
    train(tmp_path, "@old --steps 3 --resume auto")
    line = "export @new --format onnx --overwrite --out @new.onnx --compatible-with"
    assert run(tmp_path, f"{line} {folder}/old.onnx") == 0
    assert "nothing here tells" not in capsys.readouterr().err
    assert run(tmp_path, f"{line} @old") == 2
    assert "did not make" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "old/checkpoints/step-00000002")
    assert run(tmp_path, f"{line} @old") == 0
    assert "nothing here tells which model made" in capsys.readouterr().err
    (tmp_path / "new/config.toml").write_text("compatible = 3\n")
    assert run(tmp_path, f"{line} @old") == 2
    assert "is no run that was trained with compatible.with" in capsys.readouterr().err
