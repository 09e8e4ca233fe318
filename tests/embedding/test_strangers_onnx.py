"""Twenty ONNX files as strangers write them: onnx's reference evaluator says what each computes of the same pixels."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from support.backbones import pictures
from support.scrfd import POINTS
from support.yunet import write_yunet

from plsc.embedding.detector import open_detector
from plsc.embedding.embedder import EmbeddingModel, open_embedder
from plsc.embedding.export import reduce_onnx
from plsc.embedding.onnx_deployment import OnnxForm
from plsc.embedding.onnx_fingerprint import fingerprint
from plsc.embedding.onnx_folding import with_numbers
from plsc.embedding.onnx_source import open_source
from plsc.errors import DataError

CPU, FLOAT = torch.device("cpu"), TensorProto.FLOAT
SIDE, WIDTH, DIM = 16, 8, 6
RANDOM = np.random.default_rng(0)
WEIGHTS = {
    "w": RANDOM.normal(0, 0.2, (WIDTH, 3, 3, 3)).astype(np.float32),
    "b": RANDOM.normal(0, 0.2, WIDTH).astype(np.float32),
    "p": RANDOM.normal(0, 0.2, (DIM, WIDTH, 1, 1)).astype(np.float32),
}


def value(name: str, shape: Any, kind: int = FLOAT) -> Any:
    return helper.make_tensor_value_info(name, kind, shape)


def body(given: str = "x") -> list[Any]:
    """A convolution, a pool over the picture, and a 1x1 convolution: (B, D, 1, 1)."""
    return [
        helper.make_node("Conv", [given, "w", "b"], ["c"], pads=[1] * 4, strides=[2, 2]),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("GlobalAveragePool", ["r"], ["g"]),
        helper.make_node("Conv", ["g", "p"], ["y"]),
    ]


def model(
    nodes: list[Any] | None = None,
    *,
    opset: int = 17,
    shape: Any = ("N", 3, SIDE, SIDE),
    spare: Any = (),
    weights: dict[str, np.ndarray] | None = None,
    listed: bool = False,
    ir: int = 8,
    dtype: int = FLOAT,
) -> Any:
    """A model; ``spare`` are inputs beside x; ``listed`` declares all weights as inputs, too."""
    held = WEIGHTS if weights is None else weights
    tensors = [numpy_helper.from_array(array, name) for name, array in held.items()]
    more = [value(tensor.name, tensor.dims, tensor.data_type) for tensor in tensors if listed]
    inputs = [value("x", shape, dtype), *(value(name, [2, 2]) for name in spare), *more]
    graph = helper.make_graph(nodes or body(), "g", inputs, [value("y", None)], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir)


def quantised(scale: np.ndarray, zero: np.ndarray | None, opset: int, stored: Any = np.int8, **about: int) -> Any:
    """Weights of the first layer as integers (8, 27), which a DequantizeLinear and a Reshape bring back."""
    kept = {name: array for name, array in WEIGHTS.items() if name != "w"}
    low, high = np.iinfo(stored).min, np.iinfo(stored).max
    kept |= {"q": np.random.default_rng(1).integers(low, high, (WIDTH, 27), dtype=stored, endpoint=True), "s": scale}
    kept |= {} if zero is None else {"z": zero}
    kept["shape"] = np.array([WIDTH, 3, 3, 3])
    takes = ["q", "s", *([] if zero is None else ["z"])]
    nodes = [helper.make_node("DequantizeLinear", takes, ["d"], **about)]
    nodes += [helper.make_node("Reshape", ["d", "shape"], ["w"]), *body()]
    return model(nodes, opset=opset, weights=kept)


def scales(*shape: int) -> np.ndarray:
    return np.random.default_rng(2).uniform(1e-3, 3e-3, shape).astype(np.float32)


def zeros(*shape: int, stored: Any = np.int8) -> np.ndarray:
    return np.random.default_rng(3).integers(0, 20, shape).astype(stored)


def in_constants() -> Any:
    """The quantised weights as nodes, not as initializers, and opset 13."""
    made = quantised(scales(WIDTH), zeros(WIDTH), 13, axis=0)
    tensors = {tensor.name: tensor for tensor in made.graph.initializer}
    nodes = [helper.make_node("Constant", [], [name], value=tensors[name]) for name in ("q", "s", "z")]
    rest = [tensor for name, tensor in tensors.items() if name not in ("q", "s", "z")]
    whole = helper.make_graph([*nodes, *made.graph.node], "g", list(made.graph.input), list(made.graph.output), rest)
    return helper.make_model(whole, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


def in_branches() -> Any:
    """A branch that takes an outer input alone: size is what Size says of it, so both inputs are needed."""
    branches = {
        name: helper.make_graph([helper.make_node(kind, ["x"], ["o"])], name, [], [value("o", None)])
        for name, kind in (("then_branch", "Identity"), ("else_branch", "Neg"))
    }
    return model([helper.make_node("If", ["yes"], ["v"], **branches), *body("v")], weights=WEIGHTS | {"yes": np.True_})


def last_channels() -> Any:
    nodes = [helper.make_node("Transpose", ["x"], ["t"], perm=[0, 3, 1, 2]), *body("t")]
    return model(nodes, shape=("N", SIDE, SIDE, 3))


def integers() -> Any:
    """Pictures and weights are quantised: a layer of integers, which stays one."""
    kept = {name: array for name, array in WEIGHTS.items() if name != "w"}
    kept |= {"q": np.random.default_rng(1).integers(-127, 127, (WIDTH, 3, 3, 3), dtype=np.int8)}
    kept |= {"s": scales(WIDTH), "xs": np.float32(1 / 127), "xz": np.int8(0), "z": np.zeros(WIDTH, np.int8)}
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "xs", "xz"], ["xq"]),
        helper.make_node("DequantizeLinear", ["xq", "xs", "xz"], ["xd"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["w"], axis=0),
    ]
    return model([*nodes, *body("xd")], weights=kept)


def int4(stored: int) -> Any:
    """Two weights in a byte."""
    made = quantised(scales(WIDTH, 7), None, 21, axis=1, block_size=4)
    (tensor,) = (each for each in made.graph.initializer if each.name == "q")
    numbers = np.random.default_rng(4).integers(0, 7, (WIDTH, 27), endpoint=True)
    tensor.CopyFrom(helper.make_tensor("q", stored, numbers.shape, numbers))
    made.ir_version = 10
    return made


FILES: dict[str, Callable[[], Any]] = {
    "opset 9, weights among the inputs": lambda: model(opset=9, listed=True, ir=3),
    "opset 11, weights among the inputs, whose defaults a caller may replace": lambda: model(opset=11, listed=True),
    "opset 13, a spare input": lambda: model(opset=13, spare=["mask"]),
    "opset 18, thirty spare inputs and listed weights": lambda: model(
        opset=18, spare=[f"spare{i}" for i in range(30)], listed=True
    ),
    "opset 21, fixed batch": lambda: model(opset=21, shape=(1, 3, SIDE, SIDE), spare=["mask"]),
    "a batch of four": lambda: model(shape=(4, 3, SIDE, SIDE)),
    "channels last": last_channels,
    "free sides of an exporter that names none": lambda: model(shape=(None, 3, SIDE, None)),
    "branches that take the picture": in_branches,
    "a scale for all": lambda: quantised(np.float32(0.01), np.int8(3), 10),
    "a scale for all, of one element, no zero point": lambda: quantised(np.float32([0.01]), None, 13),
    "a scale for each row": lambda: quantised(scales(WIDTH), zeros(WIDTH), 13, axis=0),
    "a scale for each column of bytes, from the end": lambda: quantised(
        scales(27), zeros(27, stored=np.uint8), 19, np.uint8, axis=-1
    ),
    "constants as nodes": in_constants,
    "blocks of nine": lambda: quantised(scales(WIDTH, 3), zeros(WIDTH, 3), 21, axis=1, block_size=9),
    "blocks of which the last is short": lambda: quantised(scales(WIDTH, 4), zeros(WIDTH, 4), 21, axis=1, block_size=8),
    "blocks longer than the row": lambda: quantised(scales(WIDTH, 1), None, 21, axis=1, block_size=64),
    "blocks of rows": lambda: quantised(scales(4, 27), zeros(4, 27), 21, axis=0, block_size=2),
    "blocks of 16 bits": lambda: quantised(
        scales(WIDTH, 3) / 200, zeros(WIDTH, 3, stored=np.int16), 21, np.int16, axis=1, block_size=9
    ),
    "blocks of four bits": lambda: int4(TensorProto.INT4),
    "blocks of four bits without sign": lambda: int4(TensorProto.UINT4),
    "pictures are quantised too": integers,
}


def written(made: Any, folder: Path) -> Path:
    onnx.save(made, str(folder / "m.onnx"))
    return folder / "m.onnx"


def judge(made: Any) -> ReferenceEvaluator:
    """onnx's evaluator, which has DequantizeLinear from opset 19 on: what it did before is part of that."""
    model = onnx.ModelProto.FromString(made.SerializeToString())
    if any(node.op_type == "DequantizeLinear" for node in model.graph.node):
        model.opset_import[0].version = max(model.opset_import[0].version, 19)
    return ReferenceEvaluator(model)


