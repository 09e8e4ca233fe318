"""Filling the second space of a collection that moves: by estimates that are renewed, in parts, and within its room."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.spaces import people, rotation, unit
from support.stores import GALLERY, MODEL, content_of

from plsc.errors import ConflictError
from plsc.gallery.migration import filling, moving
from plsc.gallery.sqlite.store import SqliteStore
from plsc.gallery.thumbnails import ThumbnailStore
from plsc.gallery.values import NewPerson, Person

DIM, NEW, NEW_DIM = 16, "model-2", 20
PERSONS, FACES = 60, 3


class Gallery:
    """A store of people, and the second vectors that their pictures would have."""

    def __init__(self, folder: Path) -> None:
        self.store = SqliteStore(folder / "store")
        self.store.create_collection(GALLERY, DIM, MODEL)
        rows, owners = people(PERSONS, FACES, DIM)
        noise = 0.1 * np.random.default_rng(1).standard_normal((len(rows), NEW_DIM))
        self.second = unit(rows @ rotation(DIM, NEW_DIM) + noise)
        new = [NewPerson(rows[owners == owner]) for owner in range(PERSONS)]
        self.people = self.store.add_persons(GALLERY, new, MODEL)
        self.store.begin_migration(GALLERY, NEW_DIM, NEW)

    def send(self, some: Sequence[Person]) -> None:
        """Give people's faces their own second vectors."""
        sent = {one.id: {face: self.second[face - 1] for face in one.faces} for one in some}
        self.store.put_second_vectors(GALLERY, sent, NEW)

    def cosine_of_estimates(self, some: Sequence[Person]) -> float:
        """The mean cosine of people's second vectors with those that their pictures would have."""
        found = [both for one in some for both in self.store.face_vectors(GALLERY, one.id).items()]
        vectors = [(face, both.second.vector) for face, both in found if both.second is not None]
        return float(np.mean([vector @ self.second[face - 1] for face, vector in vectors]))


@pytest.fixture
def gallery(tmp_path: Path) -> Iterator[Gallery]:
    made = Gallery(tmp_path)
    yield made
    made.store.close()


def test_estimates_are_renewed_and_none_out_of_date_are_judged(gallery: Gallery) -> None:
    store, last = gallery.store, gallery.people[-10:]
    gallery.send(gallery.people[:17])
    assert filling.fill_by_adapter(store, GALLERY, quiet=True).estimated == (PERSONS - 17) * FACES
    first = gallery.cosine_of_estimates(last)
    moving.judge_move(store, GALLERY, 0.5)
    gallery.send(gallery.people[17:-10])
    told = "learned from 51 faces, and 150 have vectors of both models now; estimate again"
    for step in (moving.judge_move, moving.cut_over):
        with pytest.raises(ConflictError, match=told):
            step(store, GALLERY, 0.5)
    assert filling.fill_by_adapter(store, GALLERY, quiet=True).estimated == 10 * FACES
    assert gallery.cosine_of_estimates(last) > first
    assert store.count_second(GALLERY) == (0, 10 * FACES)
    moving.judge_move(store, GALLERY, 0.5)


def test_a_threshold_is_judged_with_the_model_that_it_is_of(gallery: Gallery) -> None:
    """Two clients' steps may come in any order: the one's threshold is of what was searched before the other's."""
    gallery.send(gallery.people)
    for step in (moving.judge_move, moving.cut_over):
        with pytest.raises(ConflictError, match="people was rolled back meanwhile; judge the move again"):
            step(gallery.store, GALLERY, 0.5, contract_id=NEW)
    moving.cut_over(gallery.store, GALLERY, 0.5, 1, contract_id=MODEL)
    assert moving.status(gallery.store, GALLERY).thresholds[MODEL] == 0.5
    moving.roll_back(gallery.store, GALLERY)
    assert moving.cut_over(gallery.store, GALLERY, 0.4, 1, new_threshold=0.7).thresholds == {MODEL: 0.4, NEW: 0.7}


def test_who_had_no_threshold_may_give_the_new_one(gallery: Gallery) -> None:
    gallery.send(gallery.people)
    assert moving.judge_move(gallery.store, GALLERY, None).threshold > 0
    assert moving.status(gallery.store, GALLERY).thresholds == {}
    assert moving.cut_over(gallery.store, GALLERY, None, 1, new_threshold=0.7).thresholds == {NEW: 0.7}


def test_pictures_are_embedded_in_parts_and_what_is_stored_counts(gallery: Gallery, tmp_path: Path) -> None:
    store, sizes = gallery.store, list[int]()
    kept = ThumbnailStore(store, tmp_path / "thumbnails", keep=True)
    crops = [torch.zeros(3, 8, 8, dtype=torch.uint8)] * 150
    rows, _ = people(1, 150, DIM, seed=4)
    kept.add_persons(GALLERY, [NewPerson(rows)], MODEL, [crops])

    def embed(pictures: Sequence[torch.Tensor]) -> Any:
        sizes.append(len(pictures))
        return people(1, len(pictures), NEW_DIM)[0]

    done = filling.fill_from_pictures(store, GALLERY, embed, kept.contents, quiet=True, go_on=lambda: len(sizes) < 2)
    assert (done.filled, store.count_second(GALLERY)[0]) == (128, PERSONS * FACES + 150 - 128)
    done = filling.fill_from_pictures(store, GALLERY, embed, kept.contents, quiet=True)
    assert sizes == [64, 64, 22]
    assert (done.filled, done.without_picture) == (22, PERSONS * FACES)


@pytest.mark.parametrize("dim", [20, 512, 5000])
def test_a_move_takes_no_more_disk_than_it_says(tmp_path: Path, dim: int) -> None:
    store, rows = SqliteStore(tmp_path, precision="int8"), 2000
    store.create_collection(GALLERY, DIM, MODEL)
    made = store.add_persons(GALLERY, [NewPerson(people(rows, 1, DIM)[0])], MODEL)[0]
    store.compact()
    room = filling.room_of(store, GALLERY, dim)
    before = sum(map(len, content_of(tmp_path).values()))
    store.begin_migration(GALLERY, dim, NEW)
    vectors = dict(zip(made.faces, people(rows, 1, dim)[0], strict=True))
    store.put_second_vectors(GALLERY, {made.id: vectors}, NEW)
    store.exchange_spaces(GALLERY, NEW)
    store.compact()  # which truncates SQLite's log
    taken = sum(map(len, content_of(tmp_path).values())) - before
    former = rows * (5 * DIM + 12)  # the segment that the new one has replaced
    store.close()
    assert 0.6 * room.needed < taken + former < room.needed
