"""Persons in requests and answers: what callers send and see, and ETag, If-Match and If-None-Match.

A person's ETag (RFC 9110, section 8.8.3) names a revision; with If-Match (section 13) an editor overwrites nobody's
change unawares.
"""

import re
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import Path, Request
from pydantic import AfterValidator, BaseModel, Discriminator, Field, Tag, WithJsonSchema
from starlette.responses import Response

from plsc.gallery.validation import MAX_EXTERNAL_ID, check_expires, check_external_id
from plsc.gallery.values import Person, Precondition
from plsc.serve.errors import FORM, ApiError, KnownPerson
from plsc.serve.schemas import STORABLE, Body, Input, Metadata, Scalar, Warnings, with_warnings

_TAG = r'(?:W/)?"[\x21\x23-\x7e\x80-\xff]*"'
_TAGS = re.compile(rf"\s*({_TAG})\s*(?:,|$)")
_OURS = re.compile(r'"(\d{1,19})-(\d{1,19})"')
_MAX_HEADER = 4096  # characters


def _parameter(name: str, description: str, pattern: str) -> dict[str, Any]:
    schema = {"type": "string", "maxLength": _MAX_HEADER, "pattern": pattern}
    return {"name": name, "in": "header", "required": False, "description": description, "schema": schema}


_IF_MATCH = _parameter(
    "If-Match",
    "* or ETags of the person, one of which has to be the present one",
    rf"^(?:\*|{_TAG}(?:\s*,\s*{_TAG})*,?)$",
)
_IF_NONE_MATCH = _parameter("If-None-Match", "*: there must be no such person", r"^\*$")
# What a route that reads a precondition adds to its OpenAPI description; and one that also makes persons.
CONDITIONS_DESCRIBED = {"parameters": [_IF_MATCH]}
PUT_CONDITIONS_DESCRIBED = {"parameters": [_IF_MATCH, _IF_NONE_MATCH]}
# What the description says of external ids; check_external_id decides which characters are printable.
_EXTERNAL_ID = {"minLength": 1, "maxLength": MAX_EXTERNAL_ID, "pattern": r"^(?!\.{1,2}$)[^\x00-\x1f\x7f-\x9f]+$"}
_NULL = {"type": "null"}

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
    faces: list[Input] = Field(fail_fast=True, default_factory=list)
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

    faces: list[Input] = Field(fail_fast=True, min_length=1)


class FaceView(BaseModel):
    """A face of a person: one embedding."""

    id: int


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


def person_view(person: Person) -> PersonView:
    """A person as answers show it, without what is None."""
    return PersonView.model_construct(**_fields(person))


def enrolled_view(person: Person, warnings: list[str]) -> EnrolledPersonView:
    """The person of an enrolment, with warnings if there are any."""
    return with_warnings(EnrolledPersonView.model_construct(**_fields(person)), warnings)


def new_person_view(person: Person, known: KnownPerson | None) -> NewPersonView:
    """One of several enrolled persons, and who was known."""
    return NewPersonView.model_construct(**_fields(person), known=known)


def _fields(person: Person) -> dict[str, Any]:
    about = {"external_id": person.external_id, "expires": person.expires}
    return {
        "id": person.id,
        "name": person.name,
        "metadata": dict(person.metadata),
        "faces": [FaceView(id=face) for face in person.faces],
        "created": person.created,
        **{name: value for name, value in about.items() if value is not None},
    }


def kept_enrolment(warnings: list[str], known: Sequence[Any], added: Sequence[Person]) -> Any:
    """What is kept of an enrolment's answer: nothing of what the request says of persons, who may be deleted.

    Args:
        known: as :func:`plsc.serve.known.keep_known` keeps it.
    """
    return [[(person.id, person.faces, person.created) for person in added], warnings, known]


def read_enrolment(persons: Sequence[PersonBody], kept: Any) -> list[Person]:
    """The persons of an enrolment's answer, from the request and what :func:`kept_enrolment` kept."""
    return [
        Person(id, body.name, body.metadata, tuple(faces), created, body.external_id, expires=body.expires)
        for body, (id, faces, created) in zip(persons, kept[0], strict=True)
    ]


def set_etag(response: Response, person: Person) -> None:
    """Set the strong ETag of a person: the id belongs to it, for another one may get the same external id."""
    if person.revision:  # 0: the store counts none
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
