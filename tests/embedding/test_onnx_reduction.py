"""Somebody else's ONNX models, in lower precisions and with pixels as input; onnxruntime itself runs the originals."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from support.backbones import pictures
from support.signing_keys import keys

from plsc.embedding.embedder import open_embedder
from plsc.embedding.export import CPU, reduce_onnx
from plsc.embedding.onnx_deployment import OnnxForm
from plsc.embedding.onnx_source import open_source
from plsc.errors import DataError, IntegrityError, UsageError
from plsc.signing import VERIFY_KEY
from plsc.tools.entry import main

pytestmark = pytest.mark.slow

SIZE, DIM, CHANNELS = 32, 16, 8
PEOPLE = "avatars:40x5@1000000"


def convolutions() -> tuple[list[Any], dict[str, np.ndarray]]:
    """Three convolutions, each with a batch norm, and their weights; nodes have no names, as from some exporters."""
    random = np.random.default_rng(0)
    nodes: list[Any] = []
    weights: dict[str, np.ndarray] = {}
    value, width = "normalised", 3
    for layer in range(3):
        weights[f"w{layer}"] = random.normal(0, (2 / (9 * width)) ** 0.5, (CHANNELS, width, 3, 3))
        norm = {"scale": (0.5, 1.5), "shift": (-0.2, 0.2), "mean": (-0.2, 0.2), "var": (0.5, 1.5)}
        weights |= {f"{key}{layer}": random.uniform(*limits, CHANNELS) for key, limits in norm.items()}
        given = [f"conv{layer}", *(f"{key}{layer}" for key in norm)]
        nodes += [
            helper.make_node("Conv", [value, f"w{layer}"], [f"conv{layer}"], pads=[1] * 4, strides=[2, 2]),
            helper.make_node("BatchNormalization", given, [f"norm{layer}"]),
            helper.make_node("Relu", [f"norm{layer}"], [f"relu{layer}"]),
        ]
        value, width = f"relu{layer}", CHANNELS
    return nodes, weights


def write(path: Path, *, batch: Any = "N", opset: int = 11, normalises: bool = False, old: bool = False) -> Path:
    """An embedding model of another exporter than ours.

    Args:
        path: of the file.
        batch: a number, or the free dimension's name.
        opset: of its operators.
        normalises: it takes pixels of 0 to 255, and makes (x - 127.5)/128 of them.
        old: it lists its weights among the inputs, as files had to until 2019.
    """
    nodes, weights = convolutions()
    first = "Sub" if normalises else "Identity"
    nodes.insert(0, helper.make_node(first, ["images", "grey"][: 1 + normalises], ["centred"]))
    second = "Mul" if normalises else "Identity"
    nodes.insert(1, helper.make_node(second, ["centred", "scale"][: 1 + normalises], ["normalised"]))
    nodes += [
        helper.make_node("Flatten", ["relu2"], ["flat"]),
        helper.make_node("Gemm", ["flat", "fc", "bias"], ["features"]),
    ]
    random = np.random.default_rng(1)
    weights |= {"fc": random.normal(0, 0.1, (CHANNELS * 16, DIM)), "bias": random.normal(0, 0.1, DIM)}
    weights |= {"grey": np.array([127.5]), "scale": np.array([1 / 128])} if normalises else {}
    tensors = [numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()]
    images = helper.make_tensor_value_info("images", TensorProto.FLOAT, [batch, 3, SIZE, SIZE])
    held = [helper.make_tensor_value_info(tensor.name, TensorProto.FLOAT, tensor.dims) for tensor in tensors]
    answer = helper.make_tensor_value_info("features", TensorProto.FLOAT, [batch, DIM])
    graph = helper.make_graph(nodes, "theirs", [images, *(held if old else [])], [answer], tensors)
    opsets = [helper.make_opsetid("", opset)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=3 if old else 7, producer_name="another")
    helper.set_model_props(model, {"license": "CC0"})
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, str(path))
    return path


SOURCES: dict[str, dict[str, Any]] = {
    "a batch of one": {"batch": 1},
    "a batch of four": {"batch": 4},
    "of 2018": {"opset": 7, "old": True},
    "takes pixels": {"normalises": True},
}


def expected(path: Path, images: torch.Tensor) -> np.ndarray:
    """What onnxruntime says of the original, in batches of four, or of one."""
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (given,) = session.get_inputs()
    takes_pixels = any(node.op_type == "Sub" for node in onnx.load(str(path)).graph.node)
    values = images.float().numpy() if takes_pixels else (images.float().numpy() - 127.5) / 127.5
    size = given.shape[0] if isinstance(given.shape[0], int) else 4
    return np.concatenate([session.run(None, {given.name: part})[0] for part in np.split(values, len(values) // size)])


def reduced(source: Path, path: Path, precision: str, inside: bool = False) -> tuple[dict[str, Any], Any]:
    """What the export says, and the graph of the file."""
    form = OnnxForm(precision, inside, [pictures(6, SIZE), pictures(3, SIZE)])
    result = reduce_onnx(open_source(source), path, form=form)
    graph = onnx.load(str(path))
    return result, graph


def difference(found: torch.Tensor, wanted: np.ndarray) -> float:
    return float(np.abs(found.numpy() - wanted).max() / np.abs(wanted).max())


@pytest.mark.parametrize("name", SOURCES)
def test_fp16_and_pixels_keep_the_embeddings_and_the_contract(name: str, tmp_path: Path) -> None:
    source = write(tmp_path / "theirs.onnx", **SOURCES[name])
    images, contract = pictures(8, SIZE), open_embedder(source, device=CPU).contract_id
    for precision, inside, limit in (("fp32", True, 1e-5), ("fp16", True, 1e-2), ("fp16", False, 1e-2)):
        result, graph = reduced(source, tmp_path / "m.onnx", precision, inside)
        onnx.checker.check_model(graph, full_check=True)
        embedder = open_embedder(tmp_path / "m.onnx", device=CPU)
        assert difference(embedder(images), expected(source, images)) < limit
        assert embedder.contract_id == result["contract_id"] == contract
        assert embedder.precision == precision
        (given,) = graph.graph.input
        dims = [dim.dim_value or dim.dim_param for dim in given.type.tensor_type.shape.dim]
        batch = SOURCES[name].get("batch", "N")
        assert dims == ([batch, SIZE, SIZE, 3] if inside else [batch, 3, SIZE, SIZE])
        assert given.type.tensor_type.elem_type == (TensorProto.UINT8 if inside else TensorProto.FLOAT)
        assert {entry.key: entry.value for entry in graph.metadata_props}["license"] == "CC0"
        weights = {tensor.data_type for tensor in graph.graph.initializer if np.prod(tensor.dims) > 3}
        assert weights == {TensorProto.FLOAT16 if precision == "fp16" else TensorProto.FLOAT}


@pytest.mark.parametrize("name", SOURCES)
def test_int8_folds_batch_norms_and_quantises_the_layers_between(name: str, tmp_path: Path) -> None:
    source = write(tmp_path / "theirs.onnx", **SOURCES[name])
    result, graph = reduced(source, tmp_path / "m.onnx", "int8")
    onnx.checker.check_model(graph, full_check=True)
    tensors = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.graph.initializer}
    producers = {node.output[0]: node for node in graph.graph.node}
    layers = [node for node in graph.graph.node if node.op_type in ("Conv", "Gemm")]
    assert [node.input[1] in tensors for node in layers] == [True, False, False, True]
    for layer in layers[1:-1]:
        weights, scales, *_ = producers[layer.input[1]].input
        assert (tensors[weights].dtype, tensors[scales].shape) == (np.int8, (CHANNELS,))
    kinds = [node.op_type for node in graph.graph.node]
    assert "BatchNormalization" not in kinds
    assert "QuantizeLinear" not in kinds[: kinds.index("Conv")]  # pixels reach the first layer as they are
    embedder = open_embedder(tmp_path / "m.onnx", device=CPU)
    images = pictures(8, SIZE)
    wanted = torch.from_numpy(expected(source, images))
    assert torch.nn.functional.cosine_similarity(embedder(images), wanted).min() > 0.99
    assert embedder.contract_id == result["contract_id"] != open_embedder(source, device=CPU).contract_id
    assert reduced(source, tmp_path / "u8.onnx", "int8", inside=True)[0]["contract_id"] == result["contract_id"]


def test_our_own_file_is_reduced_as_others_are(tmp_path: Path) -> None:
    """Its contract id, which is its backbone's, stays; a second reduction is refused."""
    source = write(tmp_path / "theirs.onnx")
    stated = reduced(source, tmp_path / "ours.onnx", "fp32")[0]["contract_id"]
    assert reduced(tmp_path / "ours.onnx", tmp_path / "half.onnx", "fp16", inside=True)[0]["contract_id"] == stated
    reduced(tmp_path / "ours.onnx", tmp_path / "half.onnx", "fp16")
    with pytest.raises(UsageError, match=r"half\.onnx computes in fp16 already; give the float32 file"):
        open_source(tmp_path / "half.onnx")


