"""The service through HTTP: what is enrolled is found, as a dictionary and float64 say; what is wrong is told."""

import io
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from PIL import Image
from support.live_service import CONTRACT, DIM, SIZE, image_input, linear_embedder, live_service, picture, vectors
from support.waiting import wait_until

from plsc.data.alignment import TEMPLATE, align_face
from plsc.data.codec import decode_image
from plsc.embedding.detector import Detector, Face
from plsc.models.preprocessing import resize_image
from plsc.serve.errors import ApiError
from plsc.serve.schemas import check_direction

pytestmark = pytest.mark.live

THRESHOLD = 0.6
SETTINGS = {"threshold": THRESHOLD, "metrics_port": 0}


def unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


def oracle(people: dict[int, np.ndarray], query: np.ndarray, k: int, threshold: float = -1) -> list[tuple[int, float]]:
    scores = {person: float((unit(faces) @ unit(query)).max()) for person, faces in people.items()}
    best = sorted(scores.items(), key=lambda item: -item[1])
    return [(person, score) for person, score in best if score >= threshold][:k]


def test_search_is_what_float64_says(live):
    place = live.collection("exact")
    generator = np.random.default_rng(3)
    faces = [vectors(int(generator.integers(1, 4)), seed) for seed in range(40)]
    enrolled = [
        {"faces": [{"vector": row.tolist()} for row in rows], "metadata": {"even": seed % 2 == 0}}
        for seed, rows in enumerate(faces)
    ]
    persons = live.ask("POST", f"{place}/persons", {"persons": enrolled}).json()["persons"]
    everybody = {person["id"]: rows for person, rows in zip(persons, faces, strict=True)}
    even = {person["id"]: rows for person, rows in list(zip(persons, faces, strict=True))[::2]}
    queries = vectors(5, 77)
    asked = {"queries": [{"vector": row.tolist()} for row in queries], "k": 7}
    for extra, people, threshold in (
        ({}, everybody, -1.0),
        ({"filter": {"even": True}}, even, -1.0),
        ({"threshold": 0.3}, everybody, 0.3),
    ):
        answer = live.ask("POST", f"{place}/search", {**asked, **extra}).json()
        for row, result in zip(queries, answer["results"], strict=True):
            expected = oracle(people, row, 7, threshold)
            assert [match["person"]["id"] for match in result["matches"]] == [person for person, _ in expected]
            scores = [match["score"] for match in result["matches"]]
            assert scores == pytest.approx([score for _, score in expected], abs=1e-5)
        assert answer["threshold"] == extra.get("threshold", THRESHOLD)
        assert (answer["approximate"], answer["recall"]) == (False, 1.0)


def test_the_recall_of_a_collection_that_was_just_made_is_known(live):
    asked = {"query": {"vector": vectors(1, 0)[0].tolist()}}
    for name in ("older", "newer"):  # the statistics of the first search are remembered for a second
        assert live.ask("POST", f"{live.collection(name)}/search", asked).json()["recall"] == 1.0


def test_the_recall_of_an_approximate_search_is_told_for_what_it_was_measured_for(live, monkeypatch):
    place = live.collection("approximate")

    async def statistics(collection):
        return {"approximate": True, "recall": 0.97}

    monkeypatch.setattr(live.service, "statistics", statistics)
    for k, recall in ((1, 0.97), (10, 0.97), (11, None), (100, None)):
        answer = live.ask("POST", f"{place}/search", {"query": {"vector": [1.0] * DIM}, "k": k}).json()
        assert (answer["approximate"], answer["recall"]) == (True, recall)


def test_every_form_of_a_query_finds_the_same(live):
    place = live.collection("forms")
    live.ask("POST", f"{place}/persons", {"persons": [{"faces": [image_input(picture(seed))]} for seed in range(9)]})
    data = picture(4, kind="WEBP")
    vector = live.ask("POST", "/v1/embeddings", {"inputs": [image_input(data)]}).json()["embeddings"][0]
    raw = live.ask("POST", f"{place}/search", content=data, headers={"Content-Type": "image/webp"}, params={"k": 4})
    forms = [{"query": image_input(data)}, {"query": {"vector": vector}}, {"queries": [image_input(data)]}]
    answers = [raw.json(), *(live.ask("POST", f"{place}/search", {**form, "k": 4}).json() for form in forms)]
    assert len(answers[0]["results"][0]["matches"]) == 4
    for answer in answers[1:]:
        ours, theirs = (one["results"][0]["matches"] for one in (answer, answers[0]))
        assert [match["face"] for match in ours] == [match["face"] for match in theirs]
        assert [match["score"] for match in ours] == pytest.approx([match["score"] for match in theirs], abs=1e-6)


