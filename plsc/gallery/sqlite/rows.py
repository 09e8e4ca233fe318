"""A collection's persons and faces in SQLite: everything that a change writes, and what reads and filters ask.

A deleted person's or face's vectors stay, under tombstones (table ``forgotten``), until compaction erases them.
"""

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np

from plsc.gallery.filters import COMPARISONS, Condition, Filter
from plsc.gallery.rows import MovableRows
from plsc.gallery.sqlite import records
from plsc.gallery.sqlite.database import clock_of, codec_of, corrupt_row
from plsc.gallery.sqlite.records import Faces, StoredCollection, StoredMigration
from plsc.gallery.sqlite.unfinished import note_deletion_time, note_left_texts
from plsc.gallery.validation import ValidPerson, kind_of, no_collection, now
from plsc.gallery.values import Collection, Float32, Migration, Person, PersonSummary, SecondVector
from plsc.index.rows import Int64

_VECTOR = "SELECT face, checksum, vector FROM vectors WHERE face = ?"
_MARK = "SELECT substr(checksum, 1, 1) FROM vectors WHERE face = ?"
_PERSON = "p.id, p.collection, p.name, p.metadata, p.created, p.external_id, p.revision, p.expires, p.checksum"


class SqliteRows(MovableRows):
    """The collection with a number, in a transaction of ``db``.

    Attributes:
        added: faces that came in this transaction, by id.
        gone: faces that went.
        touched: persons whose name, metadata or expiry changed, or who went.
        expiries: times at which somebody expires who did not before.
    """

    def __init__(self, db: sqlite3.Connection, number: int, info: Collection) -> None:
        self.db, self.number, self.info, self.clock = db, number, info, clock_of(db)
        self.added: list[Faces] = []
        self.gone: list[int] = []
        self.touched: set[int] = set()
        self.expiries: list[str] = []

    @cached_property
    def stored(self) -> StoredCollection:
        """The collection as this transaction sees it."""
        found = records.find_collection(self.db, self.number)
        if found is None:
            raise no_collection(self.info.name)
        return found

    @property
    def current(self) -> Collection:
        """See :class:`plsc.gallery.rows.Rows`, as for all that follows."""
        return self.stored.info

    @cached_property
    def second(self) -> StoredMigration | None:
        """The second space of the collection's faces; None: it has none."""
        return records.find_migration(self.db, self.number)

    @property
    def migration(self) -> Migration | None:
        """The migration of the collection; None: it has no second space."""
        return None if self.second is None else self.second.info

    # --- reads ---

    def find_all(self, ids: Sequence[int]) -> list[Person]:
        """See :class:`plsc.gallery.rows.Rows`, as for all that follows."""
        return [person for id in sorted(ids) for person in self.select("p.id = ?", [id])]

    def find_external(self, external_id: str) -> Person | None:
        """Return the person with an external id, even if its time has come."""
        return next(iter(self.select("p.external_id = ?", [external_id])), None)

    def page(self, after: int, limit: int, filter: Filter | None) -> list[Person]:
        """Return up to ``limit`` persons with ids above ``after`` that match and did not expire, by ascending id."""
        text, values = self._filter_clause(filter)
        condition = f"p.id > ?{text} AND (p.expires IS NULL OR p.expires > ?)"
        return self.select(condition, [after, *values, now(self.clock)], limit)

    def expired(self, limit: int) -> list[Person]:
        """Return up to ``limit`` persons whose time has come, by ascending id."""
        return self.select("p.expires <= ?", [now(self.clock)], limit)

    def select(self, condition: str, values: Sequence[Any], limit: int = -1) -> list[Person]:
        """Return persons with their faces by ascending id; ``condition`` is SQL on ``persons p``, -1 means no limit."""
        text = f"SELECT {_PERSON} FROM persons p WHERE p.collection = ? AND {condition} ORDER BY p.id LIMIT ?"
        return [self._read_person(row) for row in self.db.execute(text, (self.number, *values, limit)).fetchall()]

    def _read_person(self, row: tuple[Any, ...]) -> Person:
        summary = _read_summary(self.db, row)
        created, _, revision, expires = row[4:8]
        about = {"created": created, "revision": revision, "expires": expires}
        faces, keys = self._faces_of(summary.id), self._keys_of(summary.id)
        return Person(**vars(summary), faces=faces, keys=keys, **about)

    def _keys_of(self, person: int) -> dict[int, str]:
        rows = self.db.execute("SELECT face, key, checksum FROM face_keys WHERE person = ?", (person,)).fetchall()
        for face, key, checksum in rows:
            records.require_intact(
                self.db, checksum, records.row_checksum, (person, key, face), f"the key of face {face}"
            )
        return {face: key for face, key, _ in rows}

    def _faces_of(self, person: int) -> tuple[int, ...]:
        text = "SELECT id, collection, checksum FROM faces WHERE person = ? ORDER BY id"
        rows = self.db.execute(text, (person,)).fetchall()
        for id, collection, checksum in rows:
            if not records.is_face(checksum, id, collection, person):
                raise corrupt_row(self.db, f"face {id} is not what was written")
        return tuple(row[0] for row in rows)

    def summaries(self, persons: Sequence[int]) -> dict[int, PersonSummary]:
        """Return those of ``persons`` that exist, also those whose time has come.

        All rows come as one JSON value: sqlite3 releases the interpreter lock for every row it fetches, and with other
        threads busy each return takes up to 5 ms (the interpreter's switch interval).
        """
        text = (
            f"SELECT json_group_array(json_array({_PERSON})) FROM persons p "
            "WHERE +p.collection = ? AND p.id IN (SELECT value FROM json_each(?))"
        )
        try:
            (found,) = self.db.execute(text, (self.number, json.dumps(list(persons)))).fetchone()
            rows = json.loads(found)
        except sqlite3.OperationalError:  # a damaged header can turn a text into bytes, which JSON cannot hold
            text = f"SELECT {_PERSON} FROM persons p WHERE p.collection = ? AND p.id = ?"
            rows = [row for person in persons for row in self.db.execute(text, (self.number, person))]
        return {row[0]: _read_summary(self.db, row) for row in rows}

    def vectors_of(self, persons: Sequence[Person]) -> dict[int, Float32]:
        """Return {person: vectors (n, dim) in the order of ``Person.faces``}."""
        return {person.id: self._vectors(person.faces) for person in persons}

    def _vectors(self, faces: Sequence[int]) -> Float32:
        keys = [face + self.stored.space for face in faces]
        rows = [self.db.execute(_VECTOR, (key,)).fetchone() or (key, None, None) for key in keys]
        return records.decode_vectors(self.db, rows, self.stored.info.dim)

    # --- persons whose time has come ---

    def next_expiry(self) -> str | None:
        """Return the earliest time at which a person expires."""
        text = "SELECT min(expires) FROM persons WHERE collection = ? AND expires IS NOT NULL"
        (found,) = self.db.execute(text, (self.number,)).fetchone()
        if not isinstance(found, str | None):
            raise corrupt_row(self.db, "the time at which a person expires is not what was written")
        return found

    def expired_ids(self) -> list[int]:
        """Return the persons whose time has come."""
        text = "SELECT id FROM persons WHERE collection = ? AND expires <= ?"
        return [row[0] for row in self.db.execute(text, (self.number, now(self.clock)))]

    def expired_faces(self) -> list[int]:
        """Return the faces of the persons whose time has come."""
        text = "SELECT f.id FROM persons p JOIN faces f ON f.person = p.id WHERE p.collection = ? AND p.expires <= ?"
        return [row[0] for row in self.db.execute(text, (self.number, now(self.clock)))]

    # --- changes ---

    def insert(self, persons: Sequence[ValidPerson]) -> list[Person]:
        """Insert ``persons`` and their faces under new ids."""
        if not persons:
            return []
        first, face, created = (
            records.last_id(self.db, "persons") + 1,
            records.last_id(self.db, "faces") + 1,
            now(self.clock),
        )
        made = []
        for id, person in enumerate(persons, first):
            ids = tuple(range(face, face + len(person.vectors)))
            face += len(ids)
            about = (person.name, person.metadata, person.external_id)
            made.append(Person(id, *about, faces=ids, created=created, expires=person.expires))
        self.db.executemany(
            "INSERT INTO persons (id, collection, name, metadata, created, external_id, revision, expires, checksum) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (self._row(person) for person in made),
        )
        self._insert_attributes(made)
        self.expiries += [person.expires for person in made if person.expires is not None]
        owners = np.repeat(np.arange(first, first + len(made)), [len(person.faces) for person in made])
        faces = np.fromiter(chain.from_iterable(person.faces for person in made), np.int64)
        self._insert_faces(Faces(faces, owners, np.concatenate([person.vectors for person in persons])))
        for one, new in zip(made, persons, strict=True):
            self._insert_second(one.id, one.faces, new.second)
        self._count(len(made), len(faces))
        return made

    def insert_faces(self, owner: Person, vectors: Float32, second: Float32 | None) -> list[int]:
        """Insert faces of a person; returns their ids."""
        first = records.last_id(self.db, "faces") + 1
        ids = np.arange(first, first + len(vectors), dtype=np.int64)
        self._insert_faces(Faces(ids, np.full(len(ids), owner.id, dtype=np.int64), vectors))
        self._count(0, len(ids))
        found: list[int] = ids.tolist()
        self._insert_second(owner.id, found, second)
        return found

    def put_keys(self, owner: Person, keys: Mapping[int, str]) -> None:
        """Store keys of faces of a person, which have none."""
        rows = [(owner.id, key, face) for face, key in keys.items()]
        checked = ((*row, records.row_checksum(*row)) for row in rows)
        self.db.executemany("INSERT INTO face_keys (person, key, face, checksum) VALUES (?, ?, ?, ?)", checked)

    def update(self, former: Person, changed: Person) -> None:
        """Store ``changed``; if but its revision is another, no text leaves."""
        row, former_row = self._row(changed), self._row(former)
        if row[:6] != former_row[:6] or changed.expires != former.expires:
            note_left_texts(self.db)
            self._delete_attributes(former)
            self._insert_attributes([changed])
            self.touched.add(former.id)
            self.expiries += [changed.expires] if changed.expires is not None else []
        _, _, name, metadata, _, *others = row
        text = (
            "UPDATE persons SET name = ?, metadata = ?, external_id = ?, revision = ?, expires = ?, checksum = ? "
            "WHERE id = ?"
        )
        self.db.execute(text, (name, metadata, *others, former.id))

    def delete(self, person: Person) -> None:
        """Delete a person's rows and leave a tombstone for each face."""
        note_left_texts(self.db)
        self._delete_attributes(person)
        self.delete_faces(person, person.faces)
        self.db.execute("DELETE FROM persons WHERE id = ?", (person.id,))
        self._count(-1, 0)
        self.touched.add(person.id)

    def delete_faces(self, owner: Person, faces: Sequence[int]) -> None:
        """Delete rows of faces and leave a tombstone for each."""
        for face in faces:
            self._note_leaving("f.id = ?", face)
        if faces:
            note_deletion_time(self.db)
        if faces and self._spaces() != [0]:
            note_left_texts(self.db)  # a second space is not filled in order: SQLite has moved rows of vectors
        self._count_leaving_second(faces)
        for space in self._spaces():
            self._write_tombstones("f.id = ?", faces, space)
        self.db.executemany("DELETE FROM faces WHERE id = ?", ((face,) for face in faces))
        keys = [(owner.id, owner.keys[face]) for face in faces if face in owner.keys]
        if keys:
            note_left_texts(self.db)
            self.db.executemany("DELETE FROM face_keys WHERE person = ? AND key = ?", keys)
        self._count(0, -len(faces))
        self.gone += faces

    def delete_everything(self) -> None:
        """Delete the collection's rows and leave a tombstone for each face."""
        self._note_leaving("f.collection = ?", self.number)
        note_left_texts(self.db)
        note_deletion_time(self.db)
        for space in self._spaces():
            self._write_tombstones("f.collection = ?", [self.number], space)
        self.db.execute("DELETE FROM migrations WHERE collection = ?", (self.number,))
        self.db.execute(
            "DELETE FROM face_keys WHERE person IN (SELECT id FROM persons WHERE collection = ?)", (self.number,)
        )
        for table in ("faces", "attributes", "persons"):
            self.db.execute(f"DELETE FROM {table} WHERE collection = ?", (self.number,))
        self.db.execute("DELETE FROM collections WHERE number = ?", (self.number,))

    def _insert_faces(self, faces: Faces) -> None:
        ids, persons = faces.ids.tolist(), faces.persons.tolist()
        keys = faces.ids + self.stored.space
        blobs = codec_of(self.db).encode(self.db, keys, faces.persons, faces.vectors)
        self.db.executemany(
            "INSERT INTO faces (id, collection, person, checksum) VALUES (?, ?, ?, ?)",
            (
                (id, self.number, person, records.face_checksum(id, self.number, person))
                for id, person in zip(ids, persons, strict=True)
            ),
        )
        self._put_vectors(keys, blobs)
        self.added.append(faces)

    def _put_vectors(self, keys: Int64, blobs: Sequence[bytes], *, is_estimated: bool = False) -> None:
        self.db.executemany(
            "INSERT INTO vectors (face, checksum, vector) VALUES (?, ?, ?)",
            (
                (key, records.vector_checksum(key, blob, is_estimated=is_estimated), blob)
                for key, blob in zip(keys.tolist(), blobs, strict=True)
            ),
        )

    def _spaces(self) -> list[int]:
        return [self.stored.space] if self.second is None else [self.stored.space, self.second.space]

    def _write_tombstones(self, condition: str, values: Iterable[int], space: int) -> None:
        """Write the tombstones of the vectors that faces have in a space."""
        text = (
            "INSERT OR IGNORE INTO forgotten SELECT v.face, f.collection FROM faces f "
            f"JOIN vectors v ON v.face = f.id + ? WHERE {condition}"
        )
        self.db.executemany(text, ((space, value) for value in values))

    def _note_leaving(self, condition: str, value: int) -> None:
        """Tell the codec which vectors leave, where that means more to it than their rows."""
        codec = codec_of(self.db)
        if not codec.has_keys:
            return
        text = (
            "SELECT f.person, v.face, v.checksum, v.vector FROM faces f JOIN vectors v ON v.face = f.id + ? "
            f"WHERE {condition}"
        )
        for person, *row in self.db.execute(text, (self.stored.space, value)):
            codec.leave(person, records.checked_vector(self.db, *row))

    def set_contract(self, contract_id: str) -> None:
        """Store ``contract_id`` as the collection's."""
        self.info = replace(self.info, contract_id=contract_id)
        records.set_contract(self.db, replace(self.stored, info=self.info))

    # --- the second space ---

    def begin_migration(self, migration: Migration) -> None:
        """Give the faces room for vectors of another model."""
        self._store_migration(StoredMigration(self.number, migration, records.new_space(self.db)))

    def update_migration(self, migration: Migration) -> None:
        """Store ``migration`` in place of the former one."""
        assert self.second is not None, "it was checked"
        self._store_migration(replace(self.second, info=migration))

    def _store_migration(self, stored: StoredMigration) -> None:
        records.put_migration(self.db, stored)
        self.second = stored

    def end_migration(self) -> None:
        """Delete the vectors in the second space; their bytes leave the files as those of deleted faces do."""
        assert self.second is not None, "it was checked"
        self._write_tombstones("f.collection = ?", [self.number], self.second.space)
        self.db.execute("DELETE FROM migrations WHERE collection = ?", (self.number,))
        note_deletion_time(self.db)
        note_left_texts(self.db)  # SQLite may have moved rows of vectors, and left copies in the gaps of pages
        self.second = None

    def _insert_second(self, person: int, faces: Sequence[int], vectors: Float32 | None) -> None:
        if vectors is not None and self.second is not None:
            self.put_second(person, faces, vectors, is_estimated=False)

    def put_second(self, person: int, faces: Sequence[int], vectors: Float32, *, is_estimated: bool) -> None:
        """Store vectors (n, dim) of faces of a person in the second space, in place of those that they have there."""
        assert self.second is not None, "it was checked"
        keys = np.array(faces, dtype=np.int64) + self.second.space
        blobs = codec_of(self.db).encode(self.db, keys, np.full(len(keys), person, dtype=np.int64), vectors)
        self._count_leaving_second(faces)
        self.db.executemany("DELETE FROM vectors WHERE face = ?", ((key,) for key in keys.tolist()))
        self._put_vectors(keys, blobs, is_estimated=is_estimated)
        self._count_second(len(keys), len(keys) if is_estimated else 0)

    def second_vectors(self, persons: Sequence[Person]) -> dict[int, SecondVector]:
        """Return {face: its vector in the second space}, of the faces of ``persons`` that have one."""
        assert self.second is not None, "it was checked"
        faces = [face for person in persons for face in person.faces]
        keyed = ((face, self.db.execute(_VECTOR, (face + self.second.space,)).fetchone()) for face in faces)
        rows = {face: row for face, row in keyed if row is not None}
        vectors = records.decode_vectors(self.db, list(rows.values()), self.second.info.dim)
        return {
            face: SecondVector(vector, row[1].startswith(records.ESTIMATED))
            for (face, row), vector in zip(rows.items(), vectors, strict=True)
        }

    def estimated_faces(self, persons: Sequence[Person]) -> set[int]:
        """Return the faces of ``persons`` whose searched vectors are estimates."""
        faces = [face for person in persons for face in person.faces]
        marks = {face: self.db.execute(_MARK, (face + self.stored.space,)).fetchone() for face in faces}
        return {face for face, mark in marks.items() if mark == (records.ESTIMATED,)}

    def count_second(self) -> tuple[int, int]:
        """Return how many faces have no vector in the second space, and how many an estimate."""
        filled, estimated = records.read_second_counts(self.db, self.number)
        return self.stored.info.faces - filled, estimated

    def _count_leaving_second(self, faces: Sequence[int]) -> None:
        """Count the second vectors of faces, which leave."""
        if self.second is None or not faces:
            return
        keys = [face + self.second.space for face in faces]
        marks = [row[0] for key in keys if (row := self.db.execute(_MARK, (key,)).fetchone()) is not None]
        self._count_second(-len(marks), -marks.count(records.ESTIMATED))

    def _count_second(self, filled: int, estimated: int) -> None:
        text = "UPDATE migrations SET filled = filled + ?, estimated = estimated + ? WHERE collection = ?"
        self.db.execute(text, (filled, estimated, self.number))

    def lacking(self, after: int, limit: int, *, estimated: bool) -> list[int]:
        """Return up to ``limit`` persons above ``after`` with a face that has no vector in the second space.

        Args:
            after: an id.
            limit: how many at most.
            estimated: return those with an estimate, too.
        """
        assert self.second is not None, "it was checked"
        also = f" OR substr(v.checksum, 1, 1) = x'{records.ESTIMATED.hex()}'" if estimated else ""
        text = (
            "SELECT DISTINCT f.person FROM faces f LEFT JOIN vectors v ON v.face = f.id + ? "
            f"WHERE +f.collection = ? AND f.person > ? AND (v.face IS NULL{also}) ORDER BY f.person LIMIT ?"
        )
        rows = self.db.execute(text, (self.second.space, self.number, after, limit)).fetchall()
        return [row[0] for row in rows]

    def _count(self, persons: int, faces: int) -> None:
        text = "UPDATE collections SET persons = persons + ?, faces = faces + ? WHERE number = ?"
        self.db.execute(text, (persons, faces, self.number))

    def _row(self, person: Person) -> tuple[Any, ...]:
        metadata = json.dumps(dict(person.metadata), ensure_ascii=False, allow_nan=False)
        about = (person.external_id, person.revision, person.expires)
        values = (person.id, self.number, person.name, metadata, person.created, *about)
        return *values, records.person_checksum(*values)

    # --- metadata as filters compare it ---

    def _insert_attributes(self, persons: Iterable[Person]) -> None:
        rows = chain.from_iterable(map(self._attributes, persons))
        self.db.executemany("INSERT INTO attributes VALUES (?, ?, ?, ?, ?)", rows)

    def _delete_attributes(self, person: Person) -> None:
        text = "DELETE FROM attributes WHERE collection = ? AND key = ? AND kind = ? AND value = ? AND person = ?"
        self.db.executemany(text, self._attributes(person))

    def count_attributes(self, person: Person) -> int:
        """Count the entries of a person's metadata that filters see exactly as they are."""
        text = (
            "SELECT count(*) FROM attributes WHERE collection = ? AND key = ? AND kind = ? AND value IS ? "
            "AND person = ?"
        )
        return sum(int(self.db.execute(text, row).fetchone()[0]) for row in self._attributes(person))

    def _attributes(self, person: Person) -> Iterator[tuple[Any, ...]]:
        for key, value in person.metadata.items():
            yield self.number, key, kind_of(value), value, person.id

    def narrow(self, persons: Int64 | None, condition: Condition) -> Int64:
        """Return those of ``persons`` (None: everybody) who match a condition, ascending.

        Sets are joined here and not in SQL, which would look each person up in all of them: that takes three times as
        long, and is one piece.
        """
        self.db.execute("DELETE FROM temp.wanted")
        found = self._ids(*self._matching_persons(0, condition))
        if not condition.excludes:
            return found if persons is None else np.intersect1d(persons, found, assume_unique=True)
        if persons is None:
            persons = self._ids("SELECT id AS person FROM persons WHERE collection = ?", [self.number])
        return np.setdiff1d(persons, found, assume_unique=True)

    def _ids(self, select: str, values: Sequence[Any]) -> Int64:
        """Return what ``select`` has as person, ascending; each once."""
        # As one text: sqlite3 releases the interpreter lock for each row that it fetches.
        (text,) = self.db.execute(f"SELECT group_concat(person) FROM ({select})", values).fetchone()
        return np.sort(np.fromstring(text or "", np.int64, sep=","))

    def _filter_clause(self, filter: Filter | None) -> tuple[str, list[Any]]:
        """Return SQL that begins with AND, or "" without a filter, and its parameters.

        It is true for persons ``p`` that match. Values are parameters, never part of the text; those after "in" are put
        into this connection's table ``wanted``, so the clause is valid until the next call.
        """
        self.db.execute("DELETE FROM temp.wanted")
        text, parameters = "", list[Any]()
        for index, condition in enumerate(filter.conditions if filter else ()):
            inner, values = self._matching_persons(index, condition)
            text += f" AND p.id {'NOT ' if condition.excludes else ''}IN ({inner})"
            parameters += values
        return text, parameters

    def _matching_persons(self, index: int, condition: Condition) -> tuple[str, list[Any]]:
        """Return a SELECT of the persons that have the key with a value that compares as the condition says."""
        key, value = condition.key, condition.value
        if condition.operator == "in":
            rows = ((index, kind_of(member), member) for member in value)
            self.db.executemany("INSERT OR IGNORE INTO temp.wanted VALUES (?, ?, ?)", rows)
            return (
                "SELECT a.person FROM temp.wanted w CROSS JOIN attributes a ON a.kind = w.kind AND a.value = w.value "
                "WHERE w.condition = ? AND a.collection = ? AND a.key = ?"
            ), [index, self.number, key]
        start = "SELECT a.person FROM attributes a WHERE a.collection = ? AND a.key = ?"
        if condition.operator == "exists":
            return start, [self.number, key]
        sign = COMPARISONS.get(condition.operator, "=")  # "ne" selects the equal ones: the caller excludes them
        return f"{start} AND a.kind = ? AND a.value {sign} ?", [self.number, key, kind_of(value), value]


def _read_summary(db: sqlite3.Connection, row: Sequence[Any]) -> PersonSummary:
    *values, checksum = row
    id, _, name, metadata, _, external_id, _, _ = values
    records.require_intact(db, checksum, records.person_checksum, values, f"person {id}")
    return PersonSummary(id, name, json.loads(metadata), external_id)
