"""Error rates by group against a count of every pair, and the list of groups by the command."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from plsc.errors import DataError
from plsc.evaluation import score
from plsc.evaluation.groups import group_rates, read_groups
from plsc.evaluation.roc import all_pairs_roc
from plsc.tools.entry import main

SET = "avatars:24x4@1000"


def problem(seed: int = 0) -> tuple[np.ndarray, np.ndarray, list[str], dict[str, str]]:
    """Unit rows of 40 people, of whom the second group's are alike; three people have no group."""
    generator = np.random.default_rng(seed)
    labels = np.repeat(np.arange(40), 6)[generator.permutation(240)]
    centres = generator.standard_normal((40, 16)) + np.where(np.arange(40) % 2, 1.0, 0.0)[:, None]
    rows = centres[labels] + 0.8 * generator.standard_normal((240, 16))
    names = [f"person {number}" for number in range(40)]
    groups = {name: "ab"[number % 2] for number, name in enumerate(names) if number > 2}
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32), labels, names, groups


def test_rates_are_those_of_every_pair_at_one_threshold() -> None:
    unit, labels, names, groups = problem()
    found = group_rates(unit, labels, names, groups, all_pairs_roc(unit, labels), seed=0)
    cosines, same = unit.astype(np.float64) @ unit.T.astype(np.float64), labels[:, None] == labels[None, :]
    once = np.triu(np.ones_like(same), k=1)
    different = once & ~same
    assert found["far"] == 1e-2  # 5,940 different pairs in the smaller group
    assert np.sum(cosines[different] >= found["threshold"] - 1e-6) / different.sum() == pytest.approx(1e-2, abs=1e-4)
    assert found["identities_left_out"] == 3
    for name, rates in found["groups"].items():
        of_group = np.array([groups.get(names[label]) == name for label in labels])
        inside = of_group[:, None] & of_group[None, :]
        impostors, genuine = cosines[different & inside], cosines[once & same & inside]
        assert (rates["images"], rates["identities"]) == (of_group.sum(), len(set(labels[of_group])))
        assert (rates["impostor_pairs"], rates["genuine_pairs"]) == (len(impostors), len(genuine))
        matched = np.sum(impostors >= found["threshold"])
        assert abs(rates["false_matches"] - matched) <= 1  # cosines are counted in bins of 2^-21
        assert rates["fmr"] == rates["false_matches"] / len(impostors)
        assert rates["fnmr"] == pytest.approx(np.mean(genuine < found["threshold"]), abs=1 / len(genuine))
    assert found["groups"]["b"]["fmr"] > 2 * found["groups"]["a"]["fmr"]


def test_a_small_group_has_no_rate_that_is_chance() -> None:
    unit, labels, names, groups = problem()
    few = {name: "few" if name in ("person 3", "person 4") else group for name, group in groups.items()}
    found = group_rates(unit, labels, names, few, all_pairs_roc(unit, labels), seed=0)
    assert found["groups"]["few"]["impostor_pairs"] == 36
    assert found["groups"]["few"]["fmr"] is None
    with pytest.raises(DataError, match="none of the 40 identities has a group"):
        group_rates(unit, labels, names, {"somebody": "a"}, all_pairs_roc(unit, labels), seed=0)
    with pytest.raises(DataError, match="need 100 different pairs"):
        group_rates(unit[:9], labels[:9], names, groups, all_pairs_roc(unit[:9], labels[:9]), seed=0)
    assert "by_group" not in score(torch.from_numpy(unit), torch.from_numpy(labels))


@pytest.mark.parametrize(("twins", "far"), [(24, 0.1), (9, 0.1), (4, 1e-2), (40, 0.1)])
@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_the_threshold_holds_its_rate_where_different_pairs_tie_at_the_top(twins: int, far: float, kind: type) -> None:
    """So many people have the same picture, and different pairs of the highest cosine."""
    unit, labels, names, groups = problem()
    unit[labels < twins] = np.eye(16, dtype=np.float32)[0]
    found = group_rates(unit, labels, names, groups, all_pairs_roc(unit, labels), seed=0)
    cosines = unit.astype(kind) @ unit.T.astype(kind)
    different = np.triu(labels[:, None] != labels[None, :], k=1)
    assert found["far"] == far
    assert np.mean(cosines[different] >= kind(found["threshold"])) <= far
    for name, rates in found["groups"].items():
        inside = np.array([groups.get(names[label]) == name for label in labels])
        matched = np.sum(cosines[different & inside & inside[:, None]] >= kind(found["threshold"]))
        assert rates["false_matches"] == pytest.approx(matched, abs=1)


def test_the_command_shows_and_writes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, report = tmp_path / "groups.csv", tmp_path / "report.json"
    lines = [
        "identity,group",
        *(f'avatar-{1000 + number},"{"young, tall" if number % 2 else "old"}"' for number in range(22)),
    ]
    path.write_text("\n".join(lines) + "\n")
    words = ("eval", "raw-pixels", "--data", SET, "--image-size", "48", "--groups", str(path), "--json", str(report))
    assert main(list(words)) == 0
    shown = capsys.readouterr().out
    found = json.loads(report.read_text())["sets"][SET]["by_group"]
    assert list(found["groups"]) == ["old", "young, tall"]
    assert (found["identities_left_out"], found["groups"]["old"]["images"]) == (2, 44)
    assert "; 2 identities without a group are left out" in shown
    assert [line for line in shown.splitlines() if line.startswith("young, tall ")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name,group\na,b\n", "begins with 'name,group', not with the line identity,group"),
        ("identity,group\n", "names no identity"),
        ("identity,group\na\n", "line 2 is 'a', not identity,group"),
        ("identity,group\na,\n", "line 2 is 'a,', not identity,group"),
        ("identity,group\na,b\na,c\n", "line 3: a stands in another group already"),
    ],
)
def test_what_is_no_list_of_groups_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "groups.csv"
    path.write_text(text)
    with pytest.raises(DataError) as caught:
        read_groups(path)
    assert message in str(caught.value)


def test_groups_need_identities(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["eval", "raw-pixels", "--pairs", "lfw.bin", "--groups", str(tmp_path / "none.csv")]) == 2
    assert main(["eval", "raw-pixels", "--data", SET, "--groups", str(tmp_path / "none.csv")]) in (1, 2)
    error = capsys.readouterr().err
    assert "--groups names identities" in error
    assert error.count("\n") == 2
