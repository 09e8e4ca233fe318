"""Client of ``plsc serve``: every operation as a typed method; failures are exceptions.

with plsc.Client("http://127.0.0.1:8080", token=None) as client:
    client.create_collection("staff")
    ada = client.add_person("staff", "Ada", faces=["ada.jpg"])
    for match in client.search("staff", "unknown.jpg", k=5):
        print(match.person.name, match.score)
"""

from __future__ import annotations  # signatures in help() then read as they are written here

import json
import os
import random
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

from plsc.arguments import as_integer, as_number
from plsc.client_values import (
    Collection,
    Comparison,
    DetectedFace,
    Filter,
    Input,
    Known,
    Match,
    Matches,
    NewPerson,
    Person,
    Picture,
    Snapshot,
    Vector,
    input_as_json,
    inputs_as_json,
    person_as_json,
    read_faces,
    read_known,
    read_matches,
    read_person,
)
from plsc.errors import DataError, PlscError, UsageError, masked, quoted
from plsc.persons import KEEP, Scalar, Unchanged

if TYPE_CHECKING:
    import httpx
    from numpy.typing import NDArray

__all__ = [
    "KEEP",
    "Client",
    "Collection",
    "Comparison",
    "DetectedFace",
    "Filter",
    "Input",
    "Known",
    "Match",
    "Matches",
    "NewPerson",
    "Person",
    "Picture",
    "Scalar",
    "ServerError",
    "Snapshot",
    "Unchanged",
    "Vector",
    "token_from",
]

_LONGEST_TIMEOUT = 366 * 86400.0  # seconds; sockets take no infinite one
LONGEST_WAIT = 10.0  # seconds between two tries, whatever a busy server asks for
_PAGE = 1000
_KEY = "Idempotency-Key"
InputFaces = Mapping[str, Sequence[DetectedFace]]


