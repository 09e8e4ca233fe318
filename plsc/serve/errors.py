"""Errors as HTTP responses: ``{"error": {"code", "message"}}``, one line that states the problem and the fix."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match

from plsc import errors
from plsc.gallery.validation import COLLECTION_NAME, COLLECTION_NAME_RULE
from plsc.progress import note

# The code of each status, and what the description says of it.
_ERRORS: dict[int, tuple[str, str]] = {
    400: ("bad_request", "Invalid request"),
    401: ("unauthorized", "No token, or an unknown one"),
    403: ("forbidden", "The token's role does not suffice"),
    404: ("not_found", "Not found"),
    405: ("method_not_allowed", "Method not allowed"),
    408: ("too_slow", "The body came too slowly"),
    409: (
        "conflict",
        "It exists or is known already, is of another model, or a request with its Idempotency-Key is in progress",
    ),
    412: ("precondition_failed", "The person was changed since it was read"),
    413: ("too_large", "Larger than allowed"),
    415: ("unsupported_type", "Unsupported content type"),
    422: ("unprocessable", "An image or vector that cannot be used, or an Idempotency-Key of another request"),
    429: ("too_many", "More than the caller's rate limits or its share of the service allow"),
    500: ("internal", "Internal error, or the stored data is damaged"),
    503: ("unavailable", "Busy, loading, stopping, or the store is unreachable"),
    504: ("deadline", "Deadline exceeded"),
    507: ("quota_exceeded", "More than the operator's quotas allow"),
    414: ("too_large", "The path and the query are too long"),
    431: ("too_large", "The head is too large"),
}
_CODES: list[Any] = list(dict.fromkeys(code for code, _ in _ERRORS.values()))
RETRY_SECONDS = 1
FORM = "form:"  # begins the tags of the forms that a body may have; errors leave them out
_STATUS_OF: tuple[tuple[type[errors.PlscError], int], ...] = (
    (errors.NotFoundError, 404),
    (errors.PreconditionError, 412),
    (errors.ConflictError, 409),
    (errors.StorageError, 503),
    (errors.DeadlineError, 504),
    (errors.UsageError, 400),
    (errors.DataError, 422),
)
_INTERNAL = {
    500: "the stored data are damaged; see the server's log",
    503: "the store cannot be read or written at the moment; see the server's log",
}


def _header(description: str, **schema: Any) -> dict[str, Any]:
    return {"required": True, "description": description, "schema": schema}


_RETRY_AFTER = {"Retry-After": _header("Seconds", type="integer", minimum=1)}
_HEADERS = {  # that every answer with such a status has
    401: {"WWW-Authenticate": _header("Bearer", type="string")},
    429: {
        **_RETRY_AFTER,
        "RateLimit-Policy": {**_header("The rate limit that was reached", type="string"), "required": False},
        "RateLimit": {**_header("What is left of it, and until when", type="string"), "required": False},
    },
    503: _RETRY_AFTER,
}


class ApiError(HTTPException):
    """A request answered with an error; the message is shown to the caller.

    Args:
        status: HTTP status. 429 and 503 get a ``Retry-After`` header, of a second if ``headers`` have none.
        message: problem and fix; white space is collapsed into one line.
        headers: further headers of the response.
        details: for machines, besides the error in the body.
    """

    def __init__(
        self,
        status: int,
        message: str,
        headers: dict[str, str] | None = None,
        details: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.details = details
        if status in (429, 503):
            headers = {"Retry-After": str(RETRY_SECONDS), **(headers or {})}
        super().__init__(status, " ".join(message.split()), headers)


class ErrorDetail(BaseModel):
    """``code`` is one of a fixed set; ``message`` is one line: the problem and the fix."""

    code: Annotated[str, Field(json_schema_extra={"enum": _CODES})]
    message: str


class KnownPerson(BaseModel):
    """An enrolled person that the faces of an enrolment match, at or above the service's threshold."""

    id: int
    name: str | None
    score: float


