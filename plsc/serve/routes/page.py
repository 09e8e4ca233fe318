"""The page: static files of the package, served under a content security policy that allows nothing else."""

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
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Permissions-Policy": "geolocation=(), microphone=(), camera=()",
    "Cache-Control": "no-cache",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
mimetypes.add_type("text/javascript", ".js")  # whatever the system's tables say: browsers run no other type as a module
_FILES = StaticFiles(packages=[("plsc.serve", "page")])

router = APIRouter(include_in_schema=False)


@router.api_route("/", methods=["GET", "HEAD"])
@requires(None)
async def index(request: Request) -> Response:
    """The page itself."""
    return await _respond(request, "index.html")


@router.api_route("/page/{name}", methods=["GET", "HEAD"])
@requires(None)
async def page_file(request: Request, name: str) -> Response:
    """A script, style or icon of the page."""
    return await _respond(request, name)


async def _respond(request: Request, name: str) -> Response:
    response = await _FILES.get_response(name, request.scope)
    response.headers.update(_HEADERS)
    return response
