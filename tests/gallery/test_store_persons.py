"""Every store alike: collections, persons, faces and metadata are there as given."""

import datetime
from typing import Any

import numpy as np
import pytest
from support.stores import (
    DIM,
    GALLERY,
    MODEL,
    ODD_METADATA,
    Kit,
    enrol,
    faces,
    units,
)

from plsc.errors import NotFoundError, UsageError
from plsc.gallery.filters import MAX_CONDITIONS, Filter
from plsc.gallery.store import Store
from plsc.gallery.values import NewPerson, Person, PersonSummary


def test_collections_come_and_go(kit: Kit) -> None:
    store = kit.fresh()
    assert store.collections() == []
    names = ["b", "A", "a.b-c_9", "Z" * 64, "a", "persons", "select"]
    for dim, name in enumerate(names, start=1):
        made = store.create_collection(name, dim, f"contract-{dim}")
        assert (made.name, made.dim, made.contract_id, made.persons, made.faces) == (name, dim, f"contract-{dim}", 0, 0)
        moment = datetime.datetime.fromisoformat(made.created)
        assert moment.utcoffset() == datetime.timedelta(0)
        assert store.collection(name) == made
    assert [one.name for one in store.collections()] == sorted(names)
    store.add_persons("a", [NewPerson(faces(2, dim=5))], "contract-5")
    assert (store.collection("a").persons, store.collection("a").faces) == (1, 2)
    assert (store.collection("b").persons, store.collection("b").faces) == (0, 0)
    store.delete_collection("a")
    assert [one.name for one in store.collections()] == sorted(set(names) - {"a"})
    with pytest.raises(NotFoundError):
        store.collection("a")
    again = store.create_collection("a", 3, "another")
    assert (again.dim, again.contract_id, again.persons, again.faces) == (3, "another", 0, 0)
    assert store.persons("a") == []
    assert store.search("a", [[1, 0, 0]]) == [[]]


WRONG_NAMES: list[Any] = ["", "1a", "_a", "-", "a b", "a/b", "../a", "a\n", "ä", "a\0", "a" * 65, "a;", "a'"]
WRONG_NAMES += [None, 3, b"a"]
WRONG_DIMS: list[Any] = [0, -1, 2.0, True, "4", None, 2**40]
WRONG_CONTRACTS: list[Any] = ["", None, 1, "\0", "\ud800"]


def test_wrong_collections_are_refused(kit: Kit) -> None:
    store = kit.fresh()
    wrong = [(name, 4, MODEL) for name in WRONG_NAMES]
    wrong += [("a", dim, MODEL) for dim in WRONG_DIMS] + [("a", 4, contract) for contract in WRONG_CONTRACTS]
    for name, dim, contract in wrong:
        with pytest.raises(UsageError):
            store.create_collection(name, dim, contract)
        assert store.collections() == [], f"{name!r} of {dim!r} under {contract!r} was made"
    for name in WRONG_NAMES:
        with pytest.raises(NotFoundError):
            store.collection(name)


# --- persons and faces -----------------------------------------------------------------------------------------------


def test_enrolled_persons_are_there_as_given(store: Store) -> None:
    vectors = faces(6)
    made = store.add_persons(
        GALLERY, [NewPerson(vectors[:3], "Ada", {"age": 36}), NewPerson([]), NewPerson(vectors[3:].tolist(), "")], MODEL
    )
    assert [(one.name, one.metadata, len(one.faces)) for one in made] == [
        ("Ada", {"age": 36}, 3),
        (None, {}, 0),
        ("", {}, 3),
    ]
    for one in made:
        assert store.person(GALLERY, one.id) == one
        assert one.faces == tuple(sorted(one.faces))
        assert datetime.datetime.fromisoformat(one.created).utcoffset() == datetime.timedelta(0)
    for one, part in ((made[0], vectors[:3]), (made[2], vectors[3:])):
        stored = store.vectors(GALLERY, one.id)
        assert stored.dtype == np.float32
        np.testing.assert_allclose(stored, units(part), atol=1e-6)
        np.testing.assert_allclose(np.linalg.norm(stored.astype(np.float64), axis=1), 1, atol=1e-6)
    assert store.vectors(GALLERY, made[1].id).shape == (0, DIM)
    assert (store.collection(GALLERY).persons, store.collection(GALLERY).faces) == (3, 6)
    assert store.add_persons(GALLERY, [], MODEL) == []
    assert store.person_summaries(GALLERY, [made[2].id, 10**9, made[0].id, made[0].id, -1, 2**70]) == {
        one.id: PersonSummary(one.id, one.name, one.metadata) for one in (made[0], made[2])
    }
    assert store.person_summaries(GALLERY, []) == {}


