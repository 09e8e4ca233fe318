"""Errors as HTTP responses: ``{"error": {"code", "message"}}``, one line that states the problem and the fix."""

from collections.abc import Sequence
from typing import Any, Literal, get_args

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.responses import Response

from plsc.errors import ConflictError, DataError, NotFoundError, PlscError, StorageError, UsageError
from plsc.gallery.validation import COLLECTION_NAME, COLLECTION_NAME_RULE

Code = Literal[
    "bad_request",
    "unauthorized",
    "forbidden",
    "not_found",
    "method_not_allowed",
    "conflict",
    "too_large",
    "unsupported_type",
    "unprocessable",
    "too_many",
    "internal",
    "unavailable",
    "deadline",
]
_STATUSES = (400, 401, 403, 404, 405, 409, 413, 415, 422, 429, 500, 503, 504)
CODES: dict[int, str] = dict(zip(_STATUSES, get_args(Code), strict=True))
RETRY_SECONDS = 1
_STATUS_OF: tuple[tuple[type[PlscError], int], ...] = (
    (NotFoundError, 404),
    (ConflictError, 409),
    (StorageError, 503),
    (UsageError, 400),
    (DataError, 422),
)
_DESCRIPTIONS = {
    400: "Invalid request",
    401: "No token, or an unknown one",
    403: "The token's role does not suffice",
    404: "Not found",
    409: "It exists already, or belongs to another model",
    413: "Larger than allowed",
    415: "Unsupported content type",
    422: "An image or vector that cannot be used",
    500: "Internal error, or the stored data is damaged",
    503: "Busy, loading, stopping, or the store is unreachable",
    504: "Deadline exceeded",
}


class ApiError(HTTPException):
    """A request answered with an error; the message is shown to the caller.

    Args:
        status: HTTP status. 503 gets a ``Retry-After`` header.
        message: problem and fix; white space is collapsed into one line.
        headers: further headers of the response.
    """

    def __init__(self, status: int, message: str, headers: dict[str, str] | None = None) -> None:
        if status == 503:
            headers = {"Retry-After": str(RETRY_SECONDS), **(headers or {})}
        super().__init__(status, " ".join(message.split()), headers)


class ErrorDetail(BaseModel):
    """``code`` is one of a fixed set; ``message`` is one line: the problem and the fix."""

    code: Code
    message: str


class ErrorBody(BaseModel):
    """The body of every error outside /v2."""

    error: ErrorDetail


async def answer_error(request: Request, error: Exception) -> Response:
    """Exception handler of the application: any exception of a route as an HTTP response."""
    if isinstance(error, RequestValidationError):
        error = ApiError(400, first_error(error.errors()))
    elif isinstance(error, PlscError):
        error = as_api_error(error)
    elif not isinstance(error, HTTPException):  # starlette raises it again after this answer, and uvicorn logs it
        error = ApiError(500, "internal server error; see the server's log")
    return to_response(request.url.path, error)


def as_api_error(error: PlscError) -> ApiError:
    """Map an exception of the library to its HTTP status."""
    status = next((status for kind, status in _STATUS_OF if isinstance(error, kind)), 500)
    return ApiError(status, str(error))


def to_response(path: str, error: HTTPException) -> Response:
    """The error as JSON; under /v2 in the Open Inference Protocol's shape ``{"error": message}``."""
    status, message = error.status_code, str(error.detail)
    code = CODES.get(status, "bad_request" if status < 500 else "internal")
    is_inference = path == "/v2" or path.startswith("/v2/")
    body = {"error": message if is_inference else {"code": code, "message": message}}
    return Response(to_json(body), status, error.headers, "application/json")


def first_error(problems: Sequence[Any]) -> str:
    """The first of pydantic's errors as one line that names its location."""
    first = problems[0]
    if first["type"] == "string_pattern_mismatch" and first["ctx"]["pattern"] == COLLECTION_NAME:
        return f"{COLLECTION_NAME_RULE}, unlike {ascii(first['input'])[:80]}"
    location = ".".join(str(part) for part in first["loc"] if part != "body")
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{location + ': ' if location else ''}{first['msg'].removeprefix('Value error, ')}{more}"[:500]


def error_responses(*statuses: int, model: type[BaseModel] = ErrorBody) -> dict[int | str, dict[str, Any]]:
    """OpenAPI's ``responses``: those of ``statuses``, and those that every operation with a role may give."""
    return {
        status: {"model": model, "description": _DESCRIPTIONS[status]}
        for status in sorted({400, 401, 403, 500, 503, *statuses})
    }
