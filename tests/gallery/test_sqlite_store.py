"""The folder store alone: segments, compaction, erased vectors, snapshots, latency."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.encrypted_store import DIM, GALLERY, MODEL, faces
from support.moved_clock import compact_in_time
from support.stores import dump, files_with
from support.waiting import wait_until

from plsc.embedding.set_writer import write_embedding_set
from plsc.errors import ConflictError, UsageError
from plsc.gallery.backends import open_store
from plsc.gallery.filters import Filter
from plsc.gallery.sqlite import compaction, unfinished
from plsc.gallery.sqlite.backup import IDS_SKIPPED, restore
from plsc.gallery.sqlite.store import SqliteStore
from plsc.gallery.transfer import export_set, import_set
from plsc.gallery.values import IdempotentRequest, NewPerson, Person

Float32 = npt.NDArray[np.float32]


def open_people(folder: Path, **options: Any) -> SqliteStore:
    store = SqliteStore(folder, **options)
    if not store.collections():
        store.create_collection(GALLERY, DIM, MODEL)
    return store


def enrol(store: SqliteStore, vectors: Float32, **metadata: Any) -> list[Person]:
    new = [NewPerson(vector[None], f"p{n}", {"n": n, **metadata}) for n, vector in enumerate(vectors)]
    return store.add_persons(GALLERY, new, MODEL)


def stored_bytes(store: SqliteStore, person: Person) -> list[bytes]:
    return [vector.tobytes() for vector in store.vectors(GALLERY, person.id)]


def bfloat16(vector: bytes) -> bytes:
    """The upper halves, rounded to nearest even: how a bf16 copy would look."""
    bits = np.frombuffer(vector, dtype=np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).tobytes()


def files_holding(folder: Path, needles: list[bytes]) -> list[str]:
    """The files below ``folder`` that hold one of (a hundred of) ``needles``, or part of it, or it in bfloat16."""
    some = needles[:: 1 + len(needles) // 100]
    parts = [part for needle in some for part in (needle[:24], needle[-24:], bfloat16(needle))]
    return files_with(folder, *parts)


# --- forgetting ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("dim", [DIM, pytest.param(5000, marks=pytest.mark.exhaustive)])  # more than a page each
def test_deleted_vectors_are_in_no_file_after_a_compaction(tmp_path: Path, dim: int) -> None:
    store = SqliteStore(tmp_path / "store")
    store.create_collection(GALLERY, dim, MODEL)
    generator = np.random.default_rng(3)
    count, most = (60, 30) if dim == DIM else (40, 3)
    made: list[Person] = []
    for _ in range(2):
        new = [NewPerson(generator.standard_normal((n % most, dim))) for n in range(count)]
        made += store.add_persons(GALLERY, new, MODEL)
        store.compact()
    made += store.add_persons(GALLERY, [NewPerson(generator.standard_normal((2, dim))) for _ in range(9)], MODEL)
    gone: list[bytes] = []
    for person in generator.permutation(np.array(made, dtype=object))[:count]:
        gone += stored_bytes(store, person)
        store.delete_person(GALLERY, person.id)
    survivor = next(one for one in store.persons(GALLERY) if len(one.faces) == 2)
    gone.append(stored_bytes(store, survivor)[0])
    store.delete_face(GALLERY, survivor.id, survivor.faces[0])
    assert files_holding(store.folder, gone), "the search for bytes finds nothing anywhere"
    assert store.check()["tombstones"] == len(gone)
    store.compact()
    assert files_holding(store.folder, gone) == []
    assert store.check()["tombstones"] == 0
    kept = [part for one in store.persons(GALLERY, limit=999) for part in stored_bytes(store, one)]
    assert set(files_holding(store.folder, kept[:1])) == {"gallery.sqlite", "vectors.npy"}
    store.close()
    assert files_holding(store.folder, gone) == []


def test_a_deleted_collection_leaves_no_bytes(tmp_path: Path) -> None:
    store = open_people(tmp_path / "store")
    made = enrol(store, faces(50))
    gone = [part for one in made for part in stored_bytes(store, one)]
    store.compact()
    store.delete_collection(GALLERY)
    store.compact()
    assert files_holding(store.folder, gone) == []
    assert store.check()["tombstones"] == 0
    assert not list((store.folder / "collections").rglob("*.npy"))
    store.close()


def test_rows_that_were_overwritten_give_their_room_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plsc.gallery.sqlite.compaction._MIN_ERASED", 100)
    store = open_people(tmp_path / "store")
    made = store.add_persons(GALLERY, [NewPerson(faces(200, n)) for n in range(20)], MODEL)
    store.compact()
    former = (store.folder / "gallery.sqlite").stat().st_size
    gone = [part for one in made[:15] for part in stored_bytes(store, one)]
    for person in made[:15]:
        store.delete_person(GALLERY, person.id)
    store.compact()
    assert (store.folder / "gallery.sqlite").stat().st_size < former
    assert files_holding(store.folder, gone) == []
    assert [one.id for one in store.persons(GALLERY, limit=999)] == [one.id for one in made[15:]]
    store.check()
    store.close()


def test_snapshots_hold_nothing_that_was_deleted_before_and_the_check_counts_what_was_deleted_since(
    tmp_path: Path,
) -> None:
    store = open_people(tmp_path / "store")
    made = enrol(store, faces(40))
    before, since = stored_bytes(store, made[0]), stored_bytes(store, made[1])
    store.compact()
    store.delete_person(GALLERY, made[0].id)
    store.snapshot(store.folder / "snapshots" / "one")
    store.delete_person(GALLERY, made[1].id)
    store.compact()
    assert files_holding(store.folder, before) == []
    assert files_holding(store.folder / "snapshots", since)
    checked = store.check()
    assert (checked["snapshots"], checked["deleted_in_snapshots"]) == (1, 1)
    store.close()


@pytest.mark.live
def test_a_file_that_was_to_be_written_anew_is_when_the_store_is_opened_again(tmp_path: Path) -> None:
    """The process ended between taking overwritten rows out and writing the file without their neighbours' traces."""
    store = open_people(tmp_path / "store")
    made = enrol(store, faces(200))
    for person in made[:20]:
        store.delete_person(GALLERY, person.id)
    store.compact()
    with store._database.writing() as db:
        assert compaction.count_erased(db) == 20
        unfinished.purge_erased(db)
    store.close()
    store = SqliteStore(tmp_path / "store")
    with store._database.reading() as db:
        assert compaction.count_erased(db) == 0
    compact_in_time(store)
    assert not is_left(store)
    assert [one.id for one in store.persons(GALLERY, limit=999)] == [one.id for one in made[20:]]
    store.check()
    store.close()


