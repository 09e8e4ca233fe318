#!/usr/bin/env bash
# onnxruntime 1.32.0: quantize_static with QuantFormat.QOperator leaves out a Relu or Clip whose input has another
# reader, or comes through Transpose, Split, Resize, Pad or MaxPool. Its negative values then pass.
#
# Expected: a Relu behind an operator in 8 bits may go where the output's zero point is its bound. Where its
# input keeps negative values, it stays. Both formats answer alike, to the rounding of 8 bits.
# Seen: unsigned 8 bits, per tensor and per channel, 16 pictures, ranges from the same 16. Errors are shares of the
# largest output, against numpy. Conv, Relu, Conv: 0.02 in both formats. If an Add also reads the first Conv's output:
# 0.02 in QDQ, 0.80 in QOperator. A Concat beside it: 0.02 and 1.00. Between Conv and Relu a Pad: 0.02 and 0.91, Resize
# 0.86, Transpose 0.78, Split 0.50, MaxPool 0.14. No Relu is left in these files. Run without graph optimisation they
# give the same.
# Why: the Relu's output gets the name, scale and zero point of its input. That is right only if the range of the input
# was set to that of the Relu's output before, whose lower end is zero. It is set where the Relu is the only reader, and
# for the tensor right before it. A Transpose and its like pass the scale of their own input on, which was not changed.
# A lower bound above zero goes in both formats, for a range always takes in zero: Clip(0.5, 0.9) lets 0 to 0.5 pass,
# error 0.74.
# Consequence: networks with a skip from before the activation, or a channel shuffle or an upsampling before it, lose
# accuracy without a warning. It looks like the price of 8 bits. Take QDQ, or name these nodes in nodes_to_exclude, as
# is shown here.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet onnxruntime==1.32.0 onnx==1.23.2 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" -W ignore - 2> stderr <<'PY' || { cat stderr; exit 1; }
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

rng = np.random.default_rng(0)
inputs = rng.normal(size=(16, 8, 6, 6)).astype(np.float32)
first, second = (rng.normal(0, 0.3, (8, 8, 3, 3)).astype(np.float32) for _ in range(2))


class Reader(CalibrationDataReader):
    def __init__(self):
        self.batches = iter([{"x": inputs}])

    def get_next(self):
        return next(self.batches, None)


def conv(x, weight):
    x = np.pad(x.astype(np.float64), ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(x, (3, 3), (2, 3))
    return np.einsum("bchwij,dcij->bdhw", windows, weight)


def relu(x):
    return np.maximum(x, 0)


def maxima(x):
    return x.reshape(16, 8, 3, 2, 3, 2).max((3, 5))


def twice(x):
    return x.repeat(2, 2).repeat(2, 3)


def padded(x):
    return np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))


node = helper.make_node
c = conv(inputs, first)
RELU, LAST = node("Relu", ["p"], ["r"], name="gate"), node("Conv", ["r", "second"], ["y"], name="last", pads=[1] * 4)
ADD, BESIDE = node("Add", ["z", "c"], ["y"], name="add"), node("Concat", ["r", "c"], ["y"], name="beside", axis=1)
FROM_C = node("Relu", ["c"], ["r"], name="gate")
TO_Z = node("Conv", ["r", "second"], ["z"], name="last", pads=[1] * 4)
# Nodes behind the first Conv, whose output is c, and what they compute.
CASES = {
    "Relu": ([FROM_C, LAST], conv(relu(c), second)),
    "Relu, and an Add of the Conv": ([FROM_C, TO_Z, ADD], conv(relu(c), second) + c),
    "Relu, and a Concat with the Conv": ([FROM_C, BESIDE], np.concatenate([relu(c), c], 1)),
    "Transpose, Relu": (
        [node("Transpose", ["c"], ["p"], name="between", perm=[0, 1, 3, 2]), RELU, LAST],
        conv(relu(c.transpose(0, 1, 3, 2)), second),
    ),
    "Resize, Relu": (
        [node("Resize", ["c", "", "scales"], ["p"], name="between", mode="nearest"), RELU, LAST],
        conv(relu(twice(c)), second),
    ),
    "Pad, Relu": ([node("Pad", ["c", "pads"], ["p"], name="between"), RELU, LAST], conv(relu(padded(c)), second)),
    "Split, Relu of a half": (
        [
            node("Split", ["c"], ["p", "q"], name="between", axis=1, num_outputs=2),
            node("Relu", ["p"], ["s"], name="gate"),
            node("Concat", ["s", "q"], ["r"], name="join", axis=1),
            LAST,
        ],
        conv(np.concatenate([relu(c[:, :4]), c[:, 4:]], 1), second),
    ),
    "MaxPool, Relu": (
        [node("MaxPool", ["c"], ["p"], name="between", kernel_shape=[2, 2], strides=[2, 2]), RELU, LAST],
        conv(relu(maxima(c)), second),
    ),
    "Clip(0.5, 0.9)": (
        [node("Clip", ["c", "low", "high"], ["r"], name="gate"), LAST],
        conv(c.clip(0.5, 0.9), second),
    ),
}
CONSTANTS = {
    "first": first,
    "second": second,
    "scales": np.array([1, 1, 2, 2], np.float32),
    "pads": np.array([0, 0, 1, 1, 0, 0, 1, 1], np.int64),
    "low": np.float32(0.5),
    "high": np.float32(0.9),
}


def save(nodes, channels):
    nodes = [node("Conv", ["x", "first"], ["c"], name="conv", pads=[1] * 4), *nodes]
    used = {name for each in nodes for name in each.input}
    graph = helper.make_graph(
        nodes,
        "block",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 8, 6, 6])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", channels, "h", "w"])],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in CONSTANTS.items() if name in used],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, "float.onnx")


def error(name, wanted, optimised=True):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    if not optimised:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(name, options, ["CPUExecutionProvider"])
    return np.abs(session.run(None, {"x": inputs})[0] - wanted).max() / np.abs(wanted).max()


def quantised(quant_format, per_channel, kept=()):
    about = {"quant_format": quant_format, "per_channel": per_channel, "nodes_to_exclude": list(kept)}
    quantize_static(
        "float.onnx", "int8.onnx", Reader(), activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8, **about
    )
    return "int8.onnx"


for case, (nodes, wanted) in CASES.items():
    save(nodes, wanted.shape[1])
    assert error("float.onnx", wanted) < 1e-5, "changed: the float file"
    for per_channel in (False, True):
        qdq = error(quantised(QuantFormat.QDQ, per_channel), wanted)
        name = quantised(QuantFormat.QOperator, per_channel)
        gates = [each.op_type for each in onnx.load(name).graph.node if each.op_type in ("Relu", "Clip")]
        found, plain = error(name, wanted), error(name, wanted, optimised=False)
        kept = error(quantised(QuantFormat.QOperator, per_channel, ["gate"]), wanted)
        print(
            f"{case}, {'per channel' if per_channel else 'per tensor'}: QDQ {qdq:.3f}, QOperator {found:.3f}, "
            f"not optimised {plain:.3f}, gates left {len(gates)}, with the gate excluded {kept:.3f}"
        )
        assert not gates and abs(found - plain) < 0.01 and kept < 0.04, f"changed: {case}"
        assert qdq > 0.3 if case.startswith("Clip") else qdq < 0.04, f"changed: {case}, QDQ"
        assert found < 0.04 if case == "Relu" else found > 0.07, f"changed: {case}, QOperator"
print("as described")
PY
