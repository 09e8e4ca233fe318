"""What a :class:`plsc.Client` takes and returns, and the JSON of ``plsc serve`` that it stands for."""

from __future__ import annotations  # signatures in help() then read as they are written here

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from plsc.errors import DataError, UsageError
from plsc.image_files import to_rgb
from plsc.persons import Collection as StoredCollection
from plsc.persons import Metadata, PersonSummary
from plsc.regular_files import read_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.Image import Image

Filter = Mapping[str, Any]


@dataclass(frozen=True)
class Picture:
    """An image with ``landmarks``: five points (x, y) in pixels, by which the server aligns the face.

    Points are in the picture as it is seen, turned by its EXIF. ``image`` is whatever picture a :class:`Client` takes.
    ``key`` is your own name of a face that is enrolled, unique among the person's: 1 to 64 printable ASCII characters.
    ``face`` says which of several is meant, where the server has a detector: its number in :meth:`Client.detect`'s
    list, from 1, or "largest".
    """

    image: str | Path | bytes | Image | NDArray[np.uint8]
    landmarks: Sequence[Sequence[float]] | None = None
    key: str | None = None
    face: int | Literal["largest"] | None = None


@dataclass(frozen=True)
class Vector:
    """A vector whose model ``contract_id`` names; the server refuses those of another model than the collection's."""

    numbers: NDArray[Any] | Sequence[float]
    contract_id: str


Input: TypeAlias = "str | Path | bytes | Image | NDArray[Any] | Sequence[float] | Picture | Vector"


@dataclass(frozen=True)
class Collection(StoredCollection):
    """A collection; ``threshold`` is that of its model, None where the server has none.

    Its ``name``, ``dim``, ``contract_id``, counts of ``persons`` and ``faces``, and when it was ``created`` (ISO 8601,
    UTC) come first.
    """

    threshold: float | None = None


@dataclass(frozen=True)
class NewPerson:
    """A person to enrol.

    Attributes:
        external_id: your own id of the person, unique within the collection.
        expires: a date or date-time (ISO 8601), from which on nothing finds the person, who is then deleted.
    """

    name: str | None = None
    metadata: Metadata = field(default_factory=dict)
    faces: Sequence[Input] = ()
    external_id: str | None = None
    expires: str | None = None


@dataclass(frozen=True)
class Known:
    """Somebody enrolled already whom an enrolment's faces match: ``score`` is the best cosine."""

    id: int
    name: str | None
    score: float


@dataclass(frozen=True, kw_only=True)
class Person(PersonSummary):
    """An enrolled person: ``id``, ``name``, ``metadata`` and ``external_id``, and what follows; ``faces`` are ids.

    Those of matches have neither ``faces`` nor ``created`` nor ``expires``.

    Attributes:
        etag: names this state of the person, for ``if_match``; None in matches and lists.
        known: of an enrolment, who was enrolled already at or above the service's threshold.
        keys: your own names of faces, by face, of those that have one.
    """

    faces: tuple[int, ...] = ()
    created: str | None = None
    expires: str | None = None
    etag: str | None = field(default=None, compare=False)
    known: Known | None = field(default=None, compare=False)
    keys: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Match:
    """``score`` is the cosine of the person's best ``face``; ``same_person`` is None where no threshold is set."""

    person: Person
    face: int
    score: float
    same_person: bool | None


@dataclass(frozen=True)
class DetectedFace:
    """A face that the server's detector found in a picture.

    Attributes:
        number: among the picture's faces, the largest being 1.
        box: left, top, right and bottom, in pixels of the picture as it is shown, turned by its EXIF.
        landmarks: five points (x, y), likewise; what :class:`Picture` takes.
        score: 0 to 1, the detector's confidence.
        quality: of the aligned crop, by what measured it (of :meth:`Client.detect`).
        matches: best first (of a search for all faces).
    """

    number: int
    box: Sequence[float]
    landmarks: Sequence[Sequence[float]]
    score: float
    quality: Mapping[str, float] = field(default_factory=dict)
    matches: Sequence[Match] = ()


