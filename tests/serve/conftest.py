"""A service for all tests of a module."""

from collections.abc import Iterator

import pytest
from support.live_service import Live, live_service


@pytest.fixture(scope="module")
def live(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A service with the module's ``SETTINGS``, if it has some."""
    with live_service(tmp_path_factory.mktemp("serve"), **getattr(request.module, "SETTINGS", {})) as running:
        yield running
