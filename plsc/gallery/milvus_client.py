"""The gallery's rows in Milvus: requests, filters as expressions, and the registry's entries.

Every read asks for Milvus' consistency level Strong: it sees whatever was acknowledged before it began.
"""

import hashlib
import json
import logging
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from plsc.errors import StorageError, UsageError, masked
from plsc.gallery.filters import COMPARISONS, Condition, Filter
from plsc.gallery.values import Collection, Float32, Person

REGISTRY = "plsc_registry"
MAX_TEXT = 65_535  # bytes of a VARCHAR
MAX_ROWS = 16_384  # that a search or a query may ask for
_BATCH_BYTES = 8 << 20  # of one insert; a server takes 64 MiB
_QUERIES_PER_REQUEST = 256
_STRONG = {"consistency_level": "Strong"}

Row = dict[str, Any]


class MilvusServer:
    """A database of a Milvus server. Errors of pymilvus become :class:`StorageError` of one line."""

    def __init__(self, uri: str, token: str, database: str, timeout: float) -> None:
        """Connect, and create the database and the registry if they are missing; requests may take ``timeout`` s."""
        from pymilvus import MilvusClient

        self._loaded: set[str] = set()
        self.timeout = timeout  # without one, pymilvus retries for minutes
        # pymilvus also logs every error that it raises to stderr, with a traceback.
        logging.getLogger("pymilvus").setLevel(logging.CRITICAL)
        self._client: Any = None
        with self._translate_errors():
            if database:
                self._client = MilvusClient(uri=uri, token=token, timeout=timeout)
                if database not in self._call("list_databases"):
                    self._call("create_database", database)
                self._client.close()
            self._client = MilvusClient(uri=uri, token=token, db_name=database, timeout=timeout)
        if not self._call("has_collection", REGISTRY):
            self._create(REGISTRY, 2, {"name": "key", "body": "text"})

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    # --- collections ---

    def create(self, key: str, dim: int) -> None:
        """Create the two Milvus collections of a gallery's collection."""
        faces, persons = _names(key)
        self._create(persons, 2, {"id": "id", "body": "text", "fits": "json"})
        self._create(faces, dim, {"id": "id", "person": "number", "fits": "json"})

    def _create(self, name: str, dim: int, fields: Mapping[str, str]) -> None:
        from pymilvus import DataType

        schema = self._client.create_schema(auto_id=False, enable_dynamic_field=False)
        kinds: dict[str, tuple[Any, Row]] = {
            "id": (DataType.INT64, {"is_primary": True}),
            "key": (DataType.VARCHAR, {"is_primary": True, "max_length": 64}),
            "number": (DataType.INT64, {}),
            "text": (DataType.VARCHAR, {"max_length": MAX_TEXT}),
            "json": (DataType.JSON, {}),
        }
        for field, kind in fields.items():
            schema.add_field(field, kinds[kind][0], **kinds[kind][1])
        # Milvus takes no collection without a vector: rows of persons and of the registry have a constant one.
        schema.add_field("vector", DataType.FLOAT_VECTOR, dim=dim)
        index = self._client.prepare_index_params()
        index.add_index("vector", index_type="FLAT", metric_type="IP")
        # One shard, so that a request is one entry of Milvus' log, whole or not at all.
        self._call("create_collection", name, schema=schema, num_shards=1, **_STRONG)
        # sync=False: of an empty collection; pymilvus would sleep half a second before it asks if the index is done.
        self._call("create_index", name, index, sync=False)
        self._load(name)

    def drop(self, key: str) -> None:
        """Drop the two Milvus collections of a gallery's collection, if they exist."""
        for name in _names(key):
            self._loaded.discard(name)
            if self._call("has_collection", name):
                self._call("drop_collection", name)

    def keys(self) -> set[str]:
        """Return the keys for which there are Milvus collections."""
        names = self._call("list_collections")
        return {name.rpartition("_")[2] for name in names if name.startswith(_names(""))}

    def compact(self, key: str) -> None:
        """Ask the server to write what is in memory, and to rewrite its files without deleted rows."""
        for name in _names(key):
            self._call("flush", name)
            self._call("compact", name)

    # --- the registry ---

    def registered(self, names: Sequence[str] | None = None) -> dict[str, Row]:
        """Return rows of the registry, {name: body}: those of ``names``, or all."""
        expression = 'name != ""' if names is None else f"name in {json.dumps(list(names))}"
        return {row["name"]: json.loads(row["body"]) for row in self.query(REGISTRY, expression, ["name", "body"])}

    def register(self, name: str, body: Row) -> None:
        """Write a row of the registry: one request, whole or not at all."""
        self._call("upsert", REGISTRY, [{"name": name, "body": json.dumps(body), "vector": [1.0, 0.0]}])

    def unregister(self, name: str) -> None:
        """Delete a row of the registry."""
        self._call("delete", REGISTRY, ids=[name])

    # --- rows ---

    def iterate(self, name: str, filter: str, fields: Sequence[str], limit: int | None = None) -> Iterator[Row]:
        """Yield the rows that match an expression, by primary key, a page per request."""
        self._load(name)
        size = min(limit or MAX_ROWS, 1000 if "vector" in fields else MAX_ROWS)
        options = {"filter": filter, "output_fields": list(fields), "limit": limit or -1, "batch_size": size}
        with self._translate_errors():
            pages = self._call("query_iterator", name, **options, **_STRONG)
            try:
                while page := pages.next():
                    yield from page
            finally:
                pages.close()

    def query(self, name: str, filter: str, fields: Sequence[str]) -> list[Row]:
        """Return the rows that match an expression, which are few, in any order, by one request."""
        self._load(name)
        return list(self._call("query", name, filter=filter, output_fields=list(fields), **_STRONG))

    def write(self, name: str, rows: Sequence[Row]) -> None:
        """Insert rows, or replace those with the same ids."""
        for batch in _batches(rows):
            self._call("upsert", name, batch)

    def delete(self, name: str, filter: str) -> None:
        """Delete the rows that match an expression."""
        self._load(name)
        self._call("delete", name, filter=filter)

    def search(self, name: str, queries: Float32, count: int, filter: str) -> list[list[tuple[int, int, float]]]:
        """Return, for each of ``queries``, (person, face, inner product) of the ``count`` best faces, best first."""
        self._load(name)
        options = {
            "anns_field": "vector",
            "output_fields": ["person"],
            "search_params": {"metric_type": "IP"},
            **_STRONG,
        }
        found = []
        for start in range(0, len(queries), _QUERIES_PER_REQUEST):
            part = list(queries[start : start + _QUERIES_PER_REQUEST])
            answers = self._call("search", name, data=part, limit=count, filter=filter, **options)
            found += [[(hit["entity"]["person"], hit["id"], hit["distance"]) for hit in hits] for hits in answers]
        return found

    def _call(self, method: str, *args: Any, **options: Any) -> Any:
        with self._translate_errors():
            return getattr(self._client, method)(*args, timeout=self.timeout, **options)

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        import grpc  # type: ignore[import-untyped]
        from pymilvus.exceptions import MilvusException

        try:
            yield
        except (MilvusException, grpc.RpcError, grpc.FutureTimeoutError) as error:
            self._loaded.clear()  # a server that was restarted may have nothing loaded
            line = masked(str(getattr(error, "message", error)).strip().partition("\n")[0])[:300]
            raise StorageError(f"the Milvus store failed: {line or type(error).__name__}") from None

    def _load(self, name: str) -> None:
        if name not in self._loaded:
            self._call("load_collection", name)
            self._loaded.add(name)


