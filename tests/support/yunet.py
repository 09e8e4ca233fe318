"""A stand-in for YuNet: an ONNX model of 128x128 pixels with its twelve outputs that "sees" colours.

It scores cells of stride 8 by red, of 16 by green, of 32 by blue; being an object has the score 0.81 everywhere.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from onnx import helper

from support.scrfd import STRIDES, write_model

OBJECT = 0.81


def write_yunet(path: Path, *, box: Sequence[float], points: Any) -> Path:
    """Write the model. ``box`` (4,) and ``points`` (5, 2) are what it answers in each cell."""
    constants = {
        "column": np.array([1, -1, 1]),
        "scale": np.float32(1 / 255),
        "zero": np.float32(0),
        "object": np.float32(OBJECT),
        "box": np.array([[box]], np.float32),
        "points": np.asarray(points, np.float32).reshape(1, 1, 10),
    }
    nodes = [helper.make_node("Split", ["x"], ["c32", "c16", "c8"], axis=1)]  # blue, green, red
    for stride in STRIDES:
        nodes += [
            helper.make_node(
                "AveragePool", [f"c{stride}"], [f"p{stride}"], kernel_shape=[stride] * 2, strides=[stride] * 2
            ),
            helper.make_node("Reshape", [f"p{stride}", "column"], [f"q{stride}"]),
            helper.make_node("Mul", [f"q{stride}", "scale"], [f"cls_{stride}"]),
            helper.make_node("Mul", [f"q{stride}", "zero"], [f"n{stride}"]),
            helper.make_node("Add", [f"n{stride}", "object"], [f"obj_{stride}"]),
            helper.make_node("Add", [f"n{stride}", "box"], [f"bbox_{stride}"]),
            helper.make_node("Add", [f"n{stride}", "points"], [f"kps_{stride}"]),
        ]
    outputs = [f"{kind}_{stride}" for kind in ("cls", "obj", "bbox", "kps") for stride in STRIDES]
    return write_model(path, nodes, (1, 3, 128, 128), outputs, constants)
