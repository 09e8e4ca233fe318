"""The class head and its optimizer on a rank that holds none of its classes, such as a pipeline's first stages.

A training step calls them as it does on the other ranks: no rank branches on its place.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from plsc.head.sharded_head import ShardedHead
from plsc.head.undo_journal import UndoJournal
from plsc.head.update_rules import UpdateRule
from plsc.losses.margins import Margin, State
from plsc.optim.head_optimizers import HeadOptimizer
from plsc.optim.verdict import UpdateCounter, Verdict
from plsc.parallel.mesh import Mesh
from plsc.parallel.tensor_shard import TensorShard


class AbsentHead(ShardedHead):
    """A head without rows here: no state, no loss, no collectives.

    Args:
        dim: width of embeddings.
        num_classes: of the head that other ranks hold.
        mesh: this rank alone.
        margin: as on the other ranks.
    """

    def __init__(self, dim: int, num_classes: int, mesh: Mesh, margin: Margin) -> None:
        nn.Module.__init__(self)
        self.dim, self.num_classes, self.mesh, self.margin = dim, num_classes, mesh, margin
        self.class_range, self.placement, self.update = (0, 0), "device", "fused"
        self.journal = False

    def forward(self, embeddings: Tensor, labels: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        """Raise RuntimeError: losses are for the ranks that hold classes."""
        raise RuntimeError("this rank holds none of the head's classes")

    def prefetch(self, labels: Tensor, sizes: Sequence[int] | None = None) -> None:
        """Fetch nothing."""

    def set_margin(self, margin: Margin) -> None:
        """Take the margin that the other ranks take."""
        self.margin = margin

    def set_sample_rate(self, sample_rate: float) -> None:
        """Sample nothing."""

    def mean_norm(self) -> float:
        """NaN: the rows are elsewhere."""
        return float("nan")

    @property
    def margin_state(self) -> State:
        """No statistics."""
        return {}

    @margin_state.setter
    def margin_state(self, state: State) -> None:
        pass

    def sharded_state(self) -> dict[str, TensorShard]:
        """No tensors."""
        return {}

    @property
    def undo_journal(self) -> UndoJournal | None:
        """None: no rows, no savepoints."""
        return None

    def get_extra_state(self) -> dict[str, Any]:
        """No numbers."""
        return {}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Take none."""

    def extra_repr(self) -> str:
        """For print()."""
        return f"dim={self.dim}, num_classes={self.num_classes}, none of them here"


class AbsentHeadOptimizer(HeadOptimizer):
    """The optimizer of an :class:`AbsentHead`: it has a learning rate, for schedulers, and steps nothing."""

    def __init__(self, head: AbsentHead, lr: float) -> None:
        nothing = torch.zeros(0, device=head.mesh.device, requires_grad=True)
        torch.optim.Optimizer.__init__(self, [nothing], {"lr": lr})
        self.head = head
        self._updates = UpdateCounter()
        self._number = 0

    def _rule(self) -> UpdateRule:
        raise RuntimeError("this rank holds no row to update")

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Do nothing."""
        return None if closure is None else closure()

    def step_unless(self, verdict: Verdict) -> None:
        """Count the step, unless ``verdict`` skips it."""
        self._updates.begin(verdict)
        self.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: no batch waits."""

    def average_replicas(self) -> None:
        """Do nothing: there are no rows."""

    def gradient_norm(self) -> Tensor:
        """0, of no rows."""
        return torch.zeros((), dtype=torch.float64, device=self.head.mesh.device)

    def scale_gradients(self, factor: Tensor | float) -> None:
        """Do nothing."""

    def not_finite(self) -> Tensor:
        """0: no batch waits."""
        return torch.zeros((), device=self.head.mesh.device)

    def sharded_state(self) -> dict[str, TensorShard]:
        """No tensors."""
        return {}
