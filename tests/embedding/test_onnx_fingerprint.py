"""An ONNX model's fingerprint: what it computes counts, and nothing of how a tool has written it down."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from PIL import Image
from support.backbones import pictures

from plsc.embedding.embedder import open_embedder
from plsc.embedding.embedding_set import EmbeddingSet
from plsc.embedding.onnx_fingerprint import fingerprint, former_fingerprint
from plsc.embedding.set_writer import write_embedding_set
from plsc.models.preprocessing import contract_id
from plsc.tools.entry import main

CPU, FLOAT, SIZE = torch.device("cpu"), TensorProto.FLOAT, 16


def network() -> Any:
    """Two convolutions of one picture, whose difference is pooled; a branch and a function of its own besides."""
    random = np.random.default_rng(0)
    kernels = [numpy_helper.from_array(random.random((4, 3, 3, 3), np.float32), name) for name in ("one", "other")]
    two = numpy_helper.from_array(np.float32(2), "two")
    double = helper.make_function(
        "house", "Double", ["v"], ["w"], [helper.make_node("Add", ["v", "v"], ["w"])], [helper.make_opsetid("", 17)]
    )

    def branch(operator: str) -> Any:
        node = helper.make_node(operator, ["pooled", "two"], [f"of_{operator}"])
        return helper.make_graph([node], operator, [], [helper.make_tensor_value_info(f"of_{operator}", FLOAT, None)])

    nodes = [
        helper.make_node("Conv", ["x", "one"], ["a"], name="first", pads=[1, 1, 1, 1]),
        helper.make_node("Conv", ["x", "other"], ["b"], name="second", pads=[1, 1, 1, 1]),
        helper.make_node("Sub", ["a", "b"], ["difference"]),
        helper.make_node("GlobalAveragePool", ["difference"], ["means"]),
        helper.make_node("Double", ["means"], ["pooled"], domain="house"),
        helper.make_node("Constant", [], ["yes"], value=helper.make_tensor("", TensorProto.BOOL, [], [True])),
        helper.make_node("If", ["yes"], ["y"], then_branch=branch("Mul"), else_branch=branch("Div")),
    ]
    image = helper.make_tensor_value_info("x", FLOAT, ["N", 3, SIZE, SIZE])
    answer = helper.make_tensor_value_info("y", FLOAT, ["N", 4, 1, 1])
    graph = helper.make_graph(nodes, "network", [image], [answer], [*kernels, two])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("house", 1)]
    return helper.make_model(graph, opset_imports=opsets, functions=[double], ir_version=9)


def renamed(model: Any) -> None:
    def rename(graph: Any) -> None:
        for values in (graph.input, graph.output, graph.initializer):
            for value in values:
                value.name = f"v/{value.name}"
        for node in graph.node:
            node.name = f"n/{node.name}"
            node.input[:] = [f"v/{name}" for name in node.input]
            node.output[:] = [f"v/{name}" for name in node.output]
            for attribute in node.attribute:
                if attribute.HasField("g"):
                    rename(attribute.g)

    rename(model.graph)


def described(model: Any) -> None:
    model.doc_string = model.graph.doc_string = model.graph.name = model.producer_name = "of another tool"
    model.graph.node[0].doc_string = "a convolution"
    model.graph.initializer[0].doc_string = "weights"
    helper.set_model_props(model, {"author": "somebody"})


def in_another_order(model: Any) -> None:
    first, second = (type(node)() for node in model.graph.node[:2])
    first.CopyFrom(model.graph.node[0])
    second.CopyFrom(model.graph.node[1])
    model.graph.node[0].CopyFrom(second)
    model.graph.node[1].CopyFrom(first)
    tensors = [numpy_helper.from_array(numpy_helper.to_array(each), each.name) for each in model.graph.initializer]
    del model.graph.initializer[:]
    model.graph.initializer.extend(reversed(tensors))


def constants_in_nodes(model: Any) -> None:
    nodes = [helper.make_node("Constant", [], [each.name], value=each) for each in model.graph.initializer]
    del model.graph.initializer[:]
    nodes += model.graph.node
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def numbers_in_fields(model: Any) -> None:
    for tensor in model.graph.initializer:
        values = numpy_helper.to_array(tensor)
        tensor.CopyFrom(helper.make_tensor(tensor.name, FLOAT, values.shape, values.flatten()))
    node = next(node for node in model.graph.node if node.op_type == "Constant")
    node.attribute[0].t.CopyFrom(numpy_helper.from_array(np.array(True)))


def values_handed_on(model: Any) -> None:
    model.graph.node[2].input[0] = "again"
    model.graph.node.insert(2, helper.make_node("Identity", ["a"], ["again"]))
    model.graph.node.append(helper.make_node("Relu", ["a"], ["used by nobody"]))
    model.graph.initializer.append(numpy_helper.from_array(np.zeros(9), "spare"))
    model.graph.input.append(helper.make_tensor_value_info("one", FLOAT, [4, 3, 3, 3]))  # as old exporters list weights


@pytest.mark.parametrize(
    "write", [renamed, described, in_another_order, constants_in_nodes, numbers_in_fields, values_handed_on]
)
def test_a_model_that_is_written_anew_keeps_its_fingerprint(write: Callable[[Any], None]) -> None:
    model = network()
    write(model)
    onnx.checker.check_model(model)
    assert model != network()
    assert fingerprint(model) == fingerprint(network())


def _weight(model: Any) -> None:
    values = numpy_helper.to_array(model.graph.initializer[0]).copy()
    values[0, 0, 0, 0] = np.nextafter(values[0, 0, 0, 0], np.float32(2))
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(values, "one"))


def _shape(model: Any) -> None:
    model.graph.initializer[2].dims[:] = [1]


def _inside(model: Any) -> None:
    model.graph.node[6].attribute[0].g.node[0].op_type = "Add"


@pytest.mark.parametrize(
    "change",
    [
        _weight,
        _shape,
        _inside,
        lambda model: model.graph.node[0].attribute[0].ints.__setitem__(slice(None), [0, 0, 2, 2]),
        lambda model: model.graph.node[2].input.__setitem__(slice(None), ["b", "a"]),
        lambda model: model.graph.node[1].input.__setitem__(1, "one"),
        lambda model: setattr(model.graph.node[2], "op_type", "Add"),
        lambda model: setattr(model.graph.output[0], "name", "means"),
        lambda model: setattr(model.graph.input[0].type.tensor_type, "elem_type", TensorProto.DOUBLE),
        lambda model: setattr(model.opset_import[0], "version", 18),
        lambda model: setattr(model.functions[0].node[0], "op_type", "Mul"),
    ],
)
def test_what_computes_something_else_has_another_fingerprint(change: Callable[[Any], None]) -> None:
    model = network()
    change(model)
    assert fingerprint(model) != fingerprint(network())


def test_texts_and_spoilt_tensors_have_digests_of_their_own() -> None:
    def with_spare(tensor: Any) -> str:
        model = network()
        model.graph.initializer.append(tensor)
        model.graph.node[2].input[1] = tensor.name
        return fingerprint(model)

    words = ([b"a", b"b"], [b"a", b"b"], [b"ab", b""])
    texts = [helper.make_tensor("t", TensorProto.STRING, [2], each) for each in words]
    one, same, other = map(with_spare, texts)
    assert one == same != other
    spoilt = helper.make_tensor("t", FLOAT, [4], [1, 2, 3, 4])
    spoilt.dims[:] = [3]
    assert with_spare(spoilt) == with_spare(spoilt)


def test_a_deep_graph_needs_no_deep_stack() -> None:
    nodes = [helper.make_node("Relu", [f"v{place}"], [f"v{place + 1}"]) for place in range(3000)]
    values = [helper.make_tensor_value_info(name, FLOAT, [1]) for name in ("v0", "v3000")]
    prints = []
    for order in (nodes, nodes[::-1]):
        graph = helper.make_graph(order, "deep", values[:1], values[1:])
        prints.append(fingerprint(helper.make_model(graph)))
    assert prints[0] == prints[1]


def small(path: Path, weight: str = "w", **properties: str) -> Path:
    """A stranger's model: three numbers of a picture; its weight's name is as the tool likes."""
    nodes = [helper.make_node("Mul", ["x", weight], ["m"]), helper.make_node("GlobalAveragePool", ["m"], ["y"])]
    image = helper.make_tensor_value_info("x", FLOAT, ["N", 3, SIZE, SIZE])
    answer = helper.make_tensor_value_info("y", FLOAT, ["N", 3, 1, 1])
    tensor = numpy_helper.from_array(np.float32([[[1]], [[2]], [[3]]]), weight)
    graph = helper.make_graph(nodes, "small", [image], [answer], [tensor])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    helper.set_model_props(model, properties)
    onnx.save(model, str(path))
    return path


def test_a_renamed_file_is_the_same_model_to_every_gallery(tmp_path: Path) -> None:
    one = open_embedder(small(tmp_path / "one.onnx"), device=CPU)
    other = open_embedder(small(tmp_path / "other.onnx", "weight_7"), device=CPU)
    assert one.contract_id == other.contract_id
    assert one.former_ids != other.former_ids
    assert torch.equal(one(pictures(2, SIZE)), other(pictures(2, SIZE)))


def test_an_index_of_an_earlier_version_is_searched_still(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = small(tmp_path / "m.onnx")
    embedder = open_embedder(path, device=CPU)
    (former,) = embedder.former_ids
    assert former == contract_id(embedder.preprocessing, former_fingerprint(onnx.load(str(path))))
    rows = torch.nn.functional.normalize(embedder(pictures(4, SIZE))).numpy()
    for flip in ("", "+flip"):
        write_embedding_set(tmp_path / f"old{flip}", rows, contract_id=former + flip, keys=list("abcd"))
        words = f"index build {tmp_path}/old{flip} --kind exact --out {tmp_path}/idx{flip}"
        assert main(words.split()) == 0, capsys.readouterr()
    assert main(f"embed {path} --data avatars:2x2 --workers 0 --out {tmp_path}/new".split()) == 0
    assert EmbeddingSet(tmp_path / "new").contract_id == embedder.contract_id
    Image.fromarray(pictures(3, SIZE)[2].permute(1, 2, 0).numpy()).save(tmp_path / "third.png")
    for index, query in (
        ("idx", "new"),
        ("idx", f"third.png --model {path}"),
        ("idx+flip", f"third.png --model {path}"),
    ):
        words = f"index search {tmp_path}/{index} --query {tmp_path}/{query} --k 1 --overwrite --json {tmp_path}/found"
        assert main(words.split()) == 0, capsys.readouterr()
    (found,) = json.loads((tmp_path / "found").read_text())["queries"]
    assert found["matches"][0]["key"] == "c"


def test_an_export_of_an_earlier_version_keeps_the_id_that_it_states(tmp_path: Path) -> None:
    former = former_fingerprint(onnx.load(str(small(tmp_path / "m.onnx"))))
    stated = {"plsc.format": "plsc-onnx-1", "plsc.contract_id": "0123456789abcdef", "plsc.compatible_with": "f" * 16}
    embedder = open_embedder(small(tmp_path / "m.onnx", **stated, **{"plsc.fingerprint": former}), device=CPU)
    assert (embedder.contract_id, embedder.compatible_with, embedder.former_ids) == (
        "0123456789abcdef",
        ("f" * 16,),
        (),
    )
    embedder = open_embedder(small(tmp_path / "m.onnx", "v", **stated, **{"plsc.fingerprint": former}), device=CPU)
    assert embedder.contract_id != "0123456789abcdef"
    assert embedder.compatible_with == ()


def test_a_smaller_file_of_it_knows_the_earlier_id_too(tmp_path: Path) -> None:
    path, half = small(tmp_path / "m.onnx"), tmp_path / "half.onnx"
    assert main(f"export {path} --format onnx --precision fp16 --out {half}".split()) == 0
    whole, reduced = (open_embedder(each, device=CPU) for each in (path, half))
    assert (reduced.contract_id, reduced.former_ids) == (whole.contract_id, whole.former_ids)
