"""Milvus alone: changes without transactions, cut short at every request; one writer; lost servers."""

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.stores import Servers, milvus_server, open_patiently
from support.waiting import wait_until

from plsc.errors import NotFoundError, StorageError, UsageError
from plsc.gallery.filters import Filter
from plsc.gallery.milvus import MilvusStore, open_milvus
from plsc.gallery.milvus_client import encode_metadata, to_expression
from plsc.gallery.values import NewPerson

pytestmark = pytest.mark.slow

LONG = "PLSC_TEST_LONG" in os.environ  # every failure at every request, instead of one at each
FAILURES = [
    (StorageError, True, False),
    (StorageError, False, True),
    (KeyboardInterrupt, False, False),
    (KeyboardInterrupt, False, True),
]
CHANGES = ("create", "drop", "register", "unregister", "write", "delete")


@pytest.fixture
def uri(servers: Servers) -> str:
    """The URI of an empty store."""
    return servers.address("milvus")


def vectors(count: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal((count, 4)).astype(np.float32)


def filled(uri: str) -> MilvusStore:
    store = open_patiently(open_milvus, uri)
    store.create_collection("people", 4, "m")
    new = [NewPerson(vectors(2, n), f"p{n}", {"n": n}) for n in range(4)]
    store.add_persons("people", new, "m")
    return store


def seen(store: MilvusStore) -> dict[str, Any]:
    """Everything that a reader can find out, by every method."""
    found: dict[str, Any] = {}
    for about in store.collections():
        persons = store.persons(about.name, limit=1000)
        assert about.persons == len(persons)
        assert about.faces == sum(len(person.faces) for person in persons)
        (matches,) = store.search(about.name, [[1, 2, 3, 4]], k=1000)
        assert {match.person for match in matches} == {person.id for person in persons if person.faces}
        by_n = [
            [match.person for match in store.search(about.name, [[1, 2, 3, 4]], filter=where)[0]]
            for where in (Filter.parse({"n": n}) for n in (0, 1, 2, 77))
        ]
        stored = [store.vectors(about.name, person.id).round(4).tolist() for person in persons]
        found[about.name] = (persons, stored, [sorted(ids) for ids in by_n])
    return found


OPERATIONS: dict[str, Callable[[MilvusStore], Any]] = {
    "add_persons": lambda store: store.add_persons("people", [NewPerson(vectors(2, 9), "new", {"n": 1})] * 2, "m"),
    "add_faces": lambda store: store.add_faces("people", 1, vectors(2, 8), "m"),
    "update": lambda store: store.update_person("people", 1, name="changed", metadata={"n": 77}),
    "delete_person": lambda store: store.delete_person("people", 1),
    "delete_face": lambda store: store.delete_face("people", 1, 2),
    "delete_collection": lambda store: store.delete_collection("people"),
    "create": lambda store: store.create_collection("second", 4, "m"),
}


def fail_at(
    store: MilvusStore, number: int, error: type[BaseException], *, after: bool, once: bool
) -> Callable[[], int]:
    """Let the ``number``-th changing request fail, before or after it was done; and all that follow unless ``once``.

    Returns what tells how many such requests there have been.
    """
    count = 0

    def failing(request: Callable[..., Any]) -> Callable[..., Any]:
        def tried(*args: Any, **more: Any) -> Any:
            nonlocal count
            count += 1
            if count < number or (once and count > number):
                return request(*args, **more)
            if after and count == number:
                request(*args, **more)
            raise error("the server is gone")

        return tried

    for name in CHANGES:
        setattr(store._server, name, failing(getattr(store._server, name)))
    return lambda: count


@pytest.mark.exhaustive
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_change_cut_short_is_done_or_not_done(servers: Servers, operation: str) -> None:
    """Whatever request of a change is its last, the store holds the former state or the new one, for all readers."""
    reached = 0
    for number in range(1, 9):
        first = (number + list(OPERATIONS).index(operation)) % len(FAILURES)
        for error, once, after in FAILURES if LONG else FAILURES[first : first + 1]:
            uri = servers.address("milvus")
            store = filled(uri)
            store._acquire_writer_lease()
            before = seen(store)
            requests = fail_at(store, number, error, after=after, once=once)
            try:
                OPERATIONS[operation](store)
                acknowledged = True
            except (StorageError, KeyboardInterrupt):
                acknowledged = False
            reached = max(reached, min(requests(), number))
            again = open_patiently(open_milvus, uri)
            check_either(seen(again), before, operation, acknowledged)
            (made,) = again.add_persons(name_of(again), [NewPerson(vectors(1, 5), "later")], "m")
            again.delete_person(name_of(again), made.id)
            check_either(seen(again), before, operation, acknowledged)
            again.check()
            assert again._server.keys() == {rows.entry.key for rows in again._all()}, "nothing is left behind"
            again.close()
            store.close()
        if reached < number:
            break
    assert reached >= 2


def name_of(store: MilvusStore) -> str:
    names = [about.name for about in store.collections()]
    if not names:
        store.create_collection("other", 4, "m")
    return (names or ["other"])[0]


def check_either(now: dict[str, Any], before: dict[str, Any], operation: str, acknowledged: bool) -> None:
    now.pop("other", None)
    if not acknowledged and now == before:
        return
    persons = now["people"][0] if "people" in now else []
    done = {
        "add_persons": lambda: [one.name for one in persons[4:]] == ["new", "new"] and len(now["people"][2][1]) == 3,
        "add_faces": lambda: len(persons[0].faces) == 4,
        "update": lambda: persons[0].name == "changed" and now["people"][2] == [[], [4], [7], [1]],
        "delete_person": lambda: [one.id for one in persons] == [4, 7, 10] and now["people"][2][0] == [],
        "delete_face": lambda: persons[0].faces == (3,),
        "delete_collection": lambda: now == {},
        "create": lambda: now == {**before, "second": ([], [], [[], [], [], []])},
    }
    assert done[operation](), now


def test_who_writes_last_holds_the_writer_lease(uri: str) -> None:
    first = filled(uri)
    second = open_patiently(open_milvus, uri)
    assert seen(second) == seen(first)
    second.add_faces("people", 1, vectors(1, 7), "m")
    for change in OPERATIONS.values():
        with pytest.raises(StorageError, match="another process writes to this Milvus store now"):
            change(first)
    assert len(first.person("people", 1).faces) == 3, "reading goes on, and sees what the other wrote"
    assert seen(second) == seen(first)
    third = open_patiently(open_milvus, uri)
    assert third.add_faces("people", 1, vectors(1, 6), "m")[0] > second.person("people", 1).faces[2]
    for store in (first, second, third):
        store.close()


def test_a_collection_is_not_the_registry(uri: str) -> None:
    store = filled(uri)
    for name in ("0", "plsc_registry", 'x"] or name != "', "people\n", None, 1):
        with pytest.raises(NotFoundError):
            store.collection(name)  # type: ignore[arg-type]
    assert [about.name for about in store.collections()] == ["people"]
    store.close()


def test_no_room_for_large_metadata(uri: str) -> None:
    store = filled(uri)
    before = seen(store)
    large = {f"k{n}": "é" * 1024 for n in range(40)}
    with pytest.raises(UsageError, match="65535 bytes that Milvus keeps"):
        store.add_persons("people", [NewPerson(vectors(1)), NewPerson(vectors(1), None, large)], "m")
    with pytest.raises(UsageError, match="65535 bytes"):
        store.update_person("people", 1, metadata=large)
    assert seen(store) == before
    store.close()


def test_more_rows_than_one_request_takes(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plsc.gallery.milvus_client._BATCH_BYTES", 2000)
    monkeypatch.setattr("plsc.gallery.milvus_client.MAX_ROWS", 40)
    monkeypatch.setattr("plsc.gallery.milvus_rows.MAX_ROWS", 40)
    monkeypatch.setattr("plsc.gallery.milvus_rows._PAGE_PERSONS", 16)
    monkeypatch.setattr("plsc.gallery.rows._PAGE_PERSONS", 16)
    store = filled(uri)
    crowd = np.array([1, 0, 0, 0]) + 0.01 * vectors(150, 1)
    new = [NewPerson(crowd), *(NewPerson(vectors(1, n), None, {"n": 77}) for n in range(120))]
    made = store.add_persons("people", new, "m")
    (matches,) = store.search("people", [[1, 0, 0, 0]], k=10**6)
    assert {match.person for match in matches} >= {one.id for one in made}
    assert len(matches) == 125
    assert len(store.persons("people", limit=10**6)) == 125
    assert len(store.person_summaries("people", range(10**3))) == 125
    np.testing.assert_allclose(
        store.vectors("people", made[0].id), crowd / np.linalg.norm(crowd, axis=1)[:, None], atol=1e-6
    )
    store.update_person("people", made[0].id, metadata={"n": 77})
    assert len(store.search("people", [[1, 0, 0, 0]], k=10**6, filter=Filter.parse({"n": 77}))[0]) == 121
    assert store.check() == {"collections": 1, "persons": 125, "faces": 8 + 150 + 120}
    store.close()


def test_no_text_of_a_user_is_in_an_expression() -> None:
    evil = '"] or id > 0 or fits["'
    where = Filter.parse({evil: {"eq": evil, "in": [evil], "gt": evil, "exists": True}})
    assert set(to_expression(where)) <= set('() []"=<>abcdefghijklmnopqrstuvwxyz0123456789')
    assert evil not in str(encode_metadata({evil: evil}))


@pytest.mark.live
def test_servers_that_are_not_there(tmp_path: Path) -> None:
    for uri in ("", "people.db", "ftp://x", "http://", "19530"):
        with pytest.raises(UsageError, match="no address of a Milvus server"):
            open_milvus(uri)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(StorageError, match="the Milvus store failed"):
            open_milvus(f"http://127.0.0.1:{unused.getsockname()[1]}", timeout=0.5)


@pytest.mark.live
def test_a_server_that_goes_away_and_comes_back(tmp_path: Path) -> None:
    pytest.importorskip("milvus_lite")
    with milvus_server(tmp_path / "data") as uri:
        store = filled(uri)
        before = seen(store)
    port = int(uri.rpartition(":")[2])
    store._server.timeout = 0.3  # instead of half a minute
    for change in (OPERATIONS["add_faces"], lambda store: store.search("people", vectors(1))):
        with pytest.raises(StorageError, match="the Milvus store failed"):
            change(store)
    store._server.timeout = 10

    def is_found_again() -> bool:
        with suppress(StorageError):
            assert seen(store) == before
            return True
        return False

    with milvus_server(tmp_path / "data", port):
        wait_until(is_found_again)  # the connection is tried again from time to time
        OPERATIONS["add_faces"](store)
        assert len(store.person("people", 1).faces) == 4
        store.close()
