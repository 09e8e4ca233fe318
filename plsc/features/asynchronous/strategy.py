"""The strategy of ranks that step by themselves: each holds a whole backbone and a whole class table."""

from torch import nn

from plsc.parallel.collectives import broadcast
from plsc.parallel.mesh import Mesh
from plsc.parallel.strategies.base import Strategy
from plsc.parallel.strategies.layout import Layout


class AsynchronousReplicas(Strategy):
    """Ranks whose steps hold no collective; what they change travels in the background.

    A rank's loss is the mean over its own samples, and its table lies on a mesh of this rank alone.
    """

    steps_alone = True

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self.head_mesh = Mesh(0, 1, layout.mesh.local_rank, layout.mesh.device, timeout=layout.mesh.timeout)

    def describe(self) -> str:
        """See :meth:`Strategy.describe`."""
        return "each steps by itself"

    def place_backbone(self, backbone: nn.Module) -> nn.Module:
        """Let every rank begin with the first one's weights and statistics."""
        for tensor in (*backbone.parameters(), *backbone.buffers()):
            broadcast(tensor.detach(), self.mesh)
        return backbone if self.wrapping.compile is None else self.wrapping.compile(backbone)
