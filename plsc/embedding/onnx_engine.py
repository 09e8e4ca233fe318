"""The engine of embedding models in ONNX, ours and other people's: what they take is read from the file."""

import json
import math
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plsc.embedding.contracts import models_in
from plsc.embedding.embedder import CPU_BATCH
from plsc.embedding.known_models import read_model
from plsc.embedding.onnx_fingerprint import fingerprint, former_fingerprint
from plsc.embedding.onnx_model import INPUT_TYPES, graph_values, load_graph
from plsc.embedding.onnx_session import AUTO, CPU, open_session, run_session, session_providers
from plsc.errors import DataError, first_line
from plsc.models.preprocessing import (
    CONTRACT_DIGITS,
    DEFAULT_SIZE,
    ImageSize,
    Preprocessing,
    check_side,
    contract_id,
    height_and_width,
    stated_contract,
)
from plsc.models.preprocessing import image_size as checked_image_size
from plsc.models.trial import CPU_BATCHES, GPU_BATCHES, Inputs, pieces, require_trial
from plsc.signing import is_asked_for

FORMAT = "plsc-onnx-1"
METADATA_PREFIX = "plsc."
PRECISIONS = ("fp32", "fp16", "int8")  # that our exports compute in; other files run as they are, called "fp32"
LARGEST_BATCH = 256
# Pixels that are normalised together, before any of them is embedded: between two runs of onnxruntime, torch's threads
# would be in the way of its own.
NUMBERS_AT_ONCE = 1 << 24
COMPATIBLE_WITH, FORMER_IDS = "compatible_with", "former_ids"
_CONTRACT = re.compile(rf"[0-9a-f]{{{CONTRACT_DIGITS}}}")

# insightface's convention: a model with early nodes of these names normalises its input itself.
EARLY_NODES = 8
SUBTRACTIONS, MULTIPLICATIONS = ("Sub", "_minus"), ("Mul", "_mul")
# Whatever the names: a model whose first arithmetic scales the input down by this or more expects pixels of 0 to 255.
PIXEL_SCALE = 1 / 16


