"""Stages: what each changes holds from its first step on, what is frozen stays, and runs resume within one."""

import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_runs import Killable, assert_same_losses, losses, refusal, run, stored

from plsc.train.metrics import read_metrics

Ranks = Any
CONSTANT = {"optim.schedule": "constant", "optim.warmup_steps": None}


def rates(out: Path, key: str = "lr") -> dict[int, float]:
    return {line["step"]: line[key] for line in read_metrics(out) if key in line}


@pytest.mark.feature("frozen")
@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "base"),
    [
        ({"head.sample_rate": 0.5}, {}),
        ({"head.sample_rate": 0.25}, {"head.sample_rate": 0.5, "head.placement": "host", "data.train": "avatars:60x2"}),
        ({"head.m": 0.3, "head.s": 20.0}, {"head.margin": "adaface", "head.centers": 2}),
        ({"head.s": 90.0}, {}),  # logits that need a running maximum
        ({"data.augment": "standard"}, {"optim.accumulate": 2, "data.batch_size": 6}),
        ({"optim.lr": 0.02}, {"optim.head_lr": 0.04}),
        ({"optim.lr": 0.02}, {}),
    ],
    ids=str,
)
def test_a_stage_does_what_a_run_resumed_with_the_change_does(
    changes: dict[str, Any], base: dict[str, Any], tmp_path: Path, ranks: Ranks
) -> None:
    base = {**base, **CONSTANT, "epochs": None, "checkpoint.every_steps": 0}
    staged = {**base, "steps": 12, "stage": [{"from_step": 7, **nested(changes)}]}
    ranks(1, run, tmp_path / "staged", staged)
    ranks(1, run, tmp_path / "parts", {**base, "steps": 7})
    ranks(1, run, tmp_path / "parts", {**base, "steps": 12, **changes}, "auto")
    ranks(1, run, tmp_path / "plain", {**base, "steps": 12})
    found, plain = losses(tmp_path / "staged"), losses(tmp_path / "plain")
    assert found == losses(tmp_path / "parts")
    assert [step for step in found if found[step] == plain[step]] == list(range(1, 9 if "optim.lr" in changes else 8))


