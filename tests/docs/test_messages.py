"""docs/troubleshooting.md quotes messages that the code has."""

import ast
import re

import pytest
from support.page_runner import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"
GAP = "…"  # stands for names and numbers, on the page and in a template


def templates() -> set[str]:
    """Every string of the code, with a gap for each value that an f-string inserts."""
    found = set()
    for folder in ("plsc", "data", "models", "tools"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    found.add("".join(part.value if isinstance(part, ast.Constant) else GAP for part in node.values))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.add(node.value)
    return found


@pytest.mark.slow
def test_quoted_messages_are_those_of_the_code() -> None:
    quoted = re.findall(r"^### `(.*)`$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert len(quoted) >= 10
    known = templates()
    for message in quoted:
        pattern = re.compile(".*".join(re.escape(piece) for piece in message.split(GAP)), flags=re.DOTALL)
        assert any(pattern.fullmatch(template) for template in known), f"the code has no message {message!r}"
