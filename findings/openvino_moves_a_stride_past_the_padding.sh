#!/usr/bin/env bash
# openvino 2026.4.1: behind a ReLU or a convolution, a 1×1 convolution with stride and padding reads other pixels. Its
# output may have another size than the model itself states.
#
# Expected: in float32 OpenVINO gives what the definition of Conv gives, to rounding. An optimisation may
# change speed, and never which pixels are read.
# Seen: 8×8 pixels, ReLU, Conv 1×1 with stride 2, against sums written out in numpy. Without padding: equal to 1e-7.
# With one pixel of padding at the top and left the output is 5×5, which is right. It is off by 0.79 of its largest
# value. With padding all around it is 6×6 for 5×5, though read_model states 5×5 for the same file. If the file ends in
# a global average, the shape is right, and the numbers are off by 0.23 and 0.46 of the largest.
# Behind a 3×3 convolution, a batch normalisation or an addition it is so, too, by up to 3.1. Behind PRelu, or first
# in the file, all is right. With a free height and width it is right each time.
# Why: a 1×1 kernel skips pixels, so its stride is moved up and done earlier, on fewer pixels. The padding stays behind,
# and is then added after the stride: 0, x[0], x[2], x[4], … for 0, x[1], x[3], …. Nothing asks whether there is any.
# The pass leaves files alone whose height or width is free.
# Consequence: a downsampling layer Conv2d(c, d, 1, stride=2, padding=1) in a network that ends in a pooling gives other
# embeddings, without an error or a warning. Free the sides by model.reshape, as is shown here, or write the padding
# into a 3×3 kernel that is zero but for its middle.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet openvino==2026.4.1 onnx==1.23.2 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" -W ignore - 2> stderr <<'PY' || { cat stderr; exit 1; }
import numpy as np
import onnx
import openvino
from onnx import TensorProto, helper, numpy_helper

rng = np.random.default_rng(0)
core = openvino.Core()
CHANNELS = 4
point = rng.normal(size=(CHANNELS, CHANNELS, 1, 1)).astype(np.float32)
square = rng.normal(size=(CHANNELS, CHANNELS, 3, 3)).astype(np.float32)
slopes = rng.normal(size=(CHANNELS, 1, 1)).astype(np.float32)
factors = rng.uniform(0.5, 2, CHANNELS).astype(np.float32)
shifts = rng.normal(size=CHANNELS).astype(np.float32)
zeros, ones = np.zeros(CHANNELS, np.float32), np.ones(CHANNELS, np.float32)


def convolved(x, weight, stride, pads):
    """Cross-correlation as the operator Conv defines it, in float64."""
    top, left, bottom, right = pads
    x = np.pad(x.astype(np.float64), ((0, 0), (0, 0), (top, bottom), (left, right)))
    high, wide = weight.shape[2:]
    height, width = ((side - kernel) // stride + 1 for side, kernel in zip(x.shape[2:], (high, wide)))
    y = np.zeros((len(x), len(weight), height, width))
    for i in range(height):
        for j in range(width):
            window = x[:, :, i * stride : i * stride + high, j * stride : j * stride + wide]
            y[:, :, i, j] = np.einsum("bchw,dchw->bd", window, weight)
    return y


# What stands before the convolution: nodes, and the same in numpy.
node = helper.make_node
BEFORE = {
    "nothing": ([], lambda x: x),
    "Relu": ([node("Relu", ["x"], ["p"])], lambda x: np.maximum(x, 0)),
    "Conv 3×3": ([node("Conv", ["x", "square"], ["p"], pads=[1] * 4)], lambda x: convolved(x, square, 1, [1] * 4)),
    "BatchNormalization": (
        [node("BatchNormalization", ["x", "factors", "shifts", "zeros", "ones"], ["p"], epsilon=0.0)],
        lambda x: x * factors[:, None, None] + shifts[:, None, None],
    ),
    "Add": ([node("Add", ["x", "x"], ["p"])], lambda x: x + x),
    "PRelu": ([node("PRelu", ["x", "slopes"], ["p"])], lambda x: np.where(x < 0, slopes * x, x)),
}
CONSTANTS = {"square": square, "slopes": slopes, "factors": factors, "shifts": shifts, "zeros": zeros, "ones": ones}


def file(before, pads, size, pooled, kernel):
    nodes = list(BEFORE[before][0])
    nodes += [node("Conv", ["p" if nodes else "x", "w"], ["c" if pooled else "y"], strides=[2, 2], pads=pads)]
    if pooled:
        nodes += [node("GlobalAveragePool", ["c"], ["y"])]
    used = {name for each in nodes for name in each.input}
    held = {"w": kernel, **{name: array for name, array in CONSTANTS.items() if name in used}}
    graph = helper.make_graph(
        nodes,
        "downsampling",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, CHANNELS, size, size])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["b", "d", "h", "w"])],
        [numpy_helper.from_array(array, name) for name, array in held.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    return model.SerializeToString()


def run(content, x, free=False):
    """The output, and the shape that the model states before it is compiled."""
    model = core.read_model(content)
    stated = tuple(model.output(0).shape)
    if free:
        model.reshape([2, CHANNELS, -1, -1])
    return core.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})([x])[0], stated


def error(found, wanted):
    return np.abs(found - wanted).max() / np.abs(wanted).max() if found.shape == wanted.shape else np.inf


middle = np.zeros_like(square)
middle[:, :, 1:2, 1:2] = point
for size in (8, 7):
    x = rng.normal(size=(2, CHANNELS, size, size)).astype(np.float32)
    for before, (_, computed) in BEFORE.items():
        for pads in ([0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]):
            wanted = convolved(computed(x), point, 2, pads)
            found, stated = run(file(before, pads, size, False, point), x)
            mean = wanted.mean((2, 3), keepdims=True)
            pooled, _ = run(file(before, pads, size, True, point), x)
            free, _ = run(file(before, pads, size, False, point), x, free=True)
            wider, _ = run(file(before, [pad + 1 for pad in pads], size, False, middle), x)
            print(
                f"{size}×{size}, {before}, pads {pads}: {found.shape[2]}×{found.shape[3]} for "
                f"{wanted.shape[2]}×{wanted.shape[3]}, error {error(found, wanted):.1e}, "
                f"of the average {error(pooled, mean):.1e}, with free sides {error(free, wanted):.1e}"
            )
            wrong = any(pads) and before not in ("nothing", "PRelu")
            assert stated == wanted.shape, "changed: the stated shape"
            assert max(error(free, wanted), error(wider, wanted)) < 1e-5, "changed: free sides, or a 3×3 kernel"
            assert error(found, wanted) > 0.1 if wrong else error(found, wanted) < 1e-5, "changed"
            assert error(pooled, mean) > 0.1 if wrong else error(pooled, mean) < 1e-5, "changed: the average"
print("as described")
PY
