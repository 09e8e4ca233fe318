"""[compatible]: a new backbone among an old model's class centres, which no step moves."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import reference
import torch
from safetensors.torch import load_file, save_file
from support.tiny_runs import (
    assert_same_files,
    assert_same_losses,
    losses,
    open_trainer,
    refusal,
    run,
    run_until,
    stored,
)

import plsc
from plsc.config import load, to_dict
from plsc.data import open_dataset
from plsc.embedding.set_writer import SetWriter, write_embedding_set
from plsc.errors import DataError, PlscError, UsageError
from plsc.feature_config import feature_states
from plsc.features.compatible.class_centres import open_centres
from plsc.features.compatible.feature import Compatible
from plsc.features.compatible.influence_loss import InfluenceLoss, _matched
from plsc.losses import CosFace
from plsc.tools.entry import main
from plsc.train.metrics import read_metrics

Ranks = Any
OLD = {"data.train": "avatars:6x6", "epochs": None, "steps": 4}
NEW = {"data.train": "avatars:10x6", "epochs": None, "steps": 8, "seed": 5}
CENTRE_OF = [3, -1, 0, 6, -1, 2]  # of six classes, by seven centres


@pytest.fixture(scope="module")
def old(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six of the new run's ten classes."""
    out = tmp_path_factory.mktemp("old") / "run"
    ranks(1, run, out, OLD)
    return out


def influence(mesh, centres, x, y, sizes, dtype, centers):
    """The loss of this rank's part, the gradient by it, and the centres after backward()."""
    head = plsc.ShardedHead(
        16, 7, mesh, CosFace(s=24.0, m=0.2), weight_dtype=dtype, momentum_dtype=None, centers=centers
    )
    first, stop = head.class_range
    head.weight.detach().copy_(centres[first * centers : stop * centers])
    loss_of = InfluenceLoss(head, torch.tensor(CENTRE_OF), 1.0, "")
    part = slice(sum(sizes[: mesh.rank]), sum(sizes[: mesh.rank + 1]))
    own = x[part].clone().requires_grad_()
    before = head.weight.detach().clone()
    loss = loss_of(own, y[part], sizes)
    loss.backward()
    assert torch.equal(head.weight.detach(), before)
    assert head.weight.grad is None
    assert not head.softmax.pending.batches
    return loss.detach(), own.grad / mesh.world_size