def test_names_of_a_strangers_file_do_not_reach_the_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """onnxruntime would tell of an initializer that nobody uses, by its name as it is, past Python's streams."""
    model = onnx.load(str(write(tmp_path / "theirs.onnx", opset=13)))
    model.graph.initializer.append(numpy_helper.from_array(np.zeros(5, np.float32), "\x1b[31mspare"))
    onnx.save(model, str(tmp_path / "theirs.onnx"))
    reduced(tmp_path / "theirs.onnx", tmp_path / "m.onnx", "int8")
    assert capfd.readouterr() == ("", "")


def without_metadata(path: Path) -> Path:
    model = onnx.load(str(path))
    del model.metadata_props[:]
    onnx.save(model, str(path))
    return path


def test_what_cannot_be_reduced_is_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "theirs.onnx")
    for precision in ("fp16", "int8"):
        reduced(source, tmp_path / "m.onnx", precision)
        with pytest.raises(UsageError, match=rf"m\.onnx computes in {precision} already"):
            open_source(without_metadata(tmp_path / "m.onnx"))  # told by its weights
    reduced(source, tmp_path / "u8.onnx", "fp32", inside=True)
    with pytest.raises(UsageError, match=r"takes tensor\(uint8\) \(N, 32, 32, 3\); give a file that takes float32"):
        open_source(tmp_path / "u8.onnx")
    with pytest.raises(UsageError, match="int8 takes pictures to calibrate on"):
        reduce_onnx(open_source(source), tmp_path / "no.onnx", form=OnnxForm("int8"))
    model = onnx.load(str(source))
    nodes = [node for node in model.graph.node if node.op_type in ("Identity", "Flatten")]
    nodes[-1].input[0] = "normalised"
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("flat", TensorProto.FLOAT, ["N", 3 * SIZE**2]))
    onnx.save(model, str(tmp_path / "flat.onnx"))
    with pytest.raises(UsageError, match="the model has none between them"):
        reduced(tmp_path / "flat.onnx", tmp_path / "no.onnx", "int8")
    assert not (tmp_path / "no.onnx").exists()


