"""The interface's description: complete, with examples that work, and no answer that it does not tell of."""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from support.group_picture import DrawnDetector
from support.live_service import Live, bearer, live_service, next_linear_embedder

from plsc.errors import UsageError
from plsc.serve.settings import PEOPLE, Items, Limits

pytestmark = pytest.mark.live

CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live_service(
        tmp_path_factory.mktemp("described"), DrawnDetector(), next_embedder=next_linear_embedder()
    ) as running:
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


def test_what_collections_hold_is_named_in_the_operators_words(tmp_path):
    with live_service(tmp_path, items=Items("product", "products")) as shop:
        described = shop.ask("GET", "/openapi.json")
    assert "gallery of products" in described.json()["info"]["description"]
    assert not re.search(r"\b(people|somebody|nobody|whom?)\b", described.text, re.IGNORECASE)


@pytest.mark.parametrize(
    ("given", "items"),
    [
        ("people", PEOPLE),
        ("products", Items("product", "products")),
        ("species/species", Items("species", "species")),
        ("varieties", Items("variety", "varieties")),
        ("mouse/mice", Items("mouse", "mice")),
        *dict.fromkeys(("", "cattle", "Products", "a b/c", "<b>/x", "s")).items(),
    ],
)
def test_a_plural_names_one_and_many(given, items):
    with pytest.raises(UsageError, match="--items") if items is None else contextlib.nullcontext():
        assert Items.parse(given) == items


def test_examples_of_bodies_work_as_they_stand(live):
    described = live.ask("GET", "/openapi.json").json()
    tried = 0
    for method, path, operation in operations(described):
        content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
        for example in content.get("examples", {}).values():
            given = path.format(collection="staff", person=1, model="linear", external_id="E-1")
            answer = live.ask(method, given, example["value"])
            lacks = path.endswith("/cut-over") and answer.status_code == 409  # faces that were enrolled by vectors
            assert answer.is_success or lacks, (path, answer.text)
            tried += 1
        assert not content or content.get("examples") or path.endswith("/infer"), f"{method} {path} shows no example"
    assert tried >= 10


def requests_of(live: Live) -> list[Any]:
    """Strategies of requests as described, and of requests against the description, for every operation."""
    schema = schemathesis.openapi.from_url(f"{live.server.address}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) >= 25
    right = [operation.as_strategy(generation_mode=GenerationMode.POSITIVE) for operation in operations]
    wrong = [
        operation.as_strategy(generation_mode=GenerationMode.NEGATIVE)
        for operation in operations
        if operation.body or any(parameters for parameters in (operation.path_parameters, operation.query))
    ]
    return right + wrong


def try_out(live: Live, cases: Any, secret: str | None, examples: int) -> None:
    """Send a few requests, and check the answers."""
    headers = {} if secret is None else bearer(secret)

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases)
    def check(case: Any) -> None:
        if case.path.startswith("/v1/snapshots") and case.method == "POST":
            return  # each would copy the store
        answer = case.call(headers=headers, timeout=120)  # its own 10 s are little on a loaded machine
        case.validate_response(answer, checks=CHECKS, headers=headers)
        told = answer.content + str(answer.headers).encode()
        for secret in (str(live.folder), "Traceback", "site-packages", *headers.values()):
            assert secret.removeprefix("Bearer ").encode() not in told

    check()


@pytest.mark.slow
def test_no_request_breaks_it_or_gets_an_undescribed_answer(live):
    for cases in requests_of(live):
        try_out(live, cases, None, 4)


@pytest.mark.slow
def test_nor_does_one_with_any_token(tmp_path):
    callers = {
        "admin": {"role": "admin"},
        "camera": {"role": "search", "collections": ["staff"]},
        "reader": {"role": "read", "allow": ["vectors", "embeddings"]},
        "writer": {"role": "write", "collections": ["staff"], "rates": ["writes=5/s", "searches=1/h"]},
    }
    with live_service(tmp_path, callers=callers, threshold=0.3, limits=Limits(persons=3, metadata_bytes=100)) as live:
        live.collection("staff")
        for cases in requests_of(live):
            for secret in (None, *live.secrets.values()):
                try_out(live, cases, secret, 1)


def test_without_tokens_none_is_described(live, tmp_path):
    described = live.ask("GET", "/openapi.json").json()
    assert all(operation["security"] == [] for _, _, operation in operations(described))
    assert "securitySchemes" not in described["components"]
    with live_service(tmp_path, callers={"camera": {"role": "search"}}) as guarded:
        for _, path, operation in operations(guarded.ask("GET", "/openapi.json").json()):
            assert operation["security"] == ([{"token": []}] if operation["x-role"] else []), path


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/v1/collections", "GET, POST"),
        ("/v1/collections/staff", "DELETE, GET"),
        ("/v1/collections/staff/persons/by-external-id/E-1", "DELETE, GET, PUT"),
        ("/v1/collections/staff/persons/1", "DELETE, GET, PATCH"),
        ("/v1/info", "GET"),
    ],
)
def test_a_wrong_method_is_told_the_right_ones(live, path, allowed):
    answer = live.ask("OPTIONS", path)
    assert (answer.status_code, answer.headers["Allow"]) == (405, allowed)
    assert allowed in answer.json()["error"]["message"]


def test_an_error_tells_of_the_form_that_was_meant(live):
    for body, told in (
        ({"persons": [{"name": 3}]}, "persons.0.name: Input should be a valid string"),
        ({"faces": [{}]}, "faces.0: an input has exactly one of image, vector and vector_b64"),
    ):
        answer = live.ask("POST", "/v1/collections/staff/persons", body)
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, told)
