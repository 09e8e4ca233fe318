"""Vectors of two models beside each other, in every backend that can: filled, exchanged under searches, and taken out.

The oracle is a dict of what each face's two vectors are, searched in float64.
"""

import threading
from typing import Any

import numpy as np
import pytest
from support.moving_faces import DIMS, NEW, NEW_DIM, begun
from support.stores import CLOSE, DIM, GALLERY, MODEL, Kit, everyone, faces, units

from plsc.errors import ConflictError, NotFoundError, UsageError
from plsc.gallery.migration.filling import assign_pictures, pairs
from plsc.gallery.values import NewPerson


def test_a_collection_moves_and_goes_back_with_all_that_came_since(kit: Kit) -> None:
    store, known = begun(kit)
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
    store = known.store = kit.again(store)
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
    store = known.store = kit.again(store)
    known.agree()


def test_what_does_not_fit_changes_nothing(kit: Kit) -> None:
    store, known = begun(kit, 2)
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


def test_pairs_are_those_of_people_with_several_faces_first(kit: Kit) -> None:
    store, known = begun(kit, 9)
    known.fill()
    known.enrol(2, both=False)  # who is no pair
    everything = {
        (one.id, vectors.searched.tobytes(), vectors.second.vector.tobytes())
        for one in everyone(store, GALLERY)
        for vectors in store.face_vectors(GALLERY, one.id).values()
        if vectors.second is not None
    }
    for most in (None, 13, 10, 3):
        found = pairs(store, GALLERY, (MODEL, NEW), most)
        several = [len(store.person(GALLERY, int(one)).faces) > 1 for one in found.persons]
        assert several == sorted(several, reverse=True)
        assert several.count(True) == min(8, most or 8)
        told = {
            (int(person), searched.tobytes(), second.tobytes())
            for person, searched, second in zip(found.persons, found.searched, found.second, strict=True)
        }
        assert len(told) == len(found.persons) == min(13, most or 13)
        assert told <= everything


def test_of_a_person_a_hundred_faces_are_pairs_and_no_estimate_is(kit: Kit) -> None:
    store, known = begun(kit, 2)
    known.add(everyone(store, GALLERY)[0], 120)
    known.fill()
    persons = pairs(store, GALLERY, (MODEL, NEW), 500).persons
    assert np.unique(persons, return_counts=True)[1].tolist() == [100, 2]
    late = known.enrol(2, both=False)
    estimates = {late.id: dict(zip(late.faces, faces(2, 60, NEW_DIM), strict=True))}
    store.put_second_vectors(GALLERY, estimates, NEW, estimated=True)
    store.exchange_spaces(GALLERY, NEW)
    assert late.id not in pairs(store, GALLERY, (NEW, MODEL), 500).persons
    former, other = (known.known[late.faces[0]][1][model][None].astype(np.float32) for model in (MODEL, NEW))
    with pytest.raises(ConflictError, match=f"read an estimate of face {late.faces[0]}; roll back, send its picture"):
        assign_pictures(store, GALLERY, late, other, former, (NEW, MODEL))
    store.exchange_spaces(GALLERY, MODEL)
    assert assign_pictures(store, GALLERY, late, former, other, (MODEL, NEW)) == [late.faces[0]]
    assert store.count_second(GALLERY) == (0, 1)


def test_who_fills_a_space_that_was_exchanged_meanwhile_is_told(kit: Kit) -> None:
    store, known = begun(kit, 3)
    known.fill()
    person = everyone(store, GALLERY)[0]
    store.exchange_spaces(GALLERY, NEW)
    with pytest.raises(ConflictError, match="not of 'model-1'"):
        pairs(store, GALLERY, (MODEL, NEW))
    with pytest.raises(ConflictError, match="not of 'model-1'"):
        assign_pictures(store, GALLERY, person, faces(1), faces(1, 1, NEW_DIM), (MODEL, NEW))
    known.agree()


def test_a_picture_is_known_by_either_model_that_enrolled_into_the_searched_space(kit: Kit) -> None:
    store, former, new = kit.fresh(), faces(2), faces(2, 1)  # of the same two pictures
    store.create_collection(GALLERY, DIM, MODEL)
    (person,) = store.add_persons(GALLERY, [NewPerson(former[:1])], MODEL)
    late = store.add_faces(GALLERY, person.id, new[1:], NEW, compatible_with=[MODEL])
    store.begin_migration(GALLERY, DIM, NEW)
    contracts = f"{MODEL},{NEW}", NEW
    assert assign_pictures(store, GALLERY, person, faces(1, 2), faces(1, 3), contracts) == []
    assert assign_pictures(store, GALLERY, person, former, new, contracts) == [*person.faces, *late]
    known = [one.second for one in store.face_vectors(GALLERY, person.id).values()]
    np.testing.assert_allclose([one.vector for one in known if one], units(new), atol=CLOSE)


def test_searches_see_one_space_or_the_other(kit: Kit) -> None:
    store, known = begun(kit, 20)
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


# --- what is left in the files of a folder ---
