"""What is open to anyone: the same bytes whatever a request says besides, small heads, and turns paid for by time."""

import asyncio
from collections.abc import Iterator

import pytest
from support.clock import Clock
from support.live_service import Live, bearer, live_service

from plsc.serve.connections import Connection, ConnectionBudget
from plsc.serve.limits import STRANGERS, Turns
from plsc.serve.settings import Limits

pytestmark = pytest.mark.live

HEALTH = ("/health/live", "/health/ready", "/v2", "/v2/health/live", "/v2/health/ready")
PATHS = ("/", "/page/page.js", "/docs", "/docs/swagger-ui.css", "/openapi.json")


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live_service(tmp_path_factory.mktemp("open"), callers={"known": {"role": "search"}}) as running:
        del running.http.headers["Authorization"]  # which tests send, or not
        yield running


@pytest.mark.parametrize("path", PATHS)
def test_nothing_but_path_and_etag_is_read(live, path):
    plain = live.ask("GET", path)
    dear = live.ask("GET", f"{path}?a=%41&b", headers={"Range": "bytes=0-1,3-4", "Cookie": "a=1; b=2"})
    assert (plain.status_code, dear.status_code, dear.content) == (200, 200, plain.content)
    assert live.ask("HEAD", path).headers["content-length"] == str(len(plain.content))
    for known in (plain.headers["etag"], f'"x", W/{plain.headers["etag"]}'):
        unchanged = live.ask("GET", path, headers={"If-None-Match": known})
        assert (unchanged.status_code, unchanged.content) == (304, b"")
        assert unchanged.headers["etag"] == plain.headers["etag"]
    assert live.ask("GET", path, headers={"If-None-Match": '"x"'}).status_code == 200


@pytest.mark.parametrize("path", [*HEALTH, "/", "/x"])
def test_heads_without_a_good_token_are_small(live, path):
    long, large = f"{path}?{'a=%41&' * 350}", {"Cookie": "a" * 8_200}
    known = bearer(live.secrets["known"])
    for headers in ({}, {"Authorization": "Bearer plsc_wrong"}):
        for refused, status in (
            (live.ask("GET", long, headers=headers), 414),
            (live.ask("GET", path, headers={**headers, **large}), 431),
        ):
            assert refused.status_code == status
            assert len(refused.json()) == 1
            assert "without a" in str(refused.json()["error"])
    for answer in (live.ask("GET", long, headers=known), live.ask("GET", path, headers={**known, **large})):
        assert answer.status_code == (404 if path == "/x" else 200)


def answered(seconds: float, waits: bool) -> int:
    """How many of 100 strangers are answered, by answers that take ``seconds`` each, of which no more is earned."""
    clock, limits, count = Clock(), Limits(strangers_part=0.0, tick_seconds=1e9), 0

    async def answer() -> None:
        nonlocal count
        if waits:
            await asyncio.sleep(0)
        else:
            clock.now += seconds
        count += 1

    async def run() -> None:
        turns, budget = Turns(limits, clock), ConnectionBudget(limits, 1.0, clock)
        connections = [Connection(budget, lambda: None, lambda: None) for _ in range(100)]
        tasks = [asyncio.create_task(turns.take(STRANGERS, answer, each)) for each in connections]
        for _ in range(300):
            turns.tick()
            await asyncio.sleep(0)
            clock.now += seconds if waits else 0.0
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())
    return count


def test_turns_are_paid_for_by_the_time_of_answers_and_not_by_what_they_wait_for():
    cheap, dear, waiting = answered(0.0001, waits=False), answered(0.02, waits=False), answered(0.02, waits=True)
    assert (cheap, dear, waiting) == (100, 3, 100)


def test_a_turn_costs_what_the_kernel_takes_as_well():
    """Answers that wait for their turns are fewer than the time of their own steps allows."""

    async def run() -> int:
        clock, limits, given = Clock(), Limits(tick_seconds=1e9), 0
        turns = Turns(limits, clock)
        turns.charge(STRANGERS, limits.strangers_saved_seconds)
        waiting = [turns.turn(STRANGERS) for _ in range(1000)]
        for _ in range(200):
            clock.now += 0.005
            turns.tick()
        given = sum(turn.done() for turn in waiting)
        return given

    assert 95 <= asyncio.run(run()) <= 105


def test_connections_that_only_come_and_go_owe_the_time_that_they_took(clock):
    budget = ConnectionBudget(Limits(connections=1000, anonymous_connections=1000), 1.0, clock)

    def come_and_go(owner: str | None, count: int) -> None:
        for _ in range(count):
            connection = Connection(budget, lambda: None, lambda: None)
            budget.add(connection)
            connection.seconds = 0.001
            connection.belongs_to(owner)
            budget.end(connection)

    come_and_go("known", 1000)
    assert not budget.newcomers_owe()
    come_and_go(None, 1000)
    assert budget.newcomers_owe()
