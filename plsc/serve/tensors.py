"""Tensors of the Open Inference Protocol, version 2: in JSON, or as raw bytes behind it (binary tensor data)."""

import itertools
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import to_json

from plsc.serve.failures import Refusal
from plsc.serve.inputs import Float32
from plsc.serve.routing import read_json, said

INPUT, OUTPUT, VERSION = "images", "embeddings", "1"
LENGTH_HEADER = "Inference-Header-Content-Length"
MOST_NUMBERS = 2**21  # pixels as JSON: each takes eight bytes and more until it is one; raw ones are taken by the body
_NOT_PIXELS = f"{INPUT} holds more than whole numbers from 0 to 255 in rows of one length"


class TensorParameters(BaseModel):
    """What the protocol lets be said of a tensor, as far as it is known here."""

    model_config = ConfigDict(extra="allow", strict=True)

    binary_data_size: Annotated[int, Field(ge=0)] | None = None
    binary_data: bool | None = None


class RequestParameters(BaseModel):
    """What may be said of a request as a whole."""

    model_config = ConfigDict(extra="allow", strict=True)

    binary_data_output: bool | None = None


class InputTensor(BaseModel):
    """``images``: UINT8 [n, 3, S, S], RGB; the data as numbers, flat or nested, or raw behind the JSON."""

    model_config = ConfigDict(strict=True)

    name: str
    shape: list[int] = Field(max_length=8, fail_fast=True)
    datatype: str
    parameters: TensorParameters = Field(default_factory=TensorParameters)
    data: list[Any] | None = None


class AskedOutput(BaseModel):
    """``embeddings``, as numbers or raw."""

    model_config = ConfigDict(strict=True)

    name: str
    parameters: TensorParameters = Field(default_factory=TensorParameters)


class InferRequest(BaseModel):
    """A request of the protocol."""

    model_config = ConfigDict(strict=True)

    id: str | None = None
    parameters: RequestParameters = Field(default_factory=RequestParameters)
    inputs: list[InputTensor] = Field(fail_fast=True)
    outputs: list[AskedOutput] | None = Field(None, fail_fast=True)


class OutputTensor(BaseModel):
    """``embeddings``: FP32 [n, D]."""

    name: str
    datatype: str
    shape: list[int]
    data: list[float] | None = None
    parameters: dict[str, Any] | None = None


class InferResponse(BaseModel):
    """An answer of the protocol."""

    model_name: str
    model_version: str
    id: str | None = None
    outputs: list[OutputTensor]


@dataclass(frozen=True)
class Inference:
    """A request understood: ``images`` uint8 (n, 3, S, S), and how the answer is wanted."""

    images: torch.Tensor
    id: str | None
    binary: bool


def read_inference(body: bytes, header: str | None, size: int, most: int) -> Inference:
    """The request in ``body``, whose JSON is ``header`` bytes long, or all of it where that is None.

    Raises :class:`Refusal` 400 naming what does not fit UINT8 [1 to ``most``, 3, size, size].
    """
    length = _length(header, len(body))
    try:
        request = InferRequest.model_validate(read_json(body[:length], MOST_NUMBERS))
    except ValidationError as error:
        raise Refusal(400, said(error.errors())) from None
    if len(request.inputs) != 1 or request.inputs[0].name != INPUT:
        raise Refusal(400, f"the model has one input, {INPUT}; send that alone")
    wanted = request.outputs or []
    if any(output.name != OUTPUT for output in wanted) or len(wanted) > 1:
        raise Refusal(400, f"the model has one output, {OUTPUT}; ask for that alone")
    images = _images(request.inputs[0], body[length:], size, most)
    return Inference(images, request.id, _is_binary(request, wanted))


def write_inference(vectors: Float32, model: str, asked: Inference) -> tuple[bytes, dict[str, str]]:
    """The answer's body and headers: (n, D) float32 as numbers, or raw little-endian bytes behind the JSON."""
    output: dict[str, Any] = {"name": OUTPUT, "datatype": "FP32", "shape": list(vectors.shape)}
    raw = vectors.astype("<f4").tobytes() if asked.binary else b""
    if asked.binary:
        output["parameters"] = {"binary_data_size": len(raw)}
    else:
        output["data"] = vectors.ravel().tolist()
    shown: dict[str, Any] = {"model_name": model, "model_version": VERSION, "outputs": [output]}
    if asked.id is not None:
        shown["id"] = asked.id
    head = to_json(shown)
    if not asked.binary:
        return head, {"Content-Type": "application/json"}
    return head + raw, {"Content-Type": "application/octet-stream", LENGTH_HEADER: str(len(head))}


def _length(header: str | None, size: int) -> int:
    if header is None:
        return size
    if not header.isascii() or not header.isdigit() or len(header) > 12 or int(header) > size:
        raise Refusal(400, f"{LENGTH_HEADER} is not a number of bytes within the body")
    return int(header)


def _is_binary(request: InferRequest, wanted: list[AskedOutput]) -> bool:
    if wanted and wanted[0].parameters.binary_data is not None:
        return wanted[0].parameters.binary_data
    return bool(request.parameters.binary_data_output)


def _images(tensor: InputTensor, raw: bytes, size: int, most: int) -> torch.Tensor:
    if tensor.datatype != "UINT8":
        raise Refusal(400, f"{INPUT} is {tensor.datatype[:32]}; the model takes UINT8")
    shape = tensor.shape
    if len(shape) != 4 or shape[1:] != [3, size, size] or not 1 <= shape[0] <= most:
        raise Refusal(400, f"{INPUT} has the shape {shape}; the model takes [1 to {most}, 3, {size}, {size}]")
    data = _from_numbers(tensor, raw) if tensor.parameters.binary_data_size is None else _from_bytes(tensor, raw)
    if len(data) != shape[0] * 3 * size * size:
        raise Refusal(400, f"{INPUT} has {len(data)} values, not the {shape[0] * 3 * size * size} of its shape")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).reshape(shape)


def _from_bytes(tensor: InputTensor, raw: bytes) -> bytes:
    if tensor.data is not None or tensor.parameters.binary_data_size != len(raw):
        raise Refusal(400, f"{INPUT} announces {tensor.parameters.binary_data_size} raw bytes alone; {len(raw)} came")
    return raw


def _from_numbers(tensor: InputTensor, raw: bytes) -> bytes:
    if tensor.data is None or raw:
        raise Refusal(400, f"{INPUT} has neither data nor a binary_data_size that tells of raw bytes")
    rows = _innermost(tensor.data)
    # Every type is looked at before anything is converted: numpy would make a few long strings gigabytes wide.
    if len({len(row) for row in rows}) > 1 or any(set(map(type, row)) - {int} for row in rows):
        raise Refusal(400, _NOT_PIXELS)
    try:
        return b"".join(map(bytes, rows))
    except ValueError:
        raise Refusal(400, _NOT_PIXELS) from None


def _innermost(rows: list[Any]) -> list[list[Any]]:
    """The lists at the bottom of nested lists of one depth."""
    nested = [rows]
    while nested and nested[0] and isinstance(nested[0][0], list):
        nested = list(itertools.chain.from_iterable(nested))
        if not all(isinstance(row, list) for row in nested):
            raise Refusal(400, _NOT_PIXELS)
    return nested