@pytest.mark.parametrize(
    ("world", "dtype", "centers", "columns"),
    [
        (2, "float32", 1, 0),
        pytest.param(1, "float64", 1, 0, marks=pytest.mark.exhaustive),
        pytest.param(3, "float64", 2, 0, marks=pytest.mark.exhaustive),
        pytest.param(2, "bfloat16", 1, 0, marks=pytest.mark.exhaustive),
        pytest.param(2, "float64", 1, 2, marks=pytest.mark.exhaustive),
    ],
)
def test_loss_and_gradient_are_those_of_the_dense_softmax_over_known_samples(ranks, world, dtype, centers, columns):
    generator = torch.Generator().manual_seed(world)
    centres = torch.randn(7 * centers, 16, generator=generator, dtype=torch.float64).to(getattr(torch, dtype))
    x = torch.randn(11, 16, generator=generator)
    y = torch.randint(0, 6, (11,), generator=generator)
    sizes = [11 // world + (rank < 11 % world) for rank in range(world)]
    labels = torch.stack([y, torch.full_like(y, -1)], 1) if columns else y
    found = ranks(world, influence, centres, x, labels, sizes, dtype, centers)

    wide, mapped = x.double().requires_grad_(), torch.tensor(CENTRE_OF)[y]
    known = mapped >= 0
    assert 0 < known.sum() < 11
    oracle = reference.Oracle("cosface", s=24.0, parameters={"m": 0.2})
    expected = oracle.loss(wide[known], mapped[known], centres.double(), centers)
    expected.backward()
    tolerance = {"float64": 1e-6, "float32": 1e-5, "bfloat16": 3e-2}[dtype]
    for loss, _ in found:
        assert float(loss) == pytest.approx(float(expected.detach()), rel=tolerance)
    gradient = torch.cat([part for _, part in found]).double()
    assert reference.relative_error(gradient, wide.grad) < tolerance * 10
    assert not gradient[~known].any()


def test_no_known_sample_is_no_loss():
    head = plsc.ShardedHead(8, 2, margin=CosFace(s=8.0, m=0.0), momentum_dtype=None)
    x = torch.randn(3, 8, requires_grad=True)
    loss = InfluenceLoss(head, torch.tensor([-1, 1]), 1.0, "")(x, torch.tensor([0, 0, 0]), [3])
    loss.backward()
    assert float(loss.detach()) == 0
    assert not x.grad.any()


def held(mesh, out, changes):
    """Whether the centres are the old run's rows, before and after two steps; and what the components say."""
    with open_trainer(mesh, out, changes, None) as trainer:
        compatible = trainer.components.features["compatible"].influence
        first, stop = compatible.head.class_range
        before = compatible.head.weight.detach().clone()
        groups = trainer._groups()
        for number in range(2):
            trainer.stepper.step(next(groups), number)
            trainer.schedule.advance()
        assert torch.equal(compatible.head.weight.detach(), before)
        return (first, stop), before, compatible.centre_of, compatible.identity


def test_the_centres_are_the_old_runs_rows_by_name_and_stay(ranks, tmp_path, old):
    rows = ranks(1, stored, old, 4, "head.")[0]["weight"]
    with open_centres(str(old)) as centres:
        digest = centres.digest()
    for (first, stop), own, centre_of, identity in ranks(
        2, held, tmp_path / "run", {**NEW, "data.batch_size": 6, "compatible.with": str(old)}
    ):
        assert torch.equal(own, rows[first:stop].to(own))
        assert centre_of.tolist() == [0, 1, 2, 3, 4, 5, -1, -1, -1, -1]
        assert identity == {"classes": 6, "origin": "step 4", "digest": digest}


def test_a_run_that_was_stopped_goes_on_bit_for_bit_and_logs_the_loss(ranks, tmp_path, old):
    changes = {**NEW, "compatible.with": str(old), "compatible.weight": 2.0, "data.batch_size": 6}
    changes |= {"optim.clip_norm": 5.0, "optim.clip_head": True, "sync_batchnorm": True}
    ranks(2, run, tmp_path / "whole", changes)
    ranks(2, run_until, tmp_path / "run", changes, None, 3)
    ranks(2, run, tmp_path / "run", changes, "auto")
    assert_same_files(tmp_path / "run", tmp_path / "whole")
    assert_same_losses(tmp_path / "run", tmp_path / "whole", rel=0)
    lines = [line for line in read_metrics(tmp_path / "whole") if "influence_loss" in line]
    assert len(lines) == 8
    assert all(2 * line["influence_loss"] < line["loss"] for line in lines)
    assert "old     6 old centres (step 4), which 6 classes of 10 here have; weight 2" in (
        tmp_path / "whole/train.log"
    ).read_text(encoding="utf-8")
    free = {name: value for name, value in changes.items() if not name.startswith("compatible")}
    ranks(2, run, tmp_path / "free", free)
    first = {name: losses(tmp_path / name)[1] for name in ("free", "whole")}
    assert first["whole"] == pytest.approx(first["free"] + 2 * lines[0]["influence_loss"], rel=1e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"optim.accumulate": 2, "data.batch_size": 6},
        {"dynamic.max_classes": 12, "sync_batchnorm": True},
        {"precision": "bf16", "head.weight_dtype": "bfloat16"},
    ],
    ids=str,
)
def test_losses_do_not_depend_on_the_number_of_ranks(ranks, tmp_path, old, more):
    changes = {**NEW, "backbone": "plain", "sync_batchnorm": True, "compatible.with": str(old), "steps": 4, **more}
    batch = changes.get("data.batch_size", 12)
    ranks(1, run, tmp_path / "one", changes)
    ranks(2, run, tmp_path / "two", {**changes, "data.batch_size": batch // 2})
    assert_same_losses(tmp_path / "two", tmp_path / "one", rel=2e-2 if "precision" in more else 1e-3)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "changes",
    [{"parallel.strategy": "fsdp"}, {"backbone": "vit_of_pipelines", "parallel.pp": 2, "data.batch_size": 12}],
    ids=str,
)
def test_strategies_take_it(ranks, tmp_path, old, changes):
    ranks(2, run, tmp_path / "run", {**NEW, "steps": 2, "compatible.with": str(old), **changes})
    lines = [line["influence_loss"] for line in read_metrics(tmp_path / "run") if "influence_loss" in line]
    assert len(lines) == 2
    assert all(0 < value < 100 for value in lines)


@pytest.mark.parametrize(("world", "size", "accumulate"), [(1, 3, 4), (2, 3, 2)])
def test_micro_batches_with_few_known_samples_step_as_one_batch(ranks, tmp_path, world, size, accumulate):
    save_file({"weight": torch.randn(3, 16, generator=torch.manual_seed(0))}, tmp_path / "old.safetensors")
    names = [[name] for name in open_dataset("avatars:10x6").class_names[2:5]]
    (tmp_path / "old.json").write_text(json.dumps({"classes": names}))
    common = {**NEW, "steps": 3, "backbone": "smooth", "data.augment": "none", "optim.lr": 0.005}
    common |= {"compatible.with": str(tmp_path / "old.safetensors"), "compatible.weight": 5.0}
    ranks(1, run, tmp_path / "whole", common)
    ranks(world, run, tmp_path / "parts", {**common, "data.batch_size": size, "optim.accumulate": accumulate})
    steps = [[line for line in read_metrics(tmp_path / name) if "loss" in line] for name in ("whole", "parts")]
    for one, other in zip(*steps, strict=True):
        for name in ("loss", "influence_loss", "grad_norm"):
            assert other[name] == pytest.approx(one[name], rel=1e-3), name


def shares(mesh, out, changes):
    """What each of a step's micro-batches weighs in the influence loss."""
    found = []
    with open_trainer(mesh, out, changes, None) as trainer:
        compatible = trainer.components.features["compatible"].influence
        share = compatible.share
        compatible.share = lambda labels: found.append(share(labels)) or found[-1]
        trainer.stepper.step(next(trainer._groups()), 0)
    return [float(each) for each in found]


def test_the_micro_batches_of_a_pipeline_weigh_what_they_know(ranks, tmp_path, old):
    changes = {**NEW, "backbone": "vit_of_pipelines", "parallel.pp": 2, "data.batch_size": 8}
    changes |= {"parallel.pp_micro_batches": 4, "optim.accumulate": 2, "compatible.with": str(old)}
    last, first = ranks(2, shares, tmp_path / "run", changes)
    assert first == []
    assert len(last) == 8
    assert sum(last) == pytest.approx(1)
    assert len(set(last)) > 1


def test_tables_of_files_and_embedding_sets_are_centres_too(tmp_path, old, capsys):
    out = tmp_path / "old.safetensors"
    assert main(["table", "export", str(old), str(out)]) == 0
    capsys.readouterr()
    rows = load_file(out)["weight"]
    with open_centres(str(out)) as centres:
        assert (centres.classes, centres.dim, centres.names) == (6, 16, None)
        assert torch.equal(centres.read(1, 4)[:, 0], rows[1:4])
        assert _matched(centres, open_dataset("avatars:6x2")).tolist() == list(range(6))
        with pytest.raises(UsageError, match=r"6 centres without names, and data\.train 10 classes; put their names"):
            _matched(centres, open_dataset("avatars:10x2"))
    names = list(open_dataset("avatars:10x2").class_names)
    out.with_suffix(".json").write_text(json.dumps({"classes": [[name, f"{name}!"] for name in names[2:8]]}))
    with open_centres(str(out)) as centres:
        assert _matched(centres, open_dataset("avatars:10x2")).tolist() == [-1, -1, 0, 1, 2, 3, 4, 5, -1, -1]

    generator = np.random.default_rng(0)
    vectors, labels = generator.normal(size=(30, 16)).astype(np.float32), generator.integers(0, 5, 30)
    labels[labels == 3] = -1
    vectors[7], labels[7] = 0, 4
    errors = {7: "unreadable"}
    write_embedding_set(
        tmp_path / "e", vectors, contract_id="c", labels=labels, class_names=names[:5], errors=errors, shard_rows=8
    )
    unit = vectors.astype(np.float64) / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9)
    with open_centres(str(tmp_path / "e")) as centres:
        assert _matched(centres, open_dataset("avatars:6x2")).tolist() == [0, 1, 2, -1, 3, -1]
        expected = [unit[labels == label].sum(0) for label in (0, 1, 2, 4)]
        assert np.allclose(centres.read(0, 4)[:, 0], expected, atol=1e-6)
        assert torch.equal(centres.read(1, 3), centres.read(0, 4)[1:3])


