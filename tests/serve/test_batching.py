"""Micro-batching: what waits together runs together, everyone gets their own answer, and nobody waits in vain."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.clock import Clock
from support.live_service import DIM, live_service
from support.waiting import wait_until

from plsc.errors import UsageError
from plsc.gallery.filters import Filter
from plsc.gallery.values import Match, PersonSummary
from plsc.serve.errors import ApiError
from plsc.serve.searching import Search, Searcher, SearchMatches
from plsc.serve.settings import Limits
from plsc.serve.workers import DeviceWorker, Kind


class Log:
    """What the worker tells its observer."""

    def __init__(self) -> None:
        self.batches: list[tuple[str, int]] = []
        self.let_go: list[tuple[str, str, int]] = []

    def batch(self, kind: str, rows: int, waited: Sequence[float], seconds: float) -> None:
        self.batches.append((kind, rows))

    def dropped(self, kind: str, why: str, count: int) -> None:
        self.let_go.append((kind, why, count))


class Device:
    """Doubles numbers; the first batch holds the device until it is released."""

    def __init__(self) -> None:
        self.seen: list[list[Any]] = []
        self.began, self.go_on, self.clock = threading.Event(), threading.Event(), Clock()

    def run(self, payloads: list[Any]) -> list[Any]:
        self.seen.append(list(payloads))
        self.began.set()
        assert self.go_on.wait(120)
        if any(payload == "bad" for payload in payloads):
            raise UsageError("bad payload")
        return [payload * 2 for payload in payloads]


def run(scenario: Callable[[DeviceWorker, Device], Awaitable[Any]], **changes: Any) -> tuple[Any, Device, Log]:
    """What a scenario returns, with the device that it used and the log of its worker, which is closed then."""
    device, log = Device(), Log()
    limits = Limits(queue=changes.pop("queue", 100), inputs=1, collect_seconds=120.0)
    options: Any = {"max_batch": 8, "max_wait": 0.002, "share": 1.0, "clock": device.clock, **changes}
    options |= {"limits": limits, "observer": log}
    busy = DeviceWorker({"a": Kind(device.run), "b": Kind(device.run)}, **options)
    result = asyncio.run(scenario(busy, device))  # type: ignore[arg-type]
    busy.close()
    return result, device, log


def soon(seconds: float = 120) -> float:
    return time.monotonic() + seconds


async def occupied(busy: DeviceWorker, device: Device) -> "asyncio.Task[Any]":
    """Keep the device busy with one task."""
    first = asyncio.create_task(busy.submit("a", 1, 1, soon()))
    await asyncio.to_thread(device.began.wait, 120)
    return first


async def together(busy: DeviceWorker, payloads: list[Any], seconds: float = 120, rows: int = 1) -> list[Any]:
    calls = [busy.submit("a", payload, rows, soon(seconds)) for payload in payloads]
    return await asyncio.gather(*calls, return_exceptions=True)


async def behind_another(
    busy: DeviceWorker, device: Device, payloads: list[Any], rows: int = 1, waiting: int = 0
) -> Any:
    """The results of payloads that come while the device is busy, once ``waiting`` rows, or all, wait for it."""
    first = await occupied(busy, device)
    others = asyncio.create_task(together(busy, payloads, rows=rows))
    while busy.waiting("a") < (waiting or len(payloads) * rows):
        await asyncio.sleep(0)
    device.go_on.set()
    assert await first == 2
    return await others


def test_what_gathers_while_the_device_is_busy_runs_as_one_batch():
    found, _, log = run(lambda busy, device: behind_another(busy, device, list(range(10, 22))))
    assert found == list(range(20, 44, 2))
    assert log.batches == [("a", 1), ("a", 8), ("a", 4)]


def test_callers_who_come_again_join_those_who_waited():
    """Else the two groups would go on in turn, each at the price of a whole batch."""

    async def scenario(patient: DeviceWorker, device: Device) -> None:
        first = await occupied(patient, device)
        others = asyncio.create_task(together(patient, [3, 4, 5]))
        while patient.waiting("a") < 3:
            await asyncio.sleep(0)
        device.go_on.set()
        await first
        await together(patient, [6])
        await others

    assert run(scenario, max_wait=120)[2].batches == [("a", 1), ("a", 4)]


@pytest.mark.live
def test_callers_who_came_together_are_one_batch_however_long_reading_them_takes():
    async def scenario(busy: DeviceWorker, device: Device) -> None:
        async def read_slowly(payload: int) -> Any:
            sum(range(100_000))  # the event loop is busy with it
            return await busy.submit("a", payload, 1, soon())

        await behind_another(busy, device, list(range(6)))
        for _ in range(3):
            await asyncio.gather(*[read_slowly(payload) for payload in range(6)])

    assert run(scenario, max_wait=0.0)[2].batches == [("a", 1)] + [("a", 6)] * 4


def test_kinds_are_not_mixed_and_the_oldest_goes_first():
    async def scenario(busy: DeviceWorker, device: Device) -> None:
        first = await occupied(busy, device)
        others = [asyncio.create_task(busy.submit(kind, place, 1, soon())) for place, kind in enumerate("bab")]
        await asyncio.sleep(0)
        device.go_on.set()
        assert [await other for other in (first, *others)] == [2, 0, 2, 4]

    assert run(scenario)[2].batches == [("a", 1), ("b", 2), ("a", 1)]


def test_a_batch_takes_a_task_of_each_owner_in_turn():
    """And beside others no more of one than takes a moment: here, where the first took long, one."""

    async def scenario(busy: DeviceWorker, device: Device) -> None:
        first = await occupied(busy, device)
        many = [asyncio.create_task(busy.submit("a", 100 + place, 1, soon(), "camera")) for place in range(10)]
        other = asyncio.create_task(busy.submit("a", 7, 1, soon(), "other"))
        while busy.waiting("a") <= len(many):
            await asyncio.sleep(0)
        device.clock.now += 0.2
        device.go_on.set()
        assert [await each for each in (first, other, *many)][:2] == [2, 14]

    assert run(scenario)[1].seen[:3] == [[1], [100, 7], [101]]


def test_kinds_take_turns_however_much_of_one_waits():
    async def scenario(busy: DeviceWorker, device: Device) -> None:
        first = await occupied(busy, device)
        many = [asyncio.create_task(busy.submit("a", place, 8, soon())) for place in range(4)]
        other = asyncio.create_task(busy.submit("b", 7, 1, soon()))
        while not busy.waiting("b"):
            await asyncio.sleep(0)
        device.go_on.set()
        await asyncio.gather(first, other, *many)

    assert run(scenario)[2].batches[:2] == [("a", 1), ("b", 1)]


def test_one_failure_is_its_callers_alone():
    (three, bad, four), _, _ = run(lambda busy, device: behind_another(busy, device, [3, "bad", 4]))
    assert (three, four) == (6, 8)
    assert isinstance(bad, UsageError)


def test_deadlines_and_lost_callers_are_dropped_before_computing():
    async def scenario(busy: DeviceWorker, device: Device) -> None:
        first = await occupied(busy, device)
        late = asyncio.create_task(together(busy, [5], seconds=0.02))
        gone, stays = (asyncio.create_task(busy.submit("a", payload, 1, soon())) for payload in (6, 7))
        await asyncio.sleep(0)
        gone.cancel()
        (refused,) = await late  # told at the deadline, though the device is still busy
        assert isinstance(refused, ApiError)
        assert refused.status_code == 504
        device.go_on.set()
        assert [await first, await stays] == [2, 14]

    _, device, log = run(scenario)
    assert device.seen == [[1], [7]]
    assert log.let_go == [("a", "cancelled", 2)]


def test_a_full_queue_refuses_and_says_when_to_come_back():
    answers, _, log = run(lambda busy, device: behind_another(busy, device, [1, 2, 3], rows=4, waiting=8), queue=10)
    assert answers[:2] == [2, 4]
    assert isinstance(answers[2], ApiError)
    assert (answers[2].status_code, answers[2].headers["Retry-After"]) == (503, "1")
    assert log.let_go == [("a", "full", 1)]


def test_what_waits_at_the_end_is_finished_and_nothing_more_taken():
    async def scenario(busy: DeviceWorker, device: Device) -> None:
        first = await occupied(busy, device)
        second = asyncio.create_task(busy.submit("a", 2, 1, soon()))
        await asyncio.sleep(0)
        closing = asyncio.create_task(asyncio.to_thread(busy.close))
        told = ""
        while "stopping" not in told:  # until then it is taken, and not waited for
            with pytest.raises(ApiError) as refused:
                await busy.submit("a", 3, 1, 0.0)
            told = str(refused.value.detail)
        device.go_on.set()
        assert [await first, await second] == [2, 4]
        await closing

    run(scenario)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 12)), min_size=1, max_size=40), st.integers(1, 10))
def test_everyone_gets_their_own_answer(calls, max_batch):
    async def scenario(free: DeviceWorker, device: Device) -> list[Any]:
        device.go_on.set()
        return await asyncio.gather(*(free.submit(kind, n, rows, soon()) for n, (kind, rows) in enumerate(calls)))

    found, _, log = run(scenario, max_batch=max_batch, queue=1000)
    assert found == [2 * place for place in range(len(calls))]
    assert sum(rows for _, rows in log.batches) == sum(rows for _, rows in calls)
    assert max(rows for _, rows in log.batches) <= max(max_batch, *(rows for _, rows in calls))


class CountingStore:
    """Answers each query with its own first number, and counts the calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int, Any]] = []

    def search(
        self,
        collection: str,
        queries: Any,
        *,
        k: int = 10,
        threshold: float = -1.0,
        filter: Any = None,
        contract_id: str | None = None,
    ) -> Any:
        self.calls.append((collection, len(queries), k, filter))
        if collection == "lost":
            raise UsageError("lost")
        return [[Match(int(query[0]), 1, threshold)] for query in queries]

    def person_summaries(self, collection: str, ids: Sequence[int]) -> dict[int, PersonSummary]:
        return {one: PersonSummary(one, str(one), {}) for one in ids if one != 13}


