"""``plsc gallery enrol URL FOLDER``: a person for each sub-folder, reported, and never twice."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from support.live_service import Live, live_service, picture
from support.waiting import wait_until

from plsc.serve.settings import Limits
from plsc.serve.tokens import add_token
from plsc.tools.entry import main

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
        (twins / name / "a.png").write_bytes(picture(seed))
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
