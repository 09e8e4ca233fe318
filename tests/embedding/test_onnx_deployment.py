"""ONNX for deployment: pixels as input, fp16, int8 judged on people, and execution providers."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, numpy_helper
from support.backbones import pictures, trained_a_little
from support.pictures import picture

import plsc.models
from plsc.embedding import export
from plsc.embedding.embedder import backbone_engine, open_embedder
from plsc.embedding.export import CPU, export_onnx
from plsc.embedding.onnx_deployment import NORMALISATIONS, OnnxForm, in_precision
from plsc.errors import DataError, UsageError
from plsc.evaluation.precision_loss import JudgedPictures
from plsc.models.preprocessing import Preprocessing, state_digest
from plsc.tools.entry import main

pytestmark = pytest.mark.slow

SIZE, DIM = 32, 16
PEOPLE = "avatars:40x5@1000000"
GRAPHS: dict[str, Any] = {}
SIDES = (("x", 3), ("y", 4))  # of a small graph: its input and output, and their channels


@pytest.fixture(autouse=True)
def traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spare the exporter's seconds where a test exports the weights of another one."""

    def float_graph(model: plsc.models.Backbone, real: Any = export._float_graph) -> Any:
        digest = state_digest(model.state_dict())
        if digest not in GRAPHS:
            GRAPHS[digest] = real(model)
        return copy.deepcopy(GRAPHS[digest])

    monkeypatch.setattr(export, "_float_graph", float_graph)


def model_with_channels() -> plsc.models.Backbone:
    """A backbone whose channels have means and deviations of their own."""
    model = trained_a_little("resnet8", SIZE, DIM)
    model.preprocessing = Preprocessing(SIZE, (120.0, 115.5, 100.0), (60.0, 58.0, 57.5))
    return model


def exported(path: Path, precision: str, inside: bool = False, name: str = "resnet8") -> tuple[Any, Any, Any]:
    """A backbone, what its export says, and the graph of the file."""
    model = model_with_channels() if name == "resnet8" else trained_a_little(name, SIZE, DIM)
    result = export_onnx(model, path, form=OnnxForm(precision, inside, [pictures(8, SIZE)]))
    graph = onnx.load(str(path))
    onnx.checker.check_model(graph, full_check=True)
    return model, result, graph


def metadata(graph: Any) -> dict[str, str]:
    return {entry.key: entry.value for entry in graph.metadata_props}


def embedded(model: plsc.models.Backbone, images: torch.Tensor) -> torch.Tensor:
    """What the backbone itself says of images uint8 (B, 3, S, S), normalised here."""
    mean, std = (torch.tensor(getattr(model.preprocessing, key)).reshape(-1, 1, 1) for key in ("mean", "std"))
    with torch.no_grad():
        return model((images.float() - mean) / std)


def difference(first: torch.Tensor, second: torch.Tensor) -> float:
    return float((first - second).abs().max() / second.abs().max())


def test_pixels_as_they_are_decoded_give_the_floats_embeddings(tmp_path: Path) -> None:
    model, result, graph = exported(tmp_path / "m.onnx", "fp32", inside=True)
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"), providers=["CPUExecutionProvider"])
    (given,) = session.get_inputs()
    assert (given.name, given.type, given.shape) == ("data", "tensor(uint8)", ["batch", SIZE, SIZE, 3])
    images = pictures(5, SIZE)
    answer = session.run(None, {"data": images.permute(0, 2, 3, 1).contiguous().numpy()})[0]
    assert difference(torch.from_numpy(answer), embedded(model, images)) < 1e-3
    embedder = open_embedder(tmp_path / "m.onnx", device=CPU)
    assert difference(embedder(images), embedded(model, images)) < 1e-3
    assert embedder.preprocessing == model.preprocessing
    assert embedder.contract_id == result["contract_id"] == backbone_engine(model, CPU).contract_id
    assert not [node.name for node in graph.graph.node[:8] if node.name.startswith(("Sub", "Mul", "_minus", "_mul"))]