def test_a_damaged_embedding_set_is_refused(tmp_path, monkeypatch):
    vectors, about = np.ones((4, 8), np.float32), {"contract_id": "c", "labels": np.array([0, 1, 2, 1])}
    write_embedding_set(tmp_path / "changed", vectors, class_names=["a", "b", "c"], **about)
    file = tmp_path / "changed/shard-00000/embeddings.npy"
    file.write_bytes(file.read_bytes()[:-4] + bytes(4))
    finish = SetWriter.finish
    monkeypatch.setattr(SetWriter, "finish", lambda writer, names: finish(writer, names[:2]))
    write_embedding_set(tmp_path / "odd", vectors, class_names=["a", "b", "c"], **about)
    for name, message in (
        ("changed", r"embeddings\.npy"),
        ("odd", "holds labels outside its 2 classes; embed it again"),
    ):
        with pytest.raises(PlscError, match=message):
            open_centres(str(tmp_path / name)).__enter__()


def test_an_old_run_whose_classes_have_names_of_their_own(ranks, tmp_path):
    ranks(1, run, tmp_path / "old", {**OLD, "dynamic.max_classes": 9})
    with open_centres(str(tmp_path / "old")) as centres:
        names = open_dataset("avatars:6x6").class_names
        places = _matched(centres, open_dataset("avatars:6x6")).tolist()
        assert [centres.names[place] for place in places] == [[name] for name in names]


