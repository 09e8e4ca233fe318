"""One request and its answer, from the guard's first look at the head until the last byte is out."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from starlette.responses import Response

from plsc.serve.asgi import Message, Receive, Scope, Send
from plsc.serve.connection import Connection
from plsc.serve.roles import Role

_HEADERS = b"content-type: application/json\r\ncontent-length: %s\r\ncache-control: no-store\r\n"


class Exchange:
    """A request's head, what the guard learns of it, and the ways to answer.

    ``content``: the body, once the guard has read it. ``held``: its bytes, as the guard counts them; ``counted``:
    it is among the requests in hand. ``needed``: the
    role that it takes, once that is known. ``status``: of the answer, 0 before that begins. ``gone``: the caller hung
    up. ``begin`` is called with the exchange before an answer's first byte; an answer that the caller does not take
    within ``send_seconds`` is cut off.
    """

    # A thousand may wait at a time, and be out of the processor's caches when their turn comes.
    __slots__ = (
        "_begin",
        "_replayed",
        "_seconds",
        "_send",
        "_task",
        "begun",
        "connection",
        "content",
        "counted",
        "gone",
        "headers",
        "held",
        "method",
        "needed",
        "path",
        "receive",
        "scope",
        "status",
    )

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, send_seconds: float, begin: "Callable[[Exchange], None]"
    ) -> None:
        self.scope, self.receive, self._send, self._seconds, self._begin = scope, receive, send, send_seconds, begin
        self.method, self.path = str(scope["method"]), str(scope["path"])
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.begun = time.monotonic()
        self.content, self.held, self.counted = b"", 0, False
        self.needed: Role | None = None
        self.status = 0
        self.gone = False
        self.connection: Connection | None = scope.setdefault("state", {}).get("connection")
        self._replayed = False

    def take_body(self) -> bytes | None:
        """The body, where the whole of it has come and can be had without waiting; else None."""
        return None if self.connection is None else self.connection.take_body(self.scope)

    async def replay(self) -> Message:
        """ASGI's ``receive`` for who comes after the guard: the body at once, and then what the connection says."""
        if self._replayed:
            return await self.receive()
        self._replayed = True
        return {"type": "http.request", "body": self.content, "more_body": False}

    async def send(self, message: Message) -> None:
        """ASGI's ``send``."""
        begins, connection = message["type"] == "http.response.start", self.connection
        if begins:
            self.status = message["status"]
            message["headers"] = [*message["headers"], *_headers_of(self.path)]
            self._begin(self)
        if connection is None:
            await self._send(message)
            return
        if begins:
            connection.hold_writes()  # the head goes out with the first of the body
        if connection.is_writable:
            await self._send(message)
        else:
            await self._send_in_time(message, connection)
        if not begins:
            connection.release_writes()

    async def answer(self, content: bytes) -> None:
        """Send ``content``, which is JSON, as the whole answer of a /v1 path, with status 200."""
        connection, size = self.connection, b"%d" % len(content)
        if connection is not None and connection.can_answer(self.scope):
            self.status = 200
            self._begin(self)
            connection.answer(_HEADERS % size, content)
            return
        headers = [(b"content-type", b"application/json"), (b"content-length", size)]
        await self.send({"type": "http.response.start", "status": 200, "headers": headers})
        await self.send({"type": "http.response.body", "body": content})

    async def respond(self, response: Response) -> None:
        """Send a response of starlette's."""
        await response(self.scope, self.replay, self.send)

    def cancel_when_gone(self) -> None:
        """Let the connection, when it is lost, cancel what nobody waits for any more."""
        if self.connection is not None:
            self._task = current_task()
            self.connection.gone = self._hang_up

    def settle(self) -> None:
        """The answer is out: losing the connection means nothing now."""
        if self.connection is not None:
            self.connection.gone = None

    def _hang_up(self) -> None:
        self.gone = True
        self._task.cancel()

    async def _send_in_time(self, message: Message, connection: Connection) -> None:
        try:
            async with asyncio.timeout(self._seconds):
                await self._send(message)
        except TimeoutError:
            connection.cut()


def current_task() -> "asyncio.Task[Any]":
    """The task that a request runs in."""
    task = asyncio.current_task()
    assert task is not None, "requests run in tasks"
    return task


def _headers_of(path: str) -> list[tuple[bytes, bytes]]:
    return [(b"cache-control", b"no-store")] if path.startswith(("/v1", "/v2")) else []
