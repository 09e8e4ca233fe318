"""What `make docs` adds to the pages: release notes of CHANGELOG.md, icons, and docstrings whose roles are links."""

import re
from pathlib import Path
from typing import Any

from griffe import Extension, Module, NameResolutionError, Object
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

CHANGELOG = Path(__file__).parents[1] / "CHANGELOG.md"


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the page of release notes, on which the names of pages are links."""
    text = CHANGELOG.read_text(encoding="utf-8").replace("# Changelog", "# Release notes", 1)
    linked = re.sub(r"`?docs/([\w/-]+\.md)`?", r"[\g<0>](\1)", text)
    files.append(File.generated(config, "release-notes.md", content=linked))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Show the icons that comments name: who reads the file itself sees none."""
    return re.sub(r"<!-- (material-[\w-]+) -->", r":\1:{ .lg .middle }", markdown)


class DocstringRoles(Extension):
    """Sphinx's roles in docstrings, such as a function's, become links to where the site describes what they name."""

    def on_package(self, *, pkg: Module, **_: Any) -> None:
        """Rewrite every docstring of a package once all of its names are known."""
        self._rewrite(pkg)

    def _rewrite(self, found: Object) -> None:
        if found.docstring:
            value = re.sub(r":[a-z]+:`([^`]+)`", lambda role: link(found, role[1]), found.docstring.value)
            found.docstring.value = re.sub(r"``([^`]+)``", r"`\1`", value)
        for member in found.members.values():
            if not member.is_alias:
                self._rewrite(member)


def link(found: Object, name: str) -> str:
    """Return a link to ``name``, as seen from the object ``found``; text alone where the site does not describe it."""
    try:
        path = found.resolve(name)
    except NameResolutionError:
        path = name
    return f'<autoref identifier="{path}" optional>`{name}`</autoref>'
