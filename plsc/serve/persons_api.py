"""/v1/collections/{collection}/persons: enrol, look at, change and forget persons and their faces."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any

import numpy as np
import orjson
from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from plsc.gallery.filters import Filter
from plsc.gallery.store import NewPerson, Person
from plsc.serve.failures import Refusal
from plsc.serve.routing import CollectionName, Id, JsonRoute, Served, errors, read_json, record_ids
from plsc.serve.schemas import (
    LARGEST_ID,
    EnrolledView,
    FacesBody,
    FacesView,
    FaceView,
    Input,
    PersonBody,
    PersonChange,
    PersonsBody,
    PersonsView,
    PersonView,
)
from plsc.serve.service import Service

LARGEST_PAGE = 1000
_READ_TOGETHER = 128  # persons; with the longest metadata, 32 MiB
_FACE_BYTES = 20  # of a face in an answer, about
router = APIRouter(prefix="/v1/collections/{collection}/persons", route_class=JsonRoute, tags=["persons"])


def read_filter(text: str | None) -> Filter | None:
    """A filter given as JSON text in a query; :class:`Refusal` 400 names what is wrong in it."""
    return None if text is None else parse_filter(read_json(text.encode(), len(text)))


def parse_filter(value: Any) -> Filter | None:
    """A filter from its JSON form; None stays None."""
    return None if value is None else Filter.parse(value)


@router.get("", responses=errors(404))
async def list_persons(
    collection: CollectionName,
    service: Served,
    after: Annotated[int, Query(ge=0, le=LARGEST_ID, description="Persons with ids above this")] = 0,
    limit: Annotated[int, Query(ge=1, le=LARGEST_PAGE)] = 100,
    filter: Annotated[str | None, Query(description="A filter as JSON text", examples=['{"city": "Bern"}'])] = None,
) -> PersonsView:
    """Persons by ascending id, a page at a time, which holds fewer where their metadata are long."""
    read = partial(service.store.persons, collection, filter=read_filter(filter))
    found, following = await service.in_store(_page, read, after, limit, service.settings.limits.answer_bytes)
    return PersonsView(persons=[view(person) for person in found], next=following)


def _page(read: Callable[..., list[Person]], after: int, limit: int, most: int) -> tuple[list[Person], int | None]:
    """Up to ``limit`` persons in about ``most`` bytes, and the ``after`` of the next page; read a few at a time."""
    found: list[Person] = []
    size = 0
    while True:
        wanted = min(limit + 1 - len(found), _READ_TOGETHER)
        more = read(after=after, limit=wanted)
        for person in more:
            size += len(orjson.dumps((person.name, person.metadata))) + _FACE_BYTES * len(person.faces)
            if found and (size > most or len(found) == limit):
                return found, found[-1].id
            found.append(person)
        if len(more) < wanted:
            return found, None
        after = more[-1].id


@router.post("", status_code=201, responses=errors(404, 409, 413, 415, 422, 504))
async def add_persons(
    collection: CollectionName, body: PersonBody | PersonsBody, service: Served, request: Request
) -> PersonView | EnrolledView:
    """Enrol one person, or several: all or none. They are stored and found by searches when this answers."""
    several = isinstance(body, PersonsBody)
    persons = body.persons if isinstance(body, PersonsBody) else [body]
    if len(persons) > service.settings.limits.inputs:
        most = service.settings.limits.inputs
        raise Refusal(413, f"{len(persons)} persons; at most {most} are enrolled in a request")
    new = await _embedded(service, collection, persons, several)
    added = await service.in_store(service.store.add_persons, collection, new, service.contract_id)
    record_ids(request, [person.id for person in added])
    return EnrolledView(persons=[view(person) for person in added]) if several else view(added[0])


@router.get("/{person}", responses=errors(404))
async def get_person(collection: CollectionName, person: Id, service: Served) -> PersonView:
    """One person."""
    return view(await service.in_store(service.store.person, collection, person))


@router.patch("/{person}", responses=errors(404, 413, 415))
async def update_person(
    collection: CollectionName, person: Id, body: PersonChange, service: Served, request: Request
) -> PersonView:
    """Change the name, or replace the metadata; what is left out stays."""
    record_ids(request, [person])
    change = service.store.update_person
    return view(await service.in_store(change, collection, person, name=body.name, metadata=body.metadata))


@router.delete("/{person}", status_code=204, responses=errors(404), response_class=Response)
async def delete_person(collection: CollectionName, person: Id, service: Served, request: Request) -> Response:
    """Forget a person and all faces: no search finds them from now on."""
    record_ids(request, [person])
    await service.in_store(service.store.delete_person, collection, person)
    return Response(status_code=204)


@router.post("/{person}/faces", status_code=201, responses=errors(404, 409, 413, 415, 422, 504))
async def add_faces(
    collection: CollectionName, person: Id, body: FacesBody, service: Served, request: Request
) -> FacesView:
    """Add faces to a person."""
    record_ids(request, [person])
    await service.comparable(collection)
    vectors = await _vectors(service, [("faces", body.faces)])
    added = await service.in_store(service.store.add_faces, collection, person, vectors, service.contract_id)
    return FacesView(faces=[FaceView(id=face) for face in added])


@router.delete("/{person}/faces/{face}", status_code=204, responses=errors(404), response_class=Response)
async def delete_face(collection: CollectionName, person: Id, face: Id, service: Served, request: Request) -> Response:
    """Forget one face."""
    record_ids(request, [person, face])
    await service.in_store(service.store.delete_face, collection, person, face)
    return Response(status_code=204)


def view(person: Person) -> PersonView:
    """A person as it goes over the wire."""
    faces = [FaceView(id=face) for face in person.faces]
    return PersonView.model_construct(
        id=person.id, name=person.name, metadata=dict(person.metadata), faces=faces, created=person.created
    )


async def _embedded(service: Service, collection: str, persons: Sequence[PersonBody], several: bool) -> list[NewPerson]:
    """The persons with their inputs' vectors, all embedded together."""
    await service.comparable(collection)
    names = [f"persons[{place}].faces" if several else "faces" for place in range(len(persons))]
    vectors = await _vectors(service, [(name, person.faces) for name, person in zip(names, persons, strict=True)])
    parts = np.split(vectors, np.cumsum([len(person.faces) for person in persons])[:-1])
    return [NewPerson(part, person.name, person.metadata) for part, person in zip(parts, persons, strict=True)]


async def _vectors(service: Service, groups: Sequence[tuple[str, Sequence[Input]]]) -> Any:
    inputs = [given for _, faces in groups for given in faces]
    names = [f"{name}[{place}]" for name, faces in groups for place in range(len(faces))]
    check_count(len(inputs), service)
    return await service.vectors(inputs, names, service.deadline(None))


def check_count(inputs: int, service: Service) -> None:
    """:class:`Refusal` 413 if a request has more inputs than are taken."""
    most = service.settings.limits.inputs
    if inputs > most:
        raise Refusal(413, f"{inputs} inputs; at most {most} are taken in a request")
