"""/v2: the Open Inference Protocol, so that clients of KServe and Triton can ask the model itself."""

from typing import Annotated, Any

from fastapi import APIRouter, Header, Request
from pydantic import BaseModel
from starlette.responses import JSONResponse, Response

from plsc.serve.failures import Refusal
from plsc.serve.health_api import readiness
from plsc.serve.routing import Served
from plsc.serve.service import Service
from plsc.serve.tensors import INPUT, OUTPUT, VERSION, InferResponse, read_inference, write_inference


class InferenceError(BaseModel):
    """The protocol's errors."""

    error: str


class ServerLive(BaseModel):
    """Whether the server lives."""

    live: bool


class ServerReady(BaseModel):
    """Whether the server, or the model, is ready."""

    ready: bool


class ModelReady(BaseModel):
    """Whether the model is ready."""

    name: str
    ready: bool


class ServerMetadata(BaseModel):
    """The server."""

    name: str
    version: str
    extensions: list[str]


class TensorMetadata(BaseModel):
    """A tensor; -1 is any length."""

    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(BaseModel):
    """The model."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": InferenceError} for status in sorted({400, 401, 403, 500, 503, *statuses})}


JsonLength = Annotated[str | None, Header(description="Bytes of JSON before raw tensors")]
router = APIRouter(prefix="/v2", tags=["open inference protocol"])
_BODY = {
    "required": True,
    "content": {
        "application/json": {"schema": {"$ref": "#/components/schemas/InferRequest"}},
        "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
    },
}


@router.get("", responses={400: {"model": InferenceError}, 403: {"model": InferenceError}})
async def server_metadata() -> ServerMetadata:
    """The server, and the protocol's extensions that it speaks."""
    from plsc import __version__

    return ServerMetadata(name="plsc", version=__version__, extensions=["binary_tensor_data"])


@router.get("/health/live", response_model=ServerLive)
async def server_live() -> ServerLive:
    """The process runs and answers."""
    return ServerLive(live=True)


@router.get("/health/ready", response_model=ServerReady, responses={503: {"model": ServerReady}})
async def server_ready(request: Request) -> JSONResponse:
    """The model can be asked."""
    is_ready = await readiness(request.app.state.gate) == "ready"
    return JSONResponse({"ready": is_ready}, 200 if is_ready else 503)


@router.get("/models/{model}", responses=_errors(404))
async def model_metadata(model: str, service: Served) -> ModelMetadata:
    """The model's input and output."""
    _check(service, model)
    size, dim = service.embedder.image_size, service.embedder.embedding_dim
    return ModelMetadata(
        name=model,
        versions=[VERSION],
        platform="plsc",
        inputs=[TensorMetadata(name=INPUT, datatype="UINT8", shape=[-1, 3, size, size])],
        outputs=[TensorMetadata(name=OUTPUT, datatype="FP32", shape=[-1, dim])],
    )


@router.get("/models/{model}/ready", responses=_errors(404))
async def model_ready(model: str, service: Served) -> ModelReady:
    """The model is loaded."""
    _check(service, model)
    return ModelReady(name=model, ready=True)


@router.get("/models/{model}/versions/{version}", responses=_errors(404))
async def version_metadata(model: str, version: str, service: Served) -> ModelMetadata:
    """The same, for callers that name the version."""
    _check(service, model, version)
    return await model_metadata(model, service)


@router.get("/models/{model}/versions/{version}/ready", responses=_errors(404))
async def version_ready(model: str, version: str, service: Served) -> ModelReady:
    """The same, for callers that name the version."""
    _check(service, model, version)
    return await model_ready(model, service)


@router.post(
    "/models/{model}/infer",
    response_model=InferResponse,
    responses=_errors(404, 413, 415, 504),
    openapi_extra={"requestBody": _BODY},
)
async def infer(
    model: str,
    service: Served,
    request: Request,
    inference_header_content_length: JsonLength = None,
) -> Response:
    """Embed images that are sized and aligned already: UINT8 [n, 3, S, S] to FP32 [n, D]."""
    _check(service, model)
    body, size, most = await request.body(), service.embedder.image_size, service.settings.limits.inputs
    asked = read_inference(body, inference_header_content_length, size, most)
    vectors = await service.embed_images(asked.images, service.deadline(None))
    content, headers = write_inference(vectors, model, asked)
    return Response(content, headers=headers)


@router.post(
    "/models/{model}/versions/{version}/infer",
    response_model=InferResponse,
    responses=_errors(404, 413, 415, 504),
    openapi_extra={"requestBody": _BODY},
)
async def version_infer(
    model: str, version: str, service: Served, request: Request, inference_header_content_length: JsonLength = None
) -> Response:
    """The same, for callers that name the version."""
    _check(service, model, version)
    return await infer(model, service, request, inference_header_content_length)


def _check(service: Service, model: str, version: str = VERSION) -> None:
    if version != VERSION:
        raise Refusal(404, f"there is no version {ascii(version)[:80]} of a model; this service has {VERSION}")
    if model != service.model_name:
        raise Refusal(404, f"there is no model {ascii(model)[:80]}; this service has {service.model_name}")