def _names(key: str) -> tuple[str, str]:
    """Return the names of the Milvus collections of a gallery's collection: that of the faces, and of the persons."""
    return f"plsc_faces_{key}", f"plsc_persons_{key}"


def _batches(rows: Sequence[Row]) -> Iterator[list[Row]]:
    batch: list[Row] = []
    size = 0
    for row in rows:
        batch.append(row)
        size += 4 * len(row["vector"]) + len(row.get("body", "")) + sum(len(text) + 40 for text in row["fits"].values())
        if size > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


# --- persons and faces as rows ---


def person_row(person: Person) -> Row:
    """Return a person as a row; :class:`UsageError` if Milvus has no room for it."""
    body = json.dumps([person.name, person.metadata, person.created], ensure_ascii=False)
    fits = encode_metadata(person.metadata)
    if max(len(body.encode()), len(json.dumps(fits))) > MAX_TEXT:
        raise UsageError(
            f"the name and metadata of a person take more than the {MAX_TEXT} bytes that Milvus keeps; shorten them"
        )
    return {"id": person.id, "body": body, "fits": fits, "vector": [1.0, 0.0]}


def face_row(face: int, person: int, fits: dict[str, str], vector: Float32) -> Row:
    """Return a face as a row; ``fits`` is the encoded metadata of its person."""
    return {"id": face, "person": person, "fits": fits, "vector": vector.tolist()}


def read_person(row: Row, faces: Sequence[int]) -> Person:
    """Return the person of a row."""
    name, metadata, created = json.loads(row["body"])
    return Person(row["id"], name, metadata, faces=tuple(sorted(faces)), created=created, revision=0)


# --- metadata and filters ---
#
# Each value becomes a string that sorts as the value does, with a letter for its kind in front, under a key of plain
# letters: {"age": 36} is stored in the JSON field "fits" as {"k4a…": "n40…"}. So one comparison of strings decides,
# whatever a server's version makes of integers beyond 2^53, mixed kinds or quotation marks, and no text of a user is
# ever part of an expression.

_NOTHING = "id < 0"
_NEXT_KIND = {"n": "o", "s": "t"}  # the letter behind a kind's own: the end of its range


