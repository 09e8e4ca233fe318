"""What goes out on a connection, and when."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from live_service import live_service

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
        for path in ("/v1/info", "/", "/v1/nowhere"):
            wires.clear()
            with httpx.Client(base_url=live.server.address) as client:
                client.get(path)
            assert [wire.writes for wire in wires] == [1], path


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
