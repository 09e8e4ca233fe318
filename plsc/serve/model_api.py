"""/v1/info, /v1/compare and /v1/embeddings: the model itself, without a collection."""

import numpy as np
from fastapi import APIRouter, Request
from pydantic_core import to_json
from starlette.responses import Response

from plsc.serve.guard import LOCAL
from plsc.serve.persons_api import check_count
from plsc.serve.routing import JsonRoute, Served, errors
from plsc.serve.schemas import CompareBody, CompareView, EmbeddingsBody, EmbeddingsView, Info, LimitsInfo, ModelInfo

router = APIRouter(prefix="/v1", route_class=JsonRoute, tags=["model"])


@router.get("/info", responses=errors())
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
        role=request.scope["state"].get("caller", LOCAL).role,
    )


@router.post("/compare", responses=errors(413, 415, 422, 504))
async def compare(body: CompareBody, service: Served) -> CompareView:
    """The cosine of two inputs, and whether it reaches the service's threshold."""
    vectors = await service.vectors([body.a, body.b], ["a", "b"], service.deadline(None))
    wide = vectors.astype(np.float64)
    score = float(np.clip(wide[0] @ wide[1] / np.linalg.norm(wide[0]) / np.linalg.norm(wide[1]), -1, 1))
    threshold = service.settings.threshold
    return CompareView(score=score, threshold=threshold, same_person=service.judged(score, threshold))


@router.post("/embeddings", response_model=EmbeddingsView, responses=errors(413, 415, 422, 504))
async def embeddings(body: EmbeddingsBody, service: Served) -> Response:
    """Embeddings of the inputs as the model gives them, not normalised: their length tells of the picture's quality."""
    check_count(len(body.inputs), service)
    names = [f"inputs[{place}]" for place in range(len(body.inputs))]
    vectors = await service.vectors(body.inputs, names, service.deadline(None))
    shown = {
        "contract_id": service.contract_id,
        "dim": service.embedder.embedding_dim,
        "embeddings": vectors.tolist(),
    }
    return Response(to_json(shown), media_type="application/json")
