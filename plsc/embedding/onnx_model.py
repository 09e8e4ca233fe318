"""ONNX files that somebody else wrote: read, and refused where no trial could tell what they take.

A file can be wrong in many ways; each becomes a :class:`DataError` of one line. A trial of a graph
(:mod:`plsc.models.trial`) tells what its runs will take only if no size in it depends on the values of the pictures,
but on their shape alone: 540 bytes can make a constant as large as the largest pixel says, and try two black pictures
for nothing. :func:`size_fault` proves that: values are followed from the input through every operator. What they reach
may be computed with, but may decide no size, and no branch. Shapes are no values: the output of ``Shape`` depends on
nothing but sizes.
"""

import os
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from plsc.embedding.onnx_folding import drop_spare_inputs, with_numbers
from plsc.errors import DataError, first_line

LOOPS = ("Loop", "Scan", "SequenceMap")
LOOPS_ALLOWED = "PLSC_ONNX_LOOPS"  # of the environment: 1 lets models have them, and sizes that values decide

INPUT_TYPES: dict[str, Any] = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(double)": np.float64,
    "tensor(uint8)": np.uint8,
}

# Inputs of ONNX's operators (all versions) that decide the sizes of their outputs, or how many of them are computed.
# None: all inputs.
_SIZING: dict[str, tuple[int, ...] | None] = {
    **dict.fromkeys(("ConstantOfShape", "HannWindow", "HammingWindow", "BlackmanWindow"), (0,)),
    **dict.fromkeys(("NonZero", "Unique", "If", "ImageDecoder", "StringSplit", "TfIdfVectorizer"), (0,)),
    **dict.fromkeys(("Range", "NonMaxSuppression", "MelWeightMatrix", "Loop", "Scan", "SequenceMap"), None),
    **dict.fromkeys(("Expand", "Reshape", "OneHot", "TopK", "Split", "SplitToSequence", "Compress"), (1,)),
    **dict.fromkeys(("Squeeze", "Unsqueeze", "CenterCropPad", "AffineGrid", "SequenceAt", "SequenceErase"), (1,)),
    **dict.fromkeys(("Tile", "Upsample", "Col2Im", "DFT"), (1, 2)),
    **dict.fromkeys(("Slice", "Resize", "Pad"), (1, 2, 3, 4)),
    **dict.fromkeys(("MaxUnpool", "SequenceInsert"), (2,)),
    "STFT": (1, 3),
}
_REDUCTION = re.compile(r"Reduce\w+")  # along axes that later versions take as an input
_RANDOM = re.compile(r"Random\w+|Multinomial|Bernoulli|Dropout")  # their values are no constants
# Of onnxruntime's own operators: those of quantised and fused models, whose sizes are their inputs'.
_FUSED = re.compile(
    r"(QLinear|Fused|Nhwc|Dynamic|MatMul|Quantize|Dequantize|Skip|Bias|Fast|Quick)\w+"
    r"|Q(Gemm|Attention)|Attention|MultiHeadAttention|(Simplified)?LayerNormalization|Gelu|GroupNorm"
)
_ONNX, _RUNTIME = ("", "ai.onnx"), "com.microsoft"


@dataclass(frozen=True)
class GraphValue:
    """An input or output of a graph: its name, its type as onnxruntime writes it, and its dimensions, None: free."""

    name: str
    type: str
    shape: list[int | str | None]


def graph_values(values: Iterable[Any]) -> list[GraphValue]:
    """What an ``onnx.ModelProto`` says of inputs or outputs."""
    from onnx import TensorProto

    described = []
    for value in values:
        tensor = value.type.tensor_type
        shape = [dim.dim_value if dim.dim_value > 0 else dim.dim_param or None for dim in tensor.shape.dim]
        known = tensor.elem_type in TensorProto.DataType.values()  # those of later versions have no name here
        kind = TensorProto.DataType.Name(tensor.elem_type).lower() if known else tensor.elem_type
        described.append(GraphValue(value.name, f"tensor({kind})", shape))
    return described


def load_graph(path: Path, content: bytes, *, trusted: bool) -> tuple[Any, bytes]:
    """Parse a file.

    Args:
        path: for messages.
        content: of the file.
        trusted: it may have loops, and sizes that the pictures' values decide.

    Returns:
        Its ``onnx.ModelProto`` without spare inputs, and the content of a file that computes the same, for a runtime:
        without them, and with numbers for dequantised weights (:mod:`plsc.embedding.onnx_folding`).

    Raises:
        DataError: it is cut, no ONNX file, holds no graph, has its weights in other files, or what ``trusted`` allows.
    """
    import onnx

    try:
        model = onnx.load_from_string(content)
    except Exception as error:  # protobuf's errors
        raise DataError(f"{path} is truncated, or no ONNX file: {first_line(error)}") from None
    if not model.graph.node:
        raise DataError(f"{path} is truncated, or no ONNX file: it holds no graph")
    for fault in _faults(model, trusted=trusted or os.environ.get(LOOPS_ALLOWED) == "1"):
        raise DataError(f"{path} {fault}")
    dropped = drop_spare_inputs(model)
    runnable = with_numbers(model, len(content))
    return model, runnable.SerializeToString() if dropped or runnable is not model else content


