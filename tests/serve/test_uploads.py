"""Pictures sent as files: one as the body itself, several in a form as curl -F and httpx make it."""

import io
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.live_service import Live, image_input, live_service, picture
from support.pictures import smooth, stored

from plsc.serve import decoding
from plsc.serve.settings import MIB, Limits

pytestmark = pytest.mark.live

FILES = [picture(seed, kind="JPEG") for seed in range(3)]
LANDMARKS = [[4.0, 5.0], [11.0, 5.0], [8.0, 8.0], [5.0, 11.0], [11.0, 11.0]]
BOUNDARY = "----x"
FORM = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live_service(tmp_path_factory.mktemp("uploads"), limits=Limits(inputs=4, body_bytes=MIB)) as running:
        running.collection("staff")
        yield running


PERSONS = "/v1/collections/staff/persons"


def vectors_of(live: Live, person: dict[str, Any]) -> np.ndarray:
    found: np.ndarray = live.service.store.vectors("staff", person["id"])
    return found


def expected(live: Live, *files: bytes, **options: Any) -> np.ndarray:
    body = {"inputs": [{**image_input(data), **options} for data in files]}
    vectors = np.array(live.ask("POST", "/v1/embeddings", body).json()["embeddings"])
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def test_a_form_enrols_as_json_does(live):
    files = [("image", ("a.jpg", FILES[0], "image/jpeg")), ("image", ("b", FILES[1]))]
    form = {
        "name": "Ada ✓",
        "metadata": '{"city": "Bern", "age": 31}',
        "external_id": "E-1",
        "expires": "2090-01-31T00:00:00.000Z",
    }
    answer = live.http.post(PERSONS, data=form, files=files)
    assert answer.status_code == 201, answer.text
    person = answer.json()
    told = {key: person[key] for key in form}
    assert told == {**form, "metadata": {"city": "Bern", "age": 31}}
    assert np.allclose(vectors_of(live, person), expected(live, *FILES[:2]), atol=1e-5)
    put = live.http.put(f"{PERSONS}/by-external-id/E-1", data={"name": "Ada L."}, files=files[:1])
    assert (put.status_code, put.json()["name"], len(put.json()["faces"])) == (200, "Ada L.", 1)
    added = live.http.post(f"{PERSONS}/{person['id']}/faces", files=files)
    assert (added.status_code, len(added.json()["faces"])) == (201, 2)


def test_a_picture_is_the_body_itself(live):
    options = {"name": "Grace", "metadata": '{"city": "Rome"}', "external_id": "E 2"}
    answer = live.ask("POST", PERSONS, content=FILES[2], headers={"Content-Type": "image/png"}, params=options)
    assert answer.status_code == 201, answer.text
    assert (answer.json()["name"], answer.json()["metadata"]) == ("Grace", {"city": "Rome"})
    assert np.allclose(vectors_of(live, answer.json()), expected(live, FILES[2]), atol=1e-5)
    assert live.ask("POST", PERSONS, content=FILES[2], headers={"Content-Type": "image/jpeg"}).status_code == 201
    embedded = live.ask("POST", "/v1/embeddings", content=FILES[2], headers={"Content-Type": "image/webp"})
    assert len(embedded.json()["embeddings"]) == 1


def test_forms_are_searched_compared_and_embedded(live):
    place = live.collection("searched")
    for number, data in enumerate(FILES):
        live.http.post(f"{place}/persons", data={"name": f"p{number}"}, files={"image": data})
    files = [("image", FILES[2]), ("image", FILES[0])]
    found = live.http.post(f"{place}/search?k=2&threshold=2", data={"k": "1", "threshold": "0.9"}, files=files).json()
    assert [[match["person"]["name"] for match in result["matches"]] for result in found["results"]] == [["p2"], ["p0"]]
    same = live.http.post("/v1/compare", files={"a": FILES[0], "b": FILES[0]})
    assert same.json()["score"] == pytest.approx(1)
    form = {"landmarks": json.dumps(LANDMARKS)}
    aligned = live.http.post("/v1/embeddings", data=form, files={"image": FILES[0]}).json()["embeddings"]
    aligned /= np.linalg.norm(aligned)
    assert np.allclose(aligned, expected(live, FILES[0], landmarks=LANDMARKS), atol=1e-5)
    assert not np.allclose(aligned, expected(live, FILES[0]), atol=1e-2)


def test_a_form_sent_again_under_its_key_is_done_once(live):
    """curl makes another boundary each time."""
    place = live.collection("again")
    answers = [
        live.http.post(
            f"{place}/persons", data={"name": "Eve"}, files={"image": FILES[0]}, headers={"Idempotency-Key": "e"}
        )
        for _ in range(2)
    ]
    assert answers[0].request.headers["Content-Type"] != answers[1].request.headers["Content-Type"]
    assert [answer.status_code for answer in answers] == [201, 201]
    assert answers[0].json() == answers[1].json()
    other = live.http.post(
        f"{place}/persons", data={"name": "Eva"}, headers={"Idempotency-Key": "e"}, files={"image": b""}
    )
    assert other.status_code == 422


