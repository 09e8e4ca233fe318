"""/v1/collections/{collection}/search, the service's hottest path: lean from the body's bytes to the answer's."""

import math
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from pydantic import ValidationError
from pydantic_core import to_json
from starlette.responses import Response

from plsc.serve.examples import SEARCH, SEARCHES
from plsc.serve.failures import Refusal
from plsc.serve.inputs import IMAGE_TYPES
from plsc.serve.persons_api import check_count, parse_filter, read_filter
from plsc.serve.routing import errors, get_service, read_json, require_json, said
from plsc.serve.schemas import COLLECTION, SearchBody, SearchView
from plsc.serve.searching import Answer, Search
from plsc.serve.service import Service

router = APIRouter(tags=["search"])
_BODY: dict[str, Any] = {
    "required": True,
    "content": {
        "application/json": {
            "schema": {"$ref": "#/components/schemas/SearchBody"},
            "examples": {
                "one": {"summary": "One query", "value": SEARCH},
                "several": {"summary": "Several queries, with a threshold and a filter", "value": SEARCHES},
            },
        },
        **{kind: {"schema": {"type": "string", "format": "binary"}} for kind in IMAGE_TYPES},
    },
}
_PARAMETERS = {"description": "For a body that is an image; JSON has it in the body"}


@router.post(
    "/v1/collections/{collection}/search", responses=errors(404, 409, 413, 415, 422, 504),
    response_model=SearchView, openapi_extra={"requestBody": _BODY},
)  # fmt: skip
async def search(
    request: Request,
    collection: Annotated[str, Path(pattern=COLLECTION, examples=["staff"])],
    k: Annotated[int | None, Query(ge=1, **_PARAMETERS)] = None,
    threshold: Annotated[float | None, Query(ge=-1, le=1, **_PARAMETERS)] = None,
    filter: Annotated[str | None, Query(**_PARAMETERS)] = None,
    deadline_ms: Annotated[int | None, Query(ge=1, le=3_600_000, **_PARAMETERS)] = None,
) -> Response:
    """Find the persons who are most like each query: an image, or vectors, or a picture as the body itself."""
    service = get_service(request)
    await service.comparable(collection)
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind in IMAGE_TYPES:
        given: dict[str, Any] = {"k": k, "threshold": threshold, "deadline_ms": deadline_ms}
        body = SearchBody.model_construct(**{key: value for key, value in given.items() if value is not None})
        deadline = service.deadline(body.deadline_ms)
        where = read_filter(filter)
        vectors = await service.embed([(await request.body(), None)], ["the body"], deadline)
    else:
        require_json(request)
        body = _parsed(await request.body())
        deadline = service.deadline(body.deadline_ms)
        where = parse_filter(body.filter)
        inputs = [body.query] if body.query is not None else body.queries or []
        check_count(len(inputs), service)
        _check_k(service, body.k, len(inputs))
        names = ["query"] if body.query is not None else [f"queries[{place}]" for place in range(len(inputs))]
        vectors = await service.vectors(inputs, names, deadline)
    _check_k(service, body.k, len(vectors))
    answer = await service.search(Search(collection, vectors, body.k, body.threshold, where), deadline)
    return Response(await _shown(service, collection, answer, body.threshold), media_type="application/json")


def _parsed(content: bytes) -> SearchBody:
    try:
        return SearchBody.model_validate(read_json(content))
    except ValidationError as error:
        raise Refusal(400, said(error.errors())) from None


def _check_k(service: Service, k: int, queries: int) -> None:
    limits = service.settings.limits
    if k > limits.k:
        raise Refusal(400, f"k is {k}; at most {limits.k} matches are given")
    if k * queries > limits.matches:
        raise Refusal(400, f"{queries} queries with k {k} ask for more than {limits.matches:,} matches; ask in parts")


async def _shown(service: Service, collection: str, answer: Answer, asked: float | None) -> bytes:
    threshold = service.settings.threshold if asked is None else asked
    figures = await service.figures(collection)
    recall = float(figures.get("recall", math.nan))
    results = [
        {
            "matches": [
                {
                    "person": {"id": person.id, "name": person.name, "metadata": person.metadata},
                    "face": match.face,
                    "score": match.score,
                    "same_person": None if threshold is None else match.score >= threshold,
                }
                for match, person in matches
            ]
        }
        for matches in answer
    ]
    return to_json({
        "results": results, "threshold": threshold, "approximate": bool(figures.get("approximate", False)),
        "recall": recall if math.isfinite(recall) else None,
    })  # fmt: skip
