"""The keys of [dynamic] were of [head]: files of before hold with a warning, and runs of before go on."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_runs import assert_same_losses, refusal, run

from plsc import config
from plsc.config import class_tables
from plsc.errors import UsageError
from plsc.features.dynamic.config import DynamicConfig
from plsc.features.dynamic.named_table import NamedTable
from plsc.parallel import Mesh
from plsc.progress import note
from plsc.train.async_checkpoint import AsyncCheckpointer
from plsc.train.checkpoint import CheckpointFolder
from plsc.train.checkpoint_inspection import find_checkpoints
from plsc.train.checkpoint_reader import StoredCheckpoint

Ranks = Any
ALONE = Mesh(0, 1, 0, torch.device("cpu"))
NOW = DynamicConfig(max_classes=14, admit_after=2)
CHANGES = {"backbone": "plain", "epochs": None, "steps": 3, "data.batch_size": 12, "dynamic.max_classes": 14}


def test_a_file_and_a_command_line_of_before_warn_and_hold(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[head]\nmax_classes = 14\nadmit_after = 2\n")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert config.load(file).section(DynamicConfig) == NOW
        words = config.parse_arguments(["--head.max_classes", "14", "--head.admit_after", "2"])
    said = [str(each.message) for each in told]
    for name in ("max_classes", "admit_after"):
        assert sum(f"head.{name} is now called dynamic.{name}" in each for each in said) == 2
    assert config.load(None, words).section(DynamicConfig) == NOW


def test_tables_of_before_have_their_own_and_are_read_without_a_word() -> None:
    tables = [{"name": "faces", "head": {"max_classes": 14, "admit_after": 2}}, {"name": "scenes"}]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = config.from_dict({"table": tables, "epochs": 2})
    assert [table.config.section(DynamicConfig) for table in class_tables(loaded)] == [NOW, DynamicConfig()]
    assert DynamicConfig in {type(section) for section in loaded.features_on}
    assert config.from_dict(config.to_dict(loaded)) == loaded


@pytest.mark.parametrize(
    ("stored", "found"),
    [
        ({"head": {"max_classes": 14}}, True),
        ({"head": {}, "table": [{}, {"head": {"max_classes": 14}}]}, True),
        ({"head": {"centers": 1}, "table": [{"head": {"centers": 1}}]}, None),
        ({"head": 1, "table": [None, {"head": []}]}, None),
        (None, None),
    ],
)
def test_a_checkpoint_of_before_tells_by_its_configuration(stored: Any, found: bool | None) -> None:
    assert DynamicConfig.former_state({"config": stored}) is found


def write_as_before(path: Path) -> None:
    """Write a checkpoint anew as former versions did: the keys in [head], and no entry of the feature."""
    stored = StoredCheckpoint(path, ALONE)
    state, tensors = stored.state, stored.read("")
    state["config"]["head"] |= state["config"].pop("dynamic")
    del state["features"]["dynamic"]
    checkpointer = AsyncCheckpointer(CheckpointFolder(path.parent, ALONE), note, background=False)
    checkpointer.save(stored.step, tensors, state)
    checkpointer.close()


def test_a_run_of_before_goes_on(ranks: Ranks, tmp_path: Path) -> None:
    ranks(1, run, tmp_path / "whole", {**CHANGES, "steps": 5})
    ranks(1, run, tmp_path / "run", CHANGES)
    newest = find_checkpoints(tmp_path / "run")[-1]
    write_as_before(newest)
    with pytest.raises(UsageError, match="max_classes is 14"):
        NamedTable(newest).split("avatar-3", [f"new {number}" for number in range(12)])
    without = {**CHANGES, "dynamic.max_classes": None, "steps": 5}
    (said,) = ranks(1, refusal, tmp_path / "run", without, "auto")
    assert "dynamic.max_classes was set when the run began and is unset now" in said
    ranks(1, run, tmp_path / "run", {**CHANGES, "steps": 5}, "auto")
    assert_same_losses(tmp_path / "run", tmp_path / "whole", rel=0)


def test_a_run_of_fixed_classes_does_not_go_on_by_names(ranks: Ranks, tmp_path: Path) -> None:
    ranks(1, run, tmp_path, {**CHANGES, "dynamic.max_classes": None, "steps": 1})
    (said,) = ranks(1, refusal, tmp_path, CHANGES, "auto")
    assert "dynamic.max_classes was unset when the run began and is set now" in said
