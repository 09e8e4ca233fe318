"""Rows in Milvus: the collections that a gallery keeps there, and reading, writing and searching them.

Every read asks for Milvus' consistency level Strong: it sees whatever was acknowledged before it began.
"""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from plsc.errors import StorageError, UsageError
from plsc.gallery.milvus_filters import fits_of
from plsc.gallery.store import Float32, Person

REGISTRY = "plsc_registry"
LONGEST_TEXT = 65_535  # bytes of a VARCHAR
MOST = 16_384  # rows that a search or a query may ask for
_BATCH_BYTES = 8 << 20  # of one insert; a server takes 64 MiB
_QUERIES = 256  # searched in one request
_STRONG = {"consistency_level": "Strong"}

Row = dict[str, Any]


class MilvusRows:
    """A database of a Milvus server, seen as rows."""

    def __init__(self, uri: str, token: str, database: str, timeout: float) -> None:
        """Connect, and make the database and the registry where they are not there. Raises :class:`StorageError`."""
        from pymilvus import MilvusClient

        self._loaded: set[str] = set()
        self.timeout = timeout  # seconds of a request; without one, pymilvus tries again for minutes

        # pymilvus writes every error that it raises to stderr as well, with a traceback.
        logging.getLogger("pymilvus").setLevel(logging.CRITICAL)
        with self._told():
            if database:
                client = MilvusClient(uri=uri, token=token, timeout=timeout)
                if database not in client.list_databases(timeout=timeout):
                    client.create_database(database, timeout=timeout)
                client.close()
            self._client: Any = MilvusClient(uri=uri, token=token, db_name=database, timeout=timeout)
            if not self._client.has_collection(REGISTRY, timeout=timeout):
                self._create(REGISTRY, 2, {"name": "key", "body": "text"})

    def close(self) -> None:
        """Let go of the connection."""
        self._client.close()

    def create(self, key: str, dim: int) -> None:
        """Make the two collections of a gallery's collection."""
        with self._told():
            self._create(f"plsc_persons_{key}", 2, {"id": "id", "body": "text", "fits": "json"})
            self._create(f"plsc_faces_{key}", dim, {"id": "id", "person": "number", "fits": "json"})

    def _create(self, name: str, dim: int, fields: Mapping[str, str]) -> None:
        from pymilvus import DataType

        schema = self._client.create_schema(auto_id=False, enable_dynamic_field=False)
        kinds: dict[str, tuple[Any, Row]] = {
            "id": (DataType.INT64, {"is_primary": True}),
            "key": (DataType.VARCHAR, {"is_primary": True, "max_length": 64}),
            "number": (DataType.INT64, {}),
            "text": (DataType.VARCHAR, {"max_length": LONGEST_TEXT}),
            "json": (DataType.JSON, {}),
        }
        for field, kind in fields.items():
            schema.add_field(field, kinds[kind][0], **kinds[kind][1])
        schema.add_field("vector", DataType.FLOAT_VECTOR, dim=dim)  # none may be without: persons have a fixed one
        index = self._client.prepare_index_params()
        index.add_index("vector", index_type="FLAT", metric_type="IP")
        # One shard, so that a request is one entry of Milvus' log.
        self._client.create_collection(name, schema=schema, num_shards=1, timeout=self.timeout, **_STRONG)
        # Of nothing yet: pymilvus would sleep half a second before it asks whether it is done.
        self._client.create_index(name, index, timeout=self.timeout, sync=False)
        self._load(name)

    def drop(self, key: str) -> None:
        """Remove the two collections of a gallery's collection, where they are."""
        with self._told():
            for name in (f"plsc_faces_{key}", f"plsc_persons_{key}"):
                self._loaded.discard(name)
                if self._client.has_collection(name, timeout=self.timeout):
                    self._client.drop_collection(name, timeout=self.timeout)

    def keys(self) -> set[str]:
        """The keys under which there are collections."""
        with self._told():
            names = self._client.list_collections(timeout=self.timeout)
        return {name.rpartition("_")[2] for name in names if name.startswith(("plsc_faces_", "plsc_persons_"))}

    def read(self, name: str, filter: str, fields: Sequence[str], limit: int | None = None) -> Iterator[Row]:
        """The rows that fit ``filter``, by primary key."""
        with self._told():
            self._load(name)
            pages = self._client.query_iterator(
                name,
                filter=filter,
                output_fields=list(fields),
                limit=limit or -1,
                batch_size=min(limit or MOST, 1000 if "vector" in fields else MOST),
                timeout=self.timeout,
                **_STRONG,
            )
            try:
                while page := pages.next():
                    yield from page
            finally:
                pages.close()

    def find(self, name: str, filter: str, fields: Sequence[str]) -> list[Row]:
        """The rows that fit ``filter``, which are few, in any order and in one request."""
        with self._told():
            self._load(name)
            asked = {"filter": filter, "output_fields": list(fields), "timeout": self.timeout}
            return list(self._client.query(name, **asked, **_STRONG))

    def registered(self, names: Sequence[str] | None = None) -> dict[str, Row]:
        """The registry's rows: {name: body}."""
        asked = 'name != ""' if names is None else f"name in {json.dumps(list(names))}"
        return {row["name"]: json.loads(row["body"]) for row in self.find(REGISTRY, asked, ["name", "body"])}

    def register(self, name: str, body: Row) -> None:
        """Write a row of the registry: one request, so it is there whole or not at all."""
        with self._told():
            row = {"name": name, "body": json.dumps(body), "vector": [1.0, 0.0]}
            self._client.upsert(REGISTRY, [row], timeout=self.timeout)

    def unregister(self, name: str) -> None:
        """Remove a row of the registry."""
        with self._told():
            self._client.delete(REGISTRY, ids=[name], timeout=self.timeout)

    def write(self, name: str, rows: Sequence[Row]) -> None:
        """Insert rows, or replace those with the same ids."""
        with self._told():
            for batch in _batches(rows):
                self._client.upsert(name, batch, timeout=self.timeout)

    def delete(self, name: str, filter: str) -> None:
        """Delete the rows that fit ``filter``."""
        with self._told():
            self._load(name)
            self._client.delete(name, filter=filter, timeout=self.timeout)

    def search(self, name: str, queries: Float32, count: int, filter: str) -> list[list[tuple[int, int, float]]]:
        """For each of ``queries``: (person, face, inner product) of the ``count`` best faces, best first."""
        found = []
        with self._told():
            self._load(name)
            for start in range(0, len(queries), _QUERIES):
                answers = self._client.search(
                    name,
                    data=list(queries[start : start + _QUERIES]),
                    anns_field="vector",
                    limit=count,
                    filter=filter,
                    output_fields=["person"],
                    search_params={"metric_type": "IP"},
                    timeout=self.timeout,
                    **_STRONG,
                )
                found += [[(hit["entity"]["person"], hit["id"], hit["distance"]) for hit in hits] for hits in answers]
        return found

    def compact(self, key: str) -> None:
        """Have the server write what is in memory, and rewrite its files without deleted rows."""
        with self._told():
            for name in (f"plsc_faces_{key}", f"plsc_persons_{key}"):
                self._client.flush(name, timeout=self.timeout)
                self._client.compact(name, timeout=self.timeout)

    @contextmanager
    def _told(self) -> Iterator[None]:
        """What pymilvus and its transport raise becomes a :class:`StorageError` of one line."""
        import grpc  # type: ignore[import-untyped]
        from pymilvus.exceptions import MilvusException

        try:
            yield
        except (MilvusException, grpc.RpcError, grpc.FutureTimeoutError) as error:
            self._loaded.clear()  # a server that was started again may have nothing loaded
            line = str(getattr(error, "message", error)).strip().partition("\n")[0][:300]
            raise StorageError(f"the Milvus store failed: {line or type(error).__name__}") from None

    def _load(self, name: str) -> None:
        if name not in self._loaded:
            self._client.load_collection(name, timeout=self.timeout)
            self._loaded.add(name)


