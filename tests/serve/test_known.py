"""Enrolling somebody who is enrolled: told, refused or added, and never kept by name in an answer that is stored."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.live_service import Live, image_input, live_service, picture, vectors

pytestmark = pytest.mark.live

KEANU, OTHER, STRANGER = (row.tolist() for row in vectors(3))


SETTINGS = {"threshold": 0.9}


@pytest.fixture
def staff(live: Live) -> Iterator[str]:
    place = live.collection("staff")
    yield place
    live.ask("DELETE", place)


@pytest.fixture
def keanu(live: Live, staff: str) -> int:
    return enrol(live, staff, "Keanu Reeves", KEANU).json()["id"]


def enrol(
    live: Live, place: str, name: str, *faces: list[float], on_known: str = "enrol", key: str = ""
) -> httpx.Response:
    body = {"name": name, "faces": [{"vector": face} for face in faces]}
    headers = {"Idempotency-Key": key} if key else {}
    return live.ask("POST", f"{place}/persons?on_known={on_known}", body, headers=headers)


def persons(live: Live, place: str) -> list[tuple[Any, int]]:
    listed = live.ask("GET", f"{place}/persons").json()["persons"]
    return [(person["name"], len(person["faces"])) for person in listed]


def test_an_enrolment_tells_who_is_known(live, staff, keanu):
    assert enrol(live, staff, "Stranger", STRANGER).json()["known"] is None
    answer = enrol(live, staff, "Neo", OTHER, KEANU)
    assert answer.status_code == 201
    assert answer.json()["known"] == {"id": keanu, "name": "Keanu Reeves", "score": pytest.approx(1.0)}
    several = {"persons": [{"faces": [{"vector": OTHER}]}, {}, {"faces": [{"vector": STRANGER}]}]}
    told = live.ask("POST", f"{staff}/persons", several).json()["persons"]
    assert [person["known"] and person["known"]["name"] for person in told] == ["Neo", None, "Stranger"]
    put = live.ask("PUT", f"{staff}/persons/by-external-id/E-1", {"faces": [{"vector": KEANU}]})
    assert "known" not in put.json()


def test_the_known_are_refused_where_that_is_asked(live, staff, keanu):
    answer = enrol(live, staff, "Neo", OTHER, KEANU, on_known="refuse")
    assert answer.status_code == 409
    assert answer.json()["known"] == {"id": keanu, "name": "Keanu Reeves", "score": pytest.approx(1.0)}
    told = f"this face matches Keanu Reeves (#{keanu}) at 1.00: add it there (POST {staff}/persons/{keanu}/faces), or "
    assert answer.json()["error"]["message"].startswith(told)
    several = {"persons": [{"name": "Ada", "faces": [{"vector": OTHER}]}, {"faces": [{"vector": KEANU}]}]}
    refused = live.ask("POST", f"{staff}/persons?on_known=refuse", several)
    assert (refused.status_code, "persons[1].faces" in refused.text) == (409, True)
    assert persons(live, staff) == [("Keanu Reeves", 1)]
    assert enrol(live, staff, "Ada", OTHER, on_known="refuse").status_code == 201


def test_of_enrolments_at_the_same_moment_one_is_first(live, staff):
    def enrol_all(on_known: str, face: list[float]) -> list[int]:
        start = threading.Barrier(12)

        def enrol_one(number: int) -> int:
            start.wait()
            return enrol(live, staff, f"Neo {number}", face, on_known=on_known).status_code

        with ThreadPoolExecutor(12) as threads:
            return sorted(threads.map(enrol_one, range(12)))

    assert enrol_all("refuse", KEANU) == [201] + [409] * 11
    assert enrol_all("add", OTHER) == [200] * 11 + [201]
    assert sorted(faces for _, faces in persons(live, staff)) == [1, 12]


def test_faces_are_added_to_who_is_known(live, staff, keanu):
    first = enrol(live, staff, "Neo", OTHER, KEANU, on_known="add", key="again")
    assert first.status_code == 200
    assert (first.json()["id"], first.json()["name"], len(first.json()["faces"])) == (keanu, "Keanu Reeves", 3)
    again = enrol(live, staff, "Neo", OTHER, KEANU, on_known="add", key="again")
    assert (again.status_code, again.json(), again.headers["Idempotent-Replayed"]) == (200, first.json(), "true")
    assert persons(live, staff) == [("Keanu Reeves", 3)]
    assert enrol(live, staff, "Trinity", STRANGER, on_known="add").status_code == 201
    several = live.ask("POST", f"{staff}/persons?on_known=add", {"persons": [{}]})
    assert several.status_code == 400
    assert live.ask("POST", f"{staff}/persons?on_known=ask", {}).status_code == 400


def test_a_stored_answer_names_nobody(live, staff, keanu):
    first = enrol(live, staff, "Neo", KEANU, key="k").json()
    live.ask("PATCH", f"{staff}/persons/{keanu}", {"name": "K. R."})
    assert enrol(live, staff, "Neo", KEANU, key="k").json() == {**first, "known": {**first["known"], "name": "K. R."}}
    live.ask("DELETE", f"{staff}/persons/{keanu}")
    assert enrol(live, staff, "Neo", KEANU, key="k").json() == {**first, "known": None}


def test_without_a_threshold_nobody_is_known_and_scores_are_rounded(tmp_path: Path):
    with live_service(tmp_path) as live:
        place = live.collection("staff")
        for _ in range(2):
            answer = enrol(live, place, "Keanu Reeves", KEANU, on_known="refuse")
            assert (answer.status_code, answer.json()["known"]) == (201, None)
    callers = {"importer": {"role": "write", "allow": ["vectors"]}, "blunt": {"role": "write"}}
    with live_service(tmp_path / "more", threshold=0.5, score_step=0.3, callers=callers) as live:
        place = live.collection("staff")
        body = {"faces": [image_input(picture(1))]}
        live.ask("POST", f"{place}/persons", body)
        assert live.ask("POST", f"{place}/persons", body, by="blunt").json()["known"]["score"] == pytest.approx(0.9)
