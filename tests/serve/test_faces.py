"""Pictures of several faces: each is found, searched and enrolled by its number, and none is left without a word."""

import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.group_picture import GAP, DrawnDetector, group, larger, png
from support.live_service import SIZE, Live, image_input, live_service

import plsc
from plsc.client import Picture, ServerError
from plsc.embedding.quality import Sharpness
from plsc.serve.settings import Limits

pytestmark = pytest.mark.live

NAMES = ("Ada", "Grace", "Kurt")


def face(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 256, (SIZE, SIZE, 3)).astype(np.uint8)


FACES = [face(seed) for seed in range(3)]
TRIO = png(group([FACES[0], larger(FACES[1]), FACES[2]]))  # Grace is the largest
SIDE = 2 * SIZE + GAP
BOXES = {  # by name
    "Ada": [GAP, GAP, GAP + SIZE, GAP + SIZE],
    "Grace": [GAP + SIDE, GAP, GAP + SIDE + 2 * SIZE, GAP + 2 * SIZE],
    "Kurt": [GAP + 2 * SIDE, GAP, GAP + 2 * SIDE + SIZE, GAP + SIZE],
}
NUMBERED = ("Grace", "Ada", "Kurt")  # those of one size as the detector has them


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    options: dict[str, Any] = {"threshold": 0.999, "limits": Limits(inputs=128)}
    limited = {"role": "admin", "rates": ["searches=10/h"]}
    callers = {"tester": {"role": "admin", "allow": ["vectors"]}, "searching": limited, "detecting": limited}
    with live_service(tmp_path_factory.mktemp("faces"), DrawnDetector(), callers=callers, **options) as running:
        place = running.collection("staff")
        for name, one in zip(NAMES, FACES, strict=True):
            person = {"name": name, "faces": [image_input(png(group([one])))]}
            assert running.ask("POST", f"{place}/persons", person).status_code == 201
        yield running


@pytest.fixture
def client(live: Live) -> Iterator[plsc.Client]:
    with plsc.Client(live.server.address, live.secrets["tester"]) as one:
        yield one


def test_every_face_is_searched_for_and_the_default_says_how_many_it_left(live, client):
    found = client.search("staff", TRIO, k=1)
    assert (found[0].person.name, found.faces_found, found.box, found.faces) == ("Grace", 3, BOXES["Grace"], [])
    found = client.search("staff", TRIO, k=1, faces="all")
    assert (found[0].person.name, found.faces_found, found.box) == ("Grace", 3, BOXES["Grace"])
    assert [(one.number, one.matches[0].person.name, one.box) for one in found.faces] == [
        (number, name, BOXES[name]) for number, name in enumerate(NUMBERED, 1)
    ]
    assert all(one.matches[0].score > 0.9999 and one.matches[0].same_person for one in found.faces)
    again = client.search("staff", Picture(TRIO, landmarks=found.faces[2].landmarks), k=1)
    assert (again[0].person.name, again.faces_found) == ("Kurt", None)
    assert client.search("staff", Picture(TRIO, face=2), k=1)[0].person.name == "Ada"
    assert client.search("staff", np.ones(8), k=1).faces_found is None


@pytest.mark.parametrize("how", ["form", "body"])
def test_every_face_is_asked_for_beside_files(live, how):
    if how == "form":
        answer = live.http.post("/v1/collections/staff/search", data={"faces": "all"}, files={"image": TRIO})
    else:
        headers = {"Content-Type": "image/png"}
        answer = live.ask("POST", "/v1/collections/staff/search?faces=all", content=TRIO, headers=headers)
    (result,) = answer.json()["results"]
    assert [one["matches"][0]["person"]["name"] for one in result["faces"]] == list(NUMBERED)
    assert "warnings" not in answer.json()


def test_several_pictures_keep_their_own_faces(live):
    pair = png(group([FACES[2], FACES[0]]))
    body = {"queries": [image_input(TRIO), image_input(pair)], "faces": "all", "k": 1}
    results = live.ask("POST", "/v1/collections/staff/search", body).json()["results"]
    names = [[one["matches"][0]["person"]["name"] for one in result["faces"]] for result in results]
    assert names == [list(NUMBERED), ["Kurt", "Ada"]]


