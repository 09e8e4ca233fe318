"""The head in autograd's graph: the loss forward; backward the embeddings' gradient, and what waits for the update."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from plsc.head.pending import Pending
from plsc.losses.softmax import through_norm

if TYPE_CHECKING:
    from plsc.head.sharded_head import ShardedHead


class HeadLoss(torch.autograd.Function):
    """``ShardedHead.forward``'s node; ``anchor`` makes backward() come where the embeddings need no gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        embeddings: Tensor,
        anchor: Tensor,
        weight: Tensor | None,
        labels: Tensor,
        head: "ShardedHead",
        differentiate: bool,
    ) -> Tensor:
        with torch.autocast(head.mesh.device.type, enabled=False):
            loss, gradient, pending = head.compute(embeddings.detach(), labels, differentiate)
        ctx.head, ctx.pending, ctx.training = head, pending, head.training
        ctx.save_for_backward(*([gradient] if gradient is not None else []))
        ctx.dtype = embeddings.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        head: ShardedHead = ctx.head
        pending: Pending = ctx.pending
        pending.gradient = grad.detach().clone()
        by_weight = None
        if head.update == "autograd":
            by_weight = _dense_gradient(head, pending)
        elif ctx.training:
            head.pending.append(pending)
        by_embeddings = (gradient * (grad * head.mesh.world_size)).to(ctx.dtype)
        return by_embeddings, None, by_weight, None, None, None


def _dense_gradient(head: "ShardedHead", pending: Pending) -> Tensor:
    gradient = torch.zeros_like(head.weight)
    with torch.autocast(head.mesh.device.type, enabled=False):
        for chunk, rows in head.gradient_chunks([pending]):
            gradient[chunk.index] = through_norm(rows, chunk).to(gradient.dtype)
    return gradient
