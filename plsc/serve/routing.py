"""Declarations of routes: what a caller needs, their service and parameters, and JSON bodies read fast and strictly."""

import functools
from collections.abc import Callable, Coroutine, Sequence
from typing import Annotated, Any, TypeVar

import numpy as np
import pydantic_core
from fastapi import Depends, Path, Request
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import Scope

from plsc.gallery.validation import COLLECTION_NAME
from plsc.serve.access import Permission, Right, Role
from plsc.serve.errors import ApiError
from plsc.serve.rate_limits import Kind
from plsc.serve.service import Lifecycle, Service

LARGEST_ID = 2**53 - 1  # beyond, JSON readers that hold numbers in float64 would name someone else
SEGMENT = r"^[^\x00-\x1f\x7f]+$"  # of a path: admission refuses control characters
_SCANNED = 1 << 16  # bytes of JSON counted together
_CONTAINER_VALUES = 16  # as many values as a list or an object counts for: it takes a hundred bytes or two

# Of JSON with characters beyond ASCII: one of them makes every character of its text take up to four bytes.
_WIDE_BYTES = 12 << 20

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])


def requires(
    role: Role | None,
    right: Right | None = None,
    *,
    all_collections: bool = False,
    counts_as: Kind | None = None,
) -> Callable[[Endpoint], Endpoint]:
    """Declare what an endpoint needs of its caller, see :class:`Permission`. Every endpoint declares it."""

    def declare(endpoint: Endpoint) -> Endpoint:
        endpoint.permission = Permission(role, right, all_collections, counts_as)  # type: ignore[attr-defined]
        return endpoint

    return declare


def permission_of(route: BaseRoute) -> Permission:
    """What a route's endpoint declares; :class:`TypeError` if it declares nothing."""
    permission = getattr(getattr(route, "endpoint", None), "permission", None)
    if not isinstance(permission, Permission):
        raise TypeError(f"{route} declares no role; put requires(...) on its endpoint")
    return permission


def get_service(scope: Scope) -> Service:
    """The service that the request was admitted to; it finishes what it began, even when told to stop."""
    service: Service = scope["state"]["service"]
    return service


def get_lifecycle(scope: Scope) -> Lifecycle:
    """The state of the process, for what is open to anyone."""
    lifecycle: Lifecycle = scope["state"]["lifecycle"]
    return lifecycle


async def _service(request: Request) -> Service:
    return get_service(request.scope)


Served = Annotated[Service, Depends(_service)]
CollectionName = Annotated[str, Path(pattern=COLLECTION_NAME, description="A collection's name", examples=["staff"])]
Id = Annotated[int, Path(ge=1, le=LARGEST_ID, examples=[1])]


def record_ids(request: Request, ids: Sequence[int]) -> None:
    """Set the ids of the persons or faces that a request touched or found, for the audit log."""
    request.scope["state"]["ids"] = list(ids)


def content_type(scope: Scope) -> str:
    """The declared type of a body, without parameters, in lower case."""
    return _media_type(dict(scope["headers"]).get(b"content-type", b""))


@functools.lru_cache(64)
def _media_type(header: bytes) -> str:
    return header[:256].decode("latin-1").partition(";")[0].strip().lower()


def require_json(kind: str, taken: str = "application/json") -> None:
    """:class:`ApiError` 415 unless a body's type is JSON; ``taken`` are the types that its message names."""
    if kind != "application/json":
        curl = ", which curl says of itself" if kind == "application/x-www-form-urlencoded" else ""
        raise ApiError(415, f"the body is {kind or 'of no type'}{curl}; send it with Content-Type: {taken}")


def read_json(body: bytes, max_values: int, what: str = "the body") -> Any:
    """Parse JSON, five times as fast as the standard library; NaN and infinities are not JSON.

    Args:
        what: names the text in errors.

    Raises:
        ApiError: 400 for what is not JSON, 413 for more than ``max_values`` values: three bytes of text can become an
            object of 200, so lists and objects count for several. 413 too for large texts beyond ASCII.
    """
    if len(body) > _WIDE_BYTES and (b"\\u" in body or not body.isascii()):
        raise ApiError(413, f"JSON with characters beyond ASCII has at most {_WIDE_BYTES:,} bytes; send less at a time")
    if len(body) > max_values and _count_values(body, max_values) > max_values:
        raise ApiError(413, f"the JSON holds more than {max_values:,} values; send less, or vectors as vector_b64")
    try:
        return pydantic_core.from_json(body, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        raise ApiError(400, f"{what} is not JSON: {error}") from None


def read_body(body: bytes, service: Service) -> Any:
    """Parse a JSON body; :class:`ApiError` also where a list in it has more items than a request may have inputs.

    They are counted before a model is made of each: tens of thousands would stop the event loop for a while.
    """
    value = read_json(body, service.max_json_values)
    if isinstance(value, dict):
        service.check_inputs(max((len(item) for item in value.values() if isinstance(item, list)), default=0))
    return value


def _count_values(body: bytes, stop: int) -> int:
    """Upper bound of the values in a JSON text, by its separators and brackets; ends beyond ``stop``."""
    count, characters = 1, np.frombuffer(body, dtype=np.uint8)
    for start in range(0, len(characters), _SCANNED):
        part = characters[start : start + _SCANNED]
        separators, *brackets = (int(np.count_nonzero(part == ord(mark))) for mark in ",[{")
        count += separators + _CONTAINER_VALUES * sum(brackets)
        if count > stop:
            break
    return count


class JsonRoute(APIRoute):
    """A FastAPI route whose JSON body is read by :func:`read_json`, once its type has been checked."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler over a request that parses JSON our way."""
        handle = super().get_route_handler()
        takes_body = self.body_field is not None

        async def handle_json(request: Request) -> Response:
            if takes_body:
                require_json(content_type(request.scope))
            return await handle(JsonRequest(request.scope, request.receive))

        return handle_json


class JsonRequest(Request):
    """A request whose JSON is read by :func:`read_body`."""

    async def json(self) -> Any:
        """The body's value."""
        return read_body(await self.body(), get_service(self.scope))


class DirectRoute(APIRoute):
    """A route whose endpoint takes the request and nothing else: it costs a quarter of FastAPI's way to parameters.

    What the endpoint reads is described by ``openapi_extra``.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The endpoint itself."""
        endpoint: Callable[[Request], Coroutine[Any, Any, Response]] = self.endpoint
        return endpoint


def query_parameters(model: type[BaseModel], **described: dict[str, Any]) -> list[dict[str, Any]]:
    """OpenAPI's ``parameters`` for the fields of a model that is read from the query string.

    Args:
        described: the parameters of fields that are more than their schema says.
    """
    fields = model.model_json_schema()["properties"]
    return [
        described.get(name, {"name": name, "in": "query", "required": False, "schema": schema})
        for name, schema in fields.items()
    ]
