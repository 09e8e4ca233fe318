"""Threads, processes and the device, given to callers in turn: what one asks for a hundred times delays nobody else.

A worker is whatever a piece of work needs while a thread does it: a process that decodes pictures, or a number. Of each
kind one caller has so many at a time, and one more is left to the others.

One thread owns the device and takes all waiting work of one kind as a batch. While a batch runs, the next one collects
by itself. Waiting longer pays only where more is sure to come: the callers of the last batch are about to ask again.
With those who waited while it ran they make one large batch then, and not two small ones in turn, of which each would
cost the device nearly as much. Requests that have arrived are waited for while the event loop reads them; those still
to come, for at most ``max_wait``. A batch takes a task of each owner in turn, and of one that is not alone no more rows
than take a hundredth of a second, so that nobody waits behind another's hundreds.
"""

import asyncio
import contextlib
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from plsc.serve.access import Owner
from plsc.serve.errors import ApiError
from plsc.serve.limits import Clock, Line, Pay, Shared, current_payer
from plsc.serve.observability import Metrics
from plsc.serve.settings import Limits

Worker = TypeVar("Worker", bound=Hashable)
Work = Callable[[list[Any]], Sequence[Any]]
PIECE_ROWS = 4  # of tasks into which large ones are best divided


def call_in(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: Any) -> None:
    """Call ``function`` in a loop of another thread; where that is closed, nobody waits any more."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *args)


def set_result(future: "asyncio.Future[Any]", result: Any) -> None:
    """Give a future its result, or exception, unless it was cancelled or has failed."""
    if future.done():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)


@dataclass(eq=False)
class Job(Generic[Worker]):
    """A piece of work; ``future`` is the event loop's, which may cancel it at any time."""

    work: Callable[[Worker], Any]
    owner: Owner
    future: "asyncio.Future[Any]"
    pay: Pay
    begun: float = 0.0


