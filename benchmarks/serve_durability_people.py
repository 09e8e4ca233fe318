"""The people of benchmarks/serve_durability.py: what each is asked to become, and what each may be after a kill."""

import base64
import io
from collections.abc import Callable
from typing import Any, NamedTuple

import httpx
import numpy as np
from PIL import Image

COLLECTION, DIM, PICTURE_SIZE = "staff", 16, 32
_PICTURES = 8  # one person of so many is enrolled with a picture
_NAMED = 2  # one of so many has an external id

Ask = Callable[..., httpx.Response]


class State(NamedTuple):
    """A version of a person's texts and one of the face."""

    text: int
    face: int


class Person:
    """A person by number, with the states that the service may have (None: not there); one caller's at a time.

    Attributes:
        id: the service's, once it is known.
        texts, faces: how many versions of each there were.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.has_picture = number % _PICTURES == 0
        self.external_id = f"text-{number}-0-id" if number % _NAMED else None
        self.states: set[State | None] = {None}
        self.is_new = True  # never seen in the service
        self.id: int | None = None
        self.texts, self.faces = 1, 1

    @property
    def is_settled(self) -> bool:
        """True if it is there, in a state that is known."""
        return len(self.states) == 1 and None not in self.states

    @property
    def is_to_repeat(self) -> bool:
        """True if its enrolment was asked for, and not answered."""
        return self.is_new and not self.is_settled

    @property
    def allowed_texts(self) -> set[tuple[int, int]]:
        """The texts that files may hold."""
        own = {(self.number, state.text) for state in self.states if state is not None}
        return own | ({(self.number, 0)} if own and self.external_id is not None else set())

    def body(self, state: State) -> dict[str, Any]:
        """What a request says of the person."""
        face = {"vector": vector(self.number, state.face)}
        return {**self._texts(state.text), "faces": [picture(self.number, state.face) if self.has_picture else face]}

    def _texts(self, version: int) -> dict[str, Any]:
        text = f"text-{self.number}-{version}-"
        length = (self.number * 7919 + version * 104729) % 900  # rows of many lengths: SQLite moves them
        return {"name": f"{text}name", "metadata": {"number": self.number, "about": text + "x" * length, text: 1}}

    def enrol(self, ask: Ask) -> None:
        """Enrol the person, under an idempotency key."""
        state = State(0, 0)
        self.states.add(state)
        more = {} if self.external_id is None else {"external_id": self.external_id}
        path = f"/v1/collections/{COLLECTION}/persons"
        answer = ask("POST", path, {**self.body(state), **more}, key=f"enrolment-{self.number}")
        assert answer.status_code == 201, answer.text
        self.states, self.is_new, self.id = {state}, False, answer.json()["id"]

    def replace(self, ask: Ask) -> None:
        """Replace all of the person, by the external id."""
        self._become(State(self.texts, self.faces), lambda state: ask("PUT", self._by_external_id, self.body(state)))

    def rename(self, ask: Ask) -> None:
        """Give the person another name and other metadata."""
        (former,) = self.states
        assert former is not None
        path = f"/v1/collections/{COLLECTION}/persons/{self.id}"
        self._become(State(self.texts, former.face), lambda state: ask("PATCH", path, self._texts(state.text)))

    def delete(self, ask: Ask) -> None:
        """Delete the person."""
        self.states.add(None)
        path = f"/v1/collections/{COLLECTION}/persons/{self.id}" if self.external_id is None else self._by_external_id
        assert ask("DELETE", path).status_code == 204, self.number
        self.states = {None}

    @property
    def _by_external_id(self) -> str:
        return f"/v1/collections/{COLLECTION}/persons/by-external-id/{self.external_id}"

    def _become(self, state: State, ask: Callable[[State], httpx.Response]) -> None:
        self.texts, self.faces = max(self.texts, state.text + 1), max(self.faces, state.face + 1)
        self.states.add(state)
        answer = ask(state)
        assert answer.status_code == 200, answer.text
        self.states = {state}

    def settle(self, view: dict[str, Any] | None) -> None:
        """Take over what the service shows; AssertionError if it may not be so."""
        if view is None:
            assert None in self.states, f"person {self.number} was acknowledged and is not there: {self.states}"
            self.states = {None}
            return
        assert self.id in (None, view["id"]), f"person {self.number} was enrolled twice"
        text = int(view["name"].split("-")[2])
        assert {"name": view["name"], "metadata": view["metadata"]} == self._texts(text), view
        assert view.get("external_id") == self.external_id, view
        assert len(view["faces"]) == 1, view
        shown = {state for state in self.states if state is not None and state.text == text}
        assert shown, f"person {self.number} is there with text {text}, and may be {self.states}"
        (state,) = shown  # no two have the same texts
        self.states, self.is_new, self.id = {state}, False, view["id"]


def vector(number: int, face: int) -> list[float]:
    """The vector of a face."""
    made: list[float] = np.random.default_rng((number, face)).standard_normal(DIM).tolist()
    return made


def stored_vector(number: int, face: int) -> bytes:
    """A face's vector as the store writes it."""
    row = np.asarray(vector(number, face), dtype=np.float32).astype(np.float64)
    row /= np.abs(row).max()
    return (row / np.linalg.norm(row)).astype(np.float32).tobytes()


def picture(number: int, face: int) -> dict[str, str]:
    """A picture of noise as an input."""
    pixels = np.random.default_rng((number, face)).integers(0, 256, (PICTURE_SIZE, PICTURE_SIZE, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return {"image": base64.b64encode(file.getvalue()).decode()}
