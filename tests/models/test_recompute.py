"""Recomputed activations: the same numbers bit for bit, in the memory that the budget allows."""

import copy
import shutil
from typing import Any

import pytest
import torch
from support.backbones import values
from torch import Tensor, nn

import plsc.models
from plsc.errors import UsageError
from plsc.models import Backbone
from plsc.models.recompute import every_kth, recomputed_blocks
from plsc.models.recompute_budget import LiveBytes, recompute_activations

pytestmark = pytest.mark.slow

# (backbone, options, blocks): drop_path and mask_ratio draw random numbers in a pass.
FAMILIES: list[tuple[str, dict[str, Any], int]] = [
    ("iresnet18", {}, 9),
    ("mobilefacenet", {}, 17),
    ("resnet8", {}, 4),
    ("vit_tiny", {"drop_path": 0.5, "mask_ratio": 0.25}, 12),
    ("timm:test_vit", {"drop_path_rate": 0.5}, 6),
    ("timm:test_resnet", {}, 4),
]
IDS = [name for name, _, _ in FAMILIES]


def made(name: str, options: dict[str, Any], size: int = 32) -> Backbone:
    torch.manual_seed(1)
    return plsc.models.create(name, embedding_dim=24, image_size=size, **options).train()


def passed(model: Backbone, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """What two passes leave: embeddings, gradients, buffers."""
    torch.manual_seed(3)
    for _ in range(2):  # gradients add up, as under accumulation
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            embeddings = model(values(4, 32))
        embeddings.square().sum().backward()
    left = {"embeddings": embeddings, "next random number": torch.rand(())}
    left |= {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return left | model.state_dict()


def saved_bytes(model: nn.Module, count: int, size: int) -> int:
    """Bytes of the storages that a forward pass leaves for the backward pass."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    sizes: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        kept = model(values(count, size))
    assert kept.requires_grad
    return sum(sizes.values())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("name", "options", "blocks"), FAMILIES, ids=IDS)
def test_every_number_stays_the_same(
    name: str, options: dict[str, Any], blocks: int, dtype: torch.dtype | None
) -> None:
    plain, saving = made(name, options), made(name, options)
    keys = list(saving.state_dict())
    assert recompute_activations(saving, "every_k") == blocks
    assert recomputed_blocks(made(name, {**options, "gradient_checkpointing": True})) == blocks
    assert list(saving.state_dict()) == keys
    before, after = passed(plain, dtype), passed(saving, dtype)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("name", ["iresnet18", "timm:test_vit"])
def test_blocks_keep_less(name: str) -> None:
    plain, saving = made(name, {}, 48), made(name, {}, 48)
    recompute_activations(saving, "every_k")
    assert saved_bytes(saving, 2, 48) < 0.5 * saved_bytes(plain, 2, 48)
    every_second = made(name, {}, 48)
    recompute_activations(every_second, "every_k", every=2)
    assert saved_bytes(saving, 2, 48) < saved_bytes(every_second, 2, 48) < saved_bytes(plain, 2, 48)


def test_every_kth_block_is_the_kth_the_2kth_and_so_on() -> None:
    segments = made("vit_tiny", {}).segments()
    assert every_kth(segments, 1) == segments
    assert every_kth(segments, 5) == [segments[4], segments[9]]
    assert every_kth(segments, 13) == []


def test_a_copy_recomputes_its_own_blocks_and_evaluation_recomputes_nothing() -> None:
    model = made("resnet8", {})
    recompute_activations(model, "every_k")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    passed(twin)
    assert all(weight.grad is None for weight in model.parameters())
    assert all(weight.grad is not None for weight in twin.parameters())
    calls: list[int] = []
    twin.blocks[0].residual.register_forward_hook(lambda *_: calls.append(1))
    twin.eval()(values(4, 32)).sum().backward()
    assert len(calls) == 1


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size", "share"),
    [("iresnet18", 64, 0.7), ("mobilefacenet", 64, 0.4), ("vit_tiny", 64, 0.6)],
)
def test_a_real_pass_keeps_within_the_budget(name: str, size: int, share: float) -> None:
    peaks = {}
    for budget in (1.0, share):
        model = made(name, {}, size)
        for parameter in model.parameters():  # as the budget has it: gradients of weights are no activations
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        chosen = recompute_activations(model, "budget", budget=budget, images=16)
        with LiveBytes(model) as ledger:
            model(values(16, size)).sum().backward()
        peaks[budget] = ledger.peak
    assert chosen < len(model.segments())
    assert peaks[share] <= 1.01 * share * peaks[1.0]


def test_the_cheapest_blocks_go_first() -> None:
    """Large maps of few channels free most per operation: a convolutional network's first blocks."""
    model = made("iresnet34", {}, 112)
    recompute_activations(model, "budget", budget=0.7, images=16)
    again = [segment.method in vars(segment.module) for segment in model.segments()]
    assert recomputed_blocks(model) == sum(again)
    assert again[0]
    assert any(again[1:4])
    assert not any(again[8:])


def test_a_budget_out_of_reach_names_the_least() -> None:
    with pytest.raises(UsageError, match=r"recompute_budget = 0\.05 is out of reach of resnet8: .* give that or more"):
        recompute_activations(made("resnet8", {}), "budget", budget=0.05)


def test_a_backbone_without_blocks_is_refused() -> None:
    class Flat(Backbone):
        def __init__(self) -> None:
            super().__init__("flat", 24, 32)
            self.layers = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 24))

    with pytest.raises(UsageError, match='recompute = "every_k" finds no blocks in flat'):
        recompute_activations(Flat(), "every_k")


class Small(Backbone):
    """Two blocks with batch normalisation on eight pixels of a picture, which compile in seconds."""

    def __init__(self) -> None:
        super().__init__("small", 8, 32)
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, x: Tensor) -> Tensor:
        embeddings: Tensor = self.blocks(x.flatten(1)[:, :8])
        return embeddings


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.linear(x)))


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_compiled_blocks_recompute_and_count_each_batch_once() -> None:
    torch.manual_seed(0)
    plain = Small().train()
    saving = copy.deepcopy(plain)
    assert recompute_activations(saving, "every_k") == 2
    x = torch.randn(16, 3, 32, 32)
    for model, run in ((plain, plain), (saving, torch.compile(saving, fullgraph=True))):
        for _ in range(2):
            run(x).square().sum().backward()
        assert model.blocks[0].norm.num_batches_tracked == 2
    for (name, a), b in zip(plain.named_buffers(), saving.buffers(), strict=True):
        torch.testing.assert_close(a, b, msg=name)
    for (name, a), b in zip(plain.named_parameters(), saving.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5, msg=name)
