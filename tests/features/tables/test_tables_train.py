"""Several class tables in one run: each learns from its own data, and the run goes on on any number of ranks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny_runs import Killable, assert_same_losses, refusal, run, stored

from plsc.config import class_tables, from_dict, load, to_dict, to_toml
from plsc.errors import PlscError, UsageError
from plsc.tools.entry import main
from plsc.train.checkpoint_inspection import describe_checkpoint
from plsc.train.metrics import read_metrics
from plsc.train.stored_table import write_centres

Ranks = Any
SHORT = {"backbone": "plain", "sync_batchnorm": True, "epochs": None, "steps": 12, "data.batch_size": 12}


def tables(folder: Path) -> list[dict[str, Any]]:
    """Three tables: of another margin, storage, rate and weight each; the last one's pictures have two labels."""
    labels = np.stack([np.arange(24) % 6, (np.arange(24) + 1) % 6], 1)
    np.save(folder / "labels.npy", labels)
    return [
        {"name": "faces", "data": {"train": "avatars:10x6"}, "batch_share": 3.0},
        {
            "name": "scenes",
            "data": {"train": "avatars:8x4@50"},
            "loss_weight": 0.5,
            "batch_share": 2.0,
            "optim": {"head_lr": 0.02},
            "head": {"margin": "cosface", "placement": "host"},
        },
        {
            "name": "letters",
            "data": {"train": "avatars:6x4@90", "labels": str(folder / "labels.npy")},
            "head": {"centers": 2, "init_rows": str(folder / "letters.npy")},
        },
    ]