@pytest.mark.parametrize("inside", [False, True])
def test_fp16_holds_halves_and_takes_and_gives_floats(inside: bool, tmp_path: Path) -> None:
    model, result, graph = exported(tmp_path / "m.onnx", "fp16", inside)
    weights = {tensor.data_type for tensor in graph.graph.initializer if np.prod(tensor.dims) > 3}
    assert TensorProto.FLOAT not in weights
    assert graph.graph.output[0].type.tensor_type.elem_type == TensorProto.FLOAT
    embedder = open_embedder(tmp_path / "m.onnx", device=CPU)
    assert 0 < difference(embedder(pictures(5, SIZE)), embedded(model, pictures(5, SIZE))) < 1e-2
    assert embedder.precision == metadata(graph)["plsc.precision"] == "fp16"
    assert embedder.contract_id == backbone_engine(model, CPU).contract_id
    assert (result["precision"], result["tolerance"], result["judged"]) == ("fp16", 1e-2, None)


def test_int8_quantises_all_layers_but_the_first_and_the_last(tmp_path: Path) -> None:
    model, result, graph = exported(tmp_path / "m.onnx", "int8")
    tensors = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.graph.initializer}
    producers = {node.output[0]: node for node in graph.graph.node}
    layers = [node for node in graph.graph.node if node.op_type in ("Conv", "Gemm")]
    assert [node.input[1] in tensors for node in layers] == [True] + [False] * (len(layers) - 2) + [True]
    for layer in layers[1:-1]:
        weights, scales, *_ = producers[layer.input[1]].input
        assert tensors[weights].dtype == np.int8
        assert scales in tensors
        assert tensors[scales].shape == tensors[weights].shape[:1]  # one for each channel
    embedder = open_embedder(tmp_path / "m.onnx", device=CPU)
    expected = embedded(model, pictures(5, SIZE))
    assert torch.nn.functional.cosine_similarity(embedder(pictures(5, SIZE)), expected).min() > 0.98
    assert embedder.precision == "int8"
    assert result["tolerance"] is None
    own = backbone_engine(model, CPU).contract_id
    assert embedder.contract_id == result["contract_id"] != own
    again = exported(tmp_path / "u8.onnx", "int8", inside=True)[1]
    assert again["contract_id"] == result["contract_id"]  # the same pictures calibrated it


@pytest.mark.parametrize("kind", NORMALISATIONS)
def test_int8_leaves_normalisations_in_float32(kind: str, tmp_path: Path) -> None:
    """One scale for channels of 1 and of 1,000 would leave nothing of the smaller ones."""
    random = np.random.default_rng(0)
    shape = {"LayerNormalization": (8,)}.get(kind, (4,))
    numbers = ("scale", "bias", "mean", "variance")[: 4 if kind == "BatchNormalization" else 2]
    tensors = {f"w{n}": random.normal(0, 0.3, (4, 3 if n == 0 else 4, 3, 3)).astype(np.float32) for n in range(4)}
    tensors |= {name: np.geomspace(1, 1000, *shape, dtype=np.float32) for name in numbers}
    values, nodes = iter(("x", "a", "b", "normed", "c", "y")), []
    value = next(values)
    for layer in ("w0", "w1", kind, "w2", "w3"):
        made = next(values)
        if layer == kind:
            nodes.append(onnx.helper.make_node(kind, [value, *numbers], [made], "normalise"))
        else:
            nodes.append(onnx.helper.make_node("Conv", [value, layer], [made], layer, pads=[1, 1, 1, 1]))
        value = made
    made = (onnx.helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", size, 8, 8]) for name, size in SIDES)
    given, answer = made
    constants = [numpy_helper.from_array(array, name) for name, array in tensors.items()]
    graph = onnx.helper.make_graph(nodes, "normalising", [given], [answer], constants)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9)
    reduced = in_precision(model, OnnxForm("int8", calibration=[pictures(4, 8)]), Preprocessing(8))
    (node,) = (node for node in reduced.graph.node if node.op_type == kind)
    held = {tensor.name: numpy_helper.to_array(tensor) for tensor in reduced.graph.initializer}
    for name in numbers:
        np.testing.assert_array_equal(held[name], tensors[name])
    assert list(node.input[1:]) == list(numbers)
    assert sum(node.op_type == "QuantizeLinear" for node in reduced.graph.node) > 0