class Matches(list[Match]):
    """The matches of a query, best first.

    Attributes:
        faces_found: in the query's picture; None where no detector looked.
        box: of the face that they are of, as a :class:`DetectedFace` has it; None where no detector looked.
        faces: each with matches of its own, the largest first, of a search for all.
    """

    faces_found: int | None = None
    box: Sequence[float] | None = None
    faces: Sequence[DetectedFace] = ()


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


def input_as_json(item: Input) -> dict[str, Any]:
    """An input as the service takes it.

    Raises:
        UsageError: it is neither a picture nor a vector.
        DataError: a picture cannot be read.
    """
    if isinstance(item, Picture):
        picture = _picture(item.image)
        if picture is None:
            raise UsageError(f"a Picture's image is a path, bytes or an image, not {_described(item.image)}")
        given = {"key": item.key, "face": item.face}
        told = {name: value for name, value in given.items() if value is not None}
        return {"image": base64.b64encode(picture).decode(), **_landmarks(item), **told}
    picture = _picture(item)
    if picture is not None:
        return {"image": base64.b64encode(picture).decode()}
    numbers, of_model = (item.numbers, {"contract_id": item.contract_id}) if isinstance(item, Vector) else (item, {})
    return {"vector_b64": base64.b64encode(_vector(numbers).tobytes()).decode(), **of_model}


def inputs_as_json(name: str, items: Sequence[Input]) -> list[dict[str, Any]]:
    """Several inputs, as :func:`input_as_json`; ``name`` is theirs in the error for what is no list."""
    if isinstance(items, str | Path | bytes | Picture | Vector) or not isinstance(items, Sequence | np.ndarray):
        raise UsageError(f"{name} are several: give a list, such as [{items!r:.80}]")
    return [input_as_json(item) for item in items]


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
        return read_bytes(Path(item))
    if hasattr(item, "getbands"):  # what Pillow's images have: Pillow is imported where it is used alone
        try:
            item = to_rgb(item)
        except Exception as error:  # Pillow reads a file's pixels late, and its decoders raise nearly every kind
            raise DataError(f"a Pillow image does not decode ({str(error)[:120]})") from None
    if isinstance(item, np.ndarray) and item.ndim == 3 and item.shape[2] == 3 and item.dtype == np.uint8 and item.size:
        from PIL import Image

        buffer = io.BytesIO()
        Image.fromarray(np.ascontiguousarray(item)).save(buffer, "PNG")
        return buffer.getvalue()
    return None


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


def person_as_json(person: NewPerson) -> dict[str, Any]:
    """A person to enrol, without what is None."""
    about = {"name": person.name, "external_id": person.external_id, "expires": person.expires}
    given = {name: value for name, value in about.items() if value is not None}
    return {**given, "metadata": dict(person.metadata), "faces": inputs_as_json("faces", person.faces)}


def read_person(view: Mapping[str, Any], etag: str | None = None) -> Person:
    """The person that JSON of the service describes."""
    return Person(
        view["id"],
        view["name"],
        view["metadata"],
        view.get("external_id"),
        faces=tuple(face["id"] for face in view.get("faces", ())),
        created=view.get("created"),
        expires=view.get("expires"),
        etag=etag,
        known=read_known(view),
        keys={face["id"]: face["key"] for face in view.get("faces", ()) if face.get("key") is not None},
    )


def read_known(view: Mapping[str, Any]) -> Known | None:
    """Who was known, of an enrolment's answer or of the error that refused it."""
    known = view.get("known")
    return None if known is None else Known(**known)


def read_matches(view: Mapping[str, Any]) -> Matches:
    """The matches of one query that JSON of the service describes."""
    found = Matches(map(_read_match, view["matches"]))
    found.faces_found, found.box = view.get("faces_found"), view.get("box")
    found.faces = read_faces(view)
    return found


def read_faces(view: Mapping[str, Any]) -> list[DetectedFace]:
    """The faces that JSON of the service lists, or that its error does."""
    return [
        DetectedFace(
            **{name: face[name] for name in ("number", "box", "landmarks", "score", "quality") if name in face},
            matches=[_read_match(match) for match in face.get("matches", ())],
        )
        for face in view.get("faces", ())
    ]


def _read_match(view: Mapping[str, Any]) -> Match:
    return Match(read_person(view["person"]), view["face"], view["score"], view["same_person"])
