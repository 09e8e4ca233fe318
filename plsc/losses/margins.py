"""Margins: what a class's own logit becomes, as pure functions of its cosine.

A margin replaces the target's cosine t by φ(t) before the softmax; with the scale s the target's logit is s·φ(t), all
others are s·cos. The derivative dφ/dt comes from autograd on these scalars, one per sample, in float64.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Real
from typing import Literal

import torch
from torch import Tensor

from plsc.errors import UsageError
from plsc.extensions import Registry

__all__ = [
    "MLCD",
    "AdaFace",
    "ArcFace",
    "Combined",
    "CosFace",
    "CurricularFace",
    "ElasticFace",
    "MagFace",
    "Softmax",
    "SphereFace",
]

Gradient = Literal["exact", "straight_through"]
State = dict[str, Tensor]
# Every margin of this module by its name in configurations, and those of installed packages.
MARGINS: "Registry[type[Margin]]" = Registry(
    "plsc.margins",
    {},
    lambda found: isinstance(found, type) and issubclass(found, Margin),
    "a subclass of plsc.losses.margins.Margin",
)

_SMALLEST_SINE_SQUARED = 1e-12  # at cos = ±1 the angle has no derivative; this bounds it


@dataclass(frozen=True)
class TargetLogit:
    """The margin at each sample's target, all (B,) float64.

    ``phi`` replaces the cosine, ``slope`` is dφ/dcos, ``norm_slope`` is dφ/d‖x‖; ``penalty`` is added to the sample's
    loss and ``penalty_slope`` is its derivative by ‖x‖.
    """

    phi: Tensor
    slope: Tensor
    norm_slope: Tensor | None = None
    penalty: Tensor | None = None
    penalty_slope: Tensor | None = None


@dataclass(frozen=True)
class Margin:
    """The interface of all margins. ``s`` scales cosines to logits.

    To add a margin, define its subclass in this module and name it in ``__all__`` and in
    ``plsc/__init__.py``: ``plsc.NAME``, ``plsc.losses.NAME`` and the configuration's ``margin = "name"`` follow. Fields
    of a new name also need their key in :class:`plsc.config.HeadConfig`, which documents every key. Another package
    adds one as an entry point "plsc.margins": a configuration gives it the keys that [head] has, and its other fields
    keep their defaults.

    ``gradient="straight_through"`` takes dφ/dt as 1, which is what arcface_torch computes; "exact" differentiates φ.
    """

    s: float = 64.0
    gradient: Gradient = "exact"

    uses_norm = False  # whether φ depends on the embedding's norm
    changes_negatives = False  # whether other classes' logits depend on the sample's φ
    separates_positives = False  # whether the loss has one term for negatives and one for targets

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.__module__ == __name__:  # margins of other modules are for their callers, who construct them
            MARGINS[cls.__name__.lower()] = cls

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is float and not _is_finite(value):
                raise UsageError(f"{type(self).__name__}'s {field.name} must be a number, not {value!r}")
        _require(self.s > 0, f"s must be positive, not {self.s}")
        _require(
            self.gradient in ("exact", "straight_through"),
            f"gradient is 'exact' or 'straight_through', not {self.gradient!r}",
        )

    @property
    def largest_logit(self) -> float:
        """No logit exceeds this; it decides whether exp() needs a running maximum."""
        return self.s

    def initial_state(self) -> State:
        """Running statistics (float64 scalars), empty for most margins."""
        return {}

    def updated_state(self, state: Mapping[str, Tensor], cos: Tensor, norm: Tensor | None) -> State:
        """The state after seeing a global batch's target cosines (B,) and embedding norms (B,)."""
        return dict(state)

    def phi(self, cos: Tensor, norm: Tensor | None, state: Mapping[str, Tensor], generator: torch.Generator) -> Tensor:
        """φ (B,) of the target cosines (B,). ``generator`` is the same on every rank."""
        raise NotImplementedError

    def penalty(self, norm: Tensor) -> Tensor | None:
        """A term (B,) that joins each sample's loss, from the embeddings' norms (B,)."""
        return None

    def negatives(self, cos: Tensor, phi: Tensor, state: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """(f, df/dcos) of the non-target cosines (classes, B), for margins that change them."""
        raise NotImplementedError

    def target(
        self, cos: Tensor, norm: Tensor | None, state: Mapping[str, Tensor], generator: torch.Generator
    ) -> TargetLogit:
        """Evaluate φ and its derivatives at target cosines (B,) and norms (B,), in float64."""
        with torch.enable_grad():
            cos = cos.detach().double().clamp(-1, 1).requires_grad_()
            norm = norm.detach().double().requires_grad_() if norm is not None else None
            phi = self.phi(cos, norm, state, generator)
            slope, norm_slope = _derivatives(phi, cos, norm)
            penalty = self.penalty(norm) if norm is not None else None
            penalty_slope = None
            if penalty is not None and norm is not None:
                penalty_slope = torch.autograd.grad(penalty.sum(), norm)[0]
        if self.gradient == "straight_through":
            slope, norm_slope = torch.ones_like(slope), None
        return TargetLogit(
            phi.detach(), slope, norm_slope, penalty.detach() if penalty is not None else None, penalty_slope
        )


@dataclass(frozen=True)
class Softmax(Margin):
    """No margin: φ(t) = t. The normalised softmax of NormFace (Wang et al., ACM MM 2017)."""

    def phi(self, cos: Tensor, norm: Tensor | None, state: Mapping[str, Tensor], generator: torch.Generator) -> Tensor:
        """φ(t) = t."""
        return cos * 1.0


@dataclass(frozen=True)
class SphereFace(Margin):
    """φ(t) = (−1)^k cos(mθ) − 2k with k = ⌊mθ/π⌋ (Liu et al., CVPR 2017, eq. 7), on normalised embeddings."""

    m: float = 1.7

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self.m >= 1, f"SphereFace's m multiplies the angle and is at least 1, not {self.m}")

    def phi(self, cos: Tensor, norm: Tensor | None, state: Mapping[str, Tensor], generator: torch.Generator) -> Tensor:
        """φ(t) = (−1)^k cos(mθ) − 2k."""
        return _falling_cosine(self.m * _angle(cos))


