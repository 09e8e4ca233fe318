"""What tells one ONNX model from another: what its graph computes, and of which weights, whatever values are called.

Other tools write a graph anew. They rename values and nodes, put constants into nodes or out of them, sort the nodes in
another order, and drop what computes nothing. The embeddings are the same, so the fingerprint is. A value's digest is
taken of the operator that makes it, its attributes, and the digests of what it takes; a model's is that of its outputs.
"""

import hashlib
from collections import ChainMap
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from typing import Any

Known = MutableMapping[str, bytes]  # the digest of each value, by its name

_CONSTANTS = {"value_float": 1, "value_floats": 1, "value_int": 7, "value_ints": 7}  # the types of their tensors
_NOTHING = b""  # the digest of an input that is left out


def fingerprint(model: Any) -> str:
    """SHA-256 over what an ``onnx.ModelProto`` computes, and its weights: no names, order, descriptions or metadata."""
    return _Digests(model).of_model().hex()


def former_fingerprint(model: Any) -> str:
    """The fingerprint of earlier versions, over names and order too, which older galleries, sets and files state."""
    digest = hashlib.sha256()
    for tensor in sorted(model.graph.initializer, key=lambda tensor: str(tensor.name)):
        digest.update(tensor.SerializeToString(deterministic=True))
    for node in model.graph.node:
        digest.update(f"{node.op_type} {list(node.input)} {list(node.output)}\n".encode())
        for attribute in sorted(node.attribute, key=lambda attribute: str(attribute.name)):
            digest.update(attribute.SerializeToString(deterministic=True))
    return digest.hexdigest()


class _Digests:
    def __init__(self, model: Any) -> None:
        self._model = model
        self._versions = {_domain(opset.domain): opset.version for opset in model.opset_import}
        self._functions = {(_domain(function.domain), function.name): function for function in model.functions}
        self._of_functions: dict[tuple[str, str], bytes] = {}

    def of_model(self) -> bytes:
        return _hash("model", *self._of_graph(self._model.graph, {}, 0))

    def _of_graph(self, graph: Any, known: Known, depth: int) -> list[bytes]:
        """The digests of a graph's outputs; ``known`` holds those of the values around it."""
        for tensor in graph.initializer:
            known[tensor.name] = _tensor(tensor)
        for sparse in graph.sparse_initializer:
            known[sparse.values.name] = _value(sparse)
        held = {tensor.name for tensor in graph.initializer}
        for place, given in enumerate(given for given in graph.input if given.name not in held):
            known[given.name] = _hash("input", depth, place, given.type.tensor_type.elem_type)
        return self._of_values(graph.node, [value.name for value in graph.output], known, depth)

    def _of_values(self, nodes: Sequence[Any], names: Sequence[str], known: Known, depth: int) -> list[bytes]:
        """The digests of the values ``names``: a walk without recursion, for graphs are deep."""
        makers = {name: node for node in nodes for name in node.output if name}
        open_nodes: set[int] = set()
        waiting = list(names)
        while waiting:
            node = makers.get(waiting[-1])
            if waiting[-1] in known or node is None:
                waiting.pop()
                continue
            needed = [name for name in _taken(node) if name in makers and name not in known]
            if needed and id(node) not in open_nodes:
                open_nodes.add(id(node))
                waiting += needed
            else:  # all that it takes is known; or it takes its own result, as no runtime allows
                self._add(node, known, depth)
        return [known.get(name, _NOTHING) for name in names]

    def _add(self, node: Any, known: Known, depth: int) -> None:
        """Put the digests of a node's outputs into ``known``."""
        taken = _trimmed([known.get(name, _NOTHING) for name in node.input])
        results = _trimmed([name.encode() for name in node.output])
        if (same := self._passed_on(node, taken)) is not None:
            digests = [same]
        else:
            attributes = sorted((each.name, self._attribute(each, known, depth)) for each in node.attribute)
            parts = (part for attribute in attributes for part in attribute)
            whole = _hash(self._operator(node), len(taken), *taken, len(results), *parts)
            digests = [_hash("output", whole, place) for place in range(len(results))]
        known.update(zip(node.output, digests, strict=False))

    def _passed_on(self, node: Any, taken: list[bytes]) -> bytes | None:
        """The digest of what a node only hands on, or of the constant that it holds; None of a node that computes."""
        if _domain(node.domain):
            return None
        if node.op_type == "Constant" and len(node.attribute) == 1:
            return _constant(node.attribute[0])
        is_dropout = node.op_type == "Dropout" and len(taken) <= 2 and len(node.output) == 1  # outside training
        return taken[0] if taken and (node.op_type == "Identity" or is_dropout) else None

    def _operator(self, node: Any) -> bytes:
        """What a node does: an operator in the version of its set, or a function of the model's own."""
        key = (_domain(node.domain), node.op_type)
        if key not in self._functions:
            return _hash("operator", *key, self._versions.get(key[0], 0))
        if key not in self._of_functions:
            self._of_functions[key] = _NOTHING  # of one that calls itself, as no runtime allows
            function = self._functions[key]
            known: Known = {name: _hash("input", 0, place) for place, name in enumerate(function.input)}
            defaults = [self._attribute(each, known, 0) for each in function.attribute_proto]
            outputs = self._of_values(function.node, list(function.output), known, 0)
            self._of_functions[key] = _hash("function", len(defaults), *defaults, *outputs)
        return self._of_functions[key]

    def _attribute(self, attribute: Any, known: Known, depth: int) -> bytes:
        from onnx import helper

        if attribute.ref_attr_name:
            return _hash("reference", attribute.ref_attr_name)
        value = helper.get_attribute_value(attribute)
        values = value if isinstance(value, Iterable) and not isinstance(value, bytes | str) else [value]
        digests = [
            _hash("graph", *self._of_graph(each, ChainMap({}, known), depth + 1))
            if type(each).__name__ == "GraphProto"
            else _value(each)
            for each in values
        ]
        return _hash("attribute", attribute.name, attribute.type, *digests)


