"""What tokens ask for is done in turns of tokens: the many things of one do not keep another's single one waiting."""

import asyncio
import contextlib
import itertools
import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from support.live_service import DIM, Live, answer_of, live_service, vectors
from support.waiting import held_up, wait_until

from plsc.gallery.sqlite import store as sqlite_store
from plsc.gallery.sqlite.rows import SqliteRows
from plsc.gallery.values import NewPerson
from plsc.serve import service, turns
from plsc.serve.access import current_caller
from plsc.serve.turns import TokenTurns

pytestmark = pytest.mark.live

PLACE = "/v1/collections/staff"


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


def send_search(live: Live, by: str, conditions: Mapping[str, Any] = {"city": "Bern"}) -> socket.socket:
    query = {"query": {"vector": vectors(1)[0].tolist()}, "filter": conditions}
    body = json.dumps(query).encode()
    return send(
        live, by, f"POST {PLACE}/search HTTP/1.1\nContent-Type: application/json\nContent-Length: {len(body)}\n", body
    )


def send_person(live: Live, by: str) -> socket.socket:
    body = json.dumps({"faces": [{"vector": vectors(1)[0].tolist()}]}).encode()
    return send(
        live, by, f"POST {PLACE}/persons HTTP/1.1\nContent-Type: application/json\nContent-Length: {len(body)}\n", body
    )


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


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with next to no time to spare, until it is undone: who is ahead waits for what others take."""
    monkeypatch.setattr(turns, "_LEAST_PART", 0.05)
    monkeypatch.setattr(turns, "_FULL_PART", 0.0)
    return monkeypatch


def keep_at_work(busy: pytest.MonkeyPatch) -> None:
    """Take nobody for idle from here on until that is undone, however long this process waits for a processor."""
    busy.setattr(turns, "_IDLE_PART", 0.0)


def test_a_body_in_crumbs_waits_for_the_others_who_are_at_work(guarded, busy):
    """Each chunk of a byte costs a hundred times as much as its bytes."""
    keep_at_work(busy)
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


@pytest.mark.exhaustive
def test_large_answers_that_nobody_reads_wait_for_their_turns(guarded, busy):
    """Those that began while their token was alone do not all go on when another comes: a step costs 1,000 s."""
    pay = TokenTurns.charge
    busy.setattr(
        TokenTurns,
        "charge",
        lambda self, owner, s, fine=0.0: pay(self, owner, 1_000.0 if owner == "reader" else s, fine),
    )
    store = guarded.service.store
    store.create_collection("large", DIM, "linear-model")
    metadata = {f"k{number}": "x" * 1_000 for number in range(60)}
    store.add_persons("large", [NewPerson(row[None], None, metadata) for row in vectors(118)], "linear-model")
    with contextlib.ExitStack() as closing:
        began, release = closing.enter_context(held_up(store, "persons"))
        head = "GET /v1/collections/large/persons?limit=200 HTTP/1.1\n"
        unread = [closing.enter_context(send(guarded, "reader", head)) for _ in range(11)]
        for _ in range(service.STORE_SHARE):
            assert began.acquire(timeout=30)
        keep_at_work(busy)
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
    keep_at_work(busy)
    looked, ticks = [], itertools.count(step=10.0)
    narrow = SqliteRows._matching_persons
    busy.setattr(sqlite_store, "_LOOKED_UP_AT_ONCE", 1)
    busy.setattr(guarded.service._filterers, "_clock", lambda: next(ticks))
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
        many = [closing.enter_context(send_search(guarded, "camera")) for _ in range(2 * service.MAX_FILTERED)]
        for _ in range(service.FILTER_SHARE):
            assert began.acquire(timeout=30)
        many.append(closing.enter_context(send_search(guarded, "other")))
        assert began.acquire(timeout=30), "that of the other, before those of the camera that wait"
        release.set()
        assert statuses(many) == {b"200"}


def test_the_store_s_threads_are_not_one_token_s(guarded):
    with contextlib.ExitStack() as closing:
        began, release = closing.enter_context(held_up(guarded.service.store, "collection"))
        many = [
            closing.enter_context(send(guarded, "camera", f"GET {PLACE} HTTP/1.1\n"))
            for _ in range(2 * service.STORE_THREADS)
        ]
        for _ in range(service.STORE_SHARE):
            assert began.acquire(timeout=30)
        many.append(closing.enter_context(send(guarded, "other", f"GET {PLACE} HTTP/1.1\n")))
        assert began.acquire(timeout=30)
        release.set()
        assert statuses(many) == {b"200"}


def test_a_change_passes_those_of_another_token_that_wait(guarded, monkeypatch):
    """The store makes one at a time, and syncs the disk for each."""
    quotas, begun, release = guarded.service.quotas, [], threading.Event()
    add = quotas.add

    def begin(*args: Any, **options: Any) -> Any:
        begun.append(current_caller().name)
        assert release.wait(30)
        return add(*args, **options)

    monkeypatch.setattr(quotas, "add", begin)
    with contextlib.ExitStack() as closing:
        closing.callback(release.set)
        many = [closing.enter_context(send_person(guarded, "writer")) for _ in range(8)]
        wait_until(lambda: begun)
        many.append(closing.enter_context(send_person(guarded, "editor")))
        wait_until(lambda: "editor" in begun)
        assert begun == ["writer", "editor"]
        release.set()
        assert statuses(many) == {b"201"}


def test_who_has_taken_more_waits_while_others_are_at_work(busy):
    keep_at_work(busy)

    async def run() -> list[str]:
        tokens, order, ended = TokenTurns(), [], threading.Event()

        async def answer(name: str) -> None:
            order.append(name)

        async def work() -> None:
            while not ended.is_set():
                tokens.charge("other", 0.001)
                await tokens.take("other", lambda: answer("other"))
                await asyncio.sleep(0)

        tokens.charge("camera", 10.0)
        assert not tokens.must_wait("camera"), "it is alone"
        tokens.charge("other", 0.001)
        tokens.charge("camera", 10.0)
        assert tokens.must_wait("camera")
        assert not tokens.must_wait("other")
        working = asyncio.create_task(work())
        waiting = [asyncio.create_task(tokens.take("camera", lambda: answer("camera"))) for _ in range(3)]
        while order.count("other") < 100:
            await asyncio.sleep(0.001)
        assert "camera" not in order
        ended.set()
        busy.undo()
        await asyncio.gather(working, *waiting)
        return order

    assert asyncio.run(run())[-3:] == ["camera"] * 3


def test_a_token_that_does_next_to_nothing_holds_nobody_up(monkeypatch):
    """Else one could keep another from what nobody wants."""
    clock, served = Clock(monkeypatch, 0.5), 0

    async def answer() -> None:
        nonlocal served
        await clock.work(0.0001)
        served += 1

    async def pass_time() -> None:
        while served < 2000:
            clock.now += 0.001
            await asyncio.sleep(0)

    async def run() -> None:
        tokens, passing = TokenTurns(), asyncio.ensure_future(pass_time())
        tokens.charge("camera", 0.0001)
        for _ in range(2000):
            tokens.charge("other", 0.005)
            tokens.charge("camera", 0.00001)
            await tokens.take("other", answer)
        await passing

    asyncio.run(asyncio.wait_for(run(), 20))
    assert clock.now > 5, "it waited for its turns"


def test_nothing_is_to_spare_where_the_loop_waits_for_a_processor(monkeypatch):
    """Processors that other programs keep busy are not this service's to give away."""

    async def taken(part: float) -> float:
        """What a token takes that never has enough, beside eight others, by the part of its work that the loop runs."""
        clock, tokens, seconds = Clock(monkeypatch, part), TokenTurns(), 0.0
        while clock.now < 20:
            for door in range(8):
                await tokens.take(f"door{door}", lambda: clock.work(0.0005))
            if not tokens.must_wait("camera"):
                tokens.charge_beside("camera", 0.01)
                seconds += 0.01
            clock.now += 0.003
            await asyncio.sleep(0)
        return seconds

    freely, crowded = (asyncio.run(taken(part)) for part in (1.0, 0.5))
    assert 0 < crowded < freely / 2


