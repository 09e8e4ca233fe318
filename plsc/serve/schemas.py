"""Schemas that several resources share: inputs, metadata, filters, persons; and examples that are valid as they are."""

import binascii
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import pybase64
from fastapi import Body as BodyParameter
from fastapi import Path
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PlainValidator,
    Tag,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from plsc.errors import UsageError, quoted
from plsc.gallery.filters import (
    COMPARISONS,
    MAX_CONDITIONS,
    MAX_IN_VALUES,
    Filter,
)
from plsc.gallery.validation import (
    FACE_KEY,
    MAX_CHARACTERS,
    MAX_ENTRIES,
    MAX_EXTERNAL_ID,
    check_expires,
    check_external_id,
    check_face_key,
    check_metadata,
)
from plsc.gallery.values import Person
from plsc.serve.errors import FORM, ApiError, KnownPerson

# A picture of 16 x 16 pixels in PNG.
IMAGE = (
    "iVBORw0KGgoAAAANSUhEUgAAABAAAAAQCAIAAACQkWg2AAAAMUlEQVR4nGM8sWoaAymAiSTVw1RDQkkHHi4DAwPjMAhWFkyhc5OWwdlGeVFossPB"
    "0wD35QvwvOPdyQAAAABJRU5ErkJggg=="
)
VECTOR: tuple[float, ...] = (0.12, -0.31, 0.94)  # the service's own model tells how many numbers it takes: GET /v1/info
FILTER = {"city": "Bern", "age": {"gte": 30}}

Float32 = npt.NDArray[np.float32]
Score = Annotated[float, Field(ge=-1.0, le=1.0)]
Scalar = str | int | float | bool


def _check_metadata(value: Any) -> Any:
    """Fail at the first wrong entry: pydantic would report each of them, four times."""
    try:
        return check_metadata(value)
    except UsageError as error:
        raise ValueError(str(error)) from None


# What the description says of texts that stores take, of metadata and of filters; their parsers decide.
STORABLE = r"^[^\x00]*$"
_NULL = {"type": "null"}
_TEXT = {"type": "string", "maxLength": MAX_CHARACTERS, "pattern": STORABLE}
_NUMBER = {"type": "number"}
_SCALAR = {"anyOf": [_TEXT, _NUMBER, {"type": "boolean"}]}
_METADATA = {
    "type": "object",
    "maxProperties": MAX_ENTRIES,
    "propertyNames": {**_TEXT, "minLength": 1},
    "additionalProperties": _SCALAR,
    "examples": [{"city": "Bern", "age": 31}],
}
_TESTS = {
    **dict.fromkeys(("eq", "ne"), _SCALAR),
    **{operator: {"anyOf": [_TEXT, _NUMBER]} for operator in COMPARISONS},
    "in": {"type": "array", "items": _SCALAR, "maxItems": MAX_IN_VALUES},
    "exists": {"type": "boolean"},
}
_CONDITION = {"type": "object", "minProperties": 1, "properties": _TESTS, "additionalProperties": False}
FILTER_SCHEMA = {
    "type": "object",
    "description": "Conditions that all must hold",
    "maxProperties": MAX_CONDITIONS,
    "propertyNames": {**_TEXT, "minLength": 1},
    "additionalProperties": {"anyOf": [_SCALAR, _CONDITION]},
    "examples": [FILTER],
}
FILTER_PARAMETER = {
    "name": "filter",
    "in": "query",
    "required": False,
    "description": "A filter as JSON text",
    "content": {"application/json": {"schema": {"anyOf": [FILTER_SCHEMA, _NULL]}, "example": FILTER}},
}


def header_parameter(name: str, description: str, **schema: Any) -> dict[str, Any]:
    """OpenAPI's description of a header that a request may have, a string."""
    described = {"type": "string", **schema}
    return {"name": name, "in": "header", "required": False, "description": description, "schema": described}


