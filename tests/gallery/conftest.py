"""A kit for each kind of store; tests that take ``kit`` or ``store`` run over all of them; and encrypted stores."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support import encrypted_store
from support.encrypted_store import Opened, Sealed
from support.stores import DIM, GALLERY, KINDS, MODEL, Kit, Servers, new_key_file

from plsc.gallery.sqlite.store import SqliteStore
from plsc.gallery.store import Store

SLOW_KINDS = {"milvus": (pytest.mark.slow, pytest.mark.exhaustive)}  # its server takes as long as all others together


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    servers = Servers(tmp_path_factory.mktemp("stores"))
    yield servers
    servers.close()


@pytest.fixture(params=[pytest.param(kind, marks=SLOW_KINDS.get(kind, ())) for kind in KINDS])
def kit(request: pytest.FixtureRequest, servers: Servers) -> Iterator[Kit]:
    kit = servers.kit(request.param)
    yield kit
    kit.close()


@pytest.fixture
def store(kit: Kit) -> Store:
    """A store with the empty collection ``people``."""
    store = kit.fresh()
    store.create_collection(GALLERY, DIM, MODEL)
    return store


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    return new_key_file(tmp_path / "gallery.key")


@pytest.fixture
def sealed(tmp_path: Path, key_file: Path) -> Sealed:
    """A closed store of ten persons, with the snapshot ``one`` of all of them."""
    store = SqliteStore(tmp_path / "store", key_file=key_file)
    made = encrypted_store.enrol(store, 10)
    store.snapshot(store.folder / "snapshots" / "one")
    store.close()
    return store.folder, made


@pytest.fixture
def opened(sealed: Sealed, key_file: Path) -> Iterator[Opened]:
    """The same store, open, which the test does not close."""
    store = SqliteStore(sealed[0], key_file=key_file)
    yield store, sealed[1]
    store.close()
