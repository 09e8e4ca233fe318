"""Requests to a Milvus server, and the kinds of collections that a gallery has there.

Every read asks for Milvus' consistency level Strong: it sees whatever was acknowledged before it began.
"""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from plsc.errors import StorageError, masked
from plsc.gallery.values import Float32

REGISTRY, ANSWERS = "plsc_registry", "plsc_answers"
MAX_TEXT = 65_535  # bytes of a VARCHAR
MAX_ROWS = 16_384  # that a search or a query may ask for
_BATCH_BYTES = 8 << 20  # of one request; a server takes 64 MiB
_QUERIES_PER_REQUEST = 256
_STRONG = {"consistency_level": "Strong"}

# Field -> kind. The first is the primary key, in whose order rows are listed. Texts are of so many bytes at most.
_Fields = Mapping[str, int | str]
PERSONS: _Fields = {"id": 38, "row": "number", "person": "number", "external": 32, "expires": 32, "fits": "json",
                    "body": MAX_TEXT}  # fmt: skip
FACES: _Fields = {"row": "number", "face": "number", "person": "number", "key": 64, "estimated": "number",
                  "expires": 32, "fits": "json"}  # fmt: skip
_REGISTRY: _Fields = {"id": 96, "name": 64, "epoch": "number", "body": MAX_TEXT}
_ANSWERS: _Fields = {"id": 64, "request": 32, "token": 32, "created": 32, "collection": 32, "row": "number",
                     "part": "number", "body": MAX_TEXT}  # fmt: skip

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
        for name, fields in ((ANSWERS, _ANSWERS), (REGISTRY, _REGISTRY)):
            if not self._call("has_collection", name):
                self.create(name, fields)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    # --- Milvus' collections ---

    def create(self, name: str, fields: _Fields, dim: int = 2) -> None:
        """Create a collection of Milvus with these fields and vectors of ``dim`` numbers."""
        from pymilvus import DataType

        schema = self._client.create_schema(auto_id=False, enable_dynamic_field=False)
        types = {"number": DataType.INT64, "json": DataType.JSON}
        for place, (field, kind) in enumerate(fields.items()):
            size = {"max_length": kind} if isinstance(kind, int) else {}
            schema.add_field(field, types.get(str(kind), DataType.VARCHAR), is_primary=place == 0, **size)
        # Milvus takes no collection without a vector: rows of persons and of the registry have a constant one.
        schema.add_field("vector", DataType.FLOAT_VECTOR, dim=dim)
        index = self._client.prepare_index_params()
        index.add_index("vector", index_type="FLAT", metric_type="IP")
        # One shard, so that a request is one entry of Milvus' log, whole or not at all.
        self._call("create_collection", name, schema=schema, num_shards=1, **_STRONG)
        # sync=False: of an empty collection; pymilvus would sleep half a second before it asks if the index is done.
        self._call("create_index", name, index, sync=False)
        self._load(name)

    def drop(self, name: str) -> None:
        """Drop a collection of Milvus, if it exists."""
        self._loaded.discard(name)
        if self._call("has_collection", name):
            self._call("drop_collection", name)

    def names(self) -> list[str]:
        """Return the names of all collections of Milvus."""
        return list(self._call("list_collections"))

    def compact(self, name: str) -> None:
        """Ask the server to write what is in memory, and to rewrite its files without deleted rows."""
        self._call("flush", name)
        self._call("compact", name)

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

    def count(self, name: str, filter: str) -> int:
        """Return how many rows match an expression."""
        return int(self.query(name, filter, ["count(*)"])[0]["count(*)"])

    def write(self, name: str, rows: Sequence[Row]) -> None:
        """Insert rows, or replace those with the same primary keys; without a vector they get a constant one."""
        for batch in _batches([{"vector": [1.0, 0.0], **row} for row in rows]):
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
            "output_fields": ["person", "face"],
            "search_params": {"metric_type": "IP"},
            **_STRONG,
        }
        found = []
        for start in range(0, len(queries), _QUERIES_PER_REQUEST):
            part = list(queries[start : start + _QUERIES_PER_REQUEST])
            answers = self._call("search", name, data=part, limit=count, filter=filter, **options)
            for hits in answers:
                found.append([(hit["entity"]["person"], hit["entity"]["face"], hit["distance"]) for hit in hits])
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


def _batches(rows: Sequence[Row]) -> Iterator[list[Row]]:
    batch: list[Row] = []
    size = 0
    for row in rows:
        batch.append(row)
        size += 4 * len(row["vector"]) + len(row.get("body", "")) + len(json.dumps(row.get("fits", ""))) + 200
        if size > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