class ServerError(PlscError):
    """An error response of the server, or none: ``status`` is HTTP's, 0 without an answer; ``code`` as in the docs.

    ``known`` is who was enrolled already, where ``on_known="refuse"`` refused an enrolment (409). ``faces`` are those
    of pictures of which an enrolment has to say which face is meant (422), by the input's name, such as "faces[0]".
    """

    def __init__(
        self, status: int, code: str, message: str, known: Known | None = None, faces: InputFaces | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.known, self.faces = status, code, known, faces or {}


class Client:
    """Client of one server; thread-safe. Every method raises :class:`ServerError`.

    An ``Input``, which is searched for, enrolled or compared, is

    - a picture: the path of a JPEG, PNG or WEBP file (``str`` or ``Path``), the file's bytes, a Pillow image, a uint8
      RGB array (H, W, 3), or a :class:`Picture`, which adds landmarks; or
    - a vector: D numbers as an array (D,) or (1, D), or as a list; of another model than the server's own, in a
      :class:`Vector`, which names it.

    A file that cannot be read is a :class:`plsc.errors.DataError`, anything else a :class:`plsc.errors.UsageError`.

    Args:
        url: address of the server.
        token: secret of a token, where the server needs one.
        timeout: seconds for one try.
        retries: further tries where the server is busy or restarting (503, 429, or no connection), after the time that
            it asks for. Where an answer was lost, what adds something is sent again under the same idempotency key,
            which the server does once; changes and deletions are not.

    ``if_match`` of changes and deletions is the person as it was read (or an ETag): if somebody changed it since, that
    is a :class:`ServerError` with the status 412.
    """

    def __init__(self, url: str, token: str | None = None, *, timeout: float = 60.0, retries: int = 4) -> None:
        import httpx

        timeout = as_number(timeout, "timeout")
        if not 0 < timeout <= _LONGEST_TIMEOUT:
            raise UsageError(f"a timeout of {timeout} s: it lies above 0, and up to a year")
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        try:
            if not isinstance(url, str) or not url.startswith(("http://", "https://")):
                raise ValueError("it begins with http:// or https://")
            self._http = httpx.Client(base_url=url.rstrip("/"), headers=headers, timeout=timeout)
        except (httpx.InvalidURL, ValueError) as error:
            raise ServerError(0, "bad_request", f"{masked(str(url))} is no address of a server: {error}") from None
        self._url, self._retries = masked(url), retries
        self._anew = partial(type(self), url, token, timeout=timeout, retries=retries)

    def __repr__(self) -> str:
        """Return the address, without what stands before @ in it, and without the token."""
        return f"<plsc.Client of {self._url}>"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle what it was made with, the token too; it comes back with connections of its own."""
        return self._anew, ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def info(self) -> dict[str, Any]:
        """The server's model, threshold and limits, and this caller's role."""
        return dict(self._request("GET", "/v1/info"))

    def ready(self) -> bool:
        """Return True if the server answers that it is ready; does not raise."""
        import httpx

        try:
            return self._http.get("/health/ready").status_code == 200
        except httpx.HTTPError:
            return False

    def collections(self) -> list[Collection]:
        """All collections by name."""
        return [Collection(**item) for item in self._request("GET", "/v1/collections")["collections"]]

    def collection(self, name: str) -> Collection:
        """One collection."""
        return Collection(**self._request("GET", _path(name)))

    def create_collection(self, name: str) -> Collection:
        """Make a collection for the server's model."""
        return Collection(**self._request("POST", "/v1/collections", {"name": name}))

    def delete_collection(self, name: str) -> None:
        """Delete a collection with everybody in it."""
        self._request("DELETE", _path(name))

    def compact(self, collection: str) -> dict[str, float]:
        """Rewrite the files without what was deleted; returns the collection's statistics."""
        return dict(self._request("POST", f"{_path(collection)}/compact")["statistics"])

    def add_person(
        self,
        collection: str,
        name: str | None = None,
        *,
        metadata: Mapping[str, Scalar] | None = None,
        faces: Sequence[Input] = (),
        external_id: str | None = None,
        expires: str | None = None,
        on_known: str = "enrol",
    ) -> Person:
        """Enrol a person; one with the same ``external_id`` is a :class:`ServerError` with the status 409.

        Where a face matches somebody at or above the server's threshold, ``on_known="refuse"`` is a
        :class:`ServerError` with ``known``, and ``"add"`` adds the faces to that person, who is returned.
        """
        return self.enrol(collection, NewPerson(name, metadata or {}, faces, external_id, expires), on_known=on_known)

    def enrol(
        self, collection: str, person: NewPerson, *, on_known: str = "enrol", idempotency_key: str | None = None
    ) -> Person:
        """Enrol a person as :meth:`add_person`; under a key of your own, a call repeated within a day is done once."""
        path, body = f"{_path(collection)}/persons", person_as_json(person)
        return self._about_person("POST", path, body, query={"on_known": on_known}, key=idempotency_key)

    def upsert_person(
        self,
        collection: str,
        external_id: str,
        name: str | None = None,
        *,
        metadata: Mapping[str, Scalar] | None = None,
        faces: Sequence[Input] = (),
        expires: str | None = None,
        if_match: Person | str | None = None,
        only_new: bool = False,
    ) -> Person:
        """Enrol the person with an external id, or replace name, metadata, faces and expiry of the one there is.

        With ``only_new`` a person that there is already is a :class:`ServerError` with the status 412.
        """
        person = person_as_json(NewPerson(name, metadata or {}, faces, None, expires))
        headers = {**_if_match(if_match), **({"If-None-Match": "*"} if only_new else {})}
        path = _external_path(collection, external_id)
        return self._about_person("PUT", path, person, headers=headers, repeatable=not headers)

    def add_persons(self, collection: str, persons: Sequence[NewPerson]) -> list[Person]:
        """Enrol all of them, or none."""
        body = {"persons": [person_as_json(person) for person in persons]}
        return [read_person(item) for item in self._request("POST", f"{_path(collection)}/persons", body)["persons"]]

    def person(self, collection: str, person: int) -> Person:
        """One person."""
        return self._about_person("GET", _path(collection, person))

    def person_by_external_id(self, collection: str, external_id: str) -> Person:
        """The person with an external id."""
        return self._about_person("GET", _external_path(collection, external_id))

    def persons(self, collection: str, *, filter: Filter | None = None) -> Iterator[Person]:
        """Iterate over all persons, or those that match ``filter``, by ascending id; reads page by page."""
        query = {} if filter is None else {"filter": _as_json(filter)}
        yield from map(read_person, self._pages(f"{_path(collection)}/persons", query))

    def update_person(
        self,
        collection: str,
        person: int,
        *,
        name: str | Unchanged | None = KEEP,
        metadata: Mapping[str, Scalar] | None = None,
        expires: str | Unchanged | None = KEEP,
        if_match: Person | str | None = None,
    ) -> Person:
        """Change the name or expiry (None removes it), or replace the metadata; what is not given stays."""
        fields = {"name": name, "metadata": KEEP if metadata is None else dict(metadata), "expires": expires}
        body = {key: value for key, value in fields.items() if value is not KEEP}
        return self._about_person("PATCH", _path(collection, person), body, headers=_if_match(if_match))

    def delete_person(self, collection: str, person: int, *, if_match: Person | str | None = None) -> None:
        """Delete a person with all faces."""
        self._request("DELETE", _path(collection, person), headers=_if_match(if_match))

    def delete_person_by_external_id(
        self, collection: str, external_id: str, *, if_match: Person | str | None = None
    ) -> None:
        """Delete the person with an external id and all faces."""
        self._request("DELETE", _external_path(collection, external_id), headers=_if_match(if_match))

    def add_faces(
        self, collection: str, person: int, faces: Sequence[Input], *, idempotency_key: str | None = None
    ) -> list[int]:
        """Add faces to a person; returns their ids. ``idempotency_key`` as for :meth:`enrol`."""
        path, body = f"{_path(collection, person)}/faces", {"faces": inputs_as_json("faces", faces)}
        return [face["id"] for face in self._request("POST", path, body, key=idempotency_key)["faces"]]

    def delete_face(self, collection: str, person: int, face: int, *, if_match: Person | str | None = None) -> None:
        """Delete one face; ``if_match`` is its person."""
        path = f"{_path(collection, person)}/faces/{as_integer(face, 'the id of a face')}"
        self._request("DELETE", path, headers=_if_match(if_match))

    def search(
        self,
        collection: str,
        query: Input,
        *,
        k: int = 10,
        threshold: float | None = None,
        filter: Filter | None = None,
        deadline_ms: int | None = None,
        faces: Literal["largest", "all"] = "largest",
    ) -> Matches:
        """Persons most like ``query``, best first; with ``threshold`` only matches with at least this score.

        Of a picture with several faces they are of the largest, unless a :class:`Picture` names another. With
        ``faces="all"`` its attribute ``faces`` has every face, at most 64, with matches of its own.
        """
        options: dict[str, Any] = {"k": k, "threshold": threshold, "filter": filter, "deadline_ms": deadline_ms}
        return self.search_many(collection, [query], **options, faces=faces)[0]

    def search_many(
        self,
        collection: str,
        queries: Sequence[Input],
        *,
        k: int = 10,
        threshold: float | None = None,
        filter: Filter | None = None,
        deadline_ms: int | None = None,
        faces: Literal["largest", "all"] = "largest",
    ) -> list[Matches]:
        """The matches of each of ``queries``, in one request; with ``faces="all"`` of at most four pictures."""
        options: dict[str, Any] = {"k": k, "threshold": threshold, "filter": filter, "deadline_ms": deadline_ms}
        options["faces"] = None if faces == "largest" else faces
        body = {key: value for key, value in options.items() if value is not None}
        body["queries"] = inputs_as_json("queries", queries)
        results = self._request("POST", f"{_path(collection)}/search", body, repeatable=True)["results"]
        return [read_matches(result) for result in results]

    def detect(self, picture: Input) -> list[DetectedFace]:
        """The faces that the server's detector finds in a picture, the largest first, at most 64."""
        (found,) = self._request("POST", "/v1/detect", {"inputs": [input_as_json(picture)]}, repeatable=True)["results"]
        return read_faces(found)

    def compare(self, a: Input, b: Input) -> Comparison:
        """Cosine of two inputs, and whether it reaches the server's threshold."""
        body = {"a": input_as_json(a), "b": input_as_json(b)}
        return Comparison(**self._request("POST", "/v1/compare", body, repeatable=True))

    def embeddings(self, inputs: Sequence[Input], *, collection: str | None = None) -> NDArray[np.float32]:
        """(n, D) float32 of pictures, as the model gives them: not normalised.

        The model is the server's own, or the one that ``collection`` is searched by.
        """
        body = {"inputs": inputs_as_json("inputs", inputs), "collection": collection}
        return np.asarray(
            self._request("POST", "/v1/embeddings", body, repeatable=True)["embeddings"], dtype=np.float32
        )

    def take_snapshot(self) -> Snapshot:
        """Copy the whole store on the server's disk."""
        return Snapshot(**self._request("POST", "/v1/snapshots"))

    def snapshots(self) -> list[Snapshot]:
        """All snapshots, oldest first."""
        return [Snapshot(**item) for item in self._request("GET", "/v1/snapshots")["snapshots"]]

    def delete_snapshot(self, snapshot: str) -> None:
        """Delete a snapshot."""
        self._request("DELETE", f"/v1/snapshots/{_quoted(snapshot)}")

    def begin_migration(self, collection: str) -> dict[str, Any]:
        """Begin to move a collection to the server's next model (docs/migration.md).

        Returns how far it is, and the bytes of disk that it will take at the most (``needed_bytes``) and that were free
        (``free_bytes``; None where the server's store is in a database).
        """
        return dict(self._request("POST", "/v1/migrations", {"collection": collection}))

    def migrations(self) -> list[dict[str, Any]]:
        """How far all collections are that are being moved."""
        return list(self._request("GET", "/v1/migrations")["migrations"])

    def migration(self, collection: str) -> dict[str, Any]:
        """How far the move of a collection is."""
        return dict(self._request("GET", f"/v1/migrations/{_quoted(collection)}"))

    def missing(self, collection: str) -> Iterator[dict[str, Any]]:
        """Iterate over persons with faces that have no vector of their own by the other model."""
        yield from self._pages(f"/v1/migrations/{_quoted(collection)}/missing", {})

    def send_pictures(self, collection: str, person: int, pictures: Sequence[Input]) -> list[int]:
        """Send pictures of a person again; returns the faces that they are of, and are embedded for."""
        path = f"/v1/migrations/{_quoted(collection)}/persons/{as_integer(person, 'the id of a person')}/pictures"
        body = {"faces": inputs_as_json("faces", pictures)}
        return list(self._request("POST", path, body, repeatable=True)["faces"])

    def migrate(
        self, collection: str, step: str, *, max_loss: float | None = None, threshold: float | None = None
    ) -> dict[str, Any]:
        """Take a step of a move; returns how far it is, or what was found.

        "finish" returns the thresholds, and how many ``snapshots`` were taken before and may hold the former vectors.

        Args:
            collection: its name.
            step: "pause", "resume", "estimate", "judge", "cut-over", "roll-back", "finish" or "cancel".
            max_loss: for "cut-over", of the true accept rate; None: the server's 0.01.
            threshold: for "cut-over", a cosine of the new model; None: the one that the judgement finds.
        """
        body = None
        if step == "cut-over":
            given = {"max_loss": max_loss, "threshold": threshold}
            body = {name: as_number(value, name) for name, value in given.items() if value is not None}
        return dict(self._request("POST", f"/v1/migrations/{_quoted(collection)}/{_quoted(step)}", body) or {})

    def _pages(self, path: str, query: Mapping[str, str]) -> Iterator[dict[str, Any]]:
        after: int | None = 0
        while after is not None:
            page = self._request("GET", path, query={**query, "after": after, "limit": _PAGE})
            yield from page["persons"]
            after = page["next"]

    def _about_person(self, method: str, path: str, body: Any = None, **options: Any) -> Person:
        """The person that an answer is about, with its ETag."""
        answer = self._ask(method, path, body, **options)
        return read_person(_content(answer), answer.headers.get("ETag"))

    def _request(self, method: str, path: str, body: Any = None, **options: Any) -> Any:
        """The answer's JSON, None where it has none."""
        return _content(self._ask(method, path, body, **options))

    def _ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        query: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        repeatable: bool = False,
        key: str | None = None,
    ) -> httpx.Response:
        """The server's answer, asked for again where that is safe and may help.

        A POST that is not ``repeatable`` by its nature carries an idempotency key, ``key`` or a new one, which makes it
        so.
        """
        import httpx

        content = None if body is None else _as_json(body).encode()
        sent = {**(headers or {}), **({} if body is None else {"Content-Type": "application/json"})}
        if method == "POST" and not repeatable:
            sent[_KEY] = f'"{key or uuid.uuid4()}"'
        tries = self._retries
        while True:
            try:
                answer = self._http.request(method, path, content=content, headers=sent, params=query)
            except httpx.HTTPError as error:
                # Without a connection the server got nothing; a change whose answer was lost may have been done.
                is_safe = isinstance(error, httpx.ConnectError) or method == "GET" or repeatable or _KEY in sent
                if not tries or not is_safe:
                    message = f"{self._url} does not answer: {error or type(error).__name__}; is it running?"
                    raise ServerError(0, "unavailable", message) from None
                wait = "1"
            else:
                if not tries or not _may_help(answer):
                    return answer
                wait = answer.headers.get("Retry-After", "1")
            tries -= 1
            time.sleep(_pause(wait))


