"""What tokens ask for is done in turns of tokens: the many things of one do not keep another's single one waiting."""

import asyncio
import contextlib
import itertools
import json
import socket
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from support.clock import Clock
from support.live_service import DIM, Live, answer_of, live_service, vectors
from support.waiting import held_up, wait_until

from plsc.gallery.sqlite import store as sqlite_store
from plsc.gallery.sqlite.rows import SqliteRows
from plsc.gallery.values import NewPerson
from plsc.serve.access import current_caller
from plsc.serve.connections import Connection, ConnectionBudget
from plsc.serve.limits import Turns
from plsc.serve.settings import Limits

pytestmark = pytest.mark.live

PLACE = "/v1/collections/staff"
PERSON = {"faces": [{"vector": vectors(1)[0].tolist()}]}


@pytest.fixture
def guarded(tmp_path: Any) -> Iterator[Live]:
    """A service with the tokens of two cameras, and people in a collection."""
    callers = {name: {"role": "search", "allow": ["vectors"]} for name in ("camera", "other")}
    callers |= {name: {"role": "write", "allow": ["vectors"]} for name in ("writer", "editor")}
    callers["reader"] = {"role": "read"}
    with live_service(tmp_path, callers=callers) as live:
        live.service.store.create_collection("staff", DIM, "linear-model")
        people = [NewPerson(row[None], None, {"city": "Bern"}) for row in vectors(4)]
        live.service.store.add_persons("staff", people, "linear-model")
        assert live.ask("GET", PLACE, by="other").status_code == 200
        yield live


def send(live: Live, by: str, head: str, body: bytes = b"") -> socket.socket:
    """A connection on which a token has sent a request; the head's lines end in newlines."""
    connection = live.connect()
    full = f"{head}Host: x\nConnection: close\nAuthorization: Bearer {live.secrets[by]}\n\n"
    connection.sendall(full.replace("\n", "\r\n").encode() + body)
    return connection


def send_json(live: Live, by: str, path: str, value: Any) -> socket.socket:
    body = json.dumps(value).encode()
    head = f"POST {PLACE}/{path} HTTP/1.1\nContent-Type: application/json\nContent-Length: {len(body)}\n"
    return send(live, by, head, body)


def send_search(live: Live, by: str, conditions: Mapping[str, Any] = {"city": "Bern"}) -> socket.socket:
    return send_json(live, by, "search", {"query": {"vector": vectors(1)[0].tolist()}, "filter": conditions})


def statuses(connections: list[socket.socket]) -> set[bytes]:
    return {connection.makefile("rb").readline().split()[1] for connection in connections}


