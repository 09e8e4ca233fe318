"""``plsc gallery enrol URL FOLDER``: a person for each sub-folder, reported, and never twice."""

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image
from support.group_picture import DrawnDetector, group, larger
from support.live_service import SIZE, Live, image_input, live_service, picture
from support.waiting import wait_until

import plsc
from plsc.client import ServerError
from plsc.client_values import Collection, Person
from plsc.errors import DataError
from plsc.gallery.enrolment import Enrolment, Outcome, picture_key
from plsc.serve.settings import Limits
from plsc.serve.tokens import add_token
from plsc.tools.entry import main

pytestmark = pytest.mark.live

PEOPLE = {"Ada": 2, "Grace ✓": 1, "Mary": 5}


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    with live_service(tmp_path / "served", threshold=0.999, limits=Limits(inputs=2)) as running:
        yield running


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return people_in(tmp_path / "people", PEOPLE)


def people_in(folder: Path, people: dict[str, int]) -> Path:
    seed = 0
    for name, count in people.items():
        (folder / name).mkdir(parents=True)
        for number in range(count):
            seed += 1
            (folder / name / f"{number}.png").write_bytes(picture(seed))
    return folder


def enrol(live: Live, folder: Path, *words: str, code: int = 0) -> dict[str, Any]:
    """The report of the command, which ends with ``code``."""
    report = folder.parent / "report.json"
    given = ["--json", str(report), "--overwrite", *words]
    assert main(["gallery", "enrol", live.server.address, str(folder), *given]) == code
    read: dict[str, Any] = json.loads(report.read_text())
    return read


def enrolled(live: Live, collection: str = "people") -> dict[str, int]:
    found = live.ask("GET", f"/v1/collections/{collection}/persons?limit=1000").json()["persons"]
    assert len({person["name"] for person in found}) == len(found)
    return {person["name"]: len(person["faces"]) for person in found}


def test_a_folder_of_folders_is_enrolled_once(live, folder, capsys):
    (folder / "Mary" / "broken.png").write_bytes(picture(99)[:-300])
    (folder / "Mary" / "2.png").write_bytes(b"nothing")
    with Image.open(folder / "Mary" / "1.png") as image:
        image.save(folder / "Mary" / "1.gif")  # which the service does not decode
    (folder / "Mary" / "1.png").unlink()
    (folder / "Empty").mkdir()
    (folder / ("x" * 200)).mkdir()
    (folder / ("x" * 200) / "a.png").write_bytes(picture(77))
    report = enrol(live, folder, code=1)
    assert enrolled(live) == {**PEOPLE, "Mary": 4}
    counts = {
        status: report[status] for status in ("enrolled", "added", "known", "there", "failed", "faces", "left_out")
    }
    assert list(counts.values()) == [3, 0, 0, 0, 1, 7, 2]
    mary = next(person for person in report["people"] if person["folder"] == "Mary")
    assert set(mary["left_out"]) == {"Mary/2.png", "Mary/broken.png"}
    assert "no JPEG, PNG, WEBP or AVIF" in mary["left_out"]["Mary/2.png"]
    assert report["empty"] == {"Empty": "nothing"}
    told = capsys.readouterr().out
    assert "Empty: no picture in it" in told
    assert "its name is no external id" in told
    assert "3 enrolled, 1 failed; 7 faces enrolled, 2 pictures left out" in told
    again = enrol(live, folder, code=1)
    assert (again["there"], again["enrolled"], again["failed"]) == (3, 0, 1)
    assert enrolled(live) == {**PEOPLE, "Mary": 4}


def test_what_is_not_the_folders_own_is_left_out_by_name(live, folder, capsys):
    private = folder.parent / "private.png"
    private.write_bytes(picture(50))
    os.mkfifo(folder / "Ada/9.jpg")
    (folder / "Ada/8.png").symlink_to(private)
    (folder / "Ada/\x1b[2J\nall good.png").write_bytes(b"")
    report = enrol(live, folder)
    assert enrolled(live) == PEOPLE
    assert report["left_out"] == 3
    told = capsys.readouterr()
    assert "Ada/9.jpg: it is no regular file" in told.out
    assert f"Ada/8.png: it lies outside of {folder}; --allow-outside (PLSC_ALLOW_OUTSIDE=1) reads it" in told.out
    assert (told.out + told.err).replace("\n", "").isprintable()
    assert not [line for line in told.out.splitlines() if line.startswith("all good")]
    others = people_in(folder.parent / "others", {"Eve": 0})
    (others / "Eve/8.png").symlink_to(private)
    enrol(live, others, "--allow-outside")
    assert enrolled(live) == {**PEOPLE, "Eve": 1}


