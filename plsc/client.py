"""A client of ``plsc serve``: every operation as a method, typed, with failures as exceptions.

    with plsc.Client("http://127.0.0.1:8080", token=None) as client:
        client.create_collection("staff")
        ada = client.add_person("staff", "Ada", faces=[Path("ada.jpg")])
        for match in client.search("staff", Path("unknown.jpg"), k=5):
            print(match.person.name, match.score)

An input is a :class:`pathlib.Path` of a JPEG, PNG or WEBP file, its bytes, a vector (D numbers), or :class:`Picture`
to send landmarks along.
"""

import base64
import json
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from plsc.errors import DataError, PlscError

LONGEST_WAIT = 10.0  # seconds that a busy server can make the client wait between two tries
_PAGE = 1000

Scalar = str | int | float | bool
Filter = Mapping[str, Any]


class ServerError(PlscError):
    """The server refused or failed. ``status`` is HTTP's, 0 where there was no answer; ``code`` the server's word."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(frozen=True)
class Picture:
    """An image with ``landmarks``: five points (x, y) in its pixels, by which the server aligns the face."""

    image: Path | bytes
    landmarks: Sequence[Sequence[float]] | None = None


Input = Picture | Path | bytes | npt.ArrayLike


@dataclass(frozen=True)
class Collection:
    """A collection; ``created`` is ISO 8601, UTC."""

    name: str
    dim: int
    contract_id: str
    persons: int
    faces: int
    created: str


@dataclass(frozen=True)
class NewPerson:
    """Someone to enrol."""

    name: str | None = None
    metadata: Mapping[str, Scalar] = field(default_factory=dict)
    faces: Sequence[Input] = ()


@dataclass(frozen=True)
class Person:
    """Someone enrolled; ``faces`` are ids. A match's person comes without faces and time."""

    id: int
    name: str | None
    metadata: Mapping[str, Scalar]
    faces: tuple[int, ...] = ()
    created: str | None = None


@dataclass(frozen=True)
class Match:
    """``score`` is the cosine of the person's best ``face``; ``same_person`` is None where no threshold is set."""

    person: Person
    face: int
    score: float
    same_person: bool | None


@dataclass(frozen=True)
class Comparison:
    """The cosine of two inputs."""

    score: float
    threshold: float | None
    same_person: bool | None


@dataclass(frozen=True)
class Snapshot:
    """A copy of the store on the server's disk."""

    id: str
    created: str
    bytes: int


