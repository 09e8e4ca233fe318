"""Vectors of two models beside each other, in every backend that can: filled, exchanged under searches, and taken out.

The oracle is a dict of what each face's two vectors are, searched in float64.
"""

import errno
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from support.stores import CLOSE, DIM, GALLERY, MODEL, Kit, Servers, content_of, everyone, faces, units

from plsc.errors import ConflictError, NotFoundError, StorageError, UnsupportedError, UsageError
from plsc.gallery.filters import Filter
from plsc.gallery.migration.filling import fill_from_pictures, pairs
from plsc.gallery.sqlite import compaction, rewriting
from plsc.gallery.store import Store
from plsc.gallery.thumbnails import ThumbnailStore
from plsc.gallery.values import NewPerson, Person

NEW, NEW_DIM = "model-2", 12
DIMS = {MODEL: DIM, NEW: NEW_DIM}


@pytest.fixture(params=["sqlite", "encrypted", "postgres"])
def moving(request: pytest.FixtureRequest, servers: Servers) -> Iterator[Kit]:
    kit = servers.kit(request.param)
    yield kit
    kit.close()


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
            for face, (_, second) in self.store.face_vectors(GALLERY, person.id).items():
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


def test_a_collection_moves_and_goes_back_with_all_that_came_since(moving: Kit) -> None:
    store, known = begun(moving)
    with pytest.raises(ConflictError, match=r"^people is being moved to another model already"):
        store.begin_migration(GALLERY, 5, "model-3")
    first, *_ = everyone(store, GALLERY)
    late = known.enrol(2, both=True)
    known.add(late, 1)
    assert store.count_second(GALLERY) == (9, 0)
    assert [person.id for person, _ in store.lacking(GALLERY)] == [one.id for one in everyone(store, GALLERY)[:-1]]
    with pytest.raises(ConflictError, match=r"^9 faces of people have no vector of that model; send"):
        store.exchange_spaces(GALLERY, NEW)
    guess = dict.fromkeys(first.faces, np.ones(NEW_DIM, dtype=np.float32))
    assert store.put_second_vectors(GALLERY, {first.id: guess, 10**9: {1: guess[first.faces[0]]}}, NEW, estimated=True)
    assert store.count_second(GALLERY) == (8, 1)
    assert store.lacking(GALLERY, limit=1, estimated=True)[0] == (first, first.faces)
    assert [one.second and one.second.is_estimated for one in store.face_vectors(GALLERY, first.id).values()] == [True]
    own = {face: known.known[face][1][NEW] for face in first.faces}
    store.put_second_vectors(GALLERY, {first.id: own}, NEW)
    assert store.put_second_vectors(GALLERY, {first.id: guess}, NEW, estimated=True) == 0, "it has its own"
    known.fill()
    known.agree()
    known.agree_second()
    store.compact()

    store.exchange_spaces(GALLERY, NEW)
    migration = store.migration(GALLERY)
    assert migration is not None
    assert (migration.contract_id, migration.dim, migration.is_cut_over) == (MODEL, DIM, True)
    assert migration.details == {"threshold": 0.5}
    known.agree()
    with pytest.raises(ConflictError, match=r"holds embeddings of the contract model-2, not of .model-1.;"):
        store.search(GALLERY, faces(1), contract_id=MODEL)
    known.forget(late)
    after = [known.enrol(2, both=True) for _ in range(3)]
    known.add(after[0], 2)
    known.agree({"n": {"gte": 0}})
    known.agree_second()
    store = known.store = moving.again(store)
    assert store.check()["persons"] == len(everyone(store, GALLERY))
    known.agree()
    store.exchange_spaces(GALLERY, MODEL)
    known.agree()
    known.agree_second()
    assert store.exchange_spaces(GALLERY, MODEL).contract_id == MODEL, "nothing to do"
    store.exchange_spaces(GALLERY, NEW)
    with pytest.raises(ConflictError, match=r"^the second space of people is of another contract"):
        store.end_migration(GALLERY, NEW)
    store.end_migration(GALLERY, MODEL)
    assert store.migration(GALLERY) is None
    store.compact()
    known.agree()
    assert store.check()["faces"] == len(known.known)
    with pytest.raises(NotFoundError, match=r"^people is not being moved to another model; begin"):
        store.exchange_spaces(GALLERY, MODEL)
    store.begin_migration(GALLERY, DIM, MODEL)
    known.fill()
    store.exchange_spaces(GALLERY, MODEL)
    store = known.store = moving.again(store)
    known.agree()


