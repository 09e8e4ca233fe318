"""The interface's description: complete, with examples that work, and no answer that it does not tell of."""

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from support.live_service import Live, live_service

CHECKS = (not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live_service(tmp_path_factory.mktemp("described")) as running:
        running.collection("staff")
        running.ask("POST", "/v1/collections/staff/persons", {"name": "Ada"})
        yield running


def operations(described: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


@pytest.mark.slow
def test_every_operation_is_described(live):
    described = live.ask("GET", "/openapi.json").json()
    names = [operation["operationId"] for _, _, operation in operations(described)]
    assert len(set(names)) == len(names) >= 25
    for method, path, operation in operations(described):
        assert operation["description"], path
        codes = set(operation["responses"])
        assert codes & {"200", "201", "204"}, path
        assert ("401" in codes) == ("403" in codes) == (operation["x-role"] is not None) or path == "/v2", path
        for code, response in operation["responses"].items():
            if int(code) >= 400 and not path.startswith(("/v2", "/health")):
                reference = response["content"]["application/json"]["schema"]["$ref"]
                assert reference == "#/components/schemas/ErrorBody", (method, path, code)


def resolve(described: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    return described["components"]["schemas"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema


def test_examples_of_bodies_work_as_they_stand(live):
    described = live.ask("GET", "/openapi.json").json()
    tried = 0
    for method, path, operation in operations(described):
        content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
        for example in content.get("examples", {}).values():
            given = path.format(collection="staff", person=1, model="linear")
            answer = live.ask(method, given, example["value"])
            assert answer.is_success, (path, answer.text)
            tried += 1
        assert not content or content.get("examples") or path.endswith("/infer"), f"{method} {path} shows no example"
    assert tried >= 10


@pytest.mark.slow
def test_no_request_breaks_it_or_gets_an_undescribed_answer(live):
    schema = schemathesis.openapi.from_url(f"{live.server.address}/openapi.json")

    def try_out(operation: Any) -> None:
        @settings(
            max_examples=6,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy())
        def check(case: Any) -> None:
            if case.path.startswith("/v1/snapshots") and case.method == "POST":
                return  # each would copy the store
            case.validate_response(case.call(), checks=CHECKS)

        check()

    names = []
    for result in schema.get_all_operations():
        operation = result.ok()
        names.append(operation.label)
        try_out(operation)
    assert len(names) >= 25
