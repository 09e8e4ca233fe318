"""Where a service stands between its start and its end; requests pass only while it is ready."""

from plsc.serve.failures import Refusal
from plsc.serve.service import Service


class Gate:
    """``status`` is "loading", "ready" or "stopping"; ``service`` is there once loading is done."""

    def __init__(self) -> None:
        self.status = "loading"
        self._service: Service | None = None

    @property
    def service(self) -> Service:
        """The service; :class:`Refusal` 503 unless it is ready."""
        if self._service is None or self.status != "ready":
            raise Refusal(503, f"the service is {self.status}; ask again in a moment")
        return self._service

    def open(self, service: Service) -> None:
        """Let requests in."""
        self._service = service
        self.status = "ready"

    def audit(self, token: str | None, operation: str, collection: str | None, ids: list[int], status: int) -> None:
        """Write a line of audit, where there is a service yet."""
        if self._service is not None:
            self._service.audit.write(token, operation, collection, ids, status)
