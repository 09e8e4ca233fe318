"""/v1/collections/{collection}/search, the service's hottest path: lean from the body's bytes to the answer's."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Annotated, Any, Literal, TypeVar

import orjson
from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from starlette.responses import Response

from plsc.gallery.validation import COLLECTION_NAME, COLLECTION_NAME_RULE
from plsc.gallery.values import Match
from plsc.index.ann import TUNED_FOR
from plsc.serve import schemas
from plsc.serve.access import ScoreView, current_caller
from plsc.serve.decoding import MOST_FACES, DecodedImage
from plsc.serve.errors import ApiError, SeenFace, error_responses, first_error
from plsc.serve.faces import every_face, show_face, show_taken
from plsc.serve.limits import charge
from plsc.serve.routing import (
    PICTURE_TYPES,
    DirectRoute,
    Upload,
    check_type,
    content_type,
    get_service,
    is_upload,
    query_parameters,
    read_body,
    read_json,
    record_ids,
    requires,
)
from plsc.serve.searching import Search, SearchAnswer, answer_too_large
from plsc.serve.service import Service, Spaces

_IS_NAME = re.compile(COLLECTION_NAME).search
_MATCH_BYTES = 96  # of a match besides its person
_MAX_DEADLINE_MS = 3_600_000
_SEARCHES = {"queries": [{"image": schemas.IMAGE}] * 2, "k": 5, "threshold": 0.4, "filter": schemas.FILTER}

Faces = Annotated[Literal["largest", "all"], Field(description="`all`: each face of a picture, at most 64, as `faces`")]

router = APIRouter(tags=["search"], route_class=DirectRoute)
Form = TypeVar("Form", bound=BaseModel)


class SearchBody(schemas.Body):
    """One ``query`` or several ``queries``."""

    model_config = ConfigDict(json_schema_extra={"oneOf": schemas.exactly_one("query", "queries")})

    query: schemas.Input | None = None
    queries: list[schemas.Input] | None = Field(None, fail_fast=True, min_length=1)
    k: int = Field(10, ge=1, description="Matches of each query; GET /v1/info tells the most")
    threshold: schemas.Score | None = Field(None, description="Only matches with at least this score")
    filter: schemas.FilterBody | None = None
    faces: Faces = "largest"
    deadline_ms: int | None = Field(
        None, ge=1, le=_MAX_DEADLINE_MS, description="Give up (504) rather than answer later"
    )

    @model_validator(mode="after")
    def _one_form(self) -> "SearchBody":
        if (self.query is None) == (self.queries is None):
            raise ValueError("a search has either query or queries")
        return self


class SearchQuery(BaseModel):
    """Options of a search in the query string, where an image is the body itself; those of a JSON body go before."""

    k: int = Field(10, ge=1)
    threshold: schemas.Score | None = None
    filter: str | None = Field(None, description="A filter as JSON text")
    faces: Faces = "largest"
    deadline_ms: int | None = Field(None, ge=1, le=_MAX_DEADLINE_MS)


class MatchedPerson(BaseModel):
    """A person as shown with a match."""

    id: int
    name: str | None
    metadata: dict[str, schemas.Scalar]
    external_id: str | None = Field(None, description="Left out where there is none")


class MatchView(BaseModel):
    """``score`` is the cosine with the person's best face, ``same_person`` whether it reaches the threshold.

    A search of N faces makes N comparisons: expect about N times the threshold's false-match rate of false matches.
    """

    person: MatchedPerson
    face: int
    score: float
    same_person: bool | None


class FaceMatches(SeenFace):
    """A face, and its matches, best first."""

    matches: list[MatchView]


class MatchesView(BaseModel):
    """The matches of one query, best first; of a picture with several faces, those of the largest, or of ``face``.

    Where a detector looked, ``faces_found`` counts the faces, and ``box`` is that of the one that was taken.
    """

    matches: list[MatchView]
    faces_found: int | None = Field(None, description="Left out where no detector looked")
    box: list[float] | None = Field(None, description="Left, top, right, bottom, as that of a face; likewise")
    faces: list[FaceMatches] | None = Field(None, description="Only with faces=all; the first one is the largest")


class SearchView(BaseModel):
    """One entry in ``results`` for each query. ``contract_id`` is the model's whose vectors were searched.

    Several models' ids have commas between: those models are compatible.
    """

    results: list[MatchesView]
    threshold: float | None
    contract_id: str
    approximate: bool
    recall: float | None
    warnings: schemas.Warnings = []


_COLLECTION_PARAMETER = {
    "name": "collection",
    "in": "path",
    "required": True,
    "schema": {"type": "string", "pattern": COLLECTION_NAME},
    "example": "staff",
}
_UPLOAD = Upload("queries", texts=tuple(SearchQuery.model_fields))
_BODY = {
    "required": True,
    "content": {
        "application/json": {
            "schema": {"$ref": "#/components/schemas/SearchBody"},
            "examples": schemas.examples(
                one_query={"query": {"image": schemas.IMAGE}, "k": 5}, several_with_a_threshold_and_a_filter=_SEARCHES
            ),
        },
        **_UPLOAD.described()["requestBody"]["content"],
    },
}


@router.post(
    "/v1/collections/{collection}/search",
    responses=error_responses(404, 409, 413, 415, 422, 504),
    response_model=SearchView,
    openapi_extra={
        "parameters": [_COLLECTION_PARAMETER, *query_parameters(SearchQuery, filter=schemas.FILTER_PARAMETER)],
        "requestBody": _BODY,
    },
)
@requires("search", counts_as="searches")
async def search(request: Request) -> Response:
    """Find the persons most similar to each query: an image, or vectors, or a picture as the body itself."""
    service, collection = get_service(request.scope), request.path_params["collection"]
    if not _IS_NAME(collection):
        raise ApiError(400, f"{COLLECTION_NAME_RULE}, unlike {ascii(collection)[:80]}")
    await service.require_collection(collection)
    form, names = await _read_search(request, service)
    deadline, filter = service.deadline(form.deadline_ms), schemas.parse_filter(form.filter)

    async def answered(
        spaces: Spaces,
    ) -> tuple[SearchAnswer, ScoreView, list[str], str, Sequence[DecodedImage | None]]:
        contract_id, view = spaces.info.contract_id, ScoreView.of(current_caller(), service.settings_of(spaces))
        inputs = [form.query] if form.query is not None else form.queries or []
        pictures: Sequence[DecodedImage | None]
        if form.faces == "all":
            warnings: list[str] = []
            vectors, pictures = await every_face(service, inputs, names, deadline, contract_id)
        else:
            vectors, warnings, _, pictures = await service.vectors(inputs, names, deadline, [contract_id])
        threshold = view.search_threshold(form.threshold)
        wanted = Search(collection, vectors, form.k, threshold, filter, contract_id)
        return await service.search(wanted, deadline), view, warnings, contract_id, pictures

    answer, view, warnings, contract_id, pictures = await service.with_collection(collection, answered)
    statistics = await service.statistics(collection)
    _check_size(answer, service.settings.limits.answer_bytes)
    if not any(answer.matches):
        warnings += await service.filter_warnings(collection, filter)
    if "search" in service.settings.audit_events:
        record_ids(request, [match.person for matches in answer.matches for match in matches])
    # A SearchView as JSON, past pydantic: its models would cost as much as the search.
    matched = (_matches(view.matches(matches, form.threshold), answer.persons) for matches in answer.matches)
    shown = {
        "results": [_result(picture, matched, form.faces) for picture in pictures],
        "threshold": view.threshold if form.threshold is None else form.threshold,
        "contract_id": contract_id,
        **_quality(statistics, form.k),
        **({"warnings": warnings} if warnings else {}),
    }
    return Response(orjson.dumps(shown), media_type="application/json")


async def _read_search(request: Request, service: Service) -> tuple[SearchBody, list[str]]:
    """The search that a request asks for, and what errors call its inputs."""
    kind = content_type(request.scope)
    check_type(kind, _UPLOAD)
    body = await read_body(request, service, _UPLOAD)
    if is_upload(kind):
        body = {"queries": body.pop(_UPLOAD.pictures), **_options(body)}
    elif request.scope["query_string"] and isinstance(body, dict):
        body = {**_options(dict(request.query_params)), **body}
    form = _parse(SearchBody, body)
    count = 1 if form.query is not None else len(form.queries or [])
    _check_k(service, form.k, count * (MOST_FACES if form.faces == "all" else 1))
    charge(count)
    names = ["query"] if form.query is not None else [f"queries[{index}]" for index in range(count)]
    return form, ["the body"] if kind in PICTURE_TYPES else names


def _options(texts: dict[str, str]) -> dict[str, Any]:
    """What texts give as a JSON body would; :class:`ApiError` 400 for what it must not be."""
    options = _parse(SearchQuery, texts).model_dump(exclude_unset=True)
    if options.get("filter") is not None:
        options["filter"] = read_json(options["filter"].encode(), len(options["filter"]), "the filter")
    return options


def _parse(form: type[Form], value: Any) -> Form:
    try:
        return form.model_validate(value)
    except ValidationError as error:
        raise ApiError(400, first_error(error.errors())) from None


def _check_k(service: Service, k: int, queries: int) -> None:
    limits = service.settings.limits
    if k > limits.k:
        raise ApiError(400, f"k is {k}; at most {limits.k} matches are given")
    if k * queries > limits.matches:
        raise ApiError(400, f"{queries} queries with k {k} ask for more than {limits.matches:,} matches; ask in parts")


def _check_size(answer: SearchAnswer, limit: int) -> None:
    """:class:`ApiError` if the answer would be too large: one person's metadata may be in it for every query."""
    persons = answer.persons
    size = sum(len(persons.get(match.person, b"")) + _MATCH_BYTES for matches in answer.matches for match in matches)
    if size > limit:
        raise answer_too_large(limit)