def test_an_operator_that_has_no_newer_form_is_told(tmp_path: Path) -> None:
    model = onnx.load(str(write(tmp_path / "theirs.onnx", opset=7)))
    for node in model.graph.node:
        node.op_type = node.op_type.replace("Relu", "ThresholdedRelu")  # onnxruntime's own, before opset 10
    onnx.save(model, str(tmp_path / "theirs.onnx"))
    with pytest.raises(
        DataError, match=r"opset 7 cannot be brought to 13 \(No Adapter .* for ThresholdedRelu\); export"
    ):
        reduced(tmp_path / "theirs.onnx", tmp_path / "m.onnx", "int8")
    assert reduced(tmp_path / "theirs.onnx", tmp_path / "m.onnx", "fp32", inside=True)[0]["max_abs_error"] == 0


def test_a_source_that_is_not_signed_is_refused_where_signatures_are_asked_for(tmp_path, monkeypatch):
    source = write(tmp_path / "theirs.onnx")
    _, public = keys(tmp_path / "keys")
    monkeypatch.setenv(VERIFY_KEY, str(public))
    with pytest.raises(IntegrityError, match="theirs"):
        open_source(source)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--format", "torch"], "is reduced to another .onnx file only: give --format onnx"),
        (["--format", "insightface"], "is reduced to another .onnx file only: give --format onnx"),
        (["--format", "timm"], "is reduced to another .onnx file only: give --format onnx"),
        (["--format", "onnx"], "is ONNX already: give --precision fp16 or int8, or --with-preprocessing"),
        (["--format", "onnx", "--precision", "fp16", "--best"], "--best chooses among the weights of a run"),
        (["--format", "onnx", "--precision", "int8"], "--precision int8 is calibrated and judged on pictures"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: list[str], message: str, tmp_path: Path, capsys: Any) -> None:
    source = write(tmp_path / "theirs.onnx")
    assert main(["export", str(source), "--out", str(tmp_path / "m"), *options]) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["theirs.onnx"]


@pytest.mark.slow
def test_the_command_reduces_and_judges(tmp_path: Path, capsys: Any) -> None:
    source, out, said = write(tmp_path / "theirs.onnx", batch=1), tmp_path / "m.onnx", tmp_path / "said.json"
    options = ["--precision", "int8", "--with-preprocessing", "--data", PEOPLE, "--calibrate", "20"]
    argv = ["export", str(source), "--format", "onnx", "--out", str(out), *options, "--max-tar-loss", "1"]
    assert main([*argv, "--json", str(said)]) == 0
    printed, judged = capsys.readouterr().out, json.loads(said.read_text())["judged"]
    assert f"int8: TAR {judged['tar']:.4f} at FAR 0.001 from the cosine {judged['threshold']:.4f} on" in printed
    assert "m.onnx: theirs.onnx, 0.0 MB, 32x32 -> 16, largest difference" in printed
    assert main(["eval", str(out), "--data", "avatars:4x2"]) == 0
