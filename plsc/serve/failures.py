"""Failures as HTTP answers: ``{"error": {"code", "message"}}``, one line that names the thing and the mend."""

from typing import Any

from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.responses import Response

from plsc.errors import ConflictError, DataError, NotFoundError, PlscError, StorageError, UsageError

CODES = {
    400: "bad_request",
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    409: "conflict",
    413: "too_large",
    415: "unsupported_type",
    422: "unprocessable",
    429: "too_many",
    500: "internal",
    503: "unavailable",
    504: "deadline",
}
RETRY_SECONDS = 1
_STATUSES: tuple[tuple[type[PlscError], int], ...] = (
    (NotFoundError, 404),
    (ConflictError, 409),
    (StorageError, 503),
    (UsageError, 400),
    (DataError, 422),
)


class Refusal(HTTPException):
    """A request answered with an error; the message is for the caller's eyes."""

    def __init__(self, status: int, message: str, headers: dict[str, str] | None = None) -> None:
        if status == 503:
            headers = {"Retry-After": str(RETRY_SECONDS), **(headers or {})}
        super().__init__(status, " ".join(message.split()), headers)


def as_refusal(error: PlscError) -> Refusal:
    """What a failure of the library means to an HTTP caller."""
    status = next((status for kind, status in _STATUSES if isinstance(error, kind)), 500)
    return Refusal(status, str(error))


def error_response(path: str, status: int, message: str, headers: Any = None) -> Response:
    """The answer: our shape, or under /v2 the Open Inference Protocol's ``{"error": message}``."""
    code = CODES.get(status, "bad_request" if status < 500 else "internal")
    shape = {"error": message} if is_inference(path) else {"error": {"code": code, "message": message}}
    return Response(to_json(shape), status, headers, "application/json")


def is_inference(path: str) -> bool:
    """Whether a path belongs to the Open Inference Protocol."""
    return path == "/v2" or path.startswith("/v2/")