@pytest.mark.parametrize("factor", ["alpha", "beta"])
def test_int8_leaves_products_with_a_factor_in_float32(factor: str, tmp_path: Path) -> None:
    """onnxruntime 1.32 would divide the bias by beta."""
    random = np.random.default_rng(0)
    tensors = {"w0": random.normal(0, 0.1, (192, 16)).astype(np.float32)}
    tensors |= {f"w{n}": random.normal(0, 0.25, (16, 16)).astype(np.float32) for n in range(1, 4)}
    tensors["bias"] = np.full(16, 3, np.float32)
    nodes, value = [onnx.helper.make_node("Flatten", ["x"], ["flat"], "flatten")], "flat"
    for layer, made in zip(("w0", "w1", "w2", "w3"), ("a", "b", "c", "y"), strict=True):
        attributes = {factor: 0.5} if layer == "w1" else {}
        nodes.append(onnx.helper.make_node("Gemm", [value, layer, "bias"], [made], layer, **attributes))
        value = made
    given = onnx.helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, 8, 8])
    answer = onnx.helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 16])
    constants = [numpy_helper.from_array(array, name) for name, array in tensors.items()]
    graph = onnx.helper.make_graph(nodes, "factors", [given], [answer], constants)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9)
    reduced = in_precision(copy.deepcopy(model), OnnxForm("int8", calibration=[pictures(4, 8)]), Preprocessing(8))
    weights = {node.output[0]: node.input[1] for node in reduced.graph.node if node.op_type == "Gemm"}
    held = {tensor.name for tensor in reduced.graph.initializer}
    assert [name in held for name in weights.values()] == [True, True, False, True]
    pixels = {"x": Preprocessing(8)(pictures(4, 8)).numpy()}
    sessions = [onnxruntime.InferenceSession(each.SerializeToString()) for each in (model, reduced)]
    expected, found = (torch.from_numpy(session.run(None, pixels)[0]) for session in sessions)
    assert difference(found, expected) < 0.05


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["iresnet18", "mobilefacenet", "vit_tiny", "timm:test_vit", "turned:resnet8"])
@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_every_family_passes_its_trial(name: str, precision: str, tmp_path: Path) -> None:
    model, result, _ = exported(tmp_path / "m.onnx", precision, inside=True, name=name)
    embedder = open_embedder(tmp_path / "m.onnx", device=CPU)
    assert embedder.contract_id == result["contract_id"]
    limit = {"fp16": 1e-2, "int8": 1.0}[precision]  # some lose much: the judge says so
    assert difference(embedder(pictures(5, SIZE)), embedded(model, pictures(5, SIZE))) < limit


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    plsc.models.save_model(trained_a_little("resnet8", SIZE, DIM), folder / "model.safetensors")
    return folder


