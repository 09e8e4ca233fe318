"""Keys of faces over HTTP: shown with the faces, taken once, and answered alike when a request is sent again."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.live_service import Live, image_input, live_service, picture, vectors

import plsc
from plsc.client import NewPerson, Picture, ServerError

pytestmark = pytest.mark.live


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    with live_service(tmp_path, threshold=0.999) as running:
        yield running


def face(seed: int, key: str | None = None) -> dict[str, Any]:
    return {**image_input(picture(seed)), **({} if key is None else {"key": key})}


def test_a_face_is_shown_with_its_key_and_added_once(live: Live) -> None:
    place = live.collection("staff")
    body = {"name": "Ada", "external_id": "a", "faces": [face(1, "one"), face(2)]}
    sent = [live.ask("POST", f"{place}/persons", body, headers={"Idempotency-Key": "k"}) for _ in range(2)]
    first, again = (answer.json() for answer in sent)
    assert sent[1].headers["Idempotent-Replayed"] == "true"
    assert first == again
    assert first["faces"] == [{"id": first["faces"][0]["id"], "key": "one"}, {"id": first["faces"][1]["id"]}]
    more = {"faces": [face(1, "one"), face(2, "two"), face(3, "three"), {"vector": vectors(1)[0].tolist(), "key": "v"}]}
    answers = [live.ask("POST", f"{place}/persons/{first['id']}/faces", more).json()["faces"] for _ in range(2)]
    assert answers[0] == answers[1]
    assert answers[0][:2] == [{"id": shown["id"]} for shown in first["faces"]]
    now = live.ask("GET", f"{place}/persons/by-external-id/a").json()
    assert [shown["key"] for shown in now["faces"]] == ["one", "two", "three", "v"]
    assert live.ask("GET", f"{place}/persons").json()["persons"] == [now]
    known = live.ask("POST", f"{place}/persons?on_known=add", {"faces": [face(3, "three"), face(3, "other")]})
    assert (known.status_code, len(known.json()["faces"])) == (200, 5)


@pytest.mark.parametrize("wrong", ["", "a b", "é", "x" * 65])
def test_a_wrong_key_is_named(live: Live, wrong: str) -> None:
    place = live.collection("staff")
    refused = live.ask("POST", f"{place}/persons", {"faces": [face(1, wrong)]})
    assert (refused.status_code, "faces.0.key: a face's key is 1 to 64" in refused.json()["error"]["message"]) == (
        400,
        True,
    ), refused.text
    twice = live.ask("POST", f"{place}/persons", {"faces": [face(1, "k"), face(2, "k")]})
    assert (twice.status_code, "given twice" in twice.json()["error"]["message"]) == (400, True), twice.text
    assert live.ask("POST", f"{place}/search", {"query": face(1, "k")}).status_code == 400, "a query has none"


def test_the_client_gives_and_reads_keys(live: Live) -> None:
    with plsc.Client(live.server.address) as client:
        client.create_collection("staff")
        new = NewPerson("Ada", faces=[Picture(picture(1), key="one"), picture(2)])
        ada = client.enrol("staff", new)
        assert ada.keys == client.person("staff", ada.id).keys == {ada.faces[0]: "one"}
        assert client.add_faces("staff", ada.id, [Picture(picture(9), key="one")]) == [ada.faces[0]]
        assert next(client.persons("staff")).keys == ada.keys
        with pytest.raises(ServerError, match="key"):
            client.search("staff", Picture(picture(1), key="one"))