def test_options_of_a_search_in_json_count_in_the_query_string_too(live):
    place = live.collection("options")
    persons = [{"metadata": {"n": n}, "faces": [image_input(picture(1))]} for n in range(9)]
    live.ask("POST", f"{place}/persons", {"persons": persons})

    def matches(query: str, **body: object) -> int:
        answer = live.ask("POST", f"{place}/search?{query}", {"query": image_input(picture(1)), **body})
        assert answer.status_code == 200, answer.text
        return len(answer.json()["results"][0]["matches"])

    assert (matches(""), matches("k=2"), matches("k=2", k=4)) == (9, 2, 4)
    assert matches("threshold=1&k=3", threshold=-1.0) == 3
    assert matches('filter={"n":{"gte":7}}') == 2
    for query, told in (("k=0", "k"), ("threshold=AAA", "threshold"), ("filter={", "the filter is not JSON")):
        wrong = live.ask("POST", f"{place}/search?{query}", {"query": image_input(picture(1))})
        assert (wrong.status_code, told in wrong.json()["error"]["message"]) == (400, True), query
    listed = live.ask("GET", f"{place}/persons?filter=x").json()["error"]["message"]
    assert listed.startswith("the filter is not JSON")


def embedded(image: torch.Tensor) -> np.ndarray:
    return linear_embedder()(image[None]).numpy()[0].astype(np.float64)


def test_embeddings_are_the_models_and_landmarks_align(live):
    large = picture(5, size=40)
    image = decode_image(large, "large")
    points = (TEMPLATE * 40 / 112 + [2, 1]).tolist()
    given = [image_input(large), {**image_input(large), "landmarks": points}]
    answer = live.ask("POST", "/v1/embeddings", {"inputs": given}).json()
    assert (answer["contract_id"], answer["dim"]) == (CONTRACT, DIM)
    expected = [embedded(resize_image(image, SIZE)), embedded(align_face(image, points, SIZE))]
    assert np.allclose(answer["embeddings"], expected, rtol=1e-5, atol=1e-5)
    assert not np.allclose(expected[0], expected[1], atol=0.1)


def test_compare_judges_by_the_threshold(live):
    one, near, far = vectors(3, 5)
    near = one + 0.1 * near
    for other in (near, far, -one):
        body = {"a": {"vector": one.tolist()}, "b": {"vector": other.tolist()}}
        answer = live.ask("POST", "/v1/compare", body).json()
        score = float(unit(one) @ unit(other))
        assert answer["score"] == pytest.approx(score, abs=1e-6)
        assert (answer["threshold"], answer["same_person"]) == (THRESHOLD, score >= THRESHOLD)


def test_pages_of_persons_are_all_of_them_once(live):
    place = live.collection("pages")
    many = [{"name": f"p{number}", "metadata": {"third": number % 3 == 0}} for number in range(25)]
    live.ask("POST", f"{place}/persons", {"persons": many})
    for filter, expected in ((None, many), ({"third": True}, many[::3])):
        names, after = [], 0
        while after is not None:
            params = {"limit": 4, "after": after, **({} if filter is None else {"filter": json.dumps(filter)})}
            page = live.ask("GET", f"{place}/persons", params=params).json()
            assert len(page["persons"]) <= 4
            names += [person["name"] for person in page["persons"]]
            after = page["next"]
        assert names == [person["name"] for person in expected]


def test_all_or_none_are_enrolled(live):
    place = live.collection("whole")
    good = {"faces": [{"vector": [1.0] * DIM}]}
    for bad, status in (
        ({"faces": [{"vector": [0.0] * DIM}]}, 422),
        ({"faces": [{"vector": [1.0]}]}, 422),
        ({"faces": [image_input(b"\x89PNG\r\n\x1a\nbroken")]}, 422),
        ({"faces": [image_input(b"GIF89a")]}, 415),
        ({"faces": [{"image": "no base64!"}]}, 422),
        ({"metadata": {"a": None}}, 400),
        ({"metadata": {"": 1}}, 400),
    ):
        refused = live.ask("POST", f"{place}/persons", {"persons": [good, bad]})
        assert refused.status_code == status, refused.text
        assert live.ask("GET", place).json()["persons"] == 0


