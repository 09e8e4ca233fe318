"""plsc checkpoint: what one holds, whether it is whole, its weights as files; and one that was made to harm."""

import contextlib
import io
import json
import os
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
from untrusted.checkpoint_files import CHANGES

from plsc.errors import PlscError
from plsc.models import load_model
from plsc.tools.entry import main
from plsc.train.checkpoint_reader import listed_files

Ranks = Any
SHORT = {"epochs": None, "steps": 2, "checkpoint.every_steps": 1}
RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp": (2, {"backbone": "residual", "parallel.strategy": "fsdp", "ema_decay": 0.5, "head.momentum_dtype": "int8"}),
    "tp": (4, {"backbone": "tiny_vit", "parallel.strategy": "fsdp", "parallel.tp": 2, "head.centers": 3}),
    "pp": (2, {"backbone": "tiny_vit", "parallel.pp": 2, "parallel.pp_micro_batches": 2}),
    "turned": (1, {"backbone": "smooth", "rotation_tta": True, "data.rotation_classes": True}),
}


@pytest.fixture
def runs(trained_once: Any) -> Callable[[str], Path]:
    """Finished runs under several strategies, by name."""
    return lambda name: trained_once(RUNS[name][0], {**SHORT, **RUNS[name][1], "data.batch_size": 6})


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


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_the_backbone_of_any_strategy_is_put_together(name: str, runs: Any, tmp_path: Path, ranks: Ranks) -> None:
    words = ["--ema"] if "ema_decay" in RUNS[name][1] else []
    code, out, err = call(ranks, "export", runs(name), tmp_path / "a.safetensors", *words)
    assert (code, err) == (0, "")
    assert "step-00000002" in out
    shipped, exported = load_file(runs(name) / "model.safetensors"), load_file(tmp_path / "a.safetensors")
    assert shipped.keys() == exported.keys()
    assert all(torch.equal(shipped[key], exported[key]) for key in shipped)
    assert metadata_of(runs(name) / "model.safetensors") == metadata_of(tmp_path / "a.safetensors")


def test_the_average_is_exported_when_asked_for(runs: Any, tmp_path: Path, ranks: Ranks) -> None:
    assert call(ranks, "export", runs("fsdp"), tmp_path / "weights.safetensors")[0] == 0
    weights, average = load_file(tmp_path / "weights.safetensors"), load_file(runs("fsdp") / "model.safetensors")
    assert any(not torch.equal(weights[key], average[key]) for key in weights)
    code, _, err = call(ranks, "export", runs("pp"), tmp_path / "none.safetensors", "--ema")
    assert code == 2
    assert "holds no moving average" in err
    assert not (tmp_path / "none.safetensors").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(("name", "shape"), [("fsdp", (10, 16)), ("tp", (10, 3, 16))])
def test_class_centres_are_the_rows_of_the_table(
    name: str, shape: Any, runs: Any, tmp_path: Path, ranks: Ranks
) -> None:
    checkpoint = runs(name) / "checkpoints/step-00000001"
    code, out, _ = call(ranks, "export", checkpoint, tmp_path / "a.safetensors", "--centres", tmp_path / "c.npy")
    assert code == 0
    assert "class centres 10 x" in out
    whole = {"head.weight": torch.empty(shape).flatten(0, -2)}
    torch.distributed.checkpoint.load(whole, storage_reader=FileSystemReader(checkpoint), no_dist=True)
    assert np.array_equal(np.load(tmp_path / "c.npy"), whole["head.weight"].view(shape).numpy())


@pytest.mark.exhaustive
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
    code, out, err = call(ranks, "info", runs(name), "--json", tmp_path / "info.json")
    assert (code, err) == (0, "")
    first, second = json.loads((tmp_path / "info.json").read_text())["checkpoints"]
    assert (first["step"], second["step"]) == (1, 2)
    assert second["world_size"] == world
    assert second["run"] == str(runs(name))
    assert second["backbone"] == changes["backbone"]
    assert second["classes"] == (40 if name == "turned" else 10)
    assert second["average"] == ("ema_decay" in changes)
    assert second["strategy"] == {"fsdp": "fsdp", "tp": "fsdp, tp = 2", "pp": "ddp, pp = 2", "turned": "ddp"}[name]
    assert second["state_dtypes"] == {"momentum": changes.get("head.momentum_dtype", "float32")}
    model = load_file(runs(name) / "model.safetensors")
    assert second["parameters"] == sum(tensor.numel() for tensor in model.values())
    sizes = {path.name: path.stat().st_size for path in Path(second["checkpoint"]).iterdir()}
    sizes.pop("manifest.json")
    assert sizes == {each["name"]: each["bytes"] for each in second["files"]}
    assert second["bytes"] == sum(sizes.values())
    assert f"UTC by {world} rank" in out


def test_a_run_checkpoints_and_one_checkpoint_are_paths(runs: Any, ranks: Ranks) -> None:
    for path, count in (
        (runs("pp"), 2),
        (runs("pp") / "checkpoints", 2),
        (runs("pp") / "checkpoints/step-00000001", 1),
    ):
        code, out, _ = call(ranks, "verify", path)
        assert (code, out.count(": sound; ")) == (0, count)
    for path in (runs("pp").parent, runs("pp") / "nothing", runs("pp") / "config.toml"):
        code, _, err = call(ranks, "verify", path)
        assert code == 2
        assert err.count("\n") == 1


def test_verify_names_every_file_that_is_not_whole(runs: Any, tmp_path: Path, ranks: Ranks) -> None:
    broken = shutil.copytree(runs("tp") / "checkpoints/step-00000002", tmp_path / "step-00000002")
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


def test_a_flipped_bit_anywhere_in_the_manifest_is_named(runs: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(runs("tp") / "checkpoints/step-00000002", tmp_path / "step-00000002")
    path = folder / "manifest.json"
    content = path.read_bytes()
    assert listed_files(folder)
    for bit in range(0, 8 * len(content), 11):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with pytest.raises(PlscError, match=r"manifest\.json"):
            listed_files(folder)


def test_a_manifest_of_an_earlier_version_has_no_digest(runs: Any, tmp_path: Path, ranks: Ranks) -> None:
    folder = shutil.copytree(runs("tp") / "checkpoints/step-00000002", tmp_path / "step-00000002")
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["seal"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert call(ranks, "verify", folder)[0] == 0
    for name in ("saved_at", "accuracy"):
        del manifest[name]
        (folder / "manifest.json").write_text(json.dumps(manifest, indent=2))
        assert call(ranks, "verify", folder)[0] == 0


@pytest.mark.parametrize(
    "case",
    [
        "a manifest that is cut off",
        "a name that leads up",
        "a name with an escape",
        "metadata that call os.system",
        "no pieces",
        "a file that is a link",
        "a file that is a pipe",
        "a state of a number",
    ],
)
def test_what_was_made_to_harm_is_one_line(case: str, runs: Any, tmp_path: Path, ranks: Ranks) -> None:
    """Exported and resumed, all of these are refused in tests/untrusted."""
    folder = shutil.copytree(runs("fsdp") / "checkpoints/step-00000002", tmp_path / "in/step-00000002")
    CHANGES[case](folder)
    for word in ("verify", "info"):
        code, out, err = call(ranks, word, folder)
        assert code == 1 or (word == "info" and case.startswith("a file that is"))
        assert err.count("\n") == code
        assert "\x1b" not in out + err
    assert not Path("SHELL").exists()
