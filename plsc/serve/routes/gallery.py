"""/v1/collections: collections, and the persons and faces in them."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Annotated

import numpy as np
import orjson
import torch
from fastapi import APIRouter, Query, Request
from fastapi import Body as BodyParameter
from pydantic import BaseModel, Field
from starlette.responses import Response

from plsc.gallery.filters import Filter
from plsc.gallery.store import NewPerson, Person
from plsc.gallery.validation import COLLECTION_NAME
from plsc.serve.errors import ApiError, error_responses
from plsc.serve.routing import (
    LARGEST_ID,
    CollectionName,
    Id,
    JsonRoute,
    Served,
    read_json,
    record_ids,
    requires,
)
from plsc.serve.schemas import IMAGE, Body, Input, Metadata, Scalar, Warnings, examples, parse_filter, with_warnings
from plsc.serve.service import Embedded, Service

MAX_PAGE = 1000
_READ_TOGETHER = 128  # persons; with the longest metadata, 32 MiB
_FACE_BYTES = 20  # of a face in an answer, about
_ADA = {"name": "Ada", "metadata": {"city": "Bern", "age": 31}, "faces": [{"image": IMAGE}]}
_SEVERAL = {"persons": [_ADA, {"name": "Grace", "faces": [{"image": IMAGE}]}]}

router = APIRouter(prefix="/v1/collections", route_class=JsonRoute)


class NewCollection(Body):
    """A collection to make, for embeddings of the service's model."""

    name: str = Field(pattern=COLLECTION_NAME, examples=["staff"])


class CollectionView(BaseModel):
    """A collection."""

    name: str
    dim: int
    contract_id: str
    persons: int
    faces: int
    created: str


class CollectionsView(BaseModel):
    """All collections, by name."""

    collections: list[CollectionView]


class CompactedView(BaseModel):
    """The collection after what was added and deleted has been brought into the searched files."""

    collection: str
    statistics: dict[str, float]


class PersonBody(Body):
    """A person to enrol."""

    name: str | None = Field(None, max_length=1024, examples=["Ada"])
    metadata: Metadata = Field(default_factory=dict)
    faces: list[Input] = Field(fail_fast=True, default_factory=list)


class PersonsBody(Body):
    """Persons to enrol, all or none."""

    persons: list[PersonBody] = Field(fail_fast=True, min_length=1)


class PersonChange(Body):
    """Fields to change; those left out stay."""

    name: str | None = Field(None, max_length=1024, examples=["Ada L."])
    metadata: Metadata | None = None


class FacesBody(Body):
    """Faces to add to a person."""

    faces: list[Input] = Field(fail_fast=True, min_length=1)


class FaceView(BaseModel):
    """A face of a person: one embedding."""

    id: int


class FacesView(BaseModel):
    """Faces that were added."""

    faces: list[FaceView]
    warnings: Warnings = Field(default_factory=list)


class PersonView(BaseModel):
    """A person as stored."""

    id: int
    name: str | None
    metadata: dict[str, Scalar]
    faces: list[FaceView]
    created: str


class PersonsView(BaseModel):
    """Persons by ascending id; ``next`` is the ``after`` of the page that follows, null on the last."""

    persons: list[PersonView]
    next: int | None = None
    warnings: Warnings = Field(default_factory=list)


class EnrolledPersonView(PersonView):
    """A person as enrolled."""

    warnings: Warnings = Field(default_factory=list)


class EnrolledView(BaseModel):
    """Persons enrolled together."""

    persons: list[PersonView]
    warnings: Warnings = Field(default_factory=list)


@router.get("", tags=["collections"], responses=error_responses())
@requires("read")
async def list_collections(service: Served) -> CollectionsView:
    """All collections, by name."""
    collections = await service.in_store(service.store.collections)
    return CollectionsView(collections=[CollectionView(**asdict(collection)) for collection in collections])