def token_from(file: Path | None = None) -> str | None:
    """The secret of a token: that in ``file``, else in $PLSC_TOKEN; :class:`DataError` for a file without a text."""
    if file is None:
        return os.environ.get("PLSC_TOKEN")
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise DataError(f"{file} holds no token's secret") from None


def _may_help(answer: httpx.Response) -> bool:
    """True if the same request may succeed later: the server is busy, or still at its first try."""
    return answer.status_code in (429, 503) or (answer.status_code == 409 and "Retry-After" in answer.headers)


def _if_match(person: Person | str | None) -> dict[str, str]:
    """The header for a person as it was read, or an ETag."""
    etag = person.etag if isinstance(person, Person) else person
    if person is not None and not etag:
        raise UsageError("if_match is a person with an ETag: read it by client.person(), not from matches or lists")
    return {"If-Match": etag} if etag else {}


def _content(answer: Any) -> Any:
    if answer.is_success:
        return answer.json() if answer.content else None
    faces: dict[str, list[DetectedFace]] = {}
    try:
        body = answer.json()
        code, message = str(body["error"]["code"]), str(body["error"]["message"])
        known = read_known(body)
        for face, entry in zip(read_faces(body), body.get("faces", ()), strict=True):
            faces.setdefault(entry["input"], []).append(face)
    except (ValueError, KeyError, TypeError):
        code, message, known = "internal", f"the server answered {answer.status_code} without saying why", None
    raise ServerError(answer.status_code, code, message, known, faces)


def _pause(retry_after: str) -> float:
    """Seconds to wait: the server's, with jitter so that many clients do not come back at once."""
    try:
        seconds = float(retry_after)
    except ValueError:
        seconds = 1.0
    return min(max(seconds, 0.0), LONGEST_WAIT) * random.uniform(0.5, 1.0)


def _path(collection: str, person: int | None = None) -> str:
    path = f"/v1/collections/{_quoted(collection)}"
    return path if person is None else f"{path}/persons/{as_integer(person, 'the id of a person')}"


def _external_path(collection: str, external_id: str) -> str:
    return f"{_path(collection)}/persons/by-external-id/{_quoted(external_id)}"


def _quoted(name: str) -> str:
    from urllib.parse import quote

    try:
        return quote(name, safe="")
    except (TypeError, UnicodeError):
        raise UsageError(f"a name is a text, not {quoted(name)}") from None


def _as_json(body: Any) -> str:
    try:
        return json.dumps(body, default=_as_plain)
    except TypeError as error:
        raise UsageError(f"this cannot be sent as JSON: {error}") from None


def _as_plain(value: Any) -> Any:
    """Numbers and arrays of numpy as Python's own."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} is no text, number, list or mapping")