class Client:
    """Speaks to the server at ``url``, with the secret of ``token`` where it asks for one.

    ``timeout`` in seconds for one try. A server that is busy or restarting (503, or no connection) is asked again up
    to ``retries`` times, as late as it wishes; a write whose answer was lost is not repeated. Everything raises
    :class:`ServerError`. One client may be used from several threads.
    """

    def __init__(self, url: str, token: str | None = None, *, timeout: float = 60.0, retries: int = 4) -> None:
        import httpx

        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        try:
            if not url.startswith(("http://", "https://")):
                raise ValueError("it begins with http:// or https://")
            self._http = httpx.Client(base_url=url.rstrip("/"), headers=headers, timeout=timeout)
        except (httpx.InvalidURL, ValueError) as error:
            raise ServerError(0, "bad_request", f"{url} is no address of a server: {error}") from None
        self._url, self._retries = url, retries

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
        return dict(self._ask("GET", "/v1/info"))

    def ready(self) -> bool:
        """Whether the server answers that it is ready; does not raise."""
        import httpx

        try:
            return self._http.get("/health/ready").status_code == 200
        except httpx.HTTPError:
            return False

    def collections(self) -> list[Collection]:
        """All collections by name."""
        return [Collection(**one) for one in self._ask("GET", "/v1/collections")["collections"]]

    def collection(self, name: str) -> Collection:
        """One collection."""
        return Collection(**self._ask("GET", _path(name)))

    def create_collection(self, name: str) -> Collection:
        """Make a collection for the server's model."""
        return Collection(**self._ask("POST", "/v1/collections", {"name": name}))

    def delete_collection(self, name: str) -> None:
        """Delete a collection with everybody in it."""
        self._ask("DELETE", _path(name))

    def compact(self, collection: str) -> dict[str, float]:
        """Bring changes into the searched files, so that deleted embeddings are in none; returns its statistics."""
        return dict(self._ask("POST", f"{_path(collection)}/compact")["statistics"])

    def add_person(
        self,
        collection: str,
        name: str | None = None,
        *,
        metadata: Mapping[str, Scalar] | None = None,
        faces: Sequence[Input] = (),
    ) -> Person:
        """Enrol someone."""
        person = _new_person(NewPerson(name, metadata or {}, faces))
        return _person(self._ask("POST", f"{_path(collection)}/persons", person))

    def add_persons(self, collection: str, persons: Sequence[NewPerson]) -> list[Person]:
        """Enrol all of them, or none."""
        body = {"persons": [_new_person(person) for person in persons]}
        return [_person(one) for one in self._ask("POST", f"{_path(collection)}/persons", body)["persons"]]

    def person(self, collection: str, person: int) -> Person:
        """One person."""
        return _person(self._ask("GET", _path(collection, person)))

    def persons(self, collection: str, *, filter: Filter | None = None) -> Iterator[Person]:
        """Everybody, or those whose metadata fit, by ascending id; asked for in pages while one iterates."""
        after: int | None = 0
        while after is not None:
            query: dict[str, Any] = {"after": after, "limit": _PAGE}
            if filter is not None:
                query["filter"] = json.dumps(filter)
            page = self._ask("GET", f"{_path(collection)}/persons", query=query)
            yield from map(_person, page["persons"])
            after = page["next"]

    def update_person(
        self,
        collection: str,
        person: int,
        *,
        name: str | None = None,
        metadata: Mapping[str, Scalar] | None = None,
    ) -> Person:
        """Change the name, or replace the metadata; None leaves it."""
        given = {"name": name, "metadata": None if metadata is None else dict(metadata)}
        body = {key: value for key, value in given.items() if value is not None}
        return _person(self._ask("PATCH", _path(collection, person), body))

    def delete_person(self, collection: str, person: int) -> None:
        """Forget someone with all faces."""
        self._ask("DELETE", _path(collection, person))

    def add_faces(self, collection: str, person: int, faces: Sequence[Input]) -> list[int]:
        """Add faces to someone; returns their ids."""
        body = {"faces": [_input(face) for face in faces]}
        return [face["id"] for face in self._ask("POST", f"{_path(collection, person)}/faces", body)["faces"]]

    def delete_face(self, collection: str, person: int, face: int) -> None:
        """Forget one face."""
        self._ask("DELETE", f"{_path(collection, person)}/faces/{int(face)}")

    def search(
        self,
        collection: str,
        query: Input,
        *,
        k: int = 10,
        threshold: float | None = None,
        filter: Filter | None = None,
        deadline_ms: int | None = None,
    ) -> list[Match]:
        """Who is most like ``query``, best first; with ``threshold`` only those with at least this score."""
        found = self.search_many(collection, [query], k=k, threshold=threshold, filter=filter, deadline_ms=deadline_ms)
        return found[0]

    def search_many(
        self,
        collection: str,
        queries: Sequence[Input],
        *,
        k: int = 10,
        threshold: float | None = None,
        filter: Filter | None = None,
        deadline_ms: int | None = None,
    ) -> list[list[Match]]:
        """The matches of each of ``queries``, in one request."""
        given: dict[str, Any] = {"k": k, "threshold": threshold, "filter": filter, "deadline_ms": deadline_ms}
        body = {key: value for key, value in given.items() if value is not None}
        body["queries"] = [_input(query) for query in queries]
        results = self._ask("POST", f"{_path(collection)}/search", body, repeatable=True)["results"]
        return [[_match(match) for match in result["matches"]] for result in results]

    def compare(self, a: Input, b: Input) -> Comparison:
        """How alike two inputs are."""
        body = {"a": _input(a), "b": _input(b)}
        return Comparison(**self._ask("POST", "/v1/compare", body, repeatable=True))

    def embeddings(self, inputs: Sequence[Input]) -> npt.NDArray[np.float32]:
        """(n, D) float32 of pictures, as the model gives them: not normalised."""
        body = {"inputs": [_input(one) for one in inputs]}
        return np.asarray(self._ask("POST", "/v1/embeddings", body, repeatable=True)["embeddings"], dtype=np.float32)

    def take_snapshot(self) -> Snapshot:
        """Copy the whole store on the server's disk."""
        return Snapshot(**self._ask("POST", "/v1/snapshots"))

    def snapshots(self) -> list[Snapshot]:
        """All snapshots, oldest first."""
        return [Snapshot(**one) for one in self._ask("GET", "/v1/snapshots")["snapshots"]]

    def delete_snapshot(self, snapshot: str) -> None:
        """Delete a snapshot."""
        self._ask("DELETE", f"/v1/snapshots/{_quoted(snapshot)}")

    def _ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        query: Mapping[str, Any] | None = None,
        repeatable: bool = False,
    ) -> Any:
        """The answer's JSON, None where it has none."""
        import httpx

        content = None if body is None else json.dumps(body).encode()
        headers = {} if body is None else {"Content-Type": "application/json"}
        for last in [False] * self._retries + [True]:
            try:
                answer = self._http.request(method, path, content=content, headers=headers, params=query)
            except httpx.HTTPError as error:
                # Without a connection nothing was asked; later, a write may have been done without its answer.
                if last or not (isinstance(error, httpx.ConnectError) or method == "GET" or repeatable):
                    message = f"{self._url} does not answer: {error or type(error).__name__}; is it running?"
                    raise ServerError(0, "unavailable", message) from None
                time.sleep(_pause("1"))
                continue
            if answer.status_code != 503 or last:
                return _content(answer)
            time.sleep(_pause(answer.headers.get("Retry-After", "1")))
        raise AssertionError("the last try returns or raises")


