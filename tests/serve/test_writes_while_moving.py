"""What holds of writes over HTTP holds while their collection moves to another model, in both spaces."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from support.live_service import (
    CONTRACT,
    Linear,
    Live,
    NextLinear,
    image_input,
    live_service,
    next_linear_embedder,
    picture,
)
from support.live_service import NEXT_CONTRACT as NEW
from support.stores import content_of
from support.waiting import wait_until

from plsc.gallery.migration import filling, moving
from plsc.serve.settings import Limits

pytestmark = pytest.mark.live

MOVE, STAFF = "/v1/migrations/staff", "/v1/collections/staff"
PERSONS = f"{STAFF}/persons"


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A service whose collection begins to move with one person enrolled before, under the key "before"."""
    options: dict[str, Any] = {"next_embedder": next_linear_embedder(), "limits": Limits(persons=5)}
    with live_service(tmp_path_factory.mktemp("moving"), **options) as running:
        running.collection("staff")
        assert keyed(running, "before", 0).status_code == 201
        assert running.ask("POST", "/v1/migrations", {"collection": "staff"}).status_code == 201
        yield running


def body(seed: int, **fields: Any) -> dict[str, Any]:
    return {"name": f"p{seed}", "faces": [image_input(picture(seed))], **fields}


def keyed(live: Live, key: str, seed: int) -> httpx.Response:
    return live.ask("POST", PERSONS, body(seed), headers={"Idempotency-Key": key})


def step(live: Live, name: str, given: Any = None) -> dict[str, Any]:
    answer = live.ask("POST", f"{MOVE}/{name}", given)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def found(live: Live, seed: int) -> tuple[str, list[int]]:
    """The model that a search by a picture was answered with, and whose it is."""
    answer = live.ask("POST", f"{STAFF}/search", {"query": image_input(picture(seed)), "threshold": 0.9999}).json()
    return answer["contract_id"], [match["person"]["id"] for match in answer["results"][0]["matches"]]


def test_a_request_sent_again_is_written_once_into_both_spaces(live: Live) -> None:
    first = keyed(live, "during", 1)
    person = first.json()["id"]
    assert first.status_code == 201
    sent = live.ask("POST", f"{MOVE}/persons/1/pictures", {"faces": [image_input(picture(0))]})
    assert sent.json() == {"faces": [1]}
    for name, model in (("pause", CONTRACT), ("cut-over", NEW), ("roll-back", CONTRACT)):
        step(live, name, {"max_loss": 1, "threshold": 0.5} if model == NEW else None)
        again = keyed(live, "during", 1)
        assert (again.status_code, again.content) == (201, first.content)
        assert again.headers["Idempotent-Replayed"] == "true"
        assert keyed(live, "before", 0).json()["id"] == 1
        now = live.ask("GET", MOVE).json()
        assert (now["faces"], now["lacking"], now["contract_id"]) == (2, 0, model)
        assert (found(live, 1), found(live, 0)) == ((model, [person]), (model, [1]))
    assert live.ask("GET", STAFF).json()["persons"] == 2


def test_an_etag_is_renewed_by_changes_of_the_person_and_by_no_step(live: Live) -> None:
    path = f"{PERSONS}/by-external-id/tagged"
    tag = live.ask("PUT", path, body(10)).headers["ETag"]
    step(live, "cut-over", {"max_loss": 1, "threshold": 0.5})
    assert live.ask("GET", path).headers["ETag"] == tag, "nothing that the answer shows has changed"
    for given, seed in ((body(11), 11), (body(12), 12)):
        put = live.ask("PUT", path, given, headers={"If-Match": tag})
        assert put.status_code == 200, put.text
        assert put.headers["ETag"] != tag
        assert live.ask("PUT", path, body(99), headers={"If-Match": tag}).status_code == 412
        tag, model = put.headers["ETag"], live.ask("GET", STAFF).json()["contract_id"]
        assert (found(live, seed), found(live, 99)) == ((model, [put.json()["id"]]), (model, []))
        step(live, "roll-back")
        assert found(live, seed) == (CONTRACT, [put.json()["id"]]), "both of its vectors were replaced"
    assert live.ask("DELETE", path, headers={"If-Match": '"1-1"'}).status_code == 412
    assert live.ask("DELETE", path, headers={"If-Match": tag}).status_code == 204
    assert live.ask("GET", MOVE).json()["lacking"] == 0


