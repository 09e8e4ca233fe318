"""Every store alike: random operations against dicts and float64, threads at once, opening again, upkeep."""

import copy
import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.gallery_model import GONE, LATER, Model, Row
from support.stores import CLOSE, DIM, GALLERY, MODEL, ODD_NAMES, Kit, agree, dump, enrol, everyone, faces, twin, units

from plsc.errors import ConflictError, NotFoundError, UsageError
from plsc.gallery.filters import Filter
from plsc.gallery.store import Store
from plsc.gallery.values import NewPerson, Person

STEPS, MANY_STEPS, MANY_OF_MILVUS = 120, 1500, 500  # one takes milvus-lite twenty milliseconds
ACTIONS = {
    "add": 8, "put": 6, "faces": 5, "update": 5, "delete": 4, "unface": 5, "expire": 2, "search": 8, "list": 3,
    "compact": 1, "again": 1, "snapshot": 1, "restore": 1, "rotate": 0.5, "drop": 0.3, "bad": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=(pytest.mark.slow, pytest.mark.exhaustive)) for seed in (1, 2))]
)
def test_random_operations_against_the_oracle(kit: Kit, seed: int, tmp_path: Path) -> None:
    """Whatever is done in whatever order, the store holds and finds what dicts and float64 do."""
    walk = Walk(kit, seed, tmp_path)
    many = MANY_OF_MILVUS if kit.kind == "milvus" else MANY_STEPS
    for number in range(many if seed else STEPS):
        action = walk.pick.choices(list(ACTIONS), list(ACTIONS.values()))[0]
        print(f"seed {seed}, step {number}: {action}")  # shown where it fails
        walk.step(action)
    walk.compare()
    walk.store = kit.again(walk.store)
    walk.compare()
    walk.store.check()


