"""What the routes have in common: the service, JSON read fast and strictly, and the errors that each may answer."""

import functools
from collections.abc import Callable, Coroutine, Sequence
from typing import Annotated, Any

import numpy as np
import pydantic_core
from fastapi import Depends, Path, Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from plsc.serve.asgi import Scope
from plsc.serve.failures import Refusal
from plsc.serve.schemas import COLLECTION, LARGEST_ID, ErrorBody
from plsc.serve.service import Service

_COUNTED = 1 << 16  # bytes of JSON looked at together
_DESCRIPTIONS = {
    400: "The request is off",
    401: "A token is needed",
    403: "The token's role does not suffice",
    404: "It does not exist",
    409: "It exists already, or is of another model",
    413: "Larger than is taken",
    415: "Another type of content is needed",
    422: "A picture or vector that cannot be used",
    500: "Something broke here, or what is stored is damaged",
    503: "Busy, loading, stopping, or without its store",
    504: "The deadline passed",
}


def get_service(scope: Scope) -> Service:
    """The service that the guard admitted the request to; it finishes what it began, even when asked to stop."""
    service: Service = scope["state"]["service"]
    return service


async def _service(request: Request) -> Service:
    return get_service(request.scope)


Served = Annotated[Service, Depends(_service)]
CollectionName = Annotated[str, Path(pattern=COLLECTION, description="A collection's name", examples=["staff"])]
Id = Annotated[int, Path(ge=1, le=LARGEST_ID, examples=[1])]


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """OpenAPI's answers of ``statuses``, and of those that every operation may give."""
    return {
        status: {"model": ErrorBody, "description": _DESCRIPTIONS[status]}
        for status in sorted({400, 401, 403, 500, 503, *statuses})
    }


def read_json(body: bytes, most_values: int) -> Any:
    """Parse JSON, five times as fast as the standard library; NaN and infinities are not JSON.

    Raises :class:`Refusal`: 400 where it is not JSON, 413 where it holds more than ``most_values`` values: three bytes
    of it can become an object of 200.
    """
    if len(body) > most_values and _count_values(body, most_values) > most_values:
        raise Refusal(413, f"the JSON holds more than {most_values:,} values; send less, or vectors as vector_b64")
    try:
        return pydantic_core.from_json(body, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        raise Refusal(400, f"the body is not JSON: {error}") from None


def _count_values(body: bytes, most: int) -> int:
    """At least as many values as a JSON text has, told by what separates and opens them; counting ends at ``most``."""
    count, characters = 1, np.frombuffer(body, dtype=np.uint8)
    for start in range(0, len(characters), _COUNTED):
        part = characters[start : start + _COUNTED]
        count += sum(int(np.count_nonzero(part == ord(mark))) for mark in ",[{")
        if count > most:
            break
    return count


def content_type(scope: Scope) -> str:
    """The type that a body says it has, without parameters."""
    return _content_type(dict(scope["headers"]).get(b"content-type", b""))


@functools.lru_cache(64)
def _content_type(given: bytes) -> str:
    return given.decode("latin-1").partition(";")[0].strip().lower()


def require_json(kind: str) -> None:
    """:class:`Refusal` 415 unless a body's type is JSON."""
    if kind != "application/json":
        raise Refusal(415, f"the body is {kind or 'of no type'}; send it with Content-Type: application/json")


def said(problems: Sequence[Any]) -> str:
    """The first of pydantic's problems as one line that names its place."""
    first = problems[0]
    place = ".".join(str(part) for part in first["loc"] if part != "body")
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{place + ': ' if place else ''}{first['msg'].removeprefix('Value error, ')}{more}"[:500]


class JsonRoute(APIRoute):
    """A route whose JSON body is read by :func:`read_json`, once its type has been checked."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler over our kind of request."""
        handle = super().get_route_handler()
        takes_body = self.body_field is not None

        async def handled(request: Request) -> Response:
            if takes_body:
                require_json(content_type(request.scope))
            return await handle(_JsonRequest(request.scope, request.receive))

        return handled


class _JsonRequest(Request):
    async def json(self) -> Any:
        return read_json(await self.body(), get_service(self.scope).most_values)


def record_ids(request: Request, ids: Sequence[int]) -> None:
    """Tell the audit log which persons or faces a write touched."""
    request.scope["state"]["ids"] = list(ids)
