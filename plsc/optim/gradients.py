"""Clipping by the norm of all gradients, and float16 loss scaling: between backward() and step().

Both treat the replicated backbone and the sharded table as one, on every rank alike.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from plsc.errors import UsageError
from plsc.optim.head_optimizers import HeadOptimizer
from plsc.optim.verdict import Verdict, step_unless
from plsc.parallel.collectives import all_reduce_max, all_reduce_sum
from plsc.parallel.mesh import Mesh
from plsc.parallel.step_timeline import HEAD, step_part

HeadOptimizers = HeadOptimizer | list[HeadOptimizer]  # of one class table, or of several


def clip_grad_norm_(parameters: Iterable[nn.Parameter], max_norm: float, head: HeadOptimizers | None = None) -> Tensor:
    """Scale gradients so that their common norm is at most ``max_norm``.

    Args:
        parameters: of the backbone, after data parallelism has averaged their gradients: equal on every rank.
        max_norm: the bound.
        head: where given, the gradients of its table, or tables, count (summed over their shards, once) and are scaled
            too. That costs one more second pass. arcface_torch clips the backbone alone.

    Returns:
        The norm before clipping, a scalar equal on every rank.

    Raises:
        UsageError: ``head`` is no optimizer of a head.
    """
    heads = [] if head is None else _head_optimizers(head)
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = total_norm(gradients)
    for each in heads:
        norm = torch.hypot(norm.double(), each.gradient_norm().to(norm.device))
    return clip_by_norm_(gradients, norm, max_norm, heads)


def clip_by_norm_(
    gradients: list[Tensor], norm: Tensor, max_norm: float, heads: Sequence[HeadOptimizer] = ()
) -> Tensor:
    """Do what :func:`clip_grad_norm_` does, to gradients, or parts of them, whose common norm is known already."""
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        alike.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for (device, dtype), group in alike.items():  # one launch for many: a step would have hundreds
        torch._foreach_mul_(group, factor.to(device, dtype))
    for head in heads:
        head.scale_gradients(factor.double())
    return norm


def _head_optimizers(head: HeadOptimizers) -> list[HeadOptimizer]:
    """The optimizers of all class tables; UsageError where one is something else."""
    heads = head if isinstance(head, list) else [head]
    for each in heads:
        if not isinstance(each, HeadOptimizer):
            kind = type(each).__name__
            raise UsageError(f"give the head's optimizer, a plsc.HeadSGD or plsc.HeadAdamW, not a {kind}")
    return heads


def total_norm(gradients: list[Tensor]) -> Tensor:
    """The norm of all gradients together. On CPUs in float64, as a float32 sum depends on the number of threads."""
    if any(gradient.device.type != "cpu" for gradient in gradients):
        return nn.utils.get_total_norm(gradients)
    squares = [torch.linalg.vector_norm(gradient, dtype=torch.float64).square() for gradient in gradients]
    return torch.stack([torch.zeros((), dtype=torch.float64), *squares]).sum().sqrt()


def sharded_norm(parts: list[Tensor], copies: Sequence[int], mesh: Mesh) -> Tensor:
    """The norm of gradients that lie in parts on ranks; all ranks of the mesh call.

    Args:
        parts: those of this rank.
        copies: on how many ranks each lies.
        mesh: all of these ranks.
    """
    by_copies: dict[int, list[Tensor]] = {}
    for part, count in zip(parts, copies, strict=True):
        by_copies.setdefault(count, []).append(part)
    square = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for count, same in by_copies.items():
        square += total_norm(same).to(square).square() / count
    return all_reduce_sum(square, mesh).sqrt()


class GradScaler(torch.amp.GradScaler):
    """torch's GradScaler with one verdict for all ranks: an overflow on any, in backbone or table, skips both.

    torch's own looks at each rank's and each optimizer's gradients by themselves, so that replicas and shards can
    take different steps. Per step: :meth:`unscale_all`, clip if you clip, :meth:`step_both`, ``update()``. None of them
    waits for the device.
    """

    def __init__(
        self, mesh: Mesh, enabled: bool = True, init_scale: float = 2.0**16, growth_interval: int = 2000
    ) -> None:
        super().__init__(mesh.device.type, init_scale=init_scale, growth_interval=growth_interval, enabled=enabled)
        self.mesh = mesh

    def unscale_all(self, backbone: torch.optim.Optimizer, head: HeadOptimizers) -> None:
        """Unscale the gradients of the backbone's optimizer and the head's, or those of several tables."""
        heads = _head_optimizers(head)
        if self.is_enabled():
            if self._scale is None:  # scale() makes it, and this rank sees no loss
                self.scale(torch.zeros((), device=self.mesh.device))
            self.unscale_(backbone)
            if not self._found_inf(backbone):  # no weight has a gradient: update() asks for a verdict all the same
                found = torch.zeros((), device=self.mesh.device)
                self._per_optimizer_states[id(backbone)]["found_inf_per_device"][self.mesh.device] = found
            assert self._scale is not None  # made by scale()
            for each in heads:
                each.scale_gradients(self._scale.double().reciprocal())

    def step_both(
        self, backbone: torch.optim.Optimizer, head: HeadOptimizers, verdict: Verdict | None = None
    ) -> Verdict:
        """Step all optimizers, or none where ``verdict`` skips the step. Call :meth:`unscale_all` first.

        Args:
            backbone: its optimizer. On a GPU the host waits for the verdict, unless it is one of torch's fused ones.
            head: the table's, or those of several.
            verdict: of all ranks; by default whether all optimizers' gradients are finite on all of them.

        Returns:
            The verdict. ``skipped`` of it waits for the device.
        """
        heads = _head_optimizers(head)
        if verdict is None:
            agreed = all_reduce_max(self._not_finite(backbone, heads), self.mesh)
            verdict = Verdict(agreed.reshape(1), self.mesh.timeout)
        step_unless(backbone, verdict)
        with step_part(HEAD):
            for each in heads:
                each.step_unless(verdict)
        for found in self._found_inf(backbone):
            found.copy_(verdict.flag)
        return verdict

    def _not_finite(self, backbone: torch.optim.Optimizer, heads: Sequence[HeadOptimizer]) -> Tensor:
        bad = torch.stack([head.not_finite() for head in heads]).max()
        for found in self._found_inf(backbone):
            bad = torch.maximum(bad, found.to(bad.device))
        return bad

    def _found_inf(self, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        """torch's record of :meth:`unscale_`, by which ``update()`` changes the scale; none if not enabled."""
        if not self.is_enabled():
            return []
        return list(self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())
