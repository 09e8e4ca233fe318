"""What is wrong with the service's own files is told in its log; no caller learns their names."""

import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.live_service import DIM, Live, image_input, live_service, picture, vectors

from plsc.errors import StorageError

pytestmark = pytest.mark.live


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    with live_service(tmp_path) as running:
        place = running.collection("staff")
        persons = [{"name": str(n), "faces": [{"vector": row.tolist()}]} for n, row in enumerate(vectors(5))]
        assert running.ask("POST", f"{place}/persons", {"persons": persons}).status_code == 201
        yield running


def all_answers(live: Live) -> list[httpx.Response]:
    """Answers of every kind of request."""
    place, vector = "/v1/collections/staff", {"vector": [1.0] * DIM}
    requests: list[tuple[str, str, Any]] = [
        ("GET", "/health/ready", None),
        ("GET", "/v1/info", None),
        ("GET", "/v1/collections", None),
        ("GET", place, None),
        ("GET", f"{place}/persons", None),
        ("GET", f"{place}/persons/1", None),
        ("GET", f"{place}/persons/1/faces/1/thumbnail", None),
        ("POST", f"{place}/persons", {"faces": [vector]}),
        ("POST", f"{place}/persons/2/faces", {"faces": [image_input(picture(1))]}),
        ("PATCH", f"{place}/persons/1", {"name": "x"}),
        ("POST", f"{place}/search", {"query": vector}),
        ("POST", f"{place}/search", {"query": vector, "filter": {"a": 1}}),
        ("POST", f"{place}/compact", None),
        ("POST", "/v1/snapshots", None),
        ("GET", "/v1/snapshots", None),
        ("DELETE", f"{place}/persons/1", None),
    ]
    return [live.ask(method, path, body) for method, path, body in requests]


def check(live: Live, capfd: Any, *statuses: int) -> str:
    """Ask everything: the statuses occur, and no answer names the folder. Returns what standard error says."""
    answers = all_answers(live)
    found = {answer.status_code for answer in answers}
    assert found >= set(statuses), found
    for answer in answers:
        assert str(live.folder) not in answer.text, answer.request.url
        assert "sqlite" not in answer.text, answer.request.url
    said: str = capfd.readouterr().err
    assert "Traceback" not in said
    return said


def test_damage(live, capfd):
    with sqlite3.connect(live.folder / "store" / "gallery.sqlite") as database:
        database.execute("UPDATE persons SET metadata = '{}   ' WHERE id = 1")
    database.close()
    assert f"{live.folder}/store/gallery.sqlite is corrupt: person 1" in check(live, capfd, 500)


def test_snapshots_that_cannot_be_written(live, capfd):
    shutil.rmtree(live.folder / "snapshots", ignore_errors=True)
    (live.folder / "snapshots").write_text("in the way")
    try:
        assert str(live.folder / "snapshots") in check(live, capfd, 503)
    finally:
        (live.folder / "snapshots").unlink()


def test_a_store_that_cannot_write(live, capfd):
    def full(*_: object, **__: object) -> None:
        raise StorageError(f"{live.folder}/store/gallery.sqlite: database or disk is full; make room on the disk")

    live.service.store.add_persons = full
    assert "database or disk is full" in check(live, capfd, 503)


def test_a_closed_store(live, capfd):
    live.service.store.close()
    live.service.store.close = lambda: None  # the service's own end
    assert str(live.folder) in check(live, capfd, 503)
