"""What tokens may do inside the routes: collections, vectors in, embeddings out, and how exact scores are."""

from collections.abc import Iterator

import httpx
import numpy as np
import pytest
from support.live_service import Live, image_input, linear_embedder, live_service, picture, vectors

from plsc.serve.tokens import change_token, read_tokens

pytestmark = pytest.mark.live

STEP = 0.01
PERSONS = 12
CAMERA = {"role": "search", "collections": ["staff"]}


class Guarded:
    """A service with tokens, and the collections staff and guests."""

    def __init__(self, live: Live) -> None:
        self.live = live

    def ask(self, name: str, method: str, path: str, body: object = None) -> httpx.Response:
        return self.live.ask(method, path, body, by=name)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    callers = {
        "root": {"role": "admin"},
        "camera": CAMERA,
        "vector-camera": {**CAMERA, "allow": ["vectors"]},
        "embedder": {"role": "search", "allow": ["embeddings"]},
        "reader": {"role": "read"},
        "writer": {"role": "write", "collections": ["staff"]},
        "owner": {"role": "admin", "collections": ["guests"]},
    }
    threshold = float(np.median(exact_scores(78)))
    with live_service(tmp_path_factory.mktemp("rights"), callers=callers, threshold=threshold) as live:
        for name in ("staff", "guests"):
            live.collection(name)
            persons = [{"name": f"{name} {n}", "faces": [image_input(picture(n))]} for n in range(PERSONS)]
            assert live.ask("POST", f"/v1/collections/{name}/persons", {"persons": persons}).status_code == 201
        yield Guarded(live)


def test_who_may_not_list_persons_learns_of_no_field(guarded):
    patient = {"metadata": {"hiv_status": "negative", "salary": 90_000}, "faces": [image_input(picture(1))]}
    assert guarded.ask("root", "PUT", "/v1/collections/guests/persons/by-external-id/p", patient).status_code == 201
    place = "/v1/collections/guests"

    def search(name: str, filter: object) -> httpx.Response:
        return guarded.ask(name, "POST", f"{place}/search", {"query": image_input(picture(1)), "filter": filter})

    nobody = [{"hiv_status": "positive"}, {"salary": {"gt": "tall"}}, {"salary": True}, {"hiv": 1}, {"x": 1, "y": 2}]
    answers = {search("embedder", filter).content for filter in nobody}
    assert len(answers) == 1, "a field that nobody has is answered as one that nobody has so"
    for name in ("embedder", "reader"):
        info, one, all_ = (guarded.ask(name, "GET", path) for path in ("/openapi.json", place, "/v1/collections"))
        listed = guarded.ask(name, "GET", f"{place}/persons?filter=%7B%22hiv%22%3A1%7D")
        told = b"".join(answer.content for answer in (info, one, all_, search(name, {"hiv": 1}), listed))
        assert (b"hiv_status" in told) == (b"salary" in told) == (name == "reader")
        assert listed.status_code == (200 if name == "reader" else 403)
    (match, *_) = search("embedder", {"hiv_status": "negative"}).json()["results"][0]["matches"]
    assert match["person"]["external_id"] == "p"  # filters serve whoever knows the field
    assert guarded.ask("root", "DELETE", "/v1/collections/guests/persons/by-external-id/p").status_code == 204