# --- sealed and growing segments -------------------------------------------------------------------------------------


def is_left(store: SqliteStore) -> bool:
    with store._database.reading() as db:
        return unfinished.rewrite_since(db) is not None


@pytest.mark.live
def test_what_is_newer_than_a_segment_takes_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plsc.gallery.sqlite.collection_state.MIN_CHANGES", 10)
    monkeypatch.setattr("plsc.gallery.sqlite.collection_state.MAX_GROWING_BYTES", 20 * DIM * 4)
    store = open_people(tmp_path / "store")
    enrol(store, faces(400))
    store.compact()
    enrol(store, faces(21))  # fewer than an eighth
    compact_in_time(store)
    assert store.statistics()[GALLERY]["sealed"] == 421
    enrol(store, faces(20))
    store.close()
    store = SqliteStore(tmp_path / "store")
    figures = store.statistics()[GALLERY]
    assert (figures["sealed"], figures["growing"]) == (421, 20)
    store.close()


def test_compaction_in_the_background_keeps_what_is_written_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plsc.gallery.sqlite.collection_state.MIN_CHANGES", 50)
    store = open_people(tmp_path / "store")
    done = threading.Event()
    broken: list[str] = []
    vectors = faces(900)

    def look() -> None:
        while not done.is_set():
            rows = store.statistics()[GALLERY]["rows"]
            found = store.search(GALLERY, vectors[:4], k=1)
            if rows >= 100 and [match.score > 0.999 for answer in found for match in answer] != [True] * 4:
                broken.append(str(found))

    watcher = threading.Thread(target=look)
    watcher.start()
    made: list[Person] = []
    for start in range(0, 900, 20):
        made += enrol(store, vectors[start : start + 20])
        if start >= 100:
            store.delete_person(GALLERY, made.pop(5).id)
    while store.statistics()[GALLERY]["sealed"] <= 100:  # a compaction is due, if none ran
        done.wait(0.01)
    done.set()
    watcher.join()
    assert broken == []
    store.close()
    store = SqliteStore(tmp_path / "store")
    assert [one.id for one in store.persons(GALLERY, limit=9999)] == sorted(one.id for one in made)
    answers = store.search(GALLERY, vectors, k=1)
    alive = {one.id for one in made}
    assert sum(answer[0].person in alive and answer[0].score > 0.999 for answer in answers) == len(made)
    store.check()
    store.close()


