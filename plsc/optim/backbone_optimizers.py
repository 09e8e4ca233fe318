"""The optimizers of the backbone: torch's and timm's, built by name from one set of hyper-parameters.

torch has SGD, AdamW and Adafactor, timm LARS, LAMB, Lion, and a Muon that takes convolutions as well. w is a weight, g
its gradient, γ the learning rate, λ the weight decay. On a GPU torch's fused SGD and AdamW leave it to the device
whether a step goes through (:mod:`plsc.optim.verdict`); before each of the others the host waits for the verdict.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from plsc.errors import UsageError
from plsc.optim.eight_bit_adamw import EightBitAdamW

Groups = Sequence[dict[str, Any]]
Builder = Callable[[Groups, "Hyperparameters", dict[str, Any]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Hyperparameters:
    """Values of a backbone's optimizer; each builder reads those that its update has.

    Attributes:
        lr: the learning rate γ of every group that has none of its own.
        weight_decay: λ of every group that has none of its own.
        momentum: sgd, lars and muon.
        betas: decay rates of the two averages of adamw, lamb and lion, and of muon's AdamW.
        eps: adamw, lamb and muon's AdamW: added to the square root of the second moment.
        trust_coefficient: lars: η.
        fused: take torch's fused kernels where the optimizer has them: on CPUs a third of the time.
        state_dtype: adamw: "float32", or "int8" for moments in 8 bits.
        compiled: compile the update of moments in 8 bits.
    """

    lr: float
    weight_decay: float = 0.0
    momentum: float = 0.9
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    trust_coefficient: float = 1e-3
    fused: bool = False
    state_dtype: str = "float32"
    compiled: bool = False


def _sgd(groups: Groups, values: Hyperparameters, options: dict[str, Any]) -> torch.optim.Optimizer:
    """SGD with momentum m: b ← m·b + g + λw, w ← w − γb (torch.optim.SGD)."""
    sgd = torch.optim.SGD(groups, **options, fused=values.fused or None)
    if values.fused and values.momentum:  # the fused kernel would leave them unwritten where the first step is skipped
        for weight in (weight for group in sgd.param_groups for weight in group["params"]):
            sgd.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
    return sgd


def _adamw(groups: Groups, values: Hyperparameters, options: dict[str, Any]) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter, ICLR 2019, algorithm 2): w ← w − γ(m̂ / (√v̂ + ε) + λw) (torch.optim.AdamW)."""
    if values.state_dtype == "int8":
        return EightBitAdamW(groups, **options, compiled=values.compiled)
    return torch.optim.AdamW(groups, **options, fused=values.fused or None)


def _lars(groups: Groups, values: Hyperparameters, options: dict[str, Any]) -> torch.optim.Optimizer:
    """LARS (You, Gitman and Ginsburg, 2017, algorithm 1): SGD whose layers move by a share of their own norm.

    b ← m·b + η‖w‖ / (‖g‖ + λ‖w‖) · (g + λw), w ← w − γb. The ratio is 1 where either norm is 0.
    """
    trust = options.pop("trust_coefficient")
    return _from_timm("Lars", _adapted_where_decayed(groups), **options, trust_coeff=trust)


def _lamb(groups: Groups, values: Hyperparameters, options: dict[str, Any]) -> torch.optim.Optimizer:
    """LAMB (You et al., ICLR 2020, algorithm 2): Adam whose layers move by a share of their own norm.

    r = m̂ / (√v̂ + ε) + λw, w ← w − γ‖w‖ / ‖r‖ · r. timm would clip gradients to a norm of 1 besides, which the paper
    does not.
    """
    return _from_timm("Lamb", _adapted_where_decayed(groups), **options, max_grad_norm=None)


def _adafactor(groups: Groups, values: Hyperparameters, options: dict[str, Any]) -> torch.optim.Optimizer:
    """Adafactor (Shazeer and Stern, ICML 2018, algorithms 4 and 5): the second moment as a product of row and column.

    With β = 1 − t^(−0.8), ρ = min(γ, 1/√t) and α = max(10⁻³, RMS(w))·ρ: u = g/√v̂, w ← (1 − γλ)w − αu / max(1, RMS(u)).
    torch factors the last two dimensions: of a 3 x 3 convolution it keeps 6 numbers instead of 9.
    """
    return torch.optim.Adafactor(groups, **options)