def reference(made: Any, images: torch.Tensor) -> np.ndarray:
    """What the file makes of the pixels, which plsc normalises by its defaults, in batches of the file's own size."""
    pixels = ((images.float() - 127.5) / 127.5).numpy()
    shape = made.graph.input[0].type.tensor_type.shape.dim
    pixels = pixels.transpose(0, 2, 3, 1) if shape[3].dim_value == 3 else pixels
    inputs = [each.name for each in made.graph.input[1:]]
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in made.graph.initializer}
    fed = {name: weights.get(name, np.zeros((2, 2), np.float32)) for name in inputs}
    step = shape[0].dim_value or len(pixels)
    evaluator = judge(made)
    rows = [evaluator.run(None, {**fed, "x": pixels[i : i + step]})[0] for i in range(0, len(pixels), step)]
    return np.concatenate(rows).reshape(len(images), -1)


def test_there_are_twenty() -> None:
    assert len(FILES) >= 20


@pytest.mark.parametrize("name", FILES)
def test_a_strangers_file_gives_the_embeddings_that_onnx_defines(name: str, tmp_path: Path) -> None:
    made = FILES[name]()
    images = pictures(4, SIDE)
    embedder = open_embedder(written(made, tmp_path), device=CPU)
    assert (embedder.image_size, embedder.embedding_dim) == (SIDE, DIM)
    step = {"rtol": 1e-4, "atol": 2e-3 if name.startswith("pictures are") else 1e-4}  # a level of a quantised pixel
    torch.testing.assert_close(embedder(images), torch.from_numpy(reference(made, images)), **step)
    torch.testing.assert_close(embedder(images[:3]), embedder(images)[:3])


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith(("a scale", "constants", "blocks"))])
def test_weights_are_dequantised_once_to_the_very_bits(name: str) -> None:
    made = FILES[name]()
    folded = with_numbers(made, made.ByteSize())
    assert "DequantizeLinear" not in [node.op_type for node in folded.graph.node]
    assert "DequantizeLinear" in [node.op_type for node in made.graph.node]
    assert not {"q", "s", "z"} & {tensor.name for tensor in folded.graph.initializer}
    (found,) = (numpy_helper.to_array(tensor) for tensor in folded.graph.initializer if tensor.name == "d")
    del made.graph.output[:]
    made.graph.output.append(value("d", [WIDTH, 27]))
    expected = judge(made).run(None, {"x": np.zeros((1, 3, SIDE, SIDE), np.float32)})[0]
    assert found.dtype == np.float32
    assert found.tobytes() == expected.tobytes()
    assert found.std() > 0


