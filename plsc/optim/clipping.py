"""Clipping by the norm of the whole gradient: the replicated backbone's, and if wanted the sharded table's."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from plsc.optim.head_optimizer import HeadOptimizer


def clip_grad_norm_(parameters: Iterable[nn.Parameter], max_norm: float, head: HeadOptimizer | None = None) -> Tensor:
    """Scale gradients so that their common norm is at most ``max_norm``.

    Args:
        parameters: of the backbone, after data parallelism has averaged their gradients: equal on every rank.
        max_norm: the bound.
        head: where given, the table's gradient counts (summed over its shards, once) and is scaled too. That costs
            one more second pass. arcface_torch clips the backbone alone.

    Returns:
        The norm before clipping, a scalar equal on every rank.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = total_norm(gradients)
    if head is not None:
        norm = torch.hypot(norm.double(), head.gradient_norm().to(norm.device))
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.dtype))
    if head is not None:
        head.scale_gradients(factor.double())
    return norm


def total_norm(gradients: list[Tensor]) -> Tensor:
    """The norm of all gradients together. On CPUs it is summed in float64: float32's last bits hang on the threads."""
    if any(gradient.device.type != "cpu" for gradient in gradients):
        return nn.utils.get_total_norm(gradients)
    squares = [torch.linalg.vector_norm(gradient, dtype=torch.float64).square() for gradient in gradients]
    return torch.stack([torch.zeros((), dtype=torch.float64), *squares]).sum().sqrt()
