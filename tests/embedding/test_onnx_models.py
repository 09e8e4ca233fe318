"""Other people's ONNX models: sizes, layouts, types, batches and normalisation are read from the file."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from support.backbones import pictures
from support.scrfd import write_model

from plsc.embedding.embedder import open_embedder
from plsc.errors import DataError, UsageError

CPU, FLOAT = torch.device("cpu"), TensorProto.FLOAT


def write(path: Path, nodes: list[Any], *, shape: list[Any], outputs: tuple[str, ...] = ("y",), **more: Any) -> Path:
    return write_model(path, nodes, shape, outputs, **more)


def pooling(path: Path, *, shape: list[Any], axes: tuple[int, int] = (2, 3), dtype: int = FLOAT) -> Path:
    """A model whose embedding is the mean of each channel: three numbers that show what its input was."""
    nodes = [
        helper.make_node("Cast", ["x"], ["f"], to=FLOAT),
        helper.make_node("ReduceMean", ["f"], ["y"], axes=list(axes), keepdims=0),
    ]
    return write(path, nodes, shape=shape, dtype=dtype)


def normalised_mean(images: torch.Tensor) -> torch.Tensor:
    return ((images.float() - 127.5) / 127.5).mean(dim=(2, 3))


@pytest.mark.parametrize("size", [17, 112, 160])
@pytest.mark.parametrize("batch", ["N", 1, 4, -1])
@pytest.mark.parametrize("last", [False, True])
def test_size_layout_and_batch_are_the_models_own(size: int, batch: Any, last: bool, tmp_path: Path) -> None:
    shape = [batch, size, size, 3] if last else [batch, 3, size, size]
    embedder = open_embedder(pooling(tmp_path / "m.onnx", shape=shape, axes=(1, 2) if last else (2, 3)), device=CPU)
    assert (embedder.image_size, embedder.embedding_dim) == (size, 3)
    images = pictures(7, size)
    torch.testing.assert_close(embedder(images), normalised_mean(images), atol=1e-5, rtol=0)
    assert embedder(images[:0]).shape == (0, 3)


@pytest.mark.parametrize("shape", [["N", 3, "H", "W"], [None, None, None, None], ["N", 3, 112, "W"]])
def test_a_free_size_is_112(shape: list[Any], tmp_path: Path) -> None:
    embedder = open_embedder(pooling(tmp_path / "m.onnx", shape=shape), device=CPU)
    assert embedder.image_size == 112
    torch.testing.assert_close(embedder(pictures(2, 112)), normalised_mean(pictures(2, 112)), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("dtype", "raw"), [(TensorProto.FLOAT16, False), (TensorProto.DOUBLE, False), (TensorProto.UINT8, True)]
)
def test_the_inputs_type_is_served_and_uint8_gets_the_pixels_themselves(dtype: int, raw: bool, tmp_path: Path) -> None:
    embedder = open_embedder(pooling(tmp_path / "m.onnx", shape=["N", 3, 32, 32], dtype=dtype), device=CPU)
    images = pictures(3, 32)
    expected = images.float().mean(dim=(2, 3)) if raw else normalised_mean(images)
    torch.testing.assert_close(embedder(images), expected, atol=2e-3, rtol=1e-5)


@pytest.mark.parametrize(
    ("names", "raw"),
    [
        (("Sub_0", "Mul_1"), True),
        (("_minusscalar0", "_mulscalar0"), True),
        (("Sub_0", "other"), False),
        (("node_Sub", "node_Mul"), False),
    ],
)
def test_early_nodes_named_sub_and_mul_mean_that_the_model_normalises(names, raw, tmp_path):
    nodes = [
        helper.make_node("Identity", ["x"], ["a"], name=names[0]),
        helper.make_node("Identity", ["a"], ["b"], name=names[1]),
        helper.make_node("ReduceMean", ["b"], ["y"], axes=[2, 3], keepdims=0),
    ]
    images = pictures(2, 32)
    answer = open_embedder(write(tmp_path / "m.onnx", nodes, shape=["N", 3, 32, 32]), device=CPU)(images)
    expected = images.float().mean(dim=(2, 3)) if raw else normalised_mean(images)
    torch.testing.assert_close(answer, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("operations", "raw"),
    [
        ([("Sub", 127.5), ("Div", 127.5)], True),
        ([("Div", 255.0), ("Sub", 0.5), ("Div", 0.5)], True),
        ([("Sub", [[[123.0]], [[117.0]], [[104.0]]]), ("Mul", 0.0078125)], True),
        ([("Mul", 2.0), ("Sub", 1.0)], False),
        ([("Sub", [[[0.485]], [[0.456]], [[0.406]]]), ("Div", [[[0.229]], [[0.224]], [[0.225]]])], False),
    ],
)
def test_normalisation_in_the_graph_is_recognised_whatever_its_nodes_are_called(operations, raw, tmp_path):
    images = pictures(2, 32)
    nodes, constants, value = [], {}, "x"
    expected = images.float() if raw else (images.float() - 127.5) / 127.5
    for i, (operation, constant) in enumerate(operations):
        constants[f"c{i}"] = np.asarray(constant, dtype=np.float32)
        nodes.append(helper.make_node(operation, [value, f"c{i}"], [f"v{i}"], name=f"node_{i}"))
        value = f"v{i}"
        number = torch.tensor(constant)
        expected = {"Sub": expected - number, "Div": expected / number, "Mul": expected * number}[operation]
    nodes.append(helper.make_node("ReduceMean", [value], ["y"], axes=[2, 3], keepdims=0))
    path = write(tmp_path / "m.onnx", nodes, shape=["N", 3, 32, 32], constants=constants)
    torch.testing.assert_close(open_embedder(path, device=CPU)(images), expected.mean(dim=(2, 3)), rtol=1e-4, atol=1e-4)


def test_an_answer_of_any_shape_is_one_row_per_image(tmp_path: Path) -> None:
    nodes = [helper.make_node("ReduceMean", ["x"], ["y"], axes=[2], keepdims=1)]
    embedder = open_embedder(write(tmp_path / "m.onnx", nodes, shape=["N", 3, 32, 32]), device=CPU)
    assert embedder.embedding_dim == 96
    assert embedder(pictures(2, 32)).shape == (2, 96)


def test_a_batch_that_is_free_in_name_only_is_run_image_by_image(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Reshape", ["x", "s"], ["r"]),
        helper.make_node("ReduceMean", ["r"], ["y"], axes=[2, 3], keepdims=0),
    ]
    path = write(tmp_path / "m.onnx", nodes, shape=["N", 3, 32, 32], constants={"s": np.array([1, 3, 32, 32])})
    images = pictures(5, 32)
    torch.testing.assert_close(open_embedder(path, device=CPU)(images), normalised_mean(images), atol=1e-5, rtol=0)


def mean_node(output: str = "y", given: str = "x") -> Any:
    return helper.make_node("ReduceMean", [given], [output], axes=[2, 3], keepdims=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"outputs": ("y", "z")}, r"has 2 outputs \(y, z\); an embedding model has one input and one output"),
        ({"inputs": ("x", "mask"), "outputs": ("y", "mask")}, r"has 2 inputs \(x, mask\)"),
        ({"shape": ["N", 1, 32, 32]}, "1 channels, where RGB has 3"),
        ({"shape": ["N", 3, 32]}, "not a batch of images"),
        ({"dtype": TensorProto.INT64}, "takes tensor.int64."),
        ({"dtype": 33}, "takes tensor.33."),
    ],
)
def test_a_model_that_embeds_no_pictures_is_refused_in_one_line(options, message, tmp_path):
    outputs = options.get("outputs", ("y",))
    if options.get("dtype") or len(options.get("shape", [0] * 4)) == 3:
        nodes = [helper.make_node("Cast", ["x"], ["y"], to=FLOAT)]
    else:
        nodes = [mean_node(output) for output in outputs if output != "mask"]
    path = write(tmp_path / "m.onnx", nodes, **{"shape": ["N", 3, 32, 32], **options})
    with pytest.raises(DataError, match=message) as caught:
        open_embedder(path, device=CPU)
    assert "\n" not in str(caught.value)


def test_a_model_that_fails_when_run_is_named(tmp_path: Path) -> None:
    nodes = [helper.make_node("Reshape", ["x", "s"], ["y"])]
    path = write(tmp_path / "m.onnx", nodes, shape=["N", 3, 32, 32], constants={"s": np.array([5, 7])})
    with pytest.raises(DataError, match=r"m\.onnx does not run on"):
        open_embedder(path, device=CPU)


def test_truncated_and_foreign_files_are_one_line(tmp_path: Path) -> None:
    weights = {"w": np.random.default_rng(0).standard_normal((8, 3, 3, 3)).astype(np.float32)}
    nodes = [helper.make_node("Conv", ["x", "w"], ["c"]), mean_node(given="c")]
    whole = write(tmp_path / "whole.onnx", nodes, shape=["N", 3, 32, 32], constants=weights).read_bytes()
    for length in (0, 1, 10, 60, len(whole) // 2, len(whole) - 30):
        (tmp_path / "cut.onnx").write_bytes(whole[:length])
        with pytest.raises(DataError, match=r"cut\.onnx"):
            open_embedder(tmp_path / "cut.onnx", device=CPU)
    (tmp_path / "text.onnx").write_text("hello")
    with pytest.raises(DataError, match=r"text\.onnx"):
        open_embedder(tmp_path / "text.onnx", device=CPU)


@pytest.mark.parametrize("shape", [["N", 3, 64, 32], [2, 3, 64, 32], ["N", 64, 32, 3]])
def test_a_model_of_oblong_images_takes_them_as_height_and_width(shape: list[Any], tmp_path: Path) -> None:
    axes = (1, 2) if shape[-1] == 3 else (2, 3)
    embedder = open_embedder(pooling(tmp_path / "m.onnx", shape=shape, axes=axes), device=CPU)
    assert embedder.image_size == (64, 32)
    images = torch.randint(0, 256, (3, 3, 64, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(embedder(images), normalised_mean(images), rtol=0, atol=1e-5)
    with pytest.raises(UsageError, match=r"takes uint8 images \(B, 3, 64, 32\)"):
        embedder(images.transpose(2, 3))


def test_metadata_state_the_normalisation_and_lies_are_refused(tmp_path: Path) -> None:
    path = pooling(tmp_path / "m.onnx", shape=["N", 3, "H", "W"])
    model = onnx.load(str(path))
    helper.set_model_props(model, {"plsc.mean": "100.0", "plsc.std": "10.0", "plsc.image_size": "48"})
    onnx.save(model, str(path))
    images = pictures(2, 48)
    expected = ((images.float() - 100) / 10).mean(dim=(2, 3))
    torch.testing.assert_close(open_embedder(path, device=CPU)(images), expected, rtol=1e-5, atol=1e-4)
    for mean, std in (("abc", "1"), ("0", "0"), ("0", "nan"), ("inf", "1")):
        helper.set_model_props(model, {"plsc.mean": mean, "plsc.std": std})
        onnx.save(model, str(path))
        with pytest.raises(DataError, match="mean or std"):
            open_embedder(path, device=CPU)


@pytest.mark.parametrize("dims", [[2], [-1, -1], [0], [3, 1]])
def test_a_constant_of_another_shape_than_its_bytes_is_one_line(dims: list[int], tmp_path: Path) -> None:
    nodes = [helper.make_node("Mul", ["x", "c"], ["m"]), helper.make_node("ReduceMean", ["m"], ["y"], axes=[2, 3])]
    constants = {"c": np.float32([0.5])}
    path = write(tmp_path / "m.onnx", nodes, shape=["N", 3, 32, 32], constants=constants)
    model = onnx.load(str(path))
    model.graph.initializer[0].dims[:] = dims
    onnx.save(model, str(path))
    with pytest.raises(DataError, match=r"m\.onnx"):
        open_embedder(path, device=CPU)