_BASE64 = r"^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"
_IN_BASE64: dict[str, Any] = {"contentEncoding": "base64", "minLength": 4, "pattern": _BASE64}


def _check_picture(value: Any) -> Any:
    if not isinstance(value, str | bytes):
        raise PydanticCustomError("string_type", "Input should be a valid string")
    return value


# In base64, as JSON has it, or as it is, of an upload.
EncodedPicture = Annotated[
    str | bytes, PlainValidator(_check_picture), WithJsonSchema({"type": "string", **_IN_BASE64})
]
Metadata = Annotated[dict[str, Scalar], BeforeValidator(_check_metadata), WithJsonSchema(_METADATA)]
FilterBody = Annotated[dict[str, Any], WithJsonSchema(FILTER_SCHEMA)]
Warnings = Annotated[
    list[str], Field(description="What is probably not what was meant, a line each; left out where there is nothing")
]
Answer = TypeVar("Answer", bound=BaseModel)
Point = Annotated[list[float], Field(min_length=2, max_length=2, fail_fast=True)]


_LONGEST_KEY = 64  # characters, of those that pydantic may quote: it copies a key several times


class Body(BaseModel):
    """Base of request bodies, strict: an unknown key or a number in quotes is an error.

    Lists stop at their first error (``fail_fast``): reports about a megabyte of wrong items would fill gigabytes.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _limit_keys(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if len(value) > len(cls.model_fields) or any(len(key) > _LONGEST_KEY for key in value):
            unknown = next(key for key in value if key not in cls.model_fields)
            raise ValueError(f"the key {quoted(unknown)} is not known; leave it out")
        return value


def exactly_one(*names: str, alone: dict[str, tuple[str, ...]] | None = None) -> list[Any]:
    """JSON Schema's ``oneOf`` for an object with exactly one of some keys that is not null.

    Args:
        alone: further keys that have to be null beside a key.
    """
    return [
        {
            "required": [name],
            "properties": {
                name: {"not": _NULL},
                **{other: _NULL for other in (*names, *(alone or {}).get(name, ())) if other != name},
            },
        }
        for name in names
    ]


_INPUT: dict[str, Any] = {
    "examples": [{"image": IMAGE}, {"vector": list(VECTOR)}],
    "oneOf": exactly_one(
        "image",
        "vector",
        "vector_b64",
        alone={"image": ("contract_id",), **dict.fromkeys(("vector", "vector_b64"), ("landmarks", "face"))},
    ),
}


class Input(Body):
    """An image or a vector: exactly one of ``image``, ``vector`` and ``vector_b64``."""

    model_config = ConfigDict(json_schema_extra=_INPUT)

    image: EncodedPicture | None = Field(None, description="A JPEG, PNG, WEBP, AVIF or HEIC file in base64")
    landmarks: list[Point] | None = Field(
        None,
        fail_fast=True,
        min_length=5,
        max_length=5,
        description="Eyes, nose and mouth corners, [x, y] in pixels of the image, which is then aligned",
    )
    face: Annotated[int, Field(ge=1)] | Literal["largest"] | None = Field(
        None, description="Which of the faces that the detector finds: its number, the largest being 1, or `largest`"
    )
    vector: Annotated[list[float], Field(json_schema_extra={"minItems": 1})] | None = Field(
        None, fail_fast=True, description="An embedding of the service's model, or of the one with `contract_id`"
    )
    vector_b64: Annotated[str, Field(json_schema_extra=_IN_BASE64)] | None = Field(
        None, description="The same as little-endian float32 in base64: a quarter of the bytes"
    )

    contract_id: str | None = Field(
        None, description="The model of the vector: needed where a collection is searched by another than the service's"
    )

    @model_validator(mode="after")
    def _exactly_one(self) -> "Input":
        if (self.image is not None) + (self.vector is not None) + (self.vector_b64 is not None) != 1:
            raise ValueError("an input has exactly one of image, vector and vector_b64")
        if (self.landmarks is not None or self.face is not None) and self.image is None:
            raise ValueError("landmarks and face belong to an image")
        if self.landmarks is not None and self.face is not None:
            raise ValueError("landmarks say which face is meant; leave face out")
        if self.contract_id is not None and self.image is not None:
            raise ValueError("contract_id belongs to a vector")
        return self

    def picture(self, name: str) -> bytes:
        """The encoded image; :class:`ApiError` 422 if it is no base64. ``name`` is that of the input in errors."""
        if isinstance(self.image, bytes):
            return self.image
        wrong = f"{name}: the image is not base64; send the bytes of the file in base64"
        return _from_base64(self.image or "", wrong)

    def numbers(self, name: str, dim: int) -> Float32:
        """The vector as float32 (dim,); :class:`ApiError` 422 unless it is finite and has a direction."""
        if self.vector_b64 is None:
            with np.errstate(over="ignore"):  # becomes infinite, which is refused by name
                vector = np.array(self.vector, dtype=np.float32)
        else:
            wrong = f"{name}: vector_b64 is not float32, little-endian, in base64"
            data = _from_base64(self.vector_b64, wrong)
            if len(data) % 4:
                raise ApiError(422, wrong)
            vector = np.frombuffer(data, dtype="<f4")
        if len(vector) != dim:
            raise ApiError(422, f"{name}: the vector has {len(vector)} numbers; this service's model makes {dim}")
        check_direction(vector, name)
        return vector


class FaceInput(Input):
    """A face to enrol: an image or a vector, and a name for it."""

    model_config = ConfigDict(json_schema_extra=_INPUT)

    key: Annotated[str, AfterValidator(check_face_key), Field(json_schema_extra={"pattern": FACE_KEY})] | None = Field(
        None,
        description="The caller's own name of the face, unique among the person's, such as a digest of the picture",
        examples=["2c26b46b68ffc68ff99b453c1d304134"],
    )


def check_direction(vector: Float32, name: str) -> None:
    """:class:`ApiError` 422 if a vector is not finite, or zero."""
    with np.errstate(over="ignore", invalid="ignore"):  # looked into below
        square = np.dot(vector, vector)
    if 0 < square < np.inf:
        return
    if not np.isfinite(vector).all():
        raise ApiError(422, f"{name}: the vector holds NaN or infinity, or numbers beyond float32")
    if not vector.any():
        raise ApiError(422, f"{name}: the vector is zero, which has no direction")


def _from_base64(text: str, wrong: str) -> bytes:
    try:
        return pybase64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ApiError(422, wrong) from None


def with_warnings(answer: Answer, warnings: list[str]) -> Answer:
    """Set the warnings of an answer; without any they stay unset, and ``response_model_exclude_unset`` omits them."""
    return answer.model_copy(update={"warnings": warnings}) if warnings else answer


def parse_filter(value: Any) -> Filter | None:
    """A filter from its JSON form; None stays None."""
    return None if value is None else Filter.parse(value)


def examples(**values: Any) -> dict[str, Any]:
    """OpenAPI's named examples of a body; underscores in the names read as spaces."""
    return {name: {"summary": name.replace("_", " "), "value": value} for name, value in values.items()}


