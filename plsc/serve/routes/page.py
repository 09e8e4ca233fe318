"""The page, and Swagger UI at /docs: static files of the package, under content security policies of their own."""

import mimetypes

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

from plsc.serve.routing import requires

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
    "Cache-Control": "no-cache",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
mimetypes.add_type("text/javascript", ".js")  # whatever the system's tables say: browsers run no other type as a module
_PAGE = StaticFiles(packages=[("plsc.serve", "page")])
_DOCS = StaticFiles(packages=[("plsc.serve", "swagger_ui")])

router = APIRouter(include_in_schema=False)


@router.api_route("/", methods=["GET", "HEAD"])
@requires(None)
async def index(request: Request) -> Response:
    """The page itself."""
    return await _respond(request, _PAGE, "index.html", POLICY)


@router.api_route("/page/{name}", methods=["GET", "HEAD"])
@requires(None)
async def page_file(request: Request, name: str) -> Response:
    """A script, style or icon of the page."""
    return await _respond(request, _PAGE, name, POLICY)


@router.api_route("/docs", methods=["GET", "HEAD"])
@requires(None)
async def docs(request: Request) -> Response:
    """The interface's description, to read and to try."""
    return await _respond(request, _DOCS, "index.html", DOCS_POLICY)


@router.api_route("/docs/{name}", methods=["GET", "HEAD"])
@requires(None)
async def docs_file(request: Request, name: str) -> Response:
    """A script or style of the description."""
    return await _respond(request, _DOCS, name, DOCS_POLICY)


async def _respond(request: Request, files: StaticFiles, name: str, policy: str) -> Response:
    response = await files.get_response(name, request.scope)
    response.headers.update({"Content-Security-Policy": policy, **_HEADERS})
    return response
