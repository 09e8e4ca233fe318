"""ONNX files run by onnxruntime: the engine of embedding models, ours and other people's, and guarded sessions.

A file that somebody else wrote can be wrong in many ways; each becomes a :class:`DataError` of one line.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plsc.embedding.onnx_sizes import size_fault
from plsc.embedding.preprocessing import contract_id
from plsc.embedding.trial import CPU_BATCHES, GPU_BATCHES, Inputs, pieces, trial_fault
from plsc.errors import DataError, first_line
from plsc.models.preprocessing import DEFAULT_SIZE, ImageSize, Preprocessing, height_and_width
from plsc.models.preprocessing import image_size as checked_image_size
from plsc.signing import MODEL, is_asked_for, read_signed

FORMAT = "plsc-onnx-1"
METADATA_PREFIX = "plsc."
LARGEST_BATCH = 256
LOOPS = ("Loop", "Scan", "SequenceMap")
LOOPS_ALLOWED = "PLSC_ONNX_LOOPS"  # of the environment: 1 lets models have them, and sizes that values decide

INPUT_TYPES: dict[str, Any] = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(double)": np.float64,
    "tensor(uint8)": np.uint8,
}

# insightface's convention: a model with early nodes of these names normalises its input itself.
EARLY_NODES = 8
SUBTRACTIONS, MULTIPLICATIONS = ("Sub", "_minus"), ("Mul", "_mul")
# Whatever the names: a model whose first arithmetic scales the input down by this or more expects pixels of 0 to 255.
PIXEL_SCALE = 1 / 16


@dataclass(frozen=True)
class GraphValue:
    """An input or output of a graph: its name, its type as onnxruntime writes it, and its dimensions, None: free."""

    name: str
    type: str
    shape: list[int | str | None]


class OnnxEngine:
    """An ONNX model with one input, (B, 3, H, W) or (B, H, W, 3), and one output of B rows.

    The batch may be fixed or free, height and width too (where one is free, it is the other; where both are, they are
    those of the metadata, or 112), the input float32, float16, float64 or uint8. A free batch is run in those sizes in
    which the model was tried (:mod:`plsc.embedding.trial`).
    Pixel values become (x - 127.5)/127.5, unless the file's metadata says otherwise, the input is uint8, or the
    model begins by normalising: then they stay as they are.

    Raises:
        DataError: the file is corrupt, refused, cannot be run, or is no embedding model.
        IntegrityError: it is not signed, where :mod:`plsc.signing` asks for that.
    """

    precision = "fp32"  # the name for "as the file is": nothing is cast

    def __init__(self, path: Path, device: torch.device, *, own: bool = False) -> None:
        """Open ``path`` on ``device``; its ``own`` process wrote it: neither a signature nor a trial is asked for."""
        self._path = path
        content = path.read_bytes() if own else read_signed(path, MODEL)
        trusted = own or is_asked_for()
        model = load_graph(path, content, trusted=trusted)
        metadata = _metadata(model)
        image_input = _single(path, "input", graph_inputs(model))
        self._dtype = _dtype(path, image_input)
        self._fixed_batch, size, self._channels_last = _layout(path, image_input.shape, metadata)
        self.preprocessing = _preprocessing(path, model, metadata, size, self._dtype)
        self._batches: tuple[int, ...] = ()  # any
        if not trusted:
            self._batches = GPU_BATCHES if device.type == "cuda" else CPU_BATCHES
            try_model(path, content, Inputs(image_input.name, np.dtype(self._dtype).name, self._shapes()))
        self._session = open_session(path, content, device)
        self._input, self._output = image_input.name, _single(path, "output", self._session.get_outputs()).name
        self.embedding_dim = self._probe()
        self.contract_id = _contract_id(path, model, metadata, self.preprocessing)

    def run(self, images_u8: Tensor) -> Tensor:
        """(B, 3, H, W) uint8 -> (B, D) float32 on the CPU, in as many runs as the model's batch asks for."""
        sizes: int | list[int] = self._fixed_batch or LARGEST_BATCH
        if self._batches and not self._fixed_batch:
            sizes = pieces(len(images_u8), self._batches)
        chunks = [self._run_chunk(chunk) for chunk in torch.split(images_u8.cpu(), sizes)]
        return torch.from_numpy(np.concatenate(chunks))

    def _shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the batches that the model is run with."""
        channels, *sides = self.preprocessing.shape
        picture = (*sides, channels) if self._channels_last else (channels, *sides)
        return tuple((batch, *picture) for batch in ([self._fixed_batch] if self._fixed_batch else self._batches))

    def _run_chunk(self, images_u8: Tensor) -> np.ndarray:
        count, batch = len(images_u8), self._fixed_batch or 0
        if count < batch:
            images_u8 = torch.cat([images_u8, images_u8[-1:].expand(batch - count, -1, -1, -1)])
        rows = self._session_run(self._values(images_u8))
        if rows.size != len(images_u8) * self.embedding_dim:
            raise DataError(
                f"{self._path} answers {rows.shape} for a batch of {len(images_u8)}; "
                "it is no embedding model with a free batch"
            )
        return rows.reshape(len(images_u8), -1)[:count].astype(np.float32)

    def _values(self, images_u8: Tensor) -> np.ndarray:
        images = images_u8 if self._dtype is np.uint8 else self.preprocessing(images_u8)
        if self._channels_last:
            images = images.permute(0, 2, 3, 1)
        values: np.ndarray = np.ascontiguousarray(images.numpy(), dtype=self._dtype)
        return values

    def _session_run(self, values: np.ndarray) -> np.ndarray:
        return run_session(self._path, self._session, [self._output], {self._input: values})[0]

    def _probe(self) -> int:
        """D, from a run on black images; a model whose free batch turns out to be fixed is run image by image."""
        count = self._fixed_batch or (self._batches or (2,))[0]
        black = torch.zeros(count, *self.preprocessing.shape, dtype=torch.uint8)
        try:
            answer = self._session_run(self._values(black))
            if answer.ndim == 0 or answer.shape[0] != count:
                raise DataError(f"{self._path} answers {answer.shape} for a batch of {count}; it is no embedding")
        except DataError:
            if self._fixed_batch:
                raise
            self._fixed_batch = 1
            return self._probe()
        return math.prod(answer.shape[1:])


def fingerprint(model: Any) -> str:
    """SHA-256 over nodes and weights of an ``onnx.ModelProto``, without its metadata."""
    digest = hashlib.sha256()
    for tensor in sorted(model.graph.initializer, key=lambda tensor: str(tensor.name)):
        digest.update(tensor.SerializeToString(deterministic=True))
    for node in model.graph.node:
        digest.update(f"{node.op_type} {list(node.input)} {list(node.output)}\n".encode())
        for attribute in sorted(node.attribute, key=lambda attribute: str(attribute.name)):
            digest.update(attribute.SerializeToString(deterministic=True))
    return digest.hexdigest()


def _single(path: Path, what: str, values: list[Any]) -> Any:
    if len(values) != 1:
        names = ", ".join(value.name for value in values) or "none"
        raise DataError(f"{path} has {len(values)} {what}s ({names}); an embedding model has one input and one output")
    return values[0]


def _dtype(path: Path, image_input: Any) -> Any:
    if image_input.type not in INPUT_TYPES:
        raise DataError(f"{path} takes {image_input.type}; an embedding model takes float or uint8 images")
    return INPUT_TYPES[image_input.type]


def _metadata(model: Any) -> dict[str, str]:
    properties = {entry.key: entry.value for entry in model.metadata_props}
    return {
        key.removeprefix(METADATA_PREFIX): value for key, value in properties.items() if key.startswith(METADATA_PREFIX)
    }


def _layout(path: Path, shape: list[Any], metadata: dict[str, str]) -> tuple[int | None, ImageSize, bool]:
    """The fixed batch or None, the image size, and True if channels come last."""
    dims = [dim if isinstance(dim, int) and dim > 0 else None for dim in shape]
    if len(dims) != 4:
        raise DataError(f"{path} takes {shape}, not a batch of images (B, 3, H, W)")
    batch, *rest = dims
    channels_last = rest[0] != 3 and rest[2] == 3
    channels, height, width = (rest[2], rest[0], rest[1]) if channels_last else rest
    if channels not in (3, None):
        raise DataError(f"{path} takes {shape}: {channels} channels, where RGB has 3")
    default_height, default_width = height_and_width(_default_size(metadata))
    if height is None and width is None:
        height, width = default_height, default_width
    return batch, checked_image_size((height or width, width or height)), channels_last


def _default_size(metadata: dict[str, str]) -> ImageSize:
    try:
        return checked_image_size(json.loads(metadata.get("image_size", "")))
    except (ValueError, RecursionError):
        return DEFAULT_SIZE


def _preprocessing(path: Path, model: Any, metadata: dict[str, str], size: ImageSize, dtype: Any) -> Preprocessing:
    if "mean" in metadata and "std" in metadata:
        try:
            return Preprocessing.from_metadata(metadata, size)
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise DataError(
                f"{path} has metadata whose mean or std cannot be used ({first_line(error)}); export it again"
            ) from None
    if dtype is np.uint8 or _normalises_by_name(model) or _normalises_by_graph(model):
        return Preprocessing(size, 0.0, 1.0)
    return Preprocessing(size)


def _normalises_by_name(model: Any) -> bool:
    names = [str(node.name) for node in model.graph.node[:EARLY_NODES]]
    subtracts = any(name.startswith(SUBTRACTIONS) for name in names)
    return subtracts and any(name.startswith(MULTIPLICATIONS) for name in names)


def _normalises_by_graph(model: Any) -> bool:
    """True if the graph first of all scales its input down, as pixel values are scaled: x·a with a small."""
    scale = 1.0
    for op_type, constant in _leading_arithmetic(model):
        if op_type == "Mul":
            scale *= constant
        elif op_type == "Div" and constant:
            scale /= constant
    return 0.0 < abs(scale) <= PIXEL_SCALE


def _leading_arithmetic(model: Any) -> Iterator[tuple[str, float]]:
    """Yield (operator, constant) along the chain from the input, until it branches or does anything else."""
    constants = _constants(model)
    initial = {tensor.name for tensor in model.graph.initializer}
    value = next((entry.name for entry in model.graph.input if entry.name not in initial), "")
    while True:
        users = [node for node in model.graph.node if value in node.input]
        if len(users) != 1 or users[0].op_type not in ("Sub", "Add", "Mul", "Div", "Cast", "Transpose", "Identity"):
            return
        node = users[0]
        if len(node.input) == 2:
            other = node.input[1] if node.input[0] == value else node.input[0]
            if other not in constants:
                return
            yield node.op_type, constants[other]
        value = node.output[0]


def _constants(model: Any) -> dict[str, float]:
    """The mean of each small constant: a number, or one per channel."""
    from onnx import numpy_helper

    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value":
            tensors[node.output[0]] = node.attribute[0].t
    small = {name: tensor for name, tensor in tensors.items() if math.prod(tensor.dims) <= 3}
    arrays = {name: numpy_helper.to_array(tensor) for name, tensor in small.items()}
    return {
        name: float(array.mean())
        for name, array in arrays.items()
        if array.size and np.issubdtype(array.dtype, np.number)
    }


def _contract_id(path: Path, model: Any, metadata: dict[str, str], preprocessing: Preprocessing) -> str:
    """The id that the export wrote, if the graph is still the one it was written for; else the file's own."""
    own = fingerprint(model)
    if metadata.get("format") == FORMAT and metadata.get("fingerprint") == own:
        if "contract_id" not in metadata:
            raise DataError(f"{path} has incomplete metadata: it has no contract_id; export it again")
        return metadata["contract_id"]
    return contract_id(preprocessing, own)


