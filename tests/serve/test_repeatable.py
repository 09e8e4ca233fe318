"""Writes that may be sent again, over HTTP: external ids, Idempotency-Key, ETag and If-Match, and expiry."""

import json
import threading
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote

import pytest
from support.live_service import Live, bearer, image_input, live_service, picture, vectors
from support.waiting import held_up, wait_until

pytestmark = pytest.mark.live

ODD_IDS = ["7", "a/b", "../x", "%2F?#&", "O'Hara", "李小龙 🙂", "x" * 128, " ", "faces/3", "1/faces/1/thumbnail"]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("repeatable")
    with live_service(folder, keep_thumbnails=True, thumbnails=folder / "thumbnails") as running:
        yield running


@pytest.fixture
def place(live: Live) -> str:
    """A collection of the test's own."""
    return live.collection(f"c{uuid.uuid4().hex}")


def person(seed: int = 0, **fields: Any) -> dict[str, Any]:
    return {"name": f"p{seed}", "faces": [{"vector": vectors(1, seed)[0].tolist()}], **fields}


def by_external_id(place: str, external_id: str) -> str:
    return f"{place}/persons/by-external-id/{quote(external_id, safe='')}"


def found(live: Live, place: str, seed: int) -> list[int]:
    body = {"query": {"vector": vectors(1, seed)[0].tolist()}, "threshold": 0.999}
    matches = live.ask("POST", f"{place}/search", body).json()["results"][0]["matches"]
    return [match["person"]["id"] for match in matches]


def error(answer: Any) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


# --- external ids ---


def test_a_put_makes_and_then_replaces(live, place):
    for number, external_id in enumerate(ODD_IDS):
        path = by_external_id(place, external_id)
        first = live.ask("PUT", path, person(number, metadata={"n": 1}))
        assert first.status_code == 201, first.text
        assert first.json()["external_id"] == external_id
        again = live.ask("PUT", path, person(number + 50))
        assert (again.status_code, again.json()["id"]) == (200, first.json()["id"])
        assert again.headers["ETag"] != first.headers["ETag"]
        assert (again.json()["metadata"], len(again.json()["faces"])) == ({}, 1)
        got = live.ask("GET", path)
        assert (got.json(), got.headers["ETag"]) == (again.json(), again.headers["ETag"])
        assert live.ask("GET", f"{place}/persons/{got.json()['id']}").json() == got.json()
        assert (found(live, place, number), found(live, place, number + 50)) == ([], [got.json()["id"]])
    listed = live.ask("GET", f"{place}/persons").json()["persons"]
    assert [one["external_id"] for one in listed] == ODD_IDS
    searched = live.ask("POST", f"{place}/search", {"query": person(50)["faces"][0], "k": 1}).json()
    assert searched["results"][0]["matches"][0]["person"] == {
        "id": listed[0]["id"],
        "name": "p50",
        "metadata": {},
        "external_id": "7",
    }
    for external_id in ODD_IDS:
        assert live.ask("DELETE", by_external_id(place, external_id)).status_code == 204
        assert error(live.ask("GET", by_external_id(place, external_id))) == (404, "not_found")
        assert error(live.ask("DELETE", by_external_id(place, external_id))) == (404, "not_found")
    assert live.ask("GET", place).json()["persons"] == 0


def test_an_external_id_is_enrolled_once(live, place):
    assert live.ask("POST", f"{place}/persons", person(1, external_id="a")).status_code == 201
    assert error(live.ask("POST", f"{place}/persons", person(2, external_id="a"))) == (409, "conflict")
    both = {"persons": [person(3), person(4, external_id="a")]}
    assert error(live.ask("POST", f"{place}/persons", both)) == (409, "conflict")
    twice = {"persons": [person(3, external_id="b"), person(4, external_id="b")]}
    assert error(live.ask("POST", f"{place}/persons", twice)) == (400, "bad_request")
    for wrong in ("", "x" * 129, "a\n", ".", "..", 7, ["a"]):
        assert error(live.ask("POST", f"{place}/persons", person(5, external_id=wrong))) == (400, "bad_request")
    assert error(live.ask("PUT", by_external_id(place, "x" * 129), person(5))) == (400, "bad_request")
    assert error(live.ask("PUT", by_external_id(place, "a"), person(5, external_id="b"))) == (400, "bad_request")
    assert live.ask("GET", place).json()["persons"] == 1


