"""Every store alike: faces have their callers' keys, each once, and go with them."""

import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from support.stores import DIM, GALLERY, MODEL, Kit, faces

from plsc.errors import IntegrityError, UsageError
from plsc.gallery.rows import same_faces
from plsc.gallery.sqlite.store import SqliteStore
from plsc.gallery.store import Store
from plsc.gallery.thumbnails import ThumbnailStore
from plsc.gallery.transfer import export_set, import_set
from plsc.gallery.values import NewPerson, Person


def keys_of(store: Store, person: Person) -> dict[int, str]:
    return dict(store.person(GALLERY, person.id).keys)


def test_a_face_is_added_once_under_its_key(store: Store) -> None:
    vectors = faces(6)
    new = [NewPerson(vectors[:2], "Ada", keys=["a", None]), NewPerson(vectors[2:3], keys=["a"])]
    ada, other = store.add_persons(GALLERY, new, MODEL)
    assert dict(ada.keys) == keys_of(store, ada) == {ada.faces[0]: "a"}
    assert dict(other.keys) == keys_of(store, other) == {other.faces[0]: "a"}, "keys are a person's own"
    added = store.add_faces(GALLERY, ada.id, vectors[[3, 4, 5]], MODEL, keys=["c", "a", None])
    assert added[1] == ada.faces[0]
    now = store.person(GALLERY, ada.id)
    assert now.faces == (*ada.faces, added[0], added[2])
    assert dict(now.keys) == {ada.faces[0]: "a", added[0]: "c"}
    assert (now.revision, now) == (2, store.persons(GALLERY)[0])
    assert store.add_faces(GALLERY, ada.id, vectors[[3]], MODEL, keys=["c"]) == [added[0]]
    assert store.person(GALLERY, ada.id) == now, "nothing has changed"
    store.delete_face(GALLERY, ada.id, ada.faces[0])
    assert keys_of(store, ada) == {added[0]: "c"}
    (again,) = store.add_faces(GALLERY, ada.id, vectors[[0]], MODEL, keys=["a"])
    assert again not in now.faces
    store.delete_person(GALLERY, ada.id)
    store.check()
    store.delete_collection(GALLERY)
    store.create_collection(GALLERY, DIM, MODEL)
    store.check()


def test_a_face_without_a_key_is_known_by_its_embedding(store: Store) -> None:
    vectors = faces(4)
    (ada,) = store.add_persons(GALLERY, [NewPerson(vectors[:3], keys=["a", None, None])], MODEL)
    near = vectors[2] + 1e-4
    added = store.add_faces(
        GALLERY, ada.id, [vectors[0], vectors[1], near, vectors[3]], MODEL, keys=["x", "b", None, "d"]
    )
    assert added[1] == ada.faces[1]
    assert not set(ada.faces) & {added[0], added[2], added[3]}, "a face that has a key is another one's"
    assert keys_of(store, ada) == {ada.faces[0]: "a", ada.faces[1]: "b", added[0]: "x", added[3]: "d"}
    assert store.collection(GALLERY).faces == 6
    np.testing.assert_allclose(store.vectors(GALLERY, ada.id)[1], vectors[1] / np.linalg.norm(vectors[1]), atol=1e-6)


def test_of_pictures_that_are_nearly_the_same_each_is_taken_for_itself() -> None:
    own = np.array([[1, 0], [0.999, 0.0447], [0, 1]], dtype=np.float32)
    own /= np.linalg.norm(own, axis=1, keepdims=True)
    new = np.array([own[0] + 0.01 * own[2], own[1], own[0], [-1, 0]], dtype=np.float32)
    new /= np.linalg.norm(new, axis=1, keepdims=True)
    assert sorted(same_faces(new, own)) == [(1, 1), (2, 0)]
    assert same_faces(new[:0], own) == same_faces(new, own[:0]) == []