POINTS = [[1.0, 2.0]] * 5
SEARCH = "/v1/collections/wrong/search"
WRONG = [
    ("GET", "/v1/collections/nobody", None, 404, "not_found"),
    ("GET", "/v1/nothing", None, 404, "not_found"),
    ("PUT", "/v1/collections", {}, 405, "method_not_allowed"),
    ("POST", "/v1/collections", {"name": "-bad"}, 400, "bad_request"),
    ("POST", "/v1/collections", {"name": "x", "dim": 3}, 400, "bad_request"),
    ("POST", "/v1/collections", {"name": "wrong"}, 409, "conflict"),
    ("GET", "/v1/collections/wrong/persons/1.5", None, 400, "bad_request"),
    ("GET", "/v1/collections/wrong/persons/99999999999999999999", None, 400, "bad_request"),
    ("GET", "/v1/collections/wrong/persons/77", None, 404, "not_found"),
    ("GET", "/v1/collections/wrong/persons?limit=0", None, 400, "bad_request"),
    ("GET", "/v1/collections/wrong/persons?filter={", None, 400, "bad_request"),
    ("GET", '/v1/collections/wrong/persons?filter={"a":{"near":1}}', None, 400, "bad_request"),
    ("DELETE", "/v1/collections/wrong/persons/1/faces/1", None, 404, "not_found"),
    ("DELETE", "/v1/snapshots/..%2Fstore", None, 404, "not_found"),
    ("DELETE", "/v1/snapshots/..", None, 404, "not_found"),
    ("POST", SEARCH, {}, 400, "bad_request"),
    ("POST", SEARCH, {"query": {}}, 400, "bad_request"),
    ("POST", SEARCH, {"query": {"vector": ["1"] * DIM}}, 400, "bad_request"),
    ("POST", SEARCH, {"query": {"vector": [1.0]}}, 422, "unprocessable"),
    ("POST", SEARCH, {"query": {"vector": [1e39] * DIM}}, 422, "unprocessable"),
    ("POST", SEARCH, {"query": {"vector": [10**400] * DIM}}, 400, "bad_request"),
    ("POST", SEARCH, {"query": {"vector_b64": "AAAA"}}, 422, "unprocessable"),
    ("POST", SEARCH, {"query": {"vector": [1.0] * DIM}, "k": 10**6}, 400, "bad_request"),
    ("POST", SEARCH, {"query": {"vector": [1.0] * DIM}, "k": 0}, 400, "bad_request"),
    ("POST", SEARCH, {"query": {"vector": [1.0] * DIM}, "filter": 3}, 400, "bad_request"),
    ("POST", SEARCH, {"query": {"url": "http://x/"}}, 400, "bad_request"),
    ("POST", "/v1/compare", {"a": {"path": "/etc/passwd"}, "b": {}}, 400, "bad_request"),
    ("POST", "/v1/embeddings", {"inputs": []}, 400, "bad_request"),
    ("POST", "/v1/embeddings", {"inputs": [{"vector": [1.0] * DIM, "landmarks": POINTS}]}, 400, "bad_request"),
    ("POST", "/v1/embeddings", {"inputs": [{**image_input(picture(1)), "landmarks": POINTS}]}, 422, "unprocessable"),
]


def test_what_is_wrong_is_told_in_one_line(live):
    live.collection("wrong")
    for method, path, body, status, code in WRONG:
        answer = live.ask(method, path, body)
        assert answer.status_code == status, (path, body, answer.text)
        error = answer.json()["error"]
        assert error["code"] == code, (path, error)
        assert error["message"], path
        assert "\n" not in error["message"], path


def test_bodies_that_are_no_json_of_ours(live):
    place = live.collection("bodies")
    for content, kind, status in (
        (b"{", "application/json", 400),
        (b'{"query": {"vector": [NaN]}}', "application/json", 400),
        (b"[" * 5_000, "application/json", 400),
        (b"[" * 100_000, "application/json", 413),
        (b"\xff\xfe", "application/json", 400),
        (b'{"k": 1}', "text/plain", 415),
        (b"\x80\x04K\x01.", "application/octet-stream", 415),
        (b"GIF89a", "image/gif", 415),
        (b"GIF89a", "image/png", 415),
        (b"", "image/png", 415),
    ):
        answer = live.ask("POST", f"{place}/search", content=content, headers={"Content-Type": kind})
        assert (answer.status_code, len(answer.json()["error"]["message"]) > 10) == (status, True), content[:10]


