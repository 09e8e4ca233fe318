"""What routes declare and read: their callers' rights, service and parameters, and bodies of JSON or of pictures.

JSON is read fast and strictly. Pictures are sent as people send files: one as the body itself, or several in a form, in
place of base64 in JSON. A route that takes them says by :func:`accepts` what its JSON body would be. Both become that
body, with bytes where JSON has base64, and go the same way from there. Forms are multipart/form-data (RFC 7578), read
from a body that is in memory: no part is ever written to a file.
"""

import functools
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import numpy as np
import orjson
import pydantic_core
from fastapi import Depends, Path, Request
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import Scope

from plsc.errors import quoted
from plsc.gallery.validation import COLLECTION_NAME
from plsc.serve.access import Endpoint, Permission
from plsc.serve.changes import REPLAYED
from plsc.serve.errors import ApiError
from plsc.serve.observability import Lifecycle
from plsc.serve.service import Service

LARGEST_ID = 2**53 - 1  # beyond, JSON readers that hold numbers in float64 would name someone else
SEGMENT = r"^[^\x00-\x1f\x7f]+$"  # of a path: admission refuses control characters
_SCANNED = 1 << 16  # bytes of JSON counted together
_CONTAINER_VALUES = 16  # as many values as a list or an object counts for: it takes a hundred bytes or two
# Of JSON with characters beyond ASCII: one of them makes every character of its text take up to four bytes.
_WIDE_BYTES = 12 << 20
# The bytes decide which it is.
PICTURE_TYPES = ("image/jpeg", "image/png", "image/webp", "image/avif", "image/heic", "image/heif")
FORM_TYPE = "multipart/form-data"
_LANDMARKS, _FACE = "landmarks", "face"
_MAX_TEXTS = 32
_FILE = {"type": "string", "format": "binary"}
_TEXT = {"type": "string"}
_IN_QUERY = "Where a picture is the body itself"
_MAX_PART_HEAD = 4096  # bytes
_BOUNDARY = re.compile(
    rb"""boundary=(?:"([0-9A-Za-z'()+_,./:=? -]{1,70})"|([0-9A-Za-z'+_.-]{1,70}))[ \t]*(?:;|$)""", re.I
)
_VALUE = rb'(?:"(?:[^"\\]|\\.)*"|[^;"\s]+)'
_DISPOSITION = re.compile(rb"content-disposition:[ \t]*form-data((?:[ \t]*;[ \t]*[a-z*]+=" + _VALUE + rb")+)", re.I)
_NAME = re.compile(rb";[ \t]*([a-z*]+)=(" + _VALUE + rb")", re.I)
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


def record_collection(request: Request, name: str) -> None:
    """Set the collection that a request is about whose path names none, for the audit log."""
    request.scope["state"]["collection"] = name


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


def content_type(scope: Scope) -> str:
    """The declared type of a body, without parameters, in lower case."""
    return _media_type(dict(scope["headers"]).get(b"content-type", b""))


@functools.lru_cache(64)
def _media_type(header: bytes) -> str:
    return header[:256].decode("latin-1").partition(";")[0].strip().lower()


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


class Part(NamedTuple):
    """One field of a form, whatever its file is called and says of its type."""

    name: str
    content: bytes


@dataclass(frozen=True)
class Upload:
    """What a body with pictures stands for.

    Attributes:
        pictures: the key of the JSON body's list of inputs, which the parts ``image`` fill.
        named: instead, keys of single inputs: parts of these names.
        texts: other keys, which a part or a parameter of the query gives as text.
        as_json: those of ``texts`` that are JSON.
    """

    pictures: str = ""
    named: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    as_json: tuple[str, ...] = ()

    def described(self, *others: Mapping[str, Any]) -> dict[str, Any]:
        """OpenAPI's description of such bodies, for ``openapi_extra``; ``others`` describe parameters."""
        several: dict[str, Any] = {
            "image": {"type": "array", "items": _FILE},
            _LANDMARKS: {"type": "array", "items": _TEXT, "description": "JSON, of each image in turn"},
            _FACE: {"type": "array", "items": _TEXT, "description": "A number or `largest`, for all or each in turn"},
        }
        texts: dict[str, Any] = {
            name: {**_TEXT, "description": "JSON"} if name in self.as_json else _TEXT for name in self.texts
        }
        files: dict[str, Any] = dict.fromkeys(self.named, _FILE) if self.named else several
        content: dict[str, Any] = {FORM_TYPE: {"schema": {"type": "object", "properties": {**files, **texts}}}}
        if self.pictures:
            content |= {kind: {"schema": _FILE} for kind in PICTURE_TYPES}
        parameters = [parameter for other in others for parameter in other["parameters"]]
        parameters += [
            {"name": name, "in": "query", "required": False, "schema": schema, "description": _IN_QUERY}
            for name, schema in {**texts, **({_FACE: _TEXT} if self.pictures else {})}.items()
        ]
        return {"requestBody": {"content": content}, "parameters": parameters}


