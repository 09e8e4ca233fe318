"""Pipelines train as one process with the same micro-batches does, and their runs go on under other strategies."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.ranks import run_command
from support.tiny_runs import losses, run
from torch import Tensor, nn

from plsc import config
from plsc.errors import UsageError
from plsc.parallel.strategies import StrategyOptions, Wrapping, make_strategy
from plsc.parallel.strategies.pipeline import balanced, micro_batch_sizes
from plsc.train.metrics import read_metrics

Ranks = Any
# 120 images, 5 steps an epoch: in every run the same 24 samples, and batch normalisation of the same sixes, make a step
SETUP: dict[str, Any] = {"backbone": "vit_of_pipelines", "data.train": "avatars:10x12", "optim.lr": 0.005}
ALONE: dict[str, Any] = {"data.batch_size": 6, "optim.accumulate": 4}
PIPELINES: dict[str, tuple[int, dict[str, Any]]] = {
    "gpipe": (2, {"parallel.pp": 2, "parallel.pp_schedule": "gpipe", "data.batch_size": 24}),
    "1f1b": (2, {"parallel.pp": 2, "data.batch_size": 24}),
    "interleaved": (2, {"parallel.pp": 2, "parallel.pp_schedule": "interleaved", "data.batch_size": 24}),
    "of four ranks": (4, {"parallel.pp": 4, "data.batch_size": 24, "parallel.pp_micro_batches": 4}),
    "two pipelines": (
        4,
        {
            "parallel.pp": 2,
            "parallel.pp_schedule": "interleaved",
            "data.batch_size": 12,
            "parallel.pp_micro_batches": 2,
        },
    ),
    "accumulating": (
        2,
        {"parallel.pp": 2, "data.batch_size": 12, "parallel.pp_micro_batches": 2, "optim.accumulate": 2},
    ),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "clipped with the head, average": {"optim.clip_norm": 0.5, "optim.clip_head": True, "ema_decay": 0.9},
    "adamw, fp16": {"optim.name": "adamw", "optim.lr": 0.002, "precision": "fp16", "epochs": 1},
    "bf16, recomputed": {"precision": "bf16", "recompute": "every_k", "epochs": 1},
    "margin with statistics": {"head.margin": "curricularface", "epochs": 1},
}


def make_vit(drop_path: float = 0.0, mask_ratio: float = 0.0) -> nn.Module:
    """A ViT of six narrow blocks and 16 tokens."""
    from plsc.models import vit

    vit.SHAPES["vit_of_pipelines"] = vit.Shape(32, 6)
    return vit.VisionTransformer("vit_of_pipelines", 16, 32, drop_path, mask_ratio, None)


def register_vit() -> None:
    from plsc.models import names, register

    def vit_of_pipelines(embedding_dim: int, image_size: int) -> Any:
        return make_vit()

    if "vit_of_pipelines" not in names():
        register(vit_of_pipelines)


def on_rank(mesh: Any, out: Path, changes: dict[str, Any], resume: str | None = None) -> dict[str, Any]:
    make_vit()
    register_vit()
    return run(mesh, out, {**SETUP, **changes}, resume)


@pytest.fixture(scope="module")
def alone(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns the run of one process, by variant."""
    runs: dict[str, Path] = {}

    def find(variant: str) -> Path:
        if variant not in runs:
            runs[variant] = tmp_path_factory.mktemp("alone") / "run"
            ranks(1, on_rank, runs[variant], {**ALONE, **VARIANTS[variant]})
        return runs[variant]

    return find


def norms(out: Path) -> list[float]:
    """Of the steps that were not skipped for a norm that is not finite."""
    return [line["grad_norm"] for line in read_metrics(out) if line.get("grad_norm") is not None]