def test_searches_alike_are_one_call_of_the_store():
    store = CountingStore()
    searcher = Searcher(store, 10_000)

    def search(number: int, collection: str = "c", count: int = 1, where: Any = None, k: int = 5) -> Search:
        return Search(collection, np.full((count, 4), number, dtype=np.float32), k, None, where)

    one, true = Filter.parse({"a": 1}), Filter.parse({"a": True})
    searches = [
        search(1),
        search(2, count=3),
        search(3, "d"),
        search(4, where=one),
        search(5, where=true),
        search(6),
        search(7, k=6),
        search(8, "lost"),
        search(9, "lost"),
        search(13),
        search(10, where=Filter.parse({"a": 1})),
    ]
    found = searcher.run(searches)
    alike = [("c", 6, 5, None), ("d", 1, 5, None), ("c", 2, 5, one), ("c", 1, 5, true), ("c", 1, 6, None)]
    assert sorted(store.calls[:6], key=str) == sorted([*alike, ("lost", 2, 5, None)], key=str)
    assert [isinstance(one, UsageError) for one in found].count(True) == 2
    answers = searcher.name([one for one in found if isinstance(one, SearchMatches)])
    shown = [
        [[match.person for match in matches if match.person in answer.persons] for matches in answer.matches]
        for answer in answers
    ]
    assert shown == [[[1]], [[2]] * 3, [[3]], [[4]], [[5]], [[6]], [[7]], [[]], [[10]]]