def body_like(**values: Any) -> Any:
    """FastAPI's declaration of a body, with named examples of it."""
    return BodyParameter(openapi_examples=examples(**values))


# What the description says of external ids; check_external_id decides which characters are printable.
_EXTERNAL_ID = {"minLength": 1, "maxLength": MAX_EXTERNAL_ID, "pattern": r"^(?!\.{1,2}$)[^\x00-\x1f\x7f-\x9f]+$"}

ExternalId = Annotated[
    str,
    AfterValidator(check_external_id),
    Field(
        description=f"The caller's own id, 1 to {MAX_EXTERNAL_ID} printable characters, unique within the collection",
        examples=["E-1234"],
        json_schema_extra=_EXTERNAL_ID,
    ),
]
ExternalIdPath = Annotated[
    str, AfterValidator(check_external_id), Path(examples=["E-1234"], json_schema_extra=_EXTERNAL_ID)
]
Expires = Annotated[
    str | None,
    AfterValidator(check_expires),
    Field(
        description="Date or date-time (RFC 3339) from which on the person is not found, and is deleted",
        examples=["2030-01-31"],
    ),
    WithJsonSchema({"anyOf": [{"type": "string", "format": "date"}, {"type": "string", "format": "date-time"}, _NULL]}),
]
Name = Annotated[str, Field(max_length=1024, json_schema_extra={"pattern": STORABLE})]