class SeenFace(BaseModel):
    """A face that the detector found: its number among the picture's, of which the largest is 1.

    ``box`` is left, top, right, bottom, and ``landmarks`` are five points (x, y): in pixels of the picture as it is
    shown, turned by its EXIF.
    """

    number: int
    box: list[float]
    landmarks: list[list[float]]
    score: float


class InputFace(SeenFace):
    """A face of the input of this name."""

    input: str


class ErrorBody(BaseModel):
    """The body of every error outside /v2."""

    error: ErrorDetail
    known: KnownPerson | None = Field(None, description="Only where on_known=refuse refused an enrolment")
    faces: list[InputFace] | None = Field(None, description="Only where an enrolment has to say which face is meant")


async def answer_error(request: Request, error: Exception) -> Response:
    """Exception handler of the application: any exception of a route as an HTTP response."""
    if isinstance(error, RequestValidationError):
        error = ApiError(400, first_error(error.errors()))
    elif isinstance(error, errors.PlscError):
        error = as_api_error(error, request.app.state.lifecycle.private_paths)
    elif isinstance(error, HTTPException) and not isinstance(error, ApiError):
        error = _of_router(request, error)
    elif not isinstance(error, HTTPException):  # starlette raises it again after this answer, and uvicorn logs it
        error = ApiError(500, "internal server error; see the server's log")
    return to_response(request.url.path, error)


def _of_router(request: Request, error: HTTPException) -> HTTPException:
    """The router's own errors in words; it names the methods of one route where several share a path."""
    path = errors.quoted(request.url.path)
    if error.status_code == 404:
        return ApiError(404, f"there is no {path}; GET /openapi.json describes all there is")
    if error.status_code != 405:
        return error
    matching = (route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE)
    methods = ", ".join(sorted({method for route in matching for method in route.methods}))
    return ApiError(405, f"{path} takes {methods}", {"Allow": methods})


def as_api_error(error: errors.PlscError, private_paths: Sequence[str] = ()) -> ApiError:
    """Map an exception of the library to its HTTP status.

    What is wrong with the service itself is told in the server's log: to callers it would name files and folders.

    Args:
        private_paths: texts that no caller is told.
    """
    status = next((status for kind, status in _STATUS_OF if isinstance(error, kind)), 500)
    message = str(error)
    if any(path in message for path in private_paths):
        status = 500 if status == 500 else 503
    elif status not in _INTERNAL:
        return ApiError(status, message)
    note(f"plsc serve: {' '.join(message.split())}")
    return ApiError(status, _INTERNAL[status])


def to_response(path: str, error: HTTPException) -> Response:
    """The error as JSON; under /v2 in the Open Inference Protocol's shape ``{"error": message}``."""
    status, message = error.status_code, str(error.detail)
    code, _ = _ERRORS.get(status, _ERRORS[400 if status < 500 else 500])
    is_inference = path == "/v2" or path.startswith("/v2/")
    body = {"error": message if is_inference else {"code": code, "message": message}, **getattr(error, "details", {})}
    return Response(to_json(body), status, error.headers, "application/json")


def first_error(problems: Sequence[Any]) -> str:
    """The first of pydantic's errors as one line that names its location."""
    first = problems[0]
    if first["type"] == "string_pattern_mismatch" and first["ctx"]["pattern"] == COLLECTION_NAME:
        return f"{COLLECTION_NAME_RULE}, unlike {errors.quoted(first['input'])}"
    parts = (str(part) for part in first["loc"] if part != "body")
    location = ".".join(part[:80] for part in parts if not part.startswith(FORM))
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{location + ': ' if location else ''}{first['msg'].removeprefix('Value error, ')}{more}"[:500]


def error_responses(*statuses: int, model: type[BaseModel] = ErrorBody) -> dict[int | str, dict[str, Any]]:
    """OpenAPI's ``responses``: those of ``statuses``, and those that every operation with a role may give."""
    return {
        status: {"model": model, "description": _ERRORS[status][1], "headers": _HEADERS.get(status, {})}
        for status in sorted({400, 401, 403, 414, 429, 431, 500, 503, *statuses, *((408,) if 413 in statuses else ())})
    }
