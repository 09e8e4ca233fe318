"""The registry of a gallery in Milvus: an entry for each collection, and the writer lease."""

import json
import secrets
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import NamedTuple

from plsc.errors import StorageError, UsageError
from plsc.gallery.milvus.expressions import all_of, any_of, one_of
from plsc.gallery.milvus.requests import MAX_TEXT, REGISTRY, MilvusServer, Row
from plsc.gallery.validation import is_collection_name, no_collection, now
from plsc.gallery.values import Clock, Collection, Migration

GRACE = timedelta(seconds=60)  # that rows stay after they are gone, for readers who began before
_RENEWED = timedelta(seconds=60)  # between two signs of life of the writer
_DEAD = timedelta(seconds=300)  # without one, after which others delete what expired
_WRITER = "0"  # the row that names the writing process; no collection's name begins with a digit
_LISTED = 64  # rows in turn that stand in an expression one by one, below so many
_EPOCH_BITS = 32  # rows are numbered from epoch << 32 on
_ANOTHER = "another process writes to this Milvus store now: open it again to take over"

_Ranges = list[list[int]]


class Gone(NamedTuple):
    """What readers see no more from some moment on, and is still there for those who began before.

    Attributes:
        at: the moment, ISO 8601, UTC.
        rows: first and last number of rows in turn.
        persons: ids of persons, with all their rows.
        spaces: numbers of spaces.
    """

    at: str
    rows: _Ranges
    persons: list[int]
    spaces: list[int]

    def condition(self) -> str:
        """Return the condition that is true for these rows."""
        single = [row for first, last in self.rows if last - first < _LISTED for row in range(first, last + 1)]
        parts = [f"row >= {first} and row <= {last}" for first, last in self.rows if last - first >= _LISTED]
        parts += [one_of("row", single)] if single else []
        return any_of(parts + ([one_of("person", self.persons)] if self.persons else []))


@dataclass(frozen=True)
class Entry:
    """A gallery's collection as the registry has it: the state that all readers go by.

    Attributes:
        key: part of the names of its collections of Milvus.
        info: the collection with its counts.
        next_id: the next id of a person or a face.
        next_row: rows with this number or a higher one do not count: their change is not committed.
        spaces: numbers of the searched space, and, during a migration, of the second one.
        next_space: the next number of a space.
        migration: see :class:`plsc.gallery.values.Migration`.
        gone: what no reader sees any more.
    """

    key: str
    info: Collection
    next_id: int
    next_row: int
    spaces: tuple[int, ...] = (0,)
    next_space: int = 1
    migration: Migration | None = None
    gone: tuple[Gone, ...] = ()

    @property
    def persons(self) -> str:
        """Milvus' collection of the persons."""
        return f"plsc_persons_{self.key}"

    def faces(self, space: int) -> str:
        """Return the name of Milvus' collection of the faces with vectors in a space."""
        return f"plsc_faces_{self.key}_{space}"

    @property
    def names(self) -> list[str]:
        """All of Milvus' collections that belong to it."""
        return [self.persons, *map(self.faces, [*self.spaces, *(space for one in self.gone for space in one.spaces)])]

    def visible(self, *conditions: str) -> str:
        """Return the expression of the rows that count and meet ``conditions``."""
        rows = [each for one in self.gone for each in one.rows]
        gone = Gone("", rows, [each for one in self.gone for each in one.persons], [])
        hidden = f"not ({gone.condition()})" if rows or gone.persons else ""
        return all_of([f"row < {self.next_row}", hidden, *conditions])

    def counts(self, row: int) -> bool:
        """Tell whether the change that wrote a row was committed and the row is not gone."""
        gone = (first <= row <= last for one in self.gone for first, last in one.rows)
        return row < self.next_row and not any(gone)

    def in_epoch(self, epoch: int, at: str) -> "Entry":
        """Return the entry at the beginning of an epoch: what former ones left uncommitted never counts."""
        first = epoch << _EPOCH_BITS
        return replace(self, next_row=first, gone=(*self.gone, Gone(at, [[self.next_row, first - 1]], [], [])))

    def to_body(self) -> str:
        """Return the entry as JSON; :class:`UsageError` if Milvus has no room for it."""
        migration = None if self.migration is None else list(vars(self.migration).values())
        ids = [self.next_id, self.next_row, self.spaces, self.next_space]
        body = json.dumps([self.key, list(vars(self.info).values()), *ids, migration, self.gone], separators=(",", ":"))
        if len(body) > MAX_TEXT:
            raise UsageError("one change touches more faces than Milvus can note at once; make it in several")
        return body

    @classmethod
    def from_body(cls, body: str) -> "Entry":
        """Return the entry of a JSON text."""
        key, info, next_id, next_row, spaces, next_space, migration, gone = json.loads(body)
        moved = None if migration is None else Migration(*migration)
        return cls(
            key,
            Collection(*info),
            next_id,
            next_row,
            tuple(spaces),
            next_space,
            moved,
            tuple(Gone(*one) for one in gone),
        )