class PersonPut(Body):
    """A person to enrol, or all of one to replace."""

    name: Name | None = Field(None, examples=["Ada"])
    metadata: Metadata = Field(default_factory=dict)
    faces: list[FaceInput] = Field(fail_fast=True, default_factory=list)
    expires: Expires = None


class PersonBody(PersonPut):
    """A person to enrol."""

    external_id: ExternalId | None = None


class PersonsBody(Body):
    """Persons to enrol, all or none."""

    persons: list[PersonBody] = Field(fail_fast=True, min_length=1)


def _form(value: Any) -> str:
    """Which body is meant, so that an error tells of that one alone."""
    is_several = isinstance(value, PersonsBody) or (isinstance(value, dict) and "persons" in value)
    return FORM + ("several" if is_several else "one")


EnrolmentBody = Annotated[
    Annotated[PersonBody, Tag(f"{FORM}one")] | Annotated[PersonsBody, Tag(f"{FORM}several")], Discriminator(_form)
]


class PersonChange(Body):
    """Fields to change; those left out stay, and null removes a name or an expiry."""

    name: Name | None = Field(None, examples=["Ada L."])
    metadata: Metadata = Field(default_factory=dict)
    expires: Expires = None


class FacesBody(Body):
    """Faces to add to a person."""

    faces: list[FaceInput] = Field(fail_fast=True, min_length=1)


class FaceView(BaseModel):
    """A face of a person: one embedding."""

    id: int
    key: str | None = Field(default=None, description="Left out where there is none")


class FacesView(BaseModel):
    """Faces that were added."""

    faces: list[FaceView]
    warnings: Warnings = []


class PersonView(BaseModel):
    """A person as stored."""

    id: int
    name: str | None
    metadata: dict[str, Scalar]
    faces: list[FaceView]
    created: str
    external_id: str | None = Field(None, description="Left out where there is none")
    expires: str | None = Field(None, description="Left out where there is none")


class PersonsView(BaseModel):
    """Persons by ascending id; ``next`` is the ``after`` of the page that follows, null on the last."""

    persons: list[PersonView]
    next: int | None = None
    warnings: Warnings = []


class NewPersonView(PersonView):
    """A person as enrolled."""

    known: KnownPerson | None = Field(
        None, description="The enrolled person that the faces match, at or above the threshold; of POST alone"
    )


class EnrolledPersonView(NewPersonView):
    """A person enrolled alone."""

    warnings: Warnings = []


class EnrolledView(BaseModel):
    """Persons enrolled together."""

    persons: list[NewPersonView]
    warnings: Warnings = []


View = TypeVar("View", bound=PersonView)


def show(view: type[View], person: Person, **more: Any) -> View:
    """A person as answers show it, without what is None, and with ``more`` fields of the view."""
    about: dict[str, Any] = {"external_id": person.external_id, "expires": person.expires}
    shown = {name: value for name, value in about.items() if value is not None}
    faces = [
        FaceView(id=face, key=person.keys[face]) if face in person.keys else FaceView(id=face) for face in person.faces
    ]
    shown |= {"id": person.id, "name": person.name, "metadata": dict(person.metadata), "faces": faces}
    return view.model_construct(created=person.created, **shown, **more)
