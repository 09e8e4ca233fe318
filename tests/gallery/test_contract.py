"""Every store, one contract: what plsc/gallery/contract.py says, sentence by sentence, against dicts and float64."""

import datetime
import random
import re
import string
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from memory_store import MemoryStore
from store_kits import KINDS, Kit, Servers

from plsc.errors import ConflictError, NotFoundError, PlscError, UsageError
from plsc.gallery.contract import Match, Named, NewPerson, Person, Store
from plsc.gallery.filters import Filter

DIM, MODEL = 8, "model-1"
CLOSE = 2e-6  # a cosine in float32 against float64
GALLERY = "people"
ODD_NAMES = ["", "O'Hara", 'say "hi"', "a\\b", "%s {0} $1 :x ?", "; DROP TABLE persons; --", "Ünïcödé 李小龙 🙂",
             "a\nb\t", "x" * 1024, "\u202eabc", "null", "é" * 1024]  # fmt: skip
ODD_METADATA: list[dict[str, Any]] = [
    {},
    {"a": 1, "b": 1.0, "c": True, "d": False, "e": "1", "f": ""},
    {"large": 2**63 - 1, "small": -(2**63), "next": 2**53 + 1, "zero": 0, "minus": -0.0},
    {"tiny": 5e-324, "huge": 1.7976931348623157e308, "third": 1 / 3, "big": 1e18, "bigger": 1234567890123456768.0},
    {"O'Hara": "O'Hara", 'a"b': 'c"d', "a\\b": "c\\d", "a.b[0]": "x", "$": "$", "ключ": "значение", "🙂": "🙂"},
    {"true": "true", "null": "null", "%s": "%s", "{x}": "{x}", "a\nb": "a\nb", " ": " ", "id": 7, "person": "x"},
    {"long": "x" * 1024, "k" * 1024: 1},
    {f"key {n}": n for n in range(63)},
]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    servers = Servers(tmp_path_factory.mktemp("stores"))
    yield servers
    servers.close()


@pytest.fixture(params=KINDS)
def kit(request: pytest.FixtureRequest, servers: Servers) -> Iterator[Kit]:
    kit = servers.kit(request.param)
    yield kit
    kit.close()


@pytest.fixture
def store(kit: Kit) -> Store:
    """A store with the empty collection ``people``."""
    store = kit.fresh()
    store.create_collection(GALLERY, DIM, MODEL)
    return store


def faces(count: int, seed: int = 0, dim: int = DIM) -> npt.NDArray[np.float32]:
    """(count, dim) of different lengths."""
    generator = np.random.default_rng(seed)
    return (generator.standard_normal((count, dim)) * generator.uniform(0.01, 100, (count, 1))).astype(np.float32)


def units(vectors: npt.ArrayLike) -> npt.NDArray[np.float64]:
    wide = np.asarray(vectors, dtype=np.float64)
    return np.asarray(wide / np.linalg.norm(wide, axis=-1, keepdims=True))


def enrol(store: Store, count: int, seed: int = 0, **metadata: Any) -> list[Person]:
    new = [NewPerson(vector[None], f"p{n}", {"n": n, **metadata}) for n, vector in enumerate(faces(count, seed))]
    return store.add_persons(GALLERY, new, MODEL)


def everyone(store: Store, collection: str) -> list[Person]:
    found: list[Person] = []
    while page := store.persons(collection, after=found[-1].id if found else 0, limit=7):
        assert not found or page[0].id > found[-1].id, "pages do not overlap"
        found += page
    return found


def dump(store: Store) -> dict[str, Any]:
    """All that a store holds."""
    return {
        about.name: (about, [(one, store.vectors(about.name, one.id).tobytes()) for one in everyone(store, about.name)])
        for about in store.collections()
    }


def same_type(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other)


# --- collections -----------------------------------------------------------------------------------------------------


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


WRONG_NAMES: list[Any] = ["", "1a", "_a", "-", "a b", "a/b", "../a", "a\n", "ä", "a\0", "a" * 65, "a;", "a'", None,
                          3, b"a"]  # fmt: skip
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
    assert [(one.name, one.metadata, len(one.faces)) for one in made] == [("Ada", {"age": 36}, 3), (None, {}, 0),
                                                                          ("", {}, 3)]  # fmt: skip
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
    assert store.names_of(GALLERY, [made[2].id, 10**9, made[0].id, made[0].id, -1, 2**70]) == {
        one.id: Named(one.id, one.name, one.metadata) for one in (made[0], made[2])
    }  # fmt: skip
    assert store.names_of(GALLERY, []) == {}