def test_half_precision_scales_give_half_precision_weights() -> None:
    made = quantised(scales(WIDTH).astype(np.float16), None, 19, axis=0)
    (found,) = (
        numpy_helper.to_array(tensor) for tensor in with_numbers(made, 1 << 20).graph.initializer if tensor.name == "d"
    )
    numbers = {tensor.name: numpy_helper.to_array(tensor) for tensor in made.graph.initializer}
    exact = numbers["q"].astype(np.float64) * numbers["s"].astype(np.float64)[:, None]
    assert found.tobytes() == exact.astype(np.float16).tobytes()


@pytest.mark.parametrize(
    ("scale", "about"),
    [
        (scales(WIDTH, 3), {"axis": 1, "block_size": 8}),  # four blocks
        (scales(WIDTH), {"axis": 1}),  # 27 columns
        (scales(WIDTH), {"axis": 5}),
        (scales(1, 1 << 20), {"axis": 0}),  # which would broadcast to 2^20 times as many
        (scales(WIDTH, 3), {"axis": 1, "block_size": -9}),
    ],
)
def test_weights_of_other_shapes_stay_and_the_file_is_refused_in_one_line(scale: Any, about: Any, tmp_path: Path):
    made = quantised(scale, None, 21, **about)
    assert with_numbers(made, 1 << 30).graph.node[0].op_type == "DequantizeLinear"
    with pytest.raises(DataError, match=r"m\.onnx") as caught:
        open_embedder(written(made, tmp_path), device=CPU)
    assert "\n" not in str(caught.value)


