"""Groups of ranks that split a ViT's blocks train as one rank does, and know where their parts of the weights lie."""

import copy
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import plsc
from plsc.errors import UsageError
from plsc.parallel.strategies import StrategyOptions, Wrapping, fsdp, make_strategy
from plsc.parallel.strategies.tensor_parallel import check_tensor_parallel

Ranks = Any
STEPS = 3


def make_vit(drop_path: float = 0.0, mask_ratio: float = 0.0, recompute: bool = False) -> nn.Module:
    """A ViT of two narrow blocks and 16 tokens, in float64."""
    from plsc.models import vit
    from plsc.models.recompute import Segment, recompute_in_backward

    vit.SHAPES["vit_of_tests"] = vit.Shape(32, 2)
    torch.manual_seed(0)
    backbone = vit.VisionTransformer("vit_of_tests", 8, 32, drop_path=drop_path, mask_ratio=mask_ratio).double()
    if recompute:
        recompute_in_backward([Segment(block) for block in backbone.blocks])
    return backbone


def make_timm() -> nn.Module:
    torch.manual_seed(0)
    backbone: nn.Module = plsc.models.create("timm:test_vit", embedding_dim=8, image_size=32)  # type: ignore[attr-defined]
    return backbone.double()


def train(mesh: Any, options: dict[str, Any], vit: Any, sizes: list[int], accumulate: int) -> dict[str, Any]:
    """Losses, whole weights and the places of this rank's parts, after steps on batches of ``sizes`` images."""
    strategy = make_strategy(StrategyOptions(**options), mesh)
    backbone = make_timm() if vit == "timm" else make_vit(*vit)
    with patch.object(fsdp, "_LARGE", 1 << 10):  # feature.0 is gathered on its own, as in a ViT of usual size
        strategy.wrap(backbone, copy.deepcopy(backbone).to("meta"), Wrapping())
    head = plsc.ShardedHead(dim=8, num_classes=11, mesh=mesh, margin=plsc.ArcFace(s=8.0, m=0.1), weight_dtype="float64")
    names = [weight.name for weight in strategy.trained]
    optimizer = strategy.optimizer(lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9), [{"params": names}])
    head_optimizer = plsc.HeadSGD(head, lr=0.1, momentum=0.9)
    losses: list[float] = []

    def loss(embeddings: Tensor, labels: Tensor, of_ranks: Any) -> Tensor:
        value: Tensor = head(embeddings, labels, of_ranks)
        losses.append(value.item())
        return value / accumulate

    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        torch.manual_seed(10 * step + strategy.data_rank)
        for micro in range(accumulate):
            images = torch.randn((sum(sizes), 3, 32, 32), generator=generator, dtype=torch.float64).split(sizes)
            labels = torch.randint(11, (sum(sizes),), generator=generator).split(sizes)
            mine = partial(images.__getitem__, strategy.data_rank), labels[strategy.data_rank]
            strategy.forward_backward(*mine, sizes, loss, last=micro == accumulate - 1)
        strategy.collect_gradients()
        optimizer.step()
        head_optimizer.step()
        strategy.zero_grad()
        head_optimizer.zero_grad()
    strategy.average_buffers()
    parts = {weight.name: (weight.parameter.detach().clone(), weight.slices) for weight in strategy.weights}
    return {"losses": losses, "weights": dict(strategy.whole().state_dict()), "parts": parts}


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "options", "vit", "sizes", "accumulate"),
    [
        (2, {"tp": 2}, (), [5], 1),
        (2, {"tp": 2}, (0.3, 0.25, True), [4], 2),
        (2, {"tp": 2}, (0.3, 0.3), [4], 1),
        (2, {"tp": 2}, "timm", [4], 1),
        (4, {"tp": 4}, (0.3, 0.25), [2], 1),
        (4, {"tp": 2}, (0.3, 0.25), [5, 3], 2),
        (4, {"tp": 2, "name": "fsdp"}, (), [5, 4], 2),
    ],
    ids=[
        "uneven shares",
        "dropped paths and patches, recomputed",
        "tokens that cannot be split",
        "timm",
        "ranks without samples",
        "replicated groups",
        "sharded groups",
    ],
)
def test_groups_step_as_single_ranks_do(
    world: int, options: dict[str, Any], vit: Any, sizes: list[int], accumulate: int, ranks: Ranks
) -> None:
    expected = ranks(len(sizes), train, {}, vit, sizes, accumulate)[0]
    found = ranks(world, train, options, vit, sizes, accumulate)
    for result in found:
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-9)
        for name, weight in expected["weights"].items():
            torch.testing.assert_close(
                result["weights"][name], weight, rtol=1e-6, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}"
            )
    check_parts([result["parts"] for result in found], expected["weights"])


def check_parts(parts_of_ranks: list[dict[str, Any]], weights: dict[str, Tensor]) -> None:
    """The ranks' slices, put where they say, make the whole weights."""
    for name in parts_of_ranks[0]:
        whole = torch.full_like(weights[name], torch.nan)
        for parts in parts_of_ranks:
            part, slices = parts[name]
            if slices is None:
                whole.copy_(part)
                continue
            for piece, (rows, offsets) in zip(part.split([rows for rows, _ in slices]), slices, strict=True):
                place = [slice(first, first + size) for first, size in zip(offsets, piece.shape, strict=True)]
                whole[tuple(place)] = piece
                assert rows == len(piece)
        torch.testing.assert_close(whole, weights[name], msg=name)


def test_a_rank_keeps_its_share_of_a_block() -> None:
    check_tensor_parallel(make_vit(), "vit", 2)
    with pytest.raises(
        UsageError, match=r"does not divide the 8 heads and 128 hidden units .* set tp to one of 1, 2, 4, 8"
    ):
        check_tensor_parallel(make_vit(), "vit", 3)
    with pytest.raises(UsageError, match="has none"):
        check_tensor_parallel(nn.Linear(2, 2), "linear", 2)