def test_vectors_of_any_length(store: Store) -> None:
    given = [[1e-300] + [0.0] * 7, [1e300, 1e300] + [0.0] * 6, [3, 4] + [0] * 6, [5e-324] * 8]
    (one,) = store.add_persons(GALLERY, [NewPerson(given)], MODEL)
    expected = [[1] + [0] * 7, [0.5**0.5] * 2 + [0] * 6, [0.6, 0.8] + [0] * 6, [8**-0.5] * 8]
    np.testing.assert_allclose(store.vectors(GALLERY, one.id), expected, atol=1e-7)
    assert store.search(GALLERY, [[1e-300] + [0.0] * 7])[0][0].score == pytest.approx(1)


def test_faces_are_added_and_forgotten(store: Store) -> None:
    vectors = faces(6)
    one, other = store.add_persons(GALLERY, [NewPerson(vectors[:2]), NewPerson(vectors[2:3])], MODEL)
    more = store.add_faces(GALLERY, one.id, vectors[3:5], MODEL)
    assert store.person(GALLERY, one.id).faces == (*one.faces, *more)
    np.testing.assert_allclose(store.vectors(GALLERY, one.id), units(vectors[[0, 1, 3, 4]]), atol=1e-6)
    assert store.search(GALLERY, vectors[4:5], k=1) == [[Match(one.id, more[1], pytest.approx(1, abs=CLOSE))]]
    store.delete_face(GALLERY, one.id, one.faces[1])
    assert store.person(GALLERY, one.id).faces == (one.faces[0], *more)
    np.testing.assert_allclose(store.vectors(GALLERY, one.id), units(vectors[[0, 3, 4]]), atol=1e-6)
    assert all(match.score < 0.9999 for match in store.search(GALLERY, vectors[1:2])[0])
    with pytest.raises(NotFoundError):
        store.delete_face(GALLERY, one.id, one.faces[1])
    with pytest.raises(NotFoundError):
        store.delete_face(GALLERY, one.id, other.faces[0])
    assert store.add_faces(GALLERY, one.id, np.empty((0, DIM)), MODEL) == []
    for face in (one.faces[0], *more):
        store.delete_face(GALLERY, one.id, face)
    assert store.person(GALLERY, one.id).faces == ()
    assert [match.person for match in store.search(GALLERY, vectors[:1])[0]] == [other.id]
    (back,) = store.add_faces(GALLERY, one.id, vectors[5:], MODEL)
    assert back > max(*one.faces, *more)
    assert store.search(GALLERY, vectors[5:], k=1)[0][0].person == one.id


def test_a_deleted_person_is_forgotten(store: Store) -> None:
    made = enrol(store, 5)
    gone = made[2]
    store.delete_person(GALLERY, gone.id)
    assert [one.id for one in store.persons(GALLERY)] == [one.id for one in made if one != gone]
    assert gone.id not in {match.person for match in store.search(GALLERY, faces(5), k=9)[2]}
    assert store.names_of(GALLERY, [gone.id]) == {}
    assert (store.collection(GALLERY).persons, store.collection(GALLERY).faces) == (4, 4)
    for ask in (store.person, store.vectors, store.delete_person, store.update_person):
        with pytest.raises(NotFoundError):
            ask(GALLERY, gone.id)
    with pytest.raises(NotFoundError):
        store.add_faces(GALLERY, gone.id, faces(1), MODEL)
    with pytest.raises(NotFoundError):
        store.delete_face(GALLERY, gone.id, gone.faces[0])
    store.compact(GALLERY)
    assert len(store.search(GALLERY, faces(5), k=9)[2]) == 4


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
            assert known.metadata.keys() == given.metadata.keys()
            assert all(same_type(known.metadata[key], value) for key, value in given.metadata.items())
        fits = Filter.parse(dict(given.metadata))
        assert [found.id for found in store.persons(GALLERY, where=fits)] == [one.id, two.id]
        assert {match.person for match in store.search(GALLERY, faces(1), where=fits)[0]} == {one.id, two.id}