def test_weights_beyond_eight_bytes_for_each_of_the_file_stay() -> None:
    made = quantised(np.float32(0.01), None, 13)
    again = [helper.make_node("DequantizeLinear", ["q", "s"], [f"d{i}"]) for i in range(100)]
    made.graph.node.extend([*again, *(helper.make_node("Neg", [f"d{i}"], [f"n{i}"]) for i in range(100))])
    folded = with_numbers(made, made.ByteSize())
    numbers = [tensor for tensor in folded.graph.initializer if tensor.name.startswith("d")]
    assert 0 < 4 * WIDTH * 27 * len(numbers) <= 8 * made.ByteSize()
    assert sum(node.op_type == "DequantizeLinear" for node in folded.graph.node) == 101 - len(numbers)


def test_nodes_that_are_malformed_and_texts_stay() -> None:
    made = quantised(np.float32(0.01), None, 13)
    texts = helper.make_tensor("texts", TensorProto.STRING, [1], [b"a"])
    made.graph.initializer.extend([texts, numpy_helper.from_array(np.complex64([1j]), "complex")])
    for takes in (
        [],
        ["q"],
        ["", "s"],
        ["texts", "s"],
        ["q", "texts"],
        ["complex", "s"],
        ["q", "complex"],
        ["q", "none"],
    ):
        made.graph.node.append(helper.make_node("DequantizeLinear", takes, ["v"]))
    made.graph.node.extend(
        [
            helper.make_node("DequantizeLinear", ["q", "s"], []),
            helper.make_node("Constant", [], [], value=texts),
            helper.make_node("DequantizeLinear", ["q", "s"], ["v"], output_dtype=99),
        ]
    )
    folded = with_numbers(made, 1 << 20)
    assert sum(node.op_type == "DequantizeLinear" for node in folded.graph.node) == 10


def test_integers_stay_integers() -> None:
    made = integers()
    assert with_numbers(made, made.ByteSize()) is made


def test_the_id_is_that_of_the_same_graph_without_spare_inputs_and_of_its_quantised_weights(tmp_path: Path) -> None:
    def opened(made: Any) -> EmbeddingModel:
        return open_embedder(written(made, tmp_path), device=CPU)

    ids = {opened(made).contract_id for made in (model(), model(listed=True), model(spare=["a", "b"]))}
    assert len(ids) == 1
    rounded = quantised(scales(WIDTH), None, 13, axis=0)
    other = with_numbers(rounded, 1 << 20)
    assert fingerprint(other) != fingerprint(rounded)
    assert opened(rounded).contract_id != opened(other).contract_id


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: model([helper.make_node("Add", ["x", "mask"], ["v"]), *body("v")], spare=["mask"]), r"\(x, mask\)"),
        (lambda: model([helper.make_node("Identity", ["b"], ["y"])]), "no embedding"),
    ],
)
def test_what_needs_two_inputs_or_none_is_refused_in_one_line(made: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message) as caught:
        open_embedder(written(made(), tmp_path), device=CPU)
    assert "\n" not in str(caught.value)


def test_an_input_that_only_a_branch_takes_is_an_input(tmp_path: Path) -> None:
    made = in_branches()
    made.graph.input.insert(1, value("mask", ["N", 3, SIDE, SIDE]))
    made.graph.node[0].attribute[0].g.node[0].input[0] = "mask"
    with pytest.raises(DataError, match=r"has 2 inputs \(x, mask\)"):
        open_embedder(written(made, tmp_path), device=CPU)


def test_a_detector_may_have_spare_inputs(tmp_path: Path) -> None:
    write_yunet(tmp_path / "y.onnx", box=(0.5, 0.25, 1.4, 0.7), points=POINTS)
    made = onnx.load(str(tmp_path / "y.onnx"))
    picture = torch.zeros(3, 128, 128, dtype=torch.uint8)
    picture[0, 32:40, 80:88] = 255
    before = open_detector(f"onnx:{tmp_path / 'y.onnx'}").faces(picture)
    made.graph.input.append(value("mask", [2]))
    after = open_detector(f"onnx:{written(made, tmp_path)}").faces(picture)
    assert len(before) == len(after) >= 1
    np.testing.assert_array_equal(before[0].landmarks, after[0].landmarks)


def test_quantised_weights_are_exported_as_numbers_under_the_same_id(tmp_path: Path) -> None:
    made = quantised(scales(WIDTH, 3), zeros(WIDTH, 3), 21, axis=1, block_size=9)
    source = open_source(written(made, tmp_path))
    reduce_onnx(source, tmp_path / "pixels.onnx", form=OnnxForm(with_preprocessing=True))
    images = pictures(2, SIDE)
    embedder, again = (open_embedder(tmp_path / name, device=CPU) for name in ("m.onnx", "pixels.onnx"))
    torch.testing.assert_close(again(images), embedder(images), rtol=1e-4, atol=1e-4)
    assert again.contract_id == embedder.contract_id