def test_a_quota_counts_a_person_once(live: Live) -> None:
    there = live.ask("GET", STAFF).json()["persons"]
    more = [live.ask("POST", PERSONS, body(20 + number)) for number in range(6 - there)]
    assert [answer.status_code for answer in more] == [201] * (5 - there) + [507]
    step(live, "cut-over", {"max_loss": 1, "threshold": 0.5})
    assert live.ask("POST", PERSONS, body(30)).status_code == 507
    for answer in more[:-1]:
        assert live.ask("DELETE", f"{PERSONS}/{answer.json()['id']}").status_code == 204
    step(live, "roll-back")
    assert live.ask("GET", STAFF).json()["persons"] == there


def test_pictures_sent_again_during_a_cut_over_are_compared_in_the_space_that_is_searched_then(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    assign, models = filling.assign_pictures, list[str]()

    def assign_late(store: Any, *args: Any) -> list[int]:
        if not models:  # the pictures were embedded before
            moving.cut_over(store, "staff", None, 1)
        models.append(args[-1][0])
        return assign(store, *args)

    monkeypatch.setattr(filling, "assign_pictures", assign_late)
    sent = live.ask("POST", f"{MOVE}/persons/1/pictures", {"faces": [image_input(picture(0))]})
    assert (sent.status_code, sent.json(), models) == (200, {"faces": [1]}, [CONTRACT, NEW])
    step(live, "roll-back")
    assert found(live, 0) == (CONTRACT, [1])


def test_what_is_learned_or_judged_is_of_one_pair_of_spaces(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    both = filling._both

    def exchanged_first(store: Any, *args: Any) -> Any:
        store.exchange_spaces("staff", store.migration("staff").contract_id)
        return both(store, *args)

    monkeypatch.setattr(filling, "_both", exchanged_first)
    for name in ("estimate", "judge"):
        answer = live.ask("POST", f"{MOVE}/{name}")
        assert answer.status_code == 409, answer.text
        step(live, "roll-back")


def test_who_expires_leaves_both_spaces(live: Live) -> None:
    before = live.ask("GET", MOVE).json()
    soon = (datetime.now(UTC) + timedelta(seconds=6)).isoformat()
    made = live.ask("POST", PERSONS, body(40, expires=soon)).json()
    both = live.service.store.face_vectors("staff", made["id"])[made["faces"][0]["id"]]
    assert both.second is not None
    needles = [row.tobytes()[:16] for row in (both.searched, both.second.vector)]
    assert [len(row) for row in (both.searched, both.second.vector)] == [Linear.embedding_dim, NextLinear.embedding_dim]
    assert all(np.linalg.norm(row) == pytest.approx(1, abs=1e-6) for row in (both.searched, both.second.vector))
    assert all(left(live, needles))
    wait_until(lambda: live.ask("GET", MOVE).json()["faces"] == before["faces"])
    assert found(live, 40) == (CONTRACT, [])
    step(live, "cut-over", {"max_loss": 1, "threshold": 0.5})
    assert found(live, 40) == (NEW, [])
    assert live.ask("GET", MOVE).json()["lacking"] == 0
    assert live.ask("POST", f"{STAFF}/compact").status_code == 200
    assert not any(left(live, needles))


def left(live: Live, needles: list[bytes]) -> list[bool]:
    """Whether any file of the store holds each of ``needles``."""
    content = content_of(Path(live.folder) / "store").values()
    return [any(needle in one for one in content) for needle in needles]