# --- Idempotency-Key ---


def keyed(live: Live, path: str, body: Any, key: str, **headers: str) -> Any:
    return live.ask("POST", path, body, headers={"Idempotency-Key": key, **headers})


def test_a_request_sent_again_gets_its_first_answer(live, place):
    body = person(1, metadata={"city": "Bern"}, external_id="a", expires="2090-01-31")
    first = keyed(live, f"{place}/persons", body, '"one"')
    assert (first.status_code, "Idempotent-Replayed" in first.headers) == (201, False)
    changed = live.ask("PATCH", f"{place}/persons/{first.json()['id']}", {"name": "other"})
    for key in ('"one"', "one"):
        again = keyed(live, f"{place}/persons", body, key)
        assert (again.status_code, again.headers["Idempotent-Replayed"]) == (201, "true")
        assert again.content == first.content
    assert changed.json()["name"] == "other"
    several = {"persons": [person(2), {"name": "nobody"}, {"faces": [image_input(picture(3, size=64))]}]}
    first, again = (keyed(live, f"{place}/persons", several, "several") for _ in range(2))
    assert first.json()["warnings"]
    assert (again.status_code, again.content) == (201, first.content)
    path = f"{place}/persons/{first.json()['persons'][0]['id']}/faces"
    first, again = (keyed(live, path, {"faces": person(4)["faces"]}, "faces") for _ in range(2))
    assert (again.status_code, again.content) == (201, first.content)
    first, again = (keyed(live, "/v1/collections", {"name": "kept"}, "collection") for _ in range(2))
    assert (first.status_code, again.status_code, again.content) == (201, 201, first.content)
    first, again = (keyed(live, f"{place}/compact", None, "compact") for _ in range(2))
    assert (first.status_code, again.status_code, again.content) == (200, 200, first.content)
    first, again = (keyed(live, "/v1/snapshots", None, "snapshot") for _ in range(2))
    assert (first.status_code, again.status_code, again.content) == (201, 201, first.content)
    assert again.headers["Idempotent-Replayed"] == "true"
    assert len(live.ask("GET", "/v1/snapshots").json()["snapshots"]) == 1
    assert live.ask("GET", place).json()["persons"] == 4
    assert live.ask("GET", place).json()["faces"] == 4


def test_a_key_is_of_one_request(live, place):
    assert keyed(live, f"{place}/persons", person(1), "k").status_code == 201
    for path, body in (
        (f"{place}/persons", person(2)),
        (f"{place}/persons/1/faces", {"faces": person(1)["faces"]}),
        (f"{place}/compact", None),
        ("/v1/collections", {"name": "never"}),
    ):
        assert error(keyed(live, path, body, "k")) == (422, "unprocessable"), path
    assert live.ask("GET", place).json()["persons"] == 1


def test_what_failed_leaves_its_key_free(live, place):
    assert error(keyed(live, f"{place}/persons", {"faces": [{"vector": [0.0]}]}, "f")) == (422, "unprocessable")
    assert error(keyed(live, f"{place}-not/persons", person(1), "f")) == (404, "not_found")
    assert keyed(live, f"{place}/persons", person(1), "f").status_code == 201


@pytest.mark.parametrize("key", ["", '""', "x" * 256, '"a', 'a"b', "a\\b", "a b", '"é"', '"a"; x=1'])
def test_other_keys_are_refused(live, place, key):
    answer = live.ask("POST", f"{place}/persons", person(1), headers={"Idempotency-Key": key.encode("latin-1")})
    assert error(answer) == (400, "bad_request")
    assert live.ask("GET", place).json()["persons"] == 0


def test_two_keys_are_refused(live, place):
    headers = [("Idempotency-Key", "a"), ("Idempotency-Key", "b"), ("Content-Type", "application/json")]
    answer = live.http.post(f"{place}/persons", json=person(1), headers=headers)
    assert error(answer) == (400, "bad_request")


def test_while_a_request_is_in_hand_its_key_is_taken(live, place):
    answers: list[Any] = []
    first = threading.Thread(target=lambda: answers.append(keyed(live, f"{place}/persons", person(1), "slow")))
    with held_up(live.service.store, "add_persons") as (entered, _):
        first.start()
        assert entered.acquire(timeout=120)
        second = keyed(live, f"{place}/persons", person(1), "slow")
    assert (error(second), second.headers["Retry-After"]) == ((409, "conflict"), "1")
    first.join()
    assert answers[0].status_code == 201
    assert keyed(live, f"{place}/persons", person(1), "slow").content == answers[0].content


