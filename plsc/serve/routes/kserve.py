"""/v2, the Open Inference Protocol (version 2) of KServe and Triton: the model itself, asked with tensors.

Tensors are in the JSON, or raw bytes behind it (binary tensor data).
"""

import asyncio
import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from fastapi import APIRouter, Depends, Header, Path, Request
from pydantic import BaseModel, ConfigDict, Field, SkipValidation, ValidationError
from pydantic_core import to_json
from starlette.responses import JSONResponse, Response

from plsc.serve.access import Endpoint
from plsc.serve.errors import RETRY_SECONDS, ApiError, error_responses, first_error
from plsc.serve.limits import charge
from plsc.serve.routing import SEGMENT, Served, get_lifecycle, read_json, requires
from plsc.serve.schemas import Float32

INPUT, OUTPUT, VERSION = "images", "embeddings", "1"
LENGTH_HEADER = "Inference-Header-Content-Length"
MAX_ID = 1024  # characters of a request's id, which its answer repeats
MAX_NUMBERS = 2**21  # values in the JSON: a Python object each until it is a byte. Raw tensors are bound by the body
_DEPTH = 4  # of nested data: images, channels, rows, pixels
_NOT_PIXELS = f"{INPUT} holds more than whole numbers from 0 to 255 in rows of one length"


class TensorParameters(BaseModel):
    """Parameters of a tensor, as far as they are known here."""

    model_config = ConfigDict(extra="allow", strict=True)

    binary_data_size: Annotated[int, Field(ge=0)] | None = None
    binary_data: bool | None = None


class RequestParameters(BaseModel):
    """Parameters of a request."""

    model_config = ConfigDict(extra="allow", strict=True)

    binary_data_output: bool | None = None


class InputTensor(BaseModel):
    """``images``: UINT8 [n, 3, S, S], RGB; the data as numbers, flat or nested, or raw behind the JSON."""

    model_config = ConfigDict(strict=True)

    name: str
    shape: list[int] = Field(max_length=8, fail_fast=True)
    datatype: str
    parameters: TensorParameters = Field(default_factory=TensorParameters)
    data: Annotated[list[Any] | None, SkipValidation] = None  # pydantic would copy millions of numbers


class RequestedOutput(BaseModel):
    """``embeddings``, as numbers or raw."""

    model_config = ConfigDict(strict=True)

    name: str
    parameters: TensorParameters = Field(default_factory=TensorParameters)


class InferRequest(BaseModel):
    """A request of the protocol."""

    model_config = ConfigDict(strict=True)

    id: str | None = Field(None, max_length=MAX_ID)
    parameters: RequestParameters = Field(default_factory=RequestParameters)
    inputs: list[InputTensor] = Field(fail_fast=True, max_length=1)
    outputs: list[RequestedOutput] | None = Field(None, fail_fast=True, max_length=1)


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


class InferenceError(BaseModel):
    """The protocol's errors."""

    error: str


class ServerLive(BaseModel):
    """The server is alive."""

    live: bool


class ServerReady(BaseModel):
    """The server is ready."""

    ready: bool


class ModelReady(BaseModel):
    """The model is ready."""

    name: str
    ready: bool


class ServerMetadata(BaseModel):
    """The server, and the protocol's extensions that it speaks."""

    name: str
    version: str
    extensions: list[str]


class TensorMetadata(BaseModel):
    """A tensor; -1 is any length."""

    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(BaseModel):
    """The model's inputs and outputs."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


_responses = functools.partial(error_responses, model=InferenceError)
JsonLength = Annotated[
    str | None, Header(description="Bytes of JSON before raw tensors", json_schema_extra={"pattern": "^[0-9]{1,12}$"})
]
Segment = Annotated[str, Path(json_schema_extra={"pattern": SEGMENT})]
router = APIRouter(prefix="/v2", tags=["open inference protocol"])
_BODY = {
    "required": True,
    "content": {
        "application/json": {"schema": {"$ref": "#/components/schemas/InferRequest"}},
        "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
    },
}


@router.get(
    "", response_model=ServerMetadata, responses={400: {"model": InferenceError}, 403: {"model": InferenceError}}
)
@requires(None)
async def server_metadata(_: Request) -> Response:
    """The server, and the protocol's extensions that it speaks."""
    from plsc import __version__

    return JSONResponse({"name": "plsc", "version": __version__, "extensions": ["binary_tensor_data"]})


