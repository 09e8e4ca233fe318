"""multipart/form-data (RFC 7578), read from a body that is in memory: no part is ever written to a file."""

import re
from typing import NamedTuple

from starlette.types import Scope

from plsc.serve.errors import ApiError

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
