"""/v1/collections/{collection}/persons: persons and their faces."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from plsc.gallery.filters import Filter
from plsc.gallery.thumbnails import is_lossless
from plsc.gallery.values import Person
from plsc.serve import schemas
from plsc.serve.changes import (
    CONDITIONS_DESCRIBED,
    KEY_DESCRIBED,
    PUT_CONDITIONS_DESCRIBED,
    read_precondition,
    set_etag,
)
from plsc.serve.enrolment import OnKnown, embed_groups, embed_persons, enrol, read_enrolment
from plsc.serve.errors import ApiError, error_responses
from plsc.serve.limits import charge
from plsc.serve.routing import (
    DELETED,
    LARGEST_ID,
    BodyRoute,
    CollectionName,
    Id,
    Served,
    Upload,
    accepts,
    read_json,
    record_ids,
    requires,
)
from plsc.serve.service import Service, Spaces

MAX_PAGE = 1000
_READ_TOGETHER = 128  # persons; with the longest metadata, 32 MiB
_FACE_BYTES = 20  # of a face in an answer, about
_ADA = {"name": "Ada", "metadata": {"city": "Bern", "age": 31}, "faces": [{"image": schemas.IMAGE}]}
_UPSERT = {"name": "Ada", "metadata": {"city": "Bern"}, "expires": "2030-01-31", "faces": [{"image": schemas.IMAGE}]}
_SEVERAL = {"persons": [_ADA, {"name": "Grace", "faces": [{"image": schemas.IMAGE}]}]}

_PERSON = Upload("faces", texts=("name", "metadata", "expires"), as_json=("metadata",))
_NEW_PERSON = replace(_PERSON, texts=(*_PERSON.texts, "external_id"))
_FACES = Upload("faces")

router = APIRouter(prefix="/v1/collections", route_class=BodyRoute, tags=["persons"])
_PERSON_PATH, _FACE_PATH = "/{collection}/persons/{person}", "/{collection}/persons/{person}/faces/{face}"


@router.get(
    "/{collection}/persons", responses=error_responses(404), openapi_extra={"parameters": [schemas.FILTER_PARAMETER]}
)
@requires("read")
async def list_persons(
    collection: CollectionName,
    service: Served,
    after: Annotated[int, Query(ge=0, le=LARGEST_ID, description="Persons with ids above this")] = 0,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 100,
    filter: Annotated[str | None, Query(include_in_schema=False)] = None,
) -> schemas.PersonsView:
    """Persons by ascending id, a page at a time, which holds fewer where their metadata are long."""
    conditions = read_filter(filter)
    read = partial(service.store.persons, collection, filter=conditions)
    run = service.in_store if conditions is None else partial(service.in_filter, service.deadline(None))
    page, following = await run(_read_page, read, after, limit, service.settings.limits.answer_bytes)
    warnings = [] if page or after else await service.filter_warnings(collection, conditions)
    shown = [schemas.show(schemas.PersonView, person) for person in page]
    return schemas.with_warnings(schemas.PersonsView(persons=shown, next=following), warnings)


@router.post(
    "/{collection}/persons",
    status_code=201,
    responses={
        200: {
            "model": schemas.EnrolledPersonView,
            "description": "on_known=add: the faces were added to a known person",
        },
        **error_responses(404, 409, 413, 415, 422, 504, 507),
    },
    openapi_extra=_NEW_PERSON.described(KEY_DESCRIBED),
)
@requires("write")
@accepts(_NEW_PERSON)
async def add_persons(
    collection: CollectionName,
    body: Annotated[schemas.EnrolmentBody, schemas.body_like(one_person=_ADA, several_all_or_none=_SEVERAL)],
    service: Served,
    request: Request,
    response: Response,
    on_known: Annotated[OnKnown, Query(description="What to do where a face matches an enrolled person")] = "enrol",
) -> schemas.EnrolledPersonView | schemas.EnrolledView:
    """Enrol one person, or several: all or none. They are stored and found by searches when this answers.

    With a threshold, `known` is the enrolled person that the faces match. on_known=refuse then enrols none (409), and
    on_known=add adds the faces to that person, whose name and metadata stay (200).
    """
    several = isinstance(body, schemas.PersonsBody)
    persons = body.persons if isinstance(body, schemas.PersonsBody) else [body]
    limit = service.settings.limits.inputs
    if len(persons) > limit:
        raise ApiError(413, f"{len(persons)} persons; at most {limit} are enrolled in a request")
    if several and on_known == "add":
        raise ApiError(400, "on_known=add is for one person; enrol several one by one")
    async with service.idempotency.claim(request) as claim:
        if claim.stored is not None:
            done = await read_enrolment(service, collection, persons, claim.stored.status, claim.replay(response))
        else:
            charge(len(persons))
            done = await enrol(service, collection, persons, several, on_known, claim)
    added, known, warnings, response.status_code = done
    record_ids(request, [person.id for person in added])
    if several:
        views = [
            schemas.show(schemas.NewPersonView, person, known=who) for person, who in zip(added, known, strict=True)
        ]
        return schemas.with_warnings(schemas.EnrolledView(persons=views), warnings)
    set_etag(response, added[0])
    return schemas.with_warnings(schemas.show(schemas.EnrolledPersonView, added[0], known=known[0]), warnings)


# Before the routes of persons by id: an external id may hold a slash.
_BY_EXTERNAL_ID = "/{collection}/persons/by-external-id/{external_id:path}"


@router.put(
    _BY_EXTERNAL_ID,
    status_code=200,
    responses={
        201: {"model": schemas.EnrolledPersonView, "description": "There was no such person"},
        **error_responses(404, 409, 412, 413, 415, 422, 504, 507),
    },
    openapi_extra=_PERSON.described(PUT_CONDITIONS_DESCRIBED),
)
@requires("write")
@accepts(_PERSON)
async def put_person(
    collection: CollectionName,
    external_id: schemas.ExternalIdPath,
    body: Annotated[schemas.PersonPut, schemas.body_like(a_person=_UPSERT)],
    service: Served,
    request: Request,
    response: Response,
) -> schemas.EnrolledPersonView:
    """Enrol the person with an external id (201), or replace name, metadata, expiry and faces (200).

    Sent again it changes nothing but the revision and the faces' ids. With If-None-Match: * it only enrols, with
    If-Match it only replaces.
    """
    options: dict[str, Any] = {"precondition": read_precondition(request), "metadata": [body.metadata]}

    async def put(spaces: Spaces) -> tuple[Person, bool, list[str]]:
        new, crops, warnings = await embed_persons(service, spaces, [body], False)
        about = spaces, replace(new[0], external_id=external_id)
        change = partial(service.thumbnails.put_person, crops=crops[0])
        return *await service.enrol(change, *about, adds=external_id, **options), warnings

    person, is_new, warnings = await service.with_collection(collection, put)
    record_ids(request, [person.id])
    response.status_code = 201 if is_new else 200
    set_etag(response, person)
    return schemas.with_warnings(schemas.show(schemas.EnrolledPersonView, person), warnings)


@router.get(_BY_EXTERNAL_ID, responses=error_responses(404))
@requires("read")
async def get_person_by_external_id(
    collection: CollectionName, external_id: schemas.ExternalIdPath, service: Served, response: Response
) -> schemas.PersonView:
    """The person with an external id."""
    person = await service.in_store(service.store.find_person, collection, external_id)
    set_etag(response, person)
    return schemas.show(schemas.PersonView, person)


@router.delete(_BY_EXTERNAL_ID, **DELETED, responses=error_responses(404, 412), openapi_extra=CONDITIONS_DESCRIBED)
@requires("write")
async def delete_person_by_external_id(
    collection: CollectionName, external_id: schemas.ExternalIdPath, service: Served, request: Request
) -> None:
    """Delete the person with an external id and all faces: no search finds them from now on."""
    read_precondition(request)
    person = await service.in_store(service.store.find_person, collection, external_id)
    await _delete(service, request, service.thumbnails.delete_person, collection, person.id)


@router.get(_PERSON_PATH, responses=error_responses(404))
@requires("read")
async def get_person(collection: CollectionName, person: Id, service: Served, response: Response) -> schemas.PersonView:
    """One person; the ETag names the revision."""
    found = await service.in_store(service.store.person, collection, person)
    set_etag(response, found)
    return schemas.show(schemas.PersonView, found)


@router.patch(_PERSON_PATH, responses=error_responses(404, 412, 413, 415, 507), openapi_extra=CONDITIONS_DESCRIBED)
@requires("write")
async def update_person(
    collection: CollectionName,
    person: Id,
    body: Annotated[
        schemas.PersonChange,
        schemas.body_like(another_name={"name": "Ada L."}, other_metadata={"metadata": {"city": "Rome"}}),
    ],
    service: Served,
    request: Request,
    response: Response,
) -> schemas.PersonView:
    """Change the name or the expiry, or replace the metadata; what is left out stays. Honours If-Match."""
    record_ids(request, [person])
    fields = {name: getattr(body, name) for name in body.model_fields_set}
    change = partial(service.store.update_person, **fields, precondition=read_precondition(request))
    metadata = [fields["metadata"]] if "metadata" in fields else []
    changed = await service.add(change, collection, person, metadata=metadata)
    set_etag(response, changed)
    return schemas.show(schemas.PersonView, changed)


@router.delete(_PERSON_PATH, **DELETED, responses=error_responses(404, 412), openapi_extra=CONDITIONS_DESCRIBED)
@requires("write")
async def delete_person(collection: CollectionName, person: Id, service: Served, request: Request) -> None:
    """Delete a person with all faces: no search finds them from now on. Honours If-Match."""
    await _delete(service, request, service.thumbnails.delete_person, collection, person)


@router.post(
    f"{_PERSON_PATH}/faces",
    status_code=201,
    responses=error_responses(404, 409, 413, 415, 422, 504, 507),
    openapi_extra=_FACES.described(KEY_DESCRIBED),
)
@requires("write")
@accepts(_FACES)
async def add_faces(
    collection: CollectionName,
    person: Id,
    body: Annotated[schemas.FacesBody, schemas.body_like(a_picture={"faces": [{"image": schemas.IMAGE}]})],
    service: Served,
    request: Request,
    response: Response,
) -> schemas.FacesView:
    """Add faces to a person; the answer has the id of each.

    A face whose `key` the person has is not added again: the id is that of the face which is there.
    """
    record_ids(request, [person])
    async with service.idempotency.claim(request) as claim:
        if claim.stored is not None:
            added, warnings = claim.replay(response)
        else:

            async def add(spaces: Spaces) -> tuple[list[int], list[str]]:
                found = await embed_groups(service, spaces, [("faces", body.faces)], ask=True)
                kept = claim.request(lambda faces: (faces, found.warnings))
                keys = [face.key for face in body.faces]
                change = partial(service.thumbnails.add_faces, others=found.others, crops=found.crops, keys=keys)
                return await service.enrol(change, spaces, person, found.vectors, idempotent=kept), found.warnings

            added, warnings = await service.with_collection(collection, add)
    return schemas.with_warnings(schemas.FacesView(faces=[schemas.FaceView(id=face) for face in added]), warnings)


@router.delete(_FACE_PATH, **DELETED, responses=error_responses(404, 412), openapi_extra=CONDITIONS_DESCRIBED)
@requires("write")
async def delete_face(collection: CollectionName, person: Id, face: Id, service: Served, request: Request) -> None:
    """Delete one face. Honours If-Match, with the ETag of its person."""
    await _delete(service, request, service.thumbnails.delete_face, collection, person, face)


@router.get(
    f"{_FACE_PATH}/thumbnail",
    responses={
        200: {"content": {"image/jpeg": {}, "image/png": {}}, "description": "The crop"},
        **error_responses(404),
    },
    response_class=Response,
)
@requires("read")
async def get_thumbnail(collection: CollectionName, person: Id, face: Id, service: Served) -> Response:
    """The crop that a face was enrolled from, where the service keeps thumbnails (--keep-thumbnails)."""
    thumbnail = await service.in_store(service.thumbnails.read, collection, person, face)
    return Response(thumbnail, media_type="image/png" if is_lossless(thumbnail) else "image/jpeg")


def read_filter(text: str | None) -> Filter | None:
    """A filter given as JSON text in a query; :class:`ApiError` 400 names what is wrong in it."""
    return None if text is None else schemas.parse_filter(read_json(text.encode(), len(text), "the filter"))


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
            texts = person.name, person.metadata, person.external_id, list(person.keys.values())
            size += len(orjson.dumps(texts)) + _FACE_BYTES * len(person.faces)
            if page and (size > max_bytes or len(page) == limit):
                return page, page[-1].id
            page.append(person)
        if len(persons) < count:
            return page, None
        after = persons[-1].id


async def _delete(service: Service, request: Request, delete: Callable[..., None], collection: str, *ids: int) -> None:
    """Delete what ``ids`` name, a person or its face, where the request's precondition holds."""
    record_ids(request, ids)
    await service.change(delete, collection, *ids, precondition=read_precondition(request))
