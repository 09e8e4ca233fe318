"""Client of ``plsc serve``: every operation as a typed method; failures are exceptions.

with plsc.Client("http://127.0.0.1:8080", token=None) as client:
    client.create_collection("staff")
    ada = client.add_person("staff", "Ada", faces=["ada.jpg"])
    for match in client.search("staff", "unknown.jpg", k=5):
        print(match.person.name, match.score)
"""

from __future__ import annotations  # signatures in help() then read as they are written here

import base64
import io
import json
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import numpy as np

from plsc.errors import DataError, PlscError, UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.Image import Image

LONGEST_WAIT = 10.0  # seconds between two tries, whatever a busy server asks for
_PAGE = 1000

Scalar = str | int | float | bool
Filter = Mapping[str, Any]


class ServerError(PlscError):
    """An error response of the server, or none: ``status`` is HTTP's, 0 without an answer; ``code`` as in the docs."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(frozen=True)
class Picture:
    """An image with ``landmarks``: five points (x, y) in pixels, by which the server aligns the face.

    ``image`` is whatever picture a :class:`Client` takes.
    """

    image: str | Path | bytes | Image | NDArray[np.uint8]
    landmarks: Sequence[Sequence[float]] | None = None


Input: TypeAlias = "str | Path | bytes | Image | NDArray[Any] | Sequence[float] | Picture"


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
    """A person to enrol."""

    name: str | None = None
    metadata: Mapping[str, Scalar] = field(default_factory=dict)
    faces: Sequence[Input] = ()


@dataclass(frozen=True)
class Person:
    """An enrolled person; ``faces`` are ids. The person of a match comes without ``faces`` and ``created``."""

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
    """The cosine of two inputs; ``warnings`` are the server's about pictures that seem to be no aligned crops."""

    score: float
    threshold: float | None
    same_person: bool | None
    warnings: Sequence[str] = ()


@dataclass(frozen=True)
class Snapshot:
    """A copy of the store on the server's disk."""

    id: str
    created: str
    bytes: int