@dataclass(frozen=True)
class CosFace(Margin):
    """φ(t) = t − m (Wang et al., CVPR 2018, eq. 4)."""

    m: float = 0.4

    def phi(self, cos: Tensor, norm: Tensor | None, state: Mapping[str, Tensor], generator: torch.Generator) -> Tensor:
        """φ(t) = t − m."""
        return cos - self.m


@dataclass(frozen=True)
class ArcFace(Margin):
    """φ(t) = cos(θ + m) (Deng et al., CVPR 2019, eq. 3); where θ + m > π, φ(t) = t − m·sin m, which keeps φ falling."""

    m: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(0 <= self.m < math.pi, f"ArcFace's m is an angle in [0, π), not {self.m}")

    def phi(self, cos: Tensor, norm: Tensor | None, state: Mapping[str, Tensor], generator: torch.Generator) -> Tensor:
        """φ(t) = cos(θ + m)."""
        return _shifted_angle(cos, self.m)


@dataclass(frozen=True)
class Combined(Margin):
    """φ(t) = cos(m1·θ + m2) − m3 (Deng et al., CVPR 2019, eq. 4).

    Past π it goes on falling: as :class:`ArcFace` does where m1 = 1, as :class:`SphereFace` does elsewhere.
    """

    m1: float = 1.0
    m2: float = 0.5
    m3: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self.m1 >= 1, f"m1 multiplies the angle and is at least 1, not {self.m1}")
        _require(0 <= self.m2 < math.pi, f"m2 is an angle in [0, π), not {self.m2}")

    def phi(self, cos: Tensor, norm: Tensor | None, state: Mapping[str, Tensor], generator: torch.Generator) -> Tensor:
        """φ(t) = cos(m1·θ + m2) − m3."""
        if self.m1 == 1.0:
            return _shifted_angle(cos, self.m2) - self.m3
        return _falling_cosine(self.m1 * _angle(cos) + self.m2) - self.m3


