"""Declarations of routes: what a caller needs, their service and parameters, and JSON bodies read fast and strictly.

A person's ETag (RFC 9110, section 8.8.3) names a revision; with If-Match (section 13) an editor overwrites nobody's
change unawares.
"""

import functools
import re
from collections.abc import Callable, Coroutine, Sequence
from typing import Annotated, Any

import numpy as np
import pydantic_core
from fastapi import Depends, Path, Request
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import Scope

from plsc.gallery.validation import COLLECTION_NAME
from plsc.gallery.values import Person, Precondition
from plsc.serve.access import Permission
from plsc.serve.errors import ApiError
from plsc.serve.schemas import header_parameter
from plsc.serve.service import Lifecycle, Service

LARGEST_ID = 2**53 - 1  # beyond, JSON readers that hold numbers in float64 would name someone else
SEGMENT = r"^[^\x00-\x1f\x7f]+$"  # of a path: admission refuses control characters
_SCANNED = 1 << 16  # bytes of JSON counted together
_CONTAINER_VALUES = 16  # as many values as a list or an object counts for: it takes a hundred bytes or two

# Of JSON with characters beyond ASCII: one of them makes every character of its text take up to four bytes.
_WIDE_BYTES = 12 << 20

_TAG = r'(?:W/)?"[\x21\x23-\x7e\x80-\xff]*"'
_TAGS = re.compile(rf"\s*({_TAG})\s*(?:,|$)")
_OURS = re.compile(r'"(\d{1,19})-(\d{1,19})"')
_MAX_HEADER = 4096  # characters


_IF_MATCH = header_parameter(
    "If-Match",
    "* or ETags of the person, one of which has to be the present one",
    maxLength=_MAX_HEADER,
    pattern=rf"^(?:\*|{_TAG}(?:\s*,\s*{_TAG})*,?)$",
)
_IF_NONE_MATCH = header_parameter(
    "If-None-Match", "*: there must be no such person", maxLength=_MAX_HEADER, pattern=r"^\*$"
)
# What a route that reads a precondition adds to its OpenAPI description; and one that also makes persons.
CONDITIONS_DESCRIBED = {"parameters": [_IF_MATCH]}
PUT_CONDITIONS_DESCRIBED = {"parameters": [_IF_MATCH, _IF_NONE_MATCH]}
DELETED: dict[str, Any] = {"status_code": 204, "response_class": Response}  # of routes that answer with nothing

requires = Permission  # what an endpoint needs of its caller, above it: @requires("read")


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


def set_etag(response: Response, person: Person) -> None:
    """Set the strong ETag of a person: the id belongs to it, for another one may get the same external id."""
    if person.revision:  # 0: the store counts none
        response.headers["ETag"] = f'"{person.id}-{person.revision}"'


def read_precondition(request: Request) -> Precondition | None:
    """What the request's If-Match or If-None-Match requires of its person; None without either.

    Raises:
        ApiError: 400 for a header that is not what RFC 9110 says.
    """
    if_match, if_none_match = (_header(request, name) for name in ("if-match", "if-none-match"))
    if if_match is not None and if_none_match is not None:
        raise ApiError(400, "If-Match and If-None-Match exclude each other; send one of them")
    if if_none_match is not None:
        if if_none_match.strip() != "*":
            raise ApiError(400, "If-None-Match of a change is *: there must be no such person")
        return Precondition(exists=False)
    if if_match is None:
        return None
    return Precondition() if if_match.strip() == "*" else Precondition(revisions=_read_tags(if_match))


def _header(request: Request, name: str) -> str | None:
    """All values of a header, None without any; an empty one was meant to be a condition, and is no absent one."""
    values = request.headers.getlist(name)
    return ", ".join(values) if values else None


def _read_tags(text: str) -> frozenset[tuple[int, int]]:
    """The (id, revision) of the strong tags that are ours; weak and foreign ones match nothing."""
    if not text or len(text) > _MAX_HEADER or "".join(match[0] for match in _TAGS.finditer(text)) != text:
        raise ApiError(400, 'If-Match is * or ETags in quotes, such as "17-3"')
    found = (_OURS.fullmatch(match[1]) for match in _TAGS.finditer(text))
    return frozenset((int(tag[1]), int(tag[2])) for tag in found if tag is not None)
