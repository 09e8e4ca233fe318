"""A removed class's rows, found by their bytes wherever a file of the run still has them."""

import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_runs import run

from plsc.errors import UsageError
from plsc.features.dynamic.removed_rows import FormerTable, RemovedRows
from plsc.files import read_json
from plsc.tools.entry import main
from plsc.train import byte_search
from plsc.train.byte_search import ByteSearch

Ranks = Any
DYNAMIC = {"backbone": "plain", "epochs": None, "steps": 6, "checkpoint.every_steps": 3, "dynamic.max_classes": 14}


@pytest.fixture(scope="module")
def whole(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of ten classes with a table in files, and its export."""
    folder = tmp_path_factory.mktemp("rows")
    placed = {"head.placement": f"mmap:{folder / 'table'}", "head.weight_dtype": "bfloat16"}
    ranks(1, run, folder / "run", {**DYNAMIC, **placed, "head.momentum_dtype": "int8"})
    assert main(["table", "export", str(folder / "run"), str(folder / "before.safetensors")]) == 0
    return folder


def check(*words: object) -> tuple[int, set[tuple[str, str, str]]]:
    """The exit code, and which file holds what of whom."""
    out = Path(str(words[0])).parent / "found.json"
    code = main(["table", "check", *map(str, words), "--json", str(out), "--overwrite"])
    found = read_json(out)["found"]
    return code, {(Path(each["file"]).name, each["name"], each["holds"]) for each in found}


def test_rows_are_found_in_whatever_file_still_has_them(whole: Path, tmp_path: Path) -> None:
    copied, before = tmp_path / "run", tmp_path / "before"
    for folder in (copied, before):
        shutil.copytree(whole / "run", folder)
    assert main(["table", "remove", str(copied), "avatar-7", "avatar-2"]) == 0
    mapped = {("table.rank0-of-1.weight", name, "weight") for name in ("avatar-7", "avatar-2")}
    mapped |= {("table.rank0-of-1.momentum", name, "momentum") for name in ("avatar-7", "avatar-2")}
    assert check(copied, "--removed", before) == (1, mapped)  # the run's own files are left to whoever owns them
    for file in whole.glob("table.rank*"):
        file.unlink()
    assert check(copied, "--removed", before, whole / "before.safetensors") == (0, set())
    (row,) = [number for number, names in enumerate(read_json(whole / "before.json")["classes"]) if "avatar-7" in names]
    tensors = load_file(whole / "before.safetensors")
    weight = tensors["weight"][row]
    (copied / "a.log").write_bytes(b"abc" + weight.view(torch.uint8).numpy().tobytes() + b"d")
    (copied / "exports").mkdir()
    np.save(copied / "exports" / "centres.npy", tensors["weight"].float()[row:])
    momentum = tensors["momentum"][row].float() * tensors["momentum_scale"][row]
    save_file({"momentum": momentum.clone()}, tmp_path / "elsewhere.safetensors")
    (copied / "checkpoints" / "cut").write_bytes(weight.view(torch.uint8).numpy().tobytes()[:-1])
    here = {("a.log", "avatar-7", "weight"), ("centres.npy", "avatar-7", "weight")}
    assert check(copied, "avatar-7", "--removed", whole / "before.safetensors") == (1, here)
    there = {("elsewhere.safetensors", "avatar-7", "momentum")}
    found = check(copied, "--removed", before, "--files", tmp_path / "elsewhere.safetensors")
    assert found == (1, here | there)
    assert check(copied, "avatar-2", "--removed", before) == (0, set())


def test_a_name_alone_and_a_name_that_stays_are_found_as_before(whole: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(whole / "run", tmp_path / "run"))
    code, found = check(copied, "avatar-1", "--removed", whole / "before.safetensors")
    assert code == 1
    assert {holds for _, _, holds in found} == {"name"}


def former(rows: torch.Tensor, names: list[list[str]]) -> FormerTable:
    return FormerTable(Path("before"), names, {"weight": rows})


def test_what_tells_nothing_is_counted_and_not_looked_for(tmp_path: Path) -> None:
    rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    rows[1], rows[2] = rows[0], 0.5
    removed = RemovedRows([former(rows, [["a"], ["b"], ["c"], ["d", "e"]])], [], ["a", "e"])
    assert removed.classes == {"b", "c"}  # d is one with e, which stays
    assert removed.skipped == 4  # as they are and in bfloat16: one as a's, which stays, one of a single value
    (tmp_path / "all").write_bytes(rows.numpy().tobytes())
    assert removed.found_in([tmp_path / "all"]) == []
    narrow = RemovedRows([former(rows[:, :1], [["a"], ["b"], ["c"], ["d"]])], [], [])
    assert narrow.skipped == 6  # of four bytes or two: a's and b's are one
    with pytest.raises(UsageError, match="there is no elsewhere"):
        FormerTable.opened(Path("elsewhere.safetensors"))
    with pytest.raises(UsageError, match="every class of before is still there"):
        RemovedRows([former(rows, [["a"], ["b"], ["c"], ["d"]])], [], ["a", "b", "c", "d", "x"])
    with pytest.raises(UsageError, match="before has no class z"):
        RemovedRows([former(rows, [["a"], ["b"], ["c"], ["d"]])], ["z"], ["a"])


def test_strings_are_found_where_python_finds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_search, "_READ_BYTES", 37)
    chance = random.Random(5)
    for number in range(60):
        content = bytes(chance.choices(b"\0\0\0ab", k=chance.randrange(200)))
        wanted = [content[start : start + chance.randrange(8, 40)] for start in chance.sample(range(180), 6)]
        wanted += [bytes(chance.choices(b"\0ab", k=chance.randrange(8, 12))) for _ in range(6)]
        wanted = [text for text in wanted if len(text) >= 8]
        path = tmp_path / f"{number}"
        path.write_bytes(content)
        assert ByteSearch(wanted).found_in(path) == {text for text in wanted if text in content}
    assert ByteSearch([]).found_in(path) == set()