def _hash(*parts: str | int | bytes) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        content = part if isinstance(part, bytes) else str(part).encode(errors="surrogateescape")
        digest.update(f"{len(content)}:".encode())
        digest.update(content)
    return digest.digest()


def _domain(name: str) -> str:
    return "" if name == "ai.onnx" else name


def _trimmed(values: list[bytes]) -> list[bytes]:
    """Without the last ones that are left out."""
    while values and not values[-1]:
        values.pop()
    return values


def _taken(node: Any) -> Iterator[str]:
    """The names that a node takes, those of the graphs in it included."""
    yield from node.input
    for attribute in node.attribute:
        for graph in (*([attribute.g] if attribute.HasField("g") else ()), *attribute.graphs):
            yield from (value.name for value in graph.output)
            for inner in graph.node:
                yield from _taken(inner)


def _value(value: Any) -> bytes:
    """The digest of an attribute's number, text, tensor or type."""
    kind = type(value).__name__
    if kind == "TensorProto":
        return _tensor(value)
    if kind == "SparseTensorProto":
        return _hash("sparse", _tensor(value.values), _tensor(value.indices), *value.dims)
    return value.SerializeToString(deterministic=True) if hasattr(value, "SerializeToString") else _hash(repr(value))


def _tensor(tensor: Any) -> bytes:
    """The digest of a tensor's type, shape and numbers, in whichever field they are."""
    from onnx import numpy_helper

    content = [tensor.raw_data]
    if tensor.string_data:
        content = list(tensor.string_data)
    elif not tensor.HasField("raw_data"):
        try:
            content = [numpy_helper.to_array(tensor).tobytes()]
        except (ValueError, TypeError):  # of one of another shape, which nothing may use
            content = [tensor.SerializeToString(deterministic=True)]
    return _hash("tensor", tensor.data_type, len(tensor.dims), *tensor.dims, *content)


def _constant(attribute: Any) -> bytes | None:
    """The digest of a Constant, that of an initializer of the same numbers; None of one of texts."""
    from onnx import helper

    value = helper.get_attribute_value(attribute)
    if attribute.name in ("value", "sparse_value"):
        return _value(value)
    if attribute.name not in _CONSTANTS:
        return None
    is_list = attribute.name.endswith("s")
    numbers = list(value) if is_list else [value]
    return _tensor(helper.make_tensor("", _CONSTANTS[attribute.name], [len(numbers)] if is_list else [], numbers))