def test_what_is_no_old_model_is_refused_in_one_line(ranks, tmp_path, old):
    save_file({"weight": torch.zeros(10, 16)}, tmp_path / "zeros.safetensors")
    cases = [
        ({"compatible.with": str(tmp_path / "none")}, f"UsageError: there is no compatible.with = {tmp_path / 'none'}"),
        ({"compatible.with": str(tmp_path)}, "UsageError: .* holds no finished checkpoint"),
        ({"compatible.with": str(old), "embedding_dim": 8}, "UsageError: .* has centres of 16 numbers, and .* is 8"),
        ({"compatible.with": str(old), "data.train": "avatars:4x6@99"}, "UsageError: .* has no class of data.train"),
        ({"compatible.with": str(tmp_path / "zeros.safetensors")}, "DataError: .* 10 centres that are zero"),
    ]
    for changes, message in cases:
        (found,) = ranks(1, refusal, tmp_path / "run", {**NEW, **changes})
        assert "\n" not in found
        assert re.match(message, found), found


def test_keys_that_need_an_old_model_are_refused_without_one():
    with pytest.raises(UsageError, match=r"\[compatible\] has no old class centres: give compatible.with"):
        load(None, {"compatible.weight": 2.0})
    with pytest.raises(
        UsageError, match=r'frozen = "\*" trains nothing that compatible.with = "runs/old" could change'
    ):
        load(None, {"compatible.with": "runs/old", "frozen": ("*",)})
    with pytest.raises(UsageError, match=r"does not go with \[\[table\]\]: old centres are those of a single"):
        load(None, {"compatible.with": "runs/old", "table": ({"name": "a"}, {"name": "b"})})


