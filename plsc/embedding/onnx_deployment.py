"""ONNX graphs for deployment: the preprocessing inside, computed in float16, or quantised to int8.

int8 is onnxruntime's static quantisation: pairs of QuantizeLinear and DequantizeLinear (QDQ), weights per channel,
ranges of values between the smallest and the largest that the user's own pictures give. The first and the last layer,
and what stands before and after them, stay in float32: they have few of the products, and lose most. So do
normalisations, whose numbers for each channel onnxruntime would round by one scale for all of them, and Gemm with a
factor: that of onnxruntime 1.32 (quantize_static) divides the bias by beta, which Gemm multiplies by it.
"""

import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from plsc.embedding.onnx_model import graph_values
from plsc.errors import UsageError
from plsc.models.preprocessing import Preprocessing

FP32, FP16, INT8 = "fp32", "fp16", "int8"
LAYERS = ("Conv", "Gemm", "MatMul")  # operators with weights
NORMALISATIONS: tuple[str, ...] = ("BatchNormalization", "InstanceNormalization", "LayerNormalization")
PIXELS = "preprocessing_pixels"
# Operators, what they take of the preprocessing, with which value they do nothing, and what their result is called.
ARITHMETIC = (("Sub", "mean", 0.0, "preprocessing_difference"), ("Div", "std", 1.0, "preprocessing_values"))


@dataclass(frozen=True)
class OnnxForm:
    """What an ONNX file is to be.

    Attributes:
        precision: "fp32", "fp16" or "int8".
        with_preprocessing: it takes uint8 (B, H, W, 3) RGB and normalises them; else float32 (B, 3, H, W), normalised.
        calibration: batches of pictures uint8 (B, 3, H, W), whose values give int8 its ranges.
    """

    precision: str = FP32
    with_preprocessing: bool = False
    calibration: Iterable[Tensor] = ()


def in_precision(model: Any, form: OnnxForm, preprocessing: Preprocessing) -> Any:
    """Compute an ``onnx.ModelProto`` of float32 in the form's precision; inputs and outputs stay float32.

    Raises:
        UsageError: there is nothing to calibrate int8 on, or no layer for it between the first and the last.
    """
    if form.precision == FP16:
        return _halved(model)
    return _quantised(model, form.calibration, preprocessing) if form.precision == INT8 else model


def _halved(model: Any) -> Any:
    from onnxruntime.quantization.onnx_model import ONNXModel
    from onnxruntime.transformers.float16 import convert_float_to_float16

    graph = ONNXModel(convert_float_to_float16(model, keep_io_types=True))
    graph.topological_sort()  # its conversions of input and output stand last
    return graph.model


def _quantised(model: Any, batches: Iterable[Tensor], preprocessing: Preprocessing) -> Any:
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static

    name = model.graph.input[0].name

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self, values: Iterator[np.ndarray]) -> None:
            self.values = values

        def get_next(self) -> dict[str, np.ndarray] | None:
            values = next(self.values, None)
            return None if values is None else {name: values}

    batches = iter(batches)
    first = next(batches, None)
    if first is None:
        raise UsageError("int8 takes pictures to calibrate on: give some")
    names = [node.name for node in model.graph.node]
    layers = [place for place, node in enumerate(model.graph.node) if node.op_type in LAYERS]
    if len(layers) < 3:
        raise UsageError("int8 leaves the first and the last layer in float32, and the model has none between them")
    floating = [node.name for node in model.graph.node if node.op_type in NORMALISATIONS or _has_factor(node)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "quantised.onnx"
        quantize_static(
            model,
            path,
            Reader(preprocessing(images).numpy() for part in ([first], batches) for images in part),
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            nodes_to_exclude=[*names[: layers[0] + 1], *floating, *names[layers[-1] :]],
        )
        return onnx.load(str(path))


def _has_factor(node: Any) -> bool:
    return node.op_type == "Gemm" and any(each.name in ("alpha", "beta") and each.f != 1 for each in node.attribute)


def put_preprocessing_inside(model: Any, preprocessing: Preprocessing) -> None:
    """Change the input of an ``onnx.ModelProto`` to uint8 (B, H, W, 3) RGB; it computes (x - mean)/std itself.

    A model that normalises its input itself, for which mean is 0 and std 1, gets the pixels as floats.
    """
    from onnx import TensorProto, helper

    graph = model.graph
    (given,) = graph.input
    name, batch = given.name, graph_values(graph.input)[0].shape[0]
    steps, constants = _preprocessing_steps(name, preprocessing)
    for node in graph.node:
        for place, value in enumerate(node.input):
            if value == name:
                node.input[place] = steps[-1].output[0]
    graph.initializer.extend(constants)
    nodes = [*steps, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)
    channels, height, width = preprocessing.shape
    given.CopyFrom(helper.make_tensor_value_info(name, TensorProto.UINT8, [batch, height, width, channels]))


def _preprocessing_steps(given: str, preprocessing: Preprocessing) -> tuple[list[Any], list[Any]]:
    """Nodes that make normalised floats (B, 3, H, W) of ``given``, the last of them at the end, and their constants."""
    from onnx import TensorProto, helper, numpy_helper

    steps = [
        helper.make_node("Transpose", [given], ["preprocessing_channels"], perm=[0, 3, 1, 2]),
        helper.make_node("Cast", ["preprocessing_channels"], [PIXELS], to=TensorProto.FLOAT),
    ]
    constants = []
    for operator, key, neutral, result in ARITHMETIC:
        numbers = np.asarray(getattr(preprocessing, key), dtype=np.float32)
        if (numbers != neutral).any():
            constant = numbers.reshape(-1, 1, 1) if numbers.ndim else numbers
            constants.append(numpy_helper.from_array(constant, f"preprocessing_{key}"))
            steps.append(helper.make_node(operator, [steps[-1].output[0], constants[-1].name], [result]))
    for node in steps:
        node.name = f"preprocessing_{node.op_type}"
    return steps, constants