def test_what_does_not_fit_changes_nothing(moving: Kit) -> None:
    store, known = begun(moving, 2)
    person = everyone(store, GALLERY)[0]
    wrong: list[tuple[type[Exception], str, Any]] = [
        (UsageError, "2 faces have 1 vectors by the other model; give one for each",
         lambda: store.add_faces(GALLERY, person.id, faces(2), MODEL, others={NEW: faces(1, 1, NEW_DIM)})),
        (UsageError, "13", lambda: store.add_faces(GALLERY, person.id, faces(1), MODEL, others={NEW: faces(1, 1, 13)})),
        (ConflictError, "not of .model-3.", lambda: store.add_faces(GALLERY, person.id, faces(1), "model-3")),
        (ConflictError, "has no second space of the contract .model-1.;",
         lambda: store.put_second_vectors(GALLERY, {person.id: {person.faces[0]: faces(1)[0]}}, MODEL)),
        (UsageError, "12", lambda: store.put_second_vectors(GALLERY, {person.id: {person.faces[0]: faces(1)[0]}}, NEW)),
        (ConflictError, "has no space of the contract .model-3.;", lambda: store.exchange_spaces(GALLERY, "model-3")),
        (NotFoundError, "there is no collection", lambda: store.begin_migration("nobody", 3, NEW)),
    ]  # fmt: skip
    for kind, text, call in wrong:
        with pytest.raises(kind, match=text):
            call()
    known.agree()
    assert store.count_second(GALLERY) == (3, 0)
    assert store.add_faces(GALLERY, person.id, faces(1, 5, 13), "model-3", others={MODEL: faces(1, 6)})


def test_pairs_are_those_of_people_with_several_faces_first(moving: Kit) -> None:
    store, known = begun(moving, 9)
    known.fill()
    everything = {
        (one.id, vectors.searched.tobytes(), vectors.second.vector.tobytes())
        for one in everyone(store, GALLERY)
        for vectors in store.face_vectors(GALLERY, one.id).values()
        if vectors.second is not None
    }
    for most in (None, 13, 10, 3):
        found = pairs(store, GALLERY, MODEL, most)
        several = [len(store.person(GALLERY, int(one)).faces) > 1 for one in found.persons]
        assert several == sorted(several, reverse=True)
        assert several.count(True) == min(8, most or 8)
        told = {
            (int(person), searched.tobytes(), second.tobytes())
            for person, searched, second in zip(found.persons, found.searched, found.second, strict=True)
        }
        assert len(told) == len(found.persons) == min(13, most or 13)
        assert told <= everything


def test_searches_see_one_space_or_the_other(moving: Kit) -> None:
    store, known = begun(moving, 20)
    known.fill(100)
    (person,) = store.persons(GALLERY, limit=1)
    queries = {model: faces(1, 7, dim) for model, dim in DIMS.items()}
    answers = dict[str, Any]()
    for model in (NEW, MODEL):
        store.exchange_spaces(GALLERY, model)
        answers[model] = store.search(GALLERY, queries[model], k=20)
    ends, failures, seen = threading.Event(), list[BaseException](), set[str]()

    def search() -> None:
        try:
            while not ends.is_set():
                for model, query in queries.items():
                    try:
                        found = store.search(GALLERY, query, k=20, contract_id=model)
                    except ConflictError:
                        continue
                    assert found == answers[model], "of one space"
                    seen.add(model)
                vectors = store.face_vectors(GALLERY, person.id)[person.faces[0]]
                assert vectors.second is not None
                assert len(vectors.searched) + len(vectors.second.vector) == sum(DIMS.values()), "as of one moment"
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=search) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        rounds = 0
        while not failures and (rounds < 20 or seen != {*DIMS}):
            store.exchange_spaces(GALLERY, (NEW, MODEL)[rounds % 2])
            rounds += 1
    finally:
        ends.set()
        for thread in threads:
            thread.join()
    assert not failures, failures


@pytest.mark.slow
def test_milvus_refuses(servers: Servers) -> None:
    store = servers.kit("milvus").fresh()
    store.create_collection(GALLERY, DIM, MODEL)
    with pytest.raises(UnsupportedError, match=r"^a store in Milvus has no migrations; leave them out, or use"):
        store.begin_migration(GALLERY, NEW_DIM, NEW)
    assert store.migration(GALLERY) is None
    store.close()


# --- what is left in the files of a folder ---


@pytest.fixture(params=["sqlite", "encrypted"])
def folder(request: pytest.FixtureRequest, servers: Servers) -> Iterator[tuple[Kit, Store, Faces]]:
    kit = servers.kit(request.param)
    store, known = begun(kit)
    known.fill()
    yield kit, store, known
    kit.close()


def files_with_vectors(store: Store, needles: list[bytes]) -> list[str]:
    assert store.folder is not None
    return [name for name, content in content_of(store.folder).items() if any(one in content for one in needles)]