def test_a_run_does_not_go_on_with_other_centres(ranks, tmp_path):
    ranks(1, run, tmp_path / "old", OLD)
    changes = {**NEW, "compatible.with": str(tmp_path / "old")}
    ranks(1, run_until, tmp_path / "run", changes, None, 2)
    ranks(1, run, tmp_path / "old", {**OLD, "steps": 6}, "auto")
    (found,) = ranks(1, refusal, tmp_path / "run", changes, "auto")
    assert "holds other centres (step 6) than when the run began (step 4)" in found
    kept = str(tmp_path / "old/checkpoints/step-00000004")
    assert ranks(1, refusal, tmp_path / "run", {**changes, "compatible.with": kept}, "auto") == [""]


def test_an_old_run_that_began_anew_is_another_one(ranks, tmp_path):
    ranks(1, run, tmp_path / "old", OLD)
    changes = {**NEW, "compatible.with": str(tmp_path / "old"), "dynamic.max_classes": 20, "data.train": "avatars:4x6"}
    ranks(1, run_until, tmp_path / "run", changes, None, 2)
    more = {**changes, "data.train": "avatars:10x6"}  # of which more have a centre
    assert ranks(1, refusal, tmp_path / "run", {**more, "steps": 3}, "auto") == [""]
    shutil.rmtree(tmp_path / "old")
    ranks(1, run, tmp_path / "old", {**OLD, "seed": 9})
    (found,) = ranks(1, refusal, tmp_path / "run", more, "auto")
    assert "other centres (step 4) than when the run began (step 4): rows or names are others; give" in found


def test_checkpoints_of_earlier_versions_are_compared_by_what_they_hold():
    head = plsc.ShardedHead(8, 2, margin=CosFace(s=8.0, m=0.0), momentum_dtype=None)
    feature = Compatible(load(None, {"compatible.with": "old"}))
    feature.influence = InfluenceLoss(head, torch.tensor([0, 1]), 1.0, "step 4", "aa")
    former = {"config": to_dict(feature.config), "compatible": {"classes": 2, "matched": 1, "origin": "step 4"}}
    stored = SimpleNamespace(state=former)
    feature.check_state(feature_states(former)["compatible"], stored)
    former["compatible"]["digest"] = "bb"
    with pytest.raises(UsageError, match="holds other centres"):
        feature.check_state(feature_states(former)["compatible"], stored)


def test_a_copied_checkpoint_needs_names_and_a_file_is_said_to_go_by_number(ranks, tmp_path, old):
    copy = shutil.copytree(old / "checkpoints/step-00000004", tmp_path / "step-00000004")
    with pytest.raises(UsageError, match=f"copy the old run's classes.json to {tmp_path / 'classes.json'}, or name"):
        open_centres(str(copy)).__enter__()
    shutil.copy(old / "classes.json", tmp_path)
    with open_centres(str(copy)) as copied, open_centres(str(old)) as centres:
        assert copied.digest() == centres.digest()
    main(["table", "export", str(old), str(tmp_path / "t.safetensors")])
    changes = {**NEW, "data.train": "avatars:6x6", "steps": 1, "compatible.with": str(tmp_path / "t.safetensors")}
    ranks(1, run, tmp_path / "run", changes)
    assert "which 6 classes of 6 here have, by number; weight" in (tmp_path / "run/train.log").read_text("utf-8")


@pytest.mark.parametrize("content", ["[]", '{"classes": ["a"]}', '{"classes": [1, 2]}'])
def test_a_list_of_other_names_is_refused(tmp_path, content):
    save_file({"weight": torch.ones(2, 4)}, tmp_path / "t.safetensors")
    (tmp_path / "t.json").write_text(content)
    with pytest.raises(DataError, match=r"t\.json (does not list the names of 2 classes|lists something else)"):
        open_centres(str(tmp_path / "t.safetensors")).__enter__()
