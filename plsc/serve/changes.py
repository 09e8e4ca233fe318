"""Changes of the store: within the operator's quotas, done once however often they are sent, and of what was read.

Idempotency-Key: a POST that is sent again gets its first answer, and is not done again. The header is that of the
IETF's draft "The Idempotency-Key HTTP Header Field": a string in quotes, or the bare one that most clients send. The
store keeps the answer to a change in the change's transaction, so the request was done if and only if its answer is
there. The answer to a compaction or a snapshot is kept once it is done: after a crash between the two it is done again.
What failed is not kept: the same key may try again.

A person's ETag (RFC 9110, section 8.8.3) names a revision; with If-Match (section 13) an editor overwrites nobody's
change unawares.
"""

import hashlib
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import orjson
from fastapi import Request
from starlette.responses import Response

from plsc.errors import ConflictError, NotFoundError
from plsc.gallery.sqlite import COLLECTIONS, SQLITE
from plsc.gallery.store import Store
from plsc.gallery.values import IdempotentRequest, Metadata, Person, Precondition, StoredAnswer
from plsc.serve.access import current_caller
from plsc.serve.errors import RETRY_SECONDS, ApiError
from plsc.serve.schemas import header_parameter
from plsc.serve.settings import Limits

Result = TypeVar("Result")
HEADER = "Idempotency-Key"
REPLAYED = "Idempotent-Replayed"
_KEY = re.compile(r'"([\x20-\x21\x23-\x5b\x5d-\x7e]{1,255})"|([\x21\x23-\x5b\x5d-\x7e]{1,255})')
_CREATED = 201
# What routes that claim keys, read a precondition, or also make persons add to their OpenAPI descriptions.
_MEANING = "Sent again with the same key within a day, the request gets its first answer"
KEY_DESCRIBED = {"parameters": [header_parameter(HEADER, _MEANING, pattern=f"^(?:{_KEY.pattern})$")]}

_MAX_HEADER = 4096  # characters
_TAG = r'(?:W/)?"[\x21\x23-\x7e\x80-\xff]*"'
_TAGS = re.compile(rf"\s*({_TAG})\s*(?:,|$)")
_OURS = re.compile(r'"(\d{1,19})-(\d{1,19})"')
_IF_MATCH = header_parameter(
    "If-Match",
    "* or ETags of the person, one of which has to be the present one",
    maxLength=_MAX_HEADER,
    pattern=rf"^(?:\*|{_TAG}(?:\s*,\s*{_TAG})*,?)$",
)
_IF_NONE_MATCH = header_parameter(
    "If-None-Match", "*: there must be no such person", maxLength=_MAX_HEADER, pattern=r"^\*$"
)
CONDITIONS_DESCRIBED = {"parameters": [_IF_MATCH]}
PUT_CONDITIONS_DESCRIBED = {"parameters": [_IF_MATCH, _IF_NONE_MATCH]}


class Quotas:
    """Refuses, with :class:`ApiError`, changes of ``store`` that would go beyond the quotas of ``limits``.

    Changes that add wait for each other, so that together they keep to a quota too. Deletions are never refused.
    """

    def __init__(self, store: Store, limits: Limits) -> None:
        self._store, self._limits = store, limits
        self._are_set = (limits.persons, limits.store_bytes, limits.metadata_bytes) != (None, None, None)
        self._adding = threading.Lock()

    def add(
        self,
        change: Callable[..., Result],
        collection: str,
        *args: Any,
        adds: int | str = 0,
        metadata: Sequence[Metadata] = (),
        **options: Any,
    ) -> Result:
        """Call ``change``, which adds to ``collection``, with the rest.

        Args:
            adds: how many persons it adds; or an external id, whose person it adds where there is none.
            metadata: of the persons that it adds or changes.
        """
        if not self._are_set:
            return change(collection, *args, **options)
        for each in metadata:
            self._check_metadata(each)
        with self._adding:
            self._check_bytes()
            self._check_persons(collection, adds)
            return change(collection, *args, **options)

    def _check_persons(self, collection: str, adds: int | str) -> None:
        limit = self._limits.persons
        if limit is None or not adds:
            return
        more = adds if isinstance(adds, int) else 1 - self._is_there(collection, adds)
        if (there := self._store.collection(collection).persons) + more > limit:
            raise ApiError(
                507,
                f"{collection} holds {there:,} people and takes {limit:,} at most; delete some, or ask for a higher "
                "limit (plsc serve --max-persons)",
            )

    def _is_there(self, collection: str, external_id: str) -> bool:
        try:
            self._store.find_person(collection, external_id)
        except NotFoundError:
            return False
        return True

    def _check_bytes(self) -> None:
        limit, folder = self._limits.store_bytes, self._store.folder
        if limit is not None and folder is not None and (size := store_bytes(folder)) >= limit:
            raise ApiError(
                507,
                f"the store has {size:,} bytes of the {limit:,} that it may have; delete and compact, or ask for a "
                "higher limit (plsc serve --max-store-mib)",
            )

    def _check_metadata(self, metadata: Metadata) -> None:
        limit = self._limits.metadata_bytes
        if limit is not None and (size := len(orjson.dumps(dict(metadata)))) > limit:
            raise ApiError(413, f"the metadata of a person have {size:,} bytes as JSON; at most {limit:,} are taken")


def store_bytes(folder: Path) -> int:
    """Bytes of the files that hold a store in ``folder``: its database and its segments, without snapshots."""
    files = [*folder.glob(f"{SQLITE}*"), *(folder / COLLECTIONS).rglob("*")]
    return sum(_size(path) for path in files)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except FileNotFoundError:  # a compaction has just removed it
        return 0


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


def set_etag(response: Response, person: Person) -> None:
    """Set the strong ETag of a person: the id belongs to it, for another one may get the same external id."""
    response.headers["ETag"] = f'"{person.id}-{person.revision}"'


def read_precondition(request: Request) -> Precondition | None:
    """What the request's If-Match or If-None-Match requires of its person; None without either.

    Raises:
        ApiError: 400 for a header that is not what RFC 9110 says.
    """
    if_match, if_none_match = (_header(request, name) for name in ("if-match", "if-none-match"))
    if if_match is not None and if_none_match is not None:
        raise ApiError(400, "If-Match and If-None-Match exclude each other; send one of them")
    if if_none_match is not None:
        if if_none_match.strip() != "*":
            raise ApiError(400, "If-None-Match of a change is *: there must be no such person")
        return Precondition(exists=False)
    if if_match is None:
        return None
    return Precondition() if if_match.strip() == "*" else Precondition(revisions=_read_tags(if_match))


def _header(request: Request, name: str) -> str | None:
    """All values of a header, None without any; an empty one was meant to be a condition, and is no absent one."""
    values = request.headers.getlist(name)
    return ", ".join(values) if values else None


def _read_tags(text: str) -> frozenset[tuple[int, int]]:
    """The (id, revision) of the strong tags that are ours; weak and foreign ones match nothing."""
    if not text or len(text) > _MAX_HEADER or "".join(match[0] for match in _TAGS.finditer(text)) != text:
        raise ApiError(400, 'If-Match is * or ETags in quotes, such as "17-3"')
    found = (_OURS.fullmatch(match[1]) for match in _TAGS.finditer(text))
    return frozenset((int(tag[1]), int(tag[2])) for tag in found if tag is not None)
