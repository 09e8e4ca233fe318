"""Loss scaling for float16 that every rank, the backbone and the table obey alike."""

import torch

from plsc.optim.head_optimizer import HeadOptimizer
from plsc.parallel.collectives import all_reduce_max
from plsc.parallel.mesh import Mesh


class GradScaler(torch.amp.GradScaler):
    """torch's GradScaler whose verdict is one for all: an overflow on any rank, in backbone or table, skips both.

    torch's own looks at each rank's and each optimizer's gradients by themselves, so that replicas and shards can
    take different steps. Per step: :meth:`unscale_all`, clip if you clip, :meth:`step_both`, ``update()``.
    """

    def __init__(
        self, mesh: Mesh, enabled: bool = True, init_scale: float = 2.0**16, growth_interval: int = 2000
    ) -> None:
        super().__init__(mesh.device.type, init_scale=init_scale, growth_interval=growth_interval, enabled=enabled)
        self.mesh = mesh

    def unscale_all(self, backbone: torch.optim.Optimizer, head: HeadOptimizer) -> None:
        """Take the scale off both optimizers' gradients, and agree with all ranks on whether one overflowed."""
        if not self.is_enabled():
            return
        self.unscale_(backbone)
        head.scale_gradients(1.0 / self.get_scale())
        found = self._per_optimizer_states[id(backbone)]["found_inf_per_device"]
        overflow = torch.tensor(float(not head.gradients_are_finite()), device=self.mesh.device)
        for tensor in found.values():
            overflow = torch.maximum(overflow, tensor.to(overflow.device))
        all_reduce_max(overflow, self.mesh)
        for tensor in found.values():
            tensor.copy_(overflow)
        self.overflowed = bool(overflow)

    def step_both(self, backbone: torch.optim.Optimizer, head: HeadOptimizer) -> bool:
        """Step both optimizers, or neither; whether they did. Call :meth:`unscale_all` first."""
        if not self.is_enabled():
            backbone.step()
            head.step()
            return not head.skipped
        self.step(backbone)
        if self.overflowed:
            head.zero_grad()
        else:
            head.step()
        return not self.overflowed