class OnnxEngine:
    """An ONNX model with one input, (B, 3, H, W) or (B, H, W, 3), and one output of B rows.

    The batch may be fixed or free, height and width too (where one is free, it is the other; where both are, they are
    those of the metadata, or 112), the input float32, float16, float64 or uint8. A free batch is run in those sizes in
    which the model was tried (:mod:`plsc.models.trial`).
    Pixel values become (x - 127.5)/127.5, unless the file is a known one, its metadata says otherwise, the input is
    uint8, or the model begins by normalising: then they stay as they are.

    Attributes:
        fixed_batch: pictures that it takes at once; None: any number.
        channels_last: it takes (B, H, W, 3).
        batches: sizes in which a free batch is run, the largest first; none: any.
        former_ids: contract ids by which earlier versions knew this very model.

    Raises:
        DataError: the file is corrupt, refused, cannot be run, or is no embedding model.
        IntegrityError: it is not signed, where :mod:`plsc.signing` asks for that.
    """

    def __init__(self, path: Path, device: torch.device, *, provider: str = AUTO, own: bool = False) -> None:
        """Open ``path`` on ``device``, or the execution ``provider`` of :mod:`plsc.embedding.onnx_session`.

        Its ``own`` process wrote it: neither a signature nor a trial is asked for.
        """
        providers = session_providers(path, device, provider)
        self._path = path
        content, known = (path.read_bytes(), None) if own else read_model(path)
        trusted = own or is_asked_for() or known is not None
        model, content = load_graph(path, content, trusted=trusted)
        properties = {entry.key: entry.value for entry in model.metadata_props if entry.key.startswith(METADATA_PREFIX)}
        metadata = {key.removeprefix(METADATA_PREFIX): value for key, value in properties.items()}
        image_input = _single(path, "input", graph_values(model.graph.input))
        if image_input.type not in INPUT_TYPES:
            raise DataError(f"{path} takes {image_input.type}; an embedding model takes float or uint8 images")
        self._dtype = INPUT_TYPES[image_input.type]
        self.fixed_batch, size, self.channels_last = _layout(path, image_input.shape, metadata)
        self.preprocessing = (
            Preprocessing(size, known.mean, known.std)
            if known is not None
            else _preprocessing(path, model, metadata, size, self._dtype)
        )
        stated = metadata.get("precision")
        self.precision = stated if stated in PRECISIONS else PRECISIONS[0]
        self.batches: tuple[int, ...] = ()  # any
        self.former_ids: tuple[str, ...] = ()
        if not trusted:
            check_side(size, path)
            self.batches = CPU_BATCHES if providers == [CPU] else GPU_BATCHES
            require_trial(path, "onnx", content, Inputs(image_input.name, np.dtype(self._dtype).name, self._shapes()))
        self._session = open_session(path, content, providers)
        self._input, self._output = image_input.name, _single(path, "output", self._session.get_outputs()).name
        self.embedding_dim = self._probe()
        self.at_once = self.fixed_batch or (*self.batches, CPU_BATCH if providers == [CPU] else None)[0]
        digest = fingerprint(model)
        if metadata.get("fingerprint") == digest:
            self.former_ids = _stated_ids(path, metadata, digest, FORMER_IDS)
        elif (former := former_fingerprint(model)) == metadata.get("fingerprint"):  # an export of an earlier version
            digest = former
        else:
            self.former_ids = (contract_id(self.preprocessing, former),)
        self.contract_id = stated_contract(path, metadata, FORMAT, digest, self.preprocessing)
        self.compatible_with = _stated_ids(path, metadata, digest, COMPATIBLE_WITH)

    def run(self, images_u8: Tensor) -> Tensor:
        """(B, 3, H, W) uint8 -> (B, D) float32 on the CPU, in as many runs as the model's batch asks for."""
        largest = self.at_once or LARGEST_BATCH
        at_once = max(NUMBERS_AT_ONCE // math.prod(self.preprocessing.shape) // largest, 1) * largest
        chunks: list[np.ndarray] = []
        for group in torch.split(images_u8.cpu(), at_once):
            free = pieces(len(group), self.batches) if self.batches else self.at_once or len(group)
            chunks += [self._run_chunk(values) for values in torch.split(self._values(group), self.fixed_batch or free)]
        return torch.from_numpy(np.concatenate(chunks))

    def _shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the batches that the model is run with."""
        channels, *sides = self.preprocessing.shape
        picture = (*sides, channels) if self.channels_last else (channels, *sides)
        return tuple((batch, *picture) for batch in ([self.fixed_batch] if self.fixed_batch else self.batches))

    def _run_chunk(self, values: Tensor) -> np.ndarray:
        count, batch = len(values), self.fixed_batch or 0
        if count < batch:
            values = torch.cat([values, values[-1:].expand(batch - count, -1, -1, -1)])
        rows = self._answer(values)
        if rows.size != len(values) * self.embedding_dim:
            raise DataError(
                f"{self._path} answers {rows.shape} for a batch of {len(values)}; "
                "it is no embedding model with a free batch"
            )
        return rows.reshape(len(values), -1)[:count].astype(np.float32)

    def _values(self, images_u8: Tensor) -> Tensor:
        """What the model takes for (B, 3, H, W) uint8, perhaps as float32 where it takes other floats."""
        images = images_u8 if self._dtype is np.uint8 else self.preprocessing(images_u8)
        return images.permute(0, 2, 3, 1) if self.channels_last else images

    def _answer(self, values: Tensor) -> np.ndarray:
        contiguous = np.ascontiguousarray(values.numpy(), dtype=self._dtype)
        return run_session(self._path, self._session, [self._output], {self._input: contiguous})[0]

    def _probe(self) -> int:
        """D, from a run on black images; a model whose free batch turns out to be fixed is run image by image."""
        count = self.fixed_batch or (self.batches or (2,))[0]
        black = torch.zeros(count, *self.preprocessing.shape, dtype=torch.uint8)
        try:
            answer = self._answer(self._values(black))
            if answer.ndim == 0 or answer.shape[0] != count:
                raise DataError(f"{self._path} answers {answer.shape} for a batch of {count}; it is no embedding")
        except DataError:
            if self.fixed_batch:
                raise
            self.fixed_batch = 1
            return self._probe()
        return math.prod(answer.shape[1:])


def _stated_ids(path: Path, metadata: dict[str, str], digest: str, key: str) -> tuple[str, ...]:
    """The contract ids that the export wrote into the file, if its graph is still the one that it was written for."""
    stated = metadata.get(key, "")
    if not stated or metadata.get("format") != FORMAT or metadata.get("fingerprint") != digest:
        return ()
    ids = models_in(stated)
    if not all(map(_CONTRACT.fullmatch, ids)):
        raise DataError(f"{path} has metadata whose {key} names no models; export it again")
    return tuple(ids)


def _single(path: Path, what: str, values: list[Any]) -> Any:
    if len(values) != 1:
        names = ", ".join(value.name for value in values) or "none"
        raise DataError(f"{path} has {len(values)} {what}s ({names}); an embedding model has one input and one output")
    return values[0]


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
    if height is None and width is None:
        try:
            height, width = height_and_width(checked_image_size(json.loads(metadata.get("image_size", ""))))
        except (ValueError, RecursionError):
            height = DEFAULT_SIZE
    return batch, checked_image_size((height or width, width or height)), channels_last


def _preprocessing(path: Path, model: Any, metadata: dict[str, str], size: ImageSize, dtype: Any) -> Preprocessing:
    if "mean" in metadata and "std" in metadata:
        try:
            return Preprocessing.from_metadata(metadata, size)
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise DataError(
                f"{path} has metadata whose mean or std cannot be used ({first_line(error)}); export it again"
            ) from None
    return Preprocessing(size, 0.0, 1.0) if dtype is np.uint8 or _normalises(model) else Preprocessing(size)


def _normalises(model: Any) -> bool:
    """True by its nodes' names, or if the graph first of all scales its input down, as pixels are: x·a with a small."""
    names = [str(node.name) for node in model.graph.node[:EARLY_NODES]]
    if all(any(name.startswith(kind) for name in names) for kind in (SUBTRACTIONS, MULTIPLICATIONS)):
        return True
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
    value = next((entry.name for entry in model.graph.input), "")
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
    small = {}
    for name, tensor in tensors.items():
        if math.prod(tensor.dims) <= 3:
            with suppress(ValueError, TypeError):  # of another shape than its bytes have, which onnxruntime refuses
                small[name] = numpy_helper.to_array(tensor)
    numbers = {name: array for name, array in small.items() if array.size and np.issubdtype(array.dtype, np.number)}
    return {name: float(array.mean()) for name, array in numbers.items()}
