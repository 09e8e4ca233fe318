"""What a rare feature does in a run: the methods that the trainer calls of those that are on.

A feature overrides what it needs. A method that none of a run's features overrides is never called in a step:
:func:`overriding` gathers those that are, once, before the first.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from plsc.config import Config
from plsc.parallel import Mesh
from plsc.parallel.strategies import Strategy
from plsc.parallel.strategies.ddp import GradientExchange
from plsc.parallel.tensor_shard import TensorShard

if TYPE_CHECKING:  # each of them imports this module, or its package
    from plsc.train.checkpoint_reader import StoredCheckpoint
    from plsc.train.components import TrainComponents
    from plsc.train.micro_batches import ClassLoss
    from plsc.train.tables import TrainedTable


class Feature:
    """A rare feature that a run has; this one does nothing.

    Args:
        config: of the run.

    Attributes:
        loss_name, loss_weight: of the loss that it adds to that of the run; "": none.
    """

    loss_name: ClassVar[str] = ""
    loss_weight: float = 1.0

    def __init__(self, config: Config) -> None:
        self.config = config

    # Set-up, in this order.

    def strategy(self, mesh: Mesh) -> Strategy | None:
        """Return the strategy that takes the place of ``parallel.strategy``; several ranks, which all call."""
        return None

    def prepare(self, backbone: nn.Module) -> None:
        """Change the backbone, whole and on the CPU, before its copy for evaluation and export is made."""

    def convert(self, backbone: nn.Module, device: torch.device) -> None:
        """Change the backbone that is trained, whole and on the CPU: its copy for evaluation and export stays."""

    def exchange(self, backbone: nn.Module, mesh: Mesh) -> GradientExchange | None:
        """Return what takes the place of the exchange of gradients; several ranks, which all call."""
        return None

    def class_loss(self, tables: "Sequence[TrainedTable]", strategy: Strategy) -> "ClassLoss":
        """Return what takes the place of the loss of a run's only class table."""
        raise NotImplementedError

    def set_up(self, components: "TrainComponents", *, exact: bool) -> None:
        """Take over the components, which are whole; every rank calls.

        ``exact``: sums run in float64, so that losses do not depend on the number of ranks.
        """

    def first_rows(self, table: "TrainedTable", source: str) -> bool:
        """Set the rows that a class table begins with by ``head.init_rows`` = ``source``; whether it did. All call."""
        return False

    # A step.

    def enter_stage(self, components: "TrainComponents", stage: int) -> None:
        """Do what a stage of the run changes, from the next step on; 0 is the run before its first stage."""

    def begin_step(self, labels: Sequence[Tensor]) -> None:
        """Begin a step whose micro-batches have ``labels`` on this rank, on the CPU."""

    def loss(self, embeddings: Tensor, labels: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The loss of a micro-batch, and its share of the step's mean.

        Args:
            embeddings: this rank's (b, D), float32.
            labels: (b,) or (b, K) of the data's classes, −1 for none, on the CPU or the device.
            sizes: b of every rank of the head.

        Returns:
            What is differentiated, a scalar, and a float64 scalar; their products add up over the micro-batches.
        """
        raise NotImplementedError

    def trains_backbone(self) -> bool:
        """Whether the backbone needs a backward pass now."""
        return True

    def before_update(self) -> None:
        """Change the gradients of all micro-batches, before their norm is taken."""

    def commit_or_undo(self, skip: Tensor) -> None:
        """Keep what the step has changed, or take it back where ``skip``, a scalar on the device, is not 0."""

    def after_evaluation(self) -> None:
        """Set up again what putting the backbone into training mode has changed."""

    # State, report and figures.

    def state(self) -> Any:
        """What a checkpoint's small state holds of it, for JSON; the same on every rank. None: nothing."""
        return None

    def tensors(self) -> dict[str, Tensor]:
        """Tensors that a checkpoint holds, the same on every rank, by name; they are read before :meth:`restore`."""
        return {}

    def check_state(self, state: Any, stored: "StoredCheckpoint") -> None:
        """Raise UsageError where a run cannot go on from what ``state`` says, IntegrityError where it is malformed."""

    def restore(self, state: Any) -> None:
        """Take over what :meth:`state` gave; None of a checkpoint that has none."""

    def takes_other_data(self) -> bool:
        """Whether a run may go on with other data than it began with."""
        return False

    def table_tensors(self) -> dict[str, TensorShard]:
        """What a checkpoint holds beside the rows of class tables, by whole names; every rank calls."""
        return {}

    def restore_tables(self, stored: "StoredCheckpoint") -> None:
        """Take over what :meth:`table_tensors` gave, before the rows of the tables are read."""

    def lines(self) -> dict[str, str]:
        """Lines at the start of train.log, by their first words of at most seven letters."""
        return {}

    def model_note(self) -> str:
        """What the line about the backbone says of it; "": nothing."""
        return ""

    def figures(self) -> dict[str, float]:
        """What a line of metrics says of it since the last one."""
        return {}

    def flops_per_image(self) -> float:
        """Model FLOPs that it adds for an image."""
        return 0.0


class TableKeeper(Feature):
    """A feature that keeps the class tables' rows itself: a checkpoint holds none, and goes with what was kept."""

    def take_first(self, *, goes_on: bool) -> bool:
        """Take back the rows that a run began with that has no checkpoint yet, and ``goes_on``; whether it kept any."""
        raise NotImplementedError

    def take_back(self, stored: "StoredCheckpoint", state: Any) -> bool:
        """Take back the rows that a checkpoint goes with, whose ``state`` of the feature this is.

        Returns:
            False where the checkpoint holds them: they are read then, and :meth:`keep` follows.
        """
        raise NotImplementedError

    def keep(self, step: int) -> None:
        """Let the rows as they are be those of ``step``, between two steps; every rank calls."""
        raise NotImplementedError

    def flush(self) -> None:
        """Bring what a checkpoint goes with onto the disk before it is published; a thread calls beside the steps."""
        raise NotImplementedError

    def forget(self, before: int) -> None:
        """Drop what only checkpoints of steps before ``before`` went with."""
        raise NotImplementedError


def overriding(features: Iterable[Feature], method: str) -> list[Callable[..., Any]]:
    """The bound methods of this name of the features that override it."""
    return [getattr(each, method) for each in features if getattr(type(each), method) is not getattr(Feature, method)]