def test_people_who_are_known_are_skipped_added_or_asked_about(live, folder, monkeypatch, capsys):
    enrol(live, folder)
    twins = folder.parent / "twins"
    for name, seed in (("Neo", 1), ("Trinity", 3), ("Morpheus", 50)):
        (twins / name).mkdir(parents=True)
        (twins / name / "a.png").write_bytes(picture(seed) + b"\0")  # other files, with the same picture
    assert enrol(live, twins)["known"] == 2
    assert enrolled(live) == {**PEOPLE, "Morpheus": 1}
    assert "Neo: known and skipped: Ada (#" in capsys.readouterr().out
    answers = iter(["x", "a", ""])
    monkeypatch.setattr("builtins.input", lambda question: next(answers))
    report = enrol(live, twins, "--on-known", "ask")
    assert (report["added"], report["known"], report["there"]) == (1, 1, 1)
    assert enrolled(live) == {**PEOPLE, "Ada": 3, "Morpheus": 1}
    assert enrol(live, twins, "--on-known", "add")["added"] == 2
    assert enrolled(live) == {**PEOPLE, "Ada": 3, "Grace ✓": 2, "Morpheus": 1}, "Neo's picture was added twice"
    assert enrol(live, twins, "--on-known", "enrol")["enrolled"] == 2


def found_at(live: Live, seed: int) -> tuple[str, float]:
    """The name and score of the best match of a picture."""
    query = {"query": image_input(picture(seed)), "k": 1}
    (match,) = live.ask("POST", "/v1/collections/people/search", query).json()["results"][0]["matches"]
    return match["person"]["name"], round(match["score"], 5)


def test_a_folder_that_has_grown_gives_each_picture_a_face_once(live, folder):
    enrol(live, folder)
    (folder / "Ada" / "00.png").write_bytes(picture(101))  # the first of all, so that batches of two shift
    (folder / "Ada" / "9.png").write_bytes(picture(102))
    (folder / "Mary" / "1a.png").write_bytes(picture(103))
    (folder / "Grace ✓" / "0.png").rename(folder / "Grace ✓" / "renamed.png")
    (folder / "New").mkdir()
    (folder / "New" / "0.png").write_bytes(picture(104))
    report = enrol(live, folder)
    grown = {"Ada": 4, "Grace ✓": 1, "Mary": 6, "New": 1}
    assert ([report[name] for name in ("there", "enrolled", "faces")], enrolled(live)) == ([3, 1, 4], grown)
    assert [found_at(live, seed) for seed in (101, 102, 103, 104)] == [
        ("Ada", 1.0),
        ("Ada", 1.0),
        ("Mary", 1.0),
        ("New", 1.0),
    ]
    again = enrol(live, folder)
    assert ([again[name] for name in ("there", "enrolled", "faces")], enrolled(live)) == ([4, 0, 0], grown)


def test_a_picture_is_what_it_shows_and_not_what_it_is_called(live, folder):
    enrol(live, folder)
    (folder / "Ada" / "0.png").write_bytes(picture(201))  # another of the name
    (folder / "Mary" / "copy.png").write_bytes(picture(4))  # what Mary/0.png is, too
    with Image.open(io.BytesIO(picture(202))) as image:
        image.save(folder / "Ada" / "2.gif")  # sent as JPEG
    report = enrol(live, folder)
    assert (report["faces"], enrolled(live)) == (2, {**PEOPLE, "Ada": 4})
    assert found_at(live, 201) == ("Ada", 1.0)
    mary = next(person for person in report["people"] if person["folder"] == "Mary")
    assert mary["left_out"] == {"Mary/copy.png": "it is the same picture as Mary/0.png"}
    assert (enrol(live, folder)["faces"], enrolled(live)) == (0, {**PEOPLE, "Ada": 4})
    (folder / "Mary").rename(folder / "Maria")  # somebody else to the service, who it knows
    assert (enrol(live, folder)["known"], enrolled(live)) == (1, {**PEOPLE, "Ada": 4})
    assert enrol(live, folder, "--on-known", "add")["added"] == 1
    assert enrolled(live) == {**PEOPLE, "Ada": 4}


def test_who_was_deleted_at_the_service_is_enrolled_again(live, folder):
    enrol(live, folder)
    persons = {one["name"]: one for one in live.ask("GET", "/v1/collections/people/persons").json()["persons"]}
    live.ask("DELETE", f"/v1/collections/people/persons/{persons['Ada']['id']}")
    mary = persons["Mary"]
    live.ask("DELETE", f"/v1/collections/people/persons/{mary['id']}/faces/{mary['faces'][3]['id']}")
    report = enrol(live, folder)
    assert ([report[name] for name in ("there", "enrolled", "faces")], enrolled(live)) == ([2, 1, 3], PEOPLE)