class Client:
    """Client of one server; thread-safe. Every method raises :class:`ServerError`.

    An ``Input``, which is searched for, enrolled or compared, is

    - a picture: the path of a JPEG, PNG or WEBP file (``str`` or ``Path``), the file's bytes, a Pillow image, a uint8
      RGB array (H, W, 3), or a :class:`Picture`, which adds landmarks; or
    - a vector: D numbers as an array (D,) or (1, D), or as a list.

    A file that cannot be read is a :class:`plsc.errors.DataError`, anything else a :class:`plsc.errors.UsageError`.

    Args:
        url: address of the server.
        token: secret of a token, where the server needs one.
        timeout: seconds for one try.
        retries: further tries where the server is busy or restarting (503, or no connection), after the time that it
            asks for. A write whose answer was lost is not repeated.
    """

    def __init__(self, url: str, token: str | None = None, *, timeout: float = 60.0, retries: int = 4) -> None:
        import httpx

        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        try:
            if not isinstance(url, str) or not url.startswith(("http://", "https://")):
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
        """Rewrite the searched files without deleted embeddings; returns the collection's statistics."""
        return dict(self._request("POST", f"{_path(collection)}/compact")["statistics"])

    def add_person(
        self,
        collection: str,
        name: str | None = None,
        *,
        metadata: Mapping[str, Scalar] | None = None,
        faces: Sequence[Input] = (),
    ) -> Person:
        """Enrol a person."""
        person = _new_person(NewPerson(name, metadata or {}, faces))
        return _person(self._request("POST", f"{_path(collection)}/persons", person))

    def add_persons(self, collection: str, persons: Sequence[NewPerson]) -> list[Person]:
        """Enrol all of them, or none."""
        body = {"persons": [_new_person(person) for person in persons]}
        return [_person(item) for item in self._request("POST", f"{_path(collection)}/persons", body)["persons"]]

    def person(self, collection: str, person: int) -> Person:
        """One person."""
        return _person(self._request("GET", _path(collection, person)))

    def persons(self, collection: str, *, filter: Filter | None = None) -> Iterator[Person]:
        """Iterate over all persons, or those that match ``filter``, by ascending id; reads page by page."""
        after: int | None = 0
        while after is not None:
            query: dict[str, Any] = {"after": after, "limit": _PAGE}
            if filter is not None:
                query["filter"] = json.dumps(filter)
            page = self._request("GET", f"{_path(collection)}/persons", query=query)
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
        fields = {"name": name, "metadata": None if metadata is None else dict(metadata)}
        body = {key: value for key, value in fields.items() if value is not None}
        return _person(self._request("PATCH", _path(collection, person), body))

    def delete_person(self, collection: str, person: int) -> None:
        """Delete a person with all faces."""
        self._request("DELETE", _path(collection, person))

    def add_faces(self, collection: str, person: int, faces: Sequence[Input]) -> list[int]:
        """Add faces to a person; returns their ids."""
        body = {"faces": _inputs("faces", faces)}
        return [face["id"] for face in self._request("POST", f"{_path(collection, person)}/faces", body)["faces"]]

    def delete_face(self, collection: str, person: int, face: int) -> None:
        """Delete one face."""
        self._request("DELETE", f"{_path(collection, person)}/faces/{int(face)}")

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
        """Persons most like ``query``, best first; with ``threshold`` only matches with at least this score."""
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
        options: dict[str, Any] = {"k": k, "threshold": threshold, "filter": filter, "deadline_ms": deadline_ms}
        body = {key: value for key, value in options.items() if value is not None}
        body["queries"] = _inputs("queries", queries)
        results = self._request("POST", f"{_path(collection)}/search", body, repeatable=True)["results"]
        return [[_match(match) for match in result["matches"]] for result in results]

    def compare(self, a: Input, b: Input) -> Comparison:
        """Cosine of two inputs, and whether it reaches the server's threshold."""
        body = {"a": _input(a), "b": _input(b)}
        return Comparison(**self._request("POST", "/v1/compare", body, repeatable=True))

    def embeddings(self, inputs: Sequence[Input]) -> NDArray[np.float32]:
        """(n, D) float32 of pictures, as the model gives them: not normalised."""
        body = {"inputs": _inputs("inputs", inputs)}
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

    def _request(
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
                # Without a connection the server got nothing; a write whose answer was lost may have been done.
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


def _pause(retry_after: str) -> float:
    """Seconds to wait: the server's, with jitter so that many clients do not come back at once."""
    try:
        seconds = float(retry_after)
    except ValueError:
        seconds = 1.0
    return min(max(seconds, 0.0), LONGEST_WAIT) * random.uniform(0.5, 1.0)


def _path(collection: str, person: int | None = None) -> str:
    path = f"/v1/collections/{_quoted(collection)}"
    return path if person is None else f"{path}/persons/{int(person)}"


def _quoted(name: str) -> str:
    from urllib.parse import quote

    return quote(name, safe="")


def _input(item: Input) -> dict[str, Any]:
    """An input as JSON."""
    if isinstance(item, Picture):
        picture = _picture(item.image)
        if picture is None:
            raise UsageError(f"a Picture's image is a path, bytes or an image, not {_described(item.image)}")
        return {"image": base64.b64encode(picture).decode(), **_landmarks(item)}
    picture = _picture(item)
    if picture is not None:
        return {"image": base64.b64encode(picture).decode()}
    return {"vector_b64": base64.b64encode(_vector(item).tobytes()).decode()}


def _inputs(name: str, items: Sequence[Input]) -> list[dict[str, Any]]:
    if isinstance(items, str | Path | bytes | Picture) or not isinstance(items, Sequence | np.ndarray):
        raise UsageError(f"{name} are several: give a list, such as [{items!r:.80}]")
    return [_input(item) for item in items]


def _landmarks(picture: Picture) -> dict[str, list[list[float]]]:
    if picture.landmarks is None:
        return {}
    try:
        return {"landmarks": [[float(x), float(y)] for x, y in picture.landmarks]}
    except (TypeError, ValueError):
        raise UsageError(f"landmarks are five points (x, y) in pixels, not {picture.landmarks!r:.80}") from None


def _picture(item: Any) -> bytes | None:
    """The encoded file of a picture; None of what is none."""
    if isinstance(item, bytes):
        return item
    if isinstance(item, str | Path):
        try:
            return Path(item).read_bytes()
        except OSError as error:
            raise DataError(f"cannot read {item}: {error.strerror}") from None
    if isinstance(item, np.ndarray) and item.ndim == 3 and item.shape[2] == 3 and item.dtype == np.uint8 and item.size:
        from PIL import Image

        item = Image.fromarray(np.ascontiguousarray(item))
    if not hasattr(item, "getbands"):  # what Pillow's images have: Pillow is imported where it is used alone
        return None
    buffer = io.BytesIO()
    try:
        item.convert("RGB").save(buffer, "PNG")
    except Exception as error:  # Pillow reads a file's pixels late, and its decoders raise nearly every kind
        raise DataError(f"a Pillow image does not decode ({str(error)[:120]})") from None
    return buffer.getvalue()


def _vector(item: Any) -> NDArray[np.float32]:
    """D numbers as little-endian float32."""
    try:
        vector = np.asarray(item)
        shaped = vector.ndim == 1 or (vector.ndim == 2 and len(vector) == 1)
        if not shaped or not vector.size or vector.dtype.kind not in "fiu":
            raise ValueError
    except (TypeError, ValueError):
        raise UsageError(
            f"an input is a picture (a path, bytes, a Pillow image, a uint8 array (H, W, 3)) or a vector of D numbers, "
            f"not {_described(item)}"
        ) from None
    with np.errstate(over="ignore"):  # the server refuses infinity by name
        return vector.astype("<f4").ravel()


def _described(item: Any) -> str:
    shape = getattr(item, "shape", None)
    return f"{type(item).__name__}" + ("" if shape is None else f" of {item.dtype} {tuple(shape)}")


def _new_person(person: NewPerson) -> dict[str, Any]:
    name = {} if person.name is None else {"name": person.name}
    return {**name, "metadata": dict(person.metadata), "faces": _inputs("faces", person.faces)}


def _person(view: Mapping[str, Any]) -> Person:
    faces = tuple(face["id"] for face in view.get("faces", ()))
    return Person(view["id"], view["name"], view["metadata"], faces, view.get("created"))


def _match(view: Mapping[str, Any]) -> Match:
    return Match(_person(view["person"]), view["face"], view["score"], view["same_person"])
