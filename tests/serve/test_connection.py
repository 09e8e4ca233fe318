"""What goes out on a connection, and when."""

from pathlib import Path

from live_service import live_service

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


def test_an_answer_is_one_packet(tmp_path: Path):
    """Head and body in one read: the second system call cost a tenth of a search's answer."""
    with live_service(tmp_path) as live, live.connect() as connection:
        connection.sendall(b"GET /v1/info HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        answer = connection.recv(1 << 16)
        head, _, body = answer.partition(b"\r\n\r\n")
        announced = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
        assert len(body) == int(announced.partition(b":")[2])