def person_row(person: Person) -> Row:
    """A person as a row; :class:`UsageError` if Milvus has no room for it."""
    body = json.dumps([person.name, person.metadata, person.created], ensure_ascii=False)
    fits = fits_of(person.metadata)
    if max(len(body.encode()), len(json.dumps(fits))) > LONGEST_TEXT:
        raise UsageError(
            f"the name and metadata of a person take more than the {LONGEST_TEXT} bytes that Milvus keeps; shorten them"
        )
    return {"id": person.id, "body": body, "fits": fits, "vector": [1.0, 0.0]}


def face_row(face: int, person: int, fits: dict[str, str], vector: Float32) -> Row:
    """A face as a row."""
    return {"id": face, "person": person, "fits": fits, "vector": vector.tolist()}


def read_person(row: Row, faces: Sequence[int]) -> Person:
    """The person of a row."""
    name, metadata, created = json.loads(row["body"])
    return Person(row["id"], name, metadata, tuple(sorted(faces)), created)


def ids_text(ids: Sequence[int]) -> str:
    """Ids as a list in an expression."""
    return "[" + ", ".join(map(str, ids)) + "]"


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


def as_array(vectors: Sequence[Any], dim: int) -> Float32:
    """Vectors as Milvus gives them as (n, dim) float32."""
    return np.array(vectors, dtype=np.float32).reshape(-1, dim)
