"""Milvus alone: changes without transactions, cut short at every request; the writer lease; lost servers."""

import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.stores import Servers, milvus_server, open_patiently
from support.waiting import free_port, wait_until

from plsc.errors import NotFoundError, PreconditionError, StorageError, UsageError
from plsc.gallery.filters import Filter
from plsc.gallery.milvus.expressions import encode_metadata, to_expression
from plsc.gallery.milvus.registry import GRACE
from plsc.gallery.milvus.requests import ANSWERS, REGISTRY
from plsc.gallery.milvus.store import MilvusStore, open_milvus
from plsc.gallery.values import IdempotentRequest, NewPerson, Precondition

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

LONG = "PLSC_TEST_LONG" in os.environ  # every failure at every request, instead of one at each
FAILURES = [
    (StorageError, True, False),
    (StorageError, False, True),
    (KeyboardInterrupt, False, False),
    (KeyboardInterrupt, False, True),
]
CHANGES = ("create", "drop", "write", "delete")
NEW, NEW_DIM = "n", 3  # the model to which collections move


class StillClock:
    """Stands still but where a test sets it forward, so that two stores that do the same hold the same."""

    seconds = 1_800_000_000.0

    def time(self) -> float:
        return self.seconds

    monotonic = time


@pytest.fixture
def uri(servers: Servers) -> str:
    """The URI of an empty store."""
    return servers.address("milvus")


def vectors(count: int, seed: int = 0, dim: int = 4) -> Any:
    return np.random.default_rng(seed).standard_normal((count, dim)).astype(np.float32)


def opened(uri: str, clock: StillClock | None = None) -> MilvusStore:
    store = open_patiently(open_milvus, uri)
    store.clock = clock or StillClock()
    return store


def filled(uri: str, clock: StillClock | None = None) -> MilvusStore:
    store = opened(uri, clock)
    store.create_collection("people", 4, "m")
    new = [NewPerson(vectors(2, n), f"p{n}", {"n": n}, external_id=f"x{n}") for n in range(4)]
    store.add_persons("people", new, "m")
    store.create_collection("moving", 4, "m")
    store.add_persons("moving", [NewPerson(vectors(1, n), f"m{n}", {"n": n}) for n in range(2)], "m")
    store.begin_migration("moving", NEW_DIM, NEW)
    for person in store.persons("moving"):
        store.put_second_vectors("moving", {person.id: {person.faces[0]: vectors(1, person.id, NEW_DIM)[0]}}, NEW)
    return store


def seen(store: MilvusStore) -> dict[str, Any]:
    """Everything that a reader can find out, by every method."""
    found: dict[str, Any] = {}
    for about in store.collections():
        persons = store.persons(about.name, limit=1000)
        assert about.persons == len(persons)
        assert about.faces == sum(len(person.faces) for person in persons)
        query = [[1, 2, 3, 4][: about.dim]]
        (matches,) = store.search(about.name, query, k=1000)
        assert {match.person for match in matches} == {person.id for person in persons if person.faces}
        by_n = [
            sorted(match.person for match in store.search(about.name, query, filter=where)[0])
            for where in (Filter.parse({"n": n}) for n in (0, 1, 2, 77))
        ]
        stored = [store.vectors(about.name, person.id).round(4).tolist() for person in persons]
        migration = store.migration(about.name)
        second = migration and [
            {face: each.second and each.second.vector.round(4).tolist() for face, each in own.items()}
            for own in (store.face_vectors(about.name, person.id) for person in persons)
        ]
        assert migration is None or store.count_second(about.name)[0] == sum(
            each is None for own in second or () for each in own.values()
        )
        found[about.name] = (about, persons, stored, by_n, migration, second)
    found["answer"] = store.stored_answer("t", "k")
    return found


