"""One way to every store: by a folder, or by the address of a server."""

from pathlib import Path

from plsc.errors import UsageError
from plsc.gallery.contract import Store


def open_store(spec: str | Path, *, precision: str = "bf16", latency_ms: float | None = None) -> Store:
    """Open the store that ``spec`` names, made where there is none.

    Args:
        spec: a folder (SQLite and files), "milvus:URI" or "postgres:DSN".
        precision: "bf16" or "fp32": of the copy that a folder's store scans. Servers choose themselves.
        latency_ms: how long a single query may take in a folder's store; None: exact search, however long.

    Raises :class:`UsageError` for what it cannot be asked, and what the store raises that cannot be opened.
    """
    kind, _, address = str(spec).partition(":")
    if kind == "milvus":
        from plsc.gallery.milvus_store import open_milvus

        return open_milvus(address)
    if kind == "postgres":
        from plsc.gallery.postgres_store import open_postgres

        return open_postgres(address)
    if not str(spec):
        raise UsageError("no store is named; give a folder, milvus:URI or postgres:DSN")
    from plsc.gallery.sqlite_store import SqliteStore

    return SqliteStore(spec, precision=precision, latency_ms=latency_ms)
