"""The application: every route, its failures in one shape, and the guard around them."""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from plsc.errors import PlscError
from plsc.serve import (
    collections_api,
    health_api,
    inference_api,
    model_api,
    page_files,
    persons_api,
    search_api,
    snapshots_api,
)
from plsc.serve.express import Express
from plsc.serve.failures import as_refusal, error_response
from plsc.serve.gate import Gate
from plsc.serve.guard import Guard
from plsc.serve.metrics import Metrics
from plsc.serve.openapi import describe
from plsc.serve.routing import said
from plsc.serve.settings import Settings
from plsc.serve.tokens import TokenBook

_APIS = (
    collections_api,
    persons_api,
    search_api,
    model_api,
    snapshots_api,
    inference_api,
    health_api,
    page_files,
)


def build_app(gate: Gate, settings: Settings, tokens: TokenBook | None, metrics: Metrics) -> Guard:
    """The ASGI application; it refuses requests until ``gate`` is opened."""
    from plsc import __version__

    app = FastAPI(
        title="plsc",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        description="Search a gallery of persons by pictures or vectors.",
        generate_unique_id_function=_operation_id,
        exception_handlers={
            HTTPException: _refused,
            PlscError: _failed,
            RequestValidationError: _invalid,
            Exception: _broken,
        },
    )
    app.state.gate = gate
    app.state.page = page_files.read_page()
    for api in _APIS:
        app.include_router(api.router)
    described: dict[str, Any] = describe(app)
    app.openapi = lambda: described  # type: ignore[method-assign]
    return Guard(Express(app), gate, settings, tokens, metrics)


def _operation_id(route: Any) -> str:
    return str(route.name)


async def _refused(request: Request, error: Any) -> Response:
    return error_response(request.url.path, error.status_code, str(error.detail), error.headers)


async def _failed(request: Request, error: Any) -> Response:
    return await _refused(request, as_refusal(error))


async def _invalid(request: Request, error: Any) -> Response:
    return error_response(request.url.path, 400, said(error.errors()))


async def _broken(request: Request, error: Any) -> Response:
    return error_response(request.url.path, 500, "something broke in the service; its log tells what")