@router.post("", status_code=201, tags=["collections"], responses=error_responses(409, 413, 415))
@requires("write")
async def create_collection(
    body: Annotated[NewCollection, BodyParameter(openapi_examples=examples(a_collection={"name": "visitors"}))],
    service: Served,
) -> CollectionView:
    """Make a collection for embeddings of the service's model."""
    limit = service.settings.limits.collections
    if len(await service.in_store(service.store.collections)) >= limit:
        raise ApiError(400, f"there are {limit} collections already, as many as this service takes; delete one first")
    service.forget(body.name)
    dim = service.embedder.embedding_dim
    created = await service.in_store(service.store.create_collection, body.name, dim, service.contract_id)
    return CollectionView(**asdict(created))


@router.get("/{collection}", tags=["collections"], responses=error_responses(404))
@requires("read")
async def get_collection(collection: CollectionName, service: Served) -> CollectionView:
    """One collection."""
    return CollectionView(**asdict(await service.in_store(service.store.collection, collection)))


@router.delete(
    "/{collection}",
    status_code=204,
    tags=["collections"],
    responses=error_responses(404),
    response_class=Response,
)
@requires("admin")
async def delete_collection(collection: CollectionName, service: Served) -> Response:
    """Delete a collection with everybody in it."""
    await service.in_store(service.thumbnails.delete_collection, collection)
    service.forget(collection)
    return Response(status_code=204)


@router.post("/{collection}/compact", tags=["collections"], responses=error_responses(404))
@requires("admin")
async def compact_collection(collection: CollectionName, service: Served) -> CompactedView:
    """Bring what was added and deleted into the searched files: deleted embeddings are then in none of them."""
    await service.in_store(service.thumbnails.compact, collection)
    statistics = await service.in_store(service.store.statistics)
    return CompactedView(collection=collection, statistics=statistics.get(collection, {}))


@router.get(
    "/{collection}/persons",
    tags=["persons"],
    responses=error_responses(404),
    response_model_exclude_unset=True,
)
@requires("read")
async def list_persons(
    collection: CollectionName,
    service: Served,
    after: Annotated[int, Query(ge=0, le=LARGEST_ID, description="Persons with ids above this")] = 0,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 100,
    filter: Annotated[str | None, Query(description="A filter as JSON text", examples=['{"city": "Bern"}'])] = None,
) -> PersonsView:
    """Persons by ascending id, a page at a time, which holds fewer where their metadata are long."""
    conditions = read_filter(filter)
    read = partial(service.store.persons, collection, filter=conditions)
    page, following = await service.in_store(_read_page, read, after, limit, service.settings.limits.answer_bytes)
    warnings = [] if page or after else await service.filter_warnings(collection, conditions)
    return with_warnings(PersonsView(persons=[_view(person) for person in page], next=following), warnings)


@router.post(
    "/{collection}/persons",
    status_code=201,
    response_model_exclude_unset=True,
    tags=["persons"],
    responses=error_responses(404, 409, 413, 415, 422, 504),
)
@requires("write")
async def add_persons(
    collection: CollectionName,
    body: Annotated[
        PersonBody | PersonsBody,
        BodyParameter(openapi_examples=examples(one_person=_ADA, several_all_or_none=_SEVERAL)),
    ],
    service: Served,
    request: Request,
) -> EnrolledPersonView | EnrolledView:
    """Enrol one person, or several: all or none. They are stored and found by searches when this answers."""
    several = isinstance(body, PersonsBody)
    persons = body.persons if isinstance(body, PersonsBody) else [body]
    limit = service.settings.limits.inputs
    if len(persons) > limit:
        raise ApiError(413, f"{len(persons)} persons; at most {limit} are enrolled in a request")
    new, crops, warnings = await _embed_persons(service, collection, persons, several)
    added = await service.in_store(service.thumbnails.add_persons, collection, new, service.contract_id, crops)
    record_ids(request, [person.id for person in added])
    if several:
        return with_warnings(EnrolledView(persons=[_view(person) for person in added]), warnings)
    return with_warnings(EnrolledPersonView.model_construct(**dict(_view(added[0]))), warnings)


@router.get("/{collection}/persons/{person}", tags=["persons"], responses=error_responses(404))
@requires("read")
async def get_person(collection: CollectionName, person: Id, service: Served) -> PersonView:
    """One person."""
    return _view(await service.in_store(service.store.person, collection, person))


