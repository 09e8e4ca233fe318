"""/v1/collections/{collection}/search, the service's hottest path: lean from the body's bytes to the answer's."""

import math
from typing import Annotated, Any, TypeVar

import orjson
from fastapi import APIRouter, Path, Query, Request
from pydantic import BaseModel, Field, ValidationError
from starlette.responses import Response

from plsc.serve.asgi import Scope
from plsc.serve.failures import Refusal
from plsc.serve.inputs import IMAGE_TYPES
from plsc.serve.persons_api import check_count, parse_filter, read_filter
from plsc.serve.routing import content_type, errors, get_service, read_json, require_json, said
from plsc.serve.schemas import COLLECTION, Score, SearchBody, SearchView
from plsc.serve.searching import Answer, Search, too_large
from plsc.serve.service import Service

router = APIRouter(tags=["search"])
_MATCH_BYTES = 96  # of a match besides its person
Form = TypeVar("Form", bound=BaseModel)
_BODY: dict[str, Any] = {
    "required": True,
    "content": {
        "application/json": {"schema": {"$ref": "#/components/schemas/SearchBody"}},
        **{kind: {"schema": {"type": "string", "format": "binary"}} for kind in IMAGE_TYPES},
    },
}


class SearchQuery(BaseModel):
    """What the address says of a search whose body is a picture; JSON has it in the body."""

    k: int = Field(10, ge=1)
    threshold: Score | None = None
    filter: str | None = Field(None, description="A filter as JSON text")
    deadline_ms: int | None = Field(None, ge=1, le=3_600_000)


@router.post(
    "/v1/collections/{collection}/search",
    responses=errors(404, 409, 413, 415, 422, 504),
    response_model=SearchView,
    openapi_extra={"requestBody": _BODY},
)
async def search(
    request: Request,
    collection: Annotated[str, Path(pattern=COLLECTION, examples=["staff"])],
    given: Annotated[SearchQuery, Query()],
) -> Response:
    """Find the persons who are most like each query: an image, or vectors, or a picture as the body itself."""
    shown = await answer_search(request.scope, collection, await request.body())
    return Response(shown, media_type="application/json")


async def answer_search(scope: Scope, collection: str, content: bytes) -> bytes:
    """The answer, as JSON, to a search whose body is ``content``."""
    service = get_service(scope)
    await service.comparable(collection)
    kind = content_type(scope)
    if kind in IMAGE_TYPES:
        given = _parsed(SearchQuery, dict(Request(scope).query_params))
        deadline, where = service.deadline(given.deadline_ms), read_filter(given.filter)
        _check_k(service, given.k, 1)
        vectors = await service.embed([(content, None)], ["the body"], deadline)
        search = Search(collection, vectors, given.k, given.threshold, where)
        return await _shown(service, search, await service.search(search, deadline))
    require_json(kind)
    body = _parsed(SearchBody, read_json(content, service.most_values))
    deadline, where = service.deadline(body.deadline_ms), parse_filter(body.filter)
    inputs = [body.query] if body.query is not None else body.queries or []
    check_count(len(inputs), service)
    _check_k(service, body.k, len(inputs))
    names = ["query"] if body.query is not None else [f"queries[{place}]" for place in range(len(inputs))]
    vectors = await service.vectors(inputs, names, deadline)
    search = Search(collection, vectors, body.k, body.threshold, where)
    return await _shown(service, search, await service.search(search, deadline))


def _parsed(form: type[Form], value: Any) -> Form:
    try:
        return form.model_validate(value)
    except ValidationError as error:
        raise Refusal(400, said(error.errors())) from None


def _check_k(service: Service, k: int, queries: int) -> None:
    limits = service.settings.limits
    if k > limits.k:
        raise Refusal(400, f"k is {k}; at most {limits.k} matches are given")
    if k * queries > limits.matches:
        raise Refusal(400, f"{queries} queries with k {k} ask for more than {limits.matches:,} matches; ask in parts")


def _check_size(service: Service, answer: Answer) -> None:
    """:class:`Refusal` if the answer would be too large: one person's metadata may be in it for every query."""
    most, persons = service.settings.limits.answer_bytes, answer.persons
    size = sum(len(persons.get(match.person, b"")) + _MATCH_BYTES for matches in answer.matches for match in matches)
    if size > most:
        raise too_large(most)


async def _shown(service: Service, search: Search, answer: Answer) -> bytes:
    threshold = service.settings.threshold if search.threshold is None else search.threshold
    figures = await service.figures(search.collection)
    recall = float(figures.get("recall", math.nan))
    _check_size(service, answer)
    results = [
        {
            "matches": [
                {
                    "person": orjson.Fragment(known),
                    "face": face,
                    "score": score,
                    "same_person": None if threshold is None else score >= threshold,
                }
                for person, face, score in matches
                if (known := answer.persons.get(person)) is not None
            ]
        }
        for matches in answer.matches
    ]
    shown = {
        "results": results,
        "threshold": threshold,
        "approximate": bool(figures.get("approximate", False)),
        "recall": recall if math.isfinite(recall) else None,
    }
    return orjson.dumps(shown)
