"""A collection in Milvus: what readers may see of its rows, and a change that is written as new rows and committed."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from plsc.errors import IntegrityError, UsageError
from plsc.gallery.filters import Filter
from plsc.gallery.milvus.expressions import digest, encode_metadata, one_of, to_expression
from plsc.gallery.milvus.registry import Entry, Gone
from plsc.gallery.milvus.requests import FACES, MAX_ROWS, MAX_TEXT, MilvusServer, Row
from plsc.gallery.person_search import Neighbours, group_by_person, num_candidates
from plsc.gallery.rows import MovableRows
from plsc.gallery.second_space import exchanged
from plsc.gallery.validation import LENGTH_TOLERANCE, ValidPerson, miscounted, now, number_persons
from plsc.gallery.values import Clock, Float32, Match, Migration, Person, SecondVector

_PAGE_PERSONS = 500  # whose ids stand in an expression
_GONE_AT_ONCE = 1000  # ranges of rows, and persons, in an entry; 65,535 bytes hold twice as many
_NEVER = "~"  # when it expires who does not: behind every time
_FACE_FIELDS = ("row", "face", "person", "key", "estimated", "expires", "fits", "vector")


class MilvusRows(MovableRows):
    """A collection as its registry entry lets readers see it, or in a change, whose rows wait here for the commit.

    A change reads what was there before it: none of the methods of :class:`plsc.gallery.rows.Rows` reads what another
    one has written in the same change, but for the faces of a person, which are changed where they wait.

    Attributes:
        entry: says which rows count; in a change, as it will be after it.
    """

    def __init__(self, server: MilvusServer, entry: Entry, clock: Clock) -> None:
        self._server, self.entry, self.info, self.clock = server, entry, entry.info, clock
        self._before = entry
        self._persons: dict[int, Person] = {}  # to be written
        self._faces: dict[int, dict[int, Row]] = {}  # space -> face -> row to be written
        self._row_of: dict[int, int] = {}  # person -> the row that was read
        self._gone_rows: set[int] = set()
        self._gone_persons: list[int] = []
        self._gone_spaces: list[int] = []

    # --- persons and vectors ---

    def find_all(self, ids: Sequence[int]) -> list[Person]:
        """See :class:`plsc.gallery.rows.Rows`, as for all that follows."""
        parts = [ids[start : start + _PAGE_PERSONS] for start in range(0, len(ids), _PAGE_PERSONS)]
        return self._with_faces([row for part in parts for row in self._query_persons(one_of("person", part))])

    def find_external(self, external_id: str) -> Person | None:
        """Return the person with an external id, even if its time has come."""
        found = self._with_faces(self._query_persons(f'external == "{digest(external_id)}"'))
        return next((one for one in found if one.external_id == external_id), None)

    def page(self, after: int, limit: int, filter: Filter | None) -> list[Person]:
        """Return up to ``limit`` persons with ids above ``after`` that match and did not expire, by ascending id."""
        return self._with_faces(list(self._list_persons(after, self._alive, to_expression(filter), limit=limit)))

    def expired(self, limit: int) -> list[Person]:
        """Return up to ``limit`` persons whose time has come."""
        return self._with_faces(list(self._list_persons(0, f'expires <= "{now(self.clock)}"', limit=limit)))

    def has_expired(self) -> bool:
        """Tell whether the time of somebody has come."""
        return self._server.count(self._before.persons, self._visible(f'expires <= "{now(self.clock)}"')) > 0

    @property
    def _alive(self) -> str:
        return f'expires > "{now(self.clock)}"'

    def _visible(self, *conditions: str) -> str:
        return self._before.visible(*conditions)

    def _query_persons(self, condition: str) -> list[Row]:
        return self._server.query(self._before.persons, self._visible(condition), ["row", "person", "body"])

    def _list_persons(self, after: int, *conditions: str, limit: int | None = None) -> Iterator[Row]:
        """Yield rows of persons by ascending id, in which order their primary keys are."""
        expression = self._visible(f"person > {after}", *conditions)
        found = self._server.iterate(self._before.persons, expression, ["row", "person", "body"], limit)
        return islice(found, limit)

    def _with_faces(self, rows: list[Row]) -> list[Person]:
        """Return the persons of rows by ascending id."""
        faces: dict[int, dict[int, str]] = {row["person"]: {} for row in rows}
        ids = list(faces)
        for start in range(0, len(ids), _PAGE_PERSONS):
            condition = one_of("person", ids[start : start + _PAGE_PERSONS])
            for face in self._list_faces(self._before.spaces[0], condition, ("face", "person", "key")):
                faces[face["person"]][face["face"]] = face["key"]
        self._row_of |= {row["person"]: row["row"] for row in rows}
        return [_read_person(row, faces[row["person"]]) for row in sorted(rows, key=lambda row: int(row["person"]))]

    def _list_faces(self, space: int, condition: str, fields: Sequence[str] = _FACE_FIELDS) -> Iterator[Row]:
        return self._server.iterate(self._before.faces(space), self._visible(condition), fields)

    def vectors_of(self, persons: Sequence[Person]) -> dict[int, Float32]:
        """Return {person: vectors (n, dim) in the order of the faces' ids}."""
        found: dict[int, dict[int, Any]] = {person.id: {} for person in persons}
        condition = one_of("person", found)
        for row in self._list_faces(self._before.spaces[0], condition, ("row", "face", "person", "vector")):
            found[row["person"]][row["face"]] = row["vector"]
        return {
            id: np.array([own[face] for face in sorted(own)], dtype=np.float32).reshape(-1, self.info.dim)
            for id, own in found.items()
        }

    # --- searches and checks ---

    def search(self, queries: Float32, k: int, threshold: float, filter: Filter | None) -> list[list[Match]]:
        """Find, for each of ``queries`` (Q, dim) of unit length, the ``k`` most similar persons.

        All queries' first candidates come by one request, and more where those are of too few persons.
        """
        conditions, faces = [self._alive, to_expression(filter)], self._before.faces(self._before.spaces[0])

        def fetch(query: Float32, first: Neighbours, count: int, excluded: list[int]) -> Neighbours:
            if not excluded:
                return first
            others = self._visible(*conditions, f"not ({one_of('person', excluded)})")
            return self._server.search(faces, query[None], count, others)[0]

        candidates = self._server.search(faces, queries, num_candidates(k, MAX_ROWS), self._visible(*conditions))
        fetches = [partial(fetch, query, first) for query, first in zip(queries, candidates, strict=True)]
        return [group_by_person(one, k, threshold, limit=MAX_ROWS) for one in fetches]

    def check(self) -> None:
        """Read every row; :class:`IntegrityError` names what is damaged or miscounted."""
        persons = faces = after = 0
        while page := self._with_faces(list(self._list_persons(after, limit=_PAGE_PERSONS))):
            vectors = self.vectors_of(page)
            for person in page:
                own = vectors[person.id]
                persons, faces = persons + 1, faces + len(own)
                is_unit = np.abs(np.linalg.norm(own, axis=1) - 1) < LENGTH_TOLERANCE
                if len(own) != len(person.faces) or not is_unit.all():
                    raise IntegrityError(f"the faces of person {person.id} of collection {self.info.name} are damaged")
                if max([person.id, *person.faces]) >= self.entry.next_id:
                    raise IntegrityError(f"person {person.id} of collection {self.info.name} lies beyond the ids given")
            after = page[-1].id
        if (persons, faces) != (self.info.persons, self.info.faces):
            raise miscounted(self.info, persons, faces)

    # --- changes ---

    def insert(self, persons: Sequence[ValidPerson]) -> list[Person]:
        """Insert persons with their faces under the next ids."""
        made = number_persons(persons, self.entry.next_id, self.clock)
        for person, valid in zip(made, persons, strict=True):
            self._persons[person.id] = person
            self._add_faces(person, person.faces, valid.vectors, valid.second)
        self._count(len(made), sum(len(person.faces) for person in made), ids=True)
        return made

    def insert_faces(self, owner: Person, vectors: Float32, second: Float32 | None) -> list[int]:
        """Insert faces of a person under the next ids, which are returned."""
        faces = list(range(self.entry.next_id, self.entry.next_id + len(vectors)))
        self._add_faces(owner, faces, vectors, second)
        self._count(0, len(faces), ids=True)
        return faces

    def update(self, former: Person, changed: Person) -> None:
        """Store the name, metadata, external id, expiry and revision of ``changed``."""
        self._replace(former.id)
        self._persons[former.id] = changed
        about = _face_about(changed)
        if about != _face_about(former):
            self._rewrite_faces(one_of("person", [former.id]))
            for rows in self._faces.values():
                for row in rows.values():
                    row.update(about if row["person"] == former.id else {})

    def delete(self, person: Person) -> None:
        """Delete a person with all faces."""
        self._gone_persons.append(person.id)
        self._count(-1, -len(person.faces))

    def delete_faces(self, owner: Person, faces: Sequence[int]) -> None:
        """Delete faces of a person."""
        for start in range(0, len(faces), _PAGE_PERSONS):
            condition = one_of("face", faces[start : start + _PAGE_PERSONS])
            for space in self.entry.spaces:
                self._gone_rows |= {row["row"] for row in self._list_faces(space, condition, ("row", "face"))}
        self._count(0, -len(faces))

    def put_keys(self, owner: Person, keys: Mapping[int, str]) -> None:
        """Store keys of faces of a person, which have none."""
        waiting = {face for rows in self._faces.values() for face in rows}
        if stored := [face for face in keys if face not in waiting]:
            self._rewrite_faces(one_of("face", stored))
        for rows in self._faces.values():
            for face in keys.keys() & rows.keys():
                rows[face]["key"] = keys[face]

    def set_contract(self, contract_id: str) -> None:
        """Have the collection's contract id be another one after this change."""
        self._set_info(contract_id=contract_id)

    def _count(self, persons: int, faces: int, *, ids: bool = False) -> None:
        """Count rows that come or go; with ``ids`` they take the next ids."""
        self._set_info(persons=self.info.persons + persons, faces=self.info.faces + faces)
        if ids:
            self.entry = replace(self.entry, next_id=self.entry.next_id + persons + faces)

    def _set_info(self, **changed: Any) -> None:
        self.info = replace(self.info, **changed)
        self.entry = replace(self.entry, info=self.info)

    def _replace(self, person: int) -> None:
        """Let the stored row of a person go; it was read before, unless it waits."""
        if person not in self._persons:
            self._gone_rows.add(self._row_of[person])

    def _add_faces(self, owner: Person, faces: Sequence[int], vectors: Float32, second: Float32 | None) -> None:
        for space, some in zip(self.entry.spaces, (vectors, second), strict=False):
            for face, vector in zip(faces, [] if some is None else some, strict=some is not None):
                self._add_face(space, owner, face, vector)

    def _add_face(self, space: int, owner: Person, face: int, vector: Float32, *, is_estimated: bool = False) -> None:
        about = {**_face_about(owner), "key": owner.keys.get(face, ""), "estimated": int(is_estimated)}
        row = {"face": face, "person": owner.id, **about, "vector": vector.tolist()}
        self._faces.setdefault(space, {})[face] = row

    def _rewrite_faces(self, condition: str) -> None:
        """Let stored faces in all spaces go, and have the same ones wait to be written."""
        for space in self.entry.spaces:
            for row in self._list_faces(space, condition):
                if row["row"] not in self._gone_rows:
                    self._gone_rows.add(row["row"])
                    kept = {field: row[field] for field in _FACE_FIELDS if field != "row"}
                    self._faces.setdefault(space, {})[row["face"]] = kept

    # --- the commit ---

    @property
    def has_changed(self) -> bool:
        """True if there is something to commit."""
        return self.entry != self._before or bool(self._persons or self._faces or self._gone_rows or self._gone_persons)

    def write(self, save: Callable[[Entry], None]) -> None:
        """Write the rows that wait, which count for nobody yet, and then the entry by ``save``, the commit."""
        row = self.entry.next_row
        persons, faces = [], dict[int, list[Row]]()
        for space, rows in self._faces.items():
            for face in rows.values():
                faces.setdefault(space, []).append({"row": row, **face})
                row += 1
        for person in self._persons.values():
            persons.append(_person_row(person, row))
            row += 1
        gone = Gone(now(self.clock), _ranges(self._gone_rows), self._gone_persons, self._gone_spaces)
        is_any = gone.rows or gone.persons or gone.spaces
        entry = replace(self.entry, next_row=row, gone=(*self.entry.gone, gone) if is_any else self.entry.gone)
        entry.to_body()  # refuses what the registry has no room for, before anything is written
        for space in {*entry.spaces} - {*self._before.spaces}:
            self._server.create(entry.faces(space), FACES, self._dim_of(space))
        for space, some in faces.items():
            self._server.write(entry.faces(space), some)
        self._server.write(entry.persons, persons)
        save(entry)
        self.entry = entry

    def take_row(self) -> int:
        """Return the number of a row of this change that is kept elsewhere."""
        self.entry = replace(self.entry, next_row=self.entry.next_row + 1)
        return self.entry.next_row - 1

    @property
    def is_crowded(self) -> bool:
        """True if the entry would name more that is gone than it should."""
        named = sum(len(one.rows) + len(one.persons) for one in self.entry.gone)
        return named + len(self._gone_rows) + len(self._gone_persons) > _GONE_AT_ONCE

    def purge(self, before: str) -> list[Gone]:
        """Delete rows that were gone before a time, and forget them with the next commit; returns what they were."""
        due = [one for one in self.entry.gone if one.at <= before]
        for one in due:
            if one.rows or one.persons:
                for name in (self.entry.persons, *map(self.entry.faces, self.entry.spaces)):
                    self._server.delete(name, one.condition())
            for space in one.spaces:
                self._server.drop(self.entry.faces(space))
        self.entry = replace(self.entry, gone=tuple(one for one in self.entry.gone if one not in due))
        return due

    # --- the second space ---

    @property
    def migration(self) -> Migration | None:
        """See :class:`plsc.gallery.rows.Rows`, as for all that follows."""
        return self.entry.migration

    def begin_migration(self, migration: Migration) -> None:
        """Give the faces room for vectors of another model."""
        space = self.entry.next_space
        spaces = (self.entry.spaces[0], space)
        self.entry = replace(self.entry, spaces=spaces, next_space=space + 1, migration=migration)

    def update_migration(self, migration: Migration) -> None:
        """Store ``migration`` in place of the former one."""
        self.entry = replace(self.entry, migration=migration)

    def end_migration(self) -> None:
        """Delete the second space with its vectors."""
        self._gone_spaces.append(self.entry.spaces[1])
        self.entry = replace(self.entry, spaces=self.entry.spaces[:1], migration=None)

    def exchange_spaces(self) -> None:
        """Make the second space the searched one, and the reverse: the entry says which is which."""
        assert self.entry.migration is not None, "it was checked"
        self.info, migration = exchanged(self.info, self.entry.migration)
        self.entry = replace(self.entry, info=self.info, spaces=self.entry.spaces[::-1], migration=migration)

    def put_second(self, person: int, faces: Sequence[int], vectors: Float32, *, is_estimated: bool) -> None:
        """Store vectors (n, dim) of faces of a person in the second space, in place of those that they have there."""
        (owner,) = self.find_all([person])
        space = self.entry.spaces[1]
        stored = self._list_faces(space, one_of("person", [person]), ("row", "face"))
        self._gone_rows |= {row["row"] for row in stored if row["face"] in faces}
        for face, vector in zip(faces, vectors, strict=True):
            self._add_face(space, owner, face, vector, is_estimated=is_estimated)

    def second_vectors(self, persons: Sequence[Person]) -> dict[int, SecondVector]:
        """Return {face: its vector in the second space}, of the faces of ``persons`` that have one."""
        condition = one_of("person", [person.id for person in persons])
        rows = self._list_faces(self._before.spaces[1], condition, ("row", "face", "estimated", "vector"))
        return {
            row["face"]: SecondVector(np.array(row["vector"], dtype=np.float32), bool(row["estimated"])) for row in rows
        }

    def estimated_faces(self, persons: Sequence[Person]) -> set[int]:
        """Return the faces of ``persons`` whose searched vectors are estimates."""
        condition = f"({one_of('person', [person.id for person in persons])}) and estimated == 1"
        return {row["face"] for row in self._list_faces(self._before.spaces[0], condition, ("row", "face"))}

    def count_second(self) -> tuple[int, int]:
        """Return how many faces have no vector in the second space, and how many an estimate."""
        second = self._before.faces(self._before.spaces[1])
        counts = [self._server.count(second, self._visible(condition)) for condition in ("", "estimated == 1")]
        return self._before.info.faces - counts[0], counts[1]

    def lacking(self, after: int, limit: int, *, estimated: bool) -> list[int]:
        """Return up to ``limit`` persons above ``after`` with a face that has no vector in the second space."""
        found: list[int] = []
        while len(found) < limit:
            ids = [row["person"] for row in self._list_persons(after, limit=_PAGE_PERSONS)]
            if not ids:
                break
            after, condition = ids[-1], one_of("person", ids)
            own = {row["face"]: row["person"] for row in self._list_faces(self._before.spaces[0], condition, _OWNED)}
            filled = self._list_faces(self._before.spaces[1], condition, (*_OWNED, "estimated"))
            has = {row["face"] for row in filled if not (estimated and row["estimated"])}
            found += sorted({person for face, person in own.items() if face not in has})
        return found[:limit]

    def _dim_of(self, space: int) -> int:
        if space == self.entry.spaces[0]:
            return self.info.dim
        assert self.entry.migration is not None, "there is a second space"
        return self.entry.migration.dim


_OWNED = ("row", "face", "person")


def _ranges(rows: set[int]) -> list[list[int]]:
    """Return the first and the last of each run of numbers."""
    found: list[list[int]] = []
    for row in sorted(rows):
        if found and found[-1][1] == row - 1:
            found[-1][1] = row
        else:
            found.append([row, row])
    return found


def _face_about(person: Person) -> Row:
    """Return what a face's row has of its person."""
    return {"fits": encode_metadata(person.metadata), "expires": person.expires or _NEVER}


def _person_row(person: Person, row: int) -> Row:
    about = [person.name, person.metadata, person.created, person.external_id, person.revision, person.expires]
    body, fits = json.dumps(about, ensure_ascii=False), _face_about(person)
    if max(len(body.encode()), len(json.dumps(fits["fits"]))) > MAX_TEXT:
        raise UsageError(
            f"the name and metadata of a person take more than the {MAX_TEXT} bytes that Milvus keeps; shorten them"
        )
    external = "" if person.external_id is None else digest(person.external_id)
    id = f"{person.id:019d}{row:019d}"
    return {"id": id, "row": row, "person": person.id, "external": external, **fits, "body": body}


def _read_person(row: Row, faces: Mapping[int, str]) -> Person:
    name, metadata, created, external_id, revision, expires = json.loads(row["body"])
    about: Any = {"created": created, "revision": revision, "expires": expires}
    keys = {face: key for face, key in sorted(faces.items()) if key}
    return Person(row["person"], name, metadata, external_id, faces=tuple(sorted(faces)), keys=keys, **about)
