"""Every store alike: external ids, preconditions, expiry dates, and answers under idempotency keys."""

import threading
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pytest
from support.stores import DIM, GALLERY, MODEL, Kit, enrol, everyone, faces

from plsc.errors import ConflictError, NotFoundError, PreconditionError, UsageError
from plsc.gallery.filters import Filter
from plsc.gallery.store import Store
from plsc.gallery.values import IdempotentRequest, NewPerson, Person, Precondition, StoredAnswer

ODD_IDS = ["7", "a/b", "../x", "%2F?#&", "O'Hara", "李小龙 🙂", "x" * 128, " ", "by-external-id", "1e5"]
WRONG_IDS: list[Any] = ["", "x" * 129, ".", "..", "a\n", "a\0", "\u202eabc", "\ud800", 7, True, b"a", ["a"]]

WRONG_TIMES: list[Any] = ["soon", "", "2030-13-01", "2030-01-01T12:00:00", "20300101", "2030-W01-1", 7, 2030.5]
WRONG_TIMES += ["2030-01-01T25:00:00Z", "2030-01-01T12:00:00+99:00", "0001-01-01T00:00:00+10:00", "\u0662030-01-01"]


def request(key: str = "k", token: str = "t", status: int = 201) -> IdempotentRequest:
    return IdempotentRequest(token, key, b"print", lambda result: (status, repr(result).encode()))