@pytest.mark.parametrize("cause", ["a full disk", "an enrolment meanwhile"])
def test_an_exchange_that_fails_leaves_the_store_as_it_was(
    folder: tuple[Kit, Store, Faces], cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, store, known = folder
    store.compact()
    build = compaction.Compactor.build_segment

    def failing(compactor: compaction.Compactor, number: int, *, second: bool = False) -> Any:
        rebuilt = build(compactor, number, second=second)
        if second and cause == "a full disk":
            raise OSError(errno.ENOSPC, "No space left on device")
        if second:
            known.enrol(1, both=False)
        return rebuilt

    monkeypatch.setattr(compaction.Compactor, "build_segment", failing)
    with pytest.raises((StorageError, ConflictError), match=r"No space left|1 faces of people have no vector"):
        store.exchange_spaces(GALLERY, NEW)
    monkeypatch.setattr(compaction.Compactor, "build_segment", build)
    known.enrol(1, both=True)
    known.agree()
    store.compact()
    known.agree()
    known.fill()
    store.exchange_spaces(GALLERY, NEW)
    known.agree()
    assert store.check()["faces"] == len(known.known)


def test_the_steps_of_a_move_are_kept_while_the_file_is_written_anew(
    folder: tuple[Kit, Store, Faces], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, store, known = folder
    known.forget(everyone(store, GALLERY)[0])
    copy = rewriting._Changes.copy

    def move_first(changes: Any, path: Path) -> None:
        for number in range(2):  # each row is changed again
            store.set_migration_details(GALLERY, {"number": number})
        copy(changes, path)

    monkeypatch.setattr(rewriting._Changes, "copy", move_first)
    store.compact()
    monkeypatch.undo()
    migration = store.migration(GALLERY)
    assert migration is not None
    assert (migration.contract_id, migration.details) == (NEW, {"threshold": 0.5, "number": 1})
    known.agree()
    known.agree_second()
    store.check()


def test_both_vectors_of_the_deleted_leave_every_file(folder: tuple[Kit, Store, Faces]) -> None:
    kit, store, known = folder
    gone, kept = everyone(store, GALLERY)[:2]
    both = store.face_vectors(GALLERY, gone.id)[gone.faces[0]]
    assert both.second is not None
    needles = [row.astype("<f4").tobytes()[:16] for row in (both.searched, both.second.vector)]
    if kit.kind == "sqlite":
        store.compact()
        assert files_with_vectors(store, needles[:1]), "a needle that is found"
    else:
        assert not files_with_vectors(store, needles), "encrypted"
    known.forget(gone)
    store.delete_face(GALLERY, kept.id, kept.faces[0])
    del known.known[kept.faces[0]]
    store.compact()
    assert not files_with_vectors(store, needles)
    known.agree()
    store.exchange_spaces(GALLERY, NEW)
    known.agree()
    assert store.check()["forgotten"] == 0


def test_pictures_are_kept_and_filled_from_in_either_space(folder: tuple[Kit, Store, Faces]) -> None:
    _, store, known = folder
    assert store.folder is not None
    thumbnails = ThumbnailStore(store, store.folder / "thumbnails", keep=True, lossless=True)
    for searched in (MODEL, NEW):
        store.exchange_spaces(GALLERY, searched)
        crops = torch.from_numpy(np.random.default_rng(len(searched)).integers(0, 256, (2, 3, 8, 8), dtype=np.uint8))
        (made,) = thumbnails.add_persons(GALLERY, [NewPerson(faces(2, 50, DIMS[searched]))], searched, [list(crops)])
        assert len(thumbnails.contents(GALLERY, made)) == 2
        second = known.second
        seen: list[torch.Tensor] = []

        def embed(pictures: Sequence[torch.Tensor], into: list[torch.Tensor] = seen, dim: int = DIMS[second]) -> Any:
            into.extend(pictures)
            return faces(len(pictures), 51, dim)

        done = fill_from_pictures(store, GALLERY, embed, thumbnails.contents, quiet=True)
        assert vars(done) == {"filled": 2, "estimated": 0, "without_picture": 0}
        assert all(torch.equal(picture, crop) for picture, crop in zip(seen, crops, strict=True))
        learnt = {searched: faces(2, 50, DIMS[searched]), second: faces(2, 51, DIMS[second])}
        known.learn(made.id, made.faces, learnt)
        known.agree_second()


def test_a_finished_migration_leaves_no_former_vector(folder: tuple[Kit, Store, Faces], tmp_path: Path) -> None:
    kit, store, known = folder
    former = [
        row.astype("<f4").tobytes()[:16] for one in everyone(store, GALLERY) for row in store.vectors(GALLERY, one.id)
    ]
    store.exchange_spaces(GALLERY, NEW)
    store.snapshot(tmp_path / "moving")
    store.end_migration(GALLERY, MODEL)
    store = known.store = kit.again(store)
    store.compact()
    assert not files_with_vectors(store, former)
    assert store.folder is not None
    with closing(sqlite3.connect(store.folder / "gallery.sqlite")) as db:
        assert db.execute("SELECT count(*) FROM vectors WHERE checksum != x'0000000000'").fetchone() == (
            len(known.known),
        )
    known.agree()
    known.store = kit.restored(store, tmp_path / "moving")
    known.agree()
    known.agree_second()
    known.store.exchange_spaces(GALLERY, MODEL)
    known.agree()
