"""What checkpoints and configurations of earlier versions say of a table in files, and heads without a journal."""

import copy
from pathlib import Path

import pytest

import plsc
from plsc.config import from_dict
from plsc.errors import DataError
from plsc.feature_config import feature_states, keeper_of_tables
from plsc.features.journal.config import JournalConfig


@pytest.mark.parametrize("others", [{}, {"features": {"frozen": None}}], ids=["first versions", "later ones"])
def test_savepoints_of_earlier_versions_are_the_features_own(others: dict[str, object]) -> None:
    former = {**others, "savepoints": ["a", None]}
    assert feature_states(former)["journal"] == ["a", None]
    assert keeper_of_tables(former) == (JournalConfig, ["a", None])
    with pytest.raises(DataError, match=r"give the same head\.placement with journal = true"):
        JournalConfig.left_out(["a", None])


@pytest.mark.parametrize(
    "state", [{}, {"savepoints": None}, {"features": {"journal": None}}, {"features": []}], ids=str
)
def test_other_checkpoints_hold_their_rows(state: dict[str, object]) -> None:
    assert keeper_of_tables(state) is None


def test_a_configuration_of_an_earlier_version_has_the_journal() -> None:
    former = from_dict({"head": {"placement": "mmap:table", "journal": True}})
    assert former == from_dict({"head": {"placement": "mmap:table"}, "journal": True})
    assert former.keeps_tables


def test_heads_with_and_without_a_journal_have_its_attributes(tmp_path: Path) -> None:
    plain = plsc.ShardedHead(8, 4)
    assert (plain.journal, plain.undo_journal) == (False, None)
    assert copy.deepcopy(plain).undo_journal is None
    kept = plsc.ShardedHead(8, 4, placement=f"mmap:{tmp_path}/table", journal=True)
    assert (kept.journal, kept.undo_journal.step) == (True, None)
    kept.set_savepoint(3)
    assert kept.undo_journal.step == 3
