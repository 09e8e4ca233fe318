"""plsc.Client: every operation against a live service, and what it does when the server is away or refuses."""

import io
import pydoc
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.live_service import CONTRACT, DIM, Live, picture, vectors

import plsc
from plsc.client import NewPerson, Picture, ServerError
from plsc.data.alignment import TEMPLATE
from plsc.errors import DataError, UsageError

pytestmark = pytest.mark.live
SETTINGS = {"threshold": 0.5, "callers": {"tester": {"role": "admin"}}}


@pytest.fixture
def client(live: Live) -> Iterator[plsc.Client]:
    with plsc.Client(live.server.address, live.secrets["tester"]) as one:
        yield one


@pytest.mark.slow
def test_a_life_through_the_client(client, tmp_path):
    assert client.ready()
    assert client.info()["role"] == "admin"
    made = client.create_collection("staff")
    assert (made.name, made.dim, made.contract_id) == ("staff", DIM, CONTRACT)
    file = tmp_path / "ada.png"
    file.write_bytes(picture(1))
    ada = client.add_person("staff", "Ada", metadata={"city": "Bern"}, faces=[file, picture(2)])
    others = client.add_persons("staff", [NewPerson("B", {"city": "Rome"}, [vectors(1)[0]]), NewPerson()])
    assert [person.name for person in client.persons("staff")] == ["Ada", "B", None]
    assert [person.name for person in client.persons("staff", filter={"city": "Rome"})] == ["B"]
    assert client.collections() == [client.collection("staff")]
    assert client.collection("staff").faces == 3

    best, *rest = client.search("staff", file, k=5)
    assert (best.person.id, best.person.name, best.face, best.same_person) == (ada.id, "Ada", ada.faces[0], True)
    assert best.score == pytest.approx(1, abs=1e-5)
    assert [match.person.id for match in rest] == [others[0].id]
    assert client.search("staff", file, threshold=0.999)[0].person.id == ada.id
    many = client.search_many("staff", [picture(2), vectors(1)[0]], filter={"city": "Rome"}, deadline_ms=20_000)
    assert [[match.person.name for match in matches] for matches in many] == [["B"], ["B"]]

    faces = client.add_faces("staff", ada.id, [vectors(1, 9)[0]])
    client.delete_face("staff", ada.id, faces[0])
    assert client.person("staff", ada.id) == ada
    assert client.update_person("staff", ada.id, name="Ada L.", metadata={}).metadata == {}
    assert client.update_person("staff", ada.id, name="A.").name == "A."
    client.delete_person("staff", ada.id)
    with pytest.raises(ServerError, match="person") as missing:
        client.person("staff", ada.id)
    assert (missing.value.status, missing.value.code) == (404, "not_found")
    assert client.compact("staff")["rows"] == 1
    snapshot = client.take_snapshot()
    assert client.snapshots() == [snapshot]
    client.delete_snapshot(snapshot.id)
    assert client.snapshots() == []
    client.delete_collection("staff")
    assert client.collections() == []


def test_who_is_known_is_told_refused_or_added_to(client):
    client.create_collection("known")
    ada = client.add_person("known", "Ada", faces=[picture(1)])
    assert ada.known is None
    with pytest.raises(ServerError, match="this face matches Ada") as refused:
        client.add_person("known", "Neo", faces=[picture(1)], on_known="refuse")
    assert (refused.value.status, refused.value.known.id, refused.value.known.name) == (409, ada.id, "Ada")
    for _ in range(2):
        added = client.enrol("known", NewPerson("Neo", faces=[picture(1)]), on_known="add", idempotency_key="neo")
        assert (added.id, added.known.id, len(added.faces)) == (ada.id, ada.id, 2)
    with pytest.raises(ServerError) as wrong:
        client.add_person("known", on_known="ask")
    assert (wrong.value.status, wrong.value.known) == (400, None)
    client.delete_collection("known")


def test_the_model_through_the_client(client):
    large = picture(3, size=40)
    plain, aligned = client.embeddings([large, Picture(large, (TEMPLATE * 40 / 112 + 1).tolist())])
    assert plain.shape == (DIM,)
    assert not np.allclose(plain, aligned)
    cosine = float(plain @ aligned / np.linalg.norm(plain) / np.linalg.norm(aligned))
    judged = client.compare(large, aligned)
    assert judged.score == pytest.approx(cosine, abs=1e-5)
    assert (judged.threshold, judged.same_person) == (0.5, cosine >= 0.5)


def test_refusals_are_errors_of_the_house(client, live):
    def ask_with_a_wrong_token() -> None:
        with plsc.Client(live.server.address, "wrong") as stranger:
            stranger.info()

    for wrong, status, code in (
        (lambda: client.search("nowhere", vectors(1)[0]), 404, "not_found"),
        (lambda: client.compare(np.zeros(DIM), np.ones(DIM)), 422, "unprocessable"),
        (lambda: client.compare(b"no picture", np.ones(DIM)), 415, "unsupported_type"),
        (lambda: client.create_collection("../etc"), 400, "bad_request"),
        (ask_with_a_wrong_token, 401, "unauthorized"),
    ):
        with pytest.raises(ServerError) as refused:
            wrong()
        assert (refused.value.status, refused.value.code) == (status, code)
        assert isinstance(refused.value, plsc.PlscError)
    with pytest.raises(DataError, match="nothere"):
        client.compare(Path("nothere.jpg"), np.ones(DIM))