def test_faces_that_a_former_version_enrolled_are_not_sent_twice(live, folder):
    live.collection("people")
    with plsc.Client(live.server.address) as client:
        for name in PEOPLE:
            faces = sorted((folder / name).iterdir())
            enrolled_person = client.add_person("people", name, faces=faces[:2], external_id=name)
            if faces[2:]:
                client.add_faces("people", enrolled_person.id, faces[2:4])
                client.add_faces("people", enrolled_person.id, faces[4:])
        (folder / "Mary" / "00.png").write_bytes(picture(103))
        report = enrol(live, folder)
        assert (report["faces"], enrolled(live)) == (1, {**PEOPLE, "Mary": 6})
        assert found_at(live, 103) == ("Mary", 1.0)
        mary = client.person_by_external_id("people", "Mary")
        assert sorted(mary.keys.values()) == sorted(
            picture_key(path.read_bytes()) for path in (folder / "Mary").iterdir()
        )


def test_faces_of_another_model_are_taken_for_the_pictures_where_there_are_as_many(tmp_path, folder):
    enroller = Enrolment(
        client := Mock(spec=plsc.Client),
        Collection("people", 8, "former", "2026", 1, 2),
        folder,
        {"limits": {"inputs": 2, "body_bytes": 10**6}, "model": {"contract_id": "later"}, "next_model": None},
    )
    client.person_by_external_id.return_value = Person(7, "Mary", {}, faces=(1, 2, 3, 4, 5))
    pictures = [f"Mary/{number}.png" for number in range(5)]
    assert enroller.enrol("Mary", pictures, "skip") == Outcome("Mary", "there", 7)
    client.add_faces.assert_not_called()


def test_an_interruption_anywhere_loses_and_doubles_nothing(live, folder, monkeypatch):
    def interrupted(send: Any, before: bool) -> Any:
        def broken(*args: Any, **options: Any) -> Any:
            if not before:
                send(*args, **options)
            raise ServerError(0, "unavailable", "the answer was lost")

        return broken

    for name, before in (("enrol", True), ("enrol", False), ("add_faces", True), ("add_faces", False)):
        with monkeypatch.context() as patch:
            patch.setattr(plsc.Client, name, interrupted(getattr(plsc.Client, name), before))
            assert enrol(live, folder, "--parallel", "1", code=1)["stopped"] == "the answer was lost"
    enrol(live, folder)
    assert enrolled(live) == PEOPLE


def test_who_is_enrolled_at_the_same_moment_by_another_call_is_one_person(live, folder, monkeypatch):
    enrol(live, folder)
    (folder / "Mary" / "9.png").write_bytes(picture(103))
    find = plsc.Client.person_by_external_id
    missed = {"Ada", "Mary", "Grace ✓"}

    def miss_once(client: plsc.Client, collection: str, external_id: str) -> Any:
        if external_id in missed:
            missed.discard(external_id)
            raise ServerError(404, "not_found", "not yet")
        return find(client, collection, external_id)

    monkeypatch.setattr(plsc.Client, "person_by_external_id", miss_once)
    report = enrol(live, folder, "--on-known", "enrol")
    assert ([report[name] for name in ("there", "failed", "faces")], enrolled(live)) == (
        [3, 0, 1],
        {**PEOPLE, "Mary": 6},
    )


def test_photos_larger_than_a_request_are_left_out(tmp_path, capsys):
    limits = Limits(body_bytes=200_000)
    with live_service(tmp_path / "served", limits=limits) as live:
        folder = people_in(tmp_path / "people", {"Ada": 3})
        for number in range(4):
            (folder / "Ada" / f"large{number}.png").write_bytes(picture(number, 150))  # 67,500 bytes
        (folder / "Ada" / "huge.png").write_bytes(picture(9, 300))
        report = enrol(live, folder, "--collection", "staff", "--parallel", "1")
        assert enrolled(live, "staff") == {"Ada": 7}
        assert "more than a request may have" in report["people"][0]["left_out"]["Ada/huge.png"]


def test_what_a_caller_may_not_or_cannot_is_one_line(tmp_path, folder, capsys, monkeypatch):
    tokens = tmp_path / "tokens.toml"
    (tmp_path / "secret").write_text(add_token(tokens, "camera", "search") + "\n")
    importer = add_token(tokens, "importer", "admin")
    with live_service(tmp_path / "served", tokens=tokens, limits=Limits(persons=1)) as live:
        address = live.server.address
        for words, code, said in (
            ([address, str(folder)], 1, "a token is needed"),
            ([address, str(folder), "--token-file", str(tmp_path / "secret")], 1, "needs write"),
            ([address, str(folder), "--token-file", str(tmp_path / "nothing")], 1, "cannot read"),
            ([address, str(tmp_path / "nothing")], 2, "there is no folder"),
            ([address, str(folder / "Ada")], 2, "no picture in any sub-folder"),
            ([address, str(folder), "--parallel", "0"], 2, "between 1 and 32"),
        ):
            assert main(["gallery", "enrol", *words]) == code
            assert said in capsys.readouterr().err
        monkeypatch.setenv("PLSC_TOKEN", importer)
        assert main(["gallery", "enrol", address, str(folder), "--parallel", "1"]) == 1
        out = capsys.readouterr().out
        assert "stopped: " in out
        assert "the same command goes on from here" in out


