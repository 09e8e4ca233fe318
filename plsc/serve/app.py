"""The application: all routes, one exception handler, the OpenAPI description, and admission around them."""

from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic_core import to_json
from starlette.exceptions import HTTPException

from plsc.errors import PlscError
from plsc.serve.admission import Admission
from plsc.serve.errors import answer_error
from plsc.serve.observability import Lifecycle, Metrics
from plsc.serve.routes import admin, gallery, kserve, migrations, model, page, persons, search
from plsc.serve.routing import permission_of
from plsc.serve.settings import Settings
from plsc.serve.tokens import TokenBook

# Routes are tried in this order, by admission and by the router: the most frequent one stands first.
ROUTERS = (search.router, persons.router, gallery.router, model.router, admin.router, migrations.router, kserve.router)
_PARSED_BY_ENDPOINTS: tuple[type[BaseModel], ...] = (search.SearchBody, kserve.InferRequest)


def build_app(lifecycle: Lifecycle, settings: Settings, tokens: TokenBook | None, metrics: Metrics) -> Admission:
    """Build the ASGI application; it refuses requests until ``lifecycle`` is opened."""
    from plsc import __version__

    routes = [route for router in ROUTERS for route in router.routes]
    app = FastAPI(
        title="plsc",
        version=__version__,
        description=(
            f"Search a gallery of {settings.items.many} by pictures or vectors. A `person` is one "
            f"{settings.items.one}, and a `face` one embedding of it. Scores are cosines; `same_person` says whether "
            "a score reaches the service's threshold: a possible match, to be judged. `x-role` and `x-right` of an "
            "operation are the role and the right that a token needs for it."
        ),
        openapi_url=None,
        redirect_slashes=False,
        routes=routes,
        exception_handlers=dict.fromkeys((HTTPException, PlscError, RequestValidationError, Exception), answer_error),
    )
    app.state.lifecycle = lifecycle
    lifecycle.tokens = tokens
    description = page.StaticAnswer(to_json(describe(app, with_tokens=tokens is not None)), "application/json", {})
    static = dict([*page.page_answers(), ("/openapi.json", description)])
    return Admission(app, routes, static, lifecycle, settings, tokens, metrics)


def describe(app: FastAPI, *, with_tokens: bool = True) -> dict[str, Any]:
    """OpenAPI 3.1: with the role that each operation needs, Bearer tokens, and errors of our shape alone.

    Args:
        with_tokens: the service asks for tokens; without, operations name no security.
    """
    description = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    components = description.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for parsed in _PARSED_BY_ENDPOINTS:
        schema = parsed.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas.update(schema.pop("$defs", {}))
        schemas[parsed.__name__] = schema
    if with_tokens:
        components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    for route in app.routes:
        if isinstance(route, APIRoute) and route.include_in_schema:
            for method in route.methods or ():
                _complete(description["paths"][route.path_format][method.lower()], route, with_tokens)
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    return description


def _complete(operation: dict[str, Any], route: APIRoute, with_tokens: bool) -> None:
    permission = permission_of(route)
    operation["operationId"] = route.name
    operation["x-role"] = permission.role
    if permission.right is not None:
        operation["x-right"] = permission.right
    operation["security"] = [{"token": []}] if with_tokens and permission.role is not None else []
    for parameter in operation.get("parameters", []):
        _never_null(parameter.get("schema", {}))
    responses = operation["responses"]
    content = responses.get("422", {}).get("content", {}).get("application/json", {})
    if content.get("schema", {}).get("$ref", "").endswith("HTTPValidationError"):
        del responses["422"]  # FastAPI's own shape: here such requests get 400 in ours


def _never_null(schema: dict[str, Any]) -> None:
    """Take null out of a parameter's schema: one that is None is not sent, and the text "null" is no null."""
    kinds = [kind for kind in schema.get("anyOf", ()) if kind != {"type": "null"}]
    if len(kinds) == 1:
        del schema["anyOf"]
        schema.update(kinds[0])
