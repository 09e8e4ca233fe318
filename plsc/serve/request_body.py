"""A request's body: counted while it comes, refused where it is too large or too slow."""

import asyncio
from collections.abc import Callable

from plsc.serve.asgi import Receive
from plsc.serve.exchange import Exchange
from plsc.serve.failures import Refusal
from plsc.serve.settings import Limits


class RequestBody:
    """The body that a request's head announces; :class:`Refusal` if it is too large or encoded.

    ``hold`` is called with the bytes that have come so far. ``is_expected``: the head announces one.
    """

    def __init__(self, headers: dict[bytes, bytes], limits: Limits, hold: Callable[[int], None]) -> None:
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise Refusal(415, "the body is compressed; send it as it is")
        self._limits, self._hold = limits, hold
        announced = int(headers.get(b"content-length", b"0"))
        self.is_expected = announced > 0 or b"transfer-encoding" in headers
        self._check(announced)

    async def read(self, exchange: Exchange) -> bytes:
        """All of it.

        Raises :class:`Refusal` if it grows too large, does not come in time, or the connection is lost.
        """
        if not self.is_expected:
            return b""
        content = exchange.take_body()  # a timer costs as much as the reading
        if content is not None:
            self._count(len(content))
            return content
        seconds = self._limits.body_seconds
        try:
            async with asyncio.timeout(seconds):
                return await self._collect(exchange.receive)
        except TimeoutError:
            raise Refusal(400, f"the body did not arrive within {seconds:g} s; send it faster, or less") from None

    async def _collect(self, receive: Receive) -> bytes:
        chunks, size, more = [], 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Refusal(400, "the connection was lost before the body was whole")
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            self._count(size)
            more = message.get("more_body", False)
        return b"".join(chunks)

    def _count(self, size: int) -> None:
        self._check(size)
        self._hold(size)

    def _check(self, size: int) -> None:
        limit = self._limits.body_bytes
        if size > limit:
            raise Refusal(413, f"the body is larger than the {limit:,} bytes taken; send less at a time")
