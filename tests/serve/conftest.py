"""A service for all tests of a module, and a clock."""

from collections.abc import Iterator

import pytest
from support.clock import Clock
from support.live_service import Live, live_service


@pytest.fixture
def clock() -> Clock:
    """A clock that a test moves."""
    return Clock()


@pytest.fixture(scope="module")
def live(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A service with the module's ``SETTINGS``, if it has some."""
    with live_service(tmp_path_factory.mktemp("serve"), **getattr(request.module, "SETTINGS", {})) as running:
        yield running
