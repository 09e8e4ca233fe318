"""uvicorn's HTTP connections, made impatient: a request's head has to come in time, and lost callers are noticed."""

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

from plsc.serve.settings import Limits


class Connection(H11Protocol):
    """A connection with limits. Between requests uvicorn's own keep-alive timeout holds."""

    limits: Limits
    timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Take a connection, or cut it off where there are too many."""
        super().connection_made(transport)
        if len(self.connections) > self.limits.connections:
            transport.abort()
        else:
            self._await_head()

    def data_received(self, data: bytes) -> None:
        """Pass data on; the first of a request starts the clock, and its whole head stops it."""
        if self.timer is None and not self._is_busy():
            self._await_head()
        super().data_received(data)
        if self._is_busy():
            self._stop_clock()
            self.scope["state"]["abort"] = self.transport.abort

    def connection_lost(self, error: Exception | None) -> None:
        """Let the request's handler know that nobody waits for it."""
        self._stop_clock()
        super().connection_lost(error)
        if self.scope is not None and (gone := self.scope["state"].pop("gone", None)) is not None:
            gone()

    def _is_busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _await_head(self) -> None:
        self.timer = self.loop.call_later(self.limits.head_seconds, self._give_up)

    def _stop_clock(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def _give_up(self) -> None:
        self.timer = None
        if not self._is_busy():
            self.transport.abort()


def protocol(limits: Limits) -> type[asyncio.Protocol]:
    """uvicorn's protocol for a service of these limits."""
    return type("LimitedConnection", (Connection,), {"limits": limits})
