"""The audit log on a disk that is full: what was done stays done, and the line is not lost."""

import json
import os
from pathlib import Path

import pytest
from support.live_service import DIM, live_service

from plsc.serve.observability import Audit


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_write_is_answered_though_its_line_does_not_fit(tmp_path, capfd):
    with live_service(tmp_path, audit=Path("/dev/full")) as live:
        place = live.collection("staff")
        enrolled = live.ask("POST", f"{place}/persons", {"faces": [{"vector": [0.5] * DIM}]})
        assert enrolled.status_code == 201
        assert live.ask("DELETE", f"{place}/persons/{enrolled.json()['id']}").status_code == 204
    lines = [line for line in capfd.readouterr().err.splitlines() if "audit log takes no lines" in line]
    assert "No space left" in lines[0]
    written = [json.loads(line.partition("It lacks: ")[2]) for line in lines]
    assert [line["operation"] for line in written] == ["create_collection", "add_persons", "delete_person"]


def test_a_torn_line_ends_before_the_next(tmp_path, monkeypatch, capfd):
    audit, write = Audit(tmp_path / "audit.jsonl"), os.write
    audit.write("camera", "first", "staff", [1], 201)
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:10]))
    audit.write("camera", "second", "staff", [2], 201)
    monkeypatch.undo()
    audit.write("camera", "third", "staff", [3], 201)
    audit.close()
    first, torn, third = (tmp_path / "audit.jsonl").read_text(encoding="utf-8").splitlines()
    assert (json.loads(first)["operation"], len(torn), json.loads(third)["operation"]) == ("first", 10, "third")
    assert '"second"' in capfd.readouterr().err