def test_odd_names_come_back_as_given(kit: Kit, store: Store) -> None:
    made = store.add_persons(GALLERY, [NewPerson(faces(1, n), name) for n, name in enumerate(ODD_NAMES)], MODEL)
    assert [one.name for one in made] == ODD_NAMES
    (plain,) = enrol(store, 1)
    assert [store.update_person(GALLERY, plain.id, name=name).name for name in ODD_NAMES] == ODD_NAMES
    store = kit.again(store)
    assert [one.name for one in everyone(store, GALLERY)] == [*ODD_NAMES, ODD_NAMES[-1]]


def test_persons_are_updated(store: Store) -> None:
    one, other = enrol(store, 2, city="Bern")
    named = store.update_person(GALLERY, one.id, name="Ada")
    assert (named.name, named.metadata, named.faces, named.created) == ("Ada", one.metadata, one.faces, one.created)
    moved = store.update_person(GALLERY, one.id, metadata={"city": "Rome"})
    assert (moved.name, moved.metadata) == ("Ada", {"city": "Rome"}), "metadata are replaced, not merged"
    assert store.person(GALLERY, one.id) == moved == store.update_person(GALLERY, one.id)
    for city, who in (("Bern", other.id), ("Rome", one.id)):
        where = Filter.parse({"city": city})
        assert [found.id for found in store.persons(GALLERY, where=where)] == [who]
        assert [match.person for match in store.search(GALLERY, faces(1), where=where)[0]] == [who]
    assert store.update_person(GALLERY, one.id, metadata={}).metadata == {}
    assert store.persons(GALLERY, where=Filter.parse({"city": "Rome"})) == []
    np.testing.assert_allclose(store.vectors(GALLERY, one.id), units(faces(2)[:1]), atol=1e-6)


def test_pages_cover_everyone_once_in_order(store: Store) -> None:
    made = enrol(store, 40)
    for place in (0, 3, 4, 39):
        store.delete_person(GALLERY, made[place].id)
    left = [one for place, one in enumerate(made) if place not in (0, 3, 4, 39)]
    for limit in (1, 5, 36, 100, 10**9):
        pages, after = list[Person](), 0
        while page := store.persons(GALLERY, after=after, limit=limit):
            assert len(page) <= limit
            assert page[0].id > after
            pages += page
            after = page[-1].id
        assert pages == left
    assert store.persons(GALLERY, after=made[3].id, limit=2) == left[2:4]
    assert store.persons(GALLERY, after=-5, limit=1) == left[:1]
    assert store.persons(GALLERY, after=2**63 - 1) == []
    few = Filter.parse({"n": {"in": [1, 20, 38]}})
    assert [one.metadata["n"] for one in store.persons(GALLERY, limit=2, where=few)] == [1, 20]
    assert [one.metadata["n"] for one in store.persons(GALLERY, after=made[20].id, limit=2, where=few)] == [38]
    enrol(store, 100)
    assert len(store.persons(GALLERY)) == 100


# --- all or nothing --------------------------------------------------------------------------------------------------

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
        (NotFoundError, lambda: store.names_of(away, [1])),
        (NotFoundError, lambda: store.search(away, good)),
        (NotFoundError, lambda: store.compact(away)),
        (NotFoundError, lambda: store.vectors(away, 1)),
        (NotFoundError, lambda: store.delete_face(GALLERY, one.id, never)),
        (NotFoundError, lambda: store.delete_face(GALLERY, one.id, other.faces[0])),
        (NotFoundError, lambda: store.delete_face(GALLERY, never, one.faces[0])),
        *((UsageError, lambda k=k: store.search(GALLERY, good, k=k)) for k in (0, -1, 2.5, "3", None, True)),
        *((UsageError, lambda t=t: store.search(GALLERY, good, threshold=t)) for t in (float("nan"), "x", None)),
        *((UsageError, lambda limit=limit: store.persons(GALLERY, limit=limit)) for limit in (0, -1, 1.5, "3")),
        (UsageError, lambda: store.search(GALLERY, good, where={"n": 1})),  # type: ignore[arg-type]
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


def test_errors_of_every_kind_change_nothing(kit: Kit, store: Store) -> None:
    one, other = enrol(store, 2)
    before = dump(store)
    wrong = errors_of(store, one, other)
    for place, (error, request) in enumerate(wrong):
        with pytest.raises(error) as caught:
            request()
        assert type(caught.value) is error, f"request {place} raises {caught.value!r}"
        assert 0 < len(str(caught.value)) < 500, f"request {place}: {caught.value}"
        assert "\n" not in str(caught.value), f"request {place}: {caught.value}"
        if place % 20 == 0:
            assert dump(store) == before, f"request {place} changed something"
    assert dump(store) == before
    assert dump(kit.again(store)) == before