ANSWERED = IdempotentRequest("t", "k", b"print", lambda result: (201, b"x" * 100_000))
OPERATIONS: dict[str, Callable[[MilvusStore], Any]] = {
    "add_persons": lambda store: store.add_persons("people", [NewPerson(vectors(2, 9), "new", {"n": 1})] * 2, "m"),
    "answered": lambda store: store.add_persons("people", [NewPerson(vectors(2, 9))], "m", idempotent=ANSWERED),
    "answered_create": lambda store: store.create_collection("second", 4, "m", idempotent=ANSWERED),
    "add_faces": lambda store: store.add_faces("people", 1, vectors(2, 8), "m", keys=["a", "b"]),
    "put": lambda store: store.put_person("people", NewPerson(vectors(3, 7), "q", {"n": 77}, external_id="x1"), "m"),
    "update": lambda store: store.update_person("people", 1, name="changed", metadata={"n": 77}),
    "delete_person": lambda store: store.delete_person("people", 1),
    "delete_face": lambda store: store.delete_face("people", 1, 2),
    "delete_collection": lambda store: store.delete_collection("people"),
    "create": lambda store: store.create_collection("second", 4, "m"),
    "compact": lambda store: store.compact("people"),
    "begin": lambda store: store.begin_migration("people", NEW_DIM, NEW),
    "exchange": lambda store: store.exchange_spaces("moving", NEW),
    "end": lambda store: store.end_migration("moving", NEW),
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


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_change_cut_short_is_done_or_not_done(servers: Servers, operation: str) -> None:
    """Whatever request of a change is its last, the store holds the former state or the new one, for all readers."""
    clock = StillClock()
    whole = filled(servers.address("milvus"), clock)
    before = str(seen(whole))
    OPERATIONS[operation](whole)
    done = str(seen(whole))
    assert operation == "compact" or done != before
    whole.close()
    for number in range(1, 30):
        first = (number + list(OPERATIONS).index(operation)) % len(FAILURES)
        reached = 0
        for error, once, after in FAILURES if LONG else FAILURES[first : first + 1]:
            uri = servers.address("milvus")
            store = filled(uri, clock)
            assert str(seen(store)) == before
            requests = fail_at(store, number, error, after=after, once=once)
            try:
                OPERATIONS[operation](store)
                acknowledged = True
            except (StorageError, KeyboardInterrupt):
                acknowledged = False
            reached = max(reached, requests())
            again = opened(uri, clock)
            now = str(seen(again))
            assert now == done if acknowledged else now in (before, done), "to a reader"
            again.create_collection("other", 4, "m")
            again.add_persons("other", [NewPerson(vectors(1, 5), "later")], "m")
            clock.seconds += GRACE.total_seconds() + 1
            for info in again.collections():
                again.compact(info.name)
            clock.seconds -= GRACE.total_seconds() + 1
            again.delete_collection("other")
            assert str(seen(again)) == now
            again.check()
            stored = {name for name in again._server.names() if name not in (REGISTRY, ANSWERS)}
            assert stored == {name for entry in again._registry.entries().values() for name in entry.names}
            again.close()
            store.close()
        if reached < number:
            break
    assert 2 < number < 29
    assert reached == number - 1


def test_who_writes_last_holds_the_writer_lease(uri: str) -> None:
    first = filled(uri)
    second = opened(uri)
    assert seen(second) == seen(first)
    second.add_faces("people", 1, vectors(1, 7), "m")
    for change in OPERATIONS.values():
        with pytest.raises(StorageError, match="another process writes to this Milvus store now"):
            change(first)
    assert len(first.person("people", 1).faces) == 3, "reading goes on, and sees what the other wrote"
    assert seen(second) == seen(first)
    third = opened(uri)
    assert third.add_faces("people", 1, vectors(1, 6), "m")[0] > second.person("people", 1).faces[2]
    for store in (first, second, third):
        store.close()


@pytest.mark.parametrize("number", range(1, 6))
def test_a_change_that_is_overtaken_counts_for_nobody_or_for_all(uri: str, number: int) -> None:
    """Another process takes the lease between two requests of a change, and writes what that change would have."""
    first, second = filled(uri), opened(uri)
    count = 0
    write, query = first._server.write, first._server.query

    def overtaken(request: Callable[..., Any]) -> Callable[..., Any]:
        def tried(*args: Any) -> Any:
            nonlocal count
            count += 1
            if count == number:
                second.put_person("people", NewPerson(vectors(1, 3), "late", external_id="new"), "m")
            return request(*args)

        return tried

    first._registry.hold(first.clock)
    first._server.write, first._server.query = overtaken(write), overtaken(query)  # type: ignore[method-assign]
    with suppress(StorageError):
        first.put_person("people", NewPerson(vectors(2, 9), "early", external_id="new"), "m")
        assert count < number, "a change is not acknowledged that may be lost"
        second.put_person("people", NewPerson(vectors(1, 3), "late", external_id="new"), "m")
    one = second.find_person("people", "new")
    assert (one.name, len(one.faces)) == ("late", 1)
    assert sorted(person.name or "" for person in second.persons("people")) == ["late", "p0", "p1", "p2", "p3"]
    assert second.check()["faces"] == 8 + 1 + 2
    first.close()
    assert second.find_person("people", "new") == one
    second.close()


def test_a_reader_sees_one_moment_while_others_change_it(uri: str) -> None:
    clock = StillClock()
    writer, reader = filled(uri, clock), opened(uri, clock)
    with reader._reading("people") as rows:
        before = [(one, vector.tobytes()) for one, vector in rows.everyone()]
        writer.delete_person("people", 4)
        writer.update_person("people", 1, metadata={"n": 5})
        writer.put_person("people", NewPerson(vectors(1, 1), external_id="x2"), "m")
        assert [(one, vector.tobytes()) for one, vector in rows.everyone()] == before
    assert len(reader.persons("people")) == 3
    clock.seconds += GRACE.total_seconds() + 1
    writer.update_person("people", 1, name="purges")
    (entry,) = writer._registry.entries(["people"]).values()
    assert writer._server.count(entry.persons, "row >= 0") == 4, "what was gone, and the row before this"
    assert writer._server.count(entry.faces(0), "row >= 0") == 5
    for store in (writer, reader):
        store.close()


def test_only_the_writer_tidies_up_while_it_lives(uri: str) -> None:
    clock = StillClock()
    writer, reader = filled(uri, clock), opened(uri, clock)
    writer.add_persons("people", [NewPerson(vectors(1), expires="2000-01-01")], "m")
    writer.store_answer(ANSWERED, None)
    assert reader.expired(9) == {}
    assert reader.forget_answers("9", 0) == 0
    assert len(writer.expired(9)["people"]) == 1
    clock.seconds += 301
    assert len(reader.expired(9)["people"]) == 1, "the writer is dead"
    assert reader.forget_answers("9", 0) == 1
    assert writer.expired(9) == {}, "the other one is the writer now"
    with pytest.raises(StorageError, match="another process writes"):
        writer.delete_expired("people", [1])
    reader.close()
    assert len(writer.expired(9)["people"]) == 1, "nobody is"
    assert writer.delete_expired("people", [13]) == [13]
    assert not any(writer.expired(9).values())
    writer.close()


def test_many_changes_within_a_minute(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is gone is named by the entry, which holds so much: then it is deleted sooner."""
    monkeypatch.setattr("plsc.gallery.milvus.rows._GONE_AT_ONCE", 10)
    store = filled(uri)
    for number in range(30):
        store.update_person("people", 1 + 3 * (number % 4), metadata={"n": number})
    (entry,) = store._registry.entries(["people"]).values()
    assert sum(len(one.rows) for one in entry.gone) <= 10
    assert [one.metadata["n"] for one in store.persons("people")] == [28, 29, 26, 27]
    assert store.check()["faces"] == 8 + 2
    store.close()


def test_one_external_id_and_one_revision_among_processes(uri: str) -> None:
    first = filled(uri)
    seen_by_first = first.find_person("people", "x1")
    second = opened(uri)
    second.update_person("people", seen_by_first.id, name="other")
    first.close()
    third = opened(uri)
    condition = Precondition(revisions=frozenset({(seen_by_first.id, seen_by_first.revision)}))
    with pytest.raises(PreconditionError):
        third.update_person("people", seen_by_first.id, name="lost", precondition=condition)
    assert third.put_person("people", NewPerson(vectors(1), external_id="x1"), "m")[1] is False
    for store in (second, third):
        store.close()


def test_a_collection_is_not_the_registry(uri: str) -> None:
    store = filled(uri)
    for name in ("0", "plsc_registry", 'x"] or name != "', "people\n", None, 1):
        with pytest.raises(NotFoundError):
            store.collection(name)  # type: ignore[arg-type]
    assert [about.name for about in store.collections()] == ["moving", "people"]
    store.close()


def test_no_room_for_large_metadata_or_too_many_faces_at_once(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled(uri)
    before = seen(store)
    large = {f"k{n}": "é" * 1024 for n in range(40)}
    with pytest.raises(UsageError, match="65535 bytes that Milvus keeps"):
        store.add_persons("people", [NewPerson(vectors(1)), NewPerson(vectors(1), None, large)], "m")
    with pytest.raises(UsageError, match="65535 bytes"):
        store.update_person("people", 1, metadata=large)
    assert seen(store) == before
    monkeypatch.setattr("plsc.gallery.milvus.registry.MAX_TEXT", 250)
    persons = store.persons("people")
    for person in persons[:2]:
        with suppress(UsageError):
            store.delete_face("people", person.id, person.faces[0])
    with pytest.raises(UsageError, match="touches more faces than Milvus can note at once; make it in several"):
        store.update_person("people", persons[3].id, metadata={"n": 1})
    monkeypatch.undo()
    store.check()
    assert store.person("people", persons[3].id) == persons[3]
    store.close()


def test_more_rows_than_one_request_takes(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plsc.gallery.milvus.requests._BATCH_BYTES", 2000)
    monkeypatch.setattr("plsc.gallery.milvus.requests.MAX_ROWS", 40)
    monkeypatch.setattr("plsc.gallery.milvus.rows.MAX_ROWS", 40)
    monkeypatch.setattr("plsc.gallery.milvus.rows._PAGE_PERSONS", 16)
    monkeypatch.setattr("plsc.gallery.rows._PAGE_PERSONS", 16)
    store = filled(uri)
    store.delete_collection("moving")
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
    store.begin_migration("people", NEW_DIM, NEW)
    assert [one.id for one, _ in store.lacking("people", limit=10**6)] == [1, 4, 7, 10, *(one.id for one in made)]
    assert store.count_second("people") == (278, 0)
    assert store.check() == {"collections": 1, "persons": 125, "faces": 8 + 150 + 120}
    store.close()


def test_no_text_of_a_user_is_in_an_expression(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    evil = '"] or row > 0 or fits["'
    where = Filter.parse({evil: {"eq": evil, "in": [evil], "gt": evil, "exists": True}})
    assert set(to_expression(where)) <= set('() []"=<>abcdefghijklmnopqrstuvwxyz0123456789')
    assert evil not in str(encode_metadata({evil: evil}))
    store = filled(uri)
    asked = list[str]()
    query = store._server.query

    def noted(name: str, filter: str, fields: Any) -> Any:
        asked.append(filter)
        return query(name, filter, fields)

    monkeypatch.setattr(store._server, "query", noted)
    store.put_person("people", NewPerson(vectors(1), evil, {evil: evil}, external_id=evil), "m")
    assert store.find_person("people", evil).name == evil
    assert store.stored_answer(evil, evil) is None
    assert asked
    assert not any(evil in expression for expression in asked)
    store.close()


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
def test_a_server_that_is_killed_keeps_what_was_acknowledged(tmp_path: Path) -> None:
    pytest.importorskip("milvus_lite")
    acknowledged, folder, port = list[str](), tmp_path / "data", free_port()

    def enrol(store: MilvusStore) -> None:
        with suppress(StorageError):
            for number in range(10_000):
                new = NewPerson(vectors(2, number), external_id=f"id{number % 7}", metadata={"number": number})
                store.put_person("people", new, "m")
                acknowledged.append(f"id{number % 7}={number}")

    with milvus_server(folder, port, kills=True) as uri:
        store = opened(uri)
        store._server.timeout = 5
        store.create_collection("people", 4, "m")
        writer = threading.Thread(target=enrol, args=[store])
        writer.start()
        wait_until(lambda: len(acknowledged) >= 30)
    writer.join()
    with milvus_server(folder, port) as uri:
        again = opened(uri)
        found = {one.external_id: one.metadata["number"] for one in again.persons("people")}
        expected: dict[str | None, int] = {}
        for line in acknowledged:
            id, _, number = line.partition("=")
            expected[id] = int(number)
        last = f"id{len(acknowledged) % 7}"  # the change in flight was made or not
        assert found in (expected, {**expected, last: len(acknowledged)})
        assert again.put_person("people", NewPerson(vectors(1), external_id=last), "m")[1] is (last not in found)
        again.check()
        assert sum(len(one.faces) for one in again.persons("people")) == 2 * (len(found) - (last in found)) + 1
        again.close()
    store.close()


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
