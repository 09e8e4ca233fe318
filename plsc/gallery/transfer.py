"""Galleries to embedding sets and back, whatever store they live in.

An exported set (plsc.embed.embedding_set) has a row for each face: its id is the face's, its label the person, its key
"person/ID/face/ID". Names and metadata lie beside it in persons.jsonl, a line {"id", "name", "metadata", "created"} for
each label, whose hash the set's manifest holds under "gallery"; other readers see the names as class names, made
unique. Not kept: which ids a gallery has given before. An import gives new ids and new times.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from plsc.embed.embedding_set import EmbeddingSet
from plsc.embed.set_writer import SetWriter, ShardRows
from plsc.errors import ConflictError, DataError, IntegrityError, NotFoundError
from plsc.files import describe_files, verify_files
from plsc.gallery.storage_errors import storage_errors
from plsc.gallery.store import Float32, NewPerson, Person, Store
from plsc.index.rows import Int64, searchable
from plsc.progress import Progress

PERSONS = "persons.jsonl"
_PAGE = 1000  # persons
_SHARD_ROWS = 32768
_FACES_TOGETHER = 2000  # of an import's transaction, at least


def export_set(store: Store, collection: str, folder: str | Path, *, quiet: bool = False) -> EmbeddingSet:
    """Write a collection as the embedding set ``folder``, which must not exist.

    Raises :class:`ConflictError` if it does, :class:`NotFoundError` without the collection, :class:`DataError` if the
    collection changed meanwhile, :class:`StorageError` where there is no room; nothing is left then.
    """
    target, about = Path(folder), store.collection(collection)
    if target.exists():
        raise ConflictError(f"{target} exists already; name a new folder")
    settings = {
        "contract_id": about.contract_id,
        "dim": about.dim,
        "dtype": "float32",
        "rows": about.faces,
        "shard_rows": _SHARD_ROWS,
    }
    writer = SetWriter(target, settings)
    try:
        with storage_errors(target):
            writer.begin()
            names = _write_rows(writer, store, collection, Progress("export", about.faces, "faces", quiet=quiet))
            about_persons = {"collection": collection, "persons": len(names)}
            writer.origin["gallery"] = {**about_persons, "files": describe_files(target, [PERSONS])}
            return writer.finish(names)
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        raise


def import_set(
    store: Store, collection: str, embedding_set: EmbeddingSet | str | Path, *, quiet: bool = False
) -> dict[str, int]:
    """Enrol an embedding set: a person for each class, and one for each row without a class, with its key as metadata.

    The collection is made if there is none. Rows with an error, NaN, infinity or no length are left out. Persons are
    enrolled some hundred at a time, each lot whole; where that fails, a collection that was made here is removed again,
    and one that was there keeps the lots before. Every file is hashed first. Returns {"persons", "faces", "left_out"}.

    Raises :class:`ConflictError` for vectors of another model than the collection's, and what opening the set raises.
    """
    source = embedding_set if isinstance(embedding_set, EmbeddingSet) else EmbeddingSet(embedding_set)
    source.verify()
    made = collection not in {about.name for about in store.collections()}
    if made:
        store.create_collection(collection, source.dim, source.contract_id)
    try:
        return _enrol(store, collection, source, quiet)
    except BaseException:
        if made:
            with suppress(NotFoundError):
                store.delete_collection(collection)
        raise


# --- export ---


def _write_rows(writer: SetWriter, store: Store, collection: str, progress: Progress) -> list[str]:
    """Write all shards and persons.jsonl; returns the class names."""
    names: dict[str, None] = {}
    waiting = _Waiting(writer)
    with (writer.folder / PERSONS).open("w", encoding="utf-8") as file:
        for person in _everyone(store, collection):
            line = {name: getattr(person, name) for name in ("id", "name", "metadata", "created")}
            file.write(json.dumps(line, allow_nan=False) + "\n")
            waiting.add(person, len(names), _vectors(store, collection, person))
            names[_class_name(person, names)] = None
            progress.advance(len(person.faces))
    waiting.finish()
    progress.finish()
    return list(names)


class _Waiting:
    """Rows on their way into shards of the length that the set was begun with."""

    def __init__(self, writer: SetWriter) -> None:
        self._writer, self._shard, self._rows = writer, 0, 0
        self._vectors: list[Float32] = []
        self._faces: list[tuple[int, int, str]] = []

    def add(self, person: Person, label: int, vectors: Float32) -> None:
        """Add the faces of a person."""
        self._vectors.extend(vectors)
        self._faces += [(face, label, f"person/{person.id}/face/{face}") for face in person.faces]
        while len(self._faces) >= _SHARD_ROWS:
            self._publish(_SHARD_ROWS)

    def finish(self) -> None:
        """Write what is left; :class:`DataError` if there were fewer or more faces than were counted."""
        if self._faces:
            self._publish(len(self._faces))
        if self._rows != self._writer.settings["rows"]:
            raise DataError(f"{self._writer.folder}: the collection changed while it was exported; export it again")

    def _publish(self, count: int) -> None:
        if self._shard >= self._writer.shard_count:
            raise DataError(f"{self._writer.folder}: the collection grew while it was exported; export it again")
        ids, labels, keys = zip(*self._faces[:count], strict=True)
        vectors = np.array(self._vectors[:count], dtype=np.float32)
        columns = np.array(ids, dtype=np.int64), np.array(labels, dtype=np.int64)
        self._writer.publish(self._shard, ShardRows(self._rows, vectors, *columns, keys))
        self._vectors, self._faces = self._vectors[count:], self._faces[count:]
        self._shard, self._rows = self._shard + 1, self._rows + count


def _everyone(store: Store, collection: str) -> Iterator[Person]:
    after = 0
    while page := store.persons(collection, after=after, limit=_PAGE):
        yield from page
        after = page[-1].id


def _vectors(store: Store, collection: str, person: Person) -> Float32:
    vectors = store.vectors(collection, person.id)
    if len(vectors) != len(person.faces):
        raise DataError(f"person {person.id} changed while {collection} was exported; export it again")
    return vectors


def _class_name(person: Person, taken: dict[str, None]) -> str:
    """The person's name, with the id where there is none, or another has it."""
    name = person.name or f"#{person.id}"
    while name in taken:
        name = f"{name} #{person.id}"
    return name


