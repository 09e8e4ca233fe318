#!/usr/bin/env bash
# pnnx 20261020 with ncnn 1.0.20261020: ReduceMean, ReduceSum, ReduceL1 and ReduceL2 of an ONNX file lose their axis
# where it is one, and an input of the node. ncnn then reduces nothing.
#
# Expected: operator set 18 made the axes of a reduction an input, where they were an attribute. The
# numbers are the same, so the converted networks are, too.
# Seen: 8×8 pixels, a 3×3 convolution of six channels, a reduction along one axis of four, in float32, against numpy.
# With operator set 17 all is right, but for ReduceSum, whose axes are an input since 13. With 18 each of the four
# operators, along each of the axes 1, 2 and 3, gives back 6×8×8 numbers, as many as went in. Along two axes all is
# right. c - mean over the channels is 0 at each pixel. c / (L2 norm over the channels) is the sign of c, 1 or -1. Both
# have the right shape. pnnx ends with 0, and ncnn loads the files.
# Why: the written layer has an empty list of axes where the other has one number. Empty is not "all" there. How it came
# to be empty was not traced. A constant of one element may be read as a number there, and not as a list.
# Consequence: PyTorch's exporter writes operator set 18 or later by default. Centring, attention by a mean over
# channels and normalised feature maps are wrong without an error. The loss on the phone is blamed on float16. Export
# with axes as an attribute (operator set 17), as is shown here, and compare one picture with the ONNX file.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet onnx==1.23.2 numpy==2.4.6
"$folder/venv/bin/pip" install --quiet --no-deps pnnx==20261020 ncnn==1.0.20261020
cd "$folder"
"$folder/venv/bin/python" -W ignore - 2> stderr <<'PY' || { cat stderr; exit 1; }
import importlib.metadata
import subprocess
from pathlib import Path

import ncnn
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

(program,) = (str(each.locate()) for each in importlib.metadata.files("pnnx") if str(each) == "pnnx/pnnx")
rng = np.random.default_rng(0)
picture = rng.normal(size=(1, 4, 8, 8)).astype(np.float32)
weight = rng.normal(0, 0.4, (6, 4, 3, 3)).astype(np.float32)
padded = np.pad(picture.astype(np.float64), ((0, 0), (0, 0), (1, 1), (1, 1)))
windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))
c = np.einsum("bchwij,dcij->bdhw", windows, weight)
REDUCTIONS = {
    "ReduceMean": lambda x, axes: x.mean(axes, keepdims=True),
    "ReduceSum": lambda x, axes: x.sum(axes, keepdims=True),
    "ReduceL1": lambda x, axes: np.abs(x).sum(axes, keepdims=True),
    "ReduceL2": lambda x, axes: np.sqrt(np.square(x).sum(axes, keepdims=True)),
}


def run(operator, axes, opset, last=None):
    """What ncnn gives for a reduction of a convolution, or for ``last``, which takes both."""
    held = {"w": weight}
    inputs, about = ["c"], {"keepdims": 1}
    if opset >= 18 or operator == "ReduceSum":
        held["axes"] = np.array(axes, np.int64)
        inputs.append("axes")
    else:
        about["axes"] = axes
    layout = {"kernel_shape": [3, 3], "strides": [1, 1], "dilations": [1, 1], "group": 1, "pads": [1] * 4}
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], **layout),
        helper.make_node(operator, inputs, ["r" if last else "y"], **about),
    ]
    if last:
        nodes.append(helper.make_node(last, ["c", "r"], ["y"]))
    shape = [1, 6, 8, 8] if last else [1 if axis in axes else side for axis, side in enumerate((1, 6, 8, 8))]
    graph = helper.make_graph(
        nodes,
        "reduction",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, picture.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        [numpy_helper.from_array(array, name) for name, array in held.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    for old in Path().glob("m.*"):
        old.unlink()
    onnx.save(model, "m.onnx")
    subprocess.run([program, "m.onnx", "inputshape=[1,4,8,8]", "fp16=0"], check=True, capture_output=True)
    net = ncnn.Net()
    net.opt.use_vulkan_compute, net.opt.num_threads = False, 1
    net.opt.use_fp16_packed = net.opt.use_fp16_storage = net.opt.use_fp16_arithmetic = False
    net.opt.use_bf16_storage = False
    assert net.load_param("m.ncnn.param") == 0 and net.load_model("m.ncnn.bin") == 0
    extractor = net.create_extractor()
    extractor.input("in0", ncnn.Mat(picture[0]).clone())
    code, found = extractor.extract("out0")
    assert code == 0
    return np.array(found)


def agrees(found, wanted):
    return found.size == wanted.size and np.abs(found.ravel() - wanted.ravel()).max() < 1e-4 * np.abs(wanted).max()


for operator, computed in REDUCTIONS.items():
    for axes in ([1], [2], [3], [2, 3]):
        wanted = computed(c, tuple(axes))
        for opset in (17, 18):
            found = run(operator, axes, opset)
            right = agrees(found, wanted)
            sizes = f"{found.size} numbers for {wanted.size}"
            print(f"{operator}, axes {axes}, operator set {opset}: {sizes}, right {right}")
            as_input = opset == 18 or operator == "ReduceSum"
            assert right == (len(axes) == 2 or not as_input), "changed"
            assert right or found.size == c.size, "changed: it reduces something"

for opset in (17, 18):
    centred, scaled = run("ReduceMean", [1], opset, "Sub"), run("ReduceL2", [1], opset, "Div")
    right = agrees(centred, c - REDUCTIONS["ReduceMean"](c, 1)), agrees(scaled, c / REDUCTIONS["ReduceL2"](c, 1))
    print(
        f"operator set {opset}: centred right {right[0]}, largest {np.abs(centred).max():.3f}; normalised right "
        f"{right[1]}, equal to the sign {agrees(scaled, np.sign(c))}; shapes {centred.shape}, {scaled.shape}"
    )
    assert right == ((True, True) if opset == 17 else (False, False)), "changed"
    if opset == 18:
        assert not centred.any() and agrees(scaled, np.sign(c)), "changed: not zeros and signs"
print("as described")
PY