@router.get("/health/live", response_model=ServerLive)
@requires(None)
async def server_live(_: Request) -> Response:
    """The process runs and answers."""
    return JSONResponse({"live": True})


@router.get("/health/ready", response_model=ServerReady, responses={503: {"model": ServerReady}})
@requires(None)
async def server_ready(request: Request) -> Response:
    """The model can be asked, and searches the gallery."""
    if (await get_lifecycle(request.scope).readiness())[0] == "ready":
        return JSONResponse({"ready": True})
    return JSONResponse({"ready": False}, 503, {"Retry-After": str(RETRY_SECONDS)})


def _of_model(path: str, **options: Any) -> Callable[[Endpoint], Endpoint]:
    """Declare an endpoint of the model, and the same for callers that name its version."""

    def declare(endpoint: Endpoint) -> Endpoint:
        router.add_api_route(f"/models/{{model}}{path}", endpoint, dependencies=[Depends(_check_model)], **options)
        router.add_api_route(
            f"/models/{{model}}/versions/{{version}}{path}",
            endpoint,
            name=f"version_{endpoint.__name__.removeprefix('model_')}",
            description="The same, for callers that name the version.",
            dependencies=[Depends(_check_version), Depends(_check_model)],
            **options,
        )
        return endpoint

    return declare


async def _check_model(model: Segment, service: Served) -> None:
    if model != service.model_name:
        raise ApiError(404, f"there is no model {ascii(model)[:80]}; this service has {service.model_name}")


async def _check_version(version: Segment) -> None:
    if version != VERSION:
        raise ApiError(404, f"there is no version {ascii(version)[:80]} of a model; this service has {VERSION}")


@_of_model("", responses=_responses(404))
@requires("search")
async def model_metadata(model: Segment, service: Served) -> ModelMetadata:
    """The model's input and output."""
    shape, dim = service.embedder.preprocessing.shape, service.embedder.embedding_dim
    return ModelMetadata(
        name=model,
        versions=[VERSION],
        platform="plsc",
        inputs=[TensorMetadata(name=INPUT, datatype="UINT8", shape=[-1, *shape])],
        outputs=[TensorMetadata(name=OUTPUT, datatype="FP32", shape=[-1, dim])],
    )


@_of_model("/ready", responses=_responses(404))
@requires("search")
async def model_ready(model: Segment) -> ModelReady:
    """The model is loaded."""
    return ModelReady(name=model, ready=True)


@_of_model(
    "/infer",
    methods=["POST"],
    response_model=InferResponse,
    responses=_responses(404, 413, 415, 504),
    openapi_extra={"requestBody": _BODY},
)
@requires("search", "embeddings", counts_as="embeddings")
async def infer(
    model: Segment, service: Served, request: Request, inference_header_content_length: JsonLength = None
) -> Response:
    """Embed images that are sized and aligned already: UINT8 [n, 3, H, W] to FP32 [n, D]."""
    body, shape, max_images = await request.body(), service.embedder.preprocessing.shape, service.settings.limits.inputs
    # Two million numbers take a tenth of a second, in which others are answered.
    inference = await asyncio.to_thread(read_inference, body, inference_header_content_length, shape, max_images)
    charge(len(inference.images))
    vectors = await service.embed_pixels(inference.images, service.deadline(None))
    content, headers = write_inference(vectors, model, inference)
    return Response(content, headers=headers)


@dataclass(frozen=True)
class Inference:
    """A request understood: ``images`` uint8 (n, 3, S, S), and how the answer is requested."""

    images: torch.Tensor
    id: str | None
    binary: bool


def read_inference(body: bytes, header: str | None, image_shape: tuple[int, int, int], max_images: int) -> Inference:
    """The request in ``body``, whose JSON is ``header`` bytes long, or all of it where that is None.

    Raises :class:`ApiError` 400 naming what does not fit UINT8 [1 to ``max_images``, *image_shape].
    """
    length = _length(header, len(body))
    try:
        request = InferRequest.model_validate(read_json(body[:length], MAX_NUMBERS))
    except ValidationError as error:
        raise ApiError(400, first_error(error.errors())) from None
    if len(request.inputs) != 1 or request.inputs[0].name != INPUT:
        raise ApiError(400, f"the model has one input, {INPUT}; send that alone")
    requested = request.outputs or []
    if any(output.name != OUTPUT for output in requested) or len(requested) > 1:
        raise ApiError(400, f"the model has one output, {OUTPUT}; ask for that alone")
    images = _images(request.inputs[0], body[length:], image_shape, max_images)
    return Inference(images, request.id, _is_binary(request, requested))


