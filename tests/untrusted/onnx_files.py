"""ONNX models that were made to harm."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from untrusted.samples import EMBED, Case, Content, Samples, crafted

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


def model(nodes: list[Any], constants: dict[str, Any] | None = None, shape: tuple[Any, ...] = ("N", 3, 32, 32)) -> Any:
    """A model of one input x and one output y."""
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", FLOAT, shape)],
        [helper.make_tensor_value_info("y", FLOAT, None)],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in (constants or {}).items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def _node(kind: str, inputs: list[str], outputs: list[str], **attributes: Any) -> Any:
    return helper.make_node(kind, inputs, outputs, **attributes)


def pooling(*shape: Any) -> Any:
    """A sound model: the mean of each channel, of images of 32 pixels or of another shape."""
    return model([_mean("y")], shape=shape or ("N", 3, 32, 32))


def _mean(output: str) -> Any:
    return _node("ReduceMean", ["x"], [output], axes=[2, 3], keepdims=0)


def expanding(*sizes: int) -> Any:
    """A small file that asks for memory: a constant expanded to ``sizes``."""
    nodes = [_node("Expand", ["one", "sizes"], ["e"]), *_added("e")]
    return model(nodes, {"one": np.float32(1), "sizes": np.array(sizes, dtype=np.int64)})


def _input_dependent_expansion() -> Any:
    """As much, but not foldable: the number of rows is computed from the input."""
    nodes = [
        _node("ReduceMax", ["x"], ["m"], keepdims=0),
        _node("Mul", ["m", "zero"], ["z"]),
        _node("Add", ["z", "many"], ["f"]),
        _node("Cast", ["f"], ["i"], to=INT64),
        _node("Reshape", ["i", "column"], ["sizes"]),
        _node("Expand", ["one", "sizes"], ["e"]),
        *_added("e"),
    ]
    constants = {"zero": np.float32(0), "many": np.float32(1 << 30), "one": np.float32(1), "column": np.array([-1])}
    return model(nodes, constants)


def _pixels_size() -> list[Any]:
    """Nodes that make of the largest pixel a size, which is small of black pictures."""
    return [
        _node("ReduceMax", ["x"], ["m"], keepdims=0),
        _node("Mul", ["m", "many"], ["f"]),
        _node("Cast", ["f"], ["i"], to=INT64),
        _node("Max", ["i", "least"], ["j"]),
        _node("Reshape", ["j", "column"], ["sizes"]),
    ]


def _pixels_constant() -> Any:
    nodes = [*_pixels_size(), _node("ConstantOfShape", ["sizes"], ["e"]), *_added("e")]
    return model(nodes, {"many": np.float32(1 << 30), "least": np.int64(1), "column": np.array([-1])})


def _pixels_tiles() -> Any:
    """The same, by another operator, in a function."""
    made = _pixels_constant()
    body = [_node("Tile", ["a", "n"], ["b"])]
    opset = [helper.make_opsetid("", 17)]
    made.functions.append(helper.make_function("own", "repeated", ["a", "n"], ["b"], body, opset_imports=opset))
    made.opset_import.append(helper.make_opsetid("own", 1))
    made.graph.node[5].CopyFrom(_node("repeated", ["column", "sizes"], ["e8"], domain="own"))
    made.graph.node.insert(6, _node("Cast", ["e8"], ["e"], to=FLOAT))
    return made


def _branching() -> Any:
    """A branch of 4 GiB that black pictures do not take."""
    branches = {}
    for name, sides in (("else_branch", 1), ("then_branch", 1 << 30)):
        sizes = numpy_helper.from_array(np.array([sides]), "s")
        output = helper.make_tensor_value_info("o", FLOAT, None)
        nodes = [_node("ConstantOfShape", ["s"], ["o"])]
        branches[name] = helper.make_graph(nodes, name, [], [output], [sizes])
    nodes = [_node("ReduceMax", ["x"], ["m"], keepdims=0), _node("Greater", ["m", "limit"], ["c"])]
    nodes += [_node("If", ["c"], ["e"], **branches), *_added("e")]
    return model(nodes, {"limit": np.float32(0.5)})


def _added(name: str) -> list[Any]:
    """Nodes that add the mean of ``name`` to the mean of each channel."""
    nodes = [_node("ReduceMean", [name], ["s"], keepdims=0)]
    nodes += [_mean("p"), _node("Add", ["p", "s"], ["y"])]
    return nodes


def growing() -> Any:
    """A model whose memory grows with the fourth power of the batch: 4 numbers of 1 picture, 52 million of 60."""
    nodes = [_node("Shape", ["x"], ["shape"]), _node("Gather", ["shape", "first"], ["batch"])]
    nodes += [_node("Concat", ["batch"] * 4 + ["four"], ["sizes"], axis=0), _node("Expand", ["one", "sizes"], ["e"])]
    return model([*nodes, *_added("e")], {"first": np.array([0]), "four": np.array([4]), "one": np.float32(1)})


def endless() -> Any:
    """A Loop that never ends."""
    body = helper.make_graph(
        [_node("Identity", ["c"], ["c2"]), _node("Identity", ["v"], ["v2"])],
        "b",
        [helper.make_tensor_value_info(*value) for value in (("i", INT64, []), ("c", BOOL, []), ("v", FLOAT, None))],
        [helper.make_tensor_value_info(*value) for value in (("c2", BOOL, []), ("v2", FLOAT, None))],
    )
    nodes = [
        _mean("p"),
        _node("Loop", ["", "true", "p"], ["y"], body=body),
    ]
    return model(nodes, {"true": np.array(True)})


def _slow() -> Any:
    """A thousand products of 2000x2000 matrices, of a random one that no optimiser folds."""
    nodes = [_node("RandomNormal", [], ["a0"], shape=[2000, 2000], dtype=1)]
    nodes += [_node("MatMul", [f"a{n}", "a0"], [f"a{n + 1}"]) for n in range(1000)]
    return model([*nodes, *_added("a1000")])


def _functions(levels: int) -> Any:
    """Functions that each call the one before twice: 2^levels nodes when they are put in place."""
    made = pooling()
    opset = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    made.functions.append(
        helper.make_function("own", "f0", ["a"], ["b"], [_node("Add", ["a", "a"], ["b"])], opset_imports=opset)
    )
    for level in range(1, levels):
        calls = [
            _node(f"f{level - 1}", ["a"], ["m"], domain="own"),
            _node(f"f{level - 1}", ["m"], ["b"], domain="own"),
        ]
        made.functions.append(helper.make_function("own", f"f{level}", ["a"], ["b"], calls, opset_imports=opset))
    made.opset_import.append(helper.make_opsetid("own", 1))
    made.graph.node.append(_node(f"f{levels - 1}", ["y"], ["z"], domain="own"))
    made.graph.output[0].name = "z"
    return made


def _external(location: str, before: Callable[[Path], object] = lambda folder: None, length: int = 12) -> Case:
    def make(folder: Path, samples: Samples) -> list[str]:
        made = model([_mean("p"), _node("Add", ["p", "w"], ["y"])])
        tensor = TensorProto(name="w", data_type=FLOAT, dims=[3], data_location=TensorProto.EXTERNAL)
        for key, value in (("location", location), ("offset", "0"), ("length", str(length))):
            tensor.external_data.add(key=key, value=value)
        made.graph.initializer.append(tensor)
        before(folder)
        return crafted(EMBED, "crafted.onnx", made.SerializeToString())(folder, samples)

    return make


def _sparse(folder: Path) -> None:
    (folder / "weights").touch()
    os.truncate(folder / "weights", 4 << 30)


def _nested(levels: int) -> bytes:
    """A graph in an attribute of a node of a graph, and so on."""
    content = b""
    for _ in range(levels):
        for field in (b"\x32", b"\x2a", b"\x0a"):  # AttributeProto.g, NodeProto.attribute, GraphProto.node
            size, length = len(content), b""
            while size > 127:
                length, size = length + bytes([size & 127 | 128]), size >> 7
            content = field + length + bytes([size]) + content
    return b"\x08\x08\x3a" + bytes([len(content)]) + content if len(content) < 128 else b"\x08\x08" + content


def _wide_constant() -> Any:
    made = model([_mean("p"), _node("Add", ["p", "w"], ["y"])])
    made.graph.initializer.append(TensorProto(name="w", data_type=FLOAT, dims=[1 << 40], raw_data=b"abcd"))
    return made


def _read(words: str, made: Callable[[], Any] | bytes) -> Case:
    content: Content = made if isinstance(made, bytes) else lambda _: made().SerializeToString()
    return crafted(words, "crafted.onnx", content)


_embedded = partial(_read, EMBED)
_detecting = partial(_read, "data align avatars:2x2 --out {out}/out --detector onnx:{file}")


def _described(key: str, value: str) -> Any:
    made = pooling()
    for name, text in (("mean", "0"), ("std", "1"), (key, value)):
        made.metadata_props.add(key=f"plsc.{name}", value=text)
    return made


def _sized_by_metadata(value: str) -> Any:
    made = pooling("N", 3, "H", "W")
    made.metadata_props.add(key="plsc.image_size", value=value)
    return made


def _misnamed() -> bytes:
    content: bytes = pooling().SerializeToString()
    return content.replace(b"ReduceMean", b"ReduceMe\xffn")


CASES: dict[str, Case] = {
    "an empty file": _embedded(b""),
    "zeros": _embedded(bytes(1000)),
    "a length beyond the file": _embedded(b"\x08\x08\x3a\xff\xff\xff\x7f"),
    "a name that is no UTF-8": _embedded(_misnamed()),
    "graphs nested in graphs": _embedded(_nested(2000)),
    "400 million numbers from a constant": _embedded(lambda: expanding(400, 1000, 1000)),
    "400 million numbers from a constant, as a detector": _detecting(lambda: expanding(400, 1000, 1000)),
    "10^18 numbers from a constant": _embedded(lambda: expanding(10**6, 10**6, 10**6)),
    "2^30 numbers from the input": _embedded(_input_dependent_expansion),
    "a constant as large as the largest pixel says": _embedded(_pixels_constant),
    "tiles as many as the largest pixel says": _embedded(_pixels_tiles),
    "a branch that bright pictures take": _embedded(_branching),
    "a Loop that never ends": _embedded(endless),
    "a Loop that never ends, as a detector": _detecting(endless),
    "a thousand large products": _embedded(_slow),
    "functions that double": _embedded(lambda: _functions(40)),
    "a weight of 2^40 numbers in four bytes": _embedded(_wide_constant),
    "a batch of 2^31": _embedded(lambda: pooling(2**31, 3, 32, 32)),
    "images of 2^20 pixels a side": _embedded(lambda: pooling("N", 3, 2**20, 2**20)),
    "images of 2^40 pixels a side by metadata": _embedded(lambda: _sized_by_metadata(str(2**40))),
    "an operator that nobody has": _embedded(lambda: model([_node("Shell", ["x"], ["y"], domain="evil")])),
    "a mean nested deeply": _embedded(lambda: _described("mean", "[" * 100_000)),
    "a mean of 10^400": _embedded(lambda: _described("mean", "1" + "0" * 400)),
    "external data up": _external("../../../etc/passwd"),
    "external data by an absolute path": _external("/etc/passwd"),
    "external data through a link": _external("link", lambda folder: (folder / "link").symlink_to("/etc/passwd")),
    "external data from a pipe": _external("pipe", lambda folder: os.mkfifo(folder / "pipe")),
    "external data of 4 GiB of nothing": _external("weights", _sparse, length=4 << 30),
    "external data longer than the file": _external(
        "weights", lambda folder: (folder / "weights").write_bytes(b"x"), length=1 << 50
    ),
}