def test_a_search_under_way_keeps_its_view_when_a_base_is_replaced(tmp_path: Path) -> None:
    store = open_people(tmp_path / "store")
    made = enrol(store, faces(30))
    store.compact()
    state = store._states[GALLERY]
    view = state.view
    store.delete_person(GALLERY, made[0].id)
    store.compact()
    scores, found, _ = view.knn(faces(1), 1, view.masks_of(None))
    assert found[0, 0] == made[0].faces[0]
    assert scores[0, 0] > 0
    assert store.search(GALLERY, faces(1), k=1)[0][0].person != made[0].id
    store.close()


def test_a_filter_is_remembered_only_while_nothing_changes(tmp_path: Path) -> None:
    store = open_people(tmp_path / "store")
    one, other = enrol(store, faces(2), on=True)
    truth, number = Filter.parse({"on": True}), Filter.parse({"on": 1})
    for _ in range(2):
        assert len(store.search(GALLERY, faces(1), filter=truth)[0]) == 2
        assert store.search(GALLERY, faces(1), filter=number) == [[]], "1 is not true"
    store.update_person(GALLERY, one.id, metadata={"on": 1})
    assert [match.person for match in store.search(GALLERY, faces(1), filter=truth)[0]] == [other.id]
    assert [match.person for match in store.search(GALLERY, faces(1), filter=number)[0]] == [one.id]
    store.delete_person(GALLERY, one.id)
    assert store.search(GALLERY, faces(1), filter=number) == [[]]
    store.close()


def test_commits_are_synced_by_every_connection(tmp_path: Path) -> None:
    store = open_people(tmp_path / "store")
    for connection in (store._database.writing, store._database.reading):
        with connection() as db:
            assert db.execute("PRAGMA synchronous").fetchone() == (2,), "2 is FULL"
    store.close()


def test_answers_are_forgotten_behind_a_write_under_way(tmp_path: Path) -> None:
    store = open_people(tmp_path / "store")
    with ThreadPoolExecutor(1) as thread:
        forgetting: list[Future[int]] = []

        def answer(result: object) -> tuple[int, bytes]:
            forgetting.append(thread.submit(store.forget_answers, "2990-01-01T00:00:00.000Z", 0))
            assert not wait(forgetting, 0.2).done
            return 201, b""

        store.add_persons(GALLERY, [NewPerson(faces(1))], MODEL, idempotent=IdempotentRequest("t", "k", b"", answer))
        assert forgetting[0].result(60) == 1
    store.close()


# --- copies ----------------------------------------------------------------------------------------------------------