def accepts(upload: Upload) -> Callable[[Endpoint], Endpoint]:
    """Declare what an endpoint of a :class:`BodyRoute` makes of bodies with pictures."""

    def declare(endpoint: Endpoint) -> Endpoint:
        endpoint.upload = upload  # type: ignore[attr-defined]
        return endpoint

    return declare


def is_upload(kind: str) -> bool:
    """True if a body's type is that of a picture or of a form."""
    return kind in PICTURE_TYPES or kind == FORM_TYPE


def check_type(kind: str, upload: Upload | None) -> None:
    """:class:`ApiError` 415, with what to send instead, for a body that is no JSON, nor an upload that is taken."""
    if kind == "application/json" or (upload is not None and is_upload(kind)):
        return
    curl = ", which curl says of itself" if kind == "application/x-www-form-urlencoded" else ""
    taken = "application/json"
    if upload is not None:
        taken = f"{', '.join(PICTURE_TYPES[:4])}, {FORM_TYPE}, or {taken}"
    raise ApiError(415, f"the body is {kind or 'of no type'}{curl}; send it with Content-Type: {taken}")


async def read_body(request: Request, service: Service, upload: Upload | None) -> Any:
    """The JSON value that a body is, or that its pictures stand for.

    Raises:
        ApiError: names what is wrong; 413 also where a list has more items than a request may have inputs. They are
            counted before a model is made of each: tens of thousands would stop the event loop for a while.
    """
    if upload is not None and is_upload(content_type(request.scope)):
        return await _read_upload(request, service, upload)
    value = read_json(await request.body(), service.max_json_values)
    if isinstance(value, dict):
        service.check_inputs(max((len(item) for item in value.values() if isinstance(item, list)), default=0))
    return value


async def _read_upload(request: Request, service: Service, upload: Upload) -> dict[str, Any]:
    """A body with pictures as the JSON body that it stands for; :class:`ApiError` names what is wrong in it."""
    body = await request.body()
    texts = {key: value for key, value in request.query_params.items() if key in upload.texts}
    if content_type(request.scope) == FORM_TYPE:
        max_parts = 2 * service.settings.limits.inputs + _MAX_TEXTS
        parts = read_form(body, boundary_of(request.scope), max_parts)
    elif upload.named:
        files = " and ".join(upload.named)
        raise ApiError(415, f"a picture alone is not enough here; send {FORM_TYPE} with the files {files}, or JSON")
    else:
        parts = [Part("image", body)]
    texts |= _texts(parts, upload)
    value: dict[str, Any] = {
        key: _json(text, key, service) if key in upload.as_json else text for key, text in texts.items()
    }
    if upload.named:
        return value | {part.name: {"image": part.content} for part in parts if part.name in upload.named}
    asked = request.query_params.getlist(_FACE)
    return value | {upload.pictures: _inputs(parts + [Part(_FACE, text.encode()) for text in asked], service)}


def _texts(parts: list[Part], upload: Upload) -> dict[str, str]:
    files = upload.named or ("image", _LANDMARKS, _FACE)
    texts: dict[str, str] = {}
    for part in parts:
        if part.name in upload.texts and part.name not in texts:
            texts[part.name] = _text(part)
        elif part.name not in files or (upload.named and [other.name for other in parts].count(part.name) > 1):
            known = ", ".join((*files, *upload.texts))
            raise ApiError(400, f"the form's field {quoted(part.name[:80])} is not known, or twice there; send {known}")
    return texts


def _inputs(parts: list[Part], service: Service) -> list[dict[str, Any]]:
    inputs: list[dict[str, Any]] = [{"image": part.content} for part in parts if part.name == "image"]
    service.check_inputs(len(inputs))
    landmarks = [_json(_text(part), _LANDMARKS, service) for part in parts if part.name == _LANDMARKS]
    faces = [_text(part) for part in parts if part.name == _FACE]
    if len(faces) == 1:
        faces *= len(inputs)
    for name, given in (
        (_LANDMARKS, landmarks),
        (_FACE, [int(text) if re.fullmatch("[0-9]{1,4}", text) else text for text in faces]),
    ):
        if given and len(given) != len(inputs):
            raise ApiError(400, f"{len(given)} {name} for {len(inputs)} images; send none, or some for each in turn")
        for item, value in zip(inputs, given, strict=False):
            item[name] = value
    return inputs


