"""Idempotency-Key: a POST that is sent again gets its first answer, and is not done again.

The header is that of the IETF's draft "The Idempotency-Key HTTP Header Field": a string in quotes, or the bare one that
most clients send. The store keeps the answer to a change in the change's transaction, so the request was done if and
only if its answer is there. The answer to a compaction or a snapshot is kept once it is done: after a crash between the
two it is done again. What failed is not kept: the same key may try again.
"""

import hashlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import orjson
from fastapi import Request
from starlette.responses import Response

from plsc.errors import ConflictError
from plsc.gallery.store import Store
from plsc.gallery.values import IdempotentRequest, StoredAnswer
from plsc.serve.access import current_caller
from plsc.serve.errors import RETRY_SECONDS, ApiError
from plsc.serve.schemas import header_parameter

HEADER = "Idempotency-Key"
REPLAYED = "Idempotent-Replayed"
_KEY = re.compile(r'"([\x20-\x21\x23-\x5b\x5d-\x7e]{1,255})"|([\x21\x23-\x5b\x5d-\x7e]{1,255})')
_CREATED = 201
# What a route that claims keys adds to its OpenAPI description.
_MEANING = "Sent again with the same key within a day, the request gets its first answer"
DESCRIBED = {"parameters": [header_parameter(HEADER, _MEANING, pattern=f"^(?:{_KEY.pattern})$")]}


class Claim:
    """The right to do a request under its key; without a key nothing is kept.

    Attributes:
        stored: the answer of this request if it was done before.
    """

    def __init__(self, token: str = "", key: str | None = None, fingerprint: bytes = b"") -> None:
        self.token, self.key, self.fingerprint = token, key, fingerprint
        self.stored: StoredAnswer | None = None

    def request(self, content: Callable[[Any], Any], status: int = _CREATED) -> IdempotentRequest | None:
        """What the store is to keep: ``content`` makes JSON values of what its method returns."""
        if self.key is None:
            return None

        def answer(result: Any) -> tuple[int, bytes]:
            return status, orjson.dumps(content(result))

        return IdempotentRequest(self.token, self.key, self.fingerprint, answer)

    def replay(self, response: Response) -> Any:
        """The JSON values that were kept; marks ``response`` as one that was given before."""
        assert self.stored is not None
        response.headers[REPLAYED] = "true"
        return orjson.loads(self.stored.body)


class IdempotencyKeys:
    """The keys of the requests in progress in this process; the store has those of the requests that were done.

    Args:
        in_store: calls a function that may block on ``store`` in a thread.
    """

    def __init__(self, store: Store, in_store: Callable[..., Awaitable[Any]]) -> None:
        self._store, self._in_store = store, in_store
        self._in_progress: set[tuple[str, str]] = set()

    @asynccontextmanager
    async def claim(self, request: Request) -> AsyncIterator[Claim]:
        """Claim the key that ``request`` was sent with until the block ends.

        Raises:
            ApiError: 400 for a header that holds no key, 409 while a request with the key is in progress, 422 if
                another request was done with it.
            UnsupportedError: the store keeps no answers.
        """
        key = read_key(request)
        if key is None:
            yield Claim()
            return
        token = current_caller().name or ""
        if (token, key) in self._in_progress:
            raise _in_progress()
        self._in_progress.add((token, key))
        try:
            yield await self._look_up(request, token, key)
        except ConflictError:
            if await self._in_store(self._store.stored_answer, token, key) is None:
                raise
            raise _in_progress() from None  # another process, which shares the store, was faster
        finally:
            self._in_progress.discard((token, key))

    async def _look_up(self, request: Request, token: str, key: str) -> Claim:
        body = await request.body()

        def look_up() -> Claim:
            claim = Claim(token, key, fingerprint(request, body))
            claim.stored = self._store.stored_answer(token, key)
            return claim

        claim: Claim = await self._in_store(look_up)
        if claim.stored is not None and claim.stored.fingerprint != claim.fingerprint:
            raise ApiError(422, f"this {HEADER} was sent with another request; give every request a key of its own")
        return claim


def _in_progress() -> ApiError:
    message = f"a request with this {HEADER} is in progress; wait for its answer, then send it again"
    return ApiError(409, message, {"Retry-After": str(RETRY_SECONDS)})


def read_key(request: Request) -> str | None:
    """The key in a request's header, None without one; :class:`ApiError` 400 if it holds something else."""
    values = request.headers.getlist(HEADER)
    if not values:
        return None
    found = _KEY.fullmatch(values[0].strip()) if len(values) == 1 else None
    if found is None:
        raise ApiError(
            400, f'the header {HEADER} is one string of 1 to 255 printable ASCII characters without \\ and "'
        )
    return found[1] or found[2]


def fingerprint(request: Request, body: bytes) -> bytes:
    """Hash of all that decides what a request does."""
    scope = request.scope
    head = f"{scope['method']}\n{scope['path']}\n".encode() + bytes(scope["query_string"]) + b"\n"
    return hashlib.sha256(head + hashlib.sha256(body).digest()).digest()
