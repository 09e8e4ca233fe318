"""Exported files: what consumers rely on, that other programs read them, and that a bad one is never left behind."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from support.backbones import trained_a_little

import plsc.models
from plsc.embedding import export
from plsc.embedding.embedder import backbone_engine, open_embedder
from plsc.errors import DataError, UsageError
from plsc.tools.entry import main

SIZE, DIM = 48, 16


def small(name: str = "resnet8", size: int = SIZE) -> plsc.models.Backbone:
    return trained_a_little(name, size, DIM)


def contents(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[plsc.models.Backbone, Path, dict[str, Any]]:
    model, path = small(), tmp_path_factory.mktemp("onnx") / "m.onnx"
    return model, path, export.export_onnx(model, path)


@pytest.mark.slow
def test_onnx_has_one_input_data_one_output_and_a_free_batch(exported):
    model, path, result = exported
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (given,), (answer,) = session.get_inputs(), session.get_outputs()
    assert (given.name, given.shape[1:], given.type) == ("data", [3, SIZE, SIZE], "tensor(float)")
    assert given.shape[0] == "batch"
    assert (answer.name, answer.shape) == ("embedding", ["batch", DIM])
    for count in (1, 2, 3, 8):
        images = np.random.default_rng(count).uniform(-1, 1, (count, 3, SIZE, SIZE)).astype(np.float32)
        got = session.run(None, {"data": images})[0]
        with torch.no_grad():
            expected = model(torch.from_numpy(images)).numpy()
        np.testing.assert_allclose(got, expected, atol=1e-4 * np.abs(expected).max(), rtol=0)
    assert contents(path.parent) == ["m.onnx"]
    assert result["bytes"] == path.stat().st_size
    assert 0 <= result["max_abs_error"] <= 1e-4 * result["max_abs_value"]


def test_onnx_is_valid_states_its_preprocessing_and_looks_unnormalised_to_nobody(exported):
    _, path, result = exported
    model = onnx.load(str(path))
    onnx.checker.check_model(model, full_check=True)
    stated = {entry.key: entry.value for entry in model.metadata_props}
    assert (stated["plsc.image_size"], stated["plsc.mean"], stated["plsc.std"]) == (str(SIZE), "127.5", "127.5")
    assert stated["plsc.contract_id"] == result["contract_id"]
    early = [node.name for node in model.graph.node[:8]]
    assert not [name for name in early if name.startswith(("Sub", "Mul", "_minus", "_mul"))]


@pytest.mark.first_ring("turned:resnet8")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["iresnet18", "mobilefacenet", "vit_tiny", "timm:test_vit", "turned:resnet8"])
def test_every_family_exports_to_onnx(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    result = export.export_onnx(small(name, 32), tmp_path / "m.onnx")
    assert result["max_abs_error"] <= 1e-4 * result["max_abs_value"]
    assert (
        open_embedder(tmp_path / "m.onnx", device=export.CPU).contract_id == result["contract_id"]
    )  # passes its trial
    assert capfd.readouterr() == ("", "")


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("name", ["iresnet18", "mobilefacenet", "vit_tiny", "timm:test_vit", "turned:resnet8"])
def test_a_program_of_every_family_passes_its_trial(name: str, tmp_path: Path) -> None:
    model = small(name, 32)
    export.export_torch(model, tmp_path / "m.pt2")
    images = torch.randint(0, 256, (7, 3, 32, 32), dtype=torch.uint8)
    expected = backbone_engine(model, export.CPU).run(images)
    answered = open_embedder(tmp_path / "m.pt2", device=export.CPU)(images)  # in batches of four and one
    torch.testing.assert_close(answered, expected, rtol=0, atol=float(1e-4 * expected.abs().max()))


@pytest.mark.live
@pytest.mark.slow
def test_the_torch_program_runs_where_plsc_is_not_and_holds_no_pickle(tmp_path: Path) -> None:
    model, path = small(), tmp_path / "m.pt2"
    export.export_torch(model, path)
    images = torch.rand(3, 3, SIZE, SIZE) * 2 - 1
    torch.save(images, tmp_path / "images.pt")
    script = (
        "import sys, torch; sys.modules['plsc'] = None; "
        "program = torch.export.load(sys.argv[1]).module(); "
        "images = torch.load(sys.argv[2], weights_only=True); "
        "torch.save([program(images[:n]).detach() for n in (1, 3)], sys.argv[3])"
    )
    answer = tmp_path / "answer.pt"
    subprocess.run([sys.executable, "-c", script, path, tmp_path / "images.pt", answer], check=True, cwd=tmp_path)
    one, three = torch.load(answer, weights_only=True)
    with torch.no_grad():
        torch.testing.assert_close(three, model(images))
        torch.testing.assert_close(one, model(images[:1]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size", "there"), [("iresnet18", 112, "r18"), ("mobilefacenet", 112, "mbf"), ("mobilefacenet", 48, None)]
)
def test_insightface_gets_a_bare_state_dict(name: str, size: int, there: str | None, tmp_path: Path) -> None:
    model = small(name, size)
    result = export.export_insightface(model, tmp_path / "model.pt")
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    assert list(state) == list(model.state_dict())
    assert all(torch.equal(state[key], tensor) for key, tensor in model.state_dict().items())
    assert (result["arcface_torch"], result["max_abs_error"]) == (there, 0.0)


def test_insightface_has_no_rotation_tta_and_no_timm(tmp_path: Path) -> None:
    for name in ("turned:mobilefacenet", "timm:test_vit"):
        with pytest.raises(UsageError, match=f"arcface_torch has no {name}"):
            export.export_insightface(small(name), tmp_path / "m.pt")
    assert contents(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("write", [export.export_onnx, export.export_torch])
def test_a_file_that_is_off_is_not_left_behind(write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m").write_text("the file that was there before")
    other = small()
    monkeypatch.setattr(export, "_program", lambda model, real=export._program: real(_disturbed(model)))
    with pytest.raises(DataError, match="was not written: its embeddings are off"):
        write(other, tmp_path / "m")
    assert contents(tmp_path) == ["m"]
    assert (tmp_path / "m").read_text() == "the file that was there before"


def _disturbed(model: plsc.models.Backbone) -> plsc.models.Backbone:
    torch.manual_seed(0)
    other = plsc.models.create(model.name, embedding_dim=model.embedding_dim, image_size=model.image_size)
    other.load_state_dict({key: t * 1.01 if t.is_floating_point() else t for key, t in model.state_dict().items()})
    return other


def test_a_model_that_answers_nan_is_refused(tmp_path: Path) -> None:
    model = small()
    with torch.no_grad():
        next(model.parameters()).fill_(torch.nan)
    with pytest.raises(DataError, match="not finite"):
        export.export_onnx(model, tmp_path / "m.onnx")
    assert contents(tmp_path) == []


def test_a_written_file_that_answers_nan_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(path: Path, real: Any = export.load_model, **options: Any) -> Any:
        monkeypatch.setattr(export.TorchEngine, "run", lambda self, images: torch.full((len(images), DIM), torch.nan))
        return real(path, **options)

    monkeypatch.setattr(export, "load_model", load)
    with pytest.raises(DataError, match="its embeddings are off by inf"):
        export.export_insightface(small("mobilefacenet"), tmp_path / "m.pt")
    assert contents(tmp_path) == []


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    plsc.models.save_model(small("mobilefacenet", 32), folder / "model.safetensors")
    return folder


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["onnx", "torch", "insightface"])
def test_the_command_writes_the_file_and_its_result(kind, run, tmp_path, capsys):
    if kind != "insightface":  # a directory with a quicker backbone
        run = tmp_path
        plsc.models.save_model(small(), run / "model.safetensors")
    out, result = tmp_path / "out.file", tmp_path / "result.json"
    assert main(["export", str(run), "--format", kind, "--out", str(out), "--json", str(result)]) == 0
    said = json.loads(result.read_text())
    assert (said["format"], said["file"], said["bytes"]) == (kind, str(out), out.stat().st_size)
    assert said["max_abs_error"] <= 1e-4 * said["max_abs_value"]
    printed = capsys.readouterr()
    assert printed.err == ""
    assert printed.out.count("\n") == 1
    written = out.read_bytes()
    assert main(["export", str(run), "--format", kind, "--out", str(out)]) == 2
    assert f"{out} exists already: give --overwrite to replace it" in capsys.readouterr().err
    assert out.read_bytes() == written
    assert main(["export", str(run), "--format", kind, "--out", str(out), "--overwrite"]) == 0


def test_best_takes_the_weights_of_the_best_evaluation(tmp_path: Path) -> None:
    model = small("mobilefacenet", 32)
    for name in ("model", "best"):
        plsc.models.save_model(model, tmp_path / f"{name}.safetensors")
        torch.nn.init.zeros_(next(model.parameters()))
    for option, name in (([], "model"), (["--best"], "best")):
        out = tmp_path / f"{name}.pt"
        assert main(["export", str(tmp_path), "--format", "insightface", "--out", str(out), *option]) == 0
        expected = plsc.models.load_model(tmp_path / f"{name}.safetensors").state_dict()
        assert all(torch.equal(value, expected[key]) for key, value in torch.load(out).items())
    assert main(["export", str(tmp_path), "--format", "insightface", "--out", str(tmp_path / "no" / "m.pt")]) == 2
