"""A collection that moves to another model, and the oracle of it: a dict of each face's two vectors, in float64."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from plsc.errors import ConflictError
from plsc.gallery.filters import Filter
from plsc.gallery.store import Store
from plsc.gallery.values import NewPerson, Person
from support.stores import CLOSE, DIM, GALLERY, MODEL, Kit, everyone, faces, units

NEW, NEW_DIM = "model-2", 12
DIMS = {MODEL: DIM, NEW: NEW_DIM}


class Faces:
    """Enrols persons, and knows both vectors of every face: {face: (person, {model: vector})}."""

    def __init__(self, store: Store) -> None:
        self.store, self.known = store, dict[int, tuple[int, dict[str, npt.NDArray[np.float64]]]]()
        self._seed = 0

    def made(self, count: int) -> dict[str, npt.NDArray[np.float32]]:
        self._seed += 1
        return {model: faces(count, self._seed, dim) for model, dim in DIMS.items()}

    def enrol(self, count: int, *, both: bool) -> Person:
        first = self.store.collection(GALLERY).contract_id
        vectors = self.made(count)
        others = {model: rows for model, rows in vectors.items() if model != first} if both else {}
        new = NewPerson(vectors[first], f"p{self._seed}", {"n": self._seed}, others=others)
        (person,) = self.store.add_persons(GALLERY, [new], first)
        self.learn(person.id, person.faces, vectors)
        return person

    def add(self, person: Person, count: int) -> None:
        first, vectors = self.store.collection(GALLERY).contract_id, self.made(count)
        others = {model: rows for model, rows in vectors.items() if model != first}
        ids = self.store.add_faces(GALLERY, person.id, vectors[first], first, others=others)
        self.learn(person.id, ids, vectors)

    def learn(self, person: int, ids: Any, vectors: dict[str, npt.NDArray[np.float32]]) -> None:
        for row, face in enumerate(ids):
            self.known[face] = person, {model: units(rows[row]) for model, rows in vectors.items()}

    def forget(self, person: Person) -> None:
        self.store.delete_person(GALLERY, person.id)
        self.known = {face: about for face, about in self.known.items() if about[0] != person.id}

    def fill(self, limit: int = 3) -> None:
        """Give every face that lacks one its second vector, page by page."""
        model = self.second
        while page := self.store.lacking(GALLERY, limit=limit):
            sent = {one.id: {face: self.known[face][1][model] for face in lacks} for one, lacks in page}
            assert self.store.put_second_vectors(GALLERY, sent, model) == sum(map(len, sent.values())) > 0

    @property
    def second(self) -> str:
        migration = self.store.migration(GALLERY)
        assert migration is not None
        return migration.contract_id

    def agree(self, test: Any = None) -> None:
        """Assert that searches find what the collection's own model's vectors say, and that both spaces are whole."""
        model = self.store.collection(GALLERY).contract_id
        assert self.store.collection(GALLERY).dim == DIMS[model]
        queries = faces(3, 99, DIMS[model])
        where = None if test is None else self.store.prepare_filter(GALLERY, Filter.parse(test))
        found = self.store.search(GALLERY, queries, k=50, filter=where, contract_id=model)
        for matches, query in zip(found, units(queries), strict=True):
            truth: dict[int, float] = {}
            for person, vectors in self.known.values():
                truth[person] = max(truth.get(person, -2.0), float(vectors[model] @ query))
            assert [one.score for one in matches] == pytest.approx(sorted(truth.values(), reverse=True), abs=CLOSE)
            for one in matches:
                assert self.known[one.face][0] == one.person
                assert one.score == pytest.approx(self.known[one.face][1][model] @ query, abs=CLOSE)
        for person in everyone(self.store, GALLERY):
            own = self.store.vectors(GALLERY, person.id)
            np.testing.assert_allclose(own, [self.known[face][1][model] for face in person.faces], atol=CLOSE)

    def agree_second(self) -> None:
        for person in everyone(self.store, GALLERY):
            for face, (_, second, _) in self.store.face_vectors(GALLERY, person.id).items():
                if second is not None:
                    np.testing.assert_allclose(second.vector, self.known[face][1][self.second], atol=CLOSE)


def begun(kit: Kit, count: int = 6) -> tuple[Store, Faces]:
    store = kit.fresh()
    store.create_collection(GALLERY, DIM, MODEL)
    with pytest.raises(ConflictError, match=r"^the vectors of people are of that model already; name another"):
        store.begin_migration(GALLERY, DIM, MODEL)
    known = Faces(store)
    for number in range(count):
        known.enrol(1 + number % 2, both=False)
    store.begin_migration(GALLERY, NEW_DIM, NEW, {"threshold": 0.5})
    return store, known
