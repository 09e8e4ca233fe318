"""Quotas that an operator sets: persons of a collection, bytes of the store, metadata and answers."""

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from support.live_service import DIM, live_service

from plsc.serve.changes import store_bytes
from plsc.serve.settings import Limits

pytestmark = pytest.mark.live

FACE = {"vector": [1.0] * DIM}


def test_persons_of_a_collection(tmp_path):
    with live_service(tmp_path, limits=Limits(persons=5)) as live:
        place, other = live.collection("staff"), live.collection("guests")
        three = {"persons": [{"faces": [FACE]}] * 3}
        assert live.ask("POST", f"{place}/persons", three).status_code == 201
        refused = live.ask("POST", f"{place}/persons", three)
        assert (refused.status_code, refused.json()["error"]["code"]) == (507, "quota_exceeded")
        assert "staff holds 3 people and takes 5 at most" in refused.json()["error"]["message"]
        assert live.ask("POST", f"{other}/persons", three).status_code == 201
        with ThreadPoolExecutor(6) as callers:
            several = [callers.submit(live.ask, "POST", f"{place}/persons", {"faces": [FACE]}) for _ in range(6)]
        assert sorted(answer.result().status_code for answer in several) == [201, 201, 507, 507, 507, 507]
        assert live.ask("GET", place).json()["persons"] == 5
        assert live.ask("POST", f"{place}/persons/1/faces", {"faces": [FACE]}).status_code == 201
        assert live.ask("DELETE", f"{place}/persons/1").status_code == 204
        assert live.ask("POST", f"{place}/persons", {"faces": [FACE]}).status_code == 201
        assert live.ask("GET", "/v1/info").json()["limits"]["persons"] == 5


def test_several_puts_of_one_person_count_once(tmp_path):
    with live_service(tmp_path, limits=Limits(persons=1)) as live:
        place = live.collection("staff")
        path = f"{place}/persons/by-external-id/E-1"
        with ThreadPoolExecutor(6) as callers:
            several = [callers.submit(live.ask, "PUT", path, {"faces": [FACE]}) for _ in range(12)]
        assert sorted(answer.result().status_code for answer in several) == [200] * 11 + [201]


def test_collections_made_at_once_keep_to_their_limit(tmp_path):
    with live_service(tmp_path, limits=Limits(collections=3)) as live, ThreadPoolExecutor(12) as callers:
        several = [callers.submit(live.ask, "POST", "/v1/collections", {"name": f"c{n}"}) for n in range(12)]
        assert sorted(answer.result().status_code for answer in several) == [201] * 3 + [400] * 9


def test_bytes_of_the_store(tmp_path):
    with live_service(tmp_path) as live:
        place = live.collection("staff")
    limit = store_bytes(tmp_path / "store") + 200_000
    with live_service(tmp_path, limits=Limits(store_bytes=limit)) as live:
        body = {"name": "n" * 1000, "faces": [FACE] * 8}
        answers = [live.ask("POST", f"{place}/persons", body) for _ in range(40)]
        assert {answer.status_code for answer in answers} == {201, 507}
        assert answers[-1].json()["error"]["code"] == "quota_exceeded"
        assert store_bytes(tmp_path / "store") < limit + 200_000  # one change more, with its pages in the log
        for method, path, change in (
            ("POST", f"{place}/persons/1/faces", {"faces": [FACE]}),
            ("PATCH", f"{place}/persons/1", {"name": "m"}),
            ("POST", "/v1/collections", {"name": "more"}),
        ):
            assert live.ask(method, path, change).status_code == 507, path
        assert live.ask("DELETE", f"{place}/persons/1").status_code == 204
        assert live.ask("POST", f"{place}/search", {"query": FACE}).status_code == 200


def test_metadata_and_answers(tmp_path):
    with live_service(tmp_path, limits=Limits(metadata_bytes=100, answer_bytes=300), metrics_port=0) as live:
        place = live.collection("staff")
        for size, status in ((80, 201), (95, 413)):
            person = {"metadata": {"key": "é" * (size // 2)}, "faces": [FACE]}
            assert live.ask("POST", f"{place}/persons", person).status_code == status
            assert live.ask("POST", f"{place}/persons", {"persons": [{}, person]}).status_code == status
        refused = live.ask("PATCH", f"{place}/persons/1", {"metadata": {"key": "x" * 100}})
        assert (refused.status_code, "at most 100" in refused.json()["error"]["message"]) == (413, True)
        assert live.ask("POST", f"{place}/search", {"query": FACE, "k": 2}).status_code in (400, 413)
        limits = live.ask("GET", "/v1/info").json()["limits"]
        assert (limits["metadata_bytes"], limits["answer_bytes"], limits["store_bytes"]) == (100, 300, None)
        shown = httpx.get(live.server.metrics_address).text
        assert "plsc_limit_metadata_bytes 100.0" in shown
        assert "plsc_limit_store_bytes" not in shown
