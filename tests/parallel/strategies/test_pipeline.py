"""Stages of a pipeline have the gradients of the whole backbone, and what cannot be a pipeline is refused by name."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plsc.errors import UsageError
from plsc.parallel.mesh import Mesh
from plsc.parallel.strategies import StrategyOptions, Wrapping, make_strategy
from plsc.parallel.strategies.cuts import balanced
from plsc.parallel.strategies.pipeline import micro_batch_sizes

Ranks = Any


def make_vit(drop_path: float = 0.0, mask_ratio: float = 0.0) -> nn.Module:
    """A ViT of four narrow blocks and 16 tokens."""
    from plsc.models import vit

    vit.SHAPES["vit_of_pipelines"] = vit.Shape(32, 4)
    return vit.VisionTransformer("vit_of_pipelines", 16, 32, drop_path=drop_path, mask_ratio=mask_ratio)


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


def refused(mesh: Any, frozen: str, schedule: str) -> str:
    strategy, backbone = make_strategy(StrategyOptions(pp=2, pp_schedule=schedule), mesh), make_vit()
    for name, weight in backbone.named_parameters():
        weight.requires_grad_(not name.startswith(tuple(frozen.split())))
    with pytest.raises(UsageError) as caught:
        strategy.wrap(backbone, copy.deepcopy(backbone).to("meta"), Wrapping())
    return str(caught.value)


def test_a_stage_without_a_weight_to_train_is_refused(ranks: Ranks) -> None:
    lower, upper = "pos_embed patch_embed blocks.0 blocks.1", "blocks.2 blocks.3 mask_token norm feature"
    for frozen, schedule, stage in [
        (lower, "1f1b", "1 of the pipeline's 2"),
        (upper, "interleaved", "3 of the pipeline's 4"),
    ]:
        for message in ranks(2, refused, frozen, schedule):
            assert message.startswith(f"frozen leaves stage {stage} no weight to train; ")


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


def test_a_strategy_that_is_to_be_chosen_is_refused_with_what_chooses() -> None:
    mesh = Mesh(0, 1, 0, torch.device("cpu"))
    with pytest.raises(UsageError, match="choose_on_ranks"):
        make_strategy(StrategyOptions("auto"), mesh)


@pytest.mark.parametrize(
    ("options", "world", "dims"),
    [
        (StrategyOptions(), 8, {}),
        (StrategyOptions("fsdp"), 8, {"shard": 8}),
        (StrategyOptions("hsdp", shard_ranks=1), 4, {"replicate": 4, "shard": 1}),
        (StrategyOptions("hsdp", shard_ranks=2, tp=2), 8, {"replicate": 2, "shard": 2, "tp": 2}),
        (StrategyOptions(pp=2), 4, {"pp": 2, "replicate": 2}),
        (StrategyOptions(pp=2, tp=2), 4, {"pp": 2, "tp": 2}),
        (StrategyOptions("fsdp", pp=2, tp=2), 8, {"pp": 2, "shard": 2, "tp": 2}),
        (StrategyOptions("hsdp", 2, 2, 2), 16, {"pp": 2, "replicate": 2, "shard": 2, "tp": 2}),
    ],
)
def test_ranks_lie_on_one_mesh(options: StrategyOptions, world: int, dims: dict[str, int]) -> None:
    options.check_world(world)
    assert list(options.dimensions(world).items()) == list(dims.items())


@pytest.mark.parametrize(
    ("options", "world", "message"),
    [
        (StrategyOptions(pp=2, tp=4), 12, "parallel.tp = 4 does not divide the number of ranks of a stage"),
        (StrategyOptions("hsdp", 4, 2, 2), 24, "shard_ranks = 4 does not divide the number of groups"),
    ],
)
def test_ranks_that_cannot_be_arranged_are_refused(options: StrategyOptions, world: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        options.check_world(world)