@pytest.mark.slow
def test_a_kill_doubles_and_loses_nobody(tmp_path):
    with live_service(tmp_path / "served", limits=Limits(inputs=2)) as live:
        people = {f"p{number:03}": 1 + number % 4 for number in range(80)}
        folder = people_in(tmp_path / "people", people)
        live.collection("people")
        command = [sys.executable, "-m", "plsc.tools.entry", "gallery", "enrol", live.server.address, str(folder)]
        for least in (5, 30):
            running = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            wait_until(lambda least=least: len(enrolled(live)) >= least)
            running.send_signal(signal.SIGKILL)
            running.wait()
        assert len(enrolled(live)) < 80, "the last one was not interrupted"
        report = enrol(live, folder)
        assert report["failed"] == 0
        assert enrolled(live) == people


def test_what_the_service_says_of_a_picture_follows_its_name(tmp_path, capsys):
    class NoFace:
        def numbered(self, image: Any, name: str) -> Any:
            raise DataError(f"{name}: no face was found")

    folder = people_in(tmp_path / "people", {"Ada": 1})
    with live_service(tmp_path / "served", NoFace()) as live:
        report = enrol(live, folder, code=1)
    assert report["people"][0]["left_out"] == {"Ada/0.png": "no face was found"}
    assert "Ada/0.png: left out: no face was found\n" in capsys.readouterr().out


@pytest.fixture
def seeing(tmp_path: Path) -> Iterator[Live]:
    with live_service(tmp_path / "seeing", DrawnDetector(), threshold=0.999, limits=Limits(inputs=64)) as running:
        yield running


@pytest.fixture
def groups(tmp_path: Path) -> Path:
    """Pictures of one face, of two and of three, of one person."""
    faces = [np.random.default_rng(seed).integers(1, 256, (SIZE, SIZE, 3)).astype(np.uint8) for seed in range(6)]
    folder = tmp_path / "groups" / "Ada"
    folder.mkdir(parents=True)
    for count, first in ((1, 0), (2, 1), (3, 3)):
        drawn = group([*faces[first : first + count - 1], larger(faces[first + count - 1])])  # the last is the largest
        Image.fromarray(drawn).save(folder / f"{count}.png")
    return folder.parent


def keys_of(live: Live) -> set[str]:
    (ada,) = live.ask("GET", "/v1/collections/people/persons").json()["persons"]
    return {face["key"] for face in ada["faces"]}


def test_of_pictures_with_several_faces_the_largest_is_enrolled_and_they_are_named(seeing, groups, capsys):
    report = enrol(seeing, groups)
    assert enrolled(seeing) == {"Ada": 3}
    assert (report["several"], report["people"][0]["several"]) == (2, {"Ada/2.png": 2, "Ada/3.png": 3})
    told = capsys.readouterr().out
    assert "Ada/3.png: it shows 3 faces\n" in told
    assert "1 enrolled; 3 faces enrolled, 0 pictures left out, 2 pictures with several faces" in told
    again = enrol(seeing, groups)
    assert (again["there"], again["several"], enrolled(seeing)) == (1, 0, {"Ada": 3})
    largest = [(groups / "Ada" / f"{count}.png").read_bytes() for count in (1, 2, 3)]
    assert keys_of(seeing) == {picture_key(data) for data in largest}


def test_every_face_is_enrolled_on_request_and_none_twice(seeing, groups):
    enrol(seeing, groups)
    report = enrol(seeing, groups, "--faces", "all")
    assert (report["faces"], report["several"], enrolled(seeing)) == (3, 2, {"Ada": 6})
    two, three = (picture_key((groups / "Ada" / f"{count}.png").read_bytes()) for count in (2, 3))
    assert keys_of(seeing) >= {two, f"{two}#2", three, f"{three}#2", f"{three}#3"}
    assert enrol(seeing, groups, "--faces", "all")["faces"] == 0
    assert enrolled(seeing) == {"Ada": 6}


def test_every_face_needs_a_detector(live, folder, capsys):
    assert main(["gallery", "enrol", live.server.address, str(folder), "--faces", "all"]) == 2
    assert "--faces all: the service looks for no faces; start it with --detector" in capsys.readouterr().err
