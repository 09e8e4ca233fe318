"""A stand-in for a face detector: an ONNX model with SCRFD's outputs that "sees" colours.

In each cell of stride 8 it scores by how red the cell is, at stride 16 by green, at stride 32 by blue. Boxes and
landmarks lie in a fixed figure around the cell's upper left corner, in strides: BOX = (left, top, right, bottom),
POINTS (5, 2).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

STRIDES = (8, 16, 32)
BOX = (1.0, 0.5, 1.5, 2.0)
POINTS = np.array([[-0.4, -0.2], [0.9, -0.1], [0.3, 0.5], [-0.3, 1.1], [0.8, 1.2]])


def stand_in(
    path: Path,
    *,
    shape: Sequence[Any] = (1, 3, "H", "W"),
    batch_axis: bool = False,
    order: Sequence[int] = range(9),
    names: Sequence[str] | None = None,
    box: Sequence[float] = BOX,
    points: Any = POINTS,
    only_small: bool = False,
) -> Path:
    """Write the model. ``order`` shuffles the outputs; ``only_small`` makes it blind to inputs above 240 pixels."""
    names = names or [f"{kind}_{stride}" for kind in ("score", "bbox", "kps") for stride in STRIDES]
    nodes, constants = (
        [],
        {
            "anchors": np.array([[1.0, 0.9]], np.float32),
            "column": np.array([-1, 1]),
            "zero": np.float32(0),
            "one": np.float32(1),
            "axis": np.array([0]),
            "hide": np.array([2]),
            "half": np.float32(120),
            "box": np.array([box], np.float32),
            "points": np.asarray(points, np.float32).reshape(1, -1),
        },
    )
    nodes += [
        helper.make_node("Split", ["x"], ["c0", "c1", "c2"], axis=1),
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Gather", ["shape", "hide"], ["rows"]),
        helper.make_node("Cast", ["rows"], ["height"], to=TensorProto.FLOAT),
        helper.make_node("Div", ["half", "height"], ["sight"]),
    ]
    for i, stride in enumerate(STRIDES):
        last = "_flat" if batch_axis else ""
        score, bbox, kps = (names[i + 3 * k] for k in range(3))
        nodes += [
            helper.make_node("AveragePool", [f"c{i}"], [f"p{i}"], kernel_shape=[stride] * 2, strides=[stride] * 2),
            helper.make_node("Reshape", [f"p{i}", "column"], [f"q{i}"]),
            helper.make_node("MatMul", [f"q{i}", "anchors"], [f"a{i}"]),
            helper.make_node("Mul", [f"a{i}", "sight" if only_small else "one"], [f"s{i}"]),
            helper.make_node("Clip", [f"s{i}", "zero", "one"], [f"t{i}"]),
            helper.make_node("Reshape", [f"t{i}", "column"], [score + last]),
            helper.make_node("Mul", [score + last, "zero"], [f"n{i}"]),
            helper.make_node("Add", [f"n{i}", "box"], [bbox + last]),
            helper.make_node("Add", [f"n{i}", "points"], [kps + last]),
        ]
        if batch_axis:
            nodes += [helper.make_node("Unsqueeze", [name + last, "axis"], [name]) for name in (score, bbox, kps)]
    return write_model(path, nodes, shape, [names[i] for i in order], constants)


def write_model(
    path: Path,
    nodes: Sequence[Any],
    shape: Sequence[Any],
    outputs: Sequence[str],
    constants: dict[str, Any] | None = None,
    *,
    inputs: Sequence[str] = ("x",),
    dtype: int = TensorProto.FLOAT,
    domain: str | None = None,
) -> Path:
    """Write an ONNX file whose ``inputs`` have one ``shape``."""
    weights = [numpy_helper.from_array(np.asarray(value), name) for name, value in (constants or {}).items()]
    answers = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    given = [helper.make_tensor_value_info(name, dtype, list(shape)) for name in inputs]
    opsets = [helper.make_opsetid("", 17)] + ([helper.make_opsetid(domain, 1)] if domain else [])
    graph = helper.make_graph(list(nodes), "g", given, answers, weights)
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), str(path))
    return path
