"""Every store alike: random operations against dicts, threads at once, opening again, upkeep."""

import random
import re
import string
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.memory_store import MemoryStore
from support.stores import CLOSE, DIM, GALLERY, MODEL, ODD_NAMES, Kit, agree, dump, enrol, everyone, faces, twin, units

from plsc.errors import ConflictError, UsageError
from plsc.gallery.filters import Filter
from plsc.gallery.store import KEEP, NewPerson, Person, Store


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_random_operations_against_the_oracle(kit: Kit, seed: int) -> None:
    """Whatever is done in whatever order, the store holds and finds what the dicts do."""
    pick = random.Random(seed)
    store, oracle = kit.fresh(), MemoryStore()
    names = ["a", "b"]
    for _ in range(70):
        store = step(pick, kit, store, oracle, names)
    for name in [about.name for about in oracle.collections()]:
        assert [strip(one) for one in everyone(store, name)] == [strip(one) for one in everyone(oracle, name)]
        check_answers(pick, store, oracle, name)
    store = kit.again(store)
    assert [counts(one) for one in store.collections()] == [counts(one) for one in oracle.collections()]
    store.check()


def strip(one: Person) -> tuple[Any, ...]:
    return one.id, one.name, dict(one.metadata), one.faces


def counts(about: Any) -> tuple[Any, ...]:
    return about.name, about.dim, about.contract_id, about.persons, about.faces


def check_answers(pick: random.Random, store: Store, oracle: MemoryStore, name: str) -> None:
    seed, k = pick.randrange(10**6), pick.choice([1, 2, 5, 1000])
    where = pick.choice([None, Filter.parse({"n": {"lt": pick.randrange(10)}}), Filter.parse({"s": pick.choice("ab")})])
    agree(store, oracle, name, faces(3, seed), k=k, threshold=pick.choice([-1.0, 0.0, 0.3]), filter=where)


def step(pick: random.Random, kit: Kit, store: Store, oracle: MemoryStore, names: list[str]) -> Store:
    """One random operation on both; returns the store, which may have been opened again."""
    known = {about.name for about in oracle.collections()}
    name = pick.choice(names)
    if name not in known:
        for one in (store, oracle):
            one.create_collection(name, DIM, MODEL)
        return store
    ids = [one.id for one in everyone(oracle, name)]
    person = pick.choice(ids) if ids else 0
    some = [("n", pick.randrange(10)), ("s", pick.choice("ab"))]
    metadata = {key: value for key, value in some if pick.random() < 0.7}
    seed = pick.randrange(10**6)
    action = pick.choices(
        ["add", "faces", "update", "delete", "unface", "search", "compact", "again", "drop", "bad"],
        [8, 5, 4, 4, 4, 8, 1, 1, 0.3, 1],
    )[0]
    if action == "add":
        sizes = [pick.randrange(4) for _ in range(pick.randrange(1, 5))]
        new = [NewPerson(faces(size, seed + n), pick.choice(ODD_NAMES), metadata) for n, size in enumerate(sizes)]
        adopt(oracle, name, new, store.add_persons(name, new, MODEL))
    elif action == "faces" and ids:
        vectors = faces(pick.randrange(1, 4), seed)
        adopt_faces(oracle, name, person, vectors, store.add_faces(name, person, vectors, MODEL))
    elif action == "update" and ids:
        changed = {"name": pick.choice([KEEP, None, "new"]), "metadata": pick.choice([KEEP, metadata])}
        updated = store.update_person(name, person, **changed)
        assert strip(updated) == strip(oracle.update_person(name, person, **changed))
    elif action == "delete" and ids:
        store.delete_person(name, person)
        oracle.delete_person(name, person)
    elif action == "unface" and ids and oracle.person(name, person).faces:
        face = pick.choice(oracle.person(name, person).faces)
        store.delete_face(name, person, face)
        oracle.delete_face(name, person, face)
    elif action == "compact":
        store.compact(pick.choice([None, name]))
    elif action == "again":
        store = kit.again(store)
    elif action == "drop":
        store.delete_collection(name)
        oracle.delete_collection(name)
    elif action == "bad":
        with pytest.raises(UsageError):
            store.add_persons(name, [NewPerson(faces(2)), NewPerson([[0.0] * DIM])], MODEL)
    elif action == "search":
        check_answers(pick, store, oracle, name)
        assert counts(store.collection(name)) == counts(oracle.collection(name))
    return store


def adopt(oracle: MemoryStore, name: str, new: list[NewPerson], made: list[Person]) -> None:
    """Enrol in the oracle under the ids that the store has given."""
    rows = oracle._rows_of(name)
    ids = [number for one in made for number in (one.id, *one.faces)]
    assert not {one.id for one in made} & rows.persons.keys()
    assert not {face for one in made for face in one.faces} & rows.vectors.keys()
    for one, given in zip(made, new, strict=True):
        rows.persons[one.id] = Person(one.id, given.name, dict(given.metadata), one.faces, one.created)
        rows.vectors |= dict(zip(one.faces, units(given.vectors), strict=True))
    rows.next_id = max([rows.next_id, *ids]) + 1


def adopt_faces(oracle: MemoryStore, name: str, person: int, vectors: Any, made: list[int]) -> None:
    rows = oracle._rows_of(name)
    assert not set(made) & rows.vectors.keys()
    known = rows.persons[person]
    rows.persons[person] = Person(known.id, known.name, known.metadata, (*known.faces, *made), known.created)
    rows.vectors |= dict(zip(made, units(vectors), strict=True))