# --- searching -------------------------------------------------------------------------------------------------------


def agree(store: Store, oracle: MemoryStore, collection: str, queries: Any, **asked: Any) -> None:
    """The store's answers are the oracle's, save for rounding and the order of ties."""
    asked = {"k": 10, "threshold": -1.0, "where": None, **asked}
    found = store.search(collection, queries, **asked)
    assert len(found) == len(queries)
    every = oracle.search(collection, queries, k=10**9, where=asked["where"])
    for matches, truth, query in zip(found, every, units(queries), strict=True):
        scores = [match.score for match in matches]
        best = {match.person: match.score for match in truth}
        assert scores == sorted(scores, reverse=True)
        assert all(-1 <= score <= 1 and score >= asked["threshold"] for score in scores)
        assert len({match.person for match in matches}) == len(matches)
        for match in matches:
            person = oracle.person(collection, match.person)
            vector = units(oracle.vectors(collection, person.id))[person.faces.index(match.face)]
            assert match.score == pytest.approx(vector @ query, abs=CLOSE)
            assert match.score == pytest.approx(best[match.person], abs=CLOSE), "the best face"
        surely = sum(score >= asked["threshold"] + CLOSE for score in best.values())
        perhaps = sum(score >= asked["threshold"] - CLOSE for score in best.values())
        assert min(asked["k"], surely) <= len(matches) <= min(asked["k"], perhaps)
        expected = [match.score for match in truth[: len(matches)]]
        np.testing.assert_allclose(scores, expected, atol=CLOSE)


def both(store: Store, oracle: MemoryStore, persons: list[NewPerson]) -> None:
    assert [(one.id, one.faces) for one in store.add_persons(GALLERY, persons, MODEL)]
    oracle.add_persons(GALLERY, persons, MODEL)


def twin(store: Store) -> MemoryStore:
    """An oracle that holds what ``store`` holds, under the same ids."""
    oracle = MemoryStore()
    for about in store.collections():
        oracle.create_collection(about.name, about.dim, about.contract_id)
        rows = oracle._of(about.name)
        for one in everyone(store, about.name):
            rows.persons[one.id] = one
            rows.vectors |= dict(zip(one.faces, units(store.vectors(about.name, one.id)), strict=True))
    return oracle


@pytest.mark.parametrize("compacted", [False, True])
def test_search_against_float64(store: Store, compacted: bool) -> None:
    random_state = np.random.default_rng(5)
    centres = random_state.standard_normal((60, DIM))
    new = []
    for number, centre in enumerate(centres):
        near = centre + 0.3 * random_state.standard_normal((number % 3, DIM))  # some persons have no faces
        new.append(NewPerson(near, f"p{number}", {"group": number % 7, "even": number % 2 == 0}))
    store.add_persons(GALLERY, new[:50], MODEL)
    if compacted:
        store.compact(GALLERY)
    store.add_persons(GALLERY, new[50:], MODEL)
    oracle = twin(store)
    queries = np.concatenate([centres[:7], -centres[:3], random_state.standard_normal((5, DIM))])
    for k in (1, 39, 40, 10**6):
        agree(store, oracle, GALLERY, queries, k=k)
    for threshold in (-2.0, 0.0, 0.5, 0.95, 2.0, -np.inf, np.inf):
        agree(store, oracle, GALLERY, queries, threshold=threshold, k=20)
    filters: list[dict[str, Any]] = [
        {}, {"group": 3}, {"group": {"in": [1, 2]}, "even": True}, {"group": 99}, {"none": {"exists": False}},
    ]  # fmt: skip
    for asked in filters:
        agree(store, oracle, GALLERY, queries, where=Filter.parse(asked), k=12)
        agree(store, oracle, GALLERY, queries, where=Filter.parse(asked), k=12, threshold=0.4)
    assert store.search(GALLERY, np.empty((0, DIM))) == []
    assert store.search(GALLERY, (queries * 1e-3).tolist(), k=1)[0][0].score == pytest.approx(
        store.search(GALLERY, queries, k=1)[0][0].score, abs=CLOSE
    )


