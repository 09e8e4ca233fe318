"""/v1/collections/{collection}/persons: persons and their faces."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, NamedTuple

import numpy as np
import orjson
import torch
from fastapi import APIRouter, Query, Request
from fastapi import Body as BodyParameter
from starlette.responses import Response

from plsc.gallery.filters import Filter
from plsc.gallery.values import NewPerson, Person
from plsc.serve import idempotency
from plsc.serve.errors import ApiError, KnownPerson, error_responses
from plsc.serve.known import OnKnown, find_known, keep_known, read_known, refuse_known, turn
from plsc.serve.person_schemas import (
    CONDITIONS_DESCRIBED,
    PUT_CONDITIONS_DESCRIBED,
    EnrolledPersonView,
    EnrolledView,
    EnrolmentBody,
    ExternalIdPath,
    FacesBody,
    FacesView,
    FaceView,
    PersonBody,
    PersonChange,
    PersonPut,
    PersonsBody,
    PersonsView,
    PersonView,
    enrolled_view,
    kept_enrolment,
    new_person_view,
    person_view,
    read_enrolment,
    read_precondition,
    set_etag,
)
from plsc.serve.rate_limits import charge
from plsc.serve.routing import LARGEST_ID, CollectionName, Id, Served, read_json, record_ids, requires
from plsc.serve.schemas import FILTER_PARAMETER, IMAGE, Input, examples, parse_filter, with_warnings
from plsc.serve.service import Embedded, Service
from plsc.serve.uploads import Upload, UploadRoute, accepts

MAX_PAGE = 1000
_CREATED, _ADDED_TO_KNOWN = 201, 200  # statuses of enrolments
_READ_TOGETHER = 128  # persons; with the longest metadata, 32 MiB
_FACE_BYTES = 20  # of a face in an answer, about
_ADA = {"name": "Ada", "metadata": {"city": "Bern", "age": 31}, "faces": [{"image": IMAGE}]}
_UPSERT = {"name": "Ada", "metadata": {"city": "Bern"}, "expires": "2030-01-31", "faces": [{"image": IMAGE}]}
_SEVERAL = {"persons": [_ADA, {"name": "Grace", "faces": [{"image": IMAGE}]}]}

_PERSON = Upload("faces", texts=("name", "metadata", "expires"), as_json=("metadata",))
_NEW_PERSON = replace(_PERSON, texts=(*_PERSON.texts, "external_id"))
_FACES = Upload("faces")

router = APIRouter(prefix="/v1/collections", route_class=UploadRoute)


@router.get(
    "/{collection}/persons",
    tags=["persons"],
    responses=error_responses(404),
    response_model_exclude_unset=True,
    openapi_extra={"parameters": [FILTER_PARAMETER]},
)
@requires("read")
async def list_persons(
    collection: CollectionName,
    service: Served,
    after: Annotated[int, Query(ge=0, le=LARGEST_ID, description="Persons with ids above this")] = 0,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 100,
    filter: Annotated[str | None, Query(include_in_schema=False)] = None,
) -> PersonsView:
    """Persons by ascending id, a page at a time, which holds fewer where their metadata are long."""
    conditions = read_filter(filter)
    read = partial(service.store.persons, collection, filter=conditions)
    run = service.in_store if conditions is None else partial(service.in_filter, service.deadline(None))
    page, following = await run(_read_page, read, after, limit, service.settings.limits.answer_bytes)
    warnings = [] if page or after else await service.filter_warnings(collection, conditions)
    return with_warnings(PersonsView(persons=[person_view(person) for person in page], next=following), warnings)


@router.post(
    "/{collection}/persons",
    status_code=201,
    response_model_exclude_unset=True,
    tags=["persons"],
    responses={
        200: {"model": EnrolledPersonView, "description": "on_known=add: the faces were added to a known person"},
        **error_responses(404, 409, 413, 415, 422, 501, 504, 507),
    },
    openapi_extra=_NEW_PERSON.described(idempotency.DESCRIBED),
)
@requires("write")
@accepts(_NEW_PERSON)
async def add_persons(
    collection: CollectionName,
    body: Annotated[
        EnrolmentBody,
        BodyParameter(openapi_examples=examples(one_person=_ADA, several_all_or_none=_SEVERAL)),
    ],
    service: Served,
    request: Request,
    response: Response,
    on_known: Annotated[OnKnown, Query(description="What to do where a face matches an enrolled person")] = "enrol",
) -> EnrolledPersonView | EnrolledView:
    """Enrol one person, or several: all or none. They are stored and found by searches when this answers.

    With a threshold, `known` is the enrolled person that the faces match. on_known=refuse then enrols none (409), and
    on_known=add adds the faces to that person, whose name and metadata stay (200).
    """
    several = isinstance(body, PersonsBody)
    persons = body.persons if isinstance(body, PersonsBody) else [body]
    limit = service.settings.limits.inputs
    if len(persons) > limit:
        raise ApiError(413, f"{len(persons)} persons; at most {limit} are enrolled in a request")
    if several and on_known == "add":
        raise ApiError(400, "on_known=add is for one person; enrol several one by one")
    async with service.idempotency.claim(request) as claim:
        if claim.stored is not None:
            done = await _replay_enrolment(service, collection, persons, claim.stored.status, claim.replay(response))
        else:
            charge(len(persons))
            done = await _enrol(service, collection, persons, several, on_known, claim)
    added, known, warnings, response.status_code = done
    record_ids(request, [person.id for person in added])
    if several:
        views = [new_person_view(person, who) for person, who in zip(added, known, strict=True)]
        return with_warnings(EnrolledView(persons=views), warnings)
    set_etag(response, added[0])
    return enrolled_view(added[0], warnings).model_copy(update={"known": known[0]})


# Before the routes of persons by id: an external id may hold a slash.
_BY_EXTERNAL_ID = "/{collection}/persons/by-external-id/{external_id:path}"


@router.put(
    _BY_EXTERNAL_ID,
    status_code=200,
    response_model_exclude_unset=True,
    tags=["persons"],
    responses={
        201: {"model": EnrolledPersonView, "description": "There was no such person"},
        **error_responses(404, 409, 412, 413, 415, 422, 501, 504, 507),
    },
    openapi_extra=_PERSON.described(PUT_CONDITIONS_DESCRIBED),
)
@requires("write")
@accepts(_PERSON)
async def put_person(
    collection: CollectionName,
    external_id: ExternalIdPath,
    body: Annotated[PersonPut, BodyParameter(openapi_examples=examples(a_person=_UPSERT))],
    service: Served,
    request: Request,
    response: Response,
) -> EnrolledPersonView:
    """Enrol the person with an external id (201), or replace name, metadata, expiry and faces (200).

    Sent again it changes nothing but the revision and the faces' ids. With If-None-Match: * it only enrols, with
    If-Match it only replaces.
    """
    precondition = read_precondition(request)
    new, crops, warnings = await _embed_persons(service, collection, [body], False)
    named = replace(new[0], external_id=external_id)
    put = service.thumbnails.put_person
    person, is_new = await service.in_store(
        put, collection, named, service.contract_id, crops[0], precondition=precondition
    )
    record_ids(request, [person.id])
    response.status_code = 201 if is_new else 200
    set_etag(response, person)
    return enrolled_view(person, warnings)


@router.get(_BY_EXTERNAL_ID, response_model_exclude_unset=True, tags=["persons"], responses=error_responses(404, 501))
@requires("read")
async def get_person_by_external_id(
    collection: CollectionName, external_id: ExternalIdPath, service: Served, response: Response
) -> PersonView:
    """The person with an external id."""
    person = await service.in_store(service.store.find_person, collection, external_id)
    set_etag(response, person)
    return person_view(person)


@router.delete(
    _BY_EXTERNAL_ID,
    status_code=204,
    tags=["persons"],
    responses=error_responses(404, 412, 501),
    response_class=Response,
    openapi_extra=CONDITIONS_DESCRIBED,
)
@requires("write")
async def delete_person_by_external_id(
    collection: CollectionName, external_id: ExternalIdPath, service: Served, request: Request
) -> Response:
    """Delete the person with an external id and all faces: no search finds them from now on."""
    precondition = read_precondition(request)
    person = await service.in_store(service.store.find_person, collection, external_id)
    record_ids(request, [person.id])
    delete = service.thumbnails.delete_person
    await service.in_store(delete, collection, person.id, precondition=precondition)
    return Response(status_code=204)


@router.get(
    "/{collection}/persons/{person}",
    response_model_exclude_unset=True,
    tags=["persons"],
    responses=error_responses(404),
)
@requires("read")
async def get_person(collection: CollectionName, person: Id, service: Served, response: Response) -> PersonView:
    """One person; the ETag names the revision."""
    found = await service.in_store(service.store.person, collection, person)
    set_etag(response, found)
    return person_view(found)


@router.patch(
    "/{collection}/persons/{person}",
    response_model_exclude_unset=True,
    tags=["persons"],
    responses=error_responses(404, 412, 413, 415, 501, 507),
    openapi_extra=CONDITIONS_DESCRIBED,
)
@requires("write")
async def update_person(
    collection: CollectionName,
    person: Id,
    body: Annotated[
        PersonChange,
        BodyParameter(
            openapi_examples=examples(another_name={"name": "Ada L."}, other_metadata={"metadata": {"city": "Rome"}})
        ),
    ],
    service: Served,
    request: Request,
    response: Response,
) -> PersonView:
    """Change the name or the expiry, or replace the metadata; what is left out stays. Honours If-Match."""
    record_ids(request, [person])
    fields = {name: getattr(body, name) for name in body.model_fields_set}
    update, precondition = service.store.update_person, read_precondition(request)
    changed = await service.in_store(update, collection, person, **fields, precondition=precondition)
    set_etag(response, changed)
    return person_view(changed)


@router.delete(
    "/{collection}/persons/{person}",
    status_code=204,
    tags=["persons"],
    responses=error_responses(404, 412, 501),
    response_class=Response,
    openapi_extra=CONDITIONS_DESCRIBED,
)
@requires("write")
async def delete_person(collection: CollectionName, person: Id, service: Served, request: Request) -> Response:
    """Delete a person with all faces: no search finds them from now on. Honours If-Match."""
    record_ids(request, [person])
    delete, precondition = service.thumbnails.delete_person, read_precondition(request)
    await service.in_store(delete, collection, person, precondition=precondition)
    return Response(status_code=204)


@router.post(
    "/{collection}/persons/{person}/faces",
    status_code=201,
    response_model_exclude_unset=True,
    tags=["persons"],
    responses=error_responses(404, 409, 413, 415, 422, 501, 504, 507),
    openapi_extra=_FACES.described(idempotency.DESCRIBED),
)
@requires("write")
@accepts(_FACES)
async def add_faces(
    collection: CollectionName,
    person: Id,
    body: Annotated[FacesBody, BodyParameter(openapi_examples=examples(a_picture={"faces": [{"image": IMAGE}]}))],
    service: Served,
    request: Request,
    response: Response,
) -> FacesView:
    """Add faces to a person."""
    record_ids(request, [person])
    async with service.idempotency.claim(request) as claim:
        if claim.stored is not None:
            added, warnings = claim.replay(response)
        else:
            await service.require_collection(collection)
            vectors, warnings, crops = await _embed_groups(service, [("faces", body.faces)])
            idempotent = claim.request(lambda faces: (faces, warnings))
            add, contract_id = service.thumbnails.add_faces, service.contract_id
            added = await service.in_store(add, collection, person, vectors, contract_id, crops, idempotent=idempotent)
    return with_warnings(FacesView(faces=[FaceView(id=face) for face in added]), warnings)


@router.delete(
    "/{collection}/persons/{person}/faces/{face}",
    status_code=204,
    tags=["persons"],
    responses=error_responses(404, 412, 501),
    response_class=Response,
    openapi_extra=CONDITIONS_DESCRIBED,
)
@requires("write")
async def delete_face(collection: CollectionName, person: Id, face: Id, service: Served, request: Request) -> Response:
    """Delete one face. Honours If-Match, with the ETag of its person."""
    record_ids(request, [person, face])
    delete, precondition = service.thumbnails.delete_face, read_precondition(request)
    await service.in_store(delete, collection, person, face, precondition=precondition)
    return Response(status_code=204)


@router.get(
    "/{collection}/persons/{person}/faces/{face}/thumbnail",
    tags=["persons"],
    responses={200: {"content": {"image/jpeg": {}}, "description": "The crop"}, **error_responses(404)},
    response_class=Response,
)
@requires("read")
async def get_thumbnail(collection: CollectionName, person: Id, face: Id, service: Served) -> Response:
    """The crop that a face was enrolled from, where the service keeps thumbnails (--keep-thumbnails)."""
    thumbnail = await service.in_store(service.thumbnails.read, collection, person, face)
    return Response(thumbnail, media_type="image/jpeg")


def read_filter(text: str | None) -> Filter | None:
    """A filter given as JSON text in a query; :class:`ApiError` 400 names what is wrong in it."""
    return None if text is None else parse_filter(read_json(text.encode(), len(text), "the filter"))


def _read_page(
    read: Callable[..., list[Person]], after: int, limit: int, max_bytes: int
) -> tuple[list[Person], int | None]:
    """Up to ``limit`` persons in about ``max_bytes``, read a few at a time; and the ``after`` of the next page."""
    page: list[Person] = []
    size = 0
    while True:
        count = min(limit + 1 - len(page), _READ_TOGETHER)
        persons = read(after=after, limit=count)
        for person in persons:
            size += len(orjson.dumps((person.name, person.metadata, person.external_id))) + _FACE_BYTES * len(
                person.faces
            )
            if page and (size > max_bytes or len(page) == limit):
                return page, page[-1].id
            page.append(person)
        if len(persons) < count:
            return page, None
        after = persons[-1].id


async def _embed_persons(
    service: Service, collection: str, persons: Sequence[PersonPut], several: bool
) -> tuple[list[NewPerson], list[list[torch.Tensor | None]], list[str]]:
    """The persons with the vectors of their inputs, all embedded together; their faces' crops; and warnings."""
    await service.require_collection(collection)
    names = _group_names(len(persons), several)
    vectors, warnings, crops = await _embed_groups(
        service, [(name, person.faces) for name, person in zip(names, persons, strict=True)]
    )
    stops = np.cumsum([len(person.faces) for person in persons]).tolist()
    parts = np.split(vectors, stops[:-1])
    new = [
        NewPerson(part, person.name, person.metadata, getattr(person, "external_id", None), person.expires)
        for part, person in zip(parts, persons, strict=True)
    ]
    own_crops = [crops[stop - len(person.faces) : stop] for person, stop in zip(persons, stops, strict=True)]
    return new, own_crops, warnings