def write_inference(vectors: Float32, model: str, request: Inference) -> tuple[bytes, dict[str, str]]:
    """The answer's body and headers: (n, D) float32 as numbers, or raw little-endian bytes behind the JSON."""
    output: dict[str, Any] = {"name": OUTPUT, "datatype": "FP32", "shape": list(vectors.shape)}
    raw = vectors.astype("<f4").tobytes() if request.binary else b""
    if request.binary:
        output["parameters"] = {"binary_data_size": len(raw)}
    else:
        output["data"] = vectors.ravel().tolist()
    answer: dict[str, Any] = {"model_name": model, "model_version": VERSION, "outputs": [output]}
    if request.id is not None:
        answer["id"] = request.id
    head = to_json(answer)
    if not request.binary:
        return head, {"Content-Type": "application/json"}
    return head + raw, {"Content-Type": "application/octet-stream", LENGTH_HEADER: str(len(head))}


def _length(header: str | None, size: int) -> int:
    if header is None:
        return size
    if not header.isascii() or not header.isdigit() or len(header) > 12 or int(header) > size:
        raise ApiError(400, f"{LENGTH_HEADER} is not a number of bytes within the body")
    return int(header)


def _is_binary(request: InferRequest, requested: list[RequestedOutput]) -> bool:
    if requested and requested[0].parameters.binary_data is not None:
        return requested[0].parameters.binary_data
    return bool(request.parameters.binary_data_output)


def _images(tensor: InputTensor, raw: bytes, image_shape: tuple[int, int, int], max_images: int) -> torch.Tensor:
    if tensor.datatype != "UINT8":
        raise ApiError(400, f"{INPUT} is {tensor.datatype[:32]}; the model takes UINT8")
    shape = tensor.shape
    if len(shape) != 4 or shape[1:] != list(image_shape) or not 1 <= shape[0] <= max_images:
        taken = ", ".join(map(str, image_shape))
        raise ApiError(400, f"{INPUT} has the shape {shape}; the model takes [1 to {max_images}, {taken}]")
    read = _from_numbers if tensor.parameters.binary_data_size is None else _from_bytes
    pixels = read(tensor, raw, math.prod(shape))
    return torch.frombuffer(bytearray(pixels), dtype=torch.uint8).reshape(shape)


def _from_bytes(tensor: InputTensor, raw: bytes, count: int) -> bytes:
    if tensor.data is not None or tensor.parameters.binary_data_size != len(raw):
        raise ApiError(400, f"{INPUT} announces {tensor.parameters.binary_data_size} raw bytes alone; {len(raw)} came")
    _check_count(len(raw), count)
    return raw


def _from_numbers(tensor: InputTensor, raw: bytes, count: int) -> bytes:
    if not isinstance(tensor.data, list) or raw:
        raise ApiError(400, f"{INPUT} has neither a list of data nor a binary_data_size that announces raw bytes")
    rows = _innermost(tensor.data, math.prod(tensor.shape[:-1]))
    _check_count(sum(map(len, rows)), count)
    # Every type is checked before anything is converted: numpy would make a few long strings gigabytes wide.
    if len({len(row) for row in rows}) > 1 or any(set(map(type, row)) != {int} for row in rows):
        raise ApiError(400, _NOT_PIXELS)
    try:
        return b"".join(map(bytes, rows))
    except ValueError:
        raise ApiError(400, _NOT_PIXELS) from None


def _check_count(values: int, count: int) -> None:
    if values != count:
        raise ApiError(400, f"{INPUT} has {values} values, not the {count} of its shape")


def _innermost(rows: list[Any], most: int) -> list[list[Any]]:
    """The lists at the bottom of nested lists of one depth, at most ``most`` at four levels."""
    nested = [rows]
    for _ in range(_DEPTH):
        if not (nested and nested[0] and isinstance(nested[0][0], list)):
            return nested
        if sum(map(len, nested)) > most:
            break
        nested = list(itertools.chain.from_iterable(nested))
        if not all(isinstance(row, list) for row in nested):
            break
    raise ApiError(400, _NOT_PIXELS)