@pytest.fixture(scope="module")
def whole(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three tables on one rank, never interrupted."""
    out = tmp_path_factory.mktemp("tables")
    np.save(out / "letters.npy", np.random.default_rng(0).normal(size=(6, 16)).astype(np.float32))
    result = ranks(
        1, run, out / "run", {**SHORT, "table": tables(out), "stage": [{"from_step": 9, "head": {"m": 0.2}}]}
    )
    assert result[0]["classes"] == 10 + 8 + 6
    return out


@pytest.mark.live
def test_a_run_killed_at_three_ranks_goes_on_at_two(whole: Path, tmp_path: Path, ranks: Ranks) -> None:
    changes = {**SHORT, "table": tables(whole), "stage": [{"from_step": 9, "head": {"m": 0.2}}]}
    killed = Killable(3, tmp_path, {**changes, "data.batch_size": 4})
    killed.wait_for_step(6)
    killed.kill([0, 1, 2])
    killed.wait()
    ranks(2, run, tmp_path, {**changes, "data.batch_size": 6}, "auto")
    assert_same_losses(tmp_path, whole / "run", rel=1e-5)


@pytest.mark.exhaustive
def test_micro_batches_step_as_one_batch(whole: Path, tmp_path: Path, ranks: Ranks) -> None:
    changes = {**SHORT, "table": tables(whole), "stage": [{"from_step": 9, "head": {"m": 0.2}}]}
    for name, more in (("one", {}), ("two", {"data.batch_size": 6, "optim.accumulate": 2})):
        ranks(1, run, tmp_path / name, {**changes, "backbone": "smooth", **more})
    assert_same_losses(tmp_path / "two", tmp_path / "one", rel=1e-4)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "options",
    [
        {"head_ranks": 1, "optim.clip_norm": 1.0, "optim.clip_head": True},
        {"parallel.strategy": "fsdp", "optim.name": "adamw", "optim.lr": 0.002, "optim.head_lr": None},
    ],
    ids=["groups, clipped", "fsdp, adamw"],
)
def test_groups_and_strategies_step_as_one_rank(whole: Path, tmp_path: Path, ranks: Ranks, options: Any) -> None:
    changes = {**SHORT, "backbone": "smooth", "sync_batchnorm": False, "steps": 6, "table": tables(whole), **options}
    ranks(1, run, tmp_path / "one", changes)
    ranks(2, run, tmp_path / "two", {**changes, "data.batch_size": 6}, head_ranks=options.get("head_ranks"))
    assert_same_losses(tmp_path / "two", tmp_path / "one", rel=1e-4)


def test_each_table_is_told_of_and_stored_by_its_name(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = whole / "run"
    log = (out / "train.log").read_text()
    assert "116 images of 24 classes from avatars:10x6, avatars:8x4@50, avatars:6x4@90" in log
    assert "table scenes: 8 classes, 0.333 of a batch, loss weight 0.5, lr 0.02, cosface" in log
    assert "class table letters from head.init_rows" in log
    last = read_metrics(out)[-1]
    weights = {"faces": 1.0, "scenes": 0.5, "letters": 1.0}
    assert last["loss"] == pytest.approx(sum(weights[name] * loss for name, loss in last["table_loss"].items()))
    assert last["table_loss"].keys() == last["table_mean_norm"].keys() == weights.keys()
    step = out / "checkpoints" / "step-00000012"
    described = describe_checkpoint(step)
    assert [(each["name"], each["classes"], each["margin"]) for each in described["tables"]] == [
        ("faces", 10, "arcface"),
        ("scenes", 8, "cosface"),
        ("letters", 6, "arcface"),
    ]
    assert described["epoch"] == pytest.approx(last["epoch"])
    assert main(["checkpoint", "info", str(out)]) == 0
    assert "table scenes: 8 classes, cosface, float64; momentum float32" in capsys.readouterr().out


def test_the_centres_of_a_table_are_exported_by_its_name(whole: Path, tmp_path: Path) -> None:
    step = whole / "run" / "checkpoints" / "step-00000012"
    assert write_centres(step, tmp_path / "centres.npy", "letters")["shape"] == [6, 2, 16]
    from plsc.parallel import Mesh

    rows = stored(Mesh(0, 1, 0, torch.device("cpu")), whole / "run", 12, "head.letters.")["weight"]
    assert np.array_equal(np.load(tmp_path / "centres.npy").reshape(12, 16), rows.float().numpy())
    for name in ("", "others"):
        with pytest.raises(UsageError, match="has the class tables faces, scenes, letters; name one by --table"):
            write_centres(step, tmp_path / "none.npy", name)


def test_a_run_keeps_its_tables(whole: Path, ranks: Ranks) -> None:
    own = tables(whole)
    for changed, message in (
        (own[:2], "the tables were faces, scenes, letters when the run began and are faces, scenes now"),
        ([own[0], {**own[1], "head": {"margin": "arcface"}}, own[2]], "table scenes: head.margin was"),
        ([own[0], own[1], {**own[2], "classes": 7}], "classes were 24 and are 25"),
    ):
        assert message in ranks(1, refusal, whole / "run", {**SHORT, "table": changed}, "auto")[0]


def test_a_configuration_of_tables_survives_its_file(tmp_path: Path) -> None:
    config = load(None, {"table": tables(tmp_path), "head.s": 32.0, "optim.head_lr": 0.3})
    (tmp_path / "config.toml").write_text(to_toml(config))
    assert load(tmp_path / "config.toml") == config == from_dict(to_dict(config))
    of = class_tables(config)
    assert [table.config.head.margin for table in of] == ["arcface", "cosface", "arcface"]
    assert [table.config.optim.head_lr for table in of] == [0.3, 0.02, 0.3]
    assert {table.config.head.s for table in of} == {32.0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"table": [{"batch_share": 1.0}]}, 'table 1: name = "" names no table'),
        ({"table": [{"name": "Faces/1"}]}, "names no table; give 1 to 32 of"),
        ({"table": [{"name": "a"}, {"name": "a"}]}, 'two tables have the name "a"'),
        ({"table": [{"name": "a", "epochs": 3}]}, "it is the same for all tables of a run"),
        ({"table": [{"name": "a", "batch_share": 0.0}]}, "batch_share"),
        ({"table": [{"name": "a", "head": {"h": 0.3}}]}, "table a: head.h is no key of the margin arcface"),
        ({"table": [{"name": "a"}, {"name": "b"}], "head.placement": "mmap:/tmp/x"}, "give each a file of its own"),
        (
            {"table": [{"name": "a"}], "head.placement": "mmap:/tmp/x", "journal.enabled": True},
            "journal = true does not go with [[table]]: it is for a single table",
        ),
        (
            {"table": [{"name": "a"}], "parallel.pp": 2, "backbone": "vit_small"},
            "[[table]] is not made for parallel.pp",
        ),
    ],
)
def test_what_goes_with_no_tables_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlscError) as caught:
        load(None, changes)
    assert message in str(caught.value)


def test_fewer_rows_than_the_data_has_classes_are_refused(tmp_path: Path, ranks: Ranks) -> None:
    table = [{"name": "a", "data": {"train": "avatars:6x4"}, "classes": 5}]
    message = ranks(1, refusal, tmp_path / "run", {**SHORT, "table": table})[0]
    assert "table a has classes = 5, and avatars:6x4 6 classes; leave classes out" in message