def test_keys_belong_to_a_token_and_outlive_the_process(tmp_path):
    callers = {name: {"role": "write", "allow": ["vectors"]} for name in ("one", "two")}
    with live_service(tmp_path, callers=callers) as live:
        headers = [bearer(live.secrets[name]) for name in callers]
        assert live.ask("POST", "/v1/collections", {"name": "c"}).status_code == 201
        made = [keyed(live, "/v1/collections/c/persons", person(1), "same", **one).json()["id"] for one in headers]
        assert len(set(made)) == 2
    with live_service(tmp_path, tokens=tmp_path / "tokens.toml") as live:
        again = [keyed(live, "/v1/collections/c/persons", person(1), "same", **one).json()["id"] for one in headers]
        assert again == made
        assert live.ask("GET", "/v1/collections/c", headers=headers[0]).json()["persons"] == 2


def test_answers_keep_nothing_about_persons(tmp_path):
    """Who is deleted and compacted away is in no file any more, answers included."""
    with live_service(tmp_path) as live:
        place = live.collection("c")
        body = {"name": "Rumpelstiltskin", "metadata": {"mail": "rumpel@example.org"}, "external_id": "straw-to-gold"}
        made = keyed(live, f"{place}/persons", {**person(1), **body}, "k").json()
        assert live.ask("DELETE", f"{place}/persons/{made['id']}").status_code == 204
        assert live.ask("POST", f"{place}/compact").status_code == 200
        assert keyed(live, f"{place}/persons", {**person(1), **body}, "k").json() == made
        for path in (tmp_path / "store").rglob("*"):
            content = path.read_bytes() if path.is_file() else b""
            for needle in (b"Rumpelstiltskin", b"rumpel@example.org", b"straw-to-gold"):
                assert needle not in content, path


# --- ETag and If-Match ---


def test_two_editors_do_not_overwrite_each_other(live, place):
    made = live.ask("POST", f"{place}/persons", person(1, metadata={"x": 0}))
    path, etag = f"{place}/persons/{made.json()['id']}", made.headers["ETag"]
    assert etag == live.ask("GET", path).headers["ETag"]
    assert not etag.startswith("W/")
    one = live.ask("PATCH", path, {"metadata": {"x": 1}}, headers={"If-Match": etag})
    assert one.status_code == 200
    other = live.ask("PATCH", path, {"metadata": {"y": 2}}, headers={"If-Match": etag})
    assert error(other) == (412, "precondition_failed")
    assert live.ask("GET", path).json()["metadata"] == {"x": 1}
    face = f"{path}/faces/{made.json()['faces'][0]['id']}"
    for target in (face, path):
        assert error(live.ask("DELETE", target, headers={"If-Match": etag})) == (412, "precondition_failed")
    assert live.ask("GET", path).json()["faces"] == made.json()["faces"]
    assert live.ask("DELETE", face, headers={"If-Match": one.headers["ETag"]}).status_code == 204
    assert error(live.ask("DELETE", path, headers={"If-Match": one.headers["ETag"]})) == (412, "precondition_failed")
    several = f'"x", W/{etag} ,{live.ask("GET", path).headers["ETag"]}'
    assert live.ask("PATCH", path, {"name": "n"}, headers={"If-Match": several}).status_code == 200
    assert live.ask("DELETE", path, headers={"If-Match": "*"}).status_code == 204
    assert error(live.ask("DELETE", path, headers={"If-Match": "*"})) == (404, "not_found")


def test_weak_and_foreign_etags_match_nothing(live, place):
    made = live.ask("POST", f"{place}/persons", person(1))
    path, etag = f"{place}/persons/{made.json()['id']}", made.headers["ETag"]
    for other in (f"W/{etag}", '"x"', '""', '"1"', '"0-1"', f'"{2**62}-1"'):
        assert error(live.ask("PATCH", path, {"name": "n"}, headers={"If-Match": other}))[0] == 412, other
    for wrong in (etag.strip('"'), f"{etag} {etag}", f"{etag},,", '"a', "**", "*, " + etag, "x" * 5000, ""):
        assert error(live.ask("PATCH", path, {"name": "n"}, headers={"If-Match": wrong})) == (400, "bad_request"), wrong
    assert {**live.ask("GET", path).json(), "known": None} == made.json()


