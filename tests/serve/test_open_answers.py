"""What is open to anyone: the same bytes whatever a request says besides, small heads, and turns paid for by time."""

import asyncio
import time
from collections.abc import Iterator

import pytest
from support.live_service import Live, bearer, live_service

from plsc.serve.connections import Connection, ConnectionBudget
from plsc.serve.turns import Turns

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
    """How many of 100 answers are given that take ``seconds`` each, of which no more is earned."""

    async def answer() -> None:
        nonlocal count
        if waits:
            await asyncio.sleep(seconds)
        until = time.thread_time() + (0 if waits else seconds)
        while time.thread_time() < until:
            pass
        count += 1

    async def run() -> None:
        turns, budget = Turns(0.0), ConnectionBudget(known=100, part=100, anonymous=100)
        connections = [Connection(budget, lambda: None, lambda: None) for _ in range(100)]
        tasks = [asyncio.create_task(turns.take(connection, answer)) for connection in connections]
        await asyncio.wait(tasks, timeout=1.0)
        for connection in connections:
            connection.lose()
        await asyncio.gather(*tasks)

    count = 0
    asyncio.run(run())
    return count


def test_turns_are_paid_for_by_the_time_of_answers_and_not_by_what_they_wait_for(monkeypatch):
    monkeypatch.setattr(time, "perf_counter", time.thread_time)  # what other programs take is no answer's time
    cheap, dear, waiting = answered(0.0001, waits=False), answered(0.02, waits=False), answered(0.02, waits=True)
    assert 1 <= dear <= 5
    assert cheap > 3 * dear
    assert waiting > 3 * dear


def test_connections_that_only_come_and_go_owe_the_time_that_they_took():
    budget = ConnectionBudget(known=1000, part=1000, anonymous=1000)

    def come_and_go(owner: str | None, count: int) -> None:
        for _ in range(count):
            connection = Connection(budget, lambda: None, lambda: None)
            budget.add(connection)
            connection.seconds = 0.001
            connection.belongs_to(owner)
            budget.end(connection)

    budget.newcomers_owe()
    come_and_go("known", 1000)
    assert not budget.newcomers_owe()
    come_and_go(None, 1000)
    assert budget.newcomers_owe()
