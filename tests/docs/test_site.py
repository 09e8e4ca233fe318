"""The documentation as a site: it builds without warnings, holds every page, and asks no other host for anything."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.page_runner import ROOT


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("material") is None, reason="mkdocs-material is not installed")
def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "not included in the" not in done.stderr, done.stderr
    assert {page.stem for page in (ROOT / "docs").glob("*.md")} <= {
        "index",
        *(path.name for path in tmp_path.iterdir()),
    }
    for page in tmp_path.rglob("*.html"):
        loaded = re.findall(r"<(?:script|img|link)[^>]* (?:src|href)=\"?(https?://[^\" >]+)", page.read_text("utf-8"))
        assert not loaded, f"{page.name} loads {loaded[0]}"


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=lambda page: page.stem)
def test_links_of_pages_beside_the_site_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (ROOT / target).exists(), target
