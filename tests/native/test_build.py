"""Compiled kernels are loaded only if they were made from the sources that are installed."""

import pytest
from support import wrong_library

from plsc.native import build

pytestmark = [pytest.mark.skipif(build.library() is None, reason="needs a C++ compiler"), pytest.mark.live]


@pytest.fixture(autouse=True)
def _loaded_anew():
    yield
    build._load.cache_clear()


@pytest.mark.parametrize("code", [wrong_library.SOURCE, "int plsc_has_tiles() { return 1; }"], ids=["other", "none"])
def test_a_library_of_other_sources_is_not_used(monkeypatch, tmp_path, caplog, code):
    files = wrong_library.plant(monkeypatch, tmp_path, code)
    assert build.library() is None
    assert build.why_no_library() == f"{files[0]} was made from other sources: delete it, and it is compiled anew"
    assert str(files[0]) in caplog.text


def test_a_file_that_is_no_library_is_not_used(monkeypatch, tmp_path):
    for file in wrong_library.plant(monkeypatch, tmp_path):
        file.write_bytes(b"cut short")
    assert build.library("scan_kernels") is None
    assert "scan_kernels" in build.why_no_library("scan_kernels")


def test_kernels_know_their_sources(monkeypatch):
    assert build.library() is not None
    assert build.why_no_library() is None
    monkeypatch.setenv("PLSC_NATIVE", "0")
    assert build.why_no_library() == "PLSC_NATIVE=0"