def test_a_snapshot_becomes_the_same_store_which_gives_no_id_twice(tmp_path: Path) -> None:
    store = open_people(tmp_path / "store")
    made = enrol(store, faces(40), city="Bern")
    store.compact()
    store.delete_person(GALLERY, made[3].id)
    store.snapshot(tmp_path / "copies" / "one")
    expected = dump(store)
    later = enrol(store, faces(3, 9))
    with pytest.raises(ConflictError):
        store.snapshot(tmp_path / "copies" / "one")
    store.close()
    result = restore(tmp_path / "copies" / "one", tmp_path / "new")
    assert [(one["name"], one["faces"]) for one in result["collections"]] == [(GALLERY, 39)]
    again = SqliteStore(tmp_path / "new")
    assert dump(again) == expected
    again.check()
    (new,) = enrol(again, faces(1))
    assert new.id > IDS_SKIPPED
    assert new.faces[0] > IDS_SKIPPED
    assert new.id not in {one.id for one in later}
    again.close()
    with pytest.raises(ConflictError):
        restore(tmp_path / "copies" / "one", tmp_path / "new")
    with pytest.raises(UsageError, match="is a snapshot"):
        SqliteStore(tmp_path / "copies" / "one")
    with pytest.raises(UsageError, match="no snapshot"):
        restore(tmp_path / "nowhere", tmp_path / "other")


def test_a_snapshot_taken_while_persons_come_is_of_one_moment(tmp_path: Path) -> None:
    store = open_people(tmp_path / "store")
    stop = threading.Event()

    def come() -> None:
        while not stop.is_set():
            store.add_persons(GALLERY, [NewPerson(faces(2)), NewPerson(faces(1))], MODEL)

    thread = threading.Thread(target=come)
    thread.start()
    for number in range(3):
        store.snapshot(tmp_path / str(number))
    stop.set()
    thread.join()
    store.close()
    for number in range(3):
        restore(tmp_path / str(number), tmp_path / f"store{number}")
        again = SqliteStore(tmp_path / f"store{number}")
        about = again.collection(GALLERY)
        assert about.persons % 2 == 0
        assert about.faces == about.persons // 2 * 3
        again.check()
        again.close()


def test_an_export_comes_back_as_it_was(tmp_path: Path) -> None:
    store = open_people(tmp_path / "store")
    metadata = [{"age": 3, "of": 0.1, "on": True}, {}, {"ü": "🙂"}, {}, {}]
    names = ["Ann", "Ann", None, "", "Bo"]
    given = [NewPerson(faces(n, n), name, about) for n, (name, about) in enumerate(zip(names, metadata, strict=True))]
    made = store.add_persons(GALLERY, given, MODEL)
    written = export_set(store, GALLERY, tmp_path / "set", quiet=True)
    written.verify()
    assert written.ids.tolist() == [face for one in made for face in one.faces]
    assert next(iter(written.keys)) == f"person/{made[1].id}/face/{made[1].faces[0]}"
    assert len(set(written.class_names)) == len(made)
    assert list(written.class_names)[4] == "Bo"
    result = import_set(store, "again", tmp_path / "set", quiet=True)
    assert result == {"persons": 5, "faces": 10, "left_out": 0}
    for one, two in zip(made, store.persons("again"), strict=True):
        assert (one.name, one.metadata) == (two.name, two.metadata)
        assert stored_bytes(store, one) == [part.tobytes() for part in store.vectors("again", two.id)]
    with pytest.raises(ConflictError, match="exists already"):
        export_set(store, GALLERY, tmp_path / "set")
    store.close()


