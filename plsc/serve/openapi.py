"""The description of the interface at /openapi.json: what FastAPI finds, and what only this service knows."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from plsc.serve.examples import BODIES
from plsc.serve.roles import needed_role
from plsc.serve.schemas import SearchBody
from plsc.serve.tensors import InferRequest

_READ_BY_HAND = (SearchBody, InferRequest)  # bodies that routes parse themselves


def describe(app: FastAPI) -> dict[str, Any]:
    """OpenAPI 3.1: with the role that each operation needs, Bearer tokens, and errors of our shape alone."""
    described = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    components = described.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for model in _READ_BY_HAND:
        schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas.update(schema.pop("$defs", {}))
        schemas[model.__name__] = schema
    components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            _complete(path, method.upper(), operation)
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    return described


def _complete(path: str, method: str, operation: dict[str, Any]) -> None:
    role = needed_role(method, path)
    operation["x-role"] = role
    operation["security"] = [] if role is None else [{"token": []}]
    body = operation.get("requestBody", {}).get("content", {}).get("application/json")
    if body is not None and (shown := BODIES.get(operation["operationId"])):
        body["examples"] = {what.replace(" ", "_"): {"summary": what, "value": value} for what, value in shown.items()}
    responses = operation["responses"]
    content = responses.get("422", {}).get("content", {}).get("application/json", {})
    if content.get("schema", {}).get("$ref", "").endswith("HTTPValidationError"):
        del responses["422"]  # FastAPI's own shape: here such requests get 400 in ours
