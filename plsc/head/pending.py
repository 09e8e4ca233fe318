"""Batches between backward() and the step of the head's optimizer, and the errors where no optimizer takes them.

Without these checks a training loop that forgets the head would run to its end with a table that never learns.
"""

import functools
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from plsc.errors import UsageError
from plsc.head.backends.kept_exponentials import KeptExponentials
from plsc.head.backends.torch_backend import Batch
from plsc.head.class_table import ClassRows, ClassTable

MOST_WAITING = 1024  # micro-batches: far more than anybody accumulates; each keeps its embeddings in memory


@dataclass
class PendingBackward:
    """A batch between its forward and the update: pass 2 needs the batch, log Z and the loss's derivative.

    The batch is this rank's head group's; ``largest_group`` is the number of samples in the largest group's.
    ``scale`` (b,) and ``target_grad``, (b,) or (b, K) as ``labels``, are derivatives by cosines, see
    :meth:`TorchBackend.second_pass`.
    ``grad_loss`` is the derivative that backward() brought for the mean loss, a scalar tensor; ``version`` is the
    table's when the batch was seen, and ``rows`` what pass 1 saw of it, ``exponentials`` what it kept.
    """

    batch: Batch
    labels: Tensor
    selected: Tensor | None
    log_z: Tensor
    scale: Tensor
    target_grad: Tensor
    version: int
    largest_group: int
    rows: ClassRows
    exponentials: KeptExponentials | None = None
    grad_loss: Tensor | None = None

    @property
    def loss_gradient(self) -> Tensor:
        """``grad_loss``, once backward() has brought it."""
        assert self.grad_loss is not None
        return self.grad_loss


def concatenated(values: list[Tensor], filling: float) -> Tensor:
    """Tensors (b,) or (b, K) below each other, those of fewer columns filled up."""
    if all(each.dim() == 1 for each in values):
        return torch.cat(values)
    columns = [each[:, None] if each.dim() == 1 else each for each in values]
    most = max(each.shape[1] for each in columns)
    return torch.cat([torch.nn.functional.pad(each, (0, most - each.shape[1]), value=filling) for each in columns])


def union(pending: list[PendingBackward], count: int) -> tuple[Tensor | None, Tensor | None]:
    """The classes that any batch selected (None: all), and which of them each sample's softmax held (None: all).

    Of the shard's ``count`` classes, some may have come after a batch that took all there were.
    """
    if all(p.selected is None and p.rows.num_classes == count for p in pending):
        return None, None
    device = pending[0].log_z.device
    sets = [torch.arange(p.rows.num_classes, device=device) if p.selected is None else p.selected for p in pending]
    if len(sets) == 1:
        return sets[0], None
    union = torch.cat(sets).unique()
    held = [torch.isin(union, selected) for selected in sets]
    columns = [column[:, None].expand(-1, len(p.log_z)) for column, p in zip(held, pending, strict=True)]
    return union, torch.cat(columns, dim=1)


def states(pending: list[PendingBackward]) -> dict[str, Tensor]:
    """The margin's statistics as each sample (B,) met them: they move from one micro-batch to the next."""
    return {
        name: torch.cat([p.batch.state[name].expand(len(p.log_z)) for p in pending]) for name in pending[0].batch.state
    }


class PendingBatches:
    """The batches of one table that wait for its optimizer.

    Several backward() before one step() accumulate, as with any torch optimizer. Batches count as forgotten where the
    table has no optimizer, or where another optimizer (the backbone's) has stepped since the oldest of them and the
    table's has not. The next training batch then raises, or the step of an optimizer that holds the table's parameter.

    Args:
        table: the rows that the update is for.

    Attributes:
        batches: in the order of their backward().
    """

    def __init__(self, table: ClassTable) -> None:
        self.batches: list[PendingBackward] = []
        self._table = table
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._stepped_without_head = ""  # the type of the optimizer that stepped while batches waited

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as the queue of the copied table: empty, and with no optimizer yet."""
        return PendingBatches, (self._table,)

    def add(self, batch: PendingBackward) -> None:
        """Append ``batch``, whose backward() has run."""
        _watch_steps_of(self)
        self.batches.append(batch)

    def clear(self) -> None:
        """Remove all batches, after an update or for zero_grad()."""
        for batch in self.batches:
            batch.exponentials = None  # whoever holds the loss holds the batch, but has no use for these
        self.batches.clear()
        self._stepped_without_head = ""

    def attach(self, optimizer: Optimizer) -> None:
        """Register an optimizer of the table. There may be several; each is weakly referenced."""
        _watch_steps_of(self)
        self._optimizers.add(optimizer)

    def belongs_to(self, optimizer: Optimizer) -> bool:
        """Return whether ``optimizer`` is registered here."""
        return optimizer in self._optimizers

    def raise_if_forgotten(self) -> None:
        """Refuse another training batch where the waiting ones have been forgotten.

        Raises:
            UsageError: the head has no optimizer; another optimizer stepped, but not the head's; or more than
                ``MOST_WAITING`` batches wait.
        """
        if not self.batches:
            return
        names = " or ".join(sorted(f"{type(optimizer).__name__}.step()" for optimizer in self._optimizers))
        if not names:
            raise UsageError(
                "a batch went through backward(), but the head has no optimizer that learns from it: make "
                "plsc.HeadSGD(head) or plsc.HeadAdamW(head) before training and call its step() "
                "(head.eval() computes losses for a table that is to stay as it is)"
            )
        if self._stepped_without_head:
            raise UsageError(
                f"{self._stepped_without_head}.step() was called, but the head's {names} was not: "
                "call both after backward(), or the head learns nothing"
            )
        if len(self.batches) >= MOST_WAITING:
            raise UsageError(
                f"{len(self.batches):,} batches went through backward() without a step of the head: call {names} "
                "after each backward(), or after the few that accumulate gradients"
            )

    def record_step(self, optimizer: Optimizer) -> None:
        """Record that an optimizer which is no head's is about to step.

        Raises:
            UsageError: batches wait, the head has no optimizer, and this one holds the table's parameter, in which it
                finds no gradient.
        """
        if not self.batches:
            return
        if not self._optimizers and _holds(optimizer, self._table.parameter):
            raise UsageError(
                f"head.weight is a parameter of {type(optimizer).__name__}, which finds no gradient in it: leave "
                "head.parameters() out and step plsc.HeadSGD(head) or plsc.HeadAdamW(head) as well, or make the "
                'head with update="autograd"'
            )
        self._stepped_without_head = self._stepped_without_head or type(optimizer).__name__


def _holds(optimizer: Optimizer, parameter: Tensor) -> bool:
    return any(held is parameter for group in optimizer.param_groups for held in group["params"])


_WATCHED: "weakref.WeakSet[PendingBatches]" = weakref.WeakSet()


def _watch_steps_of(pending: PendingBatches) -> None:
    """Report the steps of all other optimizers to ``pending`` from now on."""
    _install_step_hook()
    _WATCHED.add(pending)


@functools.cache
def _install_step_hook() -> None:
    """Install the hook on the steps of all torch optimizers, once per process."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    watched = list(_WATCHED)
    # heads that take turns each step their own optimizer: that says nothing about the other head's batches
    if any(pending.belongs_to(optimizer) for pending in watched):
        return
    for pending in watched:
        pending.record_step(optimizer)
