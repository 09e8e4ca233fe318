"""Pictures sent as people send files: one as the body itself, or several in a form, in place of base64 in JSON.

A route that takes them says by :func:`accepts` what its JSON body would be. Both become that body, with bytes where
JSON has base64, and go the same way from there. Forms are multipart/form-data (RFC 7578), read from a body that is in
memory: no part is ever written to a file.
"""

import re
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response
from starlette.types import Scope

from plsc.errors import quoted
from plsc.serve.access import Endpoint
from plsc.serve.errors import ApiError
from plsc.serve.routing import content_type, get_service, read_body, read_json, require_json
from plsc.serve.service import Service

# The bytes decide which it is.
PICTURE_TYPES = ("image/jpeg", "image/png", "image/webp", "image/avif", "image/heic", "image/heif")
_LANDMARKS = "landmarks"
_MAX_TEXTS = 32
_FILE = {"type": "string", "format": "binary"}
_TEXT = {"type": "string"}
_IN_QUERY = "Where a picture is the body itself"
FORM_TYPE = "multipart/form-data"
_MAX_PART_HEAD = 4096  # bytes
_BOUNDARY = re.compile(
    rb"""boundary=(?:"([0-9A-Za-z'()+_,./:=? -]{1,70})"|([0-9A-Za-z'+_.-]{1,70}))[ \t]*(?:;|$)""", re.I
)
_VALUE = rb'(?:"(?:[^"\\]|\\.)*"|[^;"\s]+)'
_DISPOSITION = re.compile(rb"content-disposition:[ \t]*form-data((?:[ \t]*;[ \t]*[a-z*]+=" + _VALUE + rb")+)", re.I)
_NAME = re.compile(rb";[ \t]*([a-z*]+)=(" + _VALUE + rb")", re.I)


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
            for name, schema in texts.items()
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


def check_type(kind: str) -> None:
    """:class:`ApiError` 415 with what to send instead, for a route that takes pictures and JSON."""
    if not is_upload(kind):
        require_json(kind, f"{', '.join(PICTURE_TYPES[:4])}, {FORM_TYPE}, or application/json")


async def read_upload(request: Request, service: Service, upload: Upload) -> dict[str, Any]:
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
    return value | {upload.pictures: _inputs(parts, service)}


def _texts(parts: list[Part], upload: Upload) -> dict[str, str]:
    files = upload.named or ("image", _LANDMARKS)
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
    if landmarks and len(landmarks) != len(inputs):
        raise ApiError(400, f"{len(landmarks)} landmarks for {len(inputs)} images; send none, or some for each in turn")
    for item, points in zip(inputs, landmarks, strict=False):
        item[_LANDMARKS] = points
    return inputs


def _text(part: Part) -> str:
    try:
        return part.content.decode()
    except UnicodeDecodeError:
        raise ApiError(400, f"the form's field {part.name} is not UTF-8") from None


def _json(text: str, name: str, service: Service) -> Any:
    return read_json(text.encode(), service.max_json_values, name)


class _UploadRequest(Request):
    """To FastAPI a request with a JSON body."""

    def __init__(self, original: Request, upload: Upload) -> None:
        self._original, self._upload = original, upload
        headers = [(name, value) for name, value in original.scope["headers"] if name != b"content-type"]
        scope = {**original.scope, "headers": [*headers, (b"content-type", b"application/json")]}
        super().__init__(scope, original.receive)

    async def body(self) -> bytes:
        """What tells this request from another: without a form's boundary, which clients make anew each time."""
        body = await self._original.body()
        is_form = content_type(self._original.scope) == FORM_TYPE
        return body.replace(boundary_of(self._original.scope), b"") if is_form else body

    async def json(self) -> Any:
        return await read_upload(self._original, get_service(self.scope), self._upload)


class BodyRoute(APIRoute):
    """A FastAPI route whose body is read by :func:`read_body`, or made of an upload, once its type has been checked.

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
            kind = content_type(request.scope)
            if upload is not None:
                check_type(kind)
                if is_upload(kind):
                    return await handle(_UploadRequest(request, upload))
            elif takes_body:
                require_json(kind)
            return await handle(_JsonRequest(request.scope, request.receive))

        return handle_body


class _JsonRequest(Request):
    async def json(self) -> Any:
        return read_body(await self.body(), get_service(self.scope))


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
