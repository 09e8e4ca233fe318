"""People of a collection that moves between two models, for benchmarks/serve_durability.py --migrate.

Most are enrolled with a picture, so that the service embeds them by both models; some with a vector of the searched
model, which have to be estimated; some with a picture and for a few seconds.
"""

import base64
import copy
import io
import random
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

import httpx
import numpy as np
from PIL import Image
from serve_durability_people import DIM, PICTURE_SIZE, Ask, Person, State

_SORTS = 16  # of so many people one is enrolled with a vector, and two for a few seconds
_LIVES = (2.0, 12.0)  # seconds
_LISTING = 10.0  # seconds that a list may be old
_SQUARES = 4  # of a picture's side: coarse ones, which models that were never trained tell apart


class Stand(NamedTuple):
    """How far a move is: the contract ids of the searched space and of the second one, None without a move."""

    searched: str
    second: str | None = None
    is_cut_over: bool = False
    is_paused: bool = False

    def exchanged(self) -> "Stand":
        """The two spaces exchanged."""
        assert self.second is not None
        return Stand(self.second, self.searched, not self.is_cut_over, self.is_paused)


@dataclass
class Moves:
    """What is known of the collection's moves.

    Attributes:
        states: the stands that the service may have.
        epoch: a number of the present move; None: it is unknown whether there is one.
        log: the steps that were asked for since the store's audit log began, and whether each was done (None: unknown).
        dims: numbers of an embedding by contract id.
    """

    states: set[Stand]
    dims: dict[str, int]
    epoch: int | None = None
    log: list[tuple[str, bool | None]] = field(default_factory=list)
    epochs: int = 0

    @property
    def stand(self) -> Stand:
        """The present one, which is known, or one of those that it may be."""
        return min(self.states, key=str)

    def begin_epoch(self) -> None:
        """Note that a move has begun."""
        self.epochs += 1
        self.epoch = self.epochs

    def note_own(self, person: "MovingPerson") -> None:
        """Note that a person has a vector of its own in the second space."""
        if self.stand.second is not None:
            person.exact.add(self.stand.second)
        if self.stand.searched in person.exact:  # else it may be an estimate, and is missing after an exchange
            person.second_of = self.epoch

    def other(self, model: str) -> str:
        """The model that is not ``model``."""
        return next(one for one in self.dims if one != model)


class MovingPerson(Person):
    """A person of a collection that moves.

    Attributes:
        expires: Unix time, for those who are enrolled for a few seconds.
        exact: contract ids of the models by which the face has a vector of its own, or none: no estimate.
        second_of: the move's epoch in which the face surely has its own vector of both models; None: of none.
    """

    def __init__(self, number: int, moves: Moves) -> None:
        super().__init__(number)
        self._moves = moves
        self.has_picture, self.is_vector = True, number % _SORTS == 0
        self.expires: float | None = None
        if number % _SORTS in (3, 11):
            self.expires = time.time() + random.Random(number).uniform(*_LIVES)
        self.exact = set[str]()
        self.second_of: int | None = None
        self.sent_for: dict[int, str] = {}  # face: the model of the vector that was sent

    @property
    def is_settled(self) -> bool:
        """True if it is there, in a state that is known, for long."""
        return super().is_settled and self.expires is None

    @property
    def is_to_repeat(self) -> bool:
        """True if its enrolment was asked for, and not answered."""
        return super().is_to_repeat and self.expires is None

    @property
    def is_expired(self) -> bool:
        """True if nobody may find it any more."""
        return self.expires is not None and self.expires < time.time()

    @property
    def allowed_texts(self) -> set[tuple[int, int]]:
        """The texts that files may hold, or may soon hold no more."""
        return set() if self.is_expired else super().allowed_texts

    def query(self, face: int) -> dict[str, Any]:
        """The input that the face was enrolled by."""
        if self.is_vector:
            return {"vector": self._vector(face), "contract_id": self.sent_for[face]}
        return {"image": picture(self.number, face)}

    def is_found_in(self, model: str, face: int) -> bool:
        """True if a search by :meth:`query` is possible in the space of ``model``."""
        return self.sent_for.get(face) == model if self.is_vector else True

    def body(self, state: State) -> dict[str, Any]:
        """What a request says of the person."""
        if self.is_vector:
            self.sent_for.setdefault(state.face, self._moves.stand.searched)
        body = {**self._texts(state.text), "faces": [self.query(state.face)]}
        if self.expires is not None:
            body["expires"] = datetime.fromtimestamp(self.expires, UTC).isoformat(timespec="milliseconds")
        return body

    def enrol(self, ask: Ask) -> None:
        """Enrol the person, under an idempotency key."""
        with suppress(_OfOtherModel):
            super().enrol(self._noting(ask, State(0, 0)))
        self.is_new = self.is_new and len(self.states) > 1

    def replace(self, ask: Ask) -> None:
        """Replace all of the person, by the external id."""
        (former,) = self.states
        exact, second_of = self.exact, self.second_of
        try:
            super().replace(self._noting(ask, State(self.texts, self.faces)))
        except _OfOtherModel:
            self.states, self.exact, self.second_of = {former}, exact, second_of

    def _noting(self, ask: Ask, state: State) -> Ask:
        """``ask`` for a new face, with what is known of its vectors before and after."""

        def asking(*args: Any, **options: Any) -> httpx.Response:
            self.exact, self.second_of = set(), None
            before = self._moves.epoch
            answer = ask(*args, **options)
            if answer.status_code == 409 and self.is_vector:
                self.states -= {state}
                raise _OfOtherModel
            if self.is_vector:
                self.exact = {self.sent_for[state.face]}
            elif before == self._moves.epoch and "Idempotent-Replayed" not in answer.headers:
                self.exact, self.second_of = {*self._moves.dims}, before
            return answer

        return asking

    def settle(self, view: dict[str, Any] | None) -> None:
        """Take over what the service shows; AssertionError if it may not be so."""
        if view is not None and self.expires is not None:
            assert self.expires > time.time() - _LISTING, f"person {self.number} expired, and is there"
        if view is None and self.is_expired:
            self.states = {None}
        super().settle(view)
        self.is_new = self.is_new and view is not None

    def kept(self) -> "MovingPerson":
        """A copy of what is known."""
        same = copy.copy(self)
        same.states, same.exact, same.sent_for = {*self.states}, {*self.exact}, {**self.sent_for}
        return same

    def restored(self, now: Person, encrypted: bool) -> None:
        """Take over that a snapshot was restored which was taken while the person was as here.

        Of an encrypted store nobody comes back whose faces were deleted since, or replaced (``now``).
        """
        (state,) = self.states
        if encrypted and state is not None:
            has_face = {one is not None and one.face == state.face for one in now.states}
            self.states = ({state} if True in has_face else set()) | ({None} if False in has_face else set())
        self.texts, self.faces = now.texts, now.faces

    def _vector(self, face: int) -> list[float]:
        dim = self._moves.dims[self.sent_for[face]]
        made: list[float] = np.random.default_rng((self.number, face, dim - DIM)).standard_normal(dim).tolist()
        return made


class _OfOtherModel(Exception):
    """The collection was moved meanwhile: vectors of its former model are refused."""


def picture(number: int, face: int) -> str:
    """A PNG file of coarse squares, in base64."""
    squares = np.random.default_rng((number, face)).integers(0, 256, (_SQUARES, _SQUARES, 3), dtype=np.uint8)
    side = PICTURE_SIZE // _SQUARES
    file = io.BytesIO()
    Image.fromarray(squares.repeat(side, axis=0).repeat(side, axis=1)).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()