def test_any_embedding_set_can_be_enrolled(tmp_path: Path) -> None:
    vectors = faces(9)
    vectors[4] = 0
    vectors[5, 3] = np.nan
    labels = np.array([1, 0, 1, -1, 0, 1, -1, 2, 1])
    written = write_embedding_set(
        tmp_path / "set",
        vectors,
        contract_id=MODEL,
        labels=labels,
        class_names=["Ann", "Bo", "Cy", "Di"],
        keys=[f"photo-{n}" for n in range(9)],
        errors={7: "no image"},
    )
    store = SqliteStore(tmp_path / "store")
    result = import_set(store, GALLERY, written, quiet=True)
    assert result == {"persons": 4, "faces": 6, "left_out": 3}
    found = store.persons(GALLERY)
    assert [(one.name, one.metadata, len(one.faces)) for one in found] == [
        ("Ann", {}, 1),
        ("Bo", {}, 3),
        (None, {"key": "photo-3"}, 1),
        (None, {"key": "photo-6"}, 1),
    ]
    assert store.search(GALLERY, vectors[8:], k=1)[0][0].person == found[1].id
    store.create_collection("others", DIM, "another model")
    with pytest.raises(ConflictError, match="another model"):
        import_set(store, "others", tmp_path / "set")
    store.close()


# --- latency ---------------------------------------------------------------------------------------------------------


@pytest.mark.live
@pytest.mark.slow
def test_where_exact_search_misses_the_latency_an_approximate_one_is_found_and_its_recall_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plsc.gallery.sqlite.maintenance._RECALL_INTERVAL_SECONDS", 0.02)
    generator = np.random.default_rng(0)
    centres = generator.standard_normal((1000, DIM))
    store = open_people(tmp_path / "store", latency_ms=1e-6)  # which nothing meets: the fastest is taken
    new = [NewPerson(centre + 0.2 * generator.standard_normal((6, DIM))) for centre in centres]
    made = store.add_persons(GALLERY, new, MODEL)
    store.compact()
    state = store._states[GALLERY]
    for _ in range(600):
        if store.statistics()[GALLERY]["approximate"]:
            break
        threading.Event().wait(0.05)
    exact = SqliteStore(restored(store, tmp_path))
    queries = centres + 0.2 * generator.standard_normal((1000, DIM))
    quick, true = store.search(GALLERY, queries, k=3), exact.search(GALLERY, queries, k=3)
    if not store.statistics()[GALLERY]["approximate"]:
        pytest.skip("no structure is faster than the exact search of so few rows on this machine")
    assert state.view.sealed is not None
    assert store.statistics()[GALLERY]["recall"] >= 0.99
    faces_found = [[match.face for match in answer] for answers in (quick, true) for answer in answers]
    assert np.mean([one == two for one, two in zip(faces_found[:1000], faces_found[1000:], strict=True)]) > 0.9
    assert [len(answer) for answer in store.search(GALLERY, queries[:2], k=10**6)] == [1000, 1000]
    monkeypatch.setattr(
        "plsc.index.ann.search_all",
        lambda _, asked, k, *others, **more: (  # as if the rows had moved away
            np.full((len(asked), k), -1, np.float32),
            np.tile(np.arange(k), (len(asked), 1)),
        ),
    )

    def is_noticed() -> bool:  # the recall is watched on what is asked
        store.search(GALLERY, queries, k=3)
        return store.statistics()[GALLERY]["recall"] < 0.5

    wait_until(is_noticed)
    monkeypatch.undo()
    store.delete_person(GALLERY, made[0].id)
    assert store.search(GALLERY, queries[:1], k=1)[0][0].person != made[0].id
    store.compact()
    assert store.search(GALLERY, queries[1:2], k=1)[0][0].person == made[1].id
    store.close()
    exact.close()


def restored(store: SqliteStore, tmp_path: Path) -> Path:
    store.snapshot(tmp_path / "copy")
    restore(tmp_path / "copy", tmp_path / "exact")
    return tmp_path / "exact"


@pytest.mark.parametrize("latency", [0, -1, float("nan"), float("inf")])
def test_a_latency_is_a_positive_number(tmp_path: Path, latency: float) -> None:
    with pytest.raises(UsageError, match="it lies above 0"):
        open_store(tmp_path / "store", latency_ms=latency)
