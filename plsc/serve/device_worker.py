"""Micro-batching: one thread owns the device, and takes at once whatever work of one kind waits for it.

While a batch runs, the next one gathers by itself. Waiting longer pays only where more is sure to come: the callers of
the batch before are about to ask again. With those who waited while it ran they make one large batch then, and not two
small ones in turn, of which each would cost the device nearly as much. Those who have asked are waited for while the
event loop reads what they sent; those who have yet to ask, for at most ``max_wait``.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from plsc.serve.deadlines import Deadlines
from plsc.serve.failures import Refusal

Work = Callable[[list[Any]], Sequence[Any]]
_LONGEST_GATHERING = 0.05  # seconds: the event loop may have ended


@dataclass(frozen=True)
class Kind:
    """Work of one kind: ``run`` maps payloads to as many results on the device's thread; an exception among the
    results fails that caller alone. ``finish``, where given, maps results to answers off the device, meanwhile
    the device goes on."""

    run: Work
    finish: Work | None = None


@dataclass
class _Task:
    payload: Any
    rows: int
    arrived: float
    deadline: float
    future: "asyncio.Future[Any]"


class Observer(Protocol):
    """Who is told what the worker does; called on its thread."""

    def batch(self, kind: str, rows: int, waited: Sequence[float], seconds: float) -> None:
        """A batch of ``rows`` ran for ``seconds``; each of its callers had waited."""

    def dropped(self, kind: str, why: str, count: int) -> None:
        """Callers were let go without computing: "deadline", "cancelled" or "full"."""


class DeviceWorker:
    """Runs work in batches of at most ``max_batch`` rows; at most ``capacity`` rows wait.

    A single caller with more than ``max_batch`` rows is a batch of its own. ``max_wait`` in seconds. :meth:`submit` is
    called in one event loop at a time.
    """

    def __init__(
        self, kinds: dict[str, Kind], *, max_batch: int, max_wait: float, capacity: int, observer: Observer
    ) -> None:
        self._kinds, self._max_batch, self._max_wait, self._capacity = kinds, max_batch, max_wait, capacity
        self._observer = observer
        self._waiting: dict[str, deque[_Task]] = {kind: deque() for kind in kinds}
        self._rows = dict.fromkeys(kinds, 0)
        self._expected = dict.fromkeys(kinds, 0)  # rows, should all come again who were answered or wait
        self._changed = threading.Condition()
        self._gathering: asyncio.AbstractEventLoop | None = None  # which has more in hand of what came together
        self._closing = False
        self._deadlines = Deadlines()
        self._finisher = ThreadPoolExecutor(1, "plsc-finish")
        self._thread = threading.Thread(target=self._work, name="plsc-device", daemon=True)
        self._thread.start()

    async def submit(self, kind: str, payload: Any, rows: int, deadline: float) -> Any:
        """The result of ``payload``; ``deadline`` is of ``time.monotonic()``.

        Raises:
            Refusal: 503 if too much waits or the service stops, 504 if the deadline passes before it is done.
        """
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._put(kind, _Task(payload, rows, time.monotonic(), deadline, future))
        self._deadlines.add(future, deadline)
        try:
            return await future
        finally:
            self._deadlines.remove(future)
            future.cancel()  # where the caller has gone, nobody computes for it

    def waiting(self, kind: str) -> int:
        """Rows of a kind that wait."""
        return self._rows[kind]

    def close(self) -> None:
        """Finish what waits, and end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()
        self._finisher.shutdown()

    def _put(self, kind: str, task: _Task) -> None:
        with self._changed:
            if self._closing:
                raise Refusal(503, "the service is stopping; ask another, or later")
            full = self._rows[kind] > 0 and self._rows[kind] + task.rows > self._capacity
            if not full:
                self._waiting[kind].append(task)
                self._rows[kind] += task.rows
                if self._rows[kind] >= self._enough(kind):
                    self._changed.notify()
                else:
                    self._gather(task.future.get_loop())
        if full:
            self._observer.dropped(kind, "full", 1)
            raise Refusal(503, f"{self._capacity} rows wait for the device already; ask again in a moment")

    def _enough(self, kind: str) -> int:
        """Rows for which the device's thread is woken at once; each waking takes turns from callers."""
        return max(min(self._expected[kind], self._max_batch), 1)

    def _gather(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wake the device's thread behind all that the loop has in hand now."""
        if self._gathering is not loop:
            self._gathering = loop
            loop.call_soon(self._gathered)

    def _gathered(self) -> None:
        with self._changed:
            self._gathering = None
            self._changed.notify()

    def _work(self) -> None:
        while (taken := self._take()) is not None:
            kind, batch = taken
            batch = self._still_wanted(kind, batch)
            if batch:
                self._run(kind, batch)
            else:
                self._expected[kind] = self._rows[kind]

    def _take(self) -> tuple[str, list[_Task]] | None:
        with self._changed:
            while not any(self._waiting.values()):
                if self._closing:
                    return None
                self._changed.wait()
            kind = min((kind for kind, tasks in self._waiting.items() if tasks), key=self._oldest)
            self._wait_for_more(kind)
            return kind, self._drain(kind)

    def _oldest(self, kind: str) -> float:
        return self._waiting[kind][0].arrived

    def _wait_for_more(self, kind: str) -> None:
        def enough() -> bool:
            return self._rows[kind] >= self._enough(kind) or self._closing

        self._changed.wait_for(lambda: enough() or self._gathering is None, _LONGEST_GATHERING)
        self._changed.wait_for(enough, self._max_wait)

    def _drain(self, kind: str) -> list[_Task]:
        tasks, rows = self._waiting[kind], 0
        batch: list[_Task] = []
        while tasks and (not batch or rows + tasks[0].rows <= self._max_batch):
            batch.append(tasks.popleft())
            rows += batch[-1].rows
        self._rows[kind] -= rows
        return batch

    def _still_wanted(self, kind: str, batch: list[_Task]) -> list[_Task]:
        now = time.monotonic()
        present = [task for task in batch if not task.future.done()]
        timely = [task for task in present if task.deadline > now]
        if len(present) < len(batch):
            self._observer.dropped(kind, "cancelled", len(batch) - len(present))
        if len(timely) < len(present):
            self._observer.dropped(kind, "deadline", len(present) - len(timely))
        return timely

    def _run(self, kind: str, batch: list[_Task]) -> None:
        begun = time.monotonic()
        results = _attempt(self._kinds[kind].run, [task.payload for task in batch])
        ended = time.monotonic()
        rows, waited = sum(task.rows for task in batch), [begun - task.arrived for task in batch]
        self._observer.batch(kind, rows, waited, ended - begun)
        self._expected[kind] = rows + self._rows[kind]  # before the answers: who comes again would count twice
        finish = self._kinds[kind].finish
        if finish is None:
            _deliver(batch, results)
        else:
            self._finisher.submit(_finish, finish, batch, results)


def _attempt(work: Work, payloads: list[Any]) -> list[Any]:
    """Results, or the exception of each payload: one that fails must not fail those it was batched with."""
    try:
        return list(work(payloads))
    except Exception as error:
        if len(payloads) == 1:
            return [error]
    return [result for payload in payloads for result in _attempt(work, [payload])]


def _finish(work: Work, batch: list[_Task], results: list[Any]) -> None:
    good = [place for place, result in enumerate(results) if not isinstance(result, Exception)]
    for place, answer in zip(good, _attempt(work, [results[place] for place in good]) if good else [], strict=True):
        results[place] = answer
    _deliver(batch, results)


def _deliver(batch: list[_Task], results: list[Any]) -> None:
    loop = batch[0].future.get_loop()
    try:
        loop.call_soon_threadsafe(_settle, batch, results)
    except RuntimeError:  # the loop is closed: nobody waits any more
        return


def _settle(batch: list[_Task], results: list[Any]) -> None:
    for task, result in zip(batch, results, strict=True):
        if task.future.done():
            continue
        if isinstance(result, Exception):
            task.future.set_exception(result)
        else:
            task.future.set_result(result)