@pytest.mark.slow
def test_several_threads_at_once(store: Store) -> None:
    """A thread finds at once what was acknowledged to it, whatever the others do, and nothing that it deleted."""
    keep = enrol(store, 20)
    stop = threading.Event()

    def work(number: int) -> list[int]:
        pick, mine, given = np.random.default_rng(number), dict[int, Any](), list[int]()
        for turn in range(5):
            vectors = pick.standard_normal((2, DIM))
            new = [NewPerson(row[None], None, {"by": number}) for row in vectors]
            one, two = store.add_persons(GALLERY, new, MODEL)
            given += [one.id, two.id]
            for person, vector in ((one, vectors[:1]), (two, vectors[1:])):
                best = store.search(GALLERY, vector, k=1, filter=Filter.parse({"by": number}))[0][0]
                assert (best.person, best.face) == (person.id, person.faces[0])
                mine[person.id] = vector
            (face,) = store.add_faces(GALLERY, one.id, pick.standard_normal((1, DIM)), MODEL)
            assert store.person(GALLERY, one.id).faces == (*one.faces, face)
            store.update_person(GALLERY, two.id, metadata={"by": number, "turn": turn})
            store.delete_person(GALLERY, one.id)
            gone = store.search(GALLERY, mine.pop(one.id), k=10**6)[0]
            assert one.id not in {match.person for match in gone}
            assert mine.keys() <= {match.person for match in gone}
        return given

    def look() -> int:
        looked = 0
        while not stop.is_set():
            for matches, one in zip(store.search(GALLERY, faces(20), k=1), keep, strict=True):
                assert matches[0].score >= 1 - CLOSE
                assert matches[0].person == one.id
            looked += 1
        return looked

    with ThreadPoolExecutor(5) as pool:
        looker = pool.submit(look)
        given = [id for ids in pool.map(work, range(1, 5)) for id in ids]
        stop.set()
        assert looker.result() > 0
    assert len(set(given)) == len(given) == 40
    assert store.collection(GALLERY).persons == 20 + 20
    agree(store, twin(store), GALLERY, faces(5, 77))
    store.check()


@pytest.mark.slow
def test_a_store_opened_again_is_the_same(kit: Kit, store: Store) -> None:
    store.create_collection("other", 3, "m2")
    store.add_persons("other", [NewPerson(faces(2, dim=3), "Ada", {"x": 1})], "m2")
    made = enrol(store, 30)
    store.delete_person(GALLERY, made[4].id)
    store.compact(GALLERY)
    store.add_faces(GALLERY, made[5].id, faces(3, 9), MODEL)
    store.delete_face(GALLERY, made[6].id, made[6].faces[0])
    store.update_person(GALLERY, made[7].id, name="Grace", metadata={"new": "☃"})
    before, answers = dump(store), store.search(GALLERY, faces(4, 2), k=40)
    store = kit.again(store)
    assert dump(store) == before
    agree(store, twin(store), GALLERY, faces(4, 2), k=40)
    for matches, former in zip(store.search(GALLERY, faces(4, 2), k=40), answers, strict=True):
        assert [match.score for match in matches] == pytest.approx([match.score for match in former], abs=CLOSE)


def test_collections_do_not_touch_one_another(store: Store) -> None:
    store.create_collection("other", DIM, MODEL)
    (here,) = enrol(store, 1)
    others = store.add_persons("other", [NewPerson(faces(1), "x", {"n": 0}) for _ in range(3)], MODEL)
    assert [match.person for match in store.search(GALLERY, faces(1))[0]] == [here.id]
    assert sorted(match.person for match in store.search("other", faces(1))[0]) == [one.id for one in others]
    store.delete_collection("other")
    assert [match.person for match in store.search(GALLERY, faces(1))[0]] == [here.id]
    store.create_collection("other", DIM, MODEL)
    assert store.search("other", faces(1)) == [[]]
    assert store.persons("other") == []


def test_upkeep(store: Store, tmp_path: Path) -> None:
    store.create_collection("empty", 3, MODEL)
    made = enrol(store, 12)
    for one in made[:4]:
        store.delete_person(GALLERY, one.id)
    statistics = store.statistics()
    assert statistics.keys() == {GALLERY, "empty"}
    assert {"rows", "delta", "tombstones", "recall"} <= statistics[GALLERY].keys()
    assert all(isinstance(value, int | float) for figures in statistics.values() for value in figures.values())
    before = dump(store)
    store.compact()
    figures = store.statistics()[GALLERY]
    assert (figures["rows"], figures["delta"], figures["tombstones"]) == (8, 0, 0)
    assert isinstance(store.check(), dict)
    target = tmp_path / "snapshot"
    store.snapshot(target)
    assert any(target.iterdir())
    with pytest.raises(ConflictError):
        store.snapshot(target)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConflictError):
        store.snapshot(tmp_path / "empty")
    assert dump(store) == before


def test_the_suite_covers_the_protocol() -> None:
    """Every method of the protocol is called in these files (close is, by the kits)."""
    parts = sorted(Path(__file__).parent.glob("test_store_*.py"))
    source = "".join(part.read_text(encoding="utf-8") for part in parts)
    methods = {name for name in vars(Store) if name[0] in string.ascii_lowercase}
    assert len(methods) == 26
    for name in methods - {"close"}:
        assert re.search(rf"store\.{name}\b", source), name