def test_an_empty_collection_answers(store: Store) -> None:
    assert store.search(GALLERY, faces(3), k=5) == [[], [], []]
    assert store.search(GALLERY, faces(1), where=Filter.parse({"a": 1})) == [[]]
    store.add_persons(GALLERY, [NewPerson([])], MODEL)
    assert store.search(GALLERY, faces(2), k=5) == [[], []]


def test_the_threshold_is_inclusive(store: Store) -> None:
    basis = np.eye(DIM)
    new = [NewPerson(basis[:1]), NewPerson(basis[1:2]), NewPerson(-basis[:1])]
    new += [NewPerson((basis[:1] + 3**0.5 * basis[n : n + 1]) / 2) for n in (2, 3)]
    new += [NewPerson(faces(40, 9))]
    made = [one.id for one in store.add_persons(GALLERY, new, MODEL)]
    for threshold, at_least in ((1.0, made[:1]), (0.0, made[:2]), (-1.0, made)):
        found = {match.person for match in store.search(GALLERY, basis[:1], threshold=threshold)[0]}
        assert found >= set(at_least)
        assert (made[2] in found) == (threshold == -1.0)
    for match in store.search(GALLERY, basis[:1])[0]:
        reached = {one.person for one in store.search(GALLERY, basis[:1], threshold=match.score)[0]}
        assert match.person in reached, "a score that was answered is reached as a threshold"
        if match.score < 1:
            above = store.search(GALLERY, basis[:1], threshold=float(np.nextafter(match.score, 2)))[0]
            assert match.person not in {one.person for one in above}


def test_opposite_and_equal_directions_are_found_in_spite_of_rounding(store: Store) -> None:
    vectors = faces(30, 3)
    made = store.add_persons(GALLERY, [NewPerson(-vectors[n : n + 1]) for n in range(30)], MODEL)
    for matches, opposite in zip(store.search(GALLERY, vectors, k=30), made, strict=True):
        assert len(matches) == 30, "a cosine is never below -1"
        assert matches[-1].person == opposite.id
        assert matches[-1].score >= -1
    for matches in store.search(GALLERY, -vectors, k=1):
        assert matches[0].score <= 1


def test_a_person_is_found_once_by_the_best_face(store: Store) -> None:
    """One person's many faces do not push the others out."""
    centre = faces(1, 1)
    crowd = centre / np.linalg.norm(centre) + 0.01 * np.random.default_rng(2).standard_normal((400, DIM))
    (many,) = store.add_persons(GALLERY, [NewPerson(crowd)], MODEL)
    others = enrol(store, 6, seed=4)
    (matches,) = store.search(GALLERY, centre, k=7)
    assert {match.person for match in matches} == {many.id, *(one.id for one in others)}
    assert len(matches) == 7
    best = int(np.argmax(units(crowd) @ units(centre)[0]))
    assert matches[0].score == pytest.approx(float((units(crowd) @ units(centre)[0])[best]), abs=CLOSE)
    agree(store, twin(store), GALLERY, faces(4, 11), k=5)


def test_filters_never_find_less_than_there_is(store: Store) -> None:
    """Three persons of many fit, and they are those least alike."""
    query = faces(1, 1)
    towards = np.random.default_rng(0).standard_normal((1200, DIM)) * 0.2 + query / np.linalg.norm(query)
    new = [NewPerson(row[None], None, {"rare": False, "n": n, "word": f"w{n:04}"}) for n, row in enumerate(towards)]
    for place in (3, 700, 1199):
        new[place] = NewPerson(-towards[place][None], None, {"rare": True, "n": -5 - place, "word": "z", "also": 1.5})
    ids = [one.id for one in store.add_persons(GALLERY, new, MODEL)]
    three = {ids[3], ids[700], ids[1199]}
    asked: list[dict[str, Any]] = [
        {"rare": True}, {"rare": {"ne": False}}, {"n": {"lt": 0}}, {"n": {"lte": -8}}, {"word": {"gt": "w9999"}},
        {"word": {"gte": "z"}}, {"word": {"in": ["z", "a"]}}, {"also": {"exists": True}}, {"also": 1.5},
        {"also": {"gt": 1}}, {"n": {"in": [-8, -705, -1204]}}, {"word": {"in": [f"v{n}" for n in range(60)] + ["z"]}},
        {"rare": True, "n": {"lt": 5, "gte": -2000}, "word": {"ne": "x"}},
    ]  # fmt: skip
    for compacted in (False, True):
        if compacted:
            store.compact()
        for filter in asked:
            (matches,) = store.search(GALLERY, query, k=10, where=Filter.parse(filter))
            assert {match.person for match in matches} == three, filter
            assert {one.id for one in store.persons(GALLERY, where=Filter.parse(filter), limit=5)} == three, filter
        assert len(store.search(GALLERY, query, k=2, where=Filter.parse({"rare": True}))[0]) == 2
        assert store.search(GALLERY, query, k=10, where=Filter.parse({"rare": True}), threshold=0.0) == [[]]
        common = store.search(GALLERY, query, k=1000, where=Filter.parse({"rare": False, "n": {"gte": 600}}))[0]
        assert len(common) == 598


