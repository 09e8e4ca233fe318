"""A collection in memory: how many faces a search looks at, and a cache that is never older than the last change."""

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.stores import DIM, GALLERY, MODEL, faces

from plsc.gallery.sqlite.collection_state import PersonCache, RowMasks, SegmentView
from plsc.gallery.sqlite.store import SqliteStore
from plsc.gallery.values import NewPerson, PersonSummary


def test_faces_are_asked_for_by_how_many_a_person_may_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many that k persons must be among them, and more, as often as it takes, only where somebody has very many."""
    asked: list[int] = []
    knn = SegmentView.knn

    def recorded(view: SegmentView, queries: Any, count: int, masks: RowMasks) -> Any:
        asked.append(count)
        return knn(view, queries, count, masks)

    monkeypatch.setattr(SegmentView, "knn", recorded)
    with contextlib.closing(SqliteStore(tmp_path / "store")) as store:
        store.create_collection(GALLERY, DIM, MODEL)
        vectors = faces(100)
        first, *others = store.add_persons(GALLERY, [NewPerson(vector[None]) for vector in vectors], MODEL)
        store.compact(GALLERY)
        query = vectors[:1]  # the first person's face
        expected = [match.person for match in store.search(GALLERY, query, k=10)[0]]
        for more, counts in ((0, [10]), (1, [19]), (38, [36, 144])):
            store.add_faces(GALLERY, first.id, np.repeat(query, more, axis=0), MODEL)
            asked.clear()
            assert [match.person for match in store.search(GALLERY, query, k=10)[0]] == expected
            assert asked == counts
        assert expected[0] == first.id
        assert {*expected[1:]} < {one.id for one in others}


def test_faces_of_both_segments_are_ranked_in_float64(tmp_path: Path) -> None:
    """The newer face is nearer, and the older one as near as float32 tells."""
    query, old, new = (
        0.6 * np.eye(1, DIM) + 0.8 * np.eye(1, DIM, 1) + x * np.eye(1, DIM, 2) for x in (1e-1, 1e-3, 1e-3)
    )
    new[0, 2] += 2e-10
    with contextlib.closing(SqliteStore(tmp_path / "store")) as store:
        store.create_collection(GALLERY, DIM, MODEL)
        far = [NewPerson(vector[None]) for vector in faces(30)]
        store.add_persons(GALLERY, [NewPerson(old), NewPerson(old), *far], MODEL)
        store.compact(GALLERY)
        nearest = [store.add_persons(GALLERY, [NewPerson(new)], MODEL)[0].id for _ in range(2)]
        found = store.search(GALLERY, query, k=4)[0]
        assert [match.person for match in found] == [*nearest, 1, 2]
        assert len({match.score for match in found}) == 1, "float32 makes a tie of them"


# --- the cache of persons ---


class Truth:
    """Persons who can be read; remembers who was."""

    def __init__(self, count: int) -> None:
        self.names = {
            person: PersonSummary(person, f"person {person}", {"team": "x" * 100}) for person in range(1, count + 1)
        }
        self.asked: list[list[int]] = []

    def read(self, persons: list[int]) -> dict[int, PersonSummary]:
        """Those of ``persons`` that exist."""
        self.asked.append(persons)
        return {person: self.names[person] for person in persons if person in self.names}


def test_only_unknown_persons_are_read_and_all_are_given_in_the_order_asked_for() -> None:
    truth, cache = Truth(9), PersonCache()
    assert list(cache.get([5, 2], truth.read)) == [5, 2]
    assert cache.get([2, 7, 99, 5], truth.read) == {person: truth.names[person] for person in (2, 7, 5)}
    assert list(cache.get([7, 5], truth.read)) == [7, 5]
    assert truth.asked == [[5, 2], [7, 99]]


def test_a_changed_person_is_read_again() -> None:
    truth, cache = Truth(3), PersonCache()
    cache.get([1, 2], truth.read)
    truth.names[1] = PersonSummary(1, "Grace", {})
    cache.forget([1])
    assert cache.get([1, 2], truth.read)[1].name == "Grace"
    assert truth.asked == [[1, 2], [1]]


def test_what_was_read_before_a_change_and_comes_after_it_is_not_kept() -> None:
    truth, cache = Truth(3), PersonCache()

    def read_slowly(persons: list[int]) -> dict[int, PersonSummary]:
        found = truth.read(persons)
        truth.names[1] = PersonSummary(1, "Grace", {})
        cache.forget([1])
        return found

    cache.get([1], read_slowly)
    assert cache.get([1], truth.read)[1].name == "Grace"


def test_those_found_longest_ago_are_let_go_first() -> None:
    truth, cache = Truth(100), PersonCache(max_bytes=10_000)
    for person in range(1, 101):
        cache.get([1, person], truth.read)
    truth.asked.clear()
    cache.get([1, 2, 99, 100], truth.read)
    assert truth.asked == [[2]]