@dataclass(frozen=True)
class AdaFace(Margin):
    """φ(t) = cos(θ − m·ẑ) − (m + m·ẑ) (Kim et al., CVPR 2022, eq. 12 and 13).

    ẑ is the embedding's norm relative to recent norms, clipped to [−1, 1]: (‖x‖ − μ)·h/σ, with running mean and
    deviation of the global batch's norms that follow at the rate ``rate``. No gradient flows through the norm.
    """

    m: float = 0.4
    h: float = 0.333
    rate: float = 0.01

    uses_norm = True
    _EPSILON = 1e-3

    def initial_state(self) -> State:
        """The authors' start: mean 20, deviation 100."""
        return {"mean": torch.tensor(20.0, dtype=torch.float64), "std": torch.tensor(100.0, dtype=torch.float64)}

    def updated_state(self, state: Mapping[str, Tensor], cos: Tensor, norm: Tensor | None) -> State:
        """Move mean and deviation towards the batch's."""
        assert norm is not None
        norm = norm.double().clamp(0.001, 100)
        std = norm.std() if norm.numel() > 1 else state["std"]  # one sample has no deviation
        return {"mean": state["mean"].lerp(norm.mean(), self.rate), "std": state["std"].lerp(std, self.rate)}

    def phi(self, cos: Tensor, norm: Tensor | None, state: Mapping[str, Tensor], generator: torch.Generator) -> Tensor:
        """φ(t) = cos(θ − m·ẑ) − (m + m·ẑ)."""
        assert norm is not None
        z_hat = (norm.detach().clamp(0.001, 100) - state["mean"]) / (state["std"] + self._EPSILON) * self.h
        z_hat = z_hat.clamp(-1, 1)
        angle = (_angle(cos) - self.m * z_hat).clamp(self._EPSILON, math.pi - self._EPSILON)
        return angle.cos() - (self.m + self.m * z_hat)


@dataclass(frozen=True)
class MagFace(Margin):
    """ArcFace whose margin grows with the embedding's norm, and a penalty that rewards large norms.

    Meng et al., CVPR 2021: m(a) is linear from ``m_low`` at norm ``norm_low`` to ``m_high`` at ``norm_high`` (eq. 3);
    the penalty g(a) = a/norm_high² + 1/a is weighted by ``penalty_weight`` (eq. 4). Norms are clipped to that range;
    gradients flow through the norm.
    """

    m_low: float = 0.45
    m_high: float = 0.8
    norm_low: float = 10.0
    norm_high: float = 110.0
    penalty_weight: float = 35.0

    uses_norm = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(0 < self.norm_low < self.norm_high, "MagFace needs 0 < norm_low < norm_high")
        _require(0 <= self.m_low <= self.m_high < math.pi, "MagFace needs 0 ≤ m_low ≤ m_high < π")

    def phi(self, cos: Tensor, norm: Tensor | None, state: Mapping[str, Tensor], generator: torch.Generator) -> Tensor:
        """φ(t) = cos(θ + m(‖x‖))."""
        assert norm is not None
        slope = (self.m_high - self.m_low) / (self.norm_high - self.norm_low)
        return _shifted_angle(cos, self.m_low + slope * (self._clipped(norm) - self.norm_low))

    def penalty(self, norm: Tensor) -> Tensor:
        """λ·g(‖x‖)."""
        clipped = self._clipped(norm)
        return self.penalty_weight * (clipped / self.norm_high**2 + 1 / clipped)

    def _clipped(self, norm: Tensor) -> Tensor:
        return norm.clamp(self.norm_low, self.norm_high)