@router.patch("/{collection}/persons/{person}", tags=["persons"], responses=error_responses(404, 413, 415))
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
) -> PersonView:
    """Change the name, or replace the metadata; what is left out stays."""
    record_ids(request, [person])
    update = service.store.update_person
    return _view(await service.in_store(update, collection, person, name=body.name, metadata=body.metadata))


@router.delete(
    "/{collection}/persons/{person}",
    status_code=204,
    tags=["persons"],
    responses=error_responses(404),
    response_class=Response,
)
@requires("write")
async def delete_person(collection: CollectionName, person: Id, service: Served, request: Request) -> Response:
    """Delete a person with all faces: no search finds them from now on."""
    record_ids(request, [person])
    await service.in_store(service.thumbnails.delete_person, collection, person)
    return Response(status_code=204)


@router.post(
    "/{collection}/persons/{person}/faces",
    status_code=201,
    response_model_exclude_unset=True,
    tags=["persons"],
    responses=error_responses(404, 409, 413, 415, 422, 504),
)
@requires("write")
async def add_faces(
    collection: CollectionName,
    person: Id,
    body: Annotated[FacesBody, BodyParameter(openapi_examples=examples(a_picture={"faces": [{"image": IMAGE}]}))],
    service: Served,
    request: Request,
) -> FacesView:
    """Add faces to a person."""
    record_ids(request, [person])
    await service.require_collection(collection)
    vectors, warnings, crops = await _embed_groups(service, [("faces", body.faces)])
    add = service.thumbnails.add_faces
    added = await service.in_store(add, collection, person, vectors, service.contract_id, crops)
    return with_warnings(FacesView(faces=[FaceView(id=face) for face in added]), warnings)


@router.delete(
    "/{collection}/persons/{person}/faces/{face}",
    status_code=204,
    tags=["persons"],
    responses=error_responses(404),
    response_class=Response,
)
@requires("write")
async def delete_face(collection: CollectionName, person: Id, face: Id, service: Served, request: Request) -> Response:
    """Delete one face."""
    record_ids(request, [person, face])
    await service.in_store(service.thumbnails.delete_face, collection, person, face)
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
    return None if text is None else parse_filter(read_json(text.encode(), len(text)))


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
            size += len(orjson.dumps((person.name, person.metadata))) + _FACE_BYTES * len(person.faces)
            if page and (size > max_bytes or len(page) == limit):
                return page, page[-1].id
            page.append(person)
        if len(persons) < count:
            return page, None
        after = persons[-1].id


def _view(person: Person) -> PersonView:
    faces = [FaceView(id=face) for face in person.faces]
    return PersonView.model_construct(
        id=person.id, name=person.name, metadata=dict(person.metadata), faces=faces, created=person.created
    )


async def _embed_persons(
    service: Service, collection: str, persons: Sequence[PersonBody], several: bool
) -> tuple[list[NewPerson], list[list[torch.Tensor | None]], list[str]]:
    """The persons with the vectors of their inputs, all embedded together; their faces' crops; and warnings."""
    await service.require_collection(collection)
    names = [f"persons[{index}].faces" if several else "faces" for index in range(len(persons))]
    vectors, warnings, crops = await _embed_groups(
        service, [(name, person.faces) for name, person in zip(names, persons, strict=True)]
    )
    stops = np.cumsum([len(person.faces) for person in persons]).tolist()
    parts = np.split(vectors, stops[:-1])
    new = [NewPerson(part, person.name, person.metadata) for part, person in zip(parts, persons, strict=True)]
    own_crops = [crops[stop - len(person.faces) : stop] for person, stop in zip(persons, stops, strict=True)]
    return new, own_crops, warnings


async def _embed_groups(service: Service, groups: Sequence[tuple[str, Sequence[Input]]]) -> Embedded:
    inputs = [item for _, faces in groups for item in faces]
    names = [f"{name}[{index}]" for name, faces in groups for index in range(len(faces))]
    service.check_inputs(len(inputs))
    return await service.vectors(inputs, names, service.deadline(None))