class Workers(Generic[Worker]):
    """Workers given to callers in turn, a piece of a request at a time; methods are called in one event loop.

    Of what a group's share leaves only those have a worker who have taken next to nothing lately.

    Args:
        workers: all there are.
        share: of them, that one group may have at a time.
        name: of their threads.
        cost: clock of what callers pay for, of the thread that works.
    """

    def __init__(
        self,
        workers: Iterable[Worker],
        share: int,
        name: str,
        limits: Limits,
        clock: Clock,
        cost: Clock = time.thread_time,
    ) -> None:
        self._free = deque(workers)
        self._share, self._limits, self._clock, self._cost = share, limits, clock, cost
        self._threads = ThreadPoolExecutor(len(self._free), name)
        self._running: dict[Worker, Job[Worker]] = {}
        self._line: Line[deque[Job[Worker]]] = Line()  # requests
        self._at_work: Counter[Hashable] = Counter()  # workers of each caller, and of each group
        self._used: defaultdict[Hashable, float] = defaultdict(float)  # seconds of each member of a group, lately
        self._used_since = 0.0

    @property
    def running(self) -> int:
        """Pieces of work in progress."""
        return len(self._running)

    def submit(self, owner: Owner, works: Sequence[Callable[[Worker], Any]]) -> "list[asyncio.Future[Any]]":
        """Call each of ``works`` of one request with a worker, in a thread; cancelling a future drops its work."""
        loop = asyncio.get_running_loop()
        jobs = deque(Job(work, owner, loop.create_future(), current_payer()) for work in works)
        futures = [job.future for job in jobs]
        if jobs:
            self._line.put(owner.key, jobs)
            self._assign(loop)
        return futures

    def close(self) -> None:
        """Finish what has begun, and drop what waits."""
        self._threads.shutdown()

    def _assign(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._free and (job := self._next()) is not None:
            worker = self._free.popleft()
            self._at_work.update({job.owner.key, job.owner.group})
            job.begun = self._clock()
            self._running[worker] = job
            self._threads.submit(self._work, loop, worker, job)

    def _next(self) -> Job[Worker] | None:
        """The piece whose turn it is, of a caller who may have a worker."""
        while (request := self._line.take(self._may_have_one)) is not None:
            while request and request[0].future.done():
                request.popleft()
            if request:
                job = request.popleft()
                if request:
                    self._line.put(job.owner.key, request)
                return job
        return None

    def _may_have_one(self, key: Hashable, request: deque[Job[Worker]]) -> bool:
        group = request[0].owner.group
        if self._at_work[group] < self._share:
            return True
        return key != group and not self._at_work[key] and self._used[key] < self._limits.light_seconds

    def _work(self, loop: asyncio.AbstractEventLoop, worker: Worker, job: Job[Worker]) -> None:
        result: Any = None
        begun = self._cost()
        try:
            result = job.work(worker)
        except Exception as error:
            result = error
        call_in(loop, self._finish, loop, worker, job, result, self._cost() - begun)

    def _finish(
        self, loop: asyncio.AbstractEventLoop, worker: Worker, job: Job[Worker], result: Any, seconds: float
    ) -> None:
        job.pay(seconds)
        del self._running[worker]
        self._leave(job.owner, self._clock() - job.begun)
        set_result(job.future, result)
        self._done(loop, worker)

    def _leave(self, owner: Owner, seconds: float) -> None:
        """Count a worker of the caller's less, and what the caller has used lately."""
        self._at_work.subtract({owner.key, owner.group})
        self._at_work = +self._at_work  # those that have some
        now = self._clock()
        if now - self._used_since > self._limits.light_within_seconds:
            self._used.clear()
            self._used_since = now
        if owner.key != owner.group:
            self._used[owner.key] += seconds

    def _done(self, loop: asyncio.AbstractEventLoop, worker: Worker) -> None:
        """Go on with a worker that has done its work."""
        self._release(loop, worker)

    def _release(self, loop: asyncio.AbstractEventLoop, worker: Worker) -> None:
        self._free.append(worker)
        self._assign(loop)


@dataclass(frozen=True)
class Kind:
    """Work of one kind.

    Attributes:
        run: maps payloads to as many results, on the device's thread; an exception among the results fails that
            caller alone.
        finish: maps results to answers on another thread, while the device goes on; optional.
    """

    run: Work
    finish: Work | None = None


@dataclass
class _Task:
    payload: Any
    rows: int
    arrived: float
    deadline: float
    future: "asyncio.Future[Any]"
    owner: Hashable
    pay: Pay


class DeviceWorker:
    """Run work in batches on one thread.

    :meth:`submit` is called in one event loop at a time.

    Args:
        max_batch: rows of a batch; a single caller with more is a batch of its own.
        max_wait: seconds to wait for callers who may ask again.
        limits: of the rows that may wait, of each kind, and of batches.
        share: of those rows, what one owner may have.
        observer: is told of batches, and of what is dropped.
    """

    def __init__(
        self,
        kinds: dict[str, Kind],
        *,
        max_batch: int,
        max_wait: float,
        limits: Limits,
        share: float,
        observer: Metrics,
        clock: Clock,
    ) -> None:
        self._kinds, self._max_batch, self._max_wait, self._limits = kinds, max_batch, max_wait, limits
        self._observer, self._clock = observer, clock
        self._waiting: dict[str, Line[_Task]] = {kind: Line() for kind in kinds}
        largest, what = limits.inputs, "rows waiting for the device"  # a request's rows have room in any case
        self._rows = {kind: Shared(what, max(limits.queue, largest), share, largest) for kind in kinds}
        self._last_run = dict.fromkeys(kinds, 0.0)
        self._row_seconds = dict.fromkeys(kinds, 0.0)  # of the last batches
        self._seen: dict[Hashable, float] = {}  # when each owner's last task came
        self._expected = dict.fromkeys(kinds, 0)  # rows, should all come again who were answered or wait
        self._changed = threading.Condition()  # guards all of the above
        self._collecting: asyncio.AbstractEventLoop | None = None  # it is still reading what arrived together
        self._closing = False
        self._finisher = ThreadPoolExecutor(1, "plsc-finish")
        self._thread = threading.Thread(target=self._work, name="plsc-device", daemon=True)
        self._thread.start()

    async def submit(self, kind: str, payload: Any, rows: int, deadline: float, owner: Hashable = "") -> Any:
        """Compute the result of ``payload``; ``deadline`` is of ``time.monotonic()``.

        Raises:
            ApiError: 503 if too much waits or the service stops, 429 if too much of this owner's waits, 504 if the
                deadline passes before it is done.
        """
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._put(kind, _Task(payload, rows, self._clock(), deadline, future, owner, current_payer()))
        try:
            async with asyncio.timeout_at(deadline):  # the loop's clock is time.monotonic
                return await future
        except TimeoutError:
            message = "the deadline passed before there was a result; allow more time, or ask for less"
            raise ApiError(504, message) from None
        finally:
            future.cancel()  # after the caller's cancellation, the batch leaves it out

    def waiting(self, kind: str) -> int:
        """Rows of a kind that wait."""
        return self._rows[kind].total

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
                raise ApiError(503, "the service is stopping; ask another, or later")
            try:
                self._rows[kind].take(task.owner, task.rows)
            except ApiError:
                self._observer.dropped(kind, "full", 1)
                raise
            self._waiting[kind].put(task.owner, task)
            self._seen[task.owner] = task.arrived
            if self.waiting(kind) >= self._rows_to_wake(kind):
                self._changed.notify()
            else:
                self._wake_when_read(task.future.get_loop())

    def _lately(self) -> dict[Hashable, float]:
        """Owners whose tasks came lately."""
        since = self._clock() - self._limits.beside_within_seconds
        self._seen = {owner: seen for owner, seen in self._seen.items() if seen > since}
        return self._seen

    def _rows_to_wake(self, kind: str) -> int:
        """Rows at which the device's thread is woken at once; each wake-up takes time from the event loop."""
        return max(min(self._expected[kind], self._max_batch), 1)

    def _wake_when_read(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wake the device's thread after all that the event loop has ready now."""
        if self._collecting is not loop:
            self._collecting = loop
            loop.call_soon(self._collected)

    def _collected(self) -> None:
        with self._changed:
            self._collecting = None
            self._changed.notify()

    def _work(self) -> None:
        while (taken := self._take()) is not None:
            kind, batch = taken
            batch = self._still_wanted(kind, batch)
            if batch:
                self._run(kind, batch)
            else:
                self._expected[kind] = self.waiting(kind)

    def _take(self) -> tuple[str, list[_Task]] | None:
        with self._changed:
            while not any(self._waiting.values()):
                if self._closing:
                    return None
                self._changed.wait()
            kind = min((kind for kind in self._waiting if self._waiting[kind]), key=self._last_run.__getitem__)
            self._last_run[kind] = self._clock()
            self._wait_for_more(kind)
            return kind, self._drain(kind)

    def _wait_for_more(self, kind: str) -> None:
        def enough() -> bool:
            return self.waiting(kind) >= self._rows_to_wake(kind) or self._closing

        self._changed.wait_for(lambda: enough() or self._collecting is None, self._limits.collect_seconds)
        self._changed.wait_for(enough, self._max_wait)

    def _drain(self, kind: str) -> list[_Task]:
        """A batch, of one owner beside others at most its part; in any case a task, however many rows it has."""
        is_alone = len(self._lately()) < 2
        part = self._max_batch if is_alone else int(self._limits.beside_seconds / max(self._row_seconds[kind], 1e-6))
        batch: list[_Task] = []
        rows: Counter[Hashable] = Counter()

        def fits(owner: Hashable, task: _Task) -> bool:
            room = self._max_batch - rows.total()
            return not batch or task.rows <= (min(room, part - rows[owner]) if rows[owner] else room)

        while (task := self._waiting[kind].take(fits)) is not None:
            batch.append(task)
            rows[task.owner] += task.rows
            self._rows[kind].give_back(task.owner, task.rows)
        return batch

    def _still_wanted(self, kind: str, batch: list[_Task]) -> list[_Task]:
        now = time.monotonic()  # which deadlines are of, as the event loop's
        present = [task for task in batch if not task.future.done()]
        timely = [task for task in present if task.deadline > now]
        if len(present) < len(batch):
            self._observer.dropped(kind, "cancelled", len(batch) - len(present))
        if len(timely) < len(present):
            self._observer.dropped(kind, "deadline", len(present) - len(timely))
        return timely

    def _run(self, kind: str, batch: list[_Task]) -> None:
        begun = self._clock()
        results = _attempt(self._kinds[kind].run, [task.payload for task in batch])
        ended = self._clock()
        rows, waited = sum(task.rows for task in batch), [begun - task.arrived for task in batch]
        self._observer.batch(kind, rows, waited, ended - begun)
        self._expected[kind] = rows + self.waiting(kind)  # before the answers: who comes again would count twice
        finish = self._kinds[kind].finish
        row_seconds = (ended - begun) / rows
        self._row_seconds[kind] += (row_seconds - self._row_seconds[kind]) / 4
        if finish is None:
            _deliver(batch, results, row_seconds)
        else:
            self._finisher.submit(_finish, finish, batch, results, row_seconds)


def _attempt(work: Work, payloads: list[Any]) -> list[Any]:
    """Results, or the exception of each payload: one that fails must not fail those it was batched with."""
    try:
        return list(work(payloads))
    except Exception as error:
        if len(payloads) == 1:
            return [error]
    return [result for payload in payloads for result in _attempt(work, [payload])]


def _finish(work: Work, batch: list[_Task], results: list[Any], row_seconds: float) -> None:
    good = [index for index, result in enumerate(results) if not isinstance(result, Exception)]
    for index, answer in zip(good, _attempt(work, [results[index] for index in good]) if good else [], strict=True):
        results[index] = answer
    _deliver(batch, results, row_seconds)


def _deliver(batch: list[_Task], results: list[Any], row_seconds: float) -> None:
    def set_results() -> None:
        for task, result in zip(batch, results, strict=True):
            task.pay(task.rows * row_seconds)
            set_result(task.future, result)

    call_in(batch[0].future.get_loop(), set_results)