def _content(answer: Any) -> Any:
    if answer.is_success:
        return answer.json() if answer.content else None
    try:
        error = answer.json()["error"]
        code, message = str(error["code"]), str(error["message"])
    except (ValueError, KeyError, TypeError):
        code, message = "internal", f"the server answered {answer.status_code} without saying why"
    raise ServerError(answer.status_code, code, message)


def _pause(wished: str) -> float:
    """Seconds to wait: as the server wishes, spread so that many clients do not come back at once."""
    try:
        seconds = float(wished)
    except ValueError:
        seconds = 1.0
    return min(max(seconds, 0.0), LONGEST_WAIT) * random.uniform(0.5, 1.0)


def _path(collection: str, person: int | None = None) -> str:
    place = f"/v1/collections/{_quoted(collection)}"
    return place if person is None else f"{place}/persons/{int(person)}"


def _quoted(name: str) -> str:
    from urllib.parse import quote

    return quote(name, safe="")


def _input(given: Any) -> dict[str, Any]:
    """An input as JSON."""
    if isinstance(given, Picture):
        landmarks = {} if given.landmarks is None else {"landmarks": [[float(x), float(y)] for x, y in given.landmarks]}
        return {**_input(given.image), **landmarks}
    if isinstance(given, Path):
        try:
            given = given.read_bytes()
        except OSError as error:
            raise DataError(f"cannot read {given}: {error.strerror}") from None
    if isinstance(given, bytes):
        return {"image": base64.b64encode(given).decode()}
    return {"vector_b64": base64.b64encode(np.asarray(given, dtype="<f4").ravel().tobytes()).decode()}


def _new_person(person: NewPerson) -> dict[str, Any]:
    name = {} if person.name is None else {"name": person.name}
    return {**name, "metadata": dict(person.metadata), "faces": [_input(face) for face in person.faces]}


def _person(shown: Mapping[str, Any]) -> Person:
    faces = tuple(face["id"] for face in shown.get("faces", ()))
    return Person(shown["id"], shown["name"], shown["metadata"], faces, shown.get("created"))


def _match(shown: Mapping[str, Any]) -> Match:
    return Match(_person(shown["person"]), shown["face"], shown["score"], shown["same_person"])
