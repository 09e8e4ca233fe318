"""The oracle: the class softmax dense, unsharded and in float64, written from the papers' formulas.

It shares no code with plsc: margins are written out again, gradients come from autograd, steps from torch.optim.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor


def arc(t: Tensor, m: Tensor | float) -> Tensor:
    m = torch.as_tensor(m, dtype=t.dtype)
    theta = t.clamp(-1 + 1e-14, 1 - 1e-14).acos()
    return torch.where(theta + m < math.pi, (theta + m).cos(), t - m * m.sin())


def sphere(angle: Tensor) -> Tensor:
    k = (angle.detach() / math.pi).floor()
    return torch.where(k % 2 == 0, angle.cos(), -angle.cos()) - 2 * k


@dataclass
class Oracle:
    """A margin by name with its parameters; ``state`` moves as training batches pass."""

    name: str
    s: float = 64.0
    gradient: str = "exact"
    parameters: dict = field(default_factory=dict)
    state: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name == "adaface":
            self.state = {"mean": 20.0, "std": 100.0}
        if self.name == "curricularface":
            self.state = {"t": 0.0}

    def loss(self, x: Tensor, y: Tensor, weight: Tensor, centers: int = 1, classes: Tensor | None = None) -> Tensor:
        """Mean loss of x (B, D) with labels y against weight (C·K, D); ``classes`` (C,) bool restricts the softmax."""
        norm = x.norm(dim=1)
        cos = (x / norm[:, None]) @ (weight / weight.norm(dim=1, keepdim=True)).T
        cos = cos.view(len(x), -1, centers).amax(2)
        t = cos[torch.arange(len(x)), y]
        phi, negatives, penalty = self.margin(t, norm, cos)
        if self.gradient == "straight_through":
            phi = t + (phi - t).detach()
        logits = self.s * negatives.scatter(1, y[:, None], phi[:, None])
        if classes is not None:
            logits = logits.masked_fill(~classes, -torch.inf)
        return (torch.logsumexp(logits, 1) - self.s * phi + penalty).mean()

    def margin(self, t: Tensor, norm: Tensor, cos: Tensor) -> tuple[Tensor, Tensor, Tensor | float]:
        p = self.parameters
        if self.name == "softmax":
            return t, cos, 0.0
        if self.name == "cosface":
            return t - p["m"], cos, 0.0
        if self.name == "arcface":
            return arc(t, p["m"]), cos, 0.0
        if self.name == "sphereface":
            return sphere(p["m"] * t.acos()), cos, 0.0
        if self.name == "combined":
            if p["m1"] == 1:
                return arc(t, p["m2"]) - p["m3"], cos, 0.0
            return sphere(p["m1"] * t.acos() + p["m2"]) - p["m3"], cos, 0.0
        return getattr(self, "_" + self.name)(t, norm, cos)

    def _adaface(self, t: Tensor, norm: Tensor, cos: Tensor) -> tuple[Tensor, Tensor, float]:
        m, h, rate = 0.4, 0.333, 0.01
        safe = norm.detach().clip(0.001, 100)
        self.state["mean"] += rate * (safe.mean().item() - self.state["mean"])
        if len(safe) > 1:
            self.state["std"] += rate * (safe.std().item() - self.state["std"])
        z = ((safe - self.state["mean"]) / (self.state["std"] + 1e-3) * h).clip(-1, 1)
        theta = (t.acos() - m * z).clip(1e-3, math.pi - 1e-3)
        return theta.cos() - (m + m * z), cos, 0.0

    def _magface(self, t: Tensor, norm: Tensor, cos: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a = norm.clip(10, 110)
        margin = (0.8 - 0.45) / (110 - 10) * (a - 10) + 0.45
        return arc(t, margin), cos, 35 * (a / 110**2 + 1 / a)

    def _curricularface(self, t: Tensor, norm: Tensor, cos: Tensor) -> tuple[Tensor, Tensor, float]:
        self.state["t"] = 0.01 * t.detach().mean().item() + 0.99 * self.state["t"]
        phi = arc(t, 0.5)
        hard = cos > phi.detach()[:, None]
        return phi, torch.where(hard, cos * (self.state["t"] + cos), cos), 0.0


@dataclass
class MultiLabelOracle:
    """Several labels a sample (B, K), -1 for none: a softmax for each, written out label by label."""

    margin: Oracle
    positives: str = "excluded"
    reduction: str = "mean"
    weights: Tensor | None = None

    def loss(self, x: Tensor, y: Tensor, weight: Tensor, centers: int = 1, classes: Tensor | None = None) -> Tensor:
        norm = x.norm(dim=1)
        cos = (x / norm[:, None]) @ (weight / weight.norm(dim=1, keepdim=True)).T
        cos = cos.view(len(x), -1, centers).amax(2)
        losses = []
        for i, labels in enumerate(y.tolist()):
            own = list(dict.fromkeys(label for label in labels if label >= 0))
            if not own:
                continue
            others = [j for j in range(cos.shape[1]) if j not in own and (classes is None or classes[j])]
            of_labels, penalty = [], 0.0
            for p in own:
                phi, _, penalty = self.margin.margin(cos[i, p : p + 1], norm[i : i + 1], cos[i : i + 1])
                if self.margin.gradient == "straight_through":
                    phi = cos[i, p : p + 1] + (phi - cos[i, p : p + 1]).detach()
                target = self.margin.s * phi
                rest = others + [q for q in own if q != p] if self.positives == "kept" else others
                loss = torch.logsumexp(torch.cat([target, self.margin.s * cos[i, rest]]), 0) - target[0]
                factor = 1.0 if self.weights is None else float(self.weights[i, labels.index(p)])
                of_labels.append(loss * factor)
            total = torch.stack(of_labels).sum()
            if self.weights is None and self.reduction == "mean":
                total = total / len(own)
            losses.append(total + penalty if isinstance(penalty, float) else total + penalty[0])
        return torch.stack(losses).mean() if losses else 0.0 * (x.sum() + weight.sum())


@dataclass
class FilteredOracle:
    """A softmax for each label, without the classes one of whose rows is as close to one of the label's as ``limit``.

    y is (B,), or (B, K) with -1 for none, whose losses are averaged by sample.
    """

    margin: Oracle
    limit: float
    positives: str = "excluded"

    def loss(self, x: Tensor, y: Tensor, weight: Tensor, centers: int = 1, classes: Tensor | None = None) -> Tensor:
        rows = weight / weight.norm(dim=1, keepdim=True)
        nearness = (rows @ rows.T).view(len(rows) // centers, centers, -1, centers).amax((1, 3))
        norm = x.norm(dim=1)
        cos = ((x / norm[:, None]) @ rows.T).view(len(x), -1, centers).amax(2)
        losses = []
        for i, labels in enumerate(y.view(len(x), -1).tolist()):
            own = sorted({label for label in labels if label >= 0})
            of_labels = []
            for p in own:
                phi, negatives, _ = self.margin.margin(cos[i, p : p + 1], norm[i : i + 1], cos[i : i + 1])
                left_out = nearness[p] >= self.limit
                left_out[own if self.positives == "excluded" else p] = True
                if classes is not None:
                    left_out = left_out | ~classes
                z = self.margin.s * torch.cat([phi, negatives[0][~left_out]])
                of_labels.append(torch.logsumexp(z, 0) - z[0])
            if own:
                losses.append(torch.stack(of_labels).mean())
        return torch.stack(losses).mean()


@dataclass
class SeparateOracle:
    """MLCD: log(1 + Σ exp(z_j) over negatives) + log(1 + Σ exp(−z_p) over the labels of a sample)."""

    s: float
    m: float = 0.0

    def loss(self, x: Tensor, y: Tensor, weight: Tensor, centers: int = 1) -> Tensor:
        z = self.s * (x / x.norm(dim=1, keepdim=True)) @ (weight / weight.norm(dim=1, keepdim=True)).T
        losses = []
        for i, labels in enumerate(y.view(len(x), -1).tolist()):
            own = sorted({label for label in labels if label >= 0})
            if own:
                rest = [j for j in range(z.shape[1]) if j not in own]
                negative = torch.log1p(z[i, rest].exp().sum())
                losses.append(negative + torch.log1p((self.s * self.m - z[i, own]).exp().sum()))
        return torch.stack(losses).mean()


def assert_same_roundings(got: Tensor, want: Tensor) -> None:
    """float32 numbers agree to 1e-6; of rounded ones a few may be the other neighbour, to which a last place led."""
    if want.dtype not in (torch.bfloat16, torch.int8):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)
        return
    assert (got != want).double().mean() < 5e-3  # with other random bits, half of all differ
    torch.testing.assert_close(got.float(), want.float(), rtol=2**-7, atol=1.0 if want.dtype == torch.int8 else 0.0)


def relative_error(got: Tensor, want: Tensor) -> float:
    """‖got − want‖ / ‖want‖, in float64."""
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm().clamp(min=1e-30))


def retrieval(x: Tensor, labels: list[int]) -> dict[str, float]:
    """Musgrave et al. (2020): every row of x (N, D) against all others in turn; among equals, other classes first."""
    unit = x.double() / x.double().norm(dim=1, keepdim=True)
    found: dict[str, list[float]] = {}
    for query in range(len(labels)):
        same = [label == labels[query] for label in labels]
        order = sorted(
            (j for j in range(len(labels)) if j != query), key=lambda j: (-float(unit[query] @ unit[j]), same[j])
        )
        hits, relevant = [same[j] for j in order], sum(same) - 1
        if relevant:
            for k in (1, 5, 10):
                found.setdefault(f"recall@{k}", []).append(float(any(hits[:k])))
            found.setdefault("r_precision", []).append(sum(hits[:relevant]) / relevant)
            at = [sum(hits[: i + 1]) / (i + 1) for i in range(relevant) if hits[i]]
            found.setdefault("map@r", []).append(sum(at) / relevant)
    return {name: sum(values) / len(values) for name, values in found.items()}


Named = tuple[list[str], Tensor]


@dataclass(frozen=True)
class Searches:
    """ISO/IEC 19795-1, probe by probe: the names and unit rows of a gallery, of mated and of non-mated probes.

    ``slack`` is added to the scores of persons who are not the probe's own: below 0 it makes a search easier.
    """

    gallery: Named
    mated: Named
    non_mated: Named

    def candidates(self, row: Tensor) -> dict[str, float]:
        """Each enrolled person's best score."""
        scores: dict[str, float] = {}
        for name, face in zip(*self.gallery, strict=True):
            scores[name] = max(scores.get(name, -2.0), float(row.double() @ face.double()))
        return scores

    def fpir(self, threshold: float) -> float:
        """The share of non-mated probes with a candidate at ``threshold`` or above."""
        rows = self.non_mated[1]
        return sum(max(self.candidates(row).values()) >= threshold for row in rows) / len(rows)

    def fnir(self, threshold: float, rank: int, slack: float = 0.0) -> float:
        """The share of mated probes whose person is not among the ``rank`` best, or below ``threshold``."""
        missed = 0
        for name, row in zip(*self.mated, strict=True):
            scores = self.candidates(row)
            own = scores.pop(name)
            missed += own < threshold + slack or sum(score + slack >= own for score in scores.values()) >= rank
        return missed / len(self.mated[0])