@dataclass(frozen=True)
class CurricularFace(Margin):
    """ArcFace whose hard negatives weigh more as training goes on (Huang et al., CVPR 2020, eq. 5 to 7).

    A negative with cos > φ is hard and becomes cos·(t + cos), where t follows the mean target cosine at ``rate``.
    """

    m: float = 0.5
    rate: float = 0.01

    changes_negatives = True

    @property
    def largest_logit(self) -> float:
        """cos·(t + cos) ≤ 2."""
        return 2 * self.s

    def initial_state(self) -> State:
        """t = 0: hard negatives count less at first."""
        return {"t": torch.tensor(0.0, dtype=torch.float64)}

    def updated_state(self, state: Mapping[str, Tensor], cos: Tensor, norm: Tensor | None) -> State:
        """Move t towards the batch's mean target cosine."""
        return {"t": state["t"].lerp(cos.double().mean(), self.rate)}

    def phi(self, cos: Tensor, norm: Tensor | None, state: Mapping[str, Tensor], generator: torch.Generator) -> Tensor:
        """φ(t) = cos(θ + m)."""
        return _shifted_angle(cos, self.m)

    def negatives(self, cos: Tensor, phi: Tensor, state: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """cos·(t + cos) where cos > φ, else cos."""
        t = state["t"].to(cos.dtype)
        hard = cos > phi.to(cos.dtype)
        return torch.where(hard, cos * (t + cos), cos), torch.where(hard, t + 2 * cos, 1.0)


@dataclass(frozen=True)
class ElasticFace(Margin):
    """A margin drawn for each sample from N(m, std) (Boutros et al., CVPRW 2022, eq. 4 and 5).

    ``base`` is "arc" (an angle) or "cos" (a shift); with ``plus`` the largest draws go to the smallest cosines (§3.2).
    """

    m: float = 0.5
    std: float = 0.0125
    base: Literal["arc", "cos"] = "arc"
    plus: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self.base in ("arc", "cos"), f"ElasticFace's base is 'arc' or 'cos', not {self.base!r}")
        _require(self.std >= 0, f"ElasticFace's std is not negative, but {self.std} is")

    def phi(self, cos: Tensor, norm: Tensor | None, state: Mapping[str, Tensor], generator: torch.Generator) -> Tensor:
        """φ(t) = cos(θ + mᵢ) or t − mᵢ."""
        on_host = torch.empty(cos.numel(), dtype=cos.dtype, pin_memory=cos.is_cuda).normal_(
            self.m, self.std, generator=generator
        )
        drawn = on_host.to(cos.device, non_blocking=True)
        if self.plus:
            margin = torch.empty_like(drawn)
            margin[cos.detach().argsort()] = drawn.sort(descending=True).values
        else:
            margin = drawn
        return _shifted_angle(cos, margin) if self.base == "arc" else cos - margin


@dataclass(frozen=True)
class MLCD(Margin):
    """log(1 + Σ exp(s·t_j) over negatives) + log(1 + Σ exp(−s·φ(t_p)) over a sample's labels), with φ(t) = t − m.

    Multi-label cluster discrimination (An et al., ECCV 2024, the loss L_MLCD of section 3): negatives and labels are
    each compared with 0, not with each other. Labels are (b, K); one alone is a case of it.
    """

    m: float = 0.0

    separates_positives = True

    def phi(self, cos: Tensor, norm: Tensor | None, state: Mapping[str, Tensor], generator: torch.Generator) -> Tensor:
        """φ(t) = t − m."""
        return cos - self.m


def to_margin(margin: Margin | str) -> Margin:
    """``margin`` itself, or the one of that name in configurations, with its own values.

    Raises:
        UsageError: there is no such margin; the message lists the names.
    """
    if isinstance(margin, str) and (found := MARGINS.find(margin)) is not None:
        return found()
    if isinstance(margin, Margin):
        return margin
    if isinstance(margin, type) and issubclass(margin, Margin):
        raise UsageError(f"margin is the class {margin.__name__}; give an instance: plsc.{margin.__name__}()")
    known = ", ".join(sorted(MARGINS.every_name()))
    raise UsageError(f"there is no margin {margin!r}: give one of {known}, or an instance like plsc.ArcFace()")


def _is_finite(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UsageError(message)


def _derivatives(phi: Tensor, cos: Tensor, norm: Tensor | None) -> tuple[Tensor, Tensor | None]:
    inputs = [cos] if norm is None else [cos, norm]
    slope, *rest = torch.autograd.grad(phi.sum(), inputs, allow_unused=True)
    return slope, rest[0] if rest else None


def _sine(cos: Tensor) -> Tensor:
    return (1 - cos * cos).clamp(min=_SMALLEST_SINE_SQUARED).sqrt()


def _angle(cos: Tensor) -> Tensor:
    return torch.atan2(_sine(cos), cos)


def _shifted_angle(cos: Tensor, margin: Tensor | float) -> Tensor:
    """cos(θ + m), and beyond π the line t − m·sin m."""
    cos_m: Tensor | float
    sin_m: Tensor | float
    if isinstance(margin, Tensor):
        cos_m, sin_m = margin.cos(), margin.sin()
    else:  # made a tensor, a number would be copied to the device, and the host would wait for that
        cos_m, sin_m = math.cos(margin), math.sin(margin)
    shifted = cos * cos_m - _sine(cos) * sin_m
    return torch.where(cos > -cos_m, shifted, cos - margin * sin_m)


def _falling_cosine(angle: Tensor) -> Tensor:
    """The cosine, continued past π so that it goes on falling: (−1)^k cos a − 2k."""
    turns = (angle.detach() / math.pi).floor()
    sign = 1 - 2 * (turns % 2)
    return sign * angle.cos() - 2 * turns
