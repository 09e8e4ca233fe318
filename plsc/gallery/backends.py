"""The backends of the gallery, and :func:`open_store`."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from plsc.errors import UsageError
from plsc.extensions import Registry
from plsc.gallery.sqlite import COMPACT_WITHIN
from plsc.nearest import nearest

if TYPE_CHECKING:
    from plsc.gallery.store import Store
    from plsc.gallery.values import Clock


class Server(NamedTuple):
    """A backend that keeps its rows on a server: how its address is written, and "module:function" that opens it."""

    address: str
    opener: str


# URI scheme -> backend, those of installed packages too. A spec without one of these schemes is a folder.
SERVERS: Registry[Server] = Registry(
    "plsc.stores",
    {
        "milvus": Server("URI", "plsc.gallery.milvus.store:open_milvus"),
        "postgres": Server("DSN", "plsc.gallery.postgres:open_postgres"),
    },
    lambda found: isinstance(found, Server),
    "a plsc.gallery.backends.Server",
)
SPEC_FORMS = " or ".join(f"{scheme}:{server.address}" for scheme, server in SERVERS.items())


def open_store(
    spec: str | Path,
    *,
    precision: str = "auto",
    latency_ms: float | None = None,
    compact_within: float = COMPACT_WITHIN,
    key_file: str | Path | None = None,
    clock: Clock = time,
) -> Store:
    """Open the store that ``spec`` names; creates it if there is none.

    Args:
        spec: a folder (SQLite and files), or the address of a server with its scheme: "milvus:URI", "postgres:DSN".
        precision: "auto", "int8", "bf16" or "fp32", in which a folder's store scans the vectors; ignored by servers.
        latency_ms: target for a single query in a folder's store, beyond which approximate search is tried; None:
            always exact. Ignored by servers.
        compact_within: seconds after which no file of a folder's store holds a deleted face's vector, or texts of a
            person who was deleted, or which were changed. Ignored by servers.
        key_file: with the master key of a folder's store whose vectors are encrypted, as ``openssl rand -base64 32``
            writes it; None: they are not.
        clock: what tells who has expired, and what is due.

    Raises:
        UsageError: ``spec`` or an argument is invalid, or the backend's packages are not installed.
        PlscError: the store cannot be opened; see the backend.
    """
    server = _server(spec)
    if server is not None and key_file is not None:
        raise UsageError(f"--encrypt: {display_name(spec)} keeps its own files; encrypt the disk of that server")
    if server is not None:
        module, _, function = server.opener.partition(":")
        opener: Callable[[str], Store] = getattr(importlib.import_module(module), function)
        store = opener(str(spec).partition(":")[2])
        store.clock = clock
        return store
    if not str(spec):
        raise UsageError(f"no store is named: give a folder, {SPEC_FORMS}")
    from plsc.gallery.sqlite.store import SqliteStore

    return SqliteStore(
        spec,
        precision=precision,
        latency_ms=latency_ms,
        compact_within=compact_within,
        key_file=key_file,
        clock=clock,
    )


@contextmanager
def opened_store(spec: str | Path, key_file: str | Path | None = None, *, create: bool = False) -> Iterator[Store]:
    """Open a store that exists, or with ``create`` any, and close it at the end of the block.

    Raises:
        UsageError: there is no store in the folder ``spec``; or as :func:`open_store`, as all else.
    """
    from plsc.gallery.sqlite.folder import holds_store

    folder = store_folder(spec)
    if not create and folder is not None and not holds_store(folder):
        if folder.is_dir():
            raise UsageError(f"{spec} holds no gallery: name the folder that plsc serve --store was given")
        raise UsageError(f"there is no store {spec}")
    store = open_store(spec, key_file=key_file)
    try:
        yield store
    finally:
        store.close()


def store_folder(spec: str | Path) -> Path | None:
    """Return the folder of the store that ``spec`` names; None if a server keeps it."""
    return Path(spec) if _server(spec) is None else None


def display_name(spec: str | Path) -> str:
    """Return ``spec`` without a server's address, which may contain a password."""
    return str(spec) if _server(spec) is None else str(spec).partition(":")[0]


def _server(spec: str | Path) -> Server | None:
    """The backend that ``spec`` names, None for a folder; :class:`UsageError` for an address without its scheme."""
    scheme, colon, address = str(spec).partition(":")
    found = SERVERS.find(scheme) if colon else None
    if found is None and colon:
        near = nearest(scheme, list(SERVERS))
        is_url = address.startswith("//")
        if is_url or (near and not os.path.exists(spec)):  # noqa: PTH110 (an address may be too long for a path)
            meant = f"; did you mean {near[0]}:{f'{scheme}://…' if is_url else '…'}?" if near else ""
            raise UsageError(f"{scheme}: is no kind of store{meant or f': give a folder, {SPEC_FORMS}'}")
    return found
