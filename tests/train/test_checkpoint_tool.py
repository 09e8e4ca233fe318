"""plsc checkpoint: what one holds, whether it is whole, its weights as files; and one that was made to harm."""

import contextlib
import hashlib
import io
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from support.tiny_runs import register_tiny, run
from torch.distributed.checkpoint import FileSystemReader

from plsc.models import load_model
from plsc.tools.entry import main

Ranks = Any
SHORT = {"epochs": None, "steps": 2, "checkpoint.every_steps": 1}
RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp": (2, {"backbone": "residual", "parallel.strategy": "fsdp", "ema_decay": 0.5, "head.momentum_dtype": "int8"}),
    "tp": (4, {"backbone": "tiny_vit", "parallel.strategy": "fsdp", "parallel.tp": 2, "head.centers": 3}),
    "pp": (2, {"backbone": "tiny_vit", "parallel.pp": 2, "parallel.pp_micro_batches": 2}),
    "turned": (1, {"backbone": "smooth", "rotation_tta": True, "data.rotation_classes": True}),
}


@pytest.fixture(scope="module")
def runs(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Finished runs under several strategies, by name."""
    folder = tmp_path_factory.mktemp("runs")
    for name, (world, changes) in RUNS.items():
        ranks(world, run, folder / name, {**SHORT, **changes, "data.batch_size": 6})
    return {name: folder / name for name in RUNS}


def command(mesh: Any, argv: list[str]) -> tuple[int, str, str]:
    """Exit code, output and errors of ``plsc checkpoint`` in a process that knows the tests' backbones."""
    register_tiny()
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["checkpoint", *argv])
    return code, out.getvalue(), err.getvalue()


def call(ranks: Ranks, *argv: object) -> tuple[int, str, str]:
    answer: tuple[int, str, str] = ranks(1, command, [str(word) for word in argv])[0]
    return answer