def after(seconds: float) -> str:
    return (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat()


def found(store: Store, vector: Any) -> list[int]:
    return [match.person for match in store.search(GALLERY, vector[None], k=50)[0] if match.score > 0.999]


# --- external ids ---


def test_external_ids_name_one_person_each(kit: Kit, store: Store) -> None:
    new = [NewPerson(faces(1, n), None, {}, external_id) for n, external_id in enumerate(ODD_IDS)]
    made = store.add_persons(GALLERY, new, MODEL)
    assert [person.external_id for person in made] == ODD_IDS
    store = kit.again(store)
    for person in made:
        assert store.find_person(GALLERY, str(person.external_id)) == person == store.person(GALLERY, person.id)
        assert store.person_summaries(GALLERY, [person.id])[person.id].external_id == person.external_id
    with pytest.raises(ConflictError):
        store.add_persons(GALLERY, [NewPerson(faces(1)), NewPerson(faces(1), external_id="7")], MODEL)
    with pytest.raises(UsageError):
        store.add_persons(GALLERY, [NewPerson([], external_id="8"), NewPerson([], external_id="8")], MODEL)
    assert everyone(store, GALLERY) == made, "all or none"
    store.create_collection("others", DIM, MODEL)
    assert store.add_persons("others", [NewPerson([], external_id="7")], MODEL)[0].external_id == "7"
    store.delete_person(GALLERY, made[0].id)
    with pytest.raises(NotFoundError):
        store.find_person(GALLERY, "7")
    (again,) = store.add_persons(GALLERY, [NewPerson([], external_id="7")], MODEL)
    assert again.id > made[-1].id


def test_wrong_external_ids_are_refused(store: Store) -> None:
    for wrong in WRONG_IDS:
        person = NewPerson(faces(1), external_id=wrong)
        for ask in (
            lambda person=person: store.add_persons(GALLERY, [person], MODEL),
            lambda person=person: store.put_person(GALLERY, person, MODEL),
            lambda wrong=wrong: store.find_person(GALLERY, wrong),
        ):
            with pytest.raises(UsageError):
                ask()
    with pytest.raises(UsageError):
        store.put_person(GALLERY, NewPerson(faces(1)), MODEL)
    assert everyone(store, GALLERY) == []


def test_putting_replaces_all_of_a_person(kit: Kit, store: Store) -> None:
    vectors = faces(6)
    ada, is_new = store.put_person(GALLERY, NewPerson(vectors[:3], "Ada", {"city": "Bern"}, "a", "2990-01-01"), MODEL)
    assert is_new
    assert (ada.revision, ada.expires) == (1, "2990-01-01T00:00:00.000Z")
    changed, is_new = store.put_person(GALLERY, NewPerson(vectors[3:5], None, {"n": 1}, "a"), MODEL)
    assert not is_new
    assert (changed.id, changed.created, changed.external_id) == (ada.id, ada.created, "a")
    assert all(found(store, vector) == [] for vector in vectors[:3])
    assert store.persons(GALLERY, filter=Filter.parse({"city": "Bern"})) == []
    assert store.persons(GALLERY, filter=Filter.parse({"n": 1})) == [changed]
    store = kit.again(store)
    assert everyone(store, GALLERY) == [changed]
    with pytest.raises(ConflictError):
        store.put_person(GALLERY, NewPerson([], external_id="a"), "another model")


@pytest.mark.slow
def test_threads_that_put_one_person_leave_one(store: Store) -> None:
    vectors = faces(40)

    def put(turn: int) -> None:
        store.put_person(GALLERY, NewPerson(vectors[turn : turn + 1], str(turn), {"n": turn}, "a"), MODEL)

    def put_ten(start: int) -> None:
        for turn in range(start, start + 10):
            put(turn)

    threads = [threading.Thread(target=put_ten, args=(start,)) for start in (0, 10, 20, 30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (person,) = everyone(store, GALLERY)
    assert person.revision == 40
    assert store.collection(GALLERY).faces == 1
    assert found(store, vectors[int(str(person.name))]) == [person.id]
    assert sum(len(found(store, vector)) for vector in vectors) == 1


# --- preconditions ---


def test_revisions_count_changes(store: Store) -> None:
    (one,) = enrol(store, 1)
    assert one.revision == 1
    assert store.update_person(GALLERY, one.id, name=one.name, metadata=one.metadata).revision == 1
    assert store.update_person(GALLERY, one.id, name="other").revision == 2
    (face,) = store.add_faces(GALLERY, one.id, faces(1, 5), MODEL)
    assert store.person(GALLERY, one.id).revision == 3
    store.delete_face(GALLERY, one.id, face)
    assert store.person(GALLERY, one.id).revision == 4
    assert store.add_faces(GALLERY, one.id, np.empty((0, DIM)), MODEL) == []
    unnamed = store.update_person(GALLERY, one.id, name=None)
    assert (unnamed.name, unnamed.revision, unnamed.metadata) == (None, 5, one.metadata)
    assert store.update_person(GALLERY, one.id, metadata={"n": False}).revision == 6
    assert store.update_person(GALLERY, one.id, metadata={"n": 0}).revision == 7, "False is not 0"
    assert store.person(GALLERY, one.id).revision == 7
    store.check()


def test_changes_of_another_revision_are_refused(store: Store) -> None:
    one, other = enrol(store, 2)
    stale = Precondition(revisions=frozenset({(one.id, 2), (other.id, 1)}))
    for ask in (
        lambda: store.update_person(GALLERY, one.id, name="x", precondition=stale),
        lambda: store.delete_person(GALLERY, one.id, precondition=stale),
        lambda: store.delete_face(GALLERY, one.id, one.faces[0], precondition=stale),
    ):
        with pytest.raises(PreconditionError):
            ask()
    assert everyone(store, GALLERY) == [one, other]
    fresh = Precondition(revisions=frozenset({(one.id, 1), (one.id, 9)}))
    store.update_person(GALLERY, one.id, name="x", precondition=fresh)
    with pytest.raises(PreconditionError):
        store.update_person(GALLERY, one.id, name="y", precondition=fresh)
    store.delete_face(GALLERY, one.id, one.faces[0], precondition=Precondition())
    store.delete_person(GALLERY, one.id, precondition=Precondition(revisions=frozenset({(one.id, 3)})))
    with pytest.raises(NotFoundError):
        store.update_person(GALLERY, one.id, name="z", precondition=fresh)


def test_putting_on_conditions(store: Store) -> None:
    person = NewPerson(faces(1), external_id="a")
    with pytest.raises(PreconditionError):
        store.put_person(GALLERY, person, MODEL, precondition=Precondition())
    made, _ = store.put_person(GALLERY, person, MODEL, precondition=Precondition(exists=False))
    with pytest.raises(PreconditionError):
        store.put_person(GALLERY, person, MODEL, precondition=Precondition(exists=False))
    fresh = Precondition(revisions=frozenset({(made.id, 1)}))
    assert store.put_person(GALLERY, person, MODEL, precondition=fresh)[0].revision == 2
    with pytest.raises(PreconditionError):
        store.put_person(GALLERY, person, MODEL, precondition=fresh)
    store.delete_person(GALLERY, made.id)
    store.put_person(GALLERY, person, MODEL)
    with pytest.raises(PreconditionError):  # a new person of the same external id and revision is another
        store.put_person(GALLERY, person, MODEL, precondition=fresh)


# --- expiry ---


def test_who_expired_is_found_no_more_and_then_deleted(kit: Kit, store: Store) -> None:
    vectors = faces(3)
    new = [
        NewPerson(vectors[:1], "soon", {"n": 0}, "soon", after(600.0)),
        NewPerson(vectors[1:2], "later", {"n": 1}, None, "2990-06-01T12:00:00+02:00"),
        NewPerson(vectors[2:], "never", {"n": 2}),
    ]
    brief, later, never = store.add_persons(GALLERY, new, MODEL)
    assert later.expires == "2990-06-01T10:00:00.000Z"
    assert found(store, vectors[0]) == [brief.id]
    assert store.expired(10) == {}
    assert store.delete_expired(GALLERY, [brief.id, later.id]) == []
    brief = store.update_person(GALLERY, brief.id, expires=after(60.0))
    kit.clock.advance(60.0)
    for turn in range(2):
        assert found(store, vectors[0]) == []
        assert found(store, vectors[1]) == [later.id]
        assert store.search(GALLERY, vectors[:1], filter=Filter.parse({"n": 0})) == [[]]
        assert everyone(store, GALLERY) == [later, never]
        assert store.persons(GALLERY, filter=Filter.parse({"n": {"lt": 2}})) == [later]
        assert store.person_summaries(GALLERY, [brief.id, never.id]).keys() == {never.id}
        for ask in (store.person, store.vectors, store.update_person, store.delete_person):
            with pytest.raises(NotFoundError):
                ask(GALLERY, brief.id)
        with pytest.raises(NotFoundError):
            store.find_person(GALLERY, "soon")
        with pytest.raises(NotFoundError):
            store.add_faces(GALLERY, brief.id, vectors, MODEL)
        if turn == 0:
            store = kit.again(store)
    due = store.expired(10)
    assert [person.id for person in due[GALLERY]] == [brief.id]
    assert store.delete_expired(GALLERY, [person.id for person in due[GALLERY]] + [later.id, 10**9]) == [brief.id]
    assert store.expired(10) == {}
    assert (store.collection(GALLERY).persons, store.collection(GALLERY).faces) == (2, 2)
    assert found(store, vectors[0]) == []
    store.compact()
    store.check()


def test_what_is_no_time_is_refused(store: Store) -> None:
    (one,) = enrol(store, 1)
    for wrong in WRONG_TIMES:
        for ask in (
            lambda wrong=wrong: store.add_persons(GALLERY, [NewPerson([], expires=wrong)], MODEL),
            lambda wrong=wrong: store.update_person(GALLERY, one.id, expires=wrong),
        ):
            with pytest.raises(UsageError):
                ask()
    assert everyone(store, GALLERY) == [one]


# --- answers under idempotency keys ---


def test_an_answer_is_stored_with_its_write(kit: Kit, store: Store) -> None:
    assert store.stored_answer("t", "k") is None
    made = store.add_persons(GALLERY, [NewPerson(faces(1), "Ada")], MODEL, idempotent=request())
    assert store.stored_answer("t", "k") == StoredAnswer(b"print", 201, repr(made).encode())
    assert store.stored_answer("other", "k") is None
    again = NewPerson(faces(1, 2), "Ada")
    with pytest.raises(ConflictError):
        store.add_persons(GALLERY, [again], MODEL, idempotent=request())
    assert everyone(store, GALLERY) == made
    assert found(store, faces(1, 2)[0]) == []
    added = store.add_faces(GALLERY, made[0].id, faces(1, 3), MODEL, idempotent=request("k", "other"))
    collection = store.create_collection("more", DIM, MODEL, idempotent=request("c"))
    store.store_answer(request("d", status=200), "done")
    store = kit.again(store)
    answers = {"c": (201, collection), "d": (200, "done")}
    for key, (status, result) in answers.items():
        assert store.stored_answer("t", key) == StoredAnswer(b"print", status, repr(result).encode())
    assert store.stored_answer("other", "k") == StoredAnswer(b"print", 201, repr(added).encode())


def test_a_write_that_fails_stores_no_answer(store: Store) -> None:
    (one,) = store.add_persons(GALLERY, [NewPerson([], external_id="a")], MODEL)

    def fails(result: Any) -> tuple[int, bytes]:
        raise ConflictError("no answer can be made of it")

    taken, fine = NewPerson([], external_id="a"), NewPerson(faces(1))
    silent = IdempotentRequest("t", "k", b"", fails)
    for ask, error in (
        (lambda: store.add_persons(GALLERY, [taken], MODEL, idempotent=request()), ConflictError),
        (lambda: store.add_faces(GALLERY, 10**9, faces(1), MODEL, idempotent=request()), NotFoundError),
        (lambda: store.create_collection(GALLERY, DIM, MODEL, idempotent=request()), ConflictError),
        (lambda: store.add_persons(GALLERY, [fine], MODEL, idempotent=silent), ConflictError),
    ):
        with pytest.raises(error):
            ask()
        assert store.stored_answer("t", "k") is None
        assert everyone(store, GALLERY) == [one]


def test_old_answers_are_forgotten(kit: Kit, store: Store) -> None:
    for number in range(5):
        store.store_answer(request(f"k{number}"), number)
        store.store_answer(request(f"k{number}", "other"), number)
        kit.clock.advance(0.002)
    assert store.forget_answers("2001-01-01T00:00:00.000Z", 5) == 0
    assert store.forget_answers("2001-01-01T00:00:00.000Z", 2) == 6
    assert [store.stored_answer("t", f"k{number}") is None for number in range(5)] == [True] * 3 + [False] * 2
    assert store.forget_answers("2990-01-01T00:00:00.000Z", 100) == 4
    assert store.stored_answer("other", "k4") is None


def test_many_old_answers_are_forgotten_in_pieces(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes wait while answers are forgotten, and a token may have sent very many."""
    for module in ("sqlite.records", "postgres_rows", "milvus.answers"):
        monkeypatch.setattr(f"plsc.gallery.{module}.FORGOTTEN_AT_ONCE", 4)
    for number in range(6):
        store.store_answer(request(f"k{number}"), number)
        store.store_answer(request(f"k{number}", "other"), number)
    assert [store.forget_answers("2001-01-01T00:00:00.000Z", 1) for _ in range(4)] == [4, 4, 2, 0]
    assert sum(store.stored_answer(token, f"k{n}") is not None for token in ("t", "other") for n in range(6)) == 2
    assert [store.forget_answers("2990-01-01T00:00:00.000Z", 9) for _ in range(2)] == [2, 0]


@pytest.mark.slow
def test_one_key_from_many_threads_writes_once(store: Store) -> None:
    made: list[list[Person]] = []
    refused: list[Exception] = []

    def enrol_once() -> None:
        try:
            made.append(store.add_persons(GALLERY, [NewPerson(faces(1))], MODEL, idempotent=request()))
        except ConflictError as error:
            refused.append(error)

    threads = [threading.Thread(target=enrol_once) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(made), len(refused)) == (1, 7)
    assert everyone(store, GALLERY) == made[0]
