"""The page, and Swagger UI at /docs: files of the package in memory, under content security policies of their own.

They are open to anyone, and the same bytes each time: of a request nothing but method, path and ETag is read.
"""

import hashlib
import mimetypes
from collections.abc import Iterator, Mapping
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"  # no text becomes markup, not even by mistake
)
# Swagger UI makes markup of the description's Markdown, which is this package's own: no trusted types there.
DOCS_POLICY = POLICY.partition("; require-trusted-types-for")[0]
_HEADERS = {
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Permissions-Policy": "geolocation=(), microphone=(), camera=()",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
mimetypes.add_type("text/javascript", ".js")  # whatever the system's tables say: browsers run no other type as a module


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


def page_answers() -> Iterator[tuple[str, StaticAnswer]]:
    """Each file's path and answer; a folder's index is its own path's too."""
    for folder, prefix, index, policy in (
        ("page", "/page/", "/", POLICY),
        ("swagger_ui", "/docs/", "/docs", DOCS_POLICY),
    ):
        for file in files("plsc.serve").joinpath(folder).iterdir():
            kind = mimetypes.guess_type(file.name)[0] or "text/plain"
            answer = StaticAnswer(file.read_bytes(), kind, {**_HEADERS, "Content-Security-Policy": policy})
            yield prefix + file.name, answer
            if file.name == "index.html":
                yield index, answer