class Registry:
    """The entries in the registry, and this process's right to write them: the lease, in an epoch of its own."""

    def __init__(self, server: MilvusServer) -> None:
        self._server = server
        self._process = uuid.uuid4().hex
        self._epoch: int | None = None  # None: this process may not write, or sent what may still arrive
        self._held = False

    # --- reading ---

    def entries(self, names: Sequence[str] | None = None) -> dict[str, Entry]:
        """Return entries by name: those of ``names``, or all."""
        return self._read(names)[1]

    def entry(self, name: str) -> Entry:
        """Return one entry; :class:`NotFoundError` if there is none."""
        found = self.entries([name]).get(name) if is_collection_name(name) else None
        if found is None:
            raise no_collection(name)
        return found

    def _read(self, names: Sequence[str] | None = None) -> tuple[Row, dict[str, Entry]]:
        """Return what the lease's row says, and entries of the epoch that counts."""
        expression = 'name != ""' if names is None else f"name in {json.dumps([_WRITER, *names])}"
        rows = self._server.query(REGISTRY, expression, ["name", "epoch", "body"])
        writer: Row = next((json.loads(row["body"]) for row in rows if row["name"] == _WRITER), {})
        found = {
            row["name"]: Entry.from_body(row["body"])
            for row in sorted(rows, key=lambda row: str(row["name"]))
            if row["name"] != _WRITER and row["epoch"] == writer.get("counts")
        }
        return writer, found

    # --- the lease ---

    @property
    def first_row(self) -> int:
        """The number of the first row in this process's epoch."""
        assert self._epoch is not None, "the lease is held"
        return self._epoch << _EPOCH_BITS

    def hold(self, clock: Clock) -> None:
        """Become the process that writes, or make sure of it; :class:`StorageError` if another one became it since."""
        writer = self._read([])[0]
        if writer.get("process") != self._process:
            if self._held and not _is_free(writer, clock):
                raise StorageError(_ANOTHER)
            self._epoch = None
        if self._epoch is None:
            self._begin_epoch(writer, clock)
        elif writer["renewed"] < now(clock, -_RENEWED):
            self._write_lease(self._epoch, self._epoch, clock)

    def confirm(self) -> None:
        """Raise :class:`StorageError` unless this process has held the lease until now."""
        if self._read([])[0].get("process") != self._process:
            raise StorageError(_ANOTHER)

    def distrust(self) -> None:
        """Begin a new epoch before the next change: a request of this one failed, and may still arrive."""
        self._epoch = None

    def may_tidy(self, clock: Clock) -> bool:
        """Tell whether this process is the one that deletes what has expired: the writer, unless that is dead."""
        writer = self._read([])[0]
        return bool(writer) and (writer["process"] == self._process or _is_free(writer, clock))

    def release(self, clock: Clock) -> None:
        """Give the lease back, if this process holds it."""
        if self._epoch is not None and self._read([])[0].get("process") == self._process:
            self._write_lease(self._epoch, self._epoch, clock, process="")
        self._epoch, self._held = None, False

    def _begin_epoch(self, writer: Row, clock: Clock) -> None:
        # Random: of two processes that take the lease at once, neither must count the other's rows.
        epoch = int(writer.get("epoch", 0)) + 1 + secrets.randbelow(1 << 10)
        self._write_lease(epoch, writer.get("counts", epoch), clock)
        self._held = True
        entries = self.entries()
        begun = {name: entry.in_epoch(epoch, now(clock)) for name, entry in entries.items()}
        self._server.write(REGISTRY, [_row(name, epoch, entry.to_body()) for name, entry in begun.items()])
        self.confirm()
        self._write_lease(epoch, epoch, clock)
        self._epoch = epoch
        self._server.delete(REGISTRY, f'epoch < {epoch} and name != "{_WRITER}"')
        known = {name for entry in begun.values() for name in entry.names}
        for name in self._server.names():
            if name.startswith(("plsc_persons_", "plsc_faces_")) and name not in known:
                self._server.drop(name)  # of a collection whose creation or deletion was cut short

    def _write_lease(self, epoch: int, counts: int, clock: Clock, process: str | None = None) -> None:
        process = self._process if process is None else process
        body = {"process": process, "epoch": epoch, "counts": counts, "renewed": now(clock)}
        self._server.write(REGISTRY, [{"id": _WRITER, "name": _WRITER, "epoch": 0, "body": json.dumps(body)}])

    # --- writing ---

    def save(self, entry: Entry) -> None:
        """Commit: write an entry of the epoch of this process, by one request."""
        assert self._epoch is not None, "the lease is held"
        self._server.write(REGISTRY, [_row(entry.info.name, self._epoch, entry.to_body())])
        self.confirm()

    def delete(self, name: str) -> None:
        """Delete an entry."""
        self._server.delete(REGISTRY, f'id in ["{name}/{self._epoch}"]')
        self.confirm()


def _is_free(writer: Row, clock: Clock) -> bool:
    """Tell whether the process that held the lease gave it back, or is dead."""
    return writer["process"] == "" or bool(writer["renewed"] < now(clock, -_DEAD))


def _row(name: str, epoch: int, body: str) -> Row:
    return {"id": f"{name}/{epoch}", "name": name, "epoch": epoch, "body": body}