def test_a_put_on_conditions(live, place):
    path = by_external_id(place, "a")
    assert error(live.ask("PUT", path, person(1), headers={"If-Match": "*"}))[0] == 412
    made = live.ask("PUT", path, person(1), headers={"If-None-Match": "*"})
    assert made.status_code == 201
    assert error(live.ask("PUT", path, person(1), headers={"If-None-Match": "*"}))[0] == 412
    assert live.ask("PUT", path, person(2), headers={"If-Match": made.headers["ETag"]}).status_code == 200
    assert error(live.ask("PUT", path, person(3), headers={"If-Match": made.headers["ETag"]}))[0] == 412
    for wrong in ({"If-None-Match": made.headers["ETag"]}, {"If-None-Match": "*", "If-Match": "*"}):
        assert error(live.ask("PUT", path, person(3), headers=wrong)) == (400, "bad_request")
    assert found(live, place, 2) == [made.json()["id"]]
    assert error(live.ask("DELETE", path, headers={"If-Match": made.headers["ETag"]}))[0] == 412
    assert live.ask("DELETE", path, headers={"If-Match": live.ask("GET", path).headers["ETag"]}).status_code == 204


def test_null_removes_a_name(live, place):
    path = f"{place}/persons/{live.ask('POST', f'{place}/persons', person(1, metadata={'a': 1})).json()['id']}"
    assert live.ask("PATCH", path, {"expires": "2090-01-01"}).json()["expires"] == "2090-01-01T00:00:00.000Z"
    changed = live.ask("PATCH", path, {"name": None}).json()
    assert (changed["name"], changed["metadata"], changed["expires"]) == (None, {"a": 1}, "2090-01-01T00:00:00.000Z")
    assert "expires" not in live.ask("PATCH", path, {"expires": None}).json()
    assert error(live.ask("PATCH", path, {"metadata": None})) == (400, "bad_request")
    assert live.ask("GET", path).json()["metadata"] == {"a": 1}


# --- expiry ---


def test_who_expires_is_gone_with_the_thumbnail(live, place):
    soon = (datetime.now(UTC) + timedelta(seconds=6)).isoformat()
    body = {"name": "brief", "faces": [image_input(picture(7))], "expires": soon, "external_id": "brief"}
    made = live.ask("POST", f"{place}/persons", body).json()
    kept = live.ask("POST", f"{place}/persons", person(2, expires="2090-01-31T12:00:00+02:00")).json()
    assert kept["expires"] == "2090-01-31T10:00:00.000Z"
    thumbnail = f"{place}/persons/{made['id']}/faces/{made['faces'][0]['id']}/thumbnail"
    assert live.ask("GET", thumbnail).status_code == 200
    files = list((live.folder / "thumbnails").rglob(f"*/{made['id']}-{made['faces'][0]['id']}.jpg"))
    assert files
    wait_until(lambda: datetime.now(UTC) >= datetime.fromisoformat(made["expires"]))
    for path in (f"{place}/persons/{made['id']}", by_external_id(place, "brief"), thumbnail):
        assert error(live.ask("GET", path)) == (404, "not_found")
    assert [one["id"] for one in live.ask("GET", f"{place}/persons").json()["persons"]] == [kept["id"]]
    query = {"query": image_input(picture(7)), "threshold": 0.999}
    assert live.ask("POST", f"{place}/search", query).json()["results"][0]["matches"] == []
    wait_until(lambda: live.ask("GET", place).json()["persons"] == 1)
    assert not any(path.exists() for path in files)
    wait_until(lambda: expiries(live))  # told of once it is done
    assert [(line["collection"], line["ids"]) for line in expiries(live)] == [(place.rpartition("/")[2], [made["id"]])]


def expiries(live: Live) -> list[dict[str, Any]]:
    """The audit log's lines of expired persons."""
    lines = map(json.loads, (live.folder / "audit.jsonl").read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line.get("operation") == "delete_expired"]


@pytest.mark.parametrize("wrong", ["soon", "", "2030-13-01", "2030-01-01T12:00:00", 20300101, True])
def test_other_times_are_refused(live, place, wrong):
    assert error(live.ask("POST", f"{place}/persons", person(1, expires=wrong))) == (400, "bad_request")