def test_a_server_that_is_not_there(monkeypatch):
    monkeypatch.setattr("plsc.client._pause", lambda wished: 0.0)
    with plsc.Client("http://127.0.0.1:1") as client:
        assert not client.ready()
        with pytest.raises(ServerError, match="is it running") as away:
            client.info()
        assert (away.value.status, away.value.code) == (0, "unavailable")
    for wrong in ("http://x:port", "127.0.0.1:8080", "", None):
        with pytest.raises(ServerError, match="no address"):
            plsc.Client(wrong)


def test_a_picture_is_the_same_in_every_form(client, tmp_path):
    encoded = picture(5, size=40)
    file = tmp_path / "five.png"
    file.write_bytes(encoded)
    pixels = np.asarray(Image.open(io.BytesIO(encoded)).convert("RGB"))
    with Image.open(file) as opened:
        every = [str(file), file, encoded, pixels, pixels[:, ::-1][:, ::-1], opened]
        every += [Picture(image) for image in (str(file), file, encoded, pixels, opened)]
        rows = client.embeddings(every)
    assert (rows == rows[0]).all()


def test_a_pillow_image_is_its_file(client, tmp_path):
    """Turned by its EXIF, transparent pixels white, and 16 bits scaled to 8; landmarks are in that picture."""
    chance = np.random.default_rng(0)
    coarse = chance.integers(0, 256, (12, 9, 4), np.uint8).repeat(16, axis=0).repeat(16, axis=1)
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.fromarray(coarse[:, :, :3]).save(tmp_path / "turned.jpg", exif=turned)
    Image.fromarray(coarse).save(tmp_path / "transparent.png")
    Image.fromarray(coarse[:, :, 0].astype(np.uint16) << 8).save(tmp_path / "deep.png")
    for name in ("turned.jpg", "transparent.png", "deep.png"):
        file, points = tmp_path / name, TEMPLATE + 8
        with Image.open(file) as opened:
            for one, other in ((file, opened), (Picture(file, points), Picture(opened, points))):
                assert client.compare(one, other).score == pytest.approx(1, abs=1e-6), name


def test_a_vector_is_the_same_in_every_form(client):
    row = vectors(1)[0].astype(np.float64)
    for same in (row, row.astype(np.float32), row.tolist(), tuple(row), row[None]):
        assert client.compare(row, same).score == pytest.approx(1, abs=1e-6)


WRONG_INPUTS = {
    "pictures": ["a.png", "b.png"],
    "float picture": np.zeros((4, 4, 3)),
    "grey picture": np.zeros((4, 4), np.uint8),
    "rows": np.zeros((2, DIM)),
    "nothing": [],
    "None": None,
    "words": np.array(["a"]),
    "number": 3.0,
    "dict": {"image": "a.png"},
    "ragged": [[1.0], [1.0, 2.0]],
}


@pytest.mark.parametrize("item", WRONG_INPUTS.values(), ids=WRONG_INPUTS)
def test_what_is_neither_a_picture_nor_a_vector_is_named(client, item):
    with pytest.raises(
        UsageError, match=rf"an input is a picture .* or a vector of D numbers, not {type(item).__name__}"
    ):
        client.search("staff", item)
    with pytest.raises(UsageError, match="a Picture's image is a path, bytes or an image, not"):
        client.search("staff", Picture(item))


@pytest.mark.parametrize("path", ["nothere.png", Path("nothere.png"), "."], ids=["str", "Path", "folder"])
def test_a_file_that_cannot_be_read_is_named(client, path):
    with pytest.raises(DataError, match=rf"cannot read {path}"):
        client.search("staff", path)


def test_broken_files_and_points_are_named(client):
    broken = Image.open(io.BytesIO(picture(1, size=64)[:-1500]))
    with pytest.raises(DataError, match="a Pillow image does not decode"):
        client.embeddings([broken])
    for points in ("eyes", [1, 2], [[1, 2, 3]], 5):
        with pytest.raises(UsageError, match="landmarks are five points"):
            client.embeddings([Picture(picture(1), points)])


@pytest.mark.parametrize("faces", ["ada.jpg", Path("ada.jpg"), b"bytes", Picture("ada.jpg"), None, 3])
def test_one_face_where_several_are_asked_for_is_named(client, faces):
    for ask in (
        lambda: client.add_person("staff", "Ada", faces=faces),
        lambda: client.add_faces("staff", 1, faces),
        lambda: client.search_many("staff", faces),
        lambda: client.embeddings(faces),
    ):
        with pytest.raises(UsageError, match=r"(faces|queries|inputs) are several: give a list, such as \["):
            ask()


def test_help_shows_types_that_can_be_read():
    page = pydoc.render_doc(plsc.Client, renderer=pydoc.plaintext)
    signature = next(line for line in page.splitlines() if "search(self" in line)
    assert "query: 'Input'" in signature
    assert "An ``Input``, which is searched for" in page
    assert not re.search(r"_SupportsArray|ArrayLike|_NestedSequence|numpy\.dtype", page)