def form(*parts: tuple[str, bytes]) -> bytes:
    heads = [(f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n').encode() for name, _ in parts]
    whole = b"".join(head + content + b"\r\n" for head, (_, content) in zip(heads, parts, strict=True))
    return whole + f"--{BOUNDARY}--\r\n".encode()


IMAGE = ("image", FILES[0])


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"", 400, "Field required"),
        (b"x", 400, "does not begin with its boundary"),
        (form(IMAGE)[:-8], 400, "part 1 has no head, or no end"),
        (form(IMAGE).replace(b'name="image"', b'filename="name=image"'), 400, "a part has no name"),
        (form(("x" * 5000, b"")), 400, "part 1 has no head"),
        (form(("picture", FILES[0])), 400, "'picture' is not known, or twice there; send image, landmarks, face, name"),
        (form(IMAGE, ("name", b"a"), ("name", b"b")), 400, "twice"),
        (form(IMAGE, ("name", b"\xff")), 400, "name is not UTF-8"),
        (form(IMAGE, ("metadata", b"{")), 400, "metadata is not JSON"),
        (form(IMAGE, ("metadata", b"[1]")), 400, "metadata"),
        (form(IMAGE, ("landmarks", b"[]"), ("landmarks", b"[]")), 400, "2 landmarks for 1 images"),
        (form(IMAGE, ("landmarks", b"[[1, 2]]")), 400, "faces.0.landmarks"),
        (form(*[IMAGE] * 3, ("face", b"1"), ("face", b"2")), 400, "2 face for 3 images"),
        (form(IMAGE, ("face", b"first")), 400, "faces.0.face"),
        (form(*[IMAGE] * 5), 413, "at most 4"),
        (form(*[("name", b"")] * 50), 413, "more than 40 parts"),
        (form(("image", b"GIF89a")), 415, "faces[0] is no JPEG, PNG, WEBP or AVIF image, nor HEIC"),
        (form(("image", FILES[0][:200])), 422, "faces[0] does not decode"),
    ],
)
def test_a_wrong_form_is_refused_by_what_is_wrong(live, body, status, said):
    before = live.ask("GET", "/v1/collections/staff").json()["persons"]
    answer = live.ask("POST", PERSONS, content=body, headers=FORM)
    assert (answer.status_code, said in answer.json()["error"]["message"]) == (status, True), answer.text
    assert live.ask("GET", "/v1/collections/staff").json()["persons"] == before


@pytest.mark.parametrize(
    ("path", "kind", "said"),
    [
        (PERSONS, "multipart/form-data", "let your client set the type"),
        (PERSONS, "image/gif", "the body is image/gif; send it with Content-Type: image/jpeg, image/png"),
        (PERSONS, "application/x-www-form-urlencoded", "which curl says of itself"),
        (PERSONS, "", "the body is of no type"),
        ("/v1/compare", "image/jpeg", "multipart/form-data with the files a and b"),
        ("/v1/collections", "multipart/form-data", "send it with Content-Type: application/json"),
    ],
)
def test_a_wrong_type_is_told_the_right_ones(live, path, kind, said):
    answer = live.ask("POST", path, content=FILES[0], headers={"Content-Type": kind})
    assert answer.status_code == (400 if kind == "multipart/form-data" and path == PERSONS else 415)
    assert said in answer.json()["error"]["message"], answer.text


def test_avif_of_twelve_megapixels_is_read(live):
    data = stored(smooth(4032, 3024), "AVIF", speed=10)
    read = live.ask("POST", PERSONS, content=data, headers={"Content-Type": "image/avif"})
    assert (read.status_code, len(read.json()["faces"])) == (201, 1), read.text


def test_photos_of_iphones_are_read_where_the_service_can(live, monkeypatch):
    pillow_heif = pytest.importorskip("pillow_heif")
    file = io.BytesIO()
    pillow_heif.from_pillow(smooth(4032, 3024)).save(file, quality=60)
    data = file.getvalue()
    assert len(data) < MIB
    sent = {"content": data, "headers": {"Content-Type": "image/heic"}}
    read = live.ask("POST", PERSONS, **sent, params={"name": "Ada"})
    assert (read.status_code, len(read.json()["faces"])) == (201, 1), read.text
    monkeypatch.setattr(decoding, "unread_formats", lambda: {"HEIF": "pip install plsc-torch[heic] reads them"})
    for path in (PERSONS, "/v1/collections/staff/search"):
        refused = live.ask("POST", path, **sent)
        message = refused.json()["error"]["message"]
        assert (refused.status_code, "HEIC: on the server, pip install" in message) == (415, True)
