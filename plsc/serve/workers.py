"""Workers given to callers in turn: what one asks for a hundred times does not delay another's single question.

A worker is whatever a piece of work needs while a thread does it: a process that decodes pictures, or a number. Of each
kind one caller has so many at a time, and one more is left to the others.
"""

import asyncio
import contextlib
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from plsc.serve.access import Owner
from plsc.serve.turns import Pay, current_payer

Worker = TypeVar("Worker", bound=Hashable)
_LIGHT_SECONDS = 0.05  # of work lately, with which one of a group still counts as a newcomer
_LATELY_SECONDS = 10.0


def call_in(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: Any) -> None:
    """Call ``function`` in a loop of another thread; where that is closed, nobody waits any more."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *args)


def settle(future: "asyncio.Future[Any]", result: Any) -> None:
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
    caller: "_Caller[Worker]"
    future: "asyncio.Future[Any]"
    pay: Pay
    begun: float = 0.0


@dataclass(eq=False)
class _Caller(Generic[Worker]):
    """A caller's requests that wait, and the number of workers that it has."""

    owner: Owner
    requests: deque[deque[Job[Worker]]] = field(default_factory=deque)
    running: int = 0

    def take(self) -> Job[Worker] | None:
        """The next piece of the next request; None where all that waited are cancelled."""
        while self.requests:
            request = self.requests.popleft()
            while request and request[0].future.done():
                request.popleft()
            if request:
                job = request.popleft()
                self.requests.append(request)
                return job
        return None


class Workers(Generic[Worker]):
    """Workers given to callers in turn, a piece of a request at a time; methods are called in one event loop.

    Of what a group's share leaves only those have a worker who have taken next to nothing lately.

    Args:
        workers: all there are.
        share: of them, that one group may have at a time.
        name: of their threads.
    """

    _clock = staticmethod(time.thread_time)  # of what callers pay for

    def __init__(self, workers: Iterable[Worker], share: int, name: str) -> None:
        self._free = deque(workers)
        self._share = share
        self._threads = ThreadPoolExecutor(len(self._free), name)
        self._running: dict[Worker, Job[Worker]] = {}
        self._callers: dict[Hashable, _Caller[Worker]] = {}
        self._at_work: Counter[Hashable] = Counter()  # workers of each group
        self._used: defaultdict[Hashable, float] = defaultdict(float)  # seconds of each member of a group, lately
        self._used_since = 0.0
        self._turns: deque[_Caller[Worker]] = deque()  # callers with requests

    @property
    def running(self) -> int:
        """Pieces of work in progress."""
        return len(self._running)

    def submit(self, owner: Owner, works: Sequence[Callable[[Worker], Any]]) -> "list[asyncio.Future[Any]]":
        """Call each of ``works`` of one request with a worker, in a thread; cancelling a future drops its work."""
        loop = asyncio.get_running_loop()
        known = self._callers.setdefault(owner.key, _Caller(owner))
        jobs = [Job(work, known, loop.create_future(), current_payer()) for work in works]
        if not known.requests:
            self._turns.append(known)
        known.requests.append(deque(jobs))
        self._assign(loop)
        return [job.future for job in jobs]

    def close(self) -> None:
        """Finish what has begun, and drop what waits."""
        self._threads.shutdown()

    def _assign(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._free and (job := self._next()) is not None:
            worker = self._free.popleft()
            job.caller.running += 1
            self._at_work[job.caller.owner.group] += 1
            job.begun = time.monotonic()
            self._running[worker] = job
            self._threads.submit(self._work, loop, worker, job)

    def _next(self) -> Job[Worker] | None:
        """The piece whose turn it is, of a caller who has fewer workers than the share."""
        for _ in range(len(self._turns)):
            caller = self._turns.popleft()
            job = caller.take() if self._may_have_one(caller) else None
            if caller.requests:
                self._turns.append(caller)
            elif not caller.running and job is None:
                self._callers.pop(caller.owner.key, None)
            if job is not None:
                return job
        return None

    def _may_have_one(self, caller: _Caller[Worker]) -> bool:
        key, group = caller.owner
        if self._at_work[group] < self._share:
            return True
        return key != group and not caller.running and self._used[key] < _LIGHT_SECONDS

    def _work(self, loop: asyncio.AbstractEventLoop, worker: Worker, job: Job[Worker]) -> None:
        result: Any = None
        begun = self._clock()
        try:
            result = job.work(worker)
        except Exception as error:
            result = error
        call_in(loop, self._finish, loop, worker, job, result, self._clock() - begun)

    def _finish(
        self, loop: asyncio.AbstractEventLoop, worker: Worker, job: Job[Worker], result: Any, seconds: float
    ) -> None:
        job.pay(seconds)
        del self._running[worker]
        caller = job.caller
        caller.running -= 1
        self._leave(caller.owner, job.begun)
        if not caller.running and not caller.requests:
            self._callers.pop(caller.owner.key, None)
        settle(job.future, result)
        self._done(loop, worker)

    def _leave(self, owner: Owner, begun: float) -> None:
        """Count a worker of the caller's group less, and what the caller has used lately."""
        self._at_work[owner.group] -= 1
        if not self._at_work[owner.group]:
            del self._at_work[owner.group]
        now = time.monotonic()
        if now - self._used_since > _LATELY_SECONDS:
            self._used.clear()
            self._used_since = now
        if owner.key != owner.group:
            self._used[owner.key] += now - begun

    def _done(self, loop: asyncio.AbstractEventLoop, worker: Worker) -> None:
        """Go on with a worker that has done its work."""
        self._release(loop, worker)

    def _release(self, loop: asyncio.AbstractEventLoop, worker: Worker) -> None:
        self._free.append(worker)
        self._assign(loop)