def encode_metadata(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the JSON field ``fits`` for ``metadata``."""
    return {_encode_key(key): _encode_value(value) for key, value in metadata.items()}


def to_expression(filter: Filter | None) -> str:
    """Return the Milvus expression that is true for the rows that match; empty without a filter."""
    return " and ".join(f"({_condition(condition)})" for condition in (filter.conditions if filter else ()))


def ids_expression(ids: Sequence[int]) -> str:
    """Return ids as a list in an expression."""
    return "[" + ", ".join(map(str, ids)) + "]"


def _condition(condition: Condition) -> str:
    found = f'fits["{_encode_key(condition.key)}"]'
    if condition.operator == "exists":
        return f"exists {found}" if condition.value else f"not exists {found}"
    if condition.operator == "in":
        return _any([f'{found} == "{_encode_value(value)}"' for value in condition.value])
    value = _encode_value(condition.value)
    if condition.operator == "eq":
        return f'{found} == "{value}"'
    if condition.operator == "ne":
        return f'not exists {found} or {found} != "{value}"'
    kind, sign = value[0], COMPARISONS[condition.operator]
    if condition.operator in ("lt", "lte"):
        return f'{found} >= "{kind}" and {found} {sign} "{value}"'
    return f'{found} {sign} "{value}" and {found} < "{_NEXT_KIND[kind]}"'


def _any(parts: list[str]) -> str:
    """Join ``parts`` by "or" as a balanced tree: parsers nest as deep as a plain row of them is long."""
    if len(parts) <= 2:
        return " or ".join(parts) or _NOTHING
    half = len(parts) // 2
    return f"({_any(parts[:half])}) or ({_any(parts[half:])})"


def _encode_key(key: str) -> str:
    return "k" + hashlib.blake2b(key.encode(), digest_size=16).hexdigest()


def _encode_value(value: Any) -> str:
    if isinstance(value, bool):
        return f"b{value:d}"
    if isinstance(value, str):
        return "s" + value.encode().hex()
    # The nearest double, and an integer's distance from it: together exact, and in the order of the numbers.
    nearest = float(value) + 0.0  # turns -0.0 into 0.0
    (bits,) = struct.unpack(">Q", struct.pack(">d", nearest))
    bits = bits ^ (2**64 - 1) if bits >> 63 else bits | 1 << 63  # IEEE bits, made to sort as unsigned integers
    distance = value - int(nearest) if isinstance(value, int) else 0
    return f"n{bits:016x}{distance + 0x8000:04x}"


# --- the registry's entries ---


@dataclass(frozen=True)
class RegistryEntry:
    """A gallery's collection as the registry has it: the state that all readers go by.

    Attributes:
        key: part of the names of its two Milvus collections.
        info: the collection with its counts.
        next_id: rows with this id or a higher one are of an unfinished enrolment.
        intent: the change under way, or the one that a process left unfinished: {"do": "add", "first": id},
            {"do": "delete", "person": id}, {"do": "unface", "face": id} or
            {"do": "update", "person": id, "old": [name, metadata, created]}.
    """

    name: str
    key: str
    info: Collection
    next_id: int
    intent: dict[str, Any] | None = None

    @property
    def faces(self) -> str:
        """The Milvus collection of the faces."""
        return _names(self.key)[0]

    @property
    def persons(self) -> str:
        """The Milvus collection of the persons."""
        return _names(self.key)[1]

    @property
    def updating(self) -> tuple[int, list[Any]] | None:
        """The person whose rows may be half replaced, and the name, metadata and time that hold until they are."""
        intent = self.intent or {}
        return (intent["person"], intent["old"]) if intent.get("do") == "update" else None

    def visible_persons(self, *conditions: str) -> str:
        """Return the expression of the persons' rows that readers may see and that meet ``conditions``."""
        return self._visible("id", [], conditions)

    def visible_faces(self, *conditions: str) -> str:
        """Return the expression of the faces' rows that readers may see and that meet ``conditions``."""
        intent = self.intent or {}
        return self._visible("person", [f"id != {intent['face']}"] if intent.get("do") == "unface" else [], conditions)

    def _visible(self, person: str, parts: list[str], conditions: tuple[str, ...]) -> str:
        intent = self.intent or {}
        parts = [f"id < {intent.get('first', self.next_id)}", *parts, *(part for part in conditions if part)]
        if intent.get("do") == "delete":
            parts.append(f"{person} != {intent['person']}")
        return " and ".join(f"({part})" for part in parts)

    def before_update(self, person: Person) -> Person:
        """Return ``person`` as read, or as it was before an unfinished update of it."""
        if self.updating is None or self.updating[0] != person.id:
            return person
        name, metadata, created = self.updating[1]
        return replace(person, name=name, metadata=metadata, created=created)

    def with_counts(self, persons: int, faces: int) -> "RegistryEntry":
        """Return the entry with so many more persons and faces."""
        info = replace(self.info, persons=self.info.persons + persons, faces=self.info.faces + faces)
        return replace(self, info=info)

    def body(self) -> dict[str, Any]:
        """Return what the registry's row holds, as JSON."""
        info = self.info
        figures = [info.dim, info.contract_id, info.created, info.persons, info.faces]
        return {"key": self.key, "about": figures, "next": self.next_id, "intent": self.intent}

    @classmethod
    def from_body(cls, name: str, body: dict[str, Any]) -> "RegistryEntry":
        """Return the entry in a row's body."""
        return cls(name, body["key"], Collection(name, *body["about"]), body["next"], body["intent"])