def is_answered(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return bool(connection.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return False
    finally:
        connection.settimeout(30)


BUSY = {"least_part": 0.05, "full_part": 0.0}  # next to no time to spare: who is ahead waits for what others take


@pytest.fixture
def busy(guarded: Live, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A busy machine, until it is undone."""
    for name, value in BUSY.items():
        monkeypatch.setitem(vars(guarded.server.settings.limits), name, value)
    return monkeypatch


def keep_at_work(live: Live, busy: pytest.MonkeyPatch) -> None:
    """Take nobody for idle from here on until that is undone, however long this process waits for a processor."""
    busy.setitem(vars(live.server.settings.limits), "idle_part", 0.0)


def test_a_body_in_crumbs_waits_for_the_others_who_are_at_work(guarded, busy):
    """Each chunk of a byte costs a hundred times as much as its bytes."""
    keep_at_work(guarded, busy)
    crumbs = b"1\r\n \r\n" * 5_000 + b"0\r\n\r\n"
    head = f"POST {PLACE}/search HTTP/1.1\nContent-Type: application/json\nTransfer-Encoding: chunked\n"
    with contextlib.ExitStack() as closing:
        dear = []
        for served in range(60):
            assert guarded.ask("GET", PLACE, by="other").status_code == 200
            if served in (10, 11):
                dear += [closing.enter_context(send(guarded, "camera", head, crumbs)) for _ in range(4)]
        assert not any(map(is_answered, dear))
        busy.undo()
        assert statuses(dear) == {b"400"}, "once the others are done"


def test_large_answers_that_nobody_reads_wait_for_their_turns(guarded, busy):
    """Those that began while their token was alone do not all go on when another comes: a step costs 1,000 s."""
    pay = Turns.charge
    busy.setattr(
        Turns, "charge", lambda self, owner, s, ran=None: pay(self, owner, 1_000.0 if owner == "reader" else s, ran)
    )
    store = guarded.service.store
    store.create_collection("large", DIM, "linear-model")
    metadata = {f"k{number}": "x" * 1_000 for number in range(60)}
    store.add_persons("large", [NewPerson(row[None], None, metadata) for row in vectors(118)], "linear-model")
    with contextlib.ExitStack() as closing:
        began, release = closing.enter_context(held_up(store, "persons"))
        head = "GET /v1/collections/large/persons?limit=200 HTTP/1.1\n"
        unread = [closing.enter_context(send(guarded, "reader", head)) for _ in range(11)]
        for _ in range(Limits.store_share):
            assert began.acquire(timeout=120)
        keep_at_work(guarded, busy)
        for served in range(80):
            assert guarded.ask("GET", PLACE, by="other").status_code == 200
            if served == 10:  # now they are two, and the reader pays for the first time
                unread.append(closing.enter_context(send(guarded, "reader", head)))
            if served == 40:
                release.set()
        assert not any(map(is_answered, unread))
        busy.undo()
        for connection in unread:
            answer = answer_of(connection)
            assert (answer.split()[1], len(answer) > 7_000_000) == (b"200", True), "once the other is done"


def test_a_filter_waits_for_its_turn_between_its_conditions(guarded, busy):
    """Each look at a condition costs ten seconds, by a clock that says so."""
    keep_at_work(guarded, busy)
    looked, ticks = [], itertools.count(step=10.0)
    narrow = SqliteRows._matching_persons
    busy.setattr(sqlite_store, "_LOOKED_UP_AT_ONCE", 1)
    busy.setattr(guarded.service._filterers, "_cost", lambda: next(ticks))
    busy.setattr(SqliteRows, "_matching_persons", lambda *args: looked.append(args[-1].key) or narrow(*args))
    conditions = {"city": "Bern", **{f"k{number}": {"exists": False} for number in range(5)}}
    with contextlib.ExitStack() as closing:
        closing.enter_context(send(guarded, "camera", f"GET {PLACE} HTTP/1.1\n"))  # from here on they are two
        for served in range(100):
            assert guarded.ask("GET", PLACE, by="other").status_code == 200
            if served == 30:
                dear = closing.enter_context(send_search(guarded, "camera", conditions))
        assert looked == ["city"]
        busy.undo()
        assert statuses([dear]) == {b"200"}, "once the other is done"


def test_a_filter_finds_a_thread_that_another_token_does_not_have(guarded):
    with contextlib.ExitStack() as closing:
        began, release = closing.enter_context(held_up(guarded.service.store, "prepare_filter"))
        many = [closing.enter_context(send_search(guarded, "camera")) for _ in range(2 * Limits.filtered)]
        for _ in range(Limits.filter_share):
            assert began.acquire(timeout=120)
        many.append(closing.enter_context(send_search(guarded, "other")))
        assert began.acquire(timeout=120), "that of the other, before those of the camera that wait"
        release.set()
        assert statuses(many) == {b"200"}


def test_the_store_s_threads_are_not_one_token_s(guarded):
    with contextlib.ExitStack() as closing:
        began, release = closing.enter_context(held_up(guarded.service.store, "collection"))
        many = [
            closing.enter_context(send(guarded, "camera", f"GET {PLACE} HTTP/1.1\n"))
            for _ in range(2 * Limits.store_threads)
        ]
        for _ in range(Limits.store_share):
            assert began.acquire(timeout=120)
        many.append(closing.enter_context(send(guarded, "other", f"GET {PLACE} HTTP/1.1\n")))
        assert began.acquire(timeout=120)
        release.set()
        assert statuses(many) == {b"200"}


def test_a_change_passes_those_of_another_token_that_wait(guarded, monkeypatch):
    """The store makes one at a time, and syncs the disk for each."""
    quotas, begun, release = guarded.service.quotas, [], threading.Event()
    add = quotas.add

    def begin(*args: Any, **options: Any) -> Any:
        begun.append(current_caller().name)
        assert release.wait(120)
        return add(*args, **options)

    monkeypatch.setattr(quotas, "add", begin)
    with contextlib.ExitStack() as closing:
        closing.callback(release.set)
        many = [closing.enter_context(send_json(guarded, "writer", "persons", PERSON)) for _ in range(8)]
        wait_until(lambda: begun)
        many.append(closing.enter_context(send_json(guarded, "editor", "persons", PERSON)))
        wait_until(lambda: "editor" in begun)
        assert begun == ["writer", "editor"]
        release.set()
        assert statuses(many) == {b"201"}


class Taken:
    """Turns by a clock that tests move, and what was answered, by token; they tick when they are told to."""

    def __init__(self, ran: float = 1.0, **changes: float) -> None:
        """In ``ran`` of the time of its steps the loop's thread has a processor."""
        self.clock, worked = Clock(), Clock(0.0)
        limits = Limits(**{"tick_seconds": 1e9, **changes})  # type: ignore[arg-type]
        self.turns, self._worked, self._ran = Turns(limits, self.clock, worked), worked, ran
        self._connection = Connection(ConnectionBudget(limits, 1.0, self.clock), lambda: None, lambda: None)
        self.order: list[str] = []

    async def work(self, seconds: float) -> None:
        self.clock.now += seconds
        self._worked.now += self._ran * seconds

    async def answer(self, name: str, seconds: float = 0.0) -> None:
        await self.work(seconds)
        self.order.append(name)

    def ask(self, name: str, seconds: float = 0.0) -> "asyncio.Task[None]":
        return asyncio.create_task(self.turns.take(name, lambda: self.answer(name, seconds), self._connection))

    async def tick(self, seconds: float = 0.005) -> None:
        self.clock.now += seconds
        self.turns.tick()
        for _ in range(4):  # steps of those who go on
            await asyncio.sleep(0)


def test_who_has_taken_more_waits_while_others_are_at_work():
    async def run() -> None:
        taken = Taken(**BUSY)
        turns = taken.turns
        turns.charge("camera", 10.0)
        assert not turns.must_wait("camera"), "it is alone"
        turns.charge("other", 0.001)
        assert not turns.must_wait("camera"), "it took what it liked while it was alone"
        turns.charge("camera", 10.0)
        assert turns.must_wait("camera")
        assert not turns.must_wait("other")
        waiting = [taken.ask("camera") for _ in range(3)]
        for _ in range(100):
            taken.ask("other", 0.0005)
            await taken.tick()
        assert taken.order == ["other"] * 100
        while "camera" not in taken.order:  # until the other counts as idle
            await taken.tick()
        await asyncio.gather(*waiting)
        assert taken.order[100:] == ["camera"] * 3

    asyncio.run(run())


def test_a_token_that_does_next_to_nothing_holds_nobody_up():
    """Else one could keep another from what nobody wants."""

    async def run() -> None:
        taken = Taken(ran=0.5)  # with nothing to spare
        taken.turns.charge("camera", 0.0001)
        taken.turns.charge("other", 0.005)
        begun = taken.clock.now
        for _ in range(2000):
            taken.turns.charge("camera", 0.00001)
            taken.turns.charge_beside("other", 0.005)
            answered = taken.ask("other", 0.0001)
            while not answered.done():
                await taken.tick(0.001)
        assert 5 < taken.clock.now - begun < 20, "it waited for its turns, and had them"

    asyncio.run(run())


def test_nothing_is_to_spare_where_the_loop_waits_for_a_processor():
    """Processors that other programs keep busy are not this service's to give away."""

    async def share(ran: float) -> float:
        """Seconds that a token takes which never has enough, beside eight others."""
        taken, seconds = Taken(ran), 0.0
        stop = taken.clock.now + 20
        while taken.clock.now < stop:
            await asyncio.gather(*[taken.ask(f"door{door}", 0.0005) for door in range(8)])
            if not taken.turns.must_wait("camera"):
                taken.turns.charge_beside("camera", 0.01)
                seconds += 0.01
            await taken.tick(0.004)
        return seconds

    freely, crowded = (asyncio.run(share(ran)) for ran in (1.0, 0.5))
    assert 0 < crowded < freely / 2


def test_the_crowded_token_is_told(guarded):
    """A device's queue that one token fills is full for that token alone."""
    worker: Any = guarded.service.worker
    queries = {"queries": [{"vector": row.tolist()} for row in vectors(256)]}
    wait_until(lambda: worker.waiting("search") == 0)
    with contextlib.ExitStack() as closing:
        began, release = closing.enter_context(held_up(guarded.service.store, "search"))
        many = [closing.enter_context(send_json(guarded, "camera", "search", queries)) for _ in range(18)]
        assert began.acquire(timeout=120)
        wait_until(lambda: sum(map(is_answered, many)) >= 4)
        release.set()
        assert statuses([closing.enter_context(send_json(guarded, "other", "search", queries))]) == {b"200"}
        assert statuses(many) == {b"200", b"429"}
