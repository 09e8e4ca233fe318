"""Training whose steps wait for no other rank: each rank sends the others what it has changed.

A rank holds a replica of the backbone and of the class table, and takes steps by its own samples with 1/ranks of the
learning rate. What a step has changed is added to the other replicas, where it arrives between two of their steps. Sums
do not depend on their order, so all replicas come to the same weights but for rounding, which is what makes replicas
possible without a server (Ho et al., NIPS 2013, whose updates are added likewise). Momenta stay each rank's own: under
SGD their mean is the momentum of the mean gradient, and without staleness the step is the synchronous one.

Staleness is bounded as in that paper (stale synchronous parallel): no rank begins step t before it has added what all
others changed in their steps before t − staleness.

In Paddle's fully asynchronous mode a trainer sends its gradients to servers, which step by them when they come
(AsyncCommunicator). In its half-asynchronous one the threads of a trainer wait, after a batch each, until its
communicator has merged and sent their gradients and received the parameters (HalfAsyncCommunicator); trainers do not
wait for each other in either, and staleness has no bound. Here "full" and "half" are these two, with the bound, and
with steps of one rank behind each other in the place of threads.
"""

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from plsc.features.asynchronous.change_mail import ChangeMail, Changes, Meeting
from plsc.features.asynchronous.config import AsynchronousConfig
from plsc.features.asynchronous.table_changes import TableChanges
from plsc.optim.head_optimizers import HeadOptimizer
from plsc.parallel.mesh import Mesh
from plsc.parallel.replica_weights import ReplicaWeights, flat, write_flat
from plsc.parallel.step_timeline import COMMUNICATION, step_part


class AsynchronousChanges(ReplicaWeights):
    """The exchange of changes; replicas meet, and become equal to the last bit, where the average is asked for.

    Args:
        mesh, module: as :class:`ReplicaWeights` takes them.
        options: of the run.

    Attributes:
        applied: the steps of each other rank whose changes this one has added: those before this number.
    """

    replicas_differ = True

    def __init__(self, mesh: Mesh, module: nn.Module, options: AsynchronousConfig) -> None:
        super().__init__(mesh, module)
        self._period = options.period if options.mode == "half" else 1
        self._staleness = options.staleness
        self._table: TableChanges | None = None
        self._mail: ChangeMail | None = None  # from the first step on
        self.applied: dict[int, int] = {}
        self._at_meeting: set[int] = set()
        self._before = torch.empty(0)  # the weights as the step found them
        self._pending: Changes | None = None  # of the steps of this round
        self._signals: list[tuple[int, int]] = []  # the steps from which on ranks have told of a signal
        self._stop = 0
        self._largest = 0

    def take_table(self, optimizer: HeadOptimizer) -> None:
        """Exchange what ``optimizer`` changes in its class table, too."""
        self._table = TableChanges(optimizer.head.softmax.table, self._mesh, optimizer.averages)
        optimizer.wrap_updater(self._table.recording)

    def begin(self, step: int) -> None:
        """Add what has arrived, and wait for what the bound asks for."""
        self._step = step
        mail = self._opened_mail()
        if self._pending is None:  # a round begins: nothing is added within
            if self._period > 1:
                with step_part(COMMUNICATION):
                    mail.wait_until_sent()
            self._add_arrived(mail, wait=False)
            last_of_round = step - step % self._period + self._period - 1
            while self._misses_any(last_of_round - self._staleness):
                with step_part(COMMUNICATION):
                    self._add_arrived(mail, wait=True)
        self._largest = max(self._largest, *(step - self.applied[rank] for rank in mail.others))
        self._before = flat(self._trained)

    def agreed_stop(self, stop: int) -> int:
        """Return the signal that some rank has told of ``staleness`` + 1 steps before: all know it by then."""
        self._stop = stop
        known = self._step - self._staleness
        return max((signal for first, signal in self._signals if first < known), default=0)

    @torch.no_grad()
    def commit_or_undo(self, skip: Tensor) -> None:
        """Send what this step has changed, or the round that it ends; nothing has changed where it was skipped."""
        assert self._table is not None
        weights = flat(self._trained).sub_(self._before).cpu()
        changes = Changes(self._step, self._step + 1, self._stop, weights, *self._table.pop_recorded())
        self._pending = changes if self._pending is None else self._pending.followed_by(changes)
        if (self._step + 1) % self._period == 0:
            self._send_pending()

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Let all ranks meet; they go on from the same weights."""
        self._meet()
        yield

    def figures(self) -> dict[str, float]:
        """Return the largest staleness of a step since the last line: steps of another rank that it missed."""
        largest, self._largest = self._largest, 0
        return {"staleness": largest}

    def sent_bytes(self, parameters: Iterable[nn.Parameter], step: int) -> int:
        """Return the bytes of a message of the backbone's changes; each other rank gets one a round."""
        return sum(parameter.numel() * parameter.element_size() for parameter in parameters)

    def close(self) -> None:
        """End the threads."""
        if self._mail is not None:
            self._mail.close()
            self._mail = None

    def _opened_mail(self) -> ChangeMail:
        if self._mail is None:
            assert self._table is not None
            like = Changes(0, 0, 0, flat(self._trained).cpu(), *self._table.pop_recorded())
            self._mail = ChangeMail(self._mesh, like, self._table.rows)
            self.applied = dict.fromkeys(self._mail.others, self._step)
        return self._mail

    def _misses_any(self, before: int) -> bool:
        """Return whether changes of a step before this number are not there yet, of a rank that still takes steps."""
        return any(steps < before and rank not in self._at_meeting for rank, steps in self.applied.items())

    def _add_arrived(self, mail: ChangeMail, *, wait: bool) -> None:
        for rank, came in mail.arrived(wait=wait):
            self.applied[rank] = came.stop
            if isinstance(came, Meeting):
                self._at_meeting.add(rank)
            else:
                self._add(came)

    @torch.no_grad()
    def _add(self, changes: Changes) -> None:
        assert self._table is not None
        own = flat(self._trained)
        write_flat(own.add_(changes.weights.to(own.device)), self._trained)
        self._table.add(changes.rows, changes.values)
        if changes.signal:
            self._signals.append((changes.first, changes.signal))

    def _send_pending(self) -> None:
        assert self._mail is not None
        changes, self._pending = self._pending, None
        if changes is not None:
            self._mail.send(changes)
            if changes.signal:
                self._signals.append((changes.first, changes.signal))

    def _meet(self) -> None:
        """Wait until all ranks have added all changes, and take rounding away; nothing if no step was taken since."""
        if self._before.numel() == 0:
            return
        assert self._mail is not None
        assert self._table is not None
        self._send_pending()
        self._mail.send(Meeting(self._step + 1))
        while len(self._at_meeting) < len(self._mail.others):
            self._add_arrived(self._mail, wait=True)
        self._at_meeting.clear()
        self._before = torch.empty(0)
        self.average(self._trained)
        self._table.make_equal()
