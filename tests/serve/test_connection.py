"""What goes out on a connection, and when."""

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.live_service import DIM, Live, live_service, vectors

from plsc.serve import connection
from plsc.serve.connection import JoiningTransport


class Wire:
    """Records what reaches the network."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        self.sent.append(data)

    def writelines(self, parts: list[bytes]) -> None:
        self.sent.append(b"".join(parts))

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


def joining() -> tuple[JoiningTransport, Wire]:
    wire = Wire()
    return JoiningTransport(wire), wire  # type: ignore[arg-type]


def test_held_writes_go_out_as_one_and_others_at_once():
    transport, wire = joining()
    transport.write(b"continue")
    transport.held = []
    transport.write(b"head")
    transport.write(b"body")
    assert wire.sent == [b"continue"]
    transport.release()
    transport.write(b"more")
    assert wire.sent == [b"continue", b"headbody", b"more"]


def test_closing_sends_what_is_held():
    transport, wire = joining()
    transport.held = []
    transport.write(b"head")
    assert not transport.is_closing()
    transport.close()
    assert wire.sent == [b"head"]
    assert transport.is_closing()


def test_an_answer_is_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Head and body together: a second system call cost a tenth of a search's answer."""
    wires: list[Counted] = []

    def joining_counted(transport: Any) -> JoiningTransport:
        wires.append(Counted(transport))
        return JoiningTransport(wires[-1])  # type: ignore[arg-type]

    monkeypatch.setattr(connection, "JoiningTransport", joining_counted)
    with live_service(tmp_path) as live:
        search = live.collection("staff") + "/search"
        for path in ("/v1/info", "/", "/v1/nowhere", search):
            wires.clear()
            with httpx.Client(base_url=live.server.address) as client:
                method = "POST" if path == search else "GET"
                answer = client.request(method, path, json={"query": {"vector": [1.0] * DIM}})
            assert answer.status_code == (404 if path == "/v1/nowhere" else 200)
            assert [wire.writes for wire in wires] == [1], path


@pytest.fixture(params=["httptools", "h11"])
def live(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Live]:
    """A service whose collection "staff" has five persons, "0" to "4", on either of uvicorn's protocols."""
    if request.param == "h11":
        monkeypatch.setattr(connection, "find_spec", lambda name: None)
    with live_service(tmp_path) as running:
        persons = [{"name": str(place), "faces": [{"vector": row.tolist()}]} for place, row in enumerate(vectors(5))]
        assert running.ask("POST", f"{running.collection('staff')}/persons", {"persons": persons}).status_code == 201
        yield running


def search_request(place: int, *headers: str) -> bytes:
    """A search, as bytes, that finds the person of that name."""
    body = json.dumps({"query": {"vector": vectors(5)[place].tolist()}, "k": 1}).encode()
    head = ["POST /v1/collections/staff/search HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json"]
    return "\r\n".join([*head, f"Content-Length: {len(body)}", *headers, "", ""]).encode() + body


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


def test_requests_sent_behind_each_other_are_answered_in_turn(live: Live) -> None:
    with live.connect() as wire:
        wire.sendall(b"".join(map(search_request, (3, 1, 4, 0))))
        assert answers(wire, 4)[1] == ["3", "1", "4", "0"]
        wire.sendall(search_request(2))
        assert answers(wire, 1)[1] == ["2"]


def test_a_body_may_come_in_parts(live: Live) -> None:
    request = search_request(3)
    with live.connect() as wire:
        for cut in (10, request.index(b"\r\n\r\n") + 4, len(request) - 1):
            wire.sendall(request[:cut])
            assert live.ask("GET", "/v1/info").status_code == 200  # by now the service has seen the part
            wire.sendall(request[cut:])
            assert answers(wire, 1)[1] == ["3"]


def test_an_answer_says_what_every_answer_says(live: Live) -> None:
    with live.connect() as wire:
        wire.sendall(search_request(1))
        (head,), _ = answers(wire, 1)
    assert re.fullmatch(r"\w{3}, \d\d \w{3} \d{4} \d\d:\d\d:\d\d GMT", head.pop("date"))
    assert int(head.pop("content-length")) > 0
    assert head == {
        "content-type": "application/json",
        "cache-control": "no-store",
        "x-content-type-options": "nosniff",
    }


def test_a_connection_ends_after_the_answer_where_the_caller_says_so(live: Live) -> None:
    with live.connect() as wire:
        wire.sendall(search_request(2, "Connection: close"))
        (head,), names = answers(wire, 1)
        assert names == ["2"]
        assert head["connection"] == "close"
        assert wire.recv(1) == b""


class Counted:
    """Counts what goes out on the transport behind it."""

    def __init__(self, transport: Any) -> None:
        self._transport, self.writes = transport, 0

    def write(self, data: bytes) -> None:
        self.writes += 1
        self._transport.write(data)

    def writelines(self, parts: list[bytes]) -> None:
        self.writes += 1
        self._transport.writelines(parts)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
