#!/usr/bin/env bash
# onnx 1.23.2: its reference evaluator runs QuantizeLinear of opset 10 and 13, and DequantizeLinear from opset 19 on alone.
#
# Guess before running: ReferenceEvaluator runs what the checker accepts; both operators came with opset 10, so both run.
# Seen: QuantizeLinear gives its result at opsets 10, 13, 19 and 21. DequantizeLinear gives one at 19 and 21, and before
# "No implementation for operator 'DequantizeLinear' domain '' and version 13, found 19, 21, 23, 25, None."
# Consequence: files of onnxruntime's own quantizer, which are of opset 13 where the model was older, are valid and run
# everywhere, and cannot be judged by the standard's evaluator. Convert such a file to opset 19 first (onnx's
# version_converter does, as is shown here), or compute (x - zero_point) * scale by numpy.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet onnx==1.23.2 numpy==2.4.6
"$folder/venv/bin/python" - <<'PY'
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper, version_converter
from onnx.reference import ReferenceEvaluator

FLOATS, BYTES = TensorProto.FLOAT, TensorProto.UINT8
PIXELS = np.arange(4)


def model(operator, opset):
    takes, gives = (BYTES, FLOATS) if operator == "DequantizeLinear" else (FLOATS, BYTES)
    graph = helper.make_graph(
        [helper.make_node(operator, ["x", "scale", "zero"], ["y"])],
        operator,
        [helper.make_tensor_value_info("x", takes, [4])],
        [helper.make_tensor_value_info("y", gives, [4])],
        [numpy_helper.from_array(np.float32(0.5), "scale"), numpy_helper.from_array(np.uint8(2), "zero")],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    onnx.checker.check_model(made, full_check=True)
    return made


def run(made):
    kind = np.uint8 if made.graph.name == "DequantizeLinear" else np.float32
    try:
        return ReferenceEvaluator(made).run(None, {"x": PIXELS.astype(kind)})[0].tolist()
    except RuntimeError as error:
        return str(error)


found = {(name, opset): run(model(name, opset)) for name in ("QuantizeLinear", "DequantizeLinear") for opset in (10, 13, 19, 21)}
for key, value in found.items():
    print(*key, value)
assert all(found["QuantizeLinear", opset] == [2, 4, 6, 8] for opset in (10, 13, 19, 21))
assert all("No implementation" in found["DequantizeLinear", opset] for opset in (10, 13))
assert all(found["DequantizeLinear", opset] == [-1, -0.5, 0, 0.5] for opset in (19, 21))
assert run(version_converter.convert_version(model("DequantizeLinear", 13), 19)) == [-1, -0.5, 0, 0.5]
print("as described")
PY
