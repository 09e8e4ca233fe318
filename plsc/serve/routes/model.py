"""/v1/info, /v1/compare, /v1/detect and /v1/embeddings: the model itself, without a collection."""

from typing import Annotated

import numpy as np
from fastapi import APIRouter
from pydantic import BaseModel, Field
from pydantic_core import to_json
from starlette.responses import Response

from plsc.embedding.quality import MEASURES
from plsc.gallery.validation import COLLECTION_NAME
from plsc.serve.access import Right, Role, ScoreView, current_caller
from plsc.serve.errors import SeenFace, error_responses
from plsc.serve.faces import every_face, show_face
from plsc.serve.limits import charge, effective_limits
from plsc.serve.routing import BodyRoute, Served, Upload, accepts, requires
from plsc.serve.schemas import IMAGE, Body, Input, Warnings, body_like, with_warnings

router = APIRouter(prefix="/v1", route_class=BodyRoute, tags=["model"])
_TWO, _SEVERAL = Upload(named=("a", "b")), Upload("inputs", texts=("collection",))
_PICTURES = Upload("inputs")


class ModelInfo(BaseModel):
    """The model that embeds; embeddings of one ``contract_id`` may be compared.

    ``image_size`` is the side of square images in pixels, or [height, width].
    """

    source: str
    contract_id: str
    embedding_dim: int
    image_size: int | tuple[int, int]


class LimitsInfo(BaseModel):
    """Limits of one request, and of what is stored; null is none."""

    body_bytes: int
    image_pixels: int
    jpeg_pixels: int
    whole_pixels: int
    inputs: int
    k: int
    matches: int
    answer_bytes: int
    collections: int
    persons: int | None
    store_bytes: int | None
    metadata_bytes: int | None


class Info(BaseModel):
    """The service: its model, threshold and limits, and what the caller may do.

    ``fpir`` is what the threshold of each search is predicted to hold, by the number of persons in the collection then;
    beyond ``fpir_persons`` it is extrapolated. ``threshold`` and ``false_match_rate`` are then of comparisons alone.
    ``score_step`` is what this caller's scores are multiples of, 0 where they are exact; ``collections`` null is all.
    ``item`` and ``items`` name one and many of what collections hold. ``next_model`` is the contract id of the model
    that collections can be moved to, null without one. ``audit_head`` is the audit log's newest line, for admins of all
    collections: note it elsewhere to see cuts by it.
    """

    version: str
    model: ModelInfo
    next_model: str | None
    threshold: float | None
    false_match_rate: float | None
    fpir: float | None
    fpir_persons: int | None
    limits: LimitsInfo
    detector: bool
    thumbnails: bool
    link_key: str | None
    item: str
    items: str
    role: Role
    rights: list[Right]
    collections: list[str] | None
    score_step: float
    rate_limits: list[str]
    audit_head: str | None


class CompareBody(Body):
    """Two inputs to compare."""

    a: Input
    b: Input


class CompareView(BaseModel):
    """The cosine of two inputs, and whether it reaches the service's threshold."""

    score: float
    threshold: float | None
    same_person: bool | None
    warnings: Warnings = []


class EmbeddingsBody(Body):
    """Inputs to embed, by the service's own model, or by the one that a ``collection`` is searched by."""

    inputs: list[Input] = Field(fail_fast=True, min_length=1)
    collection: str | None = Field(None, pattern=COLLECTION_NAME, examples=["staff"])


class DetectBody(Body):
    """Pictures in which faces are looked for."""

    inputs: list[Input] = Field(fail_fast=True, min_length=1)


class DetectedFace(SeenFace):
    """A face, and the quality of its aligned crop, by what measured it; more is better."""

    quality: dict[str, float]


class DetectedView(BaseModel):
    """The faces of one picture, the largest first; ``faces_found`` counts those beyond the 64th, too."""

    faces_found: int
    faces: list[DetectedFace]


class DetectView(BaseModel):
    """One entry in ``results`` for each picture."""

    results: list[DetectedView]


class EmbeddingsView(BaseModel):
    """Embeddings as the model gives them, not normalised."""

    contract_id: str
    dim: int
    embeddings: list[list[float]]
    warnings: Warnings = []