def nested(values: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in values.items():
        section, _, last = name.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[last] = value
    return tree


STAGES = [
    {"from_step": 4, "frozen": ["layers.0.*", "layers.1.*", "layers.4.*"], "head": {"sample_rate": 0.0}},
    {"from_epoch": 2, "frozen": ["*"], "head": {"m": 0.2}, "data": {"augment": "standard"}},
    {"from_step": 14, "frozen": [], "optim": {"lr": 0.03, "schedule": "cosine", "warmup_steps": 2}},
]
EXACT = {"sync_batchnorm": True, "backbone": "plain", "stage": STAGES, "checkpoint.every_steps": 3}


@pytest.fixture(scope="module")
def unkilled(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run through all stages in one process, to which nothing happened."""
    out = tmp_path_factory.mktemp("unkilled") / "run"
    ranks(1, run, out, EXACT)
    return out


@pytest.mark.feature("frozen")
@pytest.mark.live
@pytest.mark.slow
@pytest.mark.parametrize(("world", "step", "other"), [(2, 7, 1), (1, 15, 3)])
def test_a_run_killed_within_a_stage_goes_on_at_another_world(
    world: int, step: int, other: int, unkilled: Path, tmp_path: Path, ranks: Ranks
) -> None:
    killable = Killable(world, tmp_path, {**EXACT, "data.batch_size": 12 // world})
    killable.wait_for_step(step)
    killable.kill(list(range(world)))
    assert -signal.SIGKILL in killable.wait()
    ranks(other, run, tmp_path, {**EXACT, "data.batch_size": 12 // other}, "auto")
    found, expected = losses(tmp_path), losses(unkilled)
    assert found.keys() == expected.keys()
    assert all(math.isclose(found[step], expected[step], rel_tol=1e-6) for step in expected)
    assert rates(tmp_path) == rates(unkilled)


@pytest.mark.live
@pytest.mark.slow
def test_a_sampled_stage_resumes_bit_for_bit(tmp_path: Path, ranks: Ranks) -> None:
    changes: dict[str, Any] = {
        "stage": [
            {"from_step": 3, "head": {"sample_rate": 0.5}, "frozen": ["layers.0.*"]},
            {"from_step": 9, "frozen": []},
        ],
        "data.batch_size": 6,
    }
    ranks(2, run, tmp_path / "whole", changes)
    killable = Killable(2, tmp_path / "killed", changes)
    killable.wait_for_step(7)
    killable.kill([0, 1])
    killable.wait()
    ranks(2, run, tmp_path / "killed", changes, "auto")
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")


@pytest.mark.feature("frozen")
@pytest.mark.first_ring("sgd-2")
@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_frozen_weights_statistics_and_states_stay_bit_for_bit(
    name: str, world: int, tmp_path: Path, ranks: Ranks
) -> None:
    changes = {
        "optim.name": name,
        "optim.lr": 0.01,
        "optim.clip_norm": 1.0,
        "data.batch_size": 12 // world,
        "checkpoint.keep": 9,
        "stage": [{"from_step": 8, "frozen": ["layers.[0-4].*"]}, {"from_step": 16, "frozen": []}],
    }
    ranks(world, run, tmp_path, changes)
    tensors = [
        {
            **ranks(1, stored, tmp_path, step, "backbone.")[0],
            **{f"state {key}": value for key, value in ranks(1, stored, tmp_path, step, "optimizer.")[0].items()},
        }
        for step in (4, 8, 16, 20)
    ]
    first, before, after, last = tensors
    assert any(key.startswith("state 0.") for key in before)
    for key in before:
        # layers 0 to 2 are weight 0, weights 1 and 2, and 3; layer 3 is 4, layer 4 has 5 and 6
        is_frozen = key.startswith(tuple(f"layers.{k}." for k in range(5))) or (
            key.startswith("state ") and int(key.split()[1].split(".")[0]) < 7
        )
        assert torch.equal(before[key], after[key]) == is_frozen, key
        assert not torch.equal(first[key], before[key]), key
        assert not torch.equal(after[key], last[key]), key


@pytest.mark.feature("frozen")
@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("by", ["frozen", "groups"])
def test_what_is_frozen_for_good_has_no_state_and_never_moves(by: str, tmp_path: Path, ranks: Ranks) -> None:
    group: dict[str, Any] = {
        "layers.0.*": {"frozen": True},
        "layers.1.*": {"frozen": True},
        "layers.2.*": {"frozen": True},
    }
    changes: dict[str, Any] = {"frozen": ["layers.[0-2].*"]} if by == "frozen" else {"optim.groups": group}
    changes |= {"data.batch_size": 4, "steps": 4, "epochs": None, "checkpoint.every_steps": 1, "checkpoint.keep": 9}
    ranks(3, run, tmp_path, changes)
    first, last = (ranks(1, stored, tmp_path, step, "backbone.")[0] for step in (1, 4))
    for key in first:
        assert torch.equal(first[key], last[key]) == (key[:9] in ("layers.0.", "layers.1.", "layers.2.")), key
    states = ranks(1, stored, tmp_path, 4, "optimizer.")[0]
    assert len({key.split(".")[0] for key in states}) == 6  # of the ten weights, four are frozen


@pytest.mark.feature("frozen")
@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    "extra", [{}, {"precision": "fp16"}, {"parallel.comm_hook": "bf16"}, {"ema_decay": 0.9}], ids=str
)
def test_the_head_alone_and_then_all_of_it(extra: dict[str, Any], tmp_path: Path, ranks: Ranks) -> None:
    changes = {
        **extra,
        "data.batch_size": 6,
        "checkpoint.keep": 9,
        "frozen": ["*"],
        "stage": [{"from_epoch": 1.6, "frozen": []}],
    }
    ranks(2, run, tmp_path, changes)
    first, second, last = (ranks(1, stored, tmp_path, step, "backbone.")[0] for step in (4, 8, 20))
    heads = [ranks(1, stored, tmp_path, step, "head.")[0]["weight"] for step in (4, 8)]
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert not any(torch.equal(second[key], last[key]) for key in first)
    assert not torch.equal(*heads)
    assert not any(line["grad_norm"] for line in read_metrics(tmp_path) if line.get("step", 99) <= 8)


def course(kind: str, step: int, length: int, warmup: int) -> float:
    """The factor of the rate in a step, counted from 0, of a course of ``length`` steps."""
    if step < warmup:
        return (step + 1) / warmup
    share = (step - warmup) / (length - warmup)
    return {"polynomial": 1 - share, "cosine": (1 + math.cos(math.pi * share)) / 2, "constant": 1.0}[kind]


@pytest.mark.slow
def test_rates_of_stages(tmp_path: Path, ranks: Ranks) -> None:
    """A new peak scales the course that goes on; a new course ends the one before, and warms up only if it says so."""
    stages = [
        {"from_epoch": 1, "optim": {"lr": 0.1}},
        {"from_step": 9, "optim": {"schedule": "cosine", "warmup_epochs": 0.4}},
        {"from_epoch": 3, "optim": {"head_lr": 0.2}},
        {"from_epoch": 3.4, "optim": {"schedule": "constant"}},
    ]
    ranks(1, run, tmp_path, {"stage": stages, "optim.groups": {"layers.8.*": {"lr_scale": 3.0}}})
    expected, head = {}, {}
    for step in range(20):
        if step < 9:
            factor = course("polynomial", step, 9, 2)
        else:
            factor = course("cosine", step - 9, 17 - 9, 2) if step < 17 else 1.0
        expected[step + 1] = (0.05 if step < 5 else 0.1) * factor
        head[step + 1] = (0.05 if step < 5 else 0.1 if step < 15 else 0.2) * factor
    assert rates(tmp_path) == pytest.approx(expected, rel=1e-12)
    assert rates(tmp_path, "head_lr") == pytest.approx(head, rel=1e-12)
    log = (tmp_path / "train.log").read_text()
    assert 'stage 2 after step 9: optim.schedule = "cosine", optim.warmup_epochs = 0.4\n' in log
    begun = [line.partition(" stage ")[2] for line in log.splitlines() if " begins " in line]
    assert begun == [
        "1 begins after step 5: optim.lr = 0.1",
        '2 begins after step 9: optim.schedule = "cosine", optim.warmup_epochs = 0.4',
        "3 begins after step 15: optim.head_lr = 0.2",
        '4 begins after step 17: optim.schedule = "constant"',
    ]


@pytest.mark.feature("frozen")
@pytest.mark.slow
def test_stages_that_only_the_data_shows_to_be_wrong(tmp_path: Path, ranks: Ranks) -> None:
    m = {"head": {"m": 0.2}}
    for stages, message in [
        ([{"from_step": 20, **m}], "stage 1 begins after step 20, where the run of 20 steps is over"),
        (
            [{"from_step": 6, **m}, {"from_epoch": 1, **m}],
            "stage 2 begins after step 5, not after the one before it (step 6)",
        ),
        ([{"from_epoch": 1, **m}, {"from_step": 5, **m}], "an epoch has 5 steps"),
        (
            [{"from_epoch": 1, "frozen": ["layer.0.*"]}],
            'frozen: "layer.0.*" fits no weight of the backbone; the nearest',
        ),
    ]:
        for found in ranks(2, refusal, tmp_path / "run", {"stage": stages, "data.batch_size": 6}):
            assert message in found
    for found in ranks(1, refusal, tmp_path / "run", {"optim.groups": {"layers.9.*": {"lr_scale": 2.0}}}):
        assert found.startswith(
            'UsageError: optim.groups: "layers.9.*" fits no weight of the backbone; the nearest are layers.'
        )
    assert not (tmp_path / "run").exists()


@pytest.mark.feature("frozen")
@pytest.mark.exhaustive
@pytest.mark.slow
def test_changed_stages_are_named_on_resume_and_hold(tmp_path: Path, ranks: Ranks) -> None:
    stages = [{"from_step": 6, "frozen": ["layers.0.*"]}]
    ranks(1, run, tmp_path, {"epochs": None, "steps": 8, **CONSTANT, "stage": stages})
    later = [{"from_step": 7, "frozen": ["layers.0.*", "layers.8.bias"]}]
    ranks(1, run, tmp_path, {"epochs": 2, **CONSTANT, "stage": later}, "auto")
    log = (tmp_path / "train.log").read_text()
    assert (
        'changed on resume: stage = [{ from_step = 7, frozen.weights = ["layers.0.*", "layers.8.bias"] }] '
        '(was [{ from_step = 6, frozen.weights = ["layers.0.*"] }])' in log
    )
    first, last = (ranks(1, stored, tmp_path, step, "backbone.")[0] for step in (8, 10))
    assert {key for key in first if torch.equal(first[key], last[key])} == {"layers.0.weight", "layers.8.bias"}


@pytest.mark.feature("frozen")
@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero1", "fsdp"])
def test_stages_under_another_strategy_are_those_of_one_process(strategy: str, tmp_path: Path, ranks: Ranks) -> None:
    base = {"backbone": "residual", "sync_batchnorm": True}  # statistics over all ranks, as one process has them
    stages = [
        {"from_step": 4, "frozen": ["*.bias"], "head": {"sample_rate": 0.0, "m": 0.2}},
        {"from_epoch": 2, "frozen": [], "optim": {"lr": 0.02}},
    ]
    changes = {**base, "frozen": ["*"], "stage": stages, "epochs": 3, "checkpoint.every_steps": 5}
    ranks(2, run, tmp_path / "run", {**changes, "data.batch_size": 6, "parallel.strategy": strategy})
    ranks(1, run, tmp_path / "alone", changes)
    assert list(losses(tmp_path / "run")) == list(range(1, 16))
    assert_same_losses(tmp_path / "run", tmp_path / "alone")
