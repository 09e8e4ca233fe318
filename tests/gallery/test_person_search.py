"""From faces to persons: how many faces a search looks at."""

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.stores import DIM, GALLERY, MODEL, faces

from plsc.gallery.sqlite.collection_state import RowMasks, SegmentView
from plsc.gallery.sqlite.store import SqliteStore
from plsc.gallery.values import NewPerson


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