@router.get("/info", responses=error_responses())
@requires("search")
async def info(service: Served) -> Info:
    """The service: what it embeds with, what it judges by, and what the caller may do."""
    from plsc import __version__

    embedder, settings, caller = service.embedder, service.settings, current_caller()
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
        next_model=service.next_contract_id,
        threshold=settings.threshold,
        false_match_rate=settings.false_match_rate,
        fpir=None if settings.search_thresholds is None else settings.search_thresholds.fpir,
        fpir_persons=None if settings.search_thresholds is None else settings.search_thresholds.persons,
        limits=LimitsInfo(**limits),
        detector=service.detector is not None,
        thumbnails=service.thumbnails.keeps,
        link_key=settings.link_key,
        item=settings.items.one,
        items=settings.items.many,
        role=caller.role,
        rights=sorted(caller.rights),
        collections=None if caller.collections is None else sorted(caller.collections),
        audit_head=str(service.audit.head) if caller.role == "admin" and caller.collections is None else None,
        rate_limits=[str(limit) for limit in effective_limits(caller.rates, settings.rate_limits)],
        score_step=ScoreView.of(caller, settings).step,
    )


@router.post("/compare", responses=error_responses(409, 413, 415, 422, 504), openapi_extra=_TWO.described())
@requires("search", counts_as="searches")
@accepts(_TWO)
async def compare(
    body: Annotated[CompareBody, body_like(two_pictures={"a": {"image": IMAGE}, "b": {"image": IMAGE}})],
    service: Served,
) -> CompareView:
    """The cosine of two inputs, and whether it reaches the service's threshold."""
    vectors, warnings, *_ = await service.vectors([body.a, body.b], ["a", "b"], service.deadline(None))
    a, b = vectors.astype(np.float64)
    score = float(np.clip(a @ b / np.linalg.norm(a) / np.linalg.norm(b), -1, 1))
    view = ScoreView.of(current_caller(), service.settings)
    answer = CompareView(score=view.score(score), threshold=view.threshold, same_person=view.same_person(score))
    return with_warnings(answer, warnings)


@router.post("/detect", responses=error_responses(413, 415, 422, 504), openapi_extra=_PICTURES.described())
@requires("search", counts_as="searches")
@accepts(_PICTURES)
async def detect(
    body: Annotated[DetectBody, body_like(a_picture={"inputs": [{"image": IMAGE}]})], service: Served
) -> DetectView:
    """The faces that the service's detector finds in pictures, and their quality as enrolments are judged by it."""
    names = [f"inputs[{index}]" for index in range(len(body.inputs))]
    charge(len(names))
    vectors, pictures = await every_face(service, body.inputs, names, service.deadline(None), service.contract_id)
    gates, rows = {**MEASURES, **service.settings.quality_gates}, iter(vectors)
    results = []
    for picture in pictures:
        faces = [
            {**show_face(face), "quality": {name: gate.quality(crop, vector) for name, gate in gates.items()}}
            for face, crop, vector in zip(picture.taken, picture.pixels, rows, strict=False)  # the next of the rows
        ]
        results.append(DetectedView.model_validate({"faces_found": picture.found, "faces": faces}))
    return DetectView(results=results)


@router.post(
    "/embeddings",
    response_model=EmbeddingsView,
    responses=error_responses(404, 409, 413, 415, 422, 504),
    openapi_extra=_SEVERAL.described(),
)
@requires("search", "embeddings", counts_as="embeddings")
@accepts(_SEVERAL)
async def embeddings(
    body: Annotated[EmbeddingsBody, body_like(a_picture={"inputs": [{"image": IMAGE}]})], service: Served
) -> Response:
    """Embeddings of the inputs as the model gives them, not normalised: their length tells of the picture's quality."""
    charge(len(body.inputs))
    names = [f"inputs[{index}]" for index in range(len(body.inputs))]
    space = service.contract_id
    if body.collection is not None:
        current_caller().check(requires("search"), body.collection)
        space = (await service.require_collection(body.collection)).info.contract_id
    vectors, warnings, *_ = await service.vectors(body.inputs, names, service.deadline(None), [space])
    answer = {
        "contract_id": service.model_for(space),
        "dim": vectors.shape[1],
        "embeddings": vectors.tolist(),
        **({"warnings": warnings} if warnings else {}),
    }
    return Response(to_json(answer), media_type="application/json")
