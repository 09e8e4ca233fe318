"""The documentation as a site: it builds without warnings, holds every page and name, and asks no other host."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest
from support.page_runner import ROOT

import plsc
from plsc import collectives

pytestmark = pytest.mark.live

PACKAGES = ("material", "mkdocstrings")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built once as `make docs` builds it."""
    for package in PACKAGES:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "not included in the" not in done.stderr, done.stderr
    return folder


def pages(site: Path) -> dict[str, str]:
    """The HTML of each page by its address."""
    return {str(page.relative_to(site)): page.read_text(encoding="utf-8") for page in site.rglob("*.html")}


@pytest.mark.slow
def test_every_page_is_in_the_site(site: Path) -> None:
    written = {str(page.relative_to(ROOT / "docs").with_suffix("")) for page in (ROOT / "docs").rglob("*.md")}
    expected = {f"{name}/index.html" for name in written - {"index"}} | {"index.html", "release-notes/index.html"}
    assert expected <= set(pages(site))


@pytest.mark.slow
def test_the_site_asks_no_other_host(site: Path) -> None:
    for name, html in pages(site).items():
        loaded = re.findall(r"<(?:script|img|link)[^>]* (?:src|href)=\"?(https?://[^\" >]+)", html)
        assert not loaded, f"{name} loads {loaded[0]}"
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import )[\"']?(?:https?:)?//", sheet.read_text(encoding="utf-8")), sheet.name


@pytest.mark.slow
def test_links_lead_to_pages_of_the_site(site: Path) -> None:
    for name, html in pages(site).items():
        if name != "404.html":  # whose links start at the root
            for target in re.findall(r"<a [^>]*?href=\"?([^\" >#]+)", html):
                if not target.startswith(("http://", "https://", "mailto:")):
                    assert (site / name).parent.joinpath(unquote(target)).exists(), f"{name}: {target}"


@pytest.mark.slow
def test_the_reference_describes_every_public_name(site: Path) -> None:
    anchors = {anchor for html in pages(site).values() for anchor in re.findall(r'<h\d id="(plsc\.[\w.]+)"', html)}
    assert {f"plsc.{name}" for name in plsc.__all__} <= anchors
    assert {f"plsc.collectives.{name}" for name in vars(collectives) if not name.startswith("_")} <= anchors
    assert {"plsc.ShardedHead.prefetch", "plsc.losses.Margin.phi", "plsc.errors.DataError"} <= anchors


@pytest.mark.slow
def test_docstrings_and_comments_are_rendered(site: Path) -> None:
    for name, html in pages(site).items():
        wrong = r":(?:func|class|meth|attr|mod|data):|<!-- material|:material-|</?autoref\b"
        raw = re.findall(wrong + "|``" if name.startswith("api/") else wrong, html)
        assert not raw, f"{name} has a raw {raw[0]}"
    assert '<a class="autorefs' in pages(site)["api/models/index.html"]
    assert pages(site)["index.html"].count("<svg", pages(site)["index.html"].index("grid cards")) >= 8


@pytest.mark.slow
def test_the_search_finds_headings_and_names(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    places = {entry["location"] for entry in index["docs"]}
    assert {"api/training/#plsc.ShardedHead", "python/#a-training-loop", "#one-command"} <= places


@pytest.mark.slow
def test_release_notes_are_the_changelog(site: Path) -> None:
    newest = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[0]
    html = pages(site)["release-notes/index.html"]
    assert newest in re.sub(r"<[^>]+>", "", re.findall(r"<h2.*?</h2>", html, flags=re.DOTALL)[0])
    assert '<a href="../hub/">' in html


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=lambda page: page.stem)
def test_links_of_pages_beside_the_site_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (ROOT / target).exists(), target