# --- import ---


def _enrol(store: Store, collection: str, source: EmbeddingSet, quiet: bool) -> dict[str, int]:
    progress = Progress("import", len(source), "faces", quiet=quiet)
    good = _good_rows(source)
    persons = faces = 0
    lot: list[NewPerson] = []
    size = 0
    for person in _persons(source, good):
        lot.append(person)
        size += 1 + len(np.asarray(person.vectors))
        if size >= _FACES_TOGETHER:
            store.add_persons(collection, lot, source.contract_id)
            lot, size = [], 0
        persons, faces = persons + 1, faces + len(np.asarray(person.vectors))
        progress.advance(len(np.asarray(person.vectors)))
    store.add_persons(collection, lot, source.contract_id)
    progress.finish()
    return {"persons": persons, "faces": faces, "left_out": len(source) - faces}


def _good_rows(source: EmbeddingSet) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """(N,) which rows have a direction."""
    good = np.ones(len(source), dtype=np.bool_)
    good[list(source.errors)] = False
    for start in range(0, len(source), _SHARD_ROWS):
        stop = min(start + _SHARD_ROWS, len(source))
        good[start:stop] &= searchable(source.rows(start, stop))[1]
    return good


def _persons(source: EmbeddingSet, good: np.ndarray[Any, np.dtype[np.bool_]]) -> Iterator[NewPerson]:
    """The persons of a set, class by class, then the rows without one."""
    labels: Int64 = np.where(good, source.labels, -2)
    if len(labels) and int(labels.max()) >= len(source.class_names):
        raise DataError(f"{source.folder} holds labels outside its {len(source.class_names)} classes; embed it again")
    order = np.argsort(labels, kind="stable")
    ends = np.searchsorted(labels[order], np.arange(-1, len(source.class_names) + 1))
    known = _known_persons(source)
    for label, name in enumerate(source.class_names):
        rows = order[ends[label + 1] : ends[label + 2]]
        if known is not None:
            line = next(known)
            yield NewPerson(_rows(source, rows), line["name"], line["metadata"])
        elif len(rows):
            yield NewPerson(_rows(source, rows), name)
    for row in order[ends[0] : ends[1]].tolist():
        yield NewPerson(source.rows(row, row + 1), None, {"key": source.keys[row][:1024]})


def _known_persons(source: EmbeddingSet) -> Iterator[dict[str, Any]] | None:
    """What persons.jsonl tells of each class in turn, where a gallery was exported; else None."""
    about = source.manifest.get("gallery")
    if about is None:
        return None
    verify_files(source.folder, about["files"])
    if about["persons"] != len(source.class_names):
        raise IntegrityError(f"{source.folder / PERSONS} does not go with the set; use another copy")
    return _lines(source.folder / PERSONS)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def _rows(source: EmbeddingSet, rows: Int64) -> Float32:
    """Rows (n, dim), in runs of neighbours."""
    runs = np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1) if len(rows) else []
    parts = [source.rows(int(run[0]), int(run[-1]) + 1) for run in runs]
    return np.concatenate([np.empty((0, source.dim), dtype=np.float32), *parts])
