"""What a runtime is given of somebody's ONNX file: no inputs that it need not have, and weights that are numbers.

Onnxruntime demands every input that a file declares, used or not, and takes one that an initializer fills for a default
that a caller may replace, whose layers it does not join. It dequantises weights again at every run: it keeps
DequantizeLinear for products of integers, which there are only where values are quantised too.

Numbers are those of ONNX's definition, (x - zero point) * scale in float32, the same on every machine.
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

DEQUANTIZE = "DequantizeLinear"
_QUANTIZING = ("QuantizeLinear", "DynamicQuantizeLinear")
_HELD_IR = 4  # of the file format: before, weights had to be inputs too
_MOST = 4096  # weights, each of which takes time: published models have some hundred
_GROWTH = 8  # bytes of weights for a byte of the file: float32 of 4 bits …
_LARGEST = (1 << 31) - (1 << 20)  # … and of a file: protobuf has no larger ones


def drop_spare_inputs(model: Any) -> bool:
    """Take inputs that initializers fill, and those that no node uses, off an ``onnx.ModelProto``; True if any went.

    An input that is alone stays, whatever uses it.
    """
    graph = model.graph
    held = {tensor.name for tensor in graph.initializer} | {each.values.name for each in graph.sparse_initializer}
    inputs = [value for value in graph.input if value.name not in held]
    if len(inputs) > 1:
        used = {*_used(graph)}
        inputs = [value for value in inputs if value.name in used]
    if len(inputs) == len(graph.input):
        return False
    del graph.input[:]
    graph.input.extend(inputs)
    model.ir_version = max(model.ir_version, _HELD_IR)
    return True


def _used(graph: Any) -> Iterator[str]:
    """The names that a graph's nodes take or its outputs are, those of the graphs inside it included."""
    yield from (value.name for value in graph.output)
    for node in graph.node:
        yield from node.input
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else ()), *attribute.graphs):
                yield from _used(inner)


def with_numbers(model: Any, size: int) -> Any:
    """Dequantise the weights of an ``onnx.ModelProto`` that was read from ``size`` bytes.

    Returns:
        A copy; the model itself where it has no such weights, or computes in integers. Weights that are malformed, and
        those beyond eight bytes for each of the file, stay as they are.
    """
    kinds = {node.op_type for node in model.graph.node}
    if DEQUANTIZE not in kinds or kinds.intersection(_QUANTIZING):
        return model
    folded = type(model)()
    folded.CopyFrom(model)
    _fold(folded.graph, min(_GROWTH * size, _LARGEST - size))
    return folded


def _fold(graph: Any, room: int) -> None:
    """Replace nodes that dequantise constants by their numbers, of up to ``room`` bytes."""
    from onnx import numpy_helper

    constants = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant" and node.output and node.attribute and node.attribute[0].name == "value":
            constants[node.output[0]] = node.attribute[0].t
    numbers: dict[str, np.ndarray] = {}
    for node in graph.node:
        if len(numbers) < _MOST and _takes(node, constants):
            needed = 4 * math.prod(constants[node.input[0]].dims)
            if needed <= room and (found := _dequantised(node, constants)) is not None:
                numbers[node.output[0]] = found
                room -= needed
    kept = [node for node in graph.node if node.op_type != DEQUANTIZE or not numbers.keys() & node.output]
    del graph.node[:]
    graph.node.extend(kept)
    used = {*_used(graph)}
    held = [tensor for tensor in graph.initializer if tensor.name in used]
    del graph.initializer[:]
    graph.initializer.extend(held)
    graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in numbers.items())


def _takes(node: Any, constants: dict[str, Any]) -> bool:
    """Whether a node dequantises constants, and nothing else."""
    whole = node.op_type == DEQUANTIZE and len(node.output) == 1 and len(node.input) >= 2 and all(node.input[:2])
    return whole and all(name in constants for name in node.input if name)


def _dequantised(node: Any, constants: dict[str, Any]) -> np.ndarray | None:
    """What a DequantizeLinear makes of constants; None where they have shapes or types that it does not take."""
    from onnx import helper, numpy_helper

    about = {attribute.name: attribute.i for attribute in node.attribute}
    try:
        values, scale, *zero = (numpy_helper.to_array(constants[name]) for name in node.input if name)
        if any(np.iscomplexobj(array) for array in (values, scale, *zero)):
            return None
        kind = about.get("output_dtype") or constants[node.input[1]].data_type
        scales, *zeros = (_spread(each, values.shape, about) for each in (scale, *zero))
        with np.errstate(all="ignore"):
            difference = values.astype(np.float32)
            for each in zeros:
                difference -= each
            result: np.ndarray = (difference * scales).astype(helper.tensor_dtype_to_np_dtype(kind))
            return result
    except (ValueError, TypeError, IndexError, KeyError):
        return None


def _spread(numbers: np.ndarray, shape: tuple[int, ...], about: dict[str, int]) -> np.ndarray:
    """Scales or zero points as float32 that broadcast to ``shape``: one, one for each along an axis, or for blocks."""
    numbers = numbers.astype(np.float32)
    if numbers.size == 1 and numbers.ndim < 2:
        return numbers.reshape(())
    axis = range(len(shape))[about.get("axis", 1)]
    side = shape[axis]
    block = min(about.get("block_size", 0), side)
    expected = (side,) if block <= 0 else (*shape[:axis], -(-side // block), *shape[axis + 1 :])
    if numbers.shape != expected:
        raise ValueError("other blocks")
    if block > 0:
        return np.repeat(numbers, block, axis).take(range(side), axis)
    return numbers.reshape([side if place == axis else 1 for place in range(len(shape))])