def test_a_replaced_person_has_the_new_keys(store: Store) -> None:
    vectors = faces(3)
    one, is_new = store.put_person(GALLERY, NewPerson(vectors[:2], external_id="e", keys=["a", "b"]), MODEL)
    assert (is_new, keys_of(store, one)) == (True, dict(one.keys)) == (True, dict(zip(one.faces, "ab", strict=True)))
    two, is_new = store.put_person(GALLERY, NewPerson(vectors[2:], external_id="e", keys=["b"]), MODEL)
    assert (is_new, two.id, dict(two.keys), keys_of(store, two)) == (False, one.id, *[{two.faces[0]: "b"}] * 2)
    three, _ = store.put_person(GALLERY, NewPerson(vectors[:1], external_id="e"), MODEL)
    assert dict(three.keys) == keys_of(store, three) == {}
    store.check()


def test_wrong_keys_are_refused(store: Store) -> None:
    (ada,) = store.add_persons(GALLERY, [NewPerson(faces(1), keys=["a"])], MODEL)
    for wrong, said in (
        (["b"], "2 faces have 1 keys"),
        (["b", "b"], "given twice"),
        (["b", ""], "1 to 64"),
        (["b", "é"], "1 to"),
    ):
        with pytest.raises(UsageError, match=said):
            store.add_faces(GALLERY, ada.id, faces(2), MODEL, keys=wrong)
        with pytest.raises(UsageError, match=said):
            store.add_persons(GALLERY, [NewPerson(faces(2), keys=wrong)], MODEL)
    assert store.persons(GALLERY) == [ada]


def test_snapshots_exports_and_openings_keep_them(kit: Kit, store: Store, tmp_path: Path) -> None:
    new = [NewPerson(faces(2), "Ada", external_id="a", keys=["k1", "k2"]), NewPerson(faces(1, seed=1), keys=[])]
    store.add_persons(GALLERY, new, MODEL)
    expected = [["k1", "k2"], []]

    def kept(store: Store) -> list[list[str | None]]:
        return [[one.keys[face] for face in one.faces if one.keys] for one in store.persons(GALLERY)]

    store.snapshot(tmp_path / "copy")
    export_set(store, GALLERY, tmp_path / "set", quiet=True)
    store = kit.again(store)
    store.compact()
    assert kept(store) == expected
    restored = kit.restored(store, tmp_path / "copy")
    assert kept(restored) == expected
    restored.delete_collection(GALLERY)
    import_set(restored, GALLERY, tmp_path / "set", quiet=True)
    assert kept(restored) == expected


def test_a_picture_is_kept_of_a_face_that_is_new(store: Store, tmp_path: Path) -> None:
    kept = ThumbnailStore(store, tmp_path / "thumbnails", keep=True, lossless=True)
    crops = [torch.full((3, 8, 8), level, dtype=torch.uint8) for level in (10, 90)]
    (ada,) = kept.add_persons(GALLERY, [NewPerson(faces(1), keys=["a"])], MODEL, [crops[:1]])
    before = kept.read(GALLERY, ada.id, ada.faces[0])
    same, new = kept.add_faces(GALLERY, ada.id, faces(2), MODEL, crops[::-1], keys=["a", "b"])
    assert kept.read(GALLERY, ada.id, same) == before
    assert kept.read(GALLERY, ada.id, new) == before, "of the same pixels"


@pytest.mark.parametrize("change", ["SET key = 'z'", "SET face = 99", "SET person = 2"])
def test_check_names_a_key_that_is_not_what_was_written(change: str, tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "store")
    store.create_collection(GALLERY, DIM, MODEL)
    store.add_persons(GALLERY, [NewPerson(faces(1), keys=["secret-key"]), NewPerson(faces(1))], MODEL)
    store.close()
    with closing(sqlite3.connect(tmp_path / "store" / "gallery.sqlite")) as connection:
        connection.execute(f"UPDATE face_keys {change}")
        connection.commit()
    store = SqliteStore(tmp_path / "store")
    with pytest.raises(IntegrityError, match="key of face"):
        store.check()
    store.close()


def test_a_deleted_key_leaves_the_file(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "store")
    store.create_collection(GALLERY, DIM, MODEL)
    (ada, _) = store.add_persons(GALLERY, [NewPerson(faces(2), keys=["secret-key-1", "b"]), NewPerson(faces(1))], MODEL)
    store.delete_face(GALLERY, ada.id, ada.faces[0])
    store.compact()
    assert not [path for path in store.folder.rglob("*") if path.is_file() and b"secret-key-1" in path.read_bytes()]
    store.close()