def _lion(groups: Groups, values: Hyperparameters, options: dict[str, Any]) -> torch.optim.Optimizer:
    """Lion (Chen et al., NeurIPS 2023, algorithm 2): u = sign(β₁m + (1 − β₁)g), w ← w − γ(u + λw), m ← β₂m + (1 − β₂)g.

    Every number moves by γ, so that γ is 3 to 10 times smaller and λ as much larger than AdamW's.
    """
    return _from_timm("Lion", groups, **options)


def _muon(groups: Groups, values: Hyperparameters, options: dict[str, Any]) -> torch.optim.Optimizer:
    """Muon (Jordan et al., 2024) for matrices, AdamW for the rest.

    b ← m·b + (1 − m)g, and u, the orthogonal factor of (1 − m)g + m·b by five Newton-Schulz iterations in bfloat16
    (his coefficients; timm's default are others).
    w ← (1 − γλ)w − 0.2·γ·√max(rows, columns)·u: steps have the root mean square of AdamW's (Liu et al., 2025,
    equation 4), so that one γ serves both. A convolution counts as a matrix of its output channels.
    """
    split, eps = list[dict[str, Any]](), options.pop("eps")
    for group in groups:
        matrices = [weight for weight in group["params"] if _is_matrix(weight)]
        rest = [weight for weight in group["params"] if not _is_matrix(weight)]
        split += [{**group, "params": matrices, "use_muon": True, "nesterov": True}] if matrices else []
        # timm's Nesterov variant would make AdamW NAdamW
        split += [{**group, "params": rest, "use_muon": False, "nesterov": False, "eps": eps}] if rest else []
    return _from_timm("Muon", split, **options, ns_coefficients="original", adjust_lr_fn="match_rms_adamw")


# How each is made, and the hyper-parameters, beside lr and weight_decay, that it reads.
_OPTIMIZERS: dict[str, tuple[Builder, tuple[str, ...]]] = {
    "sgd": (_sgd, ("momentum",)),
    "adamw": (_adamw, ("betas", "eps")),
    "lars": (_lars, ("momentum", "trust_coefficient")),
    "lamb": (_lamb, ("betas", "eps")),
    "adafactor": (_adafactor, ()),
    "lion": (_lion, ("betas",)),
    "muon": (_muon, ("momentum", "betas", "eps")),
}
BACKBONE_OPTIMIZERS = tuple(_OPTIMIZERS)
HYPERPARAMETERS = {name: read for name, (_, read) in _OPTIMIZERS.items()}


def make_backbone_optimizer(name: str, groups: Groups, values: Hyperparameters) -> torch.optim.Optimizer:
    """Return the optimizer ``name``, a key of BACKBONE_OPTIMIZERS.

    Args:
        name: of the update rule.
        groups: parameter groups as torch's optimizers take them; ``lr`` and ``weight_decay`` of a group count before
            those of ``values``.
        values: the hyper-parameters.

    Raises:
        UsageError: timm or torchao is not installed, or an older timm than the optimizer needs.
    """
    build, read = _OPTIMIZERS[name]
    return build(groups, values, {option: getattr(values, option) for option in ("lr", "weight_decay", *read)})


def _from_timm(name: str, groups: Groups, **options: Any) -> torch.optim.Optimizer:
    """timm's optimizer ``name``; imported here, as the others need torch alone."""
    try:
        optimizer: Callable[..., torch.optim.Optimizer] = getattr(importlib.import_module("timm.optim"), name)
    except (ImportError, AttributeError):
        raise UsageError(
            f'optim.name = "{name.lower()}" is timm\'s, and no timm that has it is installed: '
            'pip install "timm>=1.0.31"'
        ) from None
    return optimizer(groups, **options)


def _adapted_where_decayed(groups: Groups) -> list[dict[str, Any]]:
    """The groups, layer-wise adapted but for those that are kept from weight decay, as LARS and LAMB are run."""
    return [{**group, "always_adapt": group.get("weight_decay") != 0} for group in groups]


def _is_matrix(weight: torch.Tensor) -> bool:
    """Return False for vectors, position embeddings (1, N, D) and depthwise convolutions (C, 1, k, k) as well."""
    return weight.ndim >= 2 and min(weight.shape[:2]) > 1
