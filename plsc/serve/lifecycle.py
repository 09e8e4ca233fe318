"""The state of a service's process: whether it admits requests, and why not."""

import asyncio
from collections.abc import Sequence
from typing import Any

from plsc.errors import PlscError
from plsc.progress import counted
from plsc.serve.audit import Event
from plsc.serve.errors import ApiError
from plsc.serve.models import Unsearched
from plsc.serve.service import Service
from plsc.serve.tokens import TokenBook

_STORE_SECONDS = 2.0  # a store that takes longer to say what it holds is lost


class Lifecycle:
    """State of the process: ``status`` is "loading", "ready" or "stopping"."""

    def __init__(self) -> None:
        self.status = "loading"
        self.tokens: TokenBook | None = None
        self._service: Service | None = None

    @property
    def service(self) -> Service:
        """The service; :class:`ApiError` 503 unless it is ready."""
        if self._service is None or self.status != "ready":
            raise ApiError(503, f"the service is {self.status}; ask again in a moment")
        return self._service

    def open(self, service: Service) -> None:
        """Admit requests to ``service``."""
        self._service = service
        self.status = "ready"

    @property
    def private_paths(self) -> Sequence[str]:
        """Files and folders of the service, which no answer names."""
        return () if self._service is None else self._service.private_paths

    async def readiness(self) -> tuple[str, str | None]:
        """ "ready", or why requests are not served; and what to do about that, where it can be said."""
        try:
            service = self.service
        except ApiError:
            return self.status, None
        if self.tokens is not None and not self.tokens.is_current():
            return "without its tokens", None
        try:
            async with asyncio.timeout(_STORE_SECONDS):
                await service.statistics("")
                unsearched = await service.unsearched()
        except (PlscError, TimeoutError):
            return "without its store", None
        if unsearched.are_all:
            return "without the model of its gallery", self._told(unsearched)
        return "ready", None

    def _told(self, unsearched: Unsearched) -> str:
        """What to do about collections of other models; their names are for nobody who has shown no token."""
        if self.tokens is not None:
            return "no collection is of this service's model; its standard error names them, and what to do"
        first, *others = (str(refusal) for refusal in unsearched.refusals.values())
        return f"{first} ({counted(len(others), 'more collection')} likewise)" if others else first

    async def audit(self, event: Event, *, durable: bool, **entry: Any) -> None:
        """Write an audit line, once there is a service; a durable one is on disk when this returns."""
        if self._service is None:
            return
        if durable:
            await self._service.audit.write_durably(event, **entry)
        else:
            self._service.audit.write(event, **entry)
