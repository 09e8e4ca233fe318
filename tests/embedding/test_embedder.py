"""Opening models for embedding: every kind of file, one face."""

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.backbones import pictures, trained_a_little

import plsc.models
from plsc.embedding.embedder import CPU_BATCH, EmbeddingModel, model_file, open_embedder
from plsc.embedding.export import export_insightface, export_onnx, export_torch
from plsc.errors import DataError, PlscError, UsageError

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
SIZE, DIM = 48, 16


@pytest.fixture(scope="module")
def model() -> plsc.models.Backbone:
    return trained_a_little("mobilefacenet", SIZE, DIM)


@pytest.fixture(scope="module")
def files(model: plsc.models.Backbone, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("files")
    (folder / "run").mkdir()
    plsc.models.save_model(model, folder / "run" / "model.safetensors")
    export_onnx(model, folder / "m.onnx")
    export_torch(model, folder / "m.pt2")
    export_insightface(model, folder / "m.pt")
    return {
        "run": folder / "run",
        "safetensors": folder / "run" / "model.safetensors",
        "onnx": folder / "m.onnx",
        "torch": folder / "m.pt2",
        "insightface": folder / "m.pt",
    }


KINDS = ["run", "safetensors", "onnx", "torch", "insightface"]


@pytest.fixture(scope="module")
def embedders(files: dict[str, Path]) -> dict[str, EmbeddingModel]:
    return {kind: open_embedder(path, device=CPU) for kind, path in files.items()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [0, 1, CPU_BATCH, 2 * CPU_BATCH + 3])
def test_every_kind_of_file_embeds_as_the_model_does(kind, count, embedders, model):
    images = pictures(count, SIZE)
    answer = embedders[kind](images)
    with torch.no_grad():
        expected = model((images / 255 - 0.5) / 0.5) if count else torch.empty(0, DIM)
    assert (answer.shape, answer.dtype, answer.device) == ((count, DIM), torch.float32, CPU)
    torch.testing.assert_close(answer, expected, rtol=1e-4, atol=1e-4)


def test_one_model_has_one_contract_in_every_file(embedders: dict[str, EmbeddingModel], files: dict[str, Path]) -> None:
    assert len({embedder.contract_id for embedder in embedders.values()}) == 1
    for kind, embedder in embedders.items():
        assert (embedder.embedding_dim, embedder.image_size, embedder.source) == (DIM, SIZE, str(files[kind]))
        assert len(embedder.contract_id) == 16
        int(embedder.contract_id, 16)


def test_other_weights_are_another_contract(model: plsc.models.Backbone, tmp_path: Path) -> None:
    changed = plsc.models.create("mobilefacenet", embedding_dim=DIM, image_size=SIZE)
    changed.load_state_dict(model.state_dict())
    plsc.models.save_model(changed, tmp_path / "a.safetensors")
    with torch.no_grad():
        next(changed.parameters()).view(-1)[0] += 1e-6
    plsc.models.save_model(changed, tmp_path / "b.safetensors")
    ids = {open_embedder(tmp_path / f"{name}.safetensors", device=CPU).contract_id for name in "ab"}
    assert len(ids) == 2


def test_an_onnx_file_whose_graph_was_changed_loses_its_contract(files: dict[str, Path], tmp_path: Path) -> None:
    import onnx

    graph = onnx.load(str(files["onnx"]))
    claimed = open_embedder(files["onnx"], device=CPU).contract_id
    weights = next(tensor for tensor in graph.graph.initializer if len(tensor.dims) == 4)
    weights.raw_data = bytes(4) + weights.raw_data[4:]
    onnx.save(graph, str(tmp_path / "changed.onnx"))
    assert open_embedder(tmp_path / "changed.onnx", device=CPU).contract_id != claimed


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["safetensors", "torch"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_lower_precision_is_close_and_comes_back_as_float32(kind, precision, files, embedders):
    rounded = open_embedder(files[kind], device=CPU, precision=precision)(pictures(4, SIZE))
    assert rounded.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(rounded, embedders[kind](pictures(4, SIZE))).min() > 0.95


def test_onnx_refuses_another_precision_and_any_model_an_unknown_one(files: dict[str, Path]) -> None:
    with pytest.raises(UsageError, match="leave bf16 out"):
        open_embedder(files["onnx"], precision="bf16")
    with pytest.raises(UsageError, match="one of auto, fp32, bf16, fp16"):
        open_embedder(files["run"], precision="int8")


@given(shape=st.lists(st.integers(1, 5), max_size=5), dtype=st.sampled_from([torch.uint8, torch.float32, torch.int64]))
@settings(max_examples=25, deadline=None)
def test_images_of_any_other_shape_or_type_are_refused(shape, dtype, embedders):
    with pytest.raises(UsageError, match="takes uint8 images"):
        embedders["run"](torch.zeros(shape, dtype=dtype))


def test_what_is_not_there_or_no_model_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("hello")
    (tmp_path / "m.pt2").write_bytes(b"PK\x03\x04 not really")
    for path, error, message in (
        (tmp_path / "no.onnx", UsageError, "does not exist"),
        (tmp_path, UsageError, "no run directory"),
        (tmp_path / "x.txt", DataError, "no model file"),
        (tmp_path / "m.pt2", DataError, "no model file"),
    ):
        with pytest.raises(error, match=message):
            open_embedder(path)


def test_a_checkpoint_in_a_models_place_names_the_command_that_exports_it(tmp_path: Path) -> None:
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000100"
    checkpoint.mkdir(parents=True)
    (checkpoint / "__0_0.distcp").touch()
    (checkpoint / ".metadata").touch()
    for source, named in (
        (checkpoint, checkpoint),
        (checkpoint / "__0_0.distcp", checkpoint),
        (checkpoint / ".metadata", checkpoint),
        (checkpoint.parent, checkpoint.parent),
        (tmp_path / "run", tmp_path / "run"),
    ):
        mend = re.escape(f"`plsc checkpoint export {named} model.safetensors` writes the model")
        for load in (open_embedder, plsc.load_model, plsc.models.load_model):
            with pytest.raises(PlscError, match=mend):
                load(source)
        with pytest.raises(PlscError, match=mend):
            plsc.models.load_weights(plsc.models.create("resnet8", embedding_dim=8, image_size=32), source)


def test_a_run_stands_for_its_last_weights_and_best_is_asked_for(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    with pytest.raises(UsageError, match="no run directory"):
        model_file(run)
    (run / "model.safetensors").touch()
    assert model_file(run).name == "model.safetensors"
    with pytest.raises(UsageError, match="trained without"):
        model_file(run, best=True)
    (run / "best.safetensors").touch()
    assert model_file(run, best=True).name == "best.safetensors"
    assert model_file(run / "best.safetensors") == run / "best.safetensors"
    with pytest.raises(UsageError, match="is a file"):
        model_file(run / "model.safetensors", best=True)
    with pytest.raises(UsageError, match="does not exist"):
        model_file(tmp_path / "nothing", best=True)