def assert_same_losses(found: dict[int, float], expected: dict[int, float]) -> None:
    assert sorted(found) == sorted(expected)
    assert [found[step] for step in sorted(found)] == pytest.approx(
        [expected[step] for step in sorted(found)], rel=1e-4
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "variant"),
    [
        *[(name, "sgd") for name in PIPELINES],
        ("two pipelines", "clipped with the head, average"),
        ("accumulating", "adamw, fp16"),
        ("interleaved", "bf16, recomputed"),
        ("of four ranks", "margin with statistics"),
    ],
)
def test_losses_are_those_of_one_process(name: str, variant: str, alone: Any, ranks: Ranks, tmp_path: Path) -> None:
    world, changes = PIPELINES[name]
    results = ranks(world, on_rank, tmp_path / "run", {**changes, **VARIANTS[variant]})
    assert_same_losses(losses(tmp_path / "run"), losses(alone(variant)))
    assert norms(tmp_path / "run") == pytest.approx(norms(alone(variant)), rel=1e-2)
    assert all(result["loss"] == results[0]["loss"] for result in results)
    shipped, theirs = (load_file(out / "model.safetensors") for out in (tmp_path / "run", alone(variant)))
    assert shipped.keys() == theirs.keys()
    # running statistics depend on the order of micro-batches, and each of two pipelines has seen its own
    for key in (key for key in theirs if not ("running" in key or "tracked" in key)):
        torch.testing.assert_close(shipped[key], theirs[key], rtol=1e-2, atol=2e-3, msg=key)


@pytest.mark.slow
def test_a_run_goes_on_under_other_strategies_and_worlds(alone: Any, ranks: Ranks, tmp_path: Path) -> None:
    pipelines = {name: (world, changes) for name, (world, changes) in PIPELINES.items()}
    course = [pipelines["1f1b"], (1, ALONE), pipelines["two pipelines"], pipelines["interleaved"]]
    for index, (world, changes) in enumerate(course):
        changes = {**changes, **VARIANTS["clipped with the head, average"], "steps": 5 * (index + 1), "epochs": None}
        changes = {**changes, "optim.schedule": "constant"}
        ranks(world, on_rank, tmp_path / "run", changes, "auto" if index else None)
    ranks(
        1,
        on_rank,
        tmp_path / "alone",
        {**ALONE, **VARIANTS["clipped with the head, average"], "optim.schedule": "constant"},
    )
    assert_same_losses(losses(tmp_path / "run"), losses(tmp_path / "alone"))


def passes(mesh: Any, sizes: list[int], masked: bool, schedule: str) -> tuple[list[float], dict[str, Tensor]]:
    """The losses and whole gradients of a batch of ``sizes`` images, with a loss that sums over samples."""
    options = StrategyOptions(pp=2, pp_schedule=schedule, pp_micro_batches=4)
    strategy = make_strategy(options, mesh)
    torch.manual_seed(0)
    backbone = make_vit(mask_ratio=0.5 if masked else 0.0)
    strategy.wrap(backbone, copy.deepcopy(backbone).to("meta"), Wrapping())
    found: list[float] = []

    def loss(embeddings: Tensor, labels: Tensor, parts: Any) -> Tensor:
        value = (embeddings[: len(labels)] * weights(labels)).sum() * strategy.data_ranks
        found.append(value.item())
        return value

    images, labels = batch(sizes)[strategy.data_rank]
    torch.manual_seed(7)
    strategy.forward_backward(lambda: images, labels, sizes, loss, last=True)
    gradients = {weight.name: weight.parameter.grad for weight in strategy.trained}
    return found, {name: gradient for name, gradient in gradients.items() if gradient is not None}


