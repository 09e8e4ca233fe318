"""What goes over the wire: bodies of requests and answers, as OpenAPI describes them."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from plsc.errors import UsageError
from plsc.gallery.filters import check_metadata
from plsc.serve.examples import IMAGE, VECTOR

LARGEST_ID = 2**53 - 1  # beyond, JSON readers that hold numbers in float64 would name someone else
COLLECTION = r"^[A-Za-z][A-Za-z0-9_.\-]{0,63}$"

Score = Annotated[float, Field(ge=-1.0, le=1.0)]
Scalar = str | int | float | bool


def _few_scalars(value: Any) -> Any:
    """What a store takes as metadata; told here, where the first wrong entry ends it: pydantic would tell of each."""
    try:
        return check_metadata(value)
    except UsageError as error:
        raise ValueError(str(error)) from None


Metadata = Annotated[dict[str, Scalar], BeforeValidator(_few_scalars), Field(examples=[{"city": "Bern", "age": 31}])]
FilterBody = Annotated[
    dict[str, Any], Field(examples=[{"city": "Bern", "age": {"gte": 30}}], description="Conditions that all must hold")
]


class Body(BaseModel):
    """Taken strictly: an unknown key or a number in quotes is an error.

    Lists stop at their first error (fail_fast): complaints about a megabyte of wrong items would fill gigabytes.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _few_keys(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > len(cls.model_fields):
            unknown = next(key for key in value if key not in cls.model_fields)
            raise ValueError(f"the key {ascii(unknown)[:80]} is not known; leave it out")
        return value


Point = Annotated[list[float], Field(min_length=2, max_length=2, fail_fast=True)]


class Input(Body):
    """A picture or a vector: exactly one of ``image``, ``vector`` and ``vector_b64``."""

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


class NewCollection(Body):
    """A collection to make, for embeddings of the service's model."""

    name: str = Field(pattern=COLLECTION, examples=["staff"])


class PersonBody(Body):
    """A person to enrol."""

    name: str | None = Field(None, max_length=1024, examples=["Ada"])
    metadata: Metadata = Field(default_factory=dict)
    faces: list[Input] = Field(fail_fast=True, default_factory=list)


class PersonsBody(Body):
    """Persons to enrol, all or none."""

    persons: list[PersonBody] = Field(fail_fast=True, min_length=1)


class PersonChange(Body):
    """What is to change; what is left out stays."""

    name: str | None = Field(None, max_length=1024, examples=["Ada L."])
    metadata: Metadata | None = None


class FacesBody(Body):
    """Faces to add to a person."""

    faces: list[Input] = Field(fail_fast=True, min_length=1)


class SearchBody(Body):
    """One ``query`` or several ``queries``."""

    query: Input | None = None
    queries: list[Input] | None = Field(None, fail_fast=True, min_length=1)
    k: int = Field(10, ge=1, description="Matches of each query; GET /v1/info tells the most")
    threshold: Score | None = Field(None, description="Only matches with at least this score")
    filter: FilterBody | None = None
    deadline_ms: int | None = Field(None, ge=1, le=3_600_000, description="Give up (504) rather than answer later")

    @model_validator(mode="after")
    def _one_form(self) -> "SearchBody":
        if (self.query is None) == (self.queries is None):
            raise ValueError("a search has either query or queries")
        return self


class CompareBody(Body):
    """Two inputs to compare."""

    a: Input
    b: Input


class EmbeddingsBody(Body):
    """Inputs to embed."""

    inputs: list[Input] = Field(fail_fast=True, min_length=1)


class ErrorDetail(BaseModel):
    """``code`` is one of a fixed set; ``message`` is one line: the thing, and the mend."""

    code: Literal[
        "bad_request",
        "unauthorized",
        "forbidden",
        "not_found",
        "method_not_allowed",
        "conflict",
        "too_large",
        "unsupported_type",
        "unprocessable",
        "too_many",
        "internal",
        "unavailable",
        "deadline",
    ]
    message: str


class ErrorBody(BaseModel):
    """Why there is no answer."""

    error: ErrorDetail


class ModelInfo(BaseModel):
    """The model that embeds; embeddings of one ``contract_id`` may be compared."""

    source: str
    contract_id: str
    embedding_dim: int
    image_size: int


class LimitsInfo(BaseModel):
    """What one request may ask for."""

    body_bytes: int
    image_pixels: int
    inputs: int
    k: int
    matches: int
    collections: int


class Info(BaseModel):
    """The service: what it embeds with, what it judges by, and what the caller may do."""

    version: str
    model: ModelInfo
    threshold: float | None
    false_match_rate: float | None
    limits: LimitsInfo
    detector: bool
    role: Literal["read", "write", "admin"]


class CollectionView(BaseModel):
    """A collection."""

    name: str
    dim: int
    contract_id: str
    persons: int
    faces: int
    created: str


class CollectionsView(BaseModel):
    """All collections, by name."""

    collections: list[CollectionView]


class FaceView(BaseModel):
    """A face of a person: one embedding."""

    id: int


class FacesView(BaseModel):
    """Faces that were added."""

    faces: list[FaceView]


class PersonView(BaseModel):
    """A person as stored."""

    id: int
    name: str | None
    metadata: dict[str, Scalar]
    faces: list[FaceView]
    created: str


class PersonsView(BaseModel):
    """Persons by ascending id; ``next`` is the ``after`` of the page that follows, null on the last."""

    persons: list[PersonView]
    next: int | None = None


class EnrolledView(BaseModel):
    """Persons enrolled together."""

    persons: list[PersonView]


class MatchedPerson(BaseModel):
    """A person as shown with a match."""

    id: int
    name: str | None
    metadata: dict[str, Scalar]


class MatchView(BaseModel):
    """``score`` is the cosine with the person's best face, ``same_person`` whether it reaches the threshold."""

    person: MatchedPerson
    face: int
    score: float
    same_person: bool | None


class MatchesView(BaseModel):
    """The matches of one query, best first."""

    matches: list[MatchView]


class SearchView(BaseModel):
    """One entry in ``results`` for each query."""

    results: list[MatchesView]
    threshold: float | None
    approximate: bool
    recall: float | None


class CompareView(BaseModel):
    """The cosine of two inputs, and the judgement by the service's threshold."""

    score: float
    threshold: float | None
    same_person: bool | None


class EmbeddingsView(BaseModel):
    """Embeddings as the model gives them, not normalised."""

    contract_id: str
    dim: int
    embeddings: list[list[float]]


class SnapshotView(BaseModel):
    """A consistent copy of the store."""

    id: str
    created: str
    bytes: int


class SnapshotsView(BaseModel):
    """All snapshots, oldest first."""

    snapshots: list[SnapshotView]


class CompactedView(BaseModel):
    """The collection after what was added and deleted has been brought into the searched files."""

    collection: str
    statistics: dict[str, float]


class HealthView(BaseModel):
    """``status`` is "live", "ready", or what keeps the service from being ready."""

    status: str
