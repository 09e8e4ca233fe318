"""``plsc doctor``: the report names the implementations that run, and follows the switches that force others."""

import json

import pytest

from plsc.native.build import available_paths
from plsc.tools.entry import main


def report(tmp_path, capsys):
    assert main(["doctor", "--json", str(tmp_path / "doctor.json")]) == 0
    saved = json.loads((tmp_path / "doctor.json").read_text())
    printed = capsys.readouterr().out
    assert all(value in printed for section in saved.values() for value in section.values())
    return saved


def test_without_compiled_kernels_pytorch_computes(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PLSC_NATIVE", "0")
    saved = report(tmp_path, capsys)
    assert saved["head"]["bfloat16 + int8"] == "torch backend: PLSC_NATIVE=0"
    assert set(saved["search"].values()) == {"torch scan"}


@pytest.mark.skipif(not available_paths(), reason="needs a C++ compiler")
def test_compiled_paths_are_listed_and_chosen(tmp_path, capsys, monkeypatch):
    path = available_paths()[0]
    monkeypatch.setenv("PLSC_CPU", path)
    saved = report(tmp_path, capsys)
    assert saved["machine"]["PLSC_CPU"] == path
    assert saved["head"]["float32"].startswith("cpu backend: ")
    assert set(saved["search"].values()) == {"native scan"}


def test_an_unknown_path_is_one_line(capsys, monkeypatch):
    monkeypatch.setenv("PLSC_CPU", "mmx")
    assert main(["doctor"]) == 2
    assert "PLSC_CPU=mmx" in capsys.readouterr().err
