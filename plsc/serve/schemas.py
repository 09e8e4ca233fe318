"""Schemas that several resources share: inputs, metadata, filters; and examples that are valid as they stand."""

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from plsc.errors import UsageError
from plsc.gallery.filters import Filter, check_metadata

# A picture of 16 x 16 pixels in PNG.
IMAGE = (
    "iVBORw0KGgoAAAANSUhEUgAAABAAAAAQCAIAAACQkWg2AAAAMUlEQVR4nGM8sWoaAymAiSTVw1RDQkkHHi4DAwPjMAhWFkyhc5OWwdlGeVFossPB"
    "0wD35QvwvOPdyQAAAABJRU5ErkJggg=="
)
VECTOR: tuple[float, ...] = (0.12, -0.31, 0.94)  # the service's own model tells how many numbers it takes: GET /v1/info
FILTER = {"city": "Bern", "age": {"gte": 30}}

Score = Annotated[float, Field(ge=-1.0, le=1.0)]
Scalar = str | int | float | bool


def _check_metadata(value: Any) -> Any:
    """Fail at the first wrong entry: pydantic would report each of them, four times."""
    try:
        return check_metadata(value)
    except UsageError as error:
        raise ValueError(str(error)) from None


Metadata = Annotated[dict[str, Scalar], BeforeValidator(_check_metadata), Field(examples=[{"city": "Bern", "age": 31}])]
FilterBody = Annotated[dict[str, Any], Field(examples=[FILTER], description="Conditions that all must hold")]
Warnings = Annotated[
    list[str], Field(description="What is probably not what was meant, a line each; left out where there is nothing")
]
Answer = TypeVar("Answer", bound=BaseModel)
Point = Annotated[list[float], Field(min_length=2, max_length=2, fail_fast=True)]


class Body(BaseModel):
    """Base of request bodies, strict: an unknown key or a number in quotes is an error.

    Lists stop at their first error (``fail_fast``): reports about a megabyte of wrong items would fill gigabytes.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _limit_keys(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > len(cls.model_fields):
            unknown = next(key for key in value if key not in cls.model_fields)
            raise ValueError(f"the key {ascii(unknown)[:80]} is not known; leave it out")
        return value


class Input(Body):
    """An image or a vector: exactly one of ``image``, ``vector`` and ``vector_b64``."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"image": IMAGE}, {"vector": list(VECTOR)}]})

    image: str | None = Field(None, description="A JPEG, PNG or WEBP file in base64")
    landmarks: list[Point] | None = Field(
        None,
        fail_fast=True,
        min_length=5,
        max_length=5,
        description="Eyes, nose and mouth corners, [x, y] in pixels of the image, which is then aligned",
    )
    vector: list[float] | None = Field(None, fail_fast=True, description="An embedding of the service's model")
    vector_b64: str | None = Field(
        None, description="The same as little-endian float32 in base64: a quarter of the bytes"
    )

    @model_validator(mode="after")
    def _exactly_one(self) -> "Input":
        if (self.image is not None) + (self.vector is not None) + (self.vector_b64 is not None) != 1:
            raise ValueError("an input has exactly one of image, vector and vector_b64")
        if self.landmarks is not None and self.image is None:
            raise ValueError("landmarks belong to an image")
        return self


def with_warnings(answer: Answer, warnings: list[str]) -> Answer:
    """Set the warnings of an answer; without any they stay unset, and ``response_model_exclude_unset`` omits them."""
    return answer.model_copy(update={"warnings": warnings}) if warnings else answer


def parse_filter(value: Any) -> Filter | None:
    """A filter from its JSON form; None stays None."""
    return None if value is None else Filter.parse(value)


def examples(**values: Any) -> dict[str, Any]:
    """OpenAPI's named examples of a body; underscores in the names read as spaces."""
    return {name: {"summary": name.replace("_", " "), "value": value} for name, value in values.items()}
