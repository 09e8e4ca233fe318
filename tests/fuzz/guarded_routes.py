"""Fuzz targets of a service with tokens: what each kind of token is asked, and what it must never be told or do.

Two collections: ``mine``, which the restricted tokens are for, and ``theirs``, which they know nothing of and must not
change. The service's threshold is one that no picture reaches, so a token that may only search is told of nobody.
"""

import json
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx
from support.live_service import Live, live_service, vectors

from fuzz.driver import Target, Violation
from fuzz.mutations import as_json, mutated_value
from fuzz.routes import PROXIES, PROXY_VALUES, answer_to, damaged_path, described_routes, requests
from plsc.serve.tokens import add_token, read_tokens

MINE, THEIRS = "Ottokar", "Hermenegild"  # in all that is stored of each collection's persons
OPEN = re.compile(r"/(v2(/health/.*)?|health/.*|openapi\.json|docs.*|page.*)?$")
KINDS: dict[str, dict[str, Any]] = {
    "searcher": {"role": "search", "collections": ["mine"]},
    "embedder": {"role": "search", "allow": ["vectors", "embeddings"], "collections": ["mine"]},
    "reader": {"role": "read", "collections": ["mine"]},
    "writer": {"role": "write", "allow": ["vectors"], "collections": ["mine"]},
    "owner": {"role": "admin", "collections": ["mine"]},
    "limited": {"role": "write", "collections": ["mine"], "rates": ["requests=50/s", "searches=1/h"]},
}


@dataclass(frozen=True)
class Guarded:
    """The service, the token of each kind, one of an admin, and what nobody may be told."""

    live: Live
    secrets: dict[str, str]
    admin: str
    untold: tuple[str, ...]

    def ask(self, secret: str, method: str, path: str, body: Any = None) -> httpx.Response:
        """A request with a token."""
        return self.live.ask(method, path, body, headers={"Authorization": f"Bearer {secret}"})

    def theirs(self) -> str:
        """All that is stored in the collection that the restricted tokens are not for."""
        pages = ("/v1/collections/theirs", "/v1/collections/theirs/persons")
        return "".join(self.ask(self.admin, "GET", page).text for page in pages)

    def renew_mine(self) -> None:
        """Put the persons of the restricted tokens' collection back, whom they may delete."""
        if self.ask(self.admin, "GET", "/v1/collections/mine/persons").text.count(MINE) < len(vectors(3)):
            self.ask(self.admin, "DELETE", "/v1/collections/mine")
            _fill(self, "mine", MINE)


@contextmanager
def guarded_service(folder: Path) -> Iterator[Guarded]:
    """A service with tokens in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = folder / "tokens.toml"
    admin = add_token(tokens, "root", "admin")
    secrets = {name: add_token(tokens, name, **options) for name, options in KINDS.items()}
    hashes = [token.sha256 for token in read_tokens(tokens)]
    with live_service(folder, tokens=tokens, threshold=1.0, audit_events=frozenset({"write", "refusal"})) as live:
        guarded = Guarded(live, {**secrets, "stranger": "plsc_" + "x" * 43}, admin, (admin, *secrets.values(), *hashes))
        _fill(guarded, "theirs", THEIRS)
        _fill(guarded, "mine", MINE)
        yield guarded


def _fill(guarded: Guarded, collection: str, word: str) -> None:
    about = {"metadata": {"of": word}}
    persons = [
        {"name": f"{word} {n}", "external_id": f"{word}-{n}", "faces": [{"vector": row.tolist()}], **about}
        for n, row in enumerate(vectors(3, seed=len(word)))
    ]
    for path, body in (("", {"name": collection}), (f"/{collection}/persons", {"persons": persons})):
        answer = guarded.ask(guarded.admin, "POST", f"/v1/collections{path}", body)
        if answer.status_code != 201:
            raise AssertionError(answer.text)


def targets(guarded: Guarded) -> list[Target]:
    """A target for each kind of token."""
    return [_token(guarded, name, secret) for name, secret in guarded.secrets.items()]


def _token(guarded: Guarded, name: str, secret: str) -> Target:
    described = described_routes(guarded.live)
    samples = {**{route: None if route.startswith("GET ") else {} for route in described}, **requests()}
    theirs = guarded.theirs()

    def make(rng: random.Random) -> bytes:
        method, path = rng.choice(list(samples)).split(" ")[:2]
        body = samples[f"{method} {path}"]
        path = path.replace("people", rng.choice(("mine", "theirs", "theirs")))
        path = damaged_path(path, rng) if rng.random() < 0.2 else path
        headers = {"Content-Type": "application/json"}
        if rng.random() < 0.3:
            headers[rng.choice(PROXIES)] = rng.choice(PROXY_VALUES)
        content = b""
        if body is not None:
            content = as_json(body if rng.random() < 0.5 else mutated_value(body, rng), rng)
        return json.dumps([method, path, headers]).encode() + b"\n" + content

    def run(content: bytes) -> None:
        answer = answer_to(guarded.live, content, Authorization=f"Bearer {secret}")
        if answer is None:
            return
        # httpx takes the start of //name for a host
        method, path = answer.request.method, answer.request.url.raw_path.decode()
        _check_secrets(guarded, answer, path, content.partition(b"\n")[2])
        _check_role(name, answer, method, path)
        if method != "GET" and answer.status_code < 400:
            if guarded.theirs() != theirs:
                raise Violation(f"{name} changed what is another's: {method} {path}")
            guarded.renew_mine()

    return Target(f"token {name}", make, run)


def _check_secrets(guarded: Guarded, answer: httpx.Response, path: str, sent: bytes) -> None:
    told = answer.text + str(answer.headers)
    for secret in guarded.untold:
        if secret in told:
            raise Violation("an answer tells a token or its hash")
    if THEIRS in told and THEIRS not in unquote(path) + sent.decode(errors="replace"):
        raise Violation(f"an answer tells of another's persons: {told[:300]}")


def _check_role(name: str, answer: httpx.Response, method: str, path: str) -> None:
    told, is_done = answer.text, answer.status_code < 400
    place = unquote(path).partition("?")[0]
    if name == "stranger" and is_done and not (method in ("GET", "HEAD") and OPEN.match(place)):
        raise Violation(f"a stranger is served {method} {path}")
    if name in ("searcher", "embedder"):
        if MINE in told or ('"metadata":' in told and not place.startswith(("/openapi", "/docs"))):
            raise Violation(f"who may only search is told of a person: {told[:300]}")
        if is_done and (method in ("PUT", "PATCH", "DELETE") or place.endswith(("persons", "compact", "snapshots"))):
            raise Violation(f"who may only search did {method} {path}")
    gives_embeddings = place.endswith("/infer") or place == "/v1/embeddings"
    if is_done and gives_embeddings and name not in ("embedder", "owner"):  # an admin has every right
        raise Violation(f"{name} was given embeddings")
