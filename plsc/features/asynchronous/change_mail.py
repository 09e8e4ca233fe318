"""What ranks that step by themselves have changed, on its way to the others: from host to host over gloo, by threads.

A thread sends, and one for each other rank receives. The main thread hands over what its steps have changed, and takes
what has arrived when it has a use for it: it waits for nobody unless it asks to. gloo notices at once when the process
of another rank has ended.
"""

import threading
import time
from collections import deque
from dataclasses import dataclass
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor

from plsc.parallel.collectives import receive, send_all
from plsc.parallel.mesh import Mesh, host_mesh

_CHANGES, _MEETING, _END = range(3)
_HEADER = 5  # kind, first step, last step + 1, signal, rows
_JOIN_SECONDS = 10.0  # that the threads may take to end, where another rank fails in the meantime


@dataclass(frozen=True)
class Changes:
    """What steps ``first`` to ``stop`` − 1 of a rank have changed, in host memory.

    Attributes:
        first, stop: the steps.
        signal: by which that rank has been asked to stop; 0: it has not.
        weights: (P,) of the backbone.
        rows: (n,) int64, distinct numbers of rows of the class table; None: all of them.
        values: (n, D) of these rows.
    """

    first: int
    stop: int
    signal: int
    weights: Tensor
    rows: Tensor | None
    values: Tensor

    def followed_by(self, later: "Changes") -> "Changes":
        """The changes of both, in one."""
        rows, values = _added(self, later)
        signal, weights = max(self.signal, later.signal), self.weights + later.weights
        return Changes(self.first, later.stop, signal, weights, rows, values)


def _added(one: Changes, other: Changes) -> tuple[Tensor | None, Tensor]:
    """Rows and values of the sum of two tables' changes."""
    if one.rows is None and other.rows is None:
        return None, one.values + other.values
    if one.rows is None or other.rows is None:
        whole, part = (one, other) if one.rows is None else (other, one)
        assert part.rows is not None
        return None, whole.values.index_add(0, part.rows, part.values)
    rows, places = torch.cat([one.rows, other.rows]).unique(return_inverse=True)
    values = torch.cat([one.values, other.values])
    return rows, values.new_zeros(len(rows), values.shape[1]).index_add_(0, places, values)


@dataclass(frozen=True)
class Meeting:
    """A rank has taken ``stop`` steps, and changes nothing more until all ranks have told that they do not."""

    stop: int


class ChangeMail:
    """Sends this rank's changes to all others, and receives theirs; every rank makes one, at the same step.

    Args:
        mesh: all ranks, several.
        like: changes without a step: of their tensors' sizes and types are those of all ranks, but for the rows sent.
        rows: of the class table.
    """

    def __init__(self, mesh: Mesh, like: Changes, rows: int) -> None:
        self._mesh, self._like, self._rows = host_mesh(mesh), like, rows
        self.others = [rank for rank in range(mesh.world_size) if rank != mesh.rank]
        self._news = threading.Condition()  # of all that follows
        self._arrived: deque[tuple[int, Changes | Meeting]] = deque()
        self._failure: RuntimeError | None = None
        self._unsent = 0
        self._outbox: SimpleQueue[list[Tensor]] = SimpleQueue()
        threads = [threading.Thread(target=self._send, name="plsc-send", daemon=True)]
        threads += [
            threading.Thread(target=self._receive, args=(rank,), name=f"plsc-receive-{rank}", daemon=True)
            for rank in self.others
        ]
        self._threads = threads
        for thread in threads:
            thread.start()

    def send(self, what: Changes | Meeting) -> None:
        """Hand over what is to be sent; its tensors are not to change any more."""
        if isinstance(what, Meeting):
            self._put([_header(_MEETING, what.stop, what.stop, 0, 0)])
            return
        count = -1 if what.rows is None else len(what.rows)
        parts = [_header(_CHANGES, what.first, what.stop, what.signal, count), what.weights]
        parts += [] if what.rows is None else [what.rows]
        self._put([part for part in [*parts, what.values] if part.numel()])

    def wait_until_sent(self) -> None:
        """Return when all that was handed over has been sent; raises as :meth:`arrived` does."""
        with self._news:
            self._news.wait_for(lambda: self._unsent == 0 or self._failure is not None)
            self._raise_failure()

    def arrived(self, *, wait: bool) -> list[tuple[int, Changes | Meeting]]:
        """Take what has arrived, with the ranks that it comes from; of a rank in the order in which it was sent.

        Args:
            wait: until there is something.

        Raises:
            RuntimeError: another rank has ended (gloo's, or a DistNetworkError).
        """
        with self._news:
            if wait:
                self._news.wait_for(lambda: self._arrived or self._failure is not None)
            if not self._arrived:
                self._raise_failure()
            taken = list(self._arrived)
            self._arrived.clear()
            return taken

    def close(self) -> None:
        """Tell the other ranks that this one sends nothing more, and end the threads."""
        self._put([_header(_END, 0, 0, 0, 0)])
        deadline = time.monotonic() + _JOIN_SECONDS
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0))

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _put(self, tensors: list[Tensor]) -> None:
        with self._news:
            self._unsent += 1
        self._outbox.put(tensors)

    def _send(self) -> None:
        kind = _CHANGES
        while kind != _END:
            tensors = self._outbox.get()
            kind = int(tensors[0][0])
            try:
                send_all([tensor.contiguous() for tensor in tensors], self._mesh)
            except RuntimeError as error:
                self._fail(error)
                return
            with self._news:
                self._unsent -= 1
                self._news.notify_all()

    def _receive(self, rank: int) -> None:
        try:
            while True:
                kind, first, stop, signal, count = receive(_header(0, 0, 0, 0, 0), self._mesh, rank).tolist()
                if kind == _END:
                    break
                came = Meeting(stop) if kind == _MEETING else self._received(rank, first, stop, signal, count)
                with self._news:
                    self._arrived.append((rank, came))
                    self._news.notify_all()
        except RuntimeError as error:
            self._fail(error)
            return
        self._fail(dist.DistNetworkError(f"rank {rank} has ended its part of the run"))

    def _received(self, rank: int, first: int, stop: int, signal: int, count: int) -> Changes:
        like = self._like
        weights = torch.empty_like(like.weights)
        rows = torch.empty(count, dtype=torch.int64) if count >= 0 else None
        values = like.values.new_empty(self._rows if rows is None else count, like.values.shape[1])
        for tensor in (weights, rows, values):
            if tensor is not None and tensor.numel():
                receive(tensor, self._mesh, rank)
        return Changes(first, stop, signal, weights, rows, values)

    def _fail(self, error: RuntimeError) -> None:
        with self._news:
            self._failure = self._failure or error
            self._news.notify_all()


def _header(*numbers: int) -> Tensor:
    assert len(numbers) == _HEADER
    return torch.tensor(numbers, dtype=torch.int64)
