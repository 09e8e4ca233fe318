"""Every store alike: what is wrong is refused by its kind of error, and nothing has changed."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.stores import DIM, GALLERY, MODEL, Kit, dump, enrol, faces

from plsc.errors import ConflictError, NotFoundError, PlscError, UsageError
from plsc.gallery.store import Store
from plsc.gallery.values import NewPerson, Person

BAD_VECTORS: list[Any] = [
    [[np.nan] + [0.0] * 7], [[np.inf] + [1.0] * 7], [[0.0] * 8], [[1.0] * 7], [[1.0] * 9], [1.0] * 8, [[[1.0] * 8]],
    [["a"] * 8], [[None] * 8], [[1.0] * 8, [1.0] * 7], "abc", None, 3.0, [[1j] * 8], [[True] * 8],
]  # fmt: skip
BAD_NAMES: list[Any] = [3, b"x", "a\0", "\ud800", "x" * 1025, ["a"]]
BAD_METADATA: list[Any] = [None, [], "x", {"a": None}, {"a": [1]}, {1: 2}, {"a": float("nan")}, {"a": 2**63}]


def errors_of(store: Store, one: Person, other: Person) -> list[tuple[type[PlscError], Callable[[], Any]]]:
    """Requests that must be refused, each with its error."""
    good, away, never = faces(2), "away", 10**12
    wrong: list[tuple[type[PlscError], Callable[[], Any]]] = [
        (ConflictError, lambda: store.create_collection(GALLERY, DIM, MODEL)),
        (ConflictError, lambda: store.create_collection(GALLERY, 3, "other")),
        (ConflictError, lambda: store.add_persons(GALLERY, [NewPerson(good)], "other")),
        (ConflictError, lambda: store.add_faces(GALLERY, one.id, good, "other")),
        (NotFoundError, lambda: store.collection(away)),
        (NotFoundError, lambda: store.delete_collection(away)),
        (NotFoundError, lambda: store.add_persons(away, [NewPerson(good)], MODEL)),
        (NotFoundError, lambda: store.person(away, 1)),
        (NotFoundError, lambda: store.persons(away)),
        (NotFoundError, lambda: store.person_summaries(away, [1])),
        (NotFoundError, lambda: store.search(away, good)),
        (NotFoundError, lambda: store.compact(away)),
        (NotFoundError, lambda: store.vectors(away, 1)),
        (NotFoundError, lambda: store.delete_face(GALLERY, one.id, never)),
        (NotFoundError, lambda: store.delete_face(GALLERY, one.id, other.faces[0])),
        (NotFoundError, lambda: store.delete_face(GALLERY, never, one.faces[0])),
        *((UsageError, lambda k=k: store.search(GALLERY, good, k=k)) for k in (0, -1, 2.5, "3", None, True)),
        *((UsageError, lambda t=t: store.search(GALLERY, good, threshold=t)) for t in (float("nan"), "x", None)),
        *((UsageError, lambda limit=limit: store.persons(GALLERY, limit=limit)) for limit in (0, -1, 1.5, "3")),
        (UsageError, lambda: store.search(GALLERY, good, filter={"n": 1})),  # type: ignore[arg-type]
    ]
    for id in (never, 0, -1, 2**63, 2**80):
        wrong += [
            (NotFoundError, lambda id=id: store.person(GALLERY, id)),
            (NotFoundError, lambda id=id: store.vectors(GALLERY, id)),
            (NotFoundError, lambda id=id: store.update_person(GALLERY, id, name="x")),
            (NotFoundError, lambda id=id: store.delete_person(GALLERY, id)),
            (NotFoundError, lambda id=id: store.add_faces(GALLERY, id, good, MODEL)),
        ]
    for bad in BAD_VECTORS:
        wrong += [
            (UsageError, lambda bad=bad: store.add_faces(GALLERY, one.id, bad, MODEL)),
            (UsageError, lambda bad=bad: store.search(GALLERY, bad)),
        ]
    wrong += [(UsageError, lambda bad=bad: store.update_person(GALLERY, one.id, name=bad)) for bad in BAD_NAMES]
    wrong += [
        (UsageError, lambda bad=bad: store.update_person(GALLERY, one.id, name="new", metadata=bad))
        for bad in BAD_METADATA[1:]
    ]
    bad_persons = [
        *(NewPerson(bad) for bad in BAD_VECTORS),
        *(NewPerson(good, bad) for bad in BAD_NAMES),
        *(NewPerson(good, None, bad) for bad in BAD_METADATA),
    ]
    for bad_person in bad_persons:
        batch = [NewPerson(good, "fine"), bad_person, NewPerson(good, "fine")]
        wrong.append((UsageError, lambda batch=batch: store.add_persons(GALLERY, batch, MODEL)))
    return wrong


@pytest.mark.slow
def test_errors_of_every_kind_change_nothing(kit: Kit, store: Store) -> None:
    one, other = enrol(store, 2)
    before = dump(store)
    wrong = errors_of(store, one, other)
    for index, (error, request) in enumerate(wrong):
        with pytest.raises(error) as caught:
            request()
        assert type(caught.value) is error, f"request {index} raises {caught.value!r}"
        assert 0 < len(str(caught.value)) < 500, f"request {index}: {caught.value}"
        assert "\n" not in str(caught.value), f"request {index}: {caught.value}"
        if index % 20 == 0:
            assert dump(store) == before, f"request {index} changed something"
    assert dump(store) == before
    assert dump(kit.again(store)) == before