VALUES: list[Any] = [
    0, 1, -1, 1.0, 0.5, -0.0, True, False, "", "0", "1", "a", "A", "true", "é", "z", "\U0001f642", "\uffee", 2**53,
    2**53 + 1, float(2**53), 2**63 - 1, float(2**63), -(2**63), 1e300, 5e-324, 1234567890123456790,
    1234567890123456768.0, "O'H", 'a"b', "a\\", "%", "_", "x" * 1024,
]  # fmt: skip
KEYS = ["k", "a.b", "O'H", 'q"q', "b\\", "$x", "ключ", "[0]", "id", "x" * 1024]


def test_filters_mean_the_same_in_every_store(store: Store) -> None:
    pick = random.Random(7)
    new = [NewPerson(row[None], None, {} if n % 11 == 0 else {KEYS[0]: VALUES[n % len(VALUES)]})
           for n, row in enumerate(faces(2 * len(VALUES), 3))]  # fmt: skip
    new += [
        NewPerson(row[None], None, {pick.choice(KEYS): pick.choice(VALUES) for _ in range(pick.randrange(3))})
        for row in faces(40, 8)
    ]
    store.add_persons(GALLERY, new, MODEL)
    oracle = twin(store)
    asked: list[dict[str, Any]] = []
    for operator in ("eq", "ne", "gt", "gte", "lt", "lte"):
        values = [value for value in VALUES if operator in ("eq", "ne") or not isinstance(value, bool)]
        asked += [{KEYS[0]: {operator: value}} for value in pick.sample(values, 12)]
    asked += [{pick.choice(KEYS): {"in": pick.sample(VALUES, pick.randrange(6))}} for _ in range(12)]
    asked += [{key: {"exists": truth}} for key in KEYS for truth in (True, False)]
    asked += [{key: pick.choice(VALUES), KEYS[0]: {"ne": pick.choice(VALUES)}} for key in KEYS[1:]]
    for filter in asked:
        where = Filter.parse(filter)
        truth = [one.id for one in oracle.persons(GALLERY, limit=10**6, where=where)]
        assert [one.id for one in store.persons(GALLERY, limit=10**6, where=where)] == truth, filter
        found = store.search(GALLERY, faces(1, 2), k=10**6, where=where)[0]
        assert sorted(match.person for match in found) == truth, filter


# --- all at once, and after all --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_random_operations_against_the_oracle(kit: Kit, seed: int) -> None:
    """Whatever is done in whatever order, the store holds and finds what the dicts do."""
    pick = random.Random(seed)
    store, oracle = kit.fresh(), MemoryStore()
    names = ["a", "b"]
    for _ in range(70):
        store = step(pick, kit, store, oracle, names)
    for name in [about.name for about in oracle.collections()]:
        assert [strip(one) for one in everyone(store, name)] == [strip(one) for one in everyone(oracle, name)]
        check_answers(pick, store, oracle, name)
    store = kit.again(store)
    assert [counts(one) for one in store.collections()] == [counts(one) for one in oracle.collections()]
    store.check()


def strip(one: Person) -> tuple[Any, ...]:
    return one.id, one.name, dict(one.metadata), one.faces


def counts(about: Any) -> tuple[Any, ...]:
    return about.name, about.dim, about.contract_id, about.persons, about.faces


def check_answers(pick: random.Random, store: Store, oracle: MemoryStore, name: str) -> None:
    seed, k = pick.randrange(10**6), pick.choice([1, 2, 5, 1000])
    where = pick.choice([None, Filter.parse({"n": {"lt": pick.randrange(10)}}), Filter.parse({"s": pick.choice("ab")})])
    agree(store, oracle, name, faces(3, seed), k=k, threshold=pick.choice([-1.0, 0.0, 0.3]), where=where)