class Clock:
    """The time that turns and the event loop see, in a part of whose work the loop's thread has a processor."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, part: float) -> None:
        self.now, self._part, self._worked = 0.0, part, 0.0
        for name in ("monotonic", "perf_counter"):
            monkeypatch.setattr(time, name, lambda: self.now)
        monkeypatch.setattr(turns, "_schedule", self._schedule)

    async def work(self, seconds: float) -> None:
        self.now += seconds
        self._worked += seconds

    def _schedule(self) -> tuple[int, int]:
        return int(1e9 * self._part * self._worked), int(1e9 * (1 - self._part) * self._worked)


def test_the_crowded_token_is_told(guarded):
    """A device's queue that one token fills is full for that token alone."""
    worker: Any = guarded.service.worker
    wait_until(lambda: worker.waiting("search") == 0)
    with contextlib.ExitStack() as closing:
        began, release = closing.enter_context(held_up(guarded.service.store, "search"))
        many = [closing.enter_context(send_many(guarded, "camera", 256)) for _ in range(18)]
        assert began.acquire(timeout=30)
        wait_until(lambda: sum(map(is_answered, many)) >= 4)
        release.set()
        assert statuses([closing.enter_context(send_many(guarded, "other", 256))]) == {b"200"}
        assert statuses(many) == {b"200", b"429"}


def send_many(live: Live, by: str, count: int) -> socket.socket:
    body = json.dumps({"queries": [{"vector": row.tolist()} for row in vectors(count)]}).encode()
    return send(
        live, by, f"POST {PLACE}/search HTTP/1.1\nContent-Type: application/json\nContent-Length: {len(body)}\n", body
    )
