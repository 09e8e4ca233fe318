"""Fuzz targets of the service's routes: valid requests of each, damaged, sent to a live service with a small model.

A route may refuse anything, but in JSON, by a status that is not 500, and without a path or a secret of the server in
its answer; and the service goes on.
"""

import json
import random
import re
from pathlib import Path
from typing import Any

import httpx
from support.live_service import SIZE, Live, image_input, picture, vectors

from fuzz.driver import Target, Violation
from fuzz.mutations import TEXTS, as_json, mutated_value

LARGEST_ANSWER = 64 << 20
GALLERY = "/v1/collections/people"
PROXIES = ("X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto", "X-Real-IP", "Forwarded", "Via")
PROXY_VALUES = ("127.0.0.1", "localhost", "::1", "for=127.0.0.1;host=localhost", "1.1 nginx", "", "x" * 900)
ALLOWED_ERRORS = (503, 507)  # it is busy; the disk is full
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\s]|[\ud800-\udfff]")


def requests() -> dict[str, Any]:
    """A valid request of each route that takes a body, and of some with parameters: ``METHOD path`` and its body."""
    vector = {"vector": vectors(1)[0].tolist()}
    image = image_input(picture(1))
    person = {"name": "Ada", "external_id": "a-1", "metadata": {"room": 7}, "faces": [vector, image]}
    pixels = [7] * (3 * SIZE * SIZE)
    infer = {"inputs": [{"name": "images", "datatype": "UINT8", "shape": [1, 3, SIZE, SIZE], "data": pixels}]}
    return {
        f"POST {GALLERY}/persons": person,
        "POST /v1/embeddings": {"inputs": [image]},
        "POST /v1/compare": {"a": image, "b": vector},
        "POST /v1/collections": {"name": "others"},
        f"PUT {GALLERY}/persons/by-external-id/a-2": {
            key: value for key, value in person.items() if key != "external_id"
        },
        f"PATCH {GALLERY}/persons/1": {"name": "Bo", "metadata": {"room": 8}},
        f"POST {GALLERY}/persons/1/faces": {"faces": [vector]},
        f"POST {GALLERY}/search": {"queries": [vector, image], "k": 3, "filter": {"room": 7}},
        f"GET {GALLERY}/persons?limit=5&filter=%7B%22room%22:7%7D": None,
        f"POST {GALLERY}/compact": None,
        "POST /v1/snapshots": None,
        "POST /v2/models/linear/infer": infer,
        "POST /v2/models/linear/versions/1/infer": infer,
        "GET /openapi.json": None,
    }


def targets(live: Live) -> list[Target]:
    """A target for each route of the service's own description, with our samples of bodies."""
    live.ask("POST", "/v1/collections", {"name": "people"})
    found = {**{route: {} for route in described_routes(live)}, **requests()}
    return [_route(live, *name.split(" ")[:2], body) for name, body in found.items()]


def described_routes(live: Live) -> list[str]:
    """``METHOD path`` of each route of the service's own description, with names and numbers in place of parameters."""
    paths = live.http.get("/openapi.json").json()["paths"]
    places = {path: path.replace("{collection}", "people").replace("{model}", "linear") for path in paths}
    return [f"{method.upper()} {re.sub(r'{[^}]*}', '1', places[path])}" for path in paths for method in paths[path]]


def answer_to(live: Live, content: bytes, **more: str) -> httpx.Response | None:
    """The checked answer to an input, a line of method, path and headers, and the body; None if httpx refuses it."""
    head, _, body = content.partition(b"\n")
    method, path, headers = json.loads(head)
    try:
        answer = live.http.request(method, path, content=body, headers={**headers, **more})
    except (httpx.InvalidURL, httpx.LocalProtocolError):
        return None
    check_answer(answer, live.folder)
    return answer


def damaged_path(path: str, rng: random.Random) -> str:
    """``path`` with another text in place of a segment."""
    parts = path.split("/")
    parts[rng.randrange(1, len(parts))] = _CONTROL.sub("~", rng.choice(TEXTS)).replace("?", "%3F")
    return "/".join(parts)


def _route(live: Live, method: str, path: str, body: Any) -> Target:
    def make(rng: random.Random) -> bytes:
        place = damaged_path(path, rng) if rng.random() < 0.2 else path
        if rng.random() < 0.2:
            key = rng.choice(("limit", "after", "filter", "k", "x"))
            place += ("&" if "?" in place else "?") + f"{key}={_CONTROL.sub('~', rng.choice(TEXTS))[:200]}"
        content = as_json(mutated_value(body, rng), rng) if body is not None or rng.random() < 0.1 else b""
        kind = rng.choice(("application/json",) * 8 + ("text/plain", "image/png", "application/octet-stream", "*/*"))
        headers = {"Content-Type": kind}
        if rng.random() < 0.05:
            headers[rng.choice(PROXIES)] = rng.choice(PROXY_VALUES)
        head = json.dumps([method, place[:2000], headers])
        return head.encode() + b"\n" + content

    def run(content: bytes) -> None:
        answer = answer_to(live, content)
        if answer is not None and answer.status_code < 400 and any(name in answer.request.headers for name in PROXIES):
            raise Violation("what came through a proxy is served without tokens")

    return Target(f"{method} {path}", make, run)


def check_answer(answer: httpx.Response, folder: Path) -> None:
    """Raise :class:`Violation` for an answer that no request may get."""
    text = answer.text
    if answer.status_code >= 500 and answer.status_code not in ALLOWED_ERRORS:
        raise Violation(f"status {answer.status_code}: {text[:300]}")
    if str(folder) in text or "Traceback" in text or '.py"' in text or "site-packages" in text:
        raise Violation(f"an answer tells of the server: {text[:300]}")
    if len(answer.content) > LARGEST_ANSWER:
        raise Violation(f"an answer of {len(answer.content):,} bytes")
    if answer.status_code >= 400 and "json" not in answer.headers.get("content-type", ""):
        raise Violation(f"status {answer.status_code} without JSON: {text[:300]}")