def test_another_models_collection_is_not_mixed_with(live):
    live.service.store.create_collection("foreign", DIM, "another contract")
    for path, body in (("search", {"query": {"vector": [1.0] * DIM}}), ("persons", {"faces": []})):
        assert live.ask("POST", f"/v1/collections/foreign/{path}", body).status_code == 409
    assert live.ask("GET", "/v1/collections/foreign").status_code == 200


def test_of_two_who_delete_a_snapshot_one_does(live, monkeypatch):
    path = f"/v1/snapshots/{live.ask('POST', '/v1/snapshots').json()['id']}"
    look, both = live.service.snapshots._paths, threading.Barrier(2)

    def look_together() -> list[Path]:
        found = list(look())
        both.wait(120)
        return found

    monkeypatch.setattr(live.service.snapshots, "_paths", look_together)
    with ThreadPoolExecutor(2) as threads:
        deleting = [threads.submit(live.ask, "DELETE", path) for _ in range(2)]
        assert sorted(each.result().status_code for each in deleting) == [204, 404]
    gone = live.folder / "snapshots/20200101T000000000000Z"  # deleted by another since it was looked up
    monkeypatch.setattr(live.service.snapshots, "_paths", lambda: [gone])
    assert live.ask("GET", "/v1/snapshots").json() == {"snapshots": []}


def test_snapshots_and_compaction(live):
    place = live.collection("kept")
    live.ask("POST", f"{place}/persons", {"faces": [{"vector": [1.0] * DIM}]})
    assert live.ask("POST", f"{place}/compact").json()["collection"] == "kept"
    assert live.ask("POST", "/v1/collections/nobody/compact").status_code == 404
    taken = live.ask("POST", "/v1/snapshots")
    assert taken.status_code == 201
    listed = live.ask("GET", "/v1/snapshots").json()["snapshots"]
    assert listed == [taken.json()]
    assert taken.json()["bytes"] > 0
    assert live.ask("DELETE", f"/v1/snapshots/{taken.json()['id']}").status_code == 204
    assert live.ask("GET", "/v1/snapshots").json() == {"snapshots": []}
    assert not list((live.folder / "snapshots").iterdir())


def test_writes_leave_a_line_of_audit_without_what_is_private(live):
    place = live.collection("audited")
    body = {"name": "Margaret", "metadata": {"secret": "tea"}, "faces": [{"vector": [0.5] * DIM}]}
    person = live.ask("POST", f"{place}/persons", body).json()
    live.ask("POST", f"{place}/search", {"query": {"vector": [0.5] * DIM}})
    live.ask("DELETE", f"{place}/persons/{person['id'] + 5}")
    live.ask("DELETE", f"{place}/persons/{person['id']}")
    text = (live.folder / "audit.jsonl").read_text(encoding="utf-8")
    assert not {"Margaret", "tea", "secret", "0.5"} & set(text.replace('"', " ").split())
    lines = [json.loads(line) for line in text.splitlines()]
    ours = [(line["operation"], line["ids"], line["status"]) for line in lines if line.get("collection") == "audited"]
    assert ours == [
        ("add_persons", [person["id"]], 201),
        ("delete_person", [person["id"] + 5], 404),
        ("delete_person", [person["id"]], 204),
    ]
    assert all(line.get("token") is None and line["time"].endswith("Z") for line in lines)


def test_health_info_and_metrics(live):
    assert live.ask("GET", "/health/live").json() == {"status": "live"}
    assert live.ask("GET", "/health/ready").json() == {"status": "ready"}
    info = live.ask("GET", "/v1/info").json()
    assert info["model"] == {"source": "linear", "contract_id": CONTRACT, "embedding_dim": DIM, "image_size": SIZE}
    assert (info["threshold"], info["role"], info["detector"]) == (THRESHOLD, "admin", False)
    assert (info["item"], info["items"]) == ("person", "people")
    live.ask("POST", f"{live.collection('measured')}/search", {"query": {"vector": [1.0] * DIM}})
    address = live.server.metrics_address
    lines = (
        'plsc_requests_total{method="POST",route="/v1/collections/{collection}/search",status="200"}',
        'plsc_batch_rows_count{kind="search"}',
        'plsc_stage_seconds_count{stage="search"}',
        "plsc_store_up 1.0",
        "plsc_search_queue_rows 0.0",
        'plsc_collection_rows{collection="measured"}',
        "plsc_in_flight 0.0",
    )
    # A request is counted just after its answer.
    wait_until(lambda: all(line in httpx.get(address).text for line in lines))
    for path in ("/", "/v1/info", "/metrics/x", "/health/live"):
        assert httpx.get(address.removesuffix("/metrics") + path).status_code == 404
    assert live.ask("GET", "/metrics").status_code == 404


