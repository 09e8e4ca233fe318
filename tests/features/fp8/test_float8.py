"""Products in 8-bit floating point: which layers have them, how near they come, what they leave as it is."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.tiny_runs import losses, run
from torch import nn

from plsc.errors import UsageError
from plsc.features.fp8.float8 import convert_to_float8
from plsc.models import create

Ranks = Any
CPU = torch.device("cpu")
SHORT = {"backbone": "vit_tiny", "precision": "bf16", "epochs": None, "steps": 4, "checkpoint.every_steps": 2}
SHORT |= {"data.batch_size": 8, "optim.name": "adamw", "optim.lr": 1e-4, "optim.schedule": "constant"}
FP8 = {**SHORT, "fp8": True}


@pytest.fixture(scope="module")
def backbone() -> nn.Module:
    torch.manual_seed(0)
    return create("vit_tiny", embedding_dim=32, image_size=32, drop_path=0.0)


def gradients(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    (model(x) * torch.randn(len(x), 32, generator=torch.Generator().manual_seed(2))).sum().backward()
    return torch.cat([weight.grad.flatten() for name, weight in model.named_parameters() if "blocks" in name])


@pytest.mark.slow
def test_the_blocks_products_come_near_those_in_float32(backbone: nn.Module) -> None:
    """Float8 (e4m3) has 3 bits of mantissa, a relative error of up to 1/16 of each number, gradients (e5m2) 2."""
    converted = copy.deepcopy(backbone)
    assert convert_to_float8(converted, CPU, 16) == 48
    linear = {name for name, module in converted.named_modules() if type(module).__name__ == "Float8Linear"}
    kinds = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    assert linear == {f"blocks.{i}.{kind}" for i in range(12) for kind in kinds}
    assert converted.state_dict().keys() == backbone.state_dict().keys()
    x = torch.randn(16, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    exact, near = backbone(x), converted(x)
    difference = (near - exact).norm() / exact.norm()
    assert 1e-4 < difference < 0.1  # they are not the same products
    assert torch.cosine_similarity(gradients(converted, x), gradients(backbone, x), dim=0) > 0.97


def rounded(values: torch.Tensor) -> torch.Tensor:
    """Values of a matrix as float8 (e4m3, up to 448) holds them, scaled by the largest of them."""
    scale = 448 / values.abs().max()
    return (values * scale).to(torch.float8_e4m3fn).float() / scale


def test_a_layer_multiplies_rounded_inputs_by_rounded_weights(backbone: nn.Module) -> None:
    converted = copy.deepcopy(backbone)
    convert_to_float8(converted, CPU, 16)
    layer = converted.get_submodule("blocks.3.mlp.fc1")
    x = torch.randn(32, 256, generator=torch.Generator().manual_seed(3))
    expected = rounded(x) @ rounded(layer.weight.detach()).T + layer.bias
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-6)
    assert (layer(x) - nn.functional.linear(x, layer.weight, layer.bias)).abs().max() > 1e-3


@pytest.fixture(scope="module")
def plain(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks without float8."""
    out = tmp_path_factory.mktemp("plain")
    ranks(2, run, out / "run", SHORT)
    return out / "run"


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{}, {"parallel.strategy": "fsdp", "recompute": "every_k"}], ids=["ddp", "fsdp, recomputed"]
)
def test_two_ranks_train_by_them(changes: dict[str, Any], plain: Path, tmp_path: Path, ranks: Ranks) -> None:
    ranks(2, run, tmp_path / "run", {**FP8, **changes})
    expected, found = losses(plain), losses(tmp_path / "run")
    assert found != expected
    # steps of AdamW follow the signs of small gradients: the losses part by up to 6%
    assert list(found.values()) == pytest.approx(list(expected.values()), rel=0.1)
    names = [load_file(out / "model.safetensors").keys() for out in (plain, tmp_path / "run")]
    assert names[0] == names[1]
    assert "fp8 in the blocks (emulated)" in (tmp_path / "run/train.log").read_text()


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_run_goes_on_with_and_without(tmp_path: Path, ranks: Ranks) -> None:
    ranks(1, run, tmp_path / "whole", FP8)
    ranks(1, run, tmp_path / "halves", {**FP8, "steps": 2})
    ranks(1, run, tmp_path / "halves", FP8, "auto")
    assert losses(tmp_path / "halves") == losses(tmp_path / "whole")
    ranks(1, run, tmp_path / "halves", {**SHORT, "steps": 5}, "auto")
    assert "changed on resume: fp8" in (tmp_path / "halves/train.log").read_text()


def test_an_older_gpu_and_an_odd_batch_are_refused(backbone: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(UsageError, match=r"8\.9 \(Ada\) or newer, and NVIDIA A100 has 8\.0; leave fp8 out"):
        convert_to_float8(backbone, torch.device("cuda:0"), 4)
    odd = create("vit_tiny", embedding_dim=32, image_size=48)  # 36 tokens
    with pytest.raises(
        UsageError, match=r"data\.batch_size = 6 makes 216 tokens; give a batch size that is a multiple"
    ):
        convert_to_float8(odd, CPU, 6)