@pytest.mark.slow
def test_the_command_judges_int8_and_other_commands_take_its_file(run, tmp_path, capsys):
    out, said = tmp_path / "m.onnx", tmp_path / "said.json"
    options = ["--precision", "int8", "--with-preprocessing", "--data", PEOPLE, "--calibrate", "20"]
    argv = ["export", str(run), "--format", "onnx", "--out", str(out), *options, "--max-tar-loss", "1"]
    assert main([*argv, "--json", str(said)]) == 0
    printed = capsys.readouterr().out
    judged = json.loads(said.read_text())["judged"]
    assert (judged["far"], judged["genuine_pairs"]) == (1e-3, 36 * 10)
    assert judged["impostor_pairs"] == 180 * 179 // 2 - 360
    assert judged["tar_lost"] == judged["tar_fp32"] - judged["tar"]
    assert f"int8: TAR {judged['tar']:.4f} at FAR 0.001 from the cosine {judged['threshold']:.4f} on" in printed
    assert main(["embed", str(out), "--data", "avatars:3x2", "--out", str(tmp_path / "a.emb"), "--workers", "0"]) == 0
    assert "embedded now in int8" in capsys.readouterr().out
    assert main(["eval", str(out), "--data", "avatars:4x2", "--provider", "cpu"]) == 0


@pytest.mark.slow
def test_an_int8_file_that_loses_too_much_is_not_written(tmp_path, capsys):
    model = trained_a_little("resnet8", SIZE, DIM)
    last = model.blocks[-1]
    first_norm = next(layer for layer in last.residual if isinstance(layer, torch.nn.BatchNorm2d))
    second = [layer for layer in last.residual if isinstance(layer, torch.nn.Conv2d)][1]
    with torch.no_grad():  # a channel that nothing reads has a range that leaves the others none of int8's values
        first_norm.bias[0] = 1e5
        second.weight[:, 0] = 0
        next(layer for layer in last.shortcut if isinstance(layer, torch.nn.Conv2d)).weight.zero_()
    plsc.models.save_model(model, tmp_path / "model.safetensors")
    out = tmp_path / "m.onnx"
    argv = ["export", str(tmp_path), "--format", "onnx", "--out", str(out), "--precision", "int8", "--data", PEOPLE]
    assert main(argv) == 1  # all embeddings are the same one
    assert "m.onnx was not written: " in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors"]


class Rows:
    """An engine that looks its embeddings up by the first pixel; the lower precision's are disturbed."""

    def __init__(self, noise: float) -> None:
        self.precision, self.noise = "int8", noise

    def run(self, images: torch.Tensor) -> torch.Tensor:
        small = torch.nn.functional.adaptive_avg_pool2d(images.float(), 4).flatten(1) - 128
        noise = torch.randn(small.shape, generator=torch.Generator().manual_seed(len(images))) * self.noise
        return small + noise


@pytest.mark.slow
def test_loss_and_threshold_are_those_of_all_pairs() -> None:
    judged = JudgedPictures(PEOPLE, Preprocessing(SIZE), 0)
    found = judged.loss(Rows(0.0), Rows(30.0), 1.0)  # type: ignore[arg-type]
    dataset = plsc.data.open_dataset(PEOPLE, image_size=SIZE)
    images = torch.stack([dataset.image(index) for index in range(len(dataset))])
    same = dataset.labels[:, None] == dataset.labels
    upper = np.triu(np.ones(same.shape, dtype=bool), 1)
    for noise, point in ((0.0, found.reference), (30.0, found.reduced)):
        rows = torch.cat([Rows(noise).run(part) for part in images.split(64)]).double()
        rows /= rows.norm(dim=1, keepdim=True)
        cosines = (rows @ rows.T).numpy()
        different = cosines[upper & ~same]
        allowed = int(found.far * len(different))
        assert (different >= point.threshold - 1e-6).sum() in (allowed, allowed + 1)
        accepted = cosines[upper & same] >= point.threshold - 1e-6
        assert point.tmr == pytest.approx(accepted.mean(), abs=0.005)
    assert found.tar_lost == found.reference.tmr - found.reduced.tmr > 0.01
    with pytest.raises(DataError, match=r"it loses 0\.\d+ of TAR at FAR 0\.001 .* and 0\.01 is the most"):
        judged.loss(Rows(0.0), Rows(30.0), 0.01)  # type: ignore[arg-type]