def _group_names(count: int, several: bool) -> list[str]:
    """What errors and warnings call the faces of each person of a request."""
    return [f"persons[{index}].faces" if several else "faces" for index in range(count)]


class _Enrolment(NamedTuple):
    persons: list[Person]
    known: list[KnownPerson | None]
    warnings: list[str]
    status: int


async def _enrol(
    service: Service,
    collection: str,
    persons: Sequence[PersonBody],
    several: bool,
    on_known: OnKnown,
    claim: idempotency.Claim,
) -> _Enrolment:
    new, crops, warnings = await _embed_persons(service, collection, persons, several)
    async with turn(service, collection, on_known):
        known = await find_known(service, collection, [np.asarray(person.vectors) for person in new])
        if on_known == "refuse":
            refuse_known(collection, known, _group_names(len(persons), several) if several else ["this face"])
        if on_known == "add" and known[0] is not None:
            person = await _add_to_known(service, collection, known[0], new[0], crops[0], claim, warnings)
            return _Enrolment([person], known, warnings, _ADDED_TO_KNOWN)
        idempotent = claim.request(partial(kept_enrolment, warnings, keep_known(known)))
        add = service.thumbnails.add_persons
        added = await service.in_store(add, collection, new, service.contract_id, crops, idempotent=idempotent)
        return _Enrolment(added, known, warnings, _CREATED)