@pytest.mark.live
@pytest.mark.slow
def test_a_service_s_callers_share_batches_and_lost_callers_cost_nothing(tmp_path):
    with live_service(tmp_path, max_batch=16) as live:
        place = live.collection("crowd")
        live.ask("POST", f"{place}/persons", {"faces": [{"vector": [1.0] * DIM}]})
        store, sizes = live.service.store, []
        original, began, go_on = store.search, threading.Event(), threading.Event()

        def slow(collection: str, queries: Any, **options: Any) -> Any:
            sizes.append(len(queries))
            began.set()
            assert go_on.wait(120)
            return original(collection, queries, **options)

        store.search = slow
        answers = []

        def ask() -> None:
            answers.append(live.ask("POST", f"{place}/search", {"query": {"vector": [1.0] * DIM}}).status_code)

        threads = [threading.Thread(target=ask) for _ in range(9)]
        threads[0].start()
        assert began.wait(120)
        for thread in threads[1:]:
            thread.start()
        wait_until(lambda: live.service.worker.waiting("search") == 8)
        with pytest.raises(Exception, match="timed out"):
            live.ask("POST", f"{place}/search", {"query": {"vector": [1.0] * DIM}}, timeout=0.3)
        late = live.ask("POST", f"{place}/search", {"query": {"vector": [1.0] * DIM}, "deadline_ms": 30})
        assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline")
        go_on.set()
        for thread in threads:
            thread.join(120)
        assert answers == [200] * 9
        assert sizes == [1, 8]


@pytest.mark.live
@pytest.mark.slow
def test_what_many_want_to_know_is_asked_once_and_a_failure_is_not_remembered(tmp_path):
    with live_service(tmp_path) as live:
        live.collection("crowd")
        service, asked = live.service, []
        original = service.store.spaces

        def counted(name: str) -> Any:
            asked.append(name)
            if len(asked) == 1:
                raise UsageError("not now")
            return original(name)

        service.store.spaces = counted
        service.forget("crowd")

        async def together() -> list[Any]:
            return await asyncio.gather(
                *(service.require_collection("crowd") for _ in range(20)), return_exceptions=True
            )

        async def scenario() -> tuple[list[Any], list[Any]]:
            return await together(), await together()

        failed, known = asyncio.run(scenario())
        assert [isinstance(one, Exception) for one in failed] == [True] * 20
        assert [one.info.name for one in known] == ["crowd"] * 20
        assert len(asked) == 2
