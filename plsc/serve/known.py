"""Whom an enrolment's faces match already: a person who is enrolled twice is found twice, and deleted once.

The check is one search before anything is written. Where it decides what is written, others in the same collection
that do wait for both (:func:`turn`): of two enrolments of one person at the same moment, the second knows the first. It
holds within one service: two that share a database may both enrol.
"""

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, Literal

import numpy as np
import orjson

from plsc.gallery.values import Match
from plsc.serve.access import current_caller
from plsc.serve.batching import Search
from plsc.serve.errors import ApiError, KnownPerson
from plsc.serve.inputs import Float32
from plsc.serve.scores import ScoreView
from plsc.serve.service import Service

OnKnown = Literal["enrol", "refuse", "add"]
_SHOWN_NAME = 80  # characters


def turn(service: Service, collection: str, on_known: OnKnown) -> AbstractAsyncContextManager[None]:
    """Holds for one enrolment of ``collection`` at a time, from the check to what it decides; for "enrol" at once."""
    if on_known == "enrol" or service.settings.threshold is None:
        return nullcontext()
    return service.enrolling.setdefault(collection, asyncio.Lock())


async def find_known(service: Service, collection: str, groups: Sequence[Float32]) -> list[KnownPerson | None]:
    """The enrolled person most like any vector of each group, at or above the threshold; None without either.

    Args:
        groups: vectors (n, D) of each person to enrol.
    """
    threshold = service.settings.threshold
    if threshold is None or not sum(map(len, groups)):
        return [None] * len(groups)
    search = Search(collection, np.concatenate(groups), 1, threshold, None)
    found = await service.search(search, service.deadline(None))
    view = ScoreView.of(current_caller(), service.settings)
    known: list[KnownPerson | None] = []
    for stop, group in zip(np.cumsum([len(group) for group in groups]).tolist(), groups, strict=True):
        matches = [match for own in found.matches[stop - len(group) : stop] for match in own]
        best = max((match for match in matches if match.person in found.persons), key=_score, default=None)
        known.append(None if best is None else _view(best, found.persons[best.person], view))
    return known


def refuse_known(collection: str, known: Sequence[KnownPerson | None], names: Sequence[str]) -> None:
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


def keep_known(known: Sequence[KnownPerson | None]) -> list[Any]:
    """What is kept of it with an answer: no name, for the person may be deleted."""
    return [None if person is None else (person.id, person.score) for person in known]


async def read_known(service: Service, collection: str, kept: Sequence[Any]) -> list[KnownPerson | None]:
    """Whom :func:`keep_known` kept, as they are now; None for those who were deleted since."""
    ids = [entry[0] for entry in kept if entry is not None]
    now = await service.in_store(service.store.person_summaries, collection, ids) if ids else {}
    return [
        KnownPerson(id=entry[0], name=now[entry[0]].name, score=entry[1]) if entry and entry[0] in now else None
        for entry in kept
    ]


def _score(match: Match) -> float:
    return match.score


def _view(match: Match, person: bytes, view: ScoreView) -> KnownPerson:
    return KnownPerson(id=match.person, name=orjson.loads(person)["name"], score=view.score(match.score))
