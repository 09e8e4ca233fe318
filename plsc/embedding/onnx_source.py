"""Other people's ONNX embedding models, made ready to be exported anew in a lower precision or with pixels as input.

Their graphs come in every form that a decade of exporters wrote: operators of 2018, weights that are listed among the
inputs, constants and batch norms as nodes of their own, nodes without names, a batch of one picture.
"""

import re
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plsc.embedding.known_models import read_model
from plsc.embedding.onnx_deployment import FP16, FP32, INT8
from plsc.embedding.onnx_engine import METADATA_PREFIX, OnnxEngine
from plsc.embedding.onnx_model import graph_values, load_graph
from plsc.errors import DataError, UsageError, first_line
from plsc.models.trial import pieces
from plsc.signing import is_asked_for

# Operator sets: from 7 on, Sub and Div broadcast; from 13 on, DequantizeLinear takes a scale for each channel.
OLDEST_OPSETS = {FP32: 7, FP16: 7, INT8: 13}
OLDEST_IR = 8  # of the file format: that of operator set 13 and later
_INTEGERS = re.compile(r"(Dynamic)?QuantizeLinear|DequantizeLinear|QLinear\w+|(Conv|MatMul)Integer|QGemm")


@dataclass(frozen=True)
class OnnxSource:
    """An ONNX file of a float32 embedding model.

    Attributes:
        path: of the file.
        engine: that runs it, on the CPU.
        model: its ``onnx.ModelProto``, as a runtime is given it.
    """

    path: Path
    engine: OnnxEngine
    model: Any

    @property
    def metadata(self) -> dict[str, str]:
        """What the file says of itself, without what plsc wrote there."""
        entries = ((str(entry.key), str(entry.value)) for entry in self.model.metadata_props)
        return {key: value for key, value in entries if not key.startswith(METADATA_PREFIX)}

    def graph(self, precision: str) -> Any:
        """An ``onnx.ModelProto`` that computes the same, for :func:`plsc.embedding.onnx_deployment.in_precision`.

        Raises:
            DataError: it has an operator that onnx cannot bring to the opset that the precision takes.
        """
        from onnx import ModelProto

        model = ModelProto()
        model.CopyFrom(self.model)
        model.ir_version = max(model.ir_version, OLDEST_IR)
        model = _in_opset(model, OLDEST_OPSETS[precision])
        if precision == INT8:
            model = _folded(model)
        _name_nodes(model)
        return model

    def batches(self, pictures: Iterable[Tensor]) -> Iterator[Tensor]:
        """Cut batches uint8 (B, 3, H, W) to sizes that the model runs in; a fixed one is filled by the last picture."""
        fixed = self.engine.fixed_batch
        for batch in pictures:
            sizes = fixed or (pieces(len(batch), self.engine.batches) if self.engine.batches else len(batch))
            for part in batch.split(sizes):
                missing = 0 if fixed is None else fixed - len(part)
                yield torch.cat([part, part[-1:].expand(missing, -1, -1, -1)])


def open_source(path: Path) -> OnnxSource:
    """Open somebody's ONNX file, to reduce it.

    Raises:
        UsageError: its input is not float32 (B, 3, H, W), or it is in a lower precision already.
        DataError, IntegrityError: as :class:`plsc.embedding.onnx_engine.OnnxEngine`.
    """
    from onnx import load_from_string

    content, known = read_model(path)
    model = load_from_string(load_graph(path, content, trusted=is_asked_for() or known is not None)[1])
    engine = OnnxEngine(path, torch.device("cpu"))
    (given,) = graph_values(model.graph.input)
    if given.type != "tensor(float)" or engine.channels_last:
        shape = ", ".join(str(dim or "?") for dim in given.shape)
        raise UsageError(f"{path} takes {given.type} ({shape}); give a file that takes float32 (B, 3, H, W)")
    precision = engine.precision if engine.precision != FP32 else _lower_precision(model)
    if precision != FP32:
        raise UsageError(f"{path} computes in {precision} already; give the float32 file that it was made from")
    return OnnxSource(path, engine, model)


def _lower_precision(model: Any) -> str:
    """ "fp16" or "int8" by weights and operators, whatever the file says; else "fp32"."""
    from onnx import TensorProto

    if any(_INTEGERS.fullmatch(str(node.op_type)) for node in model.graph.node):
        return INT8
    constants = (attribute.t for node in model.graph.node for attribute in node.attribute if attribute.HasField("t"))
    types = {tensor.data_type for tensor in (*model.graph.initializer, *constants)}
    return FP16 if types & {TensorProto.FLOAT16, TensorProto.BFLOAT16} else FP32


def _in_opset(model: Any, oldest: int) -> Any:
    from onnx import version_converter

    version = next((opset.version for opset in model.opset_import if opset.domain in ("", "ai.onnx")), oldest)
    if version >= oldest:
        return model
    try:
        return version_converter.convert_version(model, oldest)
    except Exception as error:  # RuntimeError, ConvertError and what protobuf raises
        reason = first_line(error).rpartition("failed: ")[2]
        raise DataError(
            f"its operators of opset {version} cannot be brought to {oldest} ({reason}); export the model anew from "
            "where it was trained, at a newer opset"
        ) from None


def _folded(model: Any) -> Any:
    """Let onnxruntime compute what depends on constants alone, and put batch norms into the layers before them."""
    import onnx
    from onnxruntime.quantization.shape_inference import quant_pre_process

    with tempfile.TemporaryDirectory() as folder:
        given, folded = Path(folder) / "given.onnx", Path(folder) / "folded.onnx"
        onnx.save(model, str(given))  # of a model in memory, weights are lost on the way
        quant_pre_process(given, folded, skip_symbolic_shape=True)  # that would take sympy
        return onnx.load(str(folded))


def _name_nodes(model: Any) -> None:
    """Give nodes that have no name, or another's, one of their own: by names onnxruntime leaves layers in float32."""
    taken: set[str] = set()
    for number, node in enumerate(model.graph.node):
        if not node.name or node.name in taken:
            node.name = f"node_{number}_{node.op_type}"
        taken.add(node.name)
