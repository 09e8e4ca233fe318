"""Exported programs from strangers: what could run code is refused before torch reads it."""

import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import plsc.models
from plsc.embedding.embedder import open_embedder
from plsc.embedding.export import export_torch
from plsc.errors import DataError

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
Members = dict[str, bytes]


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> Members:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("program") / "m.pt2"
    export_torch(plsc.models.create("timm:test_resnet", embedding_dim=8, image_size=64), path)
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def packed(path: Path, members: Members) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


class Command:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch PWNED",)


def evil_pickle() -> bytes:
    buffer = io.BytesIO()
    torch.save(Command(), buffer)
    return buffer.getvalue()


def member(members: Members, ending: str) -> str:
    return next(name for name in members if name.endswith(ending))


def edited(ending: str, edit: Callable[[Any], None]) -> Callable[[Members], None]:
    def change(members: Members) -> None:
        name = member(members, ending)
        value = json.loads(members[name])
        edit(value)
        members[name] = json.dumps(value).encode()

    return change


def sample_inputs(members: Members) -> None:
    members[member(members, "sample_inputs/model.pt")] = evil_pickle()


def pickled_weight(members: Members) -> None:
    members[member(members, "/weight_0")] = evil_pickle()

    def mark(config: Any) -> None:
        payloads = {payload["path_name"]: payload for payload in config["config"].values()}
        payloads["weight_0"]["use_pickle"] = True

    edited("weights_config.json", mark)(members)


def opaque_constant(members: Members) -> None:
    root = next(iter(members)).partition("/")[0]
    members[f"{root}/data/constants/opaque_obj_0"] = pickle.dumps(Command())
    payload = {"path_name": "opaque_obj_0", "is_param": False, "use_pickle": False, "tensor_meta": None}
    edited("constants_config.json", lambda config: config["config"].update(evil=payload))(members)


def nodes(model: Any) -> list[Any]:
    found: list[Any] = model["graph_module"]["graph"]["nodes"]
    return found


def first_input(model: Any, name: str) -> None:
    model["graph_module"]["graph"]["inputs"][0]["as_tensor"]["name"] = name


def expression(model: Any, text: str) -> None:
    def replace(value: Any) -> None:
        for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            replace(item)
        if isinstance(value, dict) and "expr_str" in value:
            value["expr_str"] = text

    replace(model)


EVIL = "__import__('os').system('touch PWNED')"
CHANGES: dict[str, Callable[[Members], None]] = {
    "pickled example inputs": sample_inputs,
    "pickled weight": pickled_weight,
    "opaque constant": opaque_constant,
    "call of another function": edited("models/model.json", lambda m: nodes(m)[0].update(target="torch.hub.load")),
    "call that opens a file": edited(
        "models/model.json", lambda m: nodes(m)[0].update(target="torch.ops.aten.from_file.default")
    ),
    "operator that calls": edited("models/model.json", lambda m: nodes(m)[0].update(target="_operator.methodcaller")),
    "code in an expression": edited("models/model.json", lambda m: expression(m, EVIL)),
    "attribute in an expression": edited("models/model.json", lambda m: expression(m, "Symbol('x').__class__")),
    "code in a name": edited("models/model.json", lambda m: first_input(m, f"x={EVIL}")),
    "code in a guard": edited("models/model.json", lambda m: m.update(guards_code=[EVIL])),
    "compiled code": lambda members: members.update({"m/data/aotinductor/model/x.so": b"\x7fELF"}),
    "older format": lambda members: members.update({"serialized_state_dict.pt": evil_pickle()}),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", CHANGES)
def test_what_could_run_code_is_refused(what, members, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    changed = dict(members)
    CHANGES[what](changed)
    assert changed != members
    with pytest.raises(DataError, match="is refused") as caught:
        open_embedder(packed(tmp_path / "evil.pt2", changed), device=CPU)
    assert "\n" not in str(caught.value)
    assert not Path("PWNED").exists()


def test_the_same_archive_unchanged_is_accepted(members: Members, tmp_path: Path) -> None:
    embedder = open_embedder(packed(tmp_path / "good.pt2", members), device=CPU)
    assert (embedder.embedding_dim, embedder.image_size) == (8, 64)


def test_a_name_that_stands_twice_is_refused(members: Members, tmp_path: Path) -> None:
    path = packed(tmp_path / "twice.pt2", members)
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(path, "a") as archive:
        archive.writestr(member(members, "models/model.json"), "{}")
    with pytest.raises(DataError, match="holds a name twice"):
        open_embedder(path, device=CPU)


def test_changed_weights_lose_the_claimed_contract(members: Members, tmp_path: Path) -> None:
    changed = dict(members)
    name = member(members, "/weight_0")
    changed[name] = bytes(4) + changed[name][4:]
    ids = {
        open_embedder(packed(tmp_path / f"{i}.pt2", files), device=CPU).contract_id
        for i, files in enumerate((members, changed))
    }
    assert len(ids) == 2


def test_truncated_and_damaged_archives_are_one_line(members: Members, tmp_path: Path) -> None:
    whole = packed(tmp_path / "whole.pt2", members).read_bytes()
    damaged = bytearray(whole)
    for i in range(len(whole) // 3, len(whole) // 3 + 50):
        damaged[i] ^= 0xFF
    for content in (whole[: len(whole) // 2], whole[:-1], bytes(damaged)):
        (tmp_path / "bad.pt2").write_bytes(content)
        with pytest.raises(DataError, match=r"bad\.pt2"):
            open_embedder(tmp_path / "bad.pt2", device=CPU)
    missing = {name: content for name, content in members.items() if not name.endswith("model.json")}
    with pytest.raises(DataError, match="is no exported embedding model"):
        open_embedder(packed(tmp_path / "missing.pt2", missing), device=CPU)