class OneFace(Detector):
    """Finds a face with known landmarks, unless the picture is small."""

    fingerprint = "one"
    points = TEMPLATE * 40 / 112

    def find(self, image: torch.Tensor) -> list[Face]:
        """See :meth:`Detector.find`."""
        return [Face(np.array([0, 0, 40, 40]), 0.9, self.points)] if image.shape[1] >= 40 else []


def test_a_detector_finds_the_face_unless_landmarks_are_given(tmp_path: Path):
    large, other = picture(6, size=40), (TEMPLATE * 30 / 112 + 3).tolist()
    image = decode_image(large, "large")
    with live_service(tmp_path, OneFace()) as live:
        given = [image_input(large), {**image_input(large), "landmarks": other}]
        answer = live.ask("POST", "/v1/embeddings", {"inputs": given}).json()["embeddings"]
        assert live.ask("GET", "/v1/info").json()["detector"] is True
        none = live.ask("POST", "/v1/embeddings", {"inputs": [image_input(picture(6))]})
        assert (none.status_code, none.json()["error"]["code"]) == (422, "unprocessable")
        assert "inputs[0]: no face" in none.json()["error"]["message"]
    expected = [embedded(align_face(image, points, SIZE)) for points in (OneFace.points, other)]
    assert np.allclose(answer, expected, rtol=1e-5, atol=1e-5)


def test_vectors_need_a_direction_though_their_squares_may_leave_float32():
    for number in (1e-38, 1e38, -1e30, 1e-45):
        check_direction(np.full(512, number, dtype=np.float32), "it")
    for number, told in ((np.nan, "NaN"), (np.inf, "NaN or infinity"), (0, "zero")):
        with pytest.raises(ApiError, match=told):
            check_direction(np.full(512, number, dtype=np.float32), "it")


def test_a_field_that_nobody_has_is_named_where_a_filter_finds_nobody(live):
    place = live.collection("typos")
    people = [{"name": "Ada", "metadata": {"set": "lfw", "height": 3}, "faces": [{"vector": [1.0] * DIM}]}]
    assert live.ask("POST", f"{place}/persons", {"persons": people}).is_success

    def found(filter: dict) -> tuple[dict, dict]:
        body = {"query": {"vector": [1.0] * DIM}, "filter": filter}
        listed = live.ask("GET", f"{place}/persons", params={"filter": json.dumps(filter)})
        return live.ask("POST", f"{place}/search", body).json(), listed.json()

    for typo in ({"set lfw": {"exists": True}}, {"set lfw": "x", "height": 3}):
        for answer in found(typo):
            assert answer["warnings"] == ['nothing here has a field "set lfw"; fields: height, set']
    for wrong, told in (
        ({"height": {"gt": "tall"}}, 'the field "height" is never text, and is compared with "tall"'),
        ({"height": True, "set": "lfw"}, 'the field "height" is never true or false, and is compared with true'),
        ({"set": {"lte": 3}}, 'the field "set" is never a number, and is compared with 3'),
    ):
        for answer in found(wrong):
            assert answer["warnings"] == [told]
    for fine in ({"set": "lfw"}, {"set": "other"}, {"height": {"gt": 5}}):
        for answer in found(fine):
            assert "warnings" not in answer
    assert live.ask("GET", f"{place}/persons").json()["persons"][0]["name"] == "Ada"
    assert "warnings" not in live.ask("GET", f"{live.collection('nobody')}/persons").json()