async def _replay_enrolment(
    service: Service, collection: str, persons: Sequence[PersonBody], status: int, kept: Any
) -> _Enrolment:
    _, warnings, kept_known = kept
    known = await read_known(service, collection, kept_known)
    if status == _ADDED_TO_KNOWN:
        added = [await service.in_store(service.store.person, collection, kept_known[0][0])]
    else:
        added = read_enrolment(persons, kept)
    return _Enrolment(added, known, warnings, status)


async def _add_to_known(
    service: Service,
    collection: str,
    known: KnownPerson,
    new: NewPerson,
    crops: list[torch.Tensor | None],
    claim: idempotency.Claim,
    warnings: list[str],
) -> Person:
    """Add the faces of ``new`` to who is known, and return that person."""

    def keep(faces: list[int]) -> Any:
        return [[(known.id, faces)], warnings, keep_known([known])]

    idempotent = claim.request(keep, _ADDED_TO_KNOWN)
    add, contract_id = service.thumbnails.add_faces, service.contract_id
    await service.in_store(add, collection, known.id, new.vectors, contract_id, crops, idempotent=idempotent)
    person: Person = await service.in_store(service.store.person, collection, known.id)
    return person


async def _embed_groups(service: Service, groups: Sequence[tuple[str, Sequence[Input]]]) -> Embedded:
    inputs = [item for _, faces in groups for item in faces]
    names = [f"{name}[{index}]" for name, faces in groups for index in range(len(faces))]
    service.check_inputs(len(inputs))
    return await service.vectors(inputs, names, service.deadline(None))