def _result(picture: DecodedImage | None, matched: Iterator[list[dict[str, Any]]], faces: str) -> dict[str, Any]:
    """A :class:`MatchesView` of the next ``matched``, one of each face of ``picture`` where all were searched for."""
    if picture is None or not picture.taken:
        return {"matches": next(matched)}
    if faces != "all":
        return {"matches": next(matched), **show_taken(picture)}
    each = list(islice(matched, len(picture.taken)))
    found = [{**show_face(face), "matches": own} for face, own in zip(picture.taken, each, strict=True)]
    return {"matches": each[0], **show_taken(picture), "faces": found}


def _matches(matches: Sequence[tuple[Match, bool | None]], persons: Mapping[int, bytes]) -> list[dict[str, Any]]:
    """Each a :class:`MatchView`; ``persons`` are JSON already."""
    return [
        {"person": orjson.Fragment(person), "face": match.face, "score": match.score, "same_person": same_person}
        for match, same_person in matches
        if (person := persons.get(match.person)) is not None
    ]


def _quality(statistics: Mapping[str, float], k: int) -> dict[str, Any]:
    """Whether the search is approximate, and its recall: None where it was not measured, as for more than ten."""
    approximate, recall = bool(statistics.get("approximate", False)), float(statistics.get("recall", math.nan))
    is_known = math.isfinite(recall) and not (approximate and k > TUNED_FOR)
    return {"approximate": approximate, "recall": recall if is_known else None}
