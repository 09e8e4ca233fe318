"""Enrolling persons: the vectors of their faces, whom those match already, and what a request sent again is answered.

A person who is enrolled twice is found twice, and deleted once. The check is one search before anything is written.
Where it decides what is written, others in the same collection that do wait for both (:func:`_turn`): of two enrolments
of one person at the same moment, the second knows the first. It holds within one service: two that share a database may
both enrol.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from itertools import islice
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import numpy as np
import orjson
import torch

from plsc.embedding.quality import QualityGate, poor_quality
from plsc.gallery.values import NewPerson, Person
from plsc.serve.access import ScoreView, current_caller
from plsc.serve.changes import Claim
from plsc.serve.errors import ApiError, KnownPerson
from plsc.serve.faces import refuse_several
from plsc.serve.schemas import Input, PersonBody, PersonPut
from plsc.serve.searching import Search
from plsc.serve.service import Embedded, Service, Spaces

OnKnown = Literal["enrol", "refuse", "add"]
_CREATED, _ADDED_TO_KNOWN = 201, 200  # statuses
_SHOWN_NAME = 80  # characters


class Enrolled(NamedTuple):
    """Persons as they are now, whom each matched, warnings, and the answer's status."""

    persons: list[Person]
    known: list[KnownPerson | None]
    warnings: list[str]
    status: int


async def enrol(
    service: Service, collection: str, persons: Sequence[PersonBody], several: bool, on_known: OnKnown, claim: Claim
) -> Enrolled:
    """Enrol all of ``persons`` or none; ``several`` says that the request holds a list of them.

    Raises:
        ApiError: 409 if anybody is known, and ``on_known`` is "refuse".
    """
    return await service.with_collection(
        collection, lambda spaces: _enrol(service, spaces, persons, several, on_known, claim)
    )


async def _enrol(
    service: Service, spaces: Spaces, persons: Sequence[PersonBody], several: bool, on_known: OnKnown, claim: Claim
) -> Enrolled:
    new, crops, warnings = await embed_persons(service, spaces, persons, several)
    async with _turn(service, spaces, on_known):
        known = await _find_known(service, spaces, new)
        if on_known == "refuse":
            _refuse_known(spaces.info.name, known, _group_names(len(persons), several) if several else ["this face"])
        # What is kept of the answer: nothing of what the request says of persons, who may be deleted, and no name.
        kept = [None if who is None else (who.id, who.score) for who in known]
        options: dict[str, Any] = {"metadata": [person.metadata for person in new], "adds": len(new)}
        if on_known == "add" and (who := known[0]) is not None:
            request = claim.request(lambda faces: [[(who.id, faces)], warnings, kept], _ADDED_TO_KNOWN)
            of_faces = {"vectors": new[0].vectors, "others": new[0].others, "keys": new[0].keys}
            faces: dict[str, Any] = {**of_faces, "crops": crops[0]}
            await service.enrol(service.thumbnails.add_faces, spaces, who.id, **faces, idempotent=request)
            person = await service.in_store(service.store.person, spaces.info.name, who.id)
            return Enrolled([person], known, warnings, _ADDED_TO_KNOWN)
        request = claim.request(lambda added: [[(one.id, one.faces, one.created) for one in added], warnings, kept])
        change = service.thumbnails.add_persons
        added = await service.enrol(change, spaces, new, crops=crops, idempotent=request, **options)
        return Enrolled(added, known, warnings, _CREATED)


async def read_enrolment(
    service: Service, collection: str, persons: Sequence[PersonBody], status: int, kept: Any
) -> Enrolled:
    """The answer to an enrolment that was done before: the request's ``persons``, and what :func:`enrol` kept."""
    added, warnings, kept_known = kept
    ids = [entry[0] for entry in kept_known if entry is not None]
    now = await service.in_store(service.store.person_summaries, collection, ids) if ids else {}
    known = [
        KnownPerson(id=entry[0], name=now[entry[0]].name, score=entry[1]) if entry and entry[0] in now else None
        for entry in kept_known
    ]  # as they are now; None for those who were deleted since
    if status == _ADDED_TO_KNOWN:
        return Enrolled([await service.in_store(service.store.person, collection, ids[0])], known, warnings, status)
    read = [
        Person(
            id,
            body.name,
            body.metadata,
            body.external_id,
            faces=tuple(faces),
            created=created,
            expires=body.expires,
            keys={face: given.key for face, given in zip(faces, body.faces, strict=True) if given.key is not None},
        )
        for body, (id, faces, created) in zip(persons, added, strict=True)
    ]
    return Enrolled(read, known, warnings, status)


