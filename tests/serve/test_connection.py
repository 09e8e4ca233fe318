"""What goes out on a connection, and when."""

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.live_service import Live, live_service, vectors

pytestmark = pytest.mark.live


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    """A service whose collection "staff" has five persons, "0" to "4"."""
    with live_service(tmp_path) as running:
        persons = [{"name": str(place), "faces": [{"vector": row.tolist()}]} for place, row in enumerate(vectors(5))]
        assert running.ask("POST", f"{running.collection('staff')}/persons", {"persons": persons}).status_code == 201
        yield running


def search_request(live: Live, place: int, *headers: str) -> bytes:
    """A search, as bytes, that finds the person of that name."""
    body = json.dumps({"query": {"vector": vectors(5)[place].tolist()}, "k": 1}).encode()
    head = ["POST /v1/collections/staff/search HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json"]
    return live.addressed("\r\n".join([*head, f"Content-Length: {len(body)}", *headers, "", ""]).encode()) + body


def answers(wire: socket.socket, count: int) -> tuple[list[dict[str, str]], list[str]]:
    """The heads of ``count`` answers, and the name that each found; each has to be a whole 200 answer."""
    file, heads, names = wire.makefile("rb"), [], []
    for _ in range(count):
        assert file.readline() == b"HTTP/1.1 200 OK\r\n"
        lines = iter(lambda: file.readline().decode().strip(), "")
        heads.append({name.lower(): value for name, value in (line.split(": ", 1) for line in lines)})
        content = json.loads(file.read(int(heads[-1]["content-length"])))
        names.append(content["results"][0]["matches"][0]["person"]["name"])
    return heads, names


@pytest.mark.slow
def test_requests_sent_behind_each_other_and_in_parts_are_answered_in_turn(live: Live) -> None:
    requests = b"".join(search_request(live, place) for place in (3, 1, 4, 0))
    last = search_request(live, 2, "Connection: close")
    with live.connect() as wire:
        wire.sendall(requests)
        heads, names = answers(wire, 4)
        assert names == ["3", "1", "4", "0"]
        end = last.index(b"\r\n\r\n") + 4
        for part in (last[:10], last[10:end], last[end:-1], last[-1:]):
            wire.sendall(part)
            assert live.ask("GET", "/v1/info").status_code == 200  # by now the service has seen the part
        (head,), names = answers(wire, 1)
        assert (names, head.pop("connection")) == (["2"], "close")
        assert wire.recv(1) == b""
    for said in (*heads, head):
        assert re.fullmatch(r"\w{3}, \d\d \w{3} \d{4} \d\d:\d\d:\d\d GMT", said.pop("date"))
        assert int(said.pop("content-length")) > 0
        assert said == {
            "content-type": "application/json",
            "cache-control": "no-store",
            "x-content-type-options": "nosniff",
        }
