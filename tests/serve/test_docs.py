"""docs/serving.md shows every request of the service; tests/docs runs them."""

import re

from support.live_service import live_service
from support.page_runner import ROOT, blocks_of


def test_every_operation_is_shown(tmp_path):
    script = "\n".join(block.text for block in blocks_of(ROOT / "docs" / "serving.md") if block.language == "sh")
    with live_service(tmp_path) as live:
        operations = live.ask("GET", "/openapi.json").json()["paths"]
    for path, methods in operations.items():
        written = re.sub(r"\{snapshot\}", r"\\$ID", re.sub(r"\{(person|face)\}", r"\\d", path))
        written = written.replace("{collection}", "staff").replace("{model}", "model").replace("{version}", "1")
        shown = re.search(rf"\$URL{written}(?=[\s?\"|)]|$)", script, flags=re.MULTILINE)
        assert shown, f"{path} {list(methods)} is not shown"
