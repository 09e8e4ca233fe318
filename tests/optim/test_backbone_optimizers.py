"""The backbone's optimizers: three steps of each against its paper's formula in float64."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plsc.errors import UsageError
from plsc.optim.backbone_optimizers import (
    BACKBONE_OPTIMIZERS,
    HYPERPARAMETERS,
    Hyperparameters,
    make_backbone_optimizer,
)
from plsc.optim.verdict import Verdict, step_unless

VALUES = Hyperparameters(
    0.02, weight_decay=0.1, momentum=0.8, betas=(0.85, 0.97), eps=1e-6, trust_coefficient=0.03, fused=False
)
LR, DECAY, M, (B1, B2), EPS, ETA = 0.02, 0.1, 0.8, VALUES.betas, 1e-6, 0.03
SHAPES = {"matrix": (6, 4), "vector": (5,), "kernel": (4, 3, 2, 3), "positions": (1, 4, 6)}
Kept = dict[str, Tensor]  # what a formula keeps of a weight between steps


def numbers(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sgd(w: Tensor, g: Tensor, kept: Kept, t: int, decay: float) -> Tensor:
    """b = m b + g + λw; w - γb."""
    kept["b"] = M * kept.get("b", torch.zeros_like(w)) + g + decay * w
    return w - LR * kept["b"]


def moments(g: Tensor, kept: Kept, t: int) -> Tensor:
    """m̂ / (√v̂ + ε), with m = β₁m + (1 - β₁)g, v = β₂v + (1 - β₂)g², m̂ = m / (1 - β₁ᵗ), v̂ = v / (1 - β₂ᵗ)."""
    kept["m"] = B1 * kept.get("m", torch.zeros_like(g)) + (1 - B1) * g
    kept["v"] = B2 * kept.get("v", torch.zeros_like(g)) + (1 - B2) * g**2
    return (kept["m"] / (1 - B1**t)) / ((kept["v"] / (1 - B2**t)).sqrt() + EPS)


def adamw(w: Tensor, g: Tensor, kept: Kept, t: int, decay: float) -> Tensor:
    """w - γ(m̂ / (√v̂ + ε) + λw)."""
    return w - LR * (moments(g, kept, t) + decay * w)


def lars(w: Tensor, g: Tensor, kept: Kept, t: int, decay: float) -> Tensor:
    """b = m b + η‖w‖ / (‖g‖ + λ‖w‖) (g + λw); w - γb. No ratio where the group does not decay."""
    ratio = ETA * w.norm() / (g.norm() + decay * w.norm()) if decay and w.norm() > 0 else 1.0
    kept["b"] = M * kept.get("b", torch.zeros_like(w)) + ratio * (g + decay * w)
    return w - LR * kept["b"]


def lamb(w: Tensor, g: Tensor, kept: Kept, t: int, decay: float) -> Tensor:
    """r = m̂ / (√v̂ + ε) + λw; w - γ‖w‖ / ‖r‖ r."""
    r = moments(g, kept, t) + decay * w
    return w - LR * (w.norm() / r.norm() if decay else 1.0) * r


def adafactor(w: Tensor, g: Tensor, kept: Kept, t: int, decay: float) -> Tensor:
    """R = βR + (1 - β) mean(g², columns), C likewise, v̂ = RC / mean(R); u = g / √v̂; see the builder."""
    beta = 1 - t**-0.8
    alpha = max(1e-3, (w.norm() / math.sqrt(w.numel())).item()) * min(LR, 1 / math.sqrt(t))
    if w.ndim > 1:
        kept["r"] = beta * kept.get("r", torch.tensor(0.0)) + (1 - beta) * (g**2).mean(-1, keepdim=True)
        kept["c"] = beta * kept.get("c", torch.tensor(0.0)) + (1 - beta) * (g**2).mean(-2, keepdim=True)
        v = kept["r"] * kept["c"] / kept["r"].mean(-2, keepdim=True)
    else:
        v = kept["v"] = beta * kept.get("v", torch.zeros_like(g)) + (1 - beta) * g**2
    u = g / v.sqrt()
    return (1 - LR * decay) * w - alpha * u / max(1.0, (u.norm() / math.sqrt(u.numel())).item())


def lion(w: Tensor, g: Tensor, kept: Kept, t: int, decay: float) -> Tensor:
    """w - γ(sign(β₁m + (1 - β₁)g) + λw); then m = β₂m + (1 - β₂)g."""
    m = kept.get("m", torch.zeros_like(w))
    kept["m"] = B2 * m + (1 - B2) * g
    return w - LR * (torch.sign(B1 * m + (1 - B1) * g) + decay * w)


def muon(w: Tensor, g: Tensor, kept: Kept, t: int, decay: float) -> Tensor:
    """b = m b + (1 - m)g; u, the orthogonal factor of (1 - m)g + m b; (1 - γλ)w - 0.2γ√max(rows, columns) u."""
    if w.ndim < 2 or w.shape[0] == 1:
        return adamw(w, g, kept, t, decay)
    kept["b"] = M * kept.get("b", torch.zeros_like(w)) + (1 - M) * g
    u = orthogonal_factor(((1 - M) * g + M * kept["b"]).flatten(1))
    return (1 - LR * decay) * w - LR * 0.2 * math.sqrt(max(u.shape)) * u.view_as(w)


def orthogonal_factor(matrix: Tensor) -> Tensor:
    """Five steps X = aX + (bXXᵀ + c(XXᵀ)²)X from X over its norm, which are published in bfloat16."""
    x = matrix / matrix.norm()
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x


FORMULAS: dict[str, Callable[[Tensor, Tensor, Kept, int, float], Tensor]] = {
    "sgd": sgd, "adamw": adamw, "lars": lars, "lamb": lamb, "adafactor": adafactor, "lion": lion, "muon": muon,
}  # fmt: skip


def test_every_optimizer_has_a_formula() -> None:
    assert tuple(FORMULAS) == BACKBONE_OPTIMIZERS


@pytest.mark.parametrize("decay", [0.1, 0.0])
@pytest.mark.parametrize("name", FORMULAS)
def test_three_steps_are_the_formula_s(name: str, decay: float) -> None:
    weights = {key: nn.Parameter(numbers(shape, seed)) for seed, (key, shape) in enumerate(SHAPES.items())}
    expected = {key: weight.detach().clone() for key, weight in weights.items()}
    group: dict[str, Any] = {"params": list(weights.values())}
    if not decay:
        group["weight_decay"] = 0.0
    optimizer = make_backbone_optimizer(name, [group], VALUES)
    kept: dict[str, Kept] = {key: {} for key in weights}
    for t in (1, 2, 3):
        for seed, (key, weight) in enumerate(weights.items()):
            weight.grad = 3.0 * numbers(SHAPES[key], 100 * t + seed)
            expected[key] = FORMULAS[name](expected[key], weight.grad, kept[key], t, decay)
        optimizer.step()
    for key, weight in weights.items():
        moved, off = expected[key] - numbers(SHAPES[key], list(SHAPES).index(key)), weight.detach() - expected[key]
        in_bfloat16 = name == "muon" and key in ("matrix", "kernel")
        assert off.norm() <= (0.05 if in_bfloat16 else 1e-7) * moved.norm(), f"{key}: {off.norm() / moved.norm()}"


def after_three_steps(name: str, values: Hyperparameters) -> list[Tensor]:
    weights = [nn.Parameter(numbers(shape, seed)) for seed, shape in enumerate(SHAPES.values())]
    optimizer = make_backbone_optimizer(name, [{"params": weights}], values)
    for t in (1, 2, 3):
        for seed, weight in enumerate(weights):
            weight.grad = numbers(tuple(weight.shape), 100 * t + seed)
        optimizer.step()
    return [weight.detach() for weight in weights]


@pytest.mark.parametrize("name", FORMULAS)
def test_an_optimizer_reads_what_it_is_listed_to_read(name: str) -> None:
    others = {"momentum": 0.5, "betas": (0.5, 0.6), "eps": 0.1, "trust_coefficient": 0.5}
    assert set().union(*HYPERPARAMETERS.values()) == set(others)
    plain = after_three_steps(name, VALUES)
    for key, value in others.items():
        changed = after_three_steps(name, dataclasses.replace(VALUES, **{key: value}))
        is_same = all(torch.equal(one, other) for one, other in zip(plain, changed, strict=True))
        assert is_same == (key not in HYPERPARAMETERS[name]), key


@pytest.mark.parametrize("name", FORMULAS)
def test_a_skipped_step_leaves_weights_and_state_as_they_were(name: str) -> None:
    weight = nn.Parameter(numbers((6, 4), 0))
    optimizer = make_backbone_optimizer(name, [{"params": [weight]}], VALUES)
    weight.grad = torch.full_like(weight, math.nan)
    before = weight.detach().clone()
    step_unless(optimizer, Verdict(torch.ones(1)))
    assert torch.equal(weight, before)
    assert not optimizer.state
    weight.grad = numbers((6, 4), 1)
    step_unless(optimizer, Verdict(torch.zeros(1)))
    assert not torch.equal(weight, before)


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_a_weight_of_zeros_moves_too(name: str) -> None:
    weight = nn.Parameter(torch.zeros(4, 4))
    optimizer = make_backbone_optimizer(name, [{"params": [weight]}], VALUES)
    weight.grad = torch.ones(4, 4)
    optimizer.step()
    assert weight.abs().min() > 0


@pytest.mark.parametrize("missing", ["timm", "Muon"])
def test_a_missing_timm_is_one_line(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if missing == "timm":
        monkeypatch.setitem(__import__("sys").modules, "timm.optim", None)
    else:
        monkeypatch.delattr("timm.optim.Muon")
    with pytest.raises(UsageError, match=r'optim\.name = "muon" is timm\'s.*: pip install "timm>=1\.0\.31"$'):
        make_backbone_optimizer("muon", [{"params": [nn.Parameter(torch.ones(4, 4))]}], VALUES)
