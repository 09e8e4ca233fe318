"""Proof that no size in an ONNX graph depends on the values of the pictures, but on their shape alone.

A trial of a graph tells what its runs will take only if that is so: 540 bytes can make a constant as large as the
largest pixel says, and try two black pictures for nothing. Values are followed from the input through every operator.
What they reach may be computed with, but may decide no size, and no branch. Shapes are no values: the output of
``Shape`` depends on nothing but sizes.
"""

import re
from collections.abc import Collection, Iterator
from typing import Any

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