def encoded(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def test_a_picture_that_is_no_crop_gets_a_warning_and_its_answer(live):
    place = live.collection("doubtful")
    wide = encoded(np.random.default_rng(0).integers(0, 256, (20, 40, 3), dtype=np.uint8))
    wide_told = "40x20 pixels are not square; give an aligned crop"
    dark = encoded(np.full((SIZE, SIZE, 3), 9, dtype=np.uint8))
    dark_told = "it is nearly uniform; give an aligned crop"
    bad, good = image_input(wide), image_input(picture(1))

    one = live.ask("POST", f"{place}/persons", {"name": "Ada", "faces": [good, bad]}).json()
    assert one["warnings"] == [f"faces[1]: {wide_told}"]
    several = {"persons": [{"faces": [good]}, {"faces": [image_input(dark)]}]}
    assert live.ask("POST", f"{place}/persons", several).json()["warnings"] == [f"persons[1].faces[0]: {dark_told}"]
    path = f"{place}/persons/{one['id']}"
    assert live.ask("POST", f"{path}/faces", {"faces": [bad]}).json()["warnings"] == [f"faces[0]: {wide_told}"]
    assert "warnings" not in live.ask("POST", f"{path}/faces", {"faces": [good]}).json()
    assert "warnings" not in live.ask("GET", path).json()

    searched = live.ask("POST", f"{place}/search", {"queries": [good, bad]}).json()
    assert searched["warnings"] == [f"queries[1]: {wide_told}"]
    assert len(searched["results"]) == 2
    assert "warnings" not in live.ask("POST", f"{place}/search", {"query": good}).json()
    raw = live.http.post(f"{place}/search", content=wide, headers={"Content-Type": "image/png"})
    assert raw.json()["warnings"] == [f"the body: {wide_told}"]
    assert live.ask("POST", "/v1/compare", {"a": bad, "b": good}).json()["warnings"] == [f"a: {wide_told}"]
    assert "warnings" not in live.ask("POST", "/v1/compare", {"a": good, "b": good}).json()
    assert live.ask("POST", "/v1/embeddings", {"inputs": [bad]}).json()["warnings"] == [f"inputs[0]: {wide_told}"]
    points = (TEMPLATE * SIZE / 112 + 2).tolist()
    aligned = {"a": {**bad, "landmarks": points}, "b": good}
    assert "warnings" not in live.ask("POST", "/v1/compare", aligned).json()  # it is cut to a crop


@pytest.mark.slow
def test_thumbnails_are_kept_shown_and_deleted_only_where_they_are_asked_for(tmp_path, live):
    assert live.ask("GET", "/v1/info").json()["thumbnails"] is False
    place = live.collection("plain")
    face = live.ask("POST", f"{place}/persons", {"faces": [image_input(picture(1))]}).json()
    assert live.ask("GET", f"{place}/persons/{face['id']}/faces/{face['faces'][0]['id']}/thumbnail").status_code == 404
    with live_service(tmp_path, thumbnails=tmp_path / "thumbnails", keep_thumbnails=True) as keeping:
        assert keeping.ask("GET", "/v1/info").json()["thumbnails"] is True
        place = keeping.collection("staff")
        wide = encoded(np.full((20, 40, 3), 130, dtype=np.uint8))
        people = [{"faces": []}, {"faces": [{"vector": [1.0] * DIM}, image_input(picture(1))]}]
        _, ada = keeping.ask("POST", f"{place}/persons", {"persons": people}).json()["persons"]
        path = f"{place}/persons/{ada['id']}"
        added = keeping.ask("POST", f"{path}/faces", {"faces": [image_input(wide)]}).json()["faces"]
        answers = [keeping.ask("GET", f"{path}/faces/{one['id']}/thumbnail") for one in [*ada["faces"], *added]]
        assert [answer.status_code for answer in answers] == [404, 200, 200]
        assert answers[1].headers["content-type"] == "image/jpeg"
        assert answers[1].headers["cache-control"] == "no-store"
        assert decode_image(answers[2].content, "it").shape == (3, SIZE, SIZE)
        assert keeping.ask("DELETE", f"{path}/faces/{added[0]['id']}").status_code == 204
        assert keeping.ask("GET", f"{path}/faces/{added[0]['id']}/thumbnail").status_code == 404
        assert keeping.ask("POST", f"{place}/compact").is_success
        assert len(list((tmp_path / "thumbnails").rglob("*.jpg"))) == 1
        assert keeping.ask("DELETE", place).status_code == 204
        assert list((tmp_path / "thumbnails").iterdir()) == []


@pytest.mark.parametrize("method", ["POST", "GET"])
def test_a_collections_name_is_refused_in_words(live, method):
    name, body = ("My Staff!", {"name": "My Staff!"}) if method == "POST" else ("1", None)
    answer = live.ask(method, "/v1/collections" if body else f"/v1/collections/{name}", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == (
        f"a collection's name begins with a letter and has letters, digits, _ . - only, 64 at most, unlike {name!r}"
    )