def batch(sizes: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Every data rank's images and labels; beside a single image stands its mirror image."""
    generator = torch.Generator().manual_seed(3)
    images = [torch.randn((size, 3, 32, 32), generator=generator) for size in sizes]
    images = [torch.cat([x, x.flip(-1)]) if len(x) == 1 else x for x in images]
    return [(x, torch.arange(size)) for x, size in zip(images, sizes, strict=True)]


def weights(labels: Tensor) -> Tensor:
    return torch.sin(torch.arange(16) * (labels[:, None] + 1.0))


@pytest.mark.parametrize(
    ("sizes", "masked", "schedule"),
    [
        ([16], True, "1f1b"),
        ([11], False, "gpipe"),
        ([3], False, "interleaved"),
        ([1], False, "1f1b"),
        ([9, 8], False, "interleaved"),
        ([2, 1], False, "1f1b"),
    ],
)
def test_batches_of_any_size_have_the_gradients_of_their_parts(
    sizes: list[int], masked: bool, schedule: str, ranks: Ranks
) -> None:
    """The oracle cuts the batch itself: nothing is dropped, and no filling is seen by a layer across samples."""
    results = ranks(2 * len(sizes), passes, sizes, masked, schedule)
    torch.manual_seed(0)
    whole = make_vit(mask_ratio=0.5 if masked else 0.0)
    parts = micro_batch_sizes(sizes, 4)
    for rank, (images, labels) in enumerate(batch(sizes)):
        torch.manual_seed(7)
        own = [part[rank] for part in parts]
        by_part = images.split([*own[:-1], len(images) - sum(own[:-1])])
        expected = []
        for x, y in zip(by_part, labels.split(own), strict=True):
            if len(y):
                value = (whole(x)[: len(y)] * weights(y)).sum()
                value.backward()
                expected.append(value.item() * len(sizes))
        assert results[rank][0] == pytest.approx(expected, rel=1e-4, abs=1e-3)
    gradients = {name: gradient for _, found in results for name, gradient in found.items()}
    for name, weight in whole.named_parameters():
        if weight.requires_grad:
            torch.testing.assert_close(gradients[name], weight.grad, rtol=1e-3, atol=1e-4, msg=name)
    held = [set(found) for _, found in results[:: len(sizes)]]
    assert not held[0] & held[1]


def test_blocks_and_samples_are_balanced() -> None:
    for blocks in range(1, 30):
        for stages in range(1, blocks + 1):
            spans = balanced(blocks, stages)
            assert [block for span in spans for block in span] == list(range(blocks))
            assert max(map(len, spans)) - min(map(len, spans)) <= 1
    for first in range(1, 40):
        for second in (first, max(first - 1, 1)):
            for count in (1, 2, 4, 7):
                parts = micro_batch_sizes([first, second], count)
                assert len(parts) == count
                assert [sum(column) for column in zip(*parts, strict=True)] == [first, second]
                empty = [part for part in parts if not any(part)]
                assert all(all(part) for part in parts[len(empty) :])
                if min(first, second) >= 2 * count:
                    assert not empty
                    assert min(min(part) for part in parts) >= 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backbone": "iresnet50"}, "cuts the blocks of vit_tiny"),
        ({"parallel.pp": 13, "data.batch_size": 64}, "vit_tiny has 12 blocks"),
        ({"parallel.pp": 7, "parallel.pp_schedule": "interleaved"}, "makes 14 stages"),
        ({"parallel.pp_micro_batches": 1}, "without work"),
        ({"parallel.pp_micro_batches": 3, "parallel.pp_schedule": "interleaved"}, "no multiple of pp = 2"),
        ({"data.batch_size": 7}, "two samples for each of the pipeline's 4"),
        ({"parallel.strategy": "fsdp"}, 'strategy = "ddp"'),
        ({"parallel.averaging": "local_sgd"}, "stage by stage"),
        ({"parallel.comm_hook": "powersgd"}, "stage by stage"),
        ({"parallel.tp": 2}, "do not go together yet"),
        ({"head_ranks": 2}, "leave head_ranks out"),
        ({"parallel.pp": 1, "parallel.pp_micro_batches": 4}, "leave it out"),
    ],
)
def test_what_is_meaningless_together_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        config.load(None, {"backbone": "vit_tiny", "data.train": "avatars:10x6", "parallel.pp": 2, **changes})


@pytest.mark.slow
def test_the_command_trains_and_evaluates(tmp_path: Path) -> None:
    words = ["--data.train", "avatars:10x8", "--data.image_size", "32", "--data.batch_size", "8", "--steps", "3"]
    words += ["--backbone", "vit_tiny", "--precision", "bf16", "--eval.sets", "avatars:4x3", "--data.workers", "0"]
    words += [
        "--log.every_steps",
        "1",
        "--parallel.pp",
        "2",
        "--parallel.pp_micro_batches",
        "2",
        "--embedding_dim",
        "32",
    ]
    path = tmp_path / "pipeline.toml"
    path.write_text("")
    refused = run_command("train", str(path), *words, "--nproc", "3", "--out", str(tmp_path / "refused"))
    assert "parallel.pp = 2 does not divide the number of ranks, 3" in refused.stderr
    assert not (tmp_path / "refused").exists()
    done = run_command("train", str(path), *words, "--nproc", "2", "--out", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert sorted(losses(tmp_path / "run"))
    assert "blocks.11.mlp.fc2.weight" in load_file(tmp_path / "run" / "model.safetensors")