def step(pick: random.Random, kit: Kit, store: Store, oracle: MemoryStore, names: list[str]) -> Store:
    """One random operation on both; returns the store, which may have been opened again."""
    known = {about.name for about in oracle.collections()}
    name = pick.choice(names)
    if name not in known:
        for one in (store, oracle):
            one.create_collection(name, DIM, MODEL)
        return store
    ids = [one.id for one in everyone(oracle, name)]
    person = pick.choice(ids) if ids else 0
    some = [("n", pick.randrange(10)), ("s", pick.choice("ab"))]
    metadata = {key: value for key, value in some if pick.random() < 0.7}
    seed = pick.randrange(10**6)
    action = pick.choices(["add", "faces", "update", "delete", "unface", "search", "compact", "again", "drop", "bad"],
                          [8, 5, 4, 4, 4, 8, 1, 1, 0.3, 1])[0]  # fmt: skip
    if action == "add":
        sizes = [pick.randrange(4) for _ in range(pick.randrange(1, 5))]
        new = [NewPerson(faces(size, seed + n), pick.choice(ODD_NAMES), metadata) for n, size in enumerate(sizes)]
        adopt(oracle, name, new, store.add_persons(name, new, MODEL))
    elif action == "faces" and ids:
        vectors = faces(pick.randrange(1, 4), seed)
        adopt_faces(oracle, name, person, vectors, store.add_faces(name, person, vectors, MODEL))
    elif action == "update" and ids:
        changed = {"name": pick.choice([None, "new"]), "metadata": pick.choice([None, metadata])}
        updated = store.update_person(name, person, **changed)
        assert strip(updated) == strip(oracle.update_person(name, person, **changed))
    elif action == "delete" and ids:
        store.delete_person(name, person)
        oracle.delete_person(name, person)
    elif action == "unface" and ids and oracle.person(name, person).faces:
        face = pick.choice(oracle.person(name, person).faces)
        store.delete_face(name, person, face)
        oracle.delete_face(name, person, face)
    elif action == "compact":
        store.compact(pick.choice([None, name]))
    elif action == "again":
        store = kit.again(store)
    elif action == "drop":
        store.delete_collection(name)
        oracle.delete_collection(name)
    elif action == "bad":
        with pytest.raises(UsageError):
            store.add_persons(name, [NewPerson(faces(2)), NewPerson([[0.0] * DIM])], MODEL)
    elif action == "search":
        check_answers(pick, store, oracle, name)
        assert counts(store.collection(name)) == counts(oracle.collection(name))
    return store


def adopt(oracle: MemoryStore, name: str, new: list[NewPerson], made: list[Person]) -> None:
    """Enrol in the oracle under the ids that the store has given."""
    rows = oracle._of(name)
    ids = [number for one in made for number in (one.id, *one.faces)]
    assert not {one.id for one in made} & rows.persons.keys()
    assert not {face for one in made for face in one.faces} & rows.vectors.keys()
    for one, given in zip(made, new, strict=True):
        rows.persons[one.id] = Person(one.id, given.name, dict(given.metadata), one.faces, one.created)
        rows.vectors |= dict(zip(one.faces, units(given.vectors), strict=True))
    rows.next_id = max([rows.next_id, *ids]) + 1


def adopt_faces(oracle: MemoryStore, name: str, person: int, vectors: Any, made: list[int]) -> None:
    rows = oracle._of(name)
    assert not set(made) & rows.vectors.keys()
    known = rows.persons[person]
    rows.persons[person] = Person(known.id, known.name, known.metadata, (*known.faces, *made), known.created)
    rows.vectors |= dict(zip(made, units(vectors), strict=True))


