"""A collection in which a compatible model's vectors come beside the former one's, in every backend."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.stores import DIM, GALLERY, MODEL, Kit, enrol, faces

from plsc.embedding.contracts import may_search
from plsc.embedding.set_writer import write_embedding_set
from plsc.errors import ConflictError, IntegrityError, NotFoundError, PreconditionError, UsageError
from plsc.gallery.store import Store
from plsc.gallery.transfer import import_set
from plsc.gallery.values import NewPerson, Precondition

NEW, BOTH = "model-2", f"{MODEL},model-2"


def nearest(store: Store, vector: np.ndarray, contract_id: str) -> tuple[int, float]:
    ((match,),) = store.search(GALLERY, vector[None], k=1, contract_id=contract_id)
    return match.person, match.score


def test_both_models_search_what_both_enrolled(kit: Kit, store: Store, tmp_path: Path) -> None:
    first = enrol(store, 3)
    vectors = faces(5, seed=9)
    for others in ([], ["model-7"]):
        with pytest.raises(ConflictError, match=f"holds embeddings of the contract {MODEL}, not of 'model-2'"):
            store.admit_model(GALLERY, NEW, others)
    with pytest.raises(ConflictError, match="not of 'model-2'"):
        store.add_persons(GALLERY, [NewPerson(vectors[:1])], NEW)
    assert store.collection(GALLERY).contract_id == MODEL

    for _ in range(2):
        store.admit_model(GALLERY, NEW, [MODEL])
    (second,) = store.add_persons(GALLERY, [NewPerson(vectors[:2])], NEW)
    store.add_faces(GALLERY, first[0].id, vectors[2:3], MODEL)
    store.compact(GALLERY)
    info = store.collection(GALLERY)
    assert (info.contract_id, info.persons, info.faces) == (BOTH, 4, 6)
    store = kit.again(store)
    assert store.collection(GALLERY).contract_id == BOTH
    for contract_id in (MODEL, NEW, BOTH):
        assert nearest(store, vectors[1], contract_id) == (second.id, pytest.approx(1, abs=1e-5))
        assert nearest(store, faces(3)[2], contract_id) == (first[2].id, pytest.approx(1, abs=1e-5))
    with pytest.raises(ConflictError, match=f"{BOTH}, not of 'model-3'"):
        store.search(GALLERY, vectors, contract_id="model-3")
    with pytest.raises(ConflictError, match=f"{BOTH}, not of 'model-3'"):
        store.admit_model(GALLERY, "model-3", [NEW])
    store.snapshot(tmp_path / "snapshot")
    assert kit.restored(store, tmp_path / "snapshot").collection(GALLERY).contract_id == BOTH


def test_a_model_is_named_with_its_first_vector_and_by_nothing_that_is_refused(kit: Kit, store: Store) -> None:
    (known,) = enrol(store, 1)
    beside: dict[str, Any] = {"contract_id": NEW, "compatible_with": [MODEL]}
    with pytest.raises(NotFoundError):
        store.add_faces(GALLERY, known.id + 999, faces(1), **beside)
    with pytest.raises(UsageError):
        store.add_persons(GALLERY, [NewPerson(faces(1)), NewPerson(faces(1, dim=DIM + 1))], **beside)
    with pytest.raises(ConflictError, match="not of 'model-2'"):
        store.add_persons(GALLERY, [NewPerson(faces(1))], NEW, compatible_with=["model-7"])
    store.add_persons(GALLERY, [NewPerson(faces(1), external_id="x")], MODEL)
    with pytest.raises(ConflictError, match="external id 'x' already"):
        store.add_persons(GALLERY, [NewPerson(faces(1), external_id="x")], **beside)
    with pytest.raises(PreconditionError):
        store.put_person(GALLERY, NewPerson(faces(1), external_id="y"), precondition=Precondition(), **beside)
    store.add_persons(GALLERY, [NewPerson(np.empty((0, DIM)))], **beside)
    assert store.collection(GALLERY).contract_id == MODEL
    store.add_faces(GALLERY, known.id, faces(1), **beside)
    assert kit.again(store).collection(GALLERY).contract_id == BOTH


def test_a_collection_that_moves_takes_no_other_model(kit: Kit, store: Store) -> None:
    store.admit_model(GALLERY, NEW, [MODEL])
    (person,) = store.add_persons(GALLERY, [NewPerson(faces(1))], NEW)
    store.begin_migration(GALLERY, DIM, NEW)
    store.admit_model(GALLERY, MODEL, [])
    with pytest.raises(ConflictError, match="is being moved to another model"):
        store.admit_model(GALLERY, "model-3", [MODEL, NEW])
    store.put_second_vectors(GALLERY, {person.id: {person.faces[0]: faces(1)[0]}}, NEW)
    both = faces(2, seed=3)
    (late,) = store.add_persons(GALLERY, [NewPerson(both[:1], others={NEW: both[1:]})], BOTH)
    assert store.exchange_spaces(GALLERY, NEW).contract_id == NEW
    assert nearest(store, both[1], NEW) == (late.id, pytest.approx(1, abs=1e-5))
    with pytest.raises(ConflictError, match="not of 'model-1'"):
        store.search(GALLERY, both, contract_id=MODEL)
    store.exchange_spaces(GALLERY, BOTH)
    assert nearest(store, both[0], BOTH) == (late.id, pytest.approx(1, abs=1e-5))
    with pytest.raises(ConflictError, match=f"its contract is {BOTH} now"):
        store.search(GALLERY, both, contract_id=NEW)  # by the space that was searched before


def test_a_set_of_a_compatible_model_is_imported_beside_the_others(tmp_path: Path, servers) -> None:
    kit = servers.kit("sqlite")
    store = kit.fresh()
    store.create_collection(GALLERY, DIM, MODEL)
    write_embedding_set(tmp_path / "strange", faces(2), contract_id=NEW)
    write_embedding_set(tmp_path / "new", faces(2), contract_id=NEW, compatible_with=[MODEL])
    with pytest.raises(ConflictError, match="not of 'model-2'"):
        import_set(store, GALLERY, tmp_path / "strange", quiet=True)
    write_embedding_set(tmp_path / "zeros", np.zeros((2, DIM)), contract_id=NEW, compatible_with=[MODEL])
    write_embedding_set(tmp_path / "wide", faces(2, dim=DIM + 1), contract_id=NEW, compatible_with=[MODEL])
    assert import_set(store, GALLERY, tmp_path / "zeros", quiet=True)["faces"] == 0
    with pytest.raises(UsageError):
        import_set(store, GALLERY, tmp_path / "wide", quiet=True)
    assert store.collection(GALLERY).contract_id == MODEL
    assert import_set(store, GALLERY, tmp_path / "new", quiet=True)["persons"] == 2
    assert store.collection(GALLERY).contract_id == BOTH
    with pytest.raises(IntegrityError, match="compatible_with that lists no models"):
        write_embedding_set(tmp_path / "odd", faces(2), contract_id=NEW, compatible_with=[3])
    kit.close()


def test_the_number_of_models_has_an_end(servers) -> None:
    kit = servers.kit("sqlite")
    store = kit.fresh()
    store.create_collection(GALLERY, DIM, "m" * 200)
    with pytest.raises(UsageError, match="256 characters"):
        store.admit_model(GALLERY, "n" * 60, ["m" * 200])
    kit.close()


@pytest.mark.parametrize(
    ("contract_id", "others", "space", "expected"),
    [
        ("a", [], "a", True),
        ("a", [], "b", False),
        ("a", ["b"], "b", True),
        ("b", [], "b,a", True),
        ("c", ["b"], "b,a", False),
        ("c", ["b", "a"], "b,a", True),
        ("a", ["b"], "b+flip", False),
        ("b,a", [], "a", False),
        ("a", [], "aa", False),
    ],
)
def test_who_may_search(contract_id: str, others: list[str], space: str, expected: bool) -> None:
    assert may_search(contract_id, others, space) == expected
