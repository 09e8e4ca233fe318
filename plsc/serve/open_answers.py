"""What is open to anyone: answered before FastAPI, of whose requests nothing but method, path and ETag is read.

So no query, cookie or range of a stranger is taken apart. Static answers are the same bytes each time; the others are
endpoints that take the request and return a response, without parameters of FastAPI's.
"""

import hashlib
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

OpenEndpoint = Callable[[Request], Coroutine[Any, Any, Response]]


class StaticAnswer:
    """Bytes with an ETag, for GET and HEAD; 304 without them where the caller has them already."""

    def __init__(self, body: bytes, media_type: str, headers: Mapping[str, str]) -> None:
        self._etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'.encode()
        always = {**headers, "ETag": self._etag.decode(), "Cache-Control": "no-cache"}
        self._whole = Response(body, headers=always, media_type=media_type)
        self._unchanged = Response(status_code=304, headers=always)

    async def __call__(self, request: Request) -> Response:
        """The answer, which may be sent any number of times."""
        known = dict(request.scope["headers"]).get(b"if-none-match", b"")
        return self._unchanged if self._etag in known else self._whole