def test_vectors_of_any_length(store: Store) -> None:
    given = [[1e-300] + [0.0] * 7, [1e300, 1e300] + [0.0] * 6, [3, 4] + [0] * 6, [5e-324] * 8]
    (one,) = store.add_persons(GALLERY, [NewPerson(given)], MODEL)
    expected = [[1] + [0] * 7, [0.5**0.5] * 2 + [0] * 6, [0.6, 0.8] + [0] * 6, [8**-0.5] * 8]
    np.testing.assert_allclose(store.vectors(GALLERY, one.id), expected, atol=1e-7)
    assert store.search(GALLERY, [[1e-300] + [0.0] * 7])[0][0].score == pytest.approx(1)


def test_ids_are_given_once(kit: Kit) -> None:
    store = kit.fresh()
    store.create_collection(GALLERY, DIM, MODEL)
    persons, found = set[int](), set[int]()

    def note(made: list[Person]) -> None:
        for one in made:
            assert one.id > 0
            assert one.id < 2**53, "JSON's readers keep whole numbers below 2^53"
            assert one.id not in persons
            assert not found & set(one.faces)
            assert one.id > max(persons, default=0)
            persons.add(one.id)
            found.update(one.faces)

    for turn in range(4):
        note(enrol(store, 3, turn))
        (face,) = store.add_faces(GALLERY, max(persons), faces(1), MODEL)
        assert face not in found
        found.add(face)
        store.delete_face(GALLERY, max(persons), face)
        for one in store.persons(GALLERY)[-2:]:
            store.delete_person(GALLERY, one.id)
        if turn % 2:
            store.compact()
        with pytest.raises(UsageError):
            store.add_persons(GALLERY, [NewPerson(faces(1)), NewPerson([[np.nan] * DIM])], MODEL)
        store = kit.again(store)


def typed(metadata: Any) -> dict[str, tuple[type, Any]]:
    return {key: (type(value), value) for key, value in metadata.items()}


def test_metadata_come_back_as_given(kit: Kit, store: Store) -> None:
    new = [NewPerson(faces(1), None, {**metadata, "place": n}) for n, metadata in enumerate(ODD_METADATA)]
    made = store.add_persons(GALLERY, new, MODEL)
    plain = enrol(store, len(ODD_METADATA))
    updated = [
        store.update_person(GALLERY, one.id, metadata=given.metadata) for one, given in zip(plain, new, strict=True)
    ]
    store = kit.again(store)
    for given, one, two in zip(new, made, updated, strict=True):
        for known in (one, two, store.person(GALLERY, one.id), store.person(GALLERY, two.id)):
            assert typed(known.metadata) == typed(given.metadata)
        entries = list(given.metadata.items())
        for some in (
            entries[start : start + MAX_CONDITIONS - 1] for start in range(0, len(entries), MAX_CONDITIONS - 1)
        ):
            fits = Filter.parse({**dict(some), "place": given.metadata["place"]})
            assert [found.id for found in store.persons(GALLERY, filter=fits)] == [one.id, two.id]
            assert {match.person for match in store.search(GALLERY, faces(1), filter=fits)[0]} == {one.id, two.id}


def test_pages_begin_and_end_anywhere(store: Store) -> None:
    made = enrol(store, 101)
    assert store.persons(GALLERY, limit=10**9) == made
    assert store.persons(GALLERY) == made[:100]
    assert store.persons(GALLERY, after=-5, limit=1) == made[:1]
    assert store.persons(GALLERY, after=2**63 - 1) == []
    store.delete_person(GALLERY, made[4].id)
    few = Filter.parse({"n": {"in": [1, 4, 20, 38]}})
    assert [one.metadata["n"] for one in store.persons(GALLERY, limit=2, filter=few)] == [1, 20]
    assert [one.metadata["n"] for one in store.persons(GALLERY, after=made[20].id, limit=2, filter=few)] == [38]
