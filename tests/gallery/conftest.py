"""A kit for each kind of store; tests that take ``kit`` or ``store`` run over all of them."""

from collections.abc import Iterator

import pytest
from support.stores import DIM, GALLERY, KINDS, MODEL, Kit, Servers

from plsc.gallery.store import Store

SLOW_KINDS = {"milvus": pytest.mark.slow}  # its server on one machine takes as long as all others together


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