def test_vectors_in_need_their_right(guarded):
    vector = {"vector": vectors(1)[0].tolist()}
    coded = {"vector_b64": "AACAPwAAgD8AAIA/AACAPwAAgD8AAIA/AACAPwAAgD8="}
    image = image_input(picture(1))
    bodies = {
        "/v1/collections/staff/search": [{"query": vector}, {"query": coded}, {"queries": [image, vector]}],
        "/v1/compare": [{"a": image, "b": vector}, {"a": coded, "b": image}],
    }
    for path, several in bodies.items():
        for body in several:
            refused = guarded.ask("camera", "POST", path, body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden"), (path, body)
            assert "--allow vectors" in refused.json()["error"]["message"]
            assert guarded.ask("reader", "POST", path, body).status_code == 403
            assert guarded.ask("vector-camera", "POST", path, body).status_code == 200
    place = "/v1/collections/staff/persons"
    for body in ({"faces": [vector]}, {"persons": [{"faces": [image]}, {"faces": [coded]}]}):
        assert guarded.ask("writer", "POST", place, body).status_code == 403
    assert guarded.ask("writer", "POST", f"{place}/1/faces", {"faces": [vector]}).status_code == 403
    assert guarded.ask("root", "GET", "/v1/collections/staff").json()["faces"] == PERSONS


def test_a_token_of_some_collections_knows_of_no_others(guarded):
    def listed(name: str) -> list[str]:
        return [one["name"] for one in guarded.ask(name, "GET", "/v1/collections").json()["collections"]]

    assert (listed("camera"), listed("owner"), listed("reader")) == (["staff"], ["guests"], ["guests", "staff"])
    image = {"query": image_input(picture(1))}
    for name in ("guests", "nowhere"):  # whether it exists shows in nothing
        refused = guarded.ask("camera", "POST", f"/v1/collections/{name}/search", image)
        assert (refused.status_code, name in refused.text) == (403, False)
    assert guarded.ask("writer", "GET", "/v1/collections/staff/persons").status_code == 200
    told = guarded.ask("camera", "GET", "/v1/info").json()
    assert (told["role"], told["rights"], told["collections"], told["score_step"]) == ("search", [], ["staff"], STEP)


def exact_scores(seed: int) -> np.ndarray:
    """Cosines of a picture with the pictures of all persons."""
    model = linear_embedder()
    rows = np.concatenate([model(_pixels(picture(number))[None]) for number in (seed, *range(PERSONS))])
    units = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return units[1:] @ units[0]


def _pixels(data: bytes):
    from plsc.data.codec import decode_image

    return decode_image(data, "picture")


def test_scores_are_rounded_without_the_right_to_send_vectors(guarded):
    place, exact = "/v1/collections/staff/search", exact_scores(77)
    body = {"query": image_input(picture(77)), "k": PERSONS, "threshold": -1.0}

    def found(name: str, **changes: object) -> dict[int, float]:
        matches = guarded.ask(name, "POST", place, {**body, **changes}).json()["results"][0]["matches"]
        return {match["person"]["id"] - 1: match["score"] for match in matches}

    assert found("root") == pytest.approx(dict(enumerate(exact)), abs=1e-5)
    pair = {"a": image_input(picture(77)), "b": image_input(picture(3))}
    for name in ("camera", "embedder"):
        assert guarded.ask(name, "POST", "/v1/compare", pair).json()["score"] == round(float(exact[3]), 2)
    rounded = found("reader")
    assert rounded == {person: round(score, 2) for person, score in enumerate(exact)}
    # a threshold between two steps tells no more than the rounded scores do
    middle = sorted(rounded.values())[PERSONS // 2]
    for offset in (-0.004, -0.002, 0.0, 0.002, 0.004):
        threshold = middle + offset
        expected = {person: score for person, score in rounded.items() if score >= threshold}
        assert found("reader", threshold=threshold) == expected


def test_who_may_only_search_sees_no_person_below_the_services_threshold(guarded):
    place, exact = "/v1/collections/staff/search", exact_scores(78)
    body = {"query": image_input(picture(78)), "k": PERSONS}
    above = {person + 1 for person, score in enumerate(exact) if score >= np.median(exact)}
    assert len(above) == PERSONS // 2
    for changes in ({}, {"threshold": -1.0}, {"threshold": 0.1}):
        answer = guarded.ask("camera", "POST", place, {**body, **changes}).json()
        assert {match["person"]["id"] for match in answer["results"][0]["matches"]} == above
    assert all(
        match["same_person"] for match in guarded.ask("camera", "POST", place, body).json()["results"][0]["matches"]
    )
    assert len(guarded.ask("reader", "POST", place, body).json()["results"][0]["matches"]) == PERSONS


def test_a_service_may_round_to_another_step_or_not_at_all(tmp_path):
    for step, shown in ((0.1, lambda score: round(score, 1)), (0.0, float)):
        with live_service(tmp_path / str(step), callers={"camera": {"role": "search"}}, score_step=step) as live:
            pair = {"a": image_input(picture(77)), "b": image_input(picture(3))}
            score = live.ask("POST", "/v1/compare", pair).json()["score"]
            assert score == pytest.approx(shown(float(exact_scores(77)[3])), abs=1e-6)


def test_a_file_without_rights_gives_none(tmp_path):
    path = tmp_path / "tokens.toml"
    path.write_text(f"[[token]]\nname = 'old'\nrole = 'read'\ncreated = '2026-01-01'\nsha256 = '{'0' * 64}'\n")
    (token,) = read_tokens(path)
    assert (token.caller.role, token.caller.rights, token.caller.collections) == ("read", frozenset(), None)
    change_token(path, "old", allow=["vectors", "embeddings"], collections=["staff"])
    (token,) = read_tokens(path)
    assert (token.allow, token.collections, token.sha256) == (("vectors", "embeddings"), ("staff",), "0" * 64)