def _text(part: Part) -> str:
    try:
        return part.content.decode()
    except UnicodeDecodeError:
        raise ApiError(400, f"the form's field {part.name} is not UTF-8") from None


def _json(text: str, name: str, service: Service) -> Any:
    return read_json(text.encode(), service.max_json_values, name)


class _BodyRequest(Request):
    """To FastAPI a request with a JSON body, whatever came."""

    def __init__(self, original: Request, upload: Upload | None) -> None:
        self._original, self._upload = original, upload
        headers = [(name, value) for name, value in original.scope["headers"] if name != b"content-type"]
        scope = {**original.scope, "headers": [*headers, (b"content-type", b"application/json")]}
        super().__init__(scope, original.receive)

    async def body(self) -> bytes:
        """What tells this request from another: without a form's boundary, which clients make anew each time."""
        body = await self._original.body()
        is_form = self._upload is not None and content_type(self._original.scope) == FORM_TYPE
        return body.replace(boundary_of(self._original.scope), b"") if is_form else body

    async def json(self) -> Any:
        return await read_body(self._original, get_service(self.scope), self._upload)


class BodyRoute(APIRoute):
    """A FastAPI route whose body is read by :func:`read_body`, once its type has been checked.

    What its endpoint leaves out of an answer is left out.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "response_model_exclude_unset": True})

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler over a request that reads its body our way."""
        handle = super().get_route_handler()
        upload: Upload | None = getattr(self.endpoint, "upload", None)
        takes_body = self.body_field is not None

        async def handle_body(request: Request) -> Response:
            if takes_body:
                check_type(content_type(request.scope), upload)
            return await handle(_BodyRequest(request, upload))

        return handle_body


class KeyedRoute(BodyRoute):
    """A :class:`BodyRoute` whose POSTs honour an Idempotency-Key: the answer is stored, as it is, once it is there.

    A kill between the two leaves what was done without an answer; routes that store it with the change claim keys
    themselves.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, called for a key once."""
        handle = super().get_route_handler()
        upload: Upload | None = getattr(self.endpoint, "upload", None)

        async def handle_once(request: Request) -> Response:
            service = get_service(request.scope)
            async with service.idempotency.claim(_BodyRequest(request, upload)) as claim:
                if (stored := claim.stored) is not None:
                    return Response(stored.body, stored.status, {REPLAYED: "true"}, "application/json")
                response = await handle(request)
                done = claim.request(orjson.Fragment, response.status_code)
                if done is not None:
                    await service.in_store(service.store.store_answer, done, bytes(response.body))
                return response

        return handle_once if self.methods == {"POST"} else handle


def boundary_of(scope: Scope) -> bytes:
    """What separates the parts of a form; :class:`ApiError` 400 if its type names none."""
    found = _BOUNDARY.search(dict(scope["headers"]).get(b"content-type", b""))
    if found is None:
        raise ApiError(400, f"{FORM_TYPE} comes with a boundary; let your client set the type (curl -F does)")
    return bytes(found[1] or found[2])


def read_form(body: bytes, boundary: bytes, max_parts: int) -> list[Part]:
    """The parts of a form, in order.

    Raises:
        ApiError: 400 for what is no form, 413 for more than ``max_parts``.
    """
    delimiter = b"\r\n--" + boundary
    if not body.startswith(delimiter[2:]):
        raise _broken("it does not begin with its boundary")
    parts: list[Part] = []
    position = len(delimiter) - 2
    while body[position : position + 2] != b"--":
        head_end = body.find(b"\r\n\r\n", position, position + _MAX_PART_HEAD)
        end = body.find(delimiter, head_end + 2)
        if body[position : position + 2] != b"\r\n" or head_end < 0 or end < 0:
            raise _broken(f"part {len(parts) + 1} has no head, or no end")
        if len(parts) == max_parts:
            raise ApiError(413, f"the form has more than {max_parts} parts; send less at a time")
        parts.append(Part(_name(body[position + 2 : head_end]), body[head_end + 4 : end]))
        position = end + len(delimiter)
    return parts


def _name(head: bytes) -> str:
    for line in head.split(b"\r\n"):
        found = _DISPOSITION.match(line)
        if found is not None:
            names = [value for key, value in _NAME.findall(found[1]) if key.lower() == b"name"]
            if len(names) == 1:
                return bytes(names[0]).strip(b'"').decode("utf-8", "replace")
    raise _broken("a part has no name")


def _broken(why: str) -> ApiError:
    return ApiError(400, f"the body is no {FORM_TYPE}: {why}")