class Walk:
    """Random operations, each on a store and on its model."""

    def __init__(self, kit: Kit, seed: int, folder: Path) -> None:
        self.kit, self.pick, self.folder = kit, random.Random(seed), folder
        self.store, self.model = kit.fresh(), Model()
        self.snapshot: tuple[Path, Model] | None = None
        self.name = ""

    def step(self, action: str) -> None:
        self.name = self.pick.choice("ab")
        if self.name not in self.model.collections:
            self.store.create_collection(self.name, DIM, MODEL)
            self.model.collections[self.name] = {}
        getattr(self, f"_{action}")()

    def compare(self) -> None:
        """Everybody is there, as they should be, in every collection, and is found."""
        assert [about.name for about in self.store.collections()] == sorted(self.model.collections)
        for name, rows in self.model.collections.items():
            self.name = name
            about = self.store.collection(name)
            assert (about.persons, about.faces) == (len(rows), len(self.model.face_ids(name)))
            living = self.model.living(name)
            found = everyone(self.store, name)
            assert [one.id for one in found] == list(living)
            for one in found:
                self._same(one, living[one.id])
                rows_found = self.store.vectors(name, one.id)
                np.testing.assert_allclose(rows_found, self._matrix(living[one.id]), atol=CLOSE)
            self._search()

    def _same(self, one: Person, row: Row) -> None:
        about = one.name, repr(sorted(one.metadata.items())), one.external_id, one.expires, list(one.faces)
        assert about == row.content()
        assert one.revision == row.revision

    def _matrix(self, row: Row) -> Any:
        return np.array(list(row.faces.values())).reshape(-1, DIM)

    def _row(self, ids: Sequence[str | None]) -> tuple[Row, Any]:
        """A new person under one of ``ids``, and the vectors to enrol."""
        vectors = faces(self.pick.randrange(4), self.pick.randrange(10**6))
        expires = self.pick.choice([None, None, LATER, GONE])
        row = Row(self.pick.choice(ODD_NAMES), self._metadata(), self.pick.choice(ids), expires, {})
        return row, vectors

    def _metadata(self) -> dict[str, Any]:
        values = {"n": [0, 1, 2.0, 2.5, 7, True], "s": ["a", "b", "é", ""], "t": [True, False, 1, "1"]}
        return {key: self.pick.choice(some) for key, some in values.items() if self.pick.random() < 0.6}

    def _filter(self) -> Any:
        order = self.pick.choice(["lt", "lte", "gt", "gte", "eq", "ne"])
        asked = [
            {order: self.pick.choice([0, 1, 2, 2.5])},
            {"in": [1, "1", True, 7]},
            {"exists": self.pick.random() < 0.5},
        ]
        return self.pick.choice([None, {}, {"n": self.pick.choice(asked)}, {"t": self.pick.choice([*asked[1:], True])},
                                 {"s": "a", "n": asked[0]}, {"s": {"gte": "b"}}])  # fmt: skip

    def _someone(self) -> int | None:
        living = list(self.model.living(self.name))
        return self.pick.choice(living) if living else None

    def _new(self, row: Row, vectors: Any) -> NewPerson:
        return NewPerson(vectors, row.name, row.metadata, row.external_id, row.expires)

    def _enrolled(self, row: Row, vectors: Any, one: Person) -> None:
        row.faces = dict(zip(one.faces, units(vectors), strict=True))
        self.model.enrol(self.name, one.id, row)
        self._same(one, row)

    def _add(self) -> None:
        ids = self.pick.sample([None, None, None, "x", "y", "z"], 4)
        rows = [self._row([external_id]) for external_id in ids[: self.pick.randrange(1, 5)]]
        new = [self._new(*one) for one in rows]
        if any(self.model.holder(self.name, row.external_id) for row, _ in rows):
            with pytest.raises(ConflictError):
                self.store.add_persons(self.name, new, MODEL)
            return
        for (row, vectors), one in zip(rows, self.store.add_persons(self.name, new, MODEL), strict=True):
            self._enrolled(row, vectors, one)

    def _put(self) -> None:
        row, vectors = self._row(["x", "y", "z"])
        holder = self.model.holder(self.name, row.external_id)
        one, is_new = self.store.put_person(self.name, self._new(row, vectors), MODEL)
        assert is_new == (holder is None)
        if is_new:
            self._enrolled(row, vectors, one)
            return
        assert one.id == holder
        assert not set(one.faces) & self.model.face_ids(self.name)
        row.revision = self.model.collections[self.name][one.id].revision + 1
        row.faces = dict(zip(one.faces, units(vectors), strict=True))
        self.model.collections[self.name][one.id] = row
        self.model.renew_key(row)
        self._same(one, row)

    def _faces(self) -> None:
        person = self._someone()
        if person is None:
            return
        vectors = faces(self.pick.randrange(3), self.pick.randrange(10**6))
        row = self.model.collections[self.name][person]
        made = self.store.add_faces(self.name, person, vectors, MODEL)
        assert not set(made) & self.model.face_ids(self.name)
        had_none = not row.faces
        row.faces |= dict(zip(made, units(vectors), strict=True))
        row.revision += bool(made)
        if had_none:
            self.model.renew_key(row)

    def _update(self) -> None:
        person = self._someone()
        if person is None:
            return
        row = self.model.collections[self.name][person]
        former = row.content()
        fields: dict[str, Any] = {}
        if self.pick.random() < 0.5:
            fields["name"] = row.name = self.pick.choice([None, "new"])
        if self.pick.random() < 0.5:
            fields["metadata"] = row.metadata = self._metadata()
        if self.pick.random() < 0.4:
            fields["expires"] = row.expires = self.pick.choice([None, LATER, GONE])
        one = self.store.update_person(self.name, person, **fields)
        row.revision += row.content() != former
        self._same(one, row)

    def _delete(self) -> None:
        person = self._someone()
        if person is not None:
            self.store.delete_person(self.name, person)
            del self.model.collections[self.name][person]
            for ask in (self.store.person, self.store.vectors, self.store.update_person, self.store.delete_person):
                with pytest.raises(NotFoundError):
                    ask(self.name, person)

    def _unface(self) -> None:
        living = self.model.living(self.name)
        some = [(id, face) for id, row in living.items() for face in row.faces]
        if some:
            person, face = self.pick.choice(some)
            self.store.delete_face(self.name, person, face)
            del living[person].faces[face]
            living[person].revision += 1
            if not living[person].faces:
                self.model.renew_key(living[person])

    def _expire(self) -> None:
        found = {name: sorted(one.id for one in some) for name, some in self.store.expired(10**6).items() if some}
        assert found == {
            name: due
            for name, rows in self.model.collections.items()
            if (due := sorted(id for id, row in rows.items() if row.expires == GONE))
        }
        for name, due in found.items():
            asked = [*due[: self.pick.randrange(len(due)) + 1], *self.model.living(name)]
            gone = self.store.delete_expired(name, asked)
            assert gone == [id for id in asked if id in due]
            for id in gone:
                del self.model.collections[name][id]

    def _search(self) -> None:
        k, threshold, test = self.pick.choice([1, 2, 5, 1000]), self.pick.choice([-1.0, 0.0, 0.3]), self._filter()
        queries = faces(2, self.pick.randrange(10**6))
        agree(self.store, self.model, self.name, queries, k, threshold, test)

    def _list(self) -> None:
        test = self._filter()
        living = self.model.living(self.name, test)
        after, limit = self.pick.choice([0, *living]), self.pick.choice([1, 3, 100])
        where = None if test is None else Filter.parse(test)
        found = self.store.persons(self.name, after=after, limit=limit, filter=where)
        assert [one.id for one in found] == [id for id in living if id > after][:limit]
        summaries = self.store.person_summaries(self.name, list(self.model.collections[self.name]))
        assert summaries.keys() == self.model.living(self.name).keys()
        for id, row in self.model.living(self.name).items():
            assert (summaries[id].name, dict(summaries[id].metadata)) == (row.name, row.metadata)
            assert row.external_id is None or self.store.find_person(self.name, row.external_id).id == id

    def _compact(self) -> None:
        self.store.compact(self.pick.choice([None, self.name]))

    def _again(self) -> None:
        self.store = self.kit.again(self.store)

    def _drop(self) -> None:
        self.store.delete_collection(self.name)
        del self.model.collections[self.name]

    def _bad(self) -> None:
        with pytest.raises(UsageError):
            self.store.add_persons(self.name, [NewPerson(faces(2)), NewPerson([[0.0] * DIM])], MODEL)

    def _snapshot(self) -> None:
        target = self.folder / f"snapshot-{self.pick.random()}"
        self.store.snapshot(target)
        self.snapshot = target, copy.deepcopy(self.model)

    def _rotate(self) -> None:
        self.store = self.kit.rotate(self.store)

    def _restore(self) -> None:
        """Go on with a store restored from the last snapshot."""
        if self.snapshot is None:
            return
        (folder, then), self.snapshot = self.snapshot, None
        self.model = self.model.surviving(then) if self.kit.kind == "encrypted" else then
        self.store = self.kit.restored(self.store, folder)
        if self.kit.kind in ("postgres", "milvus"):
            self._rename()
        self.compare()

    def _rename(self) -> None:
        """Take over the ids and revisions that a copy's enrolment gave; who had expired is not in it."""
        for name in self.model.collections:
            living = self.model.living(name)
            found = everyone(self.store, name)
            renamed = {}
            for one, row in zip(found, living.values(), strict=True):
                row.faces = dict(zip(one.faces, row.faces.values(), strict=True))
                renamed[one.id] = replace(row, revision=1)
            self.model.collections[name] = renamed


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
        while not (looked and stop.is_set()):
            for matches, one in zip(store.search(GALLERY, faces(20), k=1), keep, strict=True):
                assert matches[0].score >= 1 - CLOSE
                assert matches[0].person == one.id
            looked += 1
        return looked

    with ThreadPoolExecutor(5) as pool:
        looker = pool.submit(look)
        given = [id for ids in pool.map(work, range(1, 5)) for id in ids]
        stop.set()
        looker.result()
    assert len(set(given)) == len(given) == 40
    assert store.collection(GALLERY).persons == 20 + 20
    agree(store, twin(store), GALLERY, faces(5, 77))
    store.check()


def test_upkeep(store: Store, tmp_path: Path) -> None:
    store.create_collection("empty", 3, MODEL)
    made = enrol(store, 12)
    for one in made[:4]:
        store.delete_person(GALLERY, one.id)
    statistics = store.statistics()
    assert statistics.keys() == {GALLERY, "empty"}
    assert {"rows", "growing", "tombstones", "recall"} <= statistics[GALLERY].keys()
    assert all(isinstance(value, int | float) for figures in statistics.values() for value in figures.values())
    before = dump(store)
    store.compact()
    with store.stopping_when(lambda: False):
        figures = store.statistics()[GALLERY]
    assert store.last_change() in (None, 7)
    assert (figures["rows"], figures["growing"], figures["tombstones"]) == (8, 0, 0)
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