def test_faces_are_detected_with_their_quality(client):
    faces = client.detect(TRIO)
    assert [one.box for one in faces] == [BOXES[name] for name in NUMBERED]
    assert [one.score for one in faces] == [0.9] * 3
    for one, name in zip(faces, NUMBERED, strict=True):
        crop = FACES[NAMES.index(name)]
        pixels = torch.from_numpy(crop).permute(2, 0, 1)
        assert one.quality["sharpness"] == pytest.approx(
            Sharpness(0).quality(pixels, np.zeros(1, np.float32)), rel=1e-4
        )
        assert one.quality["norm"] > 0
    with pytest.raises(ServerError, match="no face was found"):
        client.detect(png(np.zeros((40, 40, 3), np.uint8)))


def test_more_faces_than_are_told_of_are_counted(live):
    crowd = png(group([face(seed) for seed in range(70)], columns=10))
    body = {"query": image_input(crowd), "faces": "all", "k": 1}
    (result,) = live.ask("POST", "/v1/collections/staff/search", body).json()["results"]
    assert (result["faces_found"], len(result["faces"])) == (70, 64)


def test_what_forms_no_face_is_left_out_of_all_and_the_others_keep_their_numbers(live, client):
    junk = png(group([FACES[0], larger(FACES[1]), np.full((1, 1, 3), 9, np.uint8), FACES[2]]))
    assert [one.number for one in client.detect(junk)] == [1, 2, 3]
    tall = group([FACES[0]])
    tall = np.concatenate([tall, np.zeros_like(tall)])
    tall[GAP + SIZE + GAP :, GAP] = 7  # one pixel wide, so that its landmarks coincide; the second in area
    found = client.search("staff", png(tall), k=1, faces="all")
    assert ([one.number for one in found.faces], found.faces_found) == ([1], 2)


def test_a_jpeg_that_is_decoded_smaller_has_boxes_in_its_own_pixels(tmp_path):
    times = 8
    picture = group([larger(FACES[0], times), larger(FACES[1], 2 * times)])
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "JPEG", quality=100, subsampling=0)
    small = Limits(image_pixels=picture.shape[0] * picture.shape[1] // 4)

    class Bright(DrawnDetector):
        """Sees past the noise of a JPEG."""

        def find(self, image):
            return super().find(image * (image.amax(0) > 40))

    with live_service(tmp_path, Bright(), limits=small) as live:
        answer = live.ask("POST", "/v1/detect", {"inputs": [image_input(file.getvalue())]}).json()["results"][0]
    expected = [
        [GAP + 2 * SIZE * times + GAP, GAP, GAP + 2 * SIZE * times + GAP + 2 * SIZE * times, GAP + 2 * SIZE * times],
        [GAP, GAP, GAP + SIZE * times, GAP + SIZE * times],
    ]
    assert np.allclose([one["box"] for one in answer["faces"]], expected, atol=4)


def test_a_search_of_faces_is_charged_by_the_face(live):
    def left(by: str, path: str, body: dict[str, Any]) -> int:
        answer = live.ask("POST", path, body, by=by)
        assert answer.status_code == 200
        field = next(part for part in answer.headers["RateLimit"].split(",") if "searches" in part)
        return int(field.split("r=")[1].split(";")[0])

    search = {"query": image_input(TRIO), "faces": "all"}
    assert left("searching", "/v1/collections/staff/search", search) == 7
    assert left("searching", "/v1/collections/staff/search", {"query": image_input(TRIO)}) == 6
    assert left("detecting", "/v1/detect", {"inputs": [image_input(TRIO)]}) == 7


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"queries": [image_input(TRIO)] * 3, "faces": "all"}, 413, "at most 2 in a request"),
        ({"query": image_input(TRIO), "faces": "all", "k": 1000}, 400, "64 queries with k 1000"),
        ({"query": {"vector": [1.0] * 8}, "faces": "all"}, 422, "query: every face is looked for in pictures"),
        ({"query": {**image_input(TRIO), "face": 2}, "faces": "all"}, 422, "query: every face"),
        ({"query": image_input(TRIO), "faces": "some"}, 400, "faces"),
        ({"query": {**image_input(TRIO), "face": 4}}, 422, "query shows 3 faces, and none is number 4"),
        ({"query": {**image_input(TRIO), "face": 0}}, 400, "face"),
        ({"query": {"vector": [1.0] * 8, "face": 1}}, 400, "landmarks and face belong to an image"),
    ],
)
def test_what_cannot_be_asked_of_faces_is_told(live, body, status, said):
    answer = live.ask("POST", "/v1/collections/staff/search", body)
    assert (answer.status_code, said in answer.json()["error"]["message"]) == (status, True), answer.text


