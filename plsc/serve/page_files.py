"""The page: files of the package's own ``page`` folder, read once, shown under a policy that allows nothing else."""

import hashlib
from dataclasses import dataclass
from importlib import resources

from fastapi import APIRouter, Request
from starlette.responses import Response

from plsc.serve.failures import Refusal

router = APIRouter(include_in_schema=False)
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"  # no text becomes markup, not even by mistake
)
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
}
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Permissions-Policy": "geolocation=(), microphone=(), camera=()",
    "Cache-Control": "no-cache",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


@dataclass(frozen=True)
class PageFile:
    """A file of the page; ``tag`` changes with its content."""

    content: bytes
    kind: str
    tag: str


def read_page() -> dict[str, PageFile]:
    """All files of the page by name."""
    folder = resources.files("plsc.serve") / "page"
    files = [one for one in folder.iterdir() if one.is_file()] if folder.is_dir() else []
    return {
        one.name: _page_file(one.name, one.read_bytes())
        for one in files
        if any(one.name.endswith(suffix) for suffix in _TYPES)
    }


@router.api_route("/", methods=["GET", "HEAD"])
async def index(request: Request) -> Response:
    """The page itself."""
    return _file(request, "index.html")


@router.api_route("/page/{name}", methods=["GET", "HEAD"])
async def file(request: Request, name: str) -> Response:
    """A script, style or picture of the page."""
    return _file(request, name)


def _file(request: Request, name: str) -> Response:
    found: PageFile | None = request.app.state.page.get(name)
    if found is None:
        raise Refusal(404, "there is no such file in the page")
    headers = {**_HEADERS, "ETag": found.tag}
    if request.headers.get("if-none-match") == found.tag:
        return Response(status_code=304, headers=headers)
    return Response(found.content, headers=headers, media_type=found.kind)


def _page_file(name: str, content: bytes) -> PageFile:
    kind = next(kind for suffix, kind in _TYPES.items() if name.endswith(suffix))
    return PageFile(content, kind, f'"{hashlib.sha256(content).hexdigest()[:16]}"')
