"""Copies in plain files: written whole or not at all, hashed, and enrolled into any store."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plsc.errors import ConflictError, DataError, IntegrityError, StorageError
from plsc.gallery.sqlite.store import SqliteStore
from plsc.gallery.transfer import copy_into, export_set, import_set, read_copy, write_copy
from plsc.gallery.values import Collection, NewPerson


@pytest.fixture
def source(tmp_path: Path) -> Iterator[SqliteStore]:
    store = SqliteStore(tmp_path / "source")
    random = np.random.default_rng(0)
    store.create_collection("people", 3, "m")
    store.create_collection("empty", 5, "n")
    new = [
        NewPerson(random.standard_normal((n % 3, 3)), f"né{n}\n", {"n": n, "x": 1.5}, f"é/{n}" if n % 2 else None)
        for n in range(1200)
    ]
    new[7] = replace(new[7], expires="2990-01-01")
    store.add_persons("people", new, "m")
    yield store
    store.close()


@pytest.fixture
def target(tmp_path: Path) -> Iterator[SqliteStore]:
    store = SqliteStore(tmp_path / "target")
    yield store
    store.close()


def written(store: SqliteStore, target: Path) -> Path:
    write_copy(
        target,
        [
            (about, ((one, store.vectors(about.name, one.id)) for one in store.persons(about.name, limit=10**9)))
            for about in store.collections()
        ],
    )
    return target


def test_a_copy_enrols_everybody_into_another_store(source: SqliteStore, target: SqliteStore, tmp_path: Path) -> None:
    made = copy_into(target, written(source, tmp_path / "copy"))
    assert [(one.name, one.dim, one.contract_id, one.persons, one.faces) for one in made] == [
        (one.name, one.dim, one.contract_id, one.persons, one.faces) for one in source.collections()
    ]
    pairs = zip(source.persons("people", limit=10**9), target.persons("people", limit=10**9), strict=True)
    for one, other in pairs:
        assert (one.name, one.metadata, len(one.faces)) == (other.name, other.metadata, len(other.faces))
        assert (one.external_id, one.expires) == (other.external_id, other.expires)
        np.testing.assert_allclose(source.vectors("people", one.id), target.vectors("people", other.id), atol=1e-7)
    with pytest.raises(ConflictError, match="collection empty already"):
        copy_into(target, tmp_path / "copy")
    assert target.collection("people").persons == 1200


def test_damage_is_named_before_anybody_is_enrolled(source: SqliteStore, target: SqliteStore, tmp_path: Path) -> None:
    folder = written(source, tmp_path / "copy")
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        changed = bytes([content[len(content) // 2] ^ 1]) if content else b"x"
        path.write_bytes(content[: len(content) // 2] + changed + content[len(content) // 2 + 1 :])
        with pytest.raises(IntegrityError, match=path.name):
            copy_into(target, folder)
        path.write_bytes(content)
    assert target.collections() == []
    with pytest.raises(DataError, match="is no plsc gallery copy"):
        read_copy(tmp_path)


def test_a_copy_that_fails_leaves_nothing(source: SqliteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (person,) = source.persons("people", limit=1)

    def lost() -> object:
        yield person, source.vectors("people", person.id)
        raise StorageError("the connection is lost")

    with pytest.raises(StorageError, match="connection"):
        write_copy(tmp_path / "copy", [(source.collection("people"), lost())])  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["source"]

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "vectors")

    monkeypatch.setattr("plsc.gallery.transfer.write_npy_header", full)
    with pytest.raises(StorageError, match="cannot write vectors: No space left"):
        write_copy(tmp_path / "copy", [(Collection("a", 3, "m", "", 0, 0), [])])
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def from_copy(source: SqliteStore, target: SqliteStore, folder: Path) -> None:
    copy_into(target, written(source, folder))


def from_set(source: SqliteStore, target: SqliteStore, folder: Path) -> None:
    import_set(target, "people", export_set(source, "people", folder, quiet=True), quiet=True)


@pytest.mark.parametrize(("enrol_all", "left"), [(from_copy, ["empty"]), (from_set, [])])
def test_an_enrolment_that_fails_takes_its_collection_back(
    source: SqliteStore,
    target: SqliteStore,
    tmp_path: Path,
    enrol_all: Callable[[SqliteStore, SqliteStore, Path], None],
    left: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    enrol, calls = target.add_persons, []

    def failing(*args: Any, **keywords: Any) -> object:
        calls.append(args)
        if len(calls) == 2:
            raise StorageError("the disk is full")
        return enrol(*args, **keywords)

    monkeypatch.setattr(target, "add_persons", failing)
    with pytest.raises(StorageError, match="disk is full"):
        enrol_all(source, target, tmp_path / "new")
    assert [one.name for one in target.collections()] == left
