"""Moves to another model in a folder: beside cut-overs, compactions and kills, and what its files hold after them."""

import errno
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.moving_faces import DIMS, NEW, NEW_DIM, Faces, begun
from support.stores import GALLERY, MODEL, Kit, Servers, content_of, everyone, faces

from plsc.errors import ConflictError, StorageError
from plsc.gallery import second_space
from plsc.gallery.migration.filling import fill_from_pictures, pairs
from plsc.gallery.sqlite import compaction, rewriting
from plsc.gallery.store import Store
from plsc.gallery.thumbnails import ThumbnailStore
from plsc.gallery.transfer import export_set
from plsc.gallery.values import NewPerson


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


def during_the_exchange(monkeypatch: pytest.MonkeyPatch, work: Any) -> None:
    """Call ``work`` once, when the segment that an exchange will search has been written."""
    build = compaction.Compactor.build_segment

    def then_work(compactor: compaction.Compactor, number: int, *, second: bool = False) -> Any:
        rebuilt = build(compactor, number, second=second)
        if second:
            monkeypatch.setattr(compaction.Compactor, "build_segment", build)
            work()
        return rebuilt

    monkeypatch.setattr(compaction.Compactor, "build_segment", then_work)


def test_no_second_vector_is_taken_that_the_segment_of_a_cut_over_lacks(
    folder: tuple[Kit, Store, Faces], monkeypatch: pytest.MonkeyPatch
) -> None:
    kit, store, known = folder
    person = everyone(store, GALLERY)[0]
    another = {person.id: {person.faces[0]: faces(1, 70, NEW_DIM)[0]}}
    refused: list[str] = []

    def send() -> None:
        with pytest.raises(ConflictError, match="people is being cut over, or rolled back; send it again") as error:
            store.put_second_vectors(GALLERY, another, NEW)
        refused.append(str(error.value))

    during_the_exchange(monkeypatch, send)
    store.exchange_spaces(GALLERY, NEW)
    assert refused
    known.agree()
    store.exchange_spaces(GALLERY, MODEL)
    assert store.put_second_vectors(GALLERY, another, NEW) == 1
    known.learn(
        person.id, person.faces, {MODEL: known.known[person.faces[0]][1][MODEL][None], NEW: faces(1, 70, NEW_DIM)}
    )
    store.exchange_spaces(GALLERY, NEW)
    known.store = store = kit.again(store)
    known.agree()


def test_a_cut_over_beside_a_move_that_is_begun_anew_is_refused(
    folder: tuple[Kit, Store, Faces], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, store, known = folder

    def begin_anew() -> None:
        store.end_migration(GALLERY, NEW)
        store.begin_migration(GALLERY, NEW_DIM, NEW)
        store._state(GALLERY).is_exchanging = False  # type: ignore[attr-defined]
        known.fill()

    during_the_exchange(monkeypatch, begin_anew)
    with pytest.raises(ConflictError, match="people was moved anew meanwhile"):
        store.exchange_spaces(GALLERY, NEW)
    known.agree()
    store.exchange_spaces(GALLERY, NEW)
    known.agree()


def test_a_compaction_that_waited_for_a_cut_over_compacts(
    folder: tuple[Kit, Store, Faces], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, store, known = folder
    compacting = threading.Thread(target=store.compact)
    maintenance = store._maintenance  # type: ignore[attr-defined]
    compact, waits = maintenance.compact, threading.Event()
    monkeypatch.setattr(maintenance, "compact", lambda states: (waits.set(), compact(states)))

    def delete_and_compact() -> None:
        known.forget(everyone(store, GALLERY)[0])
        compacting.start()
        waits.wait()

    during_the_exchange(monkeypatch, delete_and_compact)
    store.exchange_spaces(GALLERY, NEW)
    compacting.join()
    assert store.check()["tombstones"] == 0
    known.agree()


def test_what_was_checked_for_another_move_is_checked_again(
    folder: tuple[Kit, Store, Faces], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, store, _ = folder
    (person, *_) = everyone(store, GALLERY)
    checked = second_space.unit_vectors

    def begin_another(*args: Any) -> Any:
        monkeypatch.undo()
        store.end_migration(GALLERY, NEW)
        store.begin_migration(GALLERY, NEW_DIM + 1, "model-3")
        return checked(*args)

    monkeypatch.setattr(second_space, "unit_vectors", begin_another)
    with pytest.raises(ConflictError, match="has no second space of the contract"):
        store.put_second_vectors(GALLERY, {person.id: {person.faces[0]: faces(1, 1, NEW_DIM)[0]}}, NEW)
    with pytest.raises(ConflictError, match="is being moved to another model since"):
        store.set_migration_details(GALLERY, {"judgement": {}}, (MODEL, NEW))
    with pytest.raises(ConflictError, match="is being moved to another model since"):
        pairs(store, GALLERY, (MODEL, NEW))
    store.check()


@pytest.mark.live
def test_who_expires_beside_a_cut_over_is_not_looked_for_any_more(
    folder: tuple[Kit, Store, Faces], monkeypatch: pytest.MonkeyPatch
) -> None:
    kit, store, known = folder
    soon = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    new = NewPerson(faces(1, 80), expires=soon, others={NEW: faces(1, 80, NEW_DIM)})
    (gone,) = store.add_persons(GALLERY, [new], MODEL)
    assert store.expired(1) == {}
    kit.clock.advance(3600)
    assert store.expired(1) == {GALLERY: [gone]}
    change = store._change

    def then_exchanged(*args: Any) -> Any:
        result = change(*args)
        monkeypatch.undo()
        store.exchange_spaces(GALLERY, NEW)
        return result

    monkeypatch.setattr(store, "_change", then_exchanged)
    assert store.delete_expired(GALLERY, [gone.id]) == [gone.id]
    assert not store._state(GALLERY).has_expired  # type: ignore[attr-defined]
    known.agree()


def test_an_export_beside_a_cut_over_is_of_one_model(
    folder: tuple[Kit, Store, Faces], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, store, _ = folder
    vectors, asked = store.vectors, list[int]()

    def then_exchanged(collection: str, person: int, contract_id: str | None = None) -> Any:
        asked.append(person)
        if len(asked) == 2:
            store.exchange_spaces(GALLERY, NEW)
        return vectors(collection, person, contract_id)

    monkeypatch.setattr(store, "vectors", then_exchanged)
    with pytest.raises(ConflictError, match="is of another model since: model-2"):
        export_set(store, GALLERY, tmp_path / "people.emb", quiet=True)
    assert not (tmp_path / "people.emb").exists()


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
    assert store.check()["tombstones"] == 0


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
        estimate = {made.id: {made.faces[0]: faces(1, 52, DIMS[second])[0]}}  # gives way to what its picture gives
        store.put_second_vectors(GALLERY, estimate, second, estimated=True)
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
        assert store.count_second(GALLERY)[1] == 0


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