def test_several_threads_at_once(store: Store) -> None:
    """What a thread was told is done is found by it at once, whatever the others do; what it deleted is not."""
    keep = enrol(store, 20)
    stop = threading.Event()

    def work(number: int) -> list[int]:
        pick, mine, given = np.random.default_rng(number), dict[int, Any](), list[int]()
        for turn in range(5):
            vectors = pick.standard_normal((2, DIM))
            new = [NewPerson(row[None], None, {"by": number}) for row in vectors]
            one, two = store.add_persons(GALLERY, new, MODEL)
            given += [one.id, two.id]
            for person, vector in ((one, vectors[:1]), (two, vectors[1:])):
                best = store.search(GALLERY, vector, k=1, where=Filter.parse({"by": number}))[0][0]
                assert (best.person, best.face) == (person.id, person.faces[0])
                mine[person.id] = vector
            (face,) = store.add_faces(GALLERY, one.id, pick.standard_normal((1, DIM)), MODEL)
            assert store.person(GALLERY, one.id).faces == (*one.faces, face)
            store.update_person(GALLERY, two.id, metadata={"by": number, "turn": turn})
            store.delete_person(GALLERY, one.id)
            gone = store.search(GALLERY, mine.pop(one.id), k=10**6)[0]
            assert one.id not in {match.person for match in gone}
            assert mine.keys() <= {match.person for match in gone}
        return given

    def look() -> int:
        looked = 0
        while not stop.is_set():
            for matches, one in zip(store.search(GALLERY, faces(20), k=1), keep, strict=True):
                assert matches[0].score >= 1 - CLOSE
                assert matches[0].person == one.id
            looked += 1
        return looked

    with ThreadPoolExecutor(5) as pool:
        looker = pool.submit(look)
        given = [id for ids in pool.map(work, range(1, 5)) for id in ids]
        stop.set()
        assert looker.result() > 0
    assert len(set(given)) == len(given) == 40
    assert store.collection(GALLERY).persons == 20 + 20
    agree(store, twin(store), GALLERY, faces(5, 77))
    store.check()


def test_a_store_opened_again_is_the_same(kit: Kit, store: Store) -> None:
    store.create_collection("other", 3, "m2")
    store.add_persons("other", [NewPerson(faces(2, dim=3), "Ada", {"x": 1})], "m2")
    made = enrol(store, 30)
    store.delete_person(GALLERY, made[4].id)
    store.compact(GALLERY)
    store.add_faces(GALLERY, made[5].id, faces(3, 9), MODEL)
    store.delete_face(GALLERY, made[6].id, made[6].faces[0])
    store.update_person(GALLERY, made[7].id, name="Grace", metadata={"new": "☃"})
    before, answers = dump(store), store.search(GALLERY, faces(4, 2), k=40)
    store = kit.again(store)
    assert dump(store) == before
    agree(store, twin(store), GALLERY, faces(4, 2), k=40)
    for matches, former in zip(store.search(GALLERY, faces(4, 2), k=40), answers, strict=True):
        assert [match.score for match in matches] == pytest.approx([match.score for match in former], abs=CLOSE)


def test_collections_do_not_touch_one_another(store: Store) -> None:
    store.create_collection("other", DIM, MODEL)
    (here,) = enrol(store, 1)
    others = store.add_persons("other", [NewPerson(faces(1), "x", {"n": 0}) for _ in range(3)], MODEL)
    assert [match.person for match in store.search(GALLERY, faces(1))[0]] == [here.id]
    assert sorted(match.person for match in store.search("other", faces(1))[0]) == [one.id for one in others]
    store.delete_collection("other")
    assert [match.person for match in store.search(GALLERY, faces(1))[0]] == [here.id]
    store.create_collection("other", DIM, MODEL)
    assert store.search("other", faces(1)) == [[]]
    assert store.persons("other") == []


def test_upkeep(store: Store, tmp_path: Path) -> None:
    store.create_collection("empty", 3, MODEL)
    made = enrol(store, 12)
    for one in made[:4]:
        store.delete_person(GALLERY, one.id)
    statistics = store.statistics()
    assert statistics.keys() == {GALLERY, "empty"}
    assert {"rows", "delta", "tombstones", "recall"} <= statistics[GALLERY].keys()
    assert all(isinstance(value, int | float) for figures in statistics.values() for value in figures.values())
    before = dump(store)
    store.compact()
    figures = store.statistics()[GALLERY]
    assert (figures["rows"], figures["delta"], figures["tombstones"]) == (8, 0, 0)
    assert isinstance(store.check(), dict)
    target = tmp_path / "snapshot"
    store.snapshot(target)
    assert any(target.iterdir())
    with pytest.raises(ConflictError):
        store.snapshot(target)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConflictError):
        store.snapshot(tmp_path / "empty")
    assert dump(store) == before


def test_the_suite_covers_the_contract() -> None:
    """Every method of the contract is called here (close is, by the kits)."""
    source = Path(__file__).read_text(encoding="utf-8")
    methods = {name for name in vars(Store) if name[0] in string.ascii_lowercase}
    assert len(methods) == 19
    for name in methods - {"close"}:
        assert re.search(rf"store\.{name}\b", source), name
