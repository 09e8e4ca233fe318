"""plsc.Client before a server that drops answers, is busy, or throttles: what was asked for is done once."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from support.live_service import Live, picture, vectors
from support.waiting import held_up, wait_until

import plsc
from plsc.client import NewPerson, ServerError
from plsc.errors import UsageError

pytestmark = pytest.mark.live

LOST, BUSY, THROTTLED = "lost", "busy", "throttled"  # done and not answered; not done, 503; not done, 429


class Mischief(BaseHTTPRequestHandler):
    """Passes requests on to ``address``, but for those that ``plan`` says something of, in turn."""

    address = ""
    plan: list[str]
    seen: list[tuple[str, str | None]]

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.seen.append((self.command, self.headers.get("Idempotency-Key")))
        mischief = self.plan.pop(0) if self.plan else ""
        if mischief in (BUSY, THROTTLED):
            said = b'{"error": {"code": "x", "message": "later"}}'
            self._answer(503 if mischief == BUSY else 429, said, {"Retry-After": "0"})
            return
        headers = {name: value for name, value in self.headers.items() if name.lower() not in ("host", "connection")}
        answer = httpx.request(self.command, f"{self.address}{self.path}", headers=headers, content=body, timeout=30)
        if mischief != LOST:
            self._answer(answer.status_code, answer.content, dict(answer.headers))

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _pass_on

    def _answer(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def mischief(live: Live, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[type[Mischief], plsc.Client]]:
    """The proxy's handler, and a client that reaches the service through it."""
    monkeypatch.setattr("plsc.client._pause", lambda wished: 0.0)
    about: dict[str, Any] = {"address": live.server.address, "plan": [], "seen": []}
    handler = type("Handler", (Mischief,), about)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    with plsc.Client(f"http://127.0.0.1:{server.server_port}") as client:
        yield handler, client
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("what", [LOST, BUSY, THROTTLED])
def test_every_write_is_done_once(mischief, what):
    handler, client = mischief
    vector = vectors(1, 1)[0]

    def troubled(ask: Any, *args: Any, **more: Any) -> Any:
        handler.plan[:], handler.seen[:] = [what, LOST if what == LOST else BUSY], []
        result = ask(*args, **more)
        assert len(handler.seen) == 3
        assert len(set(handler.seen)) == 1, "the same request, under the same key"
        return result

    name = f"c-{what}"
    before = len(client.snapshots())
    assert troubled(client.create_collection, name).name == name
    ada = troubled(client.add_person, name, "Ada", faces=[vector, picture(2)], metadata={"a": 1}, external_id="a")
    more = troubled(client.add_persons, name, [NewPerson("B"), NewPerson("C")])
    assert [one.id for one in more] == [ada.id + 1, ada.id + 2]
    assert len(troubled(client.add_faces, name, ada.id, [vectors(1, 2)[0]])) == 1
    put = troubled(client.upsert_person, name, "b", "D", faces=[vector])
    troubled(client.compact, name)
    troubled(client.take_snapshot)
    assert [one.name for one in client.persons(name)] == ["Ada", "B", "C", "D"]
    assert [len(one.faces) for one in client.persons(name)] == [3, 0, 0, 1]
    assert client.person_by_external_id(name, "b") == put
    assert len(client.snapshots()) == before + 1


def test_a_lost_change_is_not_repeated(mischief):
    handler, client = mischief
    client.create_collection("changes")
    ada = client.add_person("changes", "Ada", external_id="a")
    for ask in (
        lambda: client.update_person("changes", ada.id, name="B"),
        lambda: client.upsert_person("changes", "a", "C", if_match="*"),
        lambda: client.delete_person("changes", ada.id),
    ):
        handler.plan[:], handler.seen[:] = [LOST], []
        with pytest.raises(ServerError, match="does not answer"):
            ask()
        assert len(handler.seen) == 1
    assert list(client.persons("changes")) == []


def test_tries_come_to_an_end(mischief):
    handler, client = mischief
    client._retries = 3
    for what, told, status in ((BUSY, "later", 503), (LOST, "does not answer", 0)):
        handler.plan[:], handler.seen[:] = [what] * 3, []
        assert isinstance(client.collections(), list)
        assert len(handler.seen) == 4
        handler.plan[:], handler.seen[:] = [what] * 9, []
        with pytest.raises(ServerError, match=told) as refused:
            client.collections()
        assert (len(handler.seen), refused.value.status) == (4, status)


def test_a_request_in_hand_is_waited_for(mischief, live, monkeypatch):
    handler, client = mischief
    client.create_collection("waiting")
    monkeypatch.setattr("plsc.client._pause", lambda wished: 0.1)
    with plsc.Client(client._url, timeout=0.3, retries=60) as hasty:
        made: list[Any] = []
        asking = threading.Thread(target=lambda: made.append(hasty.add_person("waiting", "Ada")))
        with held_up(live.service.store, "add_persons") as (entered, _):
            asking.start()
            assert entered.acquire(timeout=120)
            wait_until(lambda: len(handler.seen) >= 4)
        asking.join()
    assert list(client.persons("waiting")) == made


def test_two_clients_do_not_overwrite_each_other(live):
    with plsc.Client(live.server.address) as client:
        client.create_collection("edited")
        ada = client.add_person("edited", "Ada", faces=[vectors(1)[0]], expires="2090-01-31")
        assert ada.expires == "2090-01-31T00:00:00.000Z"
        changed = client.update_person("edited", ada.id, name="B", if_match=ada)
        for late in (
            lambda: client.update_person("edited", ada.id, name="C", if_match=ada),
            lambda: client.delete_face("edited", ada.id, ada.faces[0], if_match=ada),
            lambda: client.delete_person("edited", ada.id, if_match=ada),
        ):
            with pytest.raises(ServerError) as refused:
                late()
            assert (refused.value.status, refused.value.code) == (412, "precondition_failed")
        assert client.person("edited", ada.id) == changed
        assert client.update_person("edited", ada.id, name=None, expires=None, if_match=changed).name is None
        put = client.upsert_person("edited", "a/b", "D", only_new=True)
        with pytest.raises(ServerError, match="there is such a person already"):
            client.upsert_person("edited", "a/b", "E", only_new=True)
        with pytest.raises(UsageError, match=r"read it by client\.person"):
            client.delete_person("edited", ada.id, if_match=client.search("edited", vectors(1)[0])[0].person)
        client.delete_person_by_external_id("edited", "a/b", if_match=put)
        client.delete_person("edited", ada.id, if_match=client.person("edited", ada.id))
        assert client.collection("edited").persons == 0
