"""plsc table: what a checkpoint's class table is, as a file, and as shards of arcface_torch, both ways.

The fixtures were written by arcface_torch's own code (tests/fixtures/make_arcface_torch_shards.py). With its folder in
PLSC_ARCFACE_TORCH (insightface/recognition/arcface_torch), its code loads what is written here.
"""

import importlib.util
import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from support.tiny_runs import run
from torch.distributed.checkpoint import FileSystemReader

from plsc.tools.entry import main
from plsc.train.stored_table import StoredTable

Ranks = Any
SHARDS = Path(__file__).parents[1] / "fixtures" / "arcface_torch_shards"
EXPECTED = np.load(SHARDS / "expected.npz")
KINDS = {"v2": "checkpoint_gpu_{}.pt", "2022": "softmax_fc_gpu_{}.pt", "2021": "rank_{}_softmax_weight.pt"}
SHORT = {"epochs": None, "steps": 2, "checkpoint.every_steps": 2, "data.train": "avatars:11x4", "data.batch_size": 6}
THEIR_CODE = os.environ.get("PLSC_ARCFACE_TORCH", "")


@pytest.fixture(scope="module")
def trained(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of 11 classes of 16 on two ranks."""
    out = tmp_path_factory.mktemp("trained") / "run"
    ranks(2, run, out, SHORT)
    return out


def table(*words: object) -> int:
    return main(["table", *map(str, words)])


def whole(path: Path, **shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Tensors of a run's last checkpoint, as torch reads them."""
    tensors = {name.replace("__", "."): torch.empty(shape) for name, shape in shapes.items()}
    reader = FileSystemReader(path / "checkpoints" / "step-00000002")
    torch.distributed.checkpoint.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


@pytest.mark.parametrize("kind", ["v2", "adamw", "2022", "2021"])
def test_shards_that_arcface_torch_wrote_are_joined(kind: str, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "table.safetensors"
    assert table("import", SHARDS / kind, out, "--classes", 11, "--json", tmp_path / "found.json") == 0
    expected = {key.partition(".")[2]: EXPECTED[key] for key in EXPECTED if key.startswith(f"{kind}.")}
    joined = load_file(out)
    assert joined.keys() == expected.keys()
    assert all(np.array_equal(joined[name].numpy(), expected[name]) for name in expected)
    with safe_open(out, framework="pt") as file:
        assert file.metadata()["classes"] == "11"
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["state"] == sorted(expected.keys() - {"weight"})
    assert "11 rows of 4 of 3 ranks" in capsys.readouterr().out
    assert table("import", *reversed(list((SHARDS / kind).iterdir())), tmp_path / "table.npy") == 0
    assert np.array_equal(np.load(tmp_path / "table.npy"), expected["weight"])
    assert ("left out: " in capsys.readouterr().out) == (len(expected) > 1)


def missing(folder: Path, name: str) -> None:
    (folder / name.format(1)).unlink()


def missing_last(folder: Path, name: str) -> None:
    (folder / name.format(2)).unlink()


def twice(folder: Path, name: str) -> None:
    (folder / "more").mkdir()
    shutil.copy(folder / name.format(1), folder / "more")


def other_world(folder: Path, name: str) -> None:
    shutil.copy(folder / name.format(0), folder / name.format(3))


def rewritten(make: Any) -> Any:
    def change(folder: Path, name: str) -> None:
        weight = torch.load(folder / name.format(1), weights_only=True)["weight"]
        torch.save({"weight": make(weight)}, folder / name.format(1))

    return change


def truncated(folder: Path, name: str) -> None:
    os.truncate(folder / name.format(1), 900)


def pickled(folder: Path, name: str) -> None:
    (folder / name.format(1)).write_bytes(pickle.dumps(Path("x")))


def two_kinds(folder: Path, _: str) -> None:
    for path in (SHARDS / "v2").iterdir():
        shutil.copy(path, folder)


def no_shards(folder: Path, name: str) -> None:
    for rank in range(3):
        (folder / name.format(rank)).rename(folder / f"{rank}.pt")


def no_momentum(folder: Path, _: str) -> None:
    (folder / "rank_2_softmax_weight_mom.pt").unlink()


@pytest.mark.parametrize(
    ("kind", "change", "words", "code", "message"),
    [
        ("2022", missing, [], 1, "softmax_fc_gpu_1.pt is missing: all ranks' files are needed"),
        (
            "2022",
            missing_last,
            ["--classes", "11"],
            1,
            "_0.pt has 4 rows, where rank 0's are 6 of 11 classes on 2",
        ),
        ("2022", other_world, [], 1, "_2.pt has 3 rows, where rank 2's are 4 of 15 classes on 4 ranks: a file is"),
        ("2022", twice, ["more"], 1, "softmax_fc_gpu_1.pt is rank 1's, as "),
        (
            "2022",
            rewritten(lambda w: w[:, :3].clone()),
            [],
            1,
            "_1.pt has rows of 3 numbers, and softmax_",
        ),
        ("2022", rewritten(lambda w: w.half()), [], 1, "_1.pt holds float16 (weight), and softmax_fc_gpu_0.pt fl"),
        ("2022", rewritten(lambda w: w[0].clone()), [], 1, "softmax_fc_gpu_1.pt holds no rows of a class table"),
        ("2022", rewritten(lambda w: w[:1].clone().expand(4, 4)), [], 1, "softmax_fc_gpu_1.pt is no plain state_dict"),
        ("v2", missing, [], 1, "checkpoint_gpu_1.pt is missing"),
        ("2022", truncated, [], 1, "softmax_fc_gpu_1.pt is "),
        ("2022", pickled, [], 1, "softmax_fc_gpu_1.pt is refused: it is no plain state_dict"),
        ("2021", no_momentum, [], 1, "rank_2_softmax_weight.pt has no counterpart: give the momenta of all ranks"),
        ("2022", two_kinds, [], 2, "holds shards of several kinds (checkpoint_gpu_R.pt, softmax_fc_gpu_R.pt): name"),
        (
            "2022",
            no_shards,
            [],
            2,
            "holds no shards: checkpoint_gpu_R.pt, softmax_fc_gpu_R.pt, rank_R",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_is_no_run_of_shards_is_one_line(
    kind: str, change: Any, words: list[str], code: int, message: str, tmp_path: Path, capsys: Any
) -> None:
    folder = shutil.copytree(SHARDS / kind, tmp_path / "in")
    change(folder, KINDS[kind])
    folders = [folder, *(folder / word for word in words if word == "more")]
    options = [word for word in words if word != "more"]
    assert table("import", *folders, tmp_path / "t.npy", *options) == code
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert message in err
    assert not (tmp_path / "t.npy").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_table_is_described_and_exported(trained: Path, tmp_path: Path, capsys: Any) -> None:
    stored = whole(trained, head__weight=(11, 16), head_optimizer__momentum=(11, 16))
    assert table("info", trained, "--json", tmp_path / "info.json") == 0
    out = capsys.readouterr().out
    info = json.loads((tmp_path / "info.json").read_text())
    norms = stored["head.weight"].double().norm(dim=1)
    assert info["norms"] == pytest.approx(
        {"min": norms.min().item(), "mean": norms.mean().item(), "max": norms.max().item(), "not_finite": 0}
    )
    assert (info["rows"], info["dim"], info["centers"], info["margin"]) == (11, 16, 1, "arcface")
    assert info["state_dtypes"] == {"momentum": "float32"}
    assert info["files"]["weight"] == ["__0_0.distcp", "__1_0.distcp"]
    assert "11 of 16: 11 classes, arcface" in out
    assert table("export", trained, tmp_path / "t.safetensors") == 0
    exported = load_file(tmp_path / "t.safetensors")
    assert torch.equal(exported.pop("weight"), stored["head.weight"])
    assert torch.equal(exported.pop("momentum"), stored["head_optimizer.momentum"])
    assert not exported
    with safe_open(tmp_path / "t.safetensors", framework="pt") as file:
        assert file.metadata() == {
            "format": "plsc-table-1",
            "classes": "11",
            "centers": "1",
            "step": "2",
            "margin": "arcface",
            "table": "",
        }


def test_rows_that_are_not_finite_are_counted(trained: Path, tmp_path: Path, capsys: Any) -> None:
    def poisoned(self: StoredTable, column: str, start: int, stop: int) -> torch.Tensor:
        rows = torch.full((11, 16), 1e30)  # whose squares are beyond float32
        rows[3, 5], rows[7, 0] = float("nan"), float("inf")
        return rows[start:stop]

    with mock.patch.object(StoredTable, "floats", poisoned):
        assert table("info", trained, "--json", tmp_path / "info.json") == 0
    assert "2 rows not finite" in capsys.readouterr().out
    norms = json.loads((tmp_path / "info.json").read_text())["norms"]
    assert norms == pytest.approx({"min": 4e30, "mean": 4e30, "max": 4e30, "not_finite": 2})


def loaded_by_their_code(folder: Path, rank: int, world_size: int) -> tuple[int, torch.Tensor]:
    """(class_start, rows) of rank's PartialFC_V2 after its strict load_state_dict."""
    spec = importlib.util.spec_from_file_location("partial_fc_v2", Path(THEIR_CODE) / "partial_fc_v2.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    world = {"is_initialized": lambda: True, "get_rank": lambda: rank, "get_world_size": lambda: world_size}
    with mock.patch.multiple(module.distributed, **world):
        head = module.PartialFC_V2(lambda logits, labels: logits, 16, 11)
    head.load_state_dict(torch.load(folder / f"softmax_fc_gpu_{rank}.pt"))
    return head.class_start, head.weight.detach()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("world", [1, 2, 3])
def test_shards_for_arcface_torch_hold_what_its_ranks_hold(world: int, trained: Path, tmp_path: Path) -> None:
    stored = whole(trained, head__weight=(11, 16), head_optimizer__momentum=(11, 16))
    weight, momentum = stored["head.weight"], stored["head_optimizer.momentum"]
    for layout in ("arcface_torch", "arcface_torch-2021"):
        assert table("export", trained, tmp_path / layout, "--format", layout, "--world-size", world) == 0
    first = 0
    for rank in range(world):
        stop = first + 11 // world + (rank < 11 % world)
        state = torch.load(tmp_path / "arcface_torch" / f"softmax_fc_gpu_{rank}.pt", weights_only=True)
        assert state.keys() == {"weight"}
        assert torch.equal(state["weight"], weight[first:stop])
        for name, rows in (("weight", weight), ("weight_mom", momentum)):
            found = torch.load(tmp_path / "arcface_torch-2021" / f"rank_{rank}_softmax_{name}.pt", weights_only=True)
            assert torch.equal(found, rows[first:stop])
        if THEIR_CODE:
            start, theirs = loaded_by_their_code(tmp_path / "arcface_torch", rank, world)
            assert start == first
            assert torch.equal(theirs, weight[first:stop])
        first = stop
    assert len(list((tmp_path / "arcface_torch").iterdir())) == world
    for layout in ("arcface_torch", "arcface_torch-2021"):
        assert table("import", tmp_path / layout, tmp_path / f"{layout}.safetensors", "--classes", 11) == 0
        again = load_file(tmp_path / f"{layout}.safetensors")
        assert torch.equal(again["weight"], weight)
        assert "momentum" not in again or torch.equal(again["momentum"], momentum)


def test_shards_of_fewer_ranks_take_the_place_of_more(trained: Path, tmp_path: Path, capsys: Any) -> None:
    words = ["--format", "arcface_torch", "--world_size"]
    assert table("export", trained, tmp_path / "shards", *words, 3) == 0
    assert table("export", trained, tmp_path / "shards", *words, 2) == 2
    assert "--overwrite" in capsys.readouterr().err
    (tmp_path / "shards" / "checkpoint_gpu_0.pt").touch()
    assert table("export", trained, tmp_path / "shards", *words, 2, "--overwrite") == 0
    kept = ["checkpoint_gpu_0.pt", "softmax_fc_gpu_0.pt", "softmax_fc_gpu_1.pt"]
    assert sorted(path.name for path in (tmp_path / "shards").iterdir()) == kept


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["export", "RUN", "t.pt"], "t.pt: name a .safetensors file, or give --format arcface_torch --world-size W"),
        (["export", "RUN", "t", "--format", "arcface_torch"], "--world-size W goes with --format arcface_torch"),
        (["export", "RUN", "t.safetensors", "--world-size", "2"], "--world-size W goes with --format arcface_torch"),
        (["export", "RUN", "t", "--format", "arcface_torch", "--world-size", "12"], "--world-size 12: there are 11"),
        (["export", "RUN", "t.safetensors", "--table", "faces"], "has the class tables none, as it has a single one"),
        (["import", "RUN", "t.txt"], "t.txt: name a .safetensors or a .npy file"),
        (["import", "nothing.pt", "t.npy"], "nothing.pt does not exist; name the folder of"),
        (["info", "nothing"], "nothing is no folder; name a checkpoint"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], message: str, trained: Path, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    code = table(*[trained if word == "RUN" else word for word in words])
    err = capsys.readouterr().err
    assert (code, err.count("\n")) == (2, 1)
    assert message in err
    assert not Path("t").exists()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "changes",
    [
        {"head.centers": 3, "head.weight_dtype": "bfloat16", "head.momentum_dtype": "int8"},
        {"optim.name": "adamw"},
        {"head.placement": "mmap:FOLDER/table", "journal.enabled": True},
    ],
    ids=["sub-centres", "adamw", "journal"],
)
def test_tables_of_other_types(changes: dict[str, Any], ranks: Ranks, tmp_path: Path, capsys: Any) -> None:
    changes = {
        key: value.replace("FOLDER", str(tmp_path)) if isinstance(value, str) else value
        for key, value in changes.items()
    }
    ranks(2, run, tmp_path / "run", {**SHORT, **changes})
    words = [tmp_path / "run", tmp_path / "w.safetensors", "--centres", tmp_path / "c.npy"]
    ranks(1, exported_centres, [str(word) for word in words])
    centres = np.load(tmp_path / "c.npy").reshape(-1, 16)
    assert table("info", tmp_path / "run") == 0
    assert table("export", tmp_path / "run", tmp_path / "t.safetensors") == 0
    exported = load_file(tmp_path / "t.safetensors")
    assert np.array_equal(exported["weight"].float().numpy(), centres)
    out = capsys.readouterr().out
    shards = ["export", tmp_path / "run", tmp_path / "shards", "--format", "arcface_torch-2021", "--world-size", 2]
    if "head.centers" in changes:
        assert exported["weight"].dtype == torch.bfloat16
        assert exported.keys() == {"weight", "momentum", "momentum_scale"}
        assert "11 classes x 3 sub-centres" in out
        assert table(*shards) == 2
        return
    assert table(*shards) == 0
    assert table("import", tmp_path / "shards", tmp_path / "again.safetensors") == 0
    again = load_file(tmp_path / "again.safetensors")
    assert np.array_equal(again["weight"].numpy(), centres)
    assert not again["momentum"].any()
    if "optim.name" in changes:
        assert exported.keys() == {"weight", "first_moment", "second_moment"}
    else:
        assert exported.keys() == {"weight"}
        assert "optimizer: left out, as it is in the table's files" in out


def exported_centres(mesh: Any, words: list[str]) -> None:
    from support.tiny_runs import register_tiny

    register_tiny()
    assert main(["checkpoint", "export", *words]) == 0
