"""/v1/info, /v1/compare and /v1/embeddings: the model itself, without a collection."""

from typing import Annotated, Literal

import numpy as np
from fastapi import APIRouter, Request
from fastapi import Body as BodyParameter
from pydantic import BaseModel, Field
from pydantic_core import to_json
from starlette.responses import Response

from plsc.serve.admission import caller_of
from plsc.serve.errors import error_responses
from plsc.serve.routes.search import is_match
from plsc.serve.routing import JsonRoute, Served, requires
from plsc.serve.schemas import IMAGE, Body, Input, Warnings, examples, with_warnings

router = APIRouter(prefix="/v1", route_class=JsonRoute, tags=["model"])


class ModelInfo(BaseModel):
    """The model that embeds; embeddings of one ``contract_id`` may be compared.

    ``image_size`` is the side of square images in pixels, or [height, width].
    """

    source: str
    contract_id: str
    embedding_dim: int
    image_size: int | tuple[int, int]


class LimitsInfo(BaseModel):
    """Limits of one request."""

    body_bytes: int
    image_pixels: int
    inputs: int
    k: int
    matches: int
    collections: int


class Info(BaseModel):
    """The service: its model, threshold and limits, and the caller's role."""

    version: str
    model: ModelInfo
    threshold: float | None
    false_match_rate: float | None
    limits: LimitsInfo
    detector: bool
    thumbnails: bool
    link_key: str | None
    role: Literal["read", "write", "admin"]


class CompareBody(Body):
    """Two inputs to compare."""

    a: Input
    b: Input


class CompareView(BaseModel):
    """The cosine of two inputs, and whether it reaches the service's threshold."""

    score: float
    threshold: float | None
    same_person: bool | None
    warnings: Warnings = Field(default_factory=list)


class EmbeddingsBody(Body):
    """Inputs to embed."""

    inputs: list[Input] = Field(fail_fast=True, min_length=1)


class EmbeddingsView(BaseModel):
    """Embeddings as the model gives them, not normalised."""

    contract_id: str
    dim: int
    embeddings: list[list[float]]
    warnings: Warnings = Field(default_factory=list)


@router.get("/info", responses=error_responses())
@requires("read")
async def info(service: Served, request: Request) -> Info:
    """The service: what it embeds with, what it judges by, and what the caller may do."""
    from plsc import __version__

    embedder, settings = service.embedder, service.settings
    limits = {name: getattr(settings.limits, name) for name in LimitsInfo.model_fields}
    model = ModelInfo(
        source=service.model_name,
        contract_id=service.contract_id,
        embedding_dim=embedder.embedding_dim,
        image_size=embedder.image_size,
    )
    return Info(
        version=__version__,
        model=model,
        threshold=settings.threshold,
        false_match_rate=settings.false_match_rate,
        limits=LimitsInfo(**limits),
        detector=service.detector is not None,
        thumbnails=service.thumbnails.keeps,
        link_key=settings.link_key,
        role=caller_of(request.scope).role,
    )


@router.post("/compare", responses=error_responses(413, 415, 422, 504), response_model_exclude_unset=True)
@requires("read")
async def compare(
    body: Annotated[
        CompareBody,
        BodyParameter(openapi_examples=examples(two_pictures={"a": {"image": IMAGE}, "b": {"image": IMAGE}})),
    ],
    service: Served,
) -> CompareView:
    """The cosine of two inputs, and whether it reaches the service's threshold."""
    vectors, warnings, _ = await service.vectors([body.a, body.b], ["a", "b"], service.deadline(None))
    a, b = vectors.astype(np.float64)
    score = float(np.clip(a @ b / np.linalg.norm(a) / np.linalg.norm(b), -1, 1))
    threshold = service.settings.threshold
    answer = CompareView(score=score, threshold=threshold, same_person=is_match(score, threshold))
    return with_warnings(answer, warnings)


@router.post("/embeddings", response_model=EmbeddingsView, responses=error_responses(413, 415, 422, 504))
@requires("read")
async def embeddings(
    body: Annotated[EmbeddingsBody, BodyParameter(openapi_examples=examples(a_picture={"inputs": [{"image": IMAGE}]}))],
    service: Served,
) -> Response:
    """Embeddings of the inputs as the model gives them, not normalised: their length tells of the picture's quality."""
    names = [f"inputs[{index}]" for index in range(len(body.inputs))]
    vectors, warnings, _ = await service.vectors(body.inputs, names, service.deadline(None))
    answer = {
        "contract_id": service.contract_id,
        "dim": service.embedder.embedding_dim,
        "embeddings": vectors.tolist(),
        **({"warnings": warnings} if warnings else {}),
    }
    return Response(to_json(answer), media_type="application/json")
