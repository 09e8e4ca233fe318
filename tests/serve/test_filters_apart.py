"""Filters are looked up apart from other work, and no longer than their caller waits."""

import json
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from support.live_service import DIM, Live, live_service, vectors
from support.waiting import held_up

from plsc.errors import DeadlineError
from plsc.gallery.backends import open_store
from plsc.gallery.filters import Filter, UnfinishedFilter
from plsc.gallery.sqlite import store as sqlite_store
from plsc.gallery.values import NewPerson

pytestmark = pytest.mark.live

PERSONS = 20_000
CONDITIONS = {f"k{number}": {"gte": 0} for number in range(10)}
PLACE = "/v1/collections/staff"


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("filters")
    with closing(open_store(folder / "store")) as store:
        store.create_collection("staff", DIM, "linear-model")
        metadata = {f"k{number}": number for number in range(10)}
        rows = vectors(PERSONS)
        for start in range(0, PERSONS, 2000):
            persons = [
                NewPerson(row[None], None, {**metadata, "n": n}) for n, row in enumerate(rows[start : start + 2000])
            ]
            store.add_persons("staff", persons, "linear-model")
    with live_service(folder) as running:
        yield running


def search(live: Live, seed: int = 0, **options: Any) -> Any:
    body = {"query": {"vector": vectors(1, seed)[0].tolist()}, "k": 3, **options}
    return live.ask("POST", f"{PLACE}/search", body)


def test_a_prepared_filter_finds_what_the_filter_finds(tmp_path):
    with closing(open_store(tmp_path / "store")) as opened:
        store: Any = opened
        store.create_collection("staff", DIM, "c")
        store.add_persons(
            "staff", [NewPerson(row[None], None, {"n": n % 7}) for n, row in enumerate(vectors(500))], "c"
        )
        for conditions in ({"n": 3}, {"n": {"gte": 5}}, {"n": {"ne": 0}}, {"m": 1}, {"n": {"in": [1, 2]}}):
            filter = Filter.parse(conditions)
            prepared = store.prepare_filter("staff", filter)
            store.add_persons("staff", [NewPerson(vectors(1, 9), None, {"n": 3})], "c")
            later = max(person.id for person in store.persons("staff", limit=10_000))
            plain = store.search("staff", vectors(1, 1), k=9, filter=filter)[0]
            (found,) = store.search("staff", vectors(1, 1), k=8, filter=prepared)
            assert found == [match for match in plain if match.person != later][:8]


def test_what_was_acknowledged_is_found_by_later_filtered_searches(live):
    """Whoever enrolled before asking finds it, whatever else is batched with the search."""
    ended, statuses = threading.Event(), set()

    def ask_on() -> None:
        while not ended.is_set():
            statuses.add(search(live, filter={"city": "Bern"}).status_code)

    asking = threading.Thread(target=ask_on)
    asking.start()
    for number in range(20):
        vector = vectors(1, 1000 + number)[0].tolist()
        person = {"metadata": {"city": "Bern"}, "faces": [{"vector": vector}]}
        added = live.ask("POST", f"{PLACE}/persons", person).json()["id"]
        found = search(live, 1000 + number, filter={"city": "Bern"}).json()["results"][0]["matches"]
        assert found[0]["person"]["id"] == added
        assert live.ask("DELETE", f"{PLACE}/persons/{added}").status_code == 204
        found = search(live, 1000 + number, filter={"city": "Bern"}).json()["results"][0]["matches"]
        assert added not in [match["person"]["id"] for match in found]
    ended.set()
    asking.join()
    assert statuses == {200}


def test_a_filter_in_pieces_is_of_one_moment(tmp_path, monkeypatch):
    """Who fulfilled one condition before a change, and another after it, never matched."""
    monkeypatch.setattr(sqlite_store, "_LOOKED_UP_AT_ONCE", 1)
    with closing(open_store(tmp_path / "store")) as opened:
        store: Any = opened
        store.create_collection("staff", DIM, "c")
        people = [NewPerson(row[None], None, {"a": 1, "b": b}) for row, b in zip(vectors(2), (2, 1), strict=True)]
        mover, _ = store.add_persons("staff", people, "c")
        for changed in (False, True):
            filter = store.prepare_filter("staff", Filter.parse({"a": 1, "b": 1, "c": {"exists": changed}}))
            pieces = 0
            while isinstance(filter, UnfinishedFilter):
                if changed:
                    store.update_person("staff", mover.id, metadata={"a": 2, "b": 1, "c": 1})
                filter, pieces = store.prepare_filter("staff", filter), pieces + 1
            assert pieces == (1 if changed else 2), "a change ends the pieces"
            found = [match.person for match in store.search("staff", vectors(1), filter=filter)[0]]
            assert found == ([] if changed else [mover.id + 1])


@pytest.mark.slow
def test_filters_do_not_delay_plain_searches(live):
    """No look ends here before the plain searches have, on a machine of any speed: these do not stand behind them."""
    filtered: list[int] = []

    def ask(number: int) -> None:
        filtered.append(search(live, filter={**CONDITIONS, "n": {"gte": number}}, deadline_ms=25_000).status_code)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(12)]
    with held_up(live.service.store, "prepare_filter") as (begun, _):
        for thread in threads:
            thread.start()
        assert begun.acquire(timeout=120)
        for _ in range(20):
            assert search(live).status_code == 200
            assert live.ask("GET", PLACE).status_code == 200
        assert not filtered
    for thread in threads:
        thread.join()
    assert filtered == [200] * len(threads)


def test_a_look_ends_at_the_deadline(live):
    late = search(live, filter=CONDITIONS, deadline_ms=1)
    assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline")
    store: Any = live.service.store
    looks = []

    def stop() -> bool:
        looks.append(1)
        return len(looks) > 2

    with pytest.raises(DeadlineError, match="allow more time"), store.stopping_when(stop):
        store.persons("staff", filter=Filter.parse({**CONDITIONS, "n": {"lt": -1}}))
    assert len(looks) == 3
    assert store.persons("staff", limit=1), "a connection that was interrupted reads on"


def test_conditions_are_limited(live):
    many = {f"k{number}": 1 for number in range(17)}
    assert "at most 16" in search(live, filter=many).text
    listed = live.ask("GET", f"{PLACE}/persons", params={"filter": json.dumps(many)})
    assert listed.status_code == 400