async def embed_persons(
    service: Service, spaces: Spaces, persons: Sequence[PersonPut], several: bool
) -> tuple[list[NewPerson], list[list[torch.Tensor | None]], list[str]]:
    """The persons with the vectors of their inputs, all embedded together; their faces' crops; and warnings."""
    names = _group_names(len(persons), several)
    faces = [(name, person.faces) for name, person in zip(names, persons, strict=True)]
    embedded = await embed_groups(service, spaces, faces, ask=True)
    vectors, others = embedded.vectors, embedded.others
    counts = [len(person.faces) for person in persons]
    ends = np.cumsum(counts)
    new = [
        NewPerson(
            vectors[end - count : end],
            person.name,
            person.metadata,
            getattr(person, "external_id", None),
            person.expires,
            {contract_id: rows[end - count : end] for contract_id, rows in others.items()},
            keys=[face.key for face in person.faces],
        )
        for count, end, person in zip(counts, ends, persons, strict=True)
    ]
    rest = iter(embedded.crops)
    return new, [list(islice(rest, count)) for count in counts], embedded.warnings


async def embed_groups(
    service: Service, spaces: Spaces, groups: Sequence[tuple[str, Sequence[Input]]], *, ask: bool = False
) -> Embedded:
    """Embed the inputs of named groups together, by the models of a collection's spaces.

    With ``ask``, a picture of several faces has to say which is meant; else it is the largest.
    """
    inputs = [item for _, faces in groups for item in faces]
    names = [f"{name}[{index}]" for name, faces in groups for index in range(len(faces))]
    service.check_inputs(len(inputs))
    embedded = await service.vectors(inputs, names, service.deadline(None), spaces.contracts)
    if ask and service.detector is not None:
        refuse_several(inputs, names, embedded.pictures)
    if service.settings.quality_gates:
        await asyncio.to_thread(_check_quality, service.settings.quality_gates, names, embedded)
    return embedded


def _check_quality(gates: Mapping[str, QualityGate], names: Sequence[str], embedded: Embedded) -> None:
    """:class:`ApiError` 422 where a gate refuses a picture; a vector has none."""
    for name, vector, crop in zip(names, embedded.vectors, embedded.crops, strict=True):
        found = None if crop is None else poor_quality(gates, crop, vector)
        if found is not None:
            gate, quality = found
            least = f"{quality:.4g}, and this service enrols from {gates[gate].least:g} on"
            raise ApiError(422, f"{name} is too poor a picture: its {gate} is {least}; send a better one")


def _group_names(count: int, several: bool) -> list[str]:
    """What errors and warnings call the faces of each person of a request."""
    return [f"persons[{index}].faces" if several else "faces" for index in range(count)]


def _turn(service: Service, spaces: Spaces, on_known: OnKnown) -> AbstractAsyncContextManager[None]:
    """Holds for one enrolment of ``collection`` at a time, from the check to what it decides; for "enrol" at once."""
    if on_known == "enrol" or service.settings_of(spaces).threshold is None:
        return nullcontext()
    return service.enrolling.setdefault(spaces.info.name, asyncio.Lock())


async def _find_known(service: Service, spaces: Spaces, new: Sequence[NewPerson]) -> list[KnownPerson | None]:
    """The enrolled person most like any face of each new one, at or above the threshold; None without either."""
    groups = [np.asarray(person.vectors) for person in new]
    settings = service.settings_of(spaces)
    threshold = settings.threshold
    if threshold is None or not sum(map(len, groups)):
        return [None] * len(groups)
    search = Search(spaces.info.name, np.concatenate(groups), 1, threshold, None, spaces.info.contract_id)
    found = await service.search(search, service.deadline(None))
    view = ScoreView.of(current_caller(), settings)
    known: list[KnownPerson | None] = []
    rest = iter(found.matches)
    for group in groups:
        matches = [match for own in islice(rest, len(group)) for match in own if match.person in found.persons]
        best = max(matches, key=attrgetter("score"), default=None)
        if best is None:
            known.append(None)
        else:
            name = orjson.loads(found.persons[best.person])["name"]
            known.append(KnownPerson(id=best.person, name=name, score=view.score(best.score)))
    return known


def _refuse_known(collection: str, known: Sequence[KnownPerson | None], names: Sequence[str]) -> None:
    """:class:`ApiError` 409 if anybody is known; ``names`` say whose face each is in the message."""
    for person, faces in zip(known, names, strict=True):
        if person is not None:
            who = f"{person.name[:_SHOWN_NAME]} (#{person.id})" if person.name else f"person #{person.id}"
            place = f"/v1/collections/{collection}/persons/{person.id}/faces"
            message = (
                f"{faces} matches {who} at {person.score:.2f}: add it there (POST {place}), or enrol anyway with "
                "on_known=enrol"
            )
            raise ApiError(409, message, details={"known": person.model_dump()})
