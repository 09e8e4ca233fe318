#!/usr/bin/env bash
# onnxruntime 1.32.0: quantize_static divides a Gemm's bias by the node's beta, where Gemm multiplies by it. The same
# QDQ file run without graph optimisation leaves the bias as it is.
#
# Guess before running: y = x·w + beta·b stays so to within the rounding of 8 bits, for both formats of the quantizer
# read beta. One file gives one answer, optimised or not.
# Seen: 16 features, 32 outputs, 8 bits. Errors are shares of the largest output, the factor of b is by least squares.
# beta 1: factor 1.00, error 0.01. beta 0.5: factor 2.00, error 0.31. beta 2: factor 0.50, error 0.28. So it is in
# the QOperator format, and in QDQ as it is run by default. QDQ with optimisation off has the factor 1.00 each time.
# Per channel or per tensor, pre-processed or not, makes no difference. The float file and quantize_dynamic are right.
# Why: the bias becomes integers by the scale s_x·s_w·beta, and nothing multiplies it by beta. In QDQ the node's beta is
# then set to 1, so that DequantizeLinear gives b itself. QGemm never sees that scale. It takes s_x·s_w: b/beta is left.
# Consequence: a head by torch.addmm(b, x, w, beta=0.5), which is exported as such a Gemm, gives other outputs than its
# float file, without a warning. Multiply beta into b in the float file first, as is shown here.
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
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_dynamic, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process

rng = np.random.default_rng(0)
inputs = rng.normal(size=(256, 16)).astype(np.float32)
weight = rng.normal(0, 0.3, (16, 32)).astype(np.float32)
bias = rng.normal(0, 0.5, 32).astype(np.float32)


class Reader(CalibrationDataReader):
    def __init__(self):
        self.batches = iter([{"x": inputs}])

    def get_next(self):
        return next(self.batches, None)


def save(name, beta, b):
    graph = helper.make_graph(
        [helper.make_node("Gemm", ["x", "w", "b"], ["y"], name="gemm", beta=beta)],
        "head",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 32])],
        [numpy_helper.from_array(weight, "w"), numpy_helper.from_array(b, "b")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, name)


def run(name, optimised=True):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    if not optimised:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(name, options, ["CPUExecutionProvider"]).run(None, {"x": inputs})[0]


def judged(found, beta):
    """The error as a share of the largest output, and the factor of the bias."""
    exact = inputs.astype(np.float64) @ weight
    wanted = exact + beta * bias
    factor = ((found - exact) * bias).sum() / (len(inputs) * np.square(bias, dtype=np.float64).sum())
    return np.abs(found - wanted).max() / np.abs(wanted).max(), factor


for beta in (1.0, 0.5, 2.0):
    save("float.onnx", beta, bias)
    save("folded.onnx", 1.0, np.float32(beta) * bias)
    quantize_dynamic("float.onnx", "dynamic.onnx")
    quant_pre_process("float.onnx", "prepared.onnx", skip_symbolic_shape=True)
    seen = {"float": judged(run("float.onnx"), beta), "dynamic": judged(run("dynamic.onnx"), beta)}
    for form in (QuantFormat.QOperator, QuantFormat.QDQ):
        for per_channel in (False, True):
            name = f"{form}{', per channel' if per_channel else ''}"
            how = {"quant_format": form, "per_channel": per_channel, "weight_type": QuantType.QInt8}
            quantize_static("float.onnx", "static.onnx", Reader(), **how)
            seen[name] = judged(run("static.onnx"), beta)
            seen[f"{name}, not optimised"] = judged(run("static.onnx", optimised=False), beta)
            quantize_static("prepared.onnx", "static.onnx", Reader(), **how)
            seen[f"{name}, pre-processed"] = judged(run("static.onnx"), beta)
            quantize_static("folded.onnx", "static.onnx", Reader(), **how)
            seen[f"{name}, beta in the bias"] = judged(run("static.onnx"), beta)
    for name, (error, factor) in seen.items():
        print(f"beta {beta}: {name}: error {error:.3f}, factor of the bias {factor:.2f}")
        wrong = "Q" in name and "beta in the bias" not in name
        expected = beta if not wrong else 1.0 if "QDQ" in name and "not optimised" in name else 1 / beta
        assert abs(factor - expected) < 0.05, f"changed: {name}, {factor}"
        assert (error > 0.05) == (wrong and beta != 1), f"changed: {name}, {error}"
print("as described")
PY