def test_calibration_and_judgement_share_no_person_and_leave_unreadable_pictures_out(tmp_path: Path) -> None:
    for person in range(6):
        for number in range(3):
            (tmp_path / f"{person}").mkdir(exist_ok=True)
            picture(tmp_path / f"{person}/{number}.png", seed=3 * person + number)
    for person in range(6):
        (tmp_path / f"{person}/2.png").write_bytes(b"no picture")
    judged = JudgedPictures(str(tmp_path), Preprocessing(SIZE), 100)
    assert sum(len(batch) for batch in judged.batches()) == 3 * 2  # half of the people, without what is unreadable
    with pytest.raises(DataError, match=r"3 same pairs cannot tell a loss of 0\.01"):
        judged.loss(Rows(0.0), Rows(0.0), 0.01)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"different pairs support no false accept rate of 0\.01"):
        judged.loss(Rows(0.0), Rows(0.0), 1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--format", "torch", "--with-preprocessing"], "--with-preprocessing is an option of --format onnx"),
        (["--format", "insightface", "--precision", "fp16"], "--precision is an option of --format onnx"),
        (["--format", "timm", "--data", PEOPLE], "--data is an option of --format onnx"),
        (["--format", "onnx", "--precision", "int8"], "--precision int8 is calibrated and judged on pictures"),
        (["--format", "onnx", "--precision", "bf16"], "invalid choice: 'bf16'"),
        (["--format", "onnx", "--data", PEOPLE], "--data judges --precision fp16 and int8"),
        (["--format", "onnx", "--precision", "fp16", "--calibrate", "9"], "int8 alone is calibrated"),
        (["--format", "onnx", "--precision", "fp16", "--max-tar-loss", "0.1"], "give --data"),
        (["--format", "onnx", "--precision", "int8", "--data", "no/people"], "there is no no/people"),
    ],
)
def test_what_cannot_be_is_refused(options, message, run, tmp_path, capsys):
    assert main(["export", str(run), "--out", str(tmp_path / "m"), *options]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_int8_without_a_picture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="int8 takes pictures to calibrate on"):
        export_onnx(trained_a_little("resnet8", SIZE, DIM), tmp_path / "m.onnx", form=OnnxForm("int8"))
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:Specified provider")  # onnxruntime's own, of what is not there
@pytest.mark.parametrize(
    ("available", "reason"),
    [([], "the installed onnxruntime does not have it"), (["TensorrtExecutionProvider"], "could not be loaded")],
)
def test_a_provider_that_does_not_run_is_said(available, reason, run, tmp_path, caplog, monkeypatch):
    if "TensorrtExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("it is there")
    path = tmp_path / "m.onnx"
    model, *_ = exported(path, "fp32")
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [*available, "CPUExecutionProvider"])
    embedder = open_embedder(path, device=CPU, provider="tensorrt")
    (message,) = caplog.messages
    assert "m.onnx runs on CPUExecutionProvider in place of TensorrtExecutionProvider: " in message
    assert reason in message
    assert difference(embedder(pictures(5, SIZE)), embedded(model, pictures(5, SIZE))) < 1e-4
    caplog.clear()
    open_embedder(path, device=CPU, provider="cpu")
    assert caplog.messages == []


def test_providers_are_of_onnx_files_and_known_ones(run, tmp_path, capsys):
    exported(tmp_path / "m.onnx", "fp32")
    with pytest.raises(UsageError, match="provider is 'gpu'; it has to be one of auto, cpu, cuda"):
        open_embedder(tmp_path / "m.onnx", provider="gpu")
    with pytest.raises(UsageError, match=r"is no \.onnx file, which alone has a provider"):
        open_embedder(run, provider="cuda")
    argv = ["eval", str(run), "--data", "avatars:2x2", "--provider"]
    assert (main([*argv, "cpu"]), main([*argv, "cudaa"])) == (2, 2)
    assert "did you mean cuda" in capsys.readouterr().err