def graph_inputs(model: Any) -> list[GraphValue]:
    """The inputs of an ``onnx.ModelProto``, without those that it holds the values of."""
    held = {tensor.name for tensor in model.graph.initializer}
    return [value for value in graph_values(model.graph.input) if value.name not in held]


def graph_values(values: Iterable[Any]) -> list[GraphValue]:
    """What an ``onnx.ModelProto`` says of inputs or outputs."""
    from onnx import TensorProto

    described = []
    for value in values:
        tensor = value.type.tensor_type
        shape = [dim.dim_value if dim.dim_value > 0 else dim.dim_param or None for dim in tensor.shape.dim]
        kind = TensorProto.DataType.Name(tensor.elem_type).lower()
        described.append(GraphValue(value.name, f"tensor({kind})", shape))
    return described


def load_graph(path: Path, content: bytes, *, trusted: bool) -> Any:
    """Parse the file's ``onnx.ModelProto``.

    Args:
        path: for messages.
        content: of the file.
        trusted: it may have loops, and sizes that the pictures' values decide.

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
    return model


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
                yield "has weights in other files; save it as one file"
    if not trusted and (fault := size_fault(model)):
        yield f"{fault}; {mend}"


def _messages(message: Any) -> Iterator[Any]:
    """Yield a protobuf message and all that it holds; protobuf itself limits the depth to 100."""
    yield message
    for field, value in message.ListFields():
        if field.message_type is not None:
            for inner in [value] if hasattr(value, "ListFields") else value:
                yield from _messages(inner)


def try_model(path: Path, content: bytes, inputs: Inputs) -> None:
    """Load and run a model in a process of its own: :class:`DataError` where it takes too much memory or time."""
    fault = trial_fault("onnx", content, inputs)
    if fault is not None:
        raise DataError(f"{path} is refused: it {fault}; use another copy")


def open_session(path: Path, content: bytes, device: torch.device) -> Any:
    """Open an ``onnxruntime.InferenceSession`` on ``device`` with torch's number of threads.

    Raises:
        DataError: onnxruntime cannot run the file: operators that it does not know, broken shapes.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    options.log_severity_level = 4  # fatal only: errors come as exceptions
    wanted = ["CUDAExecutionProvider"] if device.type == "cuda" else []
    providers = [name for name in wanted if name in onnxruntime.get_available_providers()]
    try:
        return onnxruntime.InferenceSession(content, options, providers=[*providers, "CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors share no public base class
        raise DataError(f"{path} cannot be run by onnxruntime: {first_line(error)}") from None


def run_session(path: Path, session: Any, outputs: list[str], inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Run a session; :class:`DataError` names the file and the inputs' shapes when it does not run on them."""
    try:
        answer: list[np.ndarray] = session.run(outputs, inputs)
    except Exception as error:  # onnxruntime's errors share no public base class
        shapes = " and ".join(str(value.shape) for value in inputs.values())
        raise DataError(f"{path} does not run on {shapes}: {first_line(error)}") from None
    return answer