def test_without_a_detector_there_is_no_choice_of_faces(tmp_path):
    with live_service(tmp_path) as live:
        place, given = live.collection("staff"), image_input(png(FACES[0]))
        for path, body in (
            (f"{place}/search", {"query": given, "faces": "all"}),
            (f"{place}/search", {"query": {**given, "face": 1}}),
            ("/v1/detect", {"inputs": [given]}),
        ):
            answer = live.ask("POST", path, body)
            assert (answer.status_code, "looks for no faces" in answer.text) == (422, True), answer.text
        result = live.ask("POST", f"{place}/search", {"query": {**given, "face": "largest"}}).json()["results"][0]
        assert result == {"matches": []}


def test_a_comparison_says_that_it_took_the_largest(live):
    answer = live.ask("POST", "/v1/compare", {"a": image_input(TRIO), "b": {**image_input(TRIO), "face": 2}}).json()
    assert answer["warnings"] == ["a shows 3 faces, and the largest was taken; face=2 takes the next"]
    assert answer["score"] < 0.99


PERSONS, SOLO = "/v1/collections/enrolled/persons", png(group([FACES[0]]))


@pytest.fixture(scope="module")
def place(live: Live) -> str:
    live.collection("enrolled")
    return PERSONS


def test_an_enrolment_has_to_say_which_of_several_faces_is_meant(live, client, place):
    body = {"name": "x", "faces": [image_input(SOLO), image_input(TRIO), image_input(TRIO)]}
    refused = live.ask("POST", place, body)
    told = refused.json()
    assert (refused.status_code, told["error"]["code"]) == (422, "unprocessable")
    assert told["error"]["message"] == (
        "faces[1] shows 3 faces, listed here with the largest first: give face=1 to face=3, or face=largest"
    )
    assert [(one["input"], one["number"], one["box"]) for one in told["faces"]] == [
        (f"faces[{index}]", number, BOXES[name]) for index in (1, 2) for number, name in enumerate(NUMBERED, 1)
    ]
    assert not live.ask("GET", place).json()["persons"]
    with pytest.raises(ServerError, match="shows 3 faces") as caught:
        client.add_person("enrolled", "x", faces=[TRIO])
    assert [one.box for one in caught.value.faces["faces[0]"]] == [BOXES[name] for name in NUMBERED]
    person = client.add_person("enrolled", "Kurt", faces=[SOLO, Picture(TRIO, face=3), Picture(TRIO, face="largest")])
    stored = live.service.store.vectors("enrolled", person.id)
    given = client.embeddings([png(group([FACES[seed]])) for seed in (0, 2, 1)])
    assert np.allclose(stored, given / np.linalg.norm(given, axis=1)[:, None], atol=1e-5)


@pytest.mark.parametrize("how", ["persons", "upsert", "faces", "several"])
def test_wherever_faces_are_enrolled_the_one_is_asked_for(live, client, place, how):
    person = client.add_person("enrolled", faces=[SOLO]).id
    method, path, bodied = {
        "persons": ("POST", place, lambda face: {"faces": [face]}),
        "upsert": ("PUT", f"{place}/by-external-id/E-1", lambda face: {"faces": [face]}),
        "faces": ("POST", f"{place}/{person}/faces", lambda face: {"faces": [face]}),
        "several": ("POST", place, lambda face: {"persons": [{"faces": [image_input(SOLO)]}, {"faces": [face]}]}),
    }[how]
    refused = live.ask(method, path, bodied(image_input(TRIO)))
    assert (refused.status_code, len(refused.json()["faces"])) == (422, 3)
    assert refused.json()["faces"][0]["input"] == ("persons[1].faces[0]" if how == "several" else "faces[0]")
    assert live.ask(method, path, bodied({**image_input(TRIO), "face": 2})).is_success
    taken = live.ask(method, path, bodied({**image_input(TRIO), "face": "largest"})).json()
    assert "shows 3 faces, and the largest was taken" in taken["warnings"][0]


def test_forms_say_which_face_of_all_pictures_or_of_each(live, place):
    def stored(**given: Any) -> np.ndarray:
        answer = live.http.post(place, **given)
        assert answer.status_code == 201, answer.text
        return live.service.store.vectors("enrolled", answer.json()["id"])

    files = [("image", TRIO), ("image", TRIO)]
    both = stored(files=files, data={"face": "3"})
    assert np.allclose(both[0], both[1])
    each = stored(files=files, data={"face": ["3", "largest"]})
    assert np.allclose(each[0], both[0])
    assert not np.allclose(each[1], both[0], atol=0.01)
    body = stored(content=TRIO, headers={"Content-Type": "image/png"}, params={"face": "3"})
    assert np.allclose(body[0], both[0])