def metadata_of(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        return dict(file.metadata())


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_the_backbone_of_any_strategy_is_put_together(name: str, runs: Any, tmp_path: Path, ranks: Ranks) -> None:
    words = ["--ema"] if "ema_decay" in RUNS[name][1] else []
    code, out, err = call(ranks, "export", runs[name], tmp_path / "a.safetensors", *words)
    assert (code, err) == (0, "")
    assert "step-00000002" in out
    shipped, exported = load_file(runs[name] / "model.safetensors"), load_file(tmp_path / "a.safetensors")
    assert shipped.keys() == exported.keys()
    assert all(torch.equal(shipped[key], exported[key]) for key in shipped)
    assert metadata_of(runs[name] / "model.safetensors") == metadata_of(tmp_path / "a.safetensors")


def test_the_average_is_exported_when_asked_for(runs: Any, tmp_path: Path, ranks: Ranks) -> None:
    assert call(ranks, "export", runs["fsdp"], tmp_path / "weights.safetensors")[0] == 0
    weights, average = load_file(tmp_path / "weights.safetensors"), load_file(runs["fsdp"] / "model.safetensors")
    assert any(not torch.equal(weights[key], average[key]) for key in weights)
    code, _, err = call(ranks, "export", runs["pp"], tmp_path / "none.safetensors", "--ema")
    assert code == 2
    assert "holds no moving average" in err
    assert not (tmp_path / "none.safetensors").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(("name", "shape"), [("fsdp", (10, 16)), ("tp", (10, 3, 16))])
def test_class_centres_are_the_rows_of_the_table(
    name: str, shape: Any, runs: Any, tmp_path: Path, ranks: Ranks
) -> None:
    checkpoint = runs[name] / "checkpoints/step-00000001"
    code, out, _ = call(ranks, "export", checkpoint, tmp_path / "a.safetensors", "--centres", tmp_path / "c.npy")
    assert code == 0
    assert "class centres 10 x" in out
    whole = {"head.weight": torch.empty(shape).flatten(0, -2)}
    torch.distributed.checkpoint.load(whole, storage_reader=FileSystemReader(checkpoint), no_dist=True)
    assert np.array_equal(np.load(tmp_path / "c.npy"), whole["head.weight"].view(shape).numpy())


@pytest.mark.slow
def test_other_commands_take_the_exported_weights(tmp_path: Path, ranks: Ranks) -> None:
    ranks(1, run, tmp_path / "run", {**SHORT, "backbone": "mobilefacenet", "steps": 1})
    for name in ("a.safetensors", "a.pt"):
        assert main(["checkpoint", "export", str(tmp_path / "run"), str(tmp_path / name)]) == 0
    model = load_model(tmp_path / "a.safetensors")
    state = torch.load(tmp_path / "a.pt", weights_only=True)
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    words = ["--data", "avatars:4x2@50", "--out", str(tmp_path / "a.emb")]
    assert main(["embed", str(tmp_path / "a.safetensors"), *words]) == 0


@pytest.mark.parametrize("name", RUNS)
def test_info_says_what_was_run(name: str, runs: Any, tmp_path: Path, ranks: Ranks) -> None:
    world, changes = RUNS[name]
    code, out, err = call(ranks, "info", runs[name], "--json", tmp_path / "info.json")
    assert (code, err) == (0, "")
    first, second = json.loads((tmp_path / "info.json").read_text())["checkpoints"]
    assert (first["step"], second["step"]) == (1, 2)
    assert second["world_size"] == world
    assert second["run"] == str(runs[name])
    assert second["backbone"] == changes["backbone"]
    assert second["classes"] == (40 if name == "turned" else 10)
    assert second["average"] == ("ema_decay" in changes)
    assert second["strategy"] == {"fsdp": "fsdp", "tp": "fsdp, tp = 2", "pp": "ddp, pp = 2", "turned": "ddp"}[name]
    assert second["state_dtypes"] == {"momentum": changes.get("head.momentum_dtype", "float32")}
    model = load_file(runs[name] / "model.safetensors")
    assert second["parameters"] == sum(tensor.numel() for tensor in model.values())
    sizes = {path.name: path.stat().st_size for path in Path(second["checkpoint"]).iterdir()}
    sizes.pop("manifest.json")
    assert sizes == {each["name"]: each["bytes"] for each in second["files"]}
    assert second["bytes"] == sum(sizes.values())
    assert f"UTC by {world} rank" in out


def test_a_run_checkpoints_and_one_checkpoint_are_paths(runs: Any, ranks: Ranks) -> None:
    for path, count in (
        (runs["pp"], 2),
        (runs["pp"] / "checkpoints", 2),
        (runs["pp"] / "checkpoints/step-00000001", 1),
    ):
        code, out, _ = call(ranks, "verify", path)
        assert (code, out.count(": sound; ")) == (0, count)
    for path in (runs["pp"].parent, runs["pp"] / "nothing", runs["pp"] / "config.toml"):
        code, _, err = call(ranks, "verify", path)
        assert code == 2
        assert err.count("\n") == 1


def test_verify_names_every_file_that_is_not_whole(runs: Any, tmp_path: Path, ranks: Ranks) -> None:
    broken = shutil.copytree(runs["tp"] / "checkpoints/step-00000002", tmp_path / "step-00000002")
    (broken / "__0_0.distcp").unlink()
    os.truncate(broken / "__1_0.distcp", 1000)
    content = bytearray((broken / "__2_0.distcp").read_bytes())
    content[len(content) // 2] ^= 1
    (broken / "__2_0.distcp").write_bytes(content)
    code, out, err = call(ranks, "verify", broken, "--json", tmp_path / "found.json")
    assert code == 1
    assert "3 problems" in out
    (result,) = json.loads((tmp_path / "found.json").read_text())["checkpoints"]
    for name, word in (
        ("__0_0.distcp", "is missing"),
        ("__1_0.distcp", "has 1000 bytes"),
        ("__2_0.distcp", "is corrupt"),
    ):
        assert sum(name in line and word in line for line in result["problems"]) == 1
    assert err.splitlines() == [f"plsc checkpoint: {line}" for line in result["problems"]]


# A checkpoint that was made to harm: its hashes fit, unless they are what is wrong.


def rehash(folder: Path) -> None:
    """Let the manifest describe the files as they are."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for name, entry in manifest["files"].items():
        content = (folder / name).read_bytes()
        entry |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def in_manifest(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        manifest = json.loads((folder / "manifest.json").read_text())
        change(manifest["files"])
        (folder / "manifest.json").write_text(json.dumps(manifest))

    return apply


def in_metadata(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        metadata = FileSystemReader(folder).read_metadata()
        change(metadata)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        rehash(folder)

    return apply


def in_state(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        state = json.loads((folder / "state.json").read_text())
        change(state)
        (folder / "state.json").write_text(json.dumps(state))
        rehash(folder)

    return apply


def link(folder: Path) -> None:
    shutil.move(folder / "__0_0.distcp", folder.parent / "elsewhere")
    (folder / "__0_0.distcp").symlink_to(folder.parent / "elsewhere")


def pipe(folder: Path) -> None:
    (folder / "__0_0.distcp").unlink()
    os.mkfifo(folder / "__0_0.distcp")


def touching(folder: Path) -> Any:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (folder.parent / "touched",)

    return Evil()


def evil_metadata(folder: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(touching(folder)))
    rehash(folder)


def evil_pieces(folder: Path) -> None:
    """Every piece of the first rank's file is a pickle of as many bytes."""
    metadata = FileSystemReader(folder).read_metadata()
    content = bytearray((folder / "__0_0.distcp").read_bytes())
    evil = pickle.dumps(touching(folder))
    for info in metadata.storage_data.values():
        if info.relative_path == "__0_0.distcp" and info.length > len(evil):
            content[info.offset : info.offset + len(evil)] = evil
    (folder / "__0_0.distcp").write_bytes(content)
    rehash(folder)


def resized(metadata: Any) -> None:
    """A tensor of the backbone of which no file could hold a share."""
    entry = metadata.state_dict_metadata["backbone.layers.0.weight"]
    entry.size = torch.Size([1 << 40, 4])
    entry.chunks[0].sizes = entry.size


HOSTILE: dict[str, Callable[[Path], None]] = {
    "manifest cut off": lambda folder: os.truncate(folder / "manifest.json", 50),
    "manifest of another kind": lambda folder: (folder / "manifest.json").write_text("[1]") and None,
    "manifest nested deeply": lambda folder: (folder / "manifest.json").write_text("[" * 100_000) and None,
    "manifest missing": lambda folder: (folder / "manifest.json").unlink(),
    "a name that leads up": in_manifest(lambda files: files.update({"../up": files["state.json"]})),
    "an absolute name": in_manifest(lambda files: files.update({"/etc/passwd": files["state.json"]})),
    "a name with an escape": in_manifest(lambda files: files.update({"a\x1b[2J": files["state.json"]})),
    "less than no bytes": in_manifest(lambda files: files["__0_0.distcp"].update(bytes=-1)),
    "a size in words": in_manifest(lambda files: files["__0_0.distcp"].update(bytes="many")),
    "a huge size": in_manifest(lambda files: files["__0_0.distcp"].update(bytes=10**30)),
    "no hash": in_manifest(lambda files: files["__0_0.distcp"].pop("sha256")),
    "a link": link,
    "a pipe": pipe,
    "evil metadata": evil_metadata,
    "a huge tensor": in_metadata(resized),
    "no pieces": in_metadata(lambda metadata: metadata.state_dict_metadata["backbone.layers.0.weight"].chunks.clear()),
    "a size that is none": in_metadata(
        lambda metadata: setattr(metadata.state_dict_metadata["backbone.layers.0.weight"], "size", "x")
    ),
    "metadata of nothing": in_metadata(lambda metadata: metadata.__dict__.clear()),
    "a tensor less": in_metadata(lambda metadata: metadata.state_dict_metadata.pop("backbone.layers.0.weight")),
    "a piece that is nowhere": in_metadata(lambda metadata: metadata.storage_data.clear()),
    "evil pieces": evil_pieces,
    "a state of another kind": lambda folder: (folder / "state.json").write_text("7") and rehash(folder),
    "a state without a step": in_state(lambda state: state.pop("step")),
    "no such backbone": in_state(lambda state: state["config"].update(backbone="iresnet_none")),
    "a wide backbone": in_state(lambda state: state["config"].update(embedding_dim=1 << 40)),
    "a name of a backbone with an escape": in_state(lambda state: state["config"].update(backbone="\x1b[2J")),
}
# What only its user can see: the files are whole.
ONLY_IN_EXPORT = {"a tensor less", "evil pieces", "no such backbone", "a wide backbone"}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_was_made_to_harm_is_one_line(case: str, runs: Any, tmp_path: Path, ranks: Ranks) -> None:
    folder = shutil.copytree(runs["fsdp"] / "checkpoints/step-00000002", tmp_path / "in/step-00000002")
    HOSTILE[case](folder)
    (tmp_path / "out").mkdir()
    words = [tmp_path / "out/a.safetensors", "--centres", tmp_path / "out/c.npy"]
    code, out, err = call(ranks, "export", folder, *words)
    if case != "a state without a step":  # which no weight depends on
        assert (code, err.count("\n")) == (1, 1), err
        assert err.startswith("plsc checkpoint: error: ")
        assert not list((tmp_path / "out").iterdir())
    code, out, err = call(ranks, "verify", folder)
    assert code == (0 if case in ONLY_IN_EXPORT else 1), err
    code, out, err = call(ranks, "info", folder)
    assert code in (0, 1)
    assert err.count("\n") == code
    assert "\x1b" not in out + err
    assert not (tmp_path / "in/touched").exists()