def _faults(model: Any, *, trusted: bool) -> Iterator[str]:
    """What no trial could find: a loop may end on one picture and not on the next; a path may lead anywhere."""
    from onnx import TensorProto

    mend = f"set {LOOPS_ALLOWED}=1 where you trust its maker"
    for graph in (model.graph, *model.functions):
        for message in _messages(graph):
            kind = type(message).__name__
            if kind == "NodeProto" and message.op_type in LOOPS and not trusted:
                yield f"has a {message.op_type}, which may never end; {mend}"
            if kind == "TensorProto" and message.data_location == TensorProto.EXTERNAL:
                yield "has weights in other files; save it as one file (torch.onnx.export: external_data=False)"
    if not trusted and (fault := size_fault(model)):
        yield f"{fault}; {mend}"


def _messages(message: Any) -> Iterator[Any]:
    """Yield a protobuf message and all that it holds; protobuf itself limits the depth to 100."""
    yield message
    for field, value in message.ListFields():
        if field.message_type is not None:
            for inner in [value] if hasattr(value, "ListFields") else value:
                yield from _messages(inner)


def size_fault(model: Any) -> str | None:
    """What in the ``onnx.ModelProto`` decides a size by values, in words; None if the proof holds."""
    functions = {(function.domain, function.name) for function in model.functions}
    if any(domain in _ONNX for domain, _ in functions):
        return "gives an operator of ONNX another meaning"
    for function in model.functions:  # whatever they are given counts as values
        for fault in _Followed(function.node, (), functions).faults():
            return fault
    constants = {tensor.name for tensor in model.graph.initializer}
    constants |= {tensor.values.name for tensor in model.graph.sparse_initializer}
    for fault in _Followed(model.graph.node, constants, functions).faults():
        return fault
    return None


class _Followed:
    """The nodes of a graph, and the names of what depends on no values of the input: what is not known there, does."""

    def __init__(self, nodes: Any, free: Collection[str], functions: Collection[tuple[str, str]]) -> None:
        self._nodes, self._free, self._functions = nodes, {"", *free}, functions
        self._defined: set[str] = set()

    def faults(self) -> Iterator[str]:
        for node in self._nodes:
            yield from self._node_faults(node)
            self._define(node, self._is_free(node))

    def _node_faults(self, node: Any) -> Iterator[str]:
        kind = _operator(node)
        known = node.domain in _ONNX or (node.domain, node.op_type) in self._functions
        if not known and not (node.domain == _RUNTIME and _FUSED.fullmatch(kind)):
            yield f"has a {kind} of {node.domain}, of which nobody knows the sizes"
        for index in self._sizing(node):
            if index < len(node.input) and node.input[index] not in self._free:
                yield f"lets the pictures decide the size, or the branch, of a node {kind}"
        for attribute in node.attribute:
            for graph in (*([attribute.g] if attribute.HasField("g") else ()), *attribute.graphs):
                yield from self._inside(graph).faults()

    def _sizing(self, node: Any) -> Collection[int]:
        if node.domain not in _ONNX:
            return ()
        if _REDUCTION.fullmatch(_operator(node)):
            return (1,)
        sizing = _SIZING.get(_operator(node), ())
        return range(len(node.input)) if sizing is None else sizing

    def _is_free(self, node: Any) -> bool:
        """True if the outputs of ``node`` depend on no values of the input; those of functions count as if they did."""
        if node.domain not in _ONNX or _RANDOM.fullmatch(_operator(node)):
            return False
        if node.op_type in ("Shape", "Size"):
            return True
        has_graphs = any(attribute.HasField("g") or attribute.graphs for attribute in node.attribute)
        return not has_graphs and all(name in self._free for name in node.input)

    def _define(self, node: Any, free: bool) -> None:
        for name in filter(None, node.output):
            if free and name not in self._defined:
                self._free.add(name)
            else:  # a name that is given twice is of both
                self._free.discard(name)
            self._defined.add(name)

    def _inside(self, graph: Any) -> "_Followed":
        """The graph of a branch, which sees the names around it."""
        given = {value.name for value in graph.input}
        constants = {tensor.name for tensor in graph.initializer} - given
        return _Followed(graph.node, (self._free - given) | constants, self._functions)


def _operator(node: Any) -> str:
    return str(node.op_type)[:80]  # protobuf gives bytes where they are no UTF-8
