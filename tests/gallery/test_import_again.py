"""Every store alike: an embedding set that is imported again, grown, or after a failure, enrols nobody twice."""

from pathlib import Path

import numpy as np
import pytest
from support.stores import GALLERY, MODEL, faces

from plsc.embedding.embedding_set import EmbeddingSet
from plsc.embedding.set_writer import write_embedding_set
from plsc.errors import StorageError
from plsc.gallery import transfer
from plsc.gallery.store import Store
from plsc.gallery.transfer import import_set
from plsc.gallery.values import NewPerson
from plsc.tools.entry import main

NAMES = ["Ann", "Bo", "Cy", "Di"]


def a_set(folder: Path, labels: list[int], seed: int = 0) -> EmbeddingSet:
    """The first rows of one array, so that a longer list of labels is a set that has grown."""
    vectors, keys = faces(20, seed)[: len(labels)], [f"photo-{row}" for row in range(len(labels))]
    about = {"labels": np.array(labels), "class_names": NAMES, "keys": keys}
    return write_embedding_set(folder, vectors, contract_id=MODEL, **about)


def counts(store: Store) -> list[tuple[str | None, int]]:
    return [(one.name, len(one.faces)) for one in store.persons(GALLERY)]


def test_a_set_that_has_grown_is_imported_once(store: Store, tmp_path: Path) -> None:
    first = a_set(tmp_path / "first", [0, 1, 1, -1])
    assert import_set(store, GALLERY, first, quiet=True) == {"persons": 3, "faces": 4, "left_out": 0}
    once = [("Ann", 1), ("Bo", 2), (None, 1)]
    assert import_set(store, GALLERY, first, quiet=True) == {"persons": 0, "faces": 0, "there": 3, "left_out": 0}
    assert counts(store) == once
    grown = a_set(tmp_path / "grown", [0, 1, 1, -1, 2, 0, 1, -1, 0])
    assert import_set(store, GALLERY, grown, quiet=True) == {"persons": 2, "faces": 5, "there": 3, "left_out": 0}
    assert counts(store) == [("Ann", 3), ("Bo", 3), (None, 1), ("Cy", 1), (None, 1)]
    (best,) = store.search(GALLERY, faces(20)[8:9], k=1)[0]
    assert best.person == store.persons(GALLERY)[0].id


def test_others_with_the_same_vectors_are_others(store: Store, tmp_path: Path) -> None:
    store.add_persons(GALLERY, [NewPerson(faces(1), "Zoe")], MODEL)
    assert import_set(store, GALLERY, a_set(tmp_path / "set", [0, 0]), quiet=True)["persons"] == 1
    assert counts(store) == [("Zoe", 1), ("Ann", 2)]


def test_an_import_that_failed_goes_on(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.add_persons(GALLERY, [NewPerson(faces(1, seed=5), "Zoe")], MODEL)
    written = a_set(tmp_path / "set", [0, 1, 2, 3, 3])
    monkeypatch.setattr(transfer, "_IMPORT_BATCH_FACES", 4)
    add, calls = store.add_persons, list[int]()

    def fail_later(*args: object, **options: object) -> object:
        calls.append(1)
        if len(calls) == 2:
            raise StorageError("the disk is full")
        return add(*args, **options)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(store, "add_persons", fail_later)
        with pytest.raises(StorageError):
            import_set(store, GALLERY, written, quiet=True)
    assert counts(store) == [("Zoe", 1), ("Ann", 1), ("Bo", 1)]
    assert import_set(store, GALLERY, written, quiet=True) == {"persons": 2, "faces": 3, "there": 2, "left_out": 0}
    assert counts(store) == [("Zoe", 1), ("Ann", 1), ("Bo", 1), ("Cy", 1), ("Di", 2)]


def test_the_command_says_who_was_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a_set(tmp_path / "set", [0, 1])
    for said in ("2 faces of 2 persons enrolled, 0 rows", "0 faces of 0 persons enrolled, 2 persons there already, 0"):
        assert main(["gallery", "import", str(tmp_path / "store"), "people", str(tmp_path / "set")]) == 0
        assert said in capsys.readouterr().out
