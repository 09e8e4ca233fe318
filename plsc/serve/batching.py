"""Micro-batching: one thread owns the device and takes all waiting work of one kind as a batch.

While a batch runs, the next one collects by itself. Waiting longer pays only where more is sure to come: the callers of
the last batch are about to ask again. With those who waited while it ran they make one large batch then, and not two
small ones in turn, of which each would cost the device nearly as much. Requests that have arrived are waited for while
the event loop reads them; those still to come, for at most ``max_wait``.

A batch takes a task of each owner in turn, and of one that is not alone no more rows than take a hundredth of a second,
so that nobody waits behind another's hundreds.
"""

import asyncio
import threading
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import orjson

from plsc.errors import PlscError
from plsc.gallery.filters import Filter, PreparedFilter
from plsc.gallery.store import Store
from plsc.gallery.values import Match
from plsc.serve.access import over_share
from plsc.serve.errors import ApiError
from plsc.serve.observability import Metrics
from plsc.serve.schemas import Float32
from plsc.serve.turns import Pay, current_payer
from plsc.serve.workers import call_in, settle

Work = Callable[[list[Any]], Sequence[Any]]
_MAX_COLLECT_SECONDS = 0.05  # the event loop may have ended
_LATELY_SECONDS = 2.0  # since its last task, for which an owner still is one of several
_BESIDE_SECONDS = 0.01  # that the rows of one of several owners may take in a batch
PIECE_ROWS = 4  # of tasks into which large ones are best divided
_NAMED_TOGETHER = 128  # persons read at once: with the longest metadata, 32 MiB


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


class _Queue:
    """Tasks of one kind that wait, by their owners."""

    def __init__(self) -> None:
        self._tasks: OrderedDict[Hashable, deque[_Task]] = OrderedDict()
        self.rows: Counter[Hashable] = Counter()

    def __len__(self) -> int:
        return len(self._tasks)

    def put(self, task: _Task) -> None:
        self._tasks.setdefault(task.owner, deque()).append(task)
        self.rows[task.owner] += task.rows

    def take(self, most: int, part: int) -> list[_Task]:
        """A batch of at most ``most`` rows, of one owner at most ``part``; in any case a task, however many it has."""
        batch: list[_Task] = []
        rows: Counter[Hashable] = Counter()
        while True:
            room = most - rows.total()
            fitting = (
                owner
                for owner, tasks in self._tasks.items()
                if not batch or tasks[0].rows <= (min(room, part - rows[owner]) if rows[owner] else room)
            )
            if (owner := next(fitting, None)) is None:
                return batch
            tasks = self._tasks.pop(owner)
            batch.append(tasks.popleft())
            rows[owner] += batch[-1].rows
            if tasks:
                self._tasks[owner] = tasks  # the last in turn
            self.rows[owner] -= batch[-1].rows
            if not self.rows[owner]:
                del self.rows[owner]


class DeviceWorker:
    """Run work in batches on one thread.

    :meth:`submit` is called in one event loop at a time.

    Args:
        max_batch: rows of a batch; a single caller with more is a batch of its own.
        max_wait: seconds to wait for callers who may ask again.
        capacity: rows that may wait, of each kind.
        share: of ``capacity``, what one owner may have beside others; alone it leaves as much to them.
    """

    def __init__(
        self,
        kinds: dict[str, Kind],
        *,
        max_batch: int,
        max_wait: float,
        capacity: int,
        observer: Metrics,
        share: float = 1.0,
    ) -> None:
        self._kinds, self._max_batch, self._max_wait, self._capacity = kinds, max_batch, max_wait, capacity
        self._observer = observer
        self._own_capacity = max(int(capacity * share), 1)
        self._waiting = {kind: _Queue() for kind in kinds}
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
        self._put(kind, _Task(payload, rows, time.monotonic(), deadline, future, owner, current_payer()))
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
        return self._waiting[kind].rows.total()

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
            refusal = self._refusal(kind, task)
            if refusal is None:
                self._waiting[kind].put(task)
                self._seen[task.owner] = task.arrived
                if self.waiting(kind) >= self._rows_to_wake(kind):
                    self._changed.notify()
                else:
                    self._wake_when_read(task.future.get_loop())
        if refusal is not None:
            self._observer.dropped(kind, "full", 1)
            raise refusal

    def _refusal(self, kind: str, task: _Task) -> ApiError | None:
        own, all_rows = self._waiting[kind].rows[task.owner], self.waiting(kind)
        if all_rows and all_rows + task.rows > self._capacity:
            return ApiError(503, f"{self._capacity} rows wait for the device already; ask again in a moment")
        # Alone it may have more, but what is left is there for the first who comes.
        others = any(owner != task.owner for owner in self._lately())
        most = self._own_capacity if others else max(self._capacity - self._own_capacity, self._own_capacity)
        if own and own + task.rows > most:
            return over_share(str(task.owner), f"{own} rows that wait for the device")
        return None

    def _lately(self) -> dict[Hashable, float]:
        """Owners whose tasks came lately."""
        since = time.monotonic() - _LATELY_SECONDS
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
            self._last_run[kind] = time.monotonic()
            self._wait_for_more(kind)
            return kind, self._drain(kind)

    def _wait_for_more(self, kind: str) -> None:
        def enough() -> bool:
            return self.waiting(kind) >= self._rows_to_wake(kind) or self._closing

        self._changed.wait_for(lambda: enough() or self._collecting is None, _MAX_COLLECT_SECONDS)
        self._changed.wait_for(enough, self._max_wait)

    def _drain(self, kind: str) -> list[_Task]:
        is_alone = len(self._lately()) < 2
        part = self._max_batch if is_alone else int(_BESIDE_SECONDS / max(self._row_seconds[kind], 1e-6))
        return self._waiting[kind].take(self._max_batch, part)

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
    def settle_all() -> None:
        for task, result in zip(batch, results, strict=True):
            task.pay(task.rows * row_seconds)
            settle(task.future, result)

    call_in(batch[0].future.get_loop(), settle_all)


class Search(NamedTuple):
    """The search of one request: ``queries`` (Q, D) float32, of the model with ``contract_id``, and its options."""

    collection: str
    queries: Float32
    k: int
    threshold: float | None
    filter: Filter | None
    contract_id: str | None = None


class SearchMatches(NamedTuple):
    """Matches of each query of one request, their persons still unread."""

    collection: str
    matches: list[list[Match]]


class SearchAnswer(NamedTuple):
    """Matches of each query, and their persons as JSON by id; persons deleted meanwhile are not among them."""

    matches: list[list[Match]]
    persons: Mapping[int, bytes]


class Searcher:
    """The two halves of a search: :meth:`run` on the device's thread, :meth:`name` on another.

    Args:
        max_bytes: of the persons in one answer.
    """

    def __init__(self, store: Store, max_bytes: int) -> None:
        self._store, self._max_bytes = store, max_bytes

    def run(self, searches: Sequence[Search]) -> list[SearchMatches | Exception]:
        """Search, with one call of the store for all searches of one collection, k, threshold and filter."""
        groups: dict[Any, list[int]] = defaultdict(list)
        for index, search in enumerate(searches):
            # By its text: filters on 1 and on true are equal to Python, and mean different things.
            matching = search.filter.key if isinstance(search.filter, PreparedFilter) else repr(search.filter)
            groups[search.collection, search.contract_id, search.k, search.threshold, matching].append(index)
        results: list[Any] = [None] * len(searches)
        for indices in groups.values():
            found = self._search_group([searches[index] for index in indices])
            for index, result in zip(indices, found, strict=True):
                results[index] = result
        return results

    def name(self, found: Sequence[SearchMatches]) -> list[SearchAnswer]:
        """Add the persons of all matches, read once per collection."""
        ids: dict[str, set[int]] = defaultdict(set)
        for item in found:
            for matches in item.matches:
                ids[item.collection].update([match.person for match in matches])
        persons = {name: self._persons(name, sorted(wanted)) for name, wanted in ids.items()}
        return [SearchAnswer(item.matches, persons[item.collection]) for item in found]

    def _persons(self, collection: str, ids: list[int]) -> dict[int, bytes]:
        """Persons as JSON; :class:`ApiError` if they are larger than one answer may be.

        The worker then names the searches of a batch one by one, so that it fails the large one alone.
        """
        persons: dict[int, bytes] = {}
        size = 0
        for start in range(0, len(ids), _NAMED_TOGETHER):
            for person, named in self._store.person_summaries(collection, ids[start : start + _NAMED_TOGETHER]).items():
                shown = {"id": named.id, "name": named.name, "metadata": named.metadata}
                external = {} if named.external_id is None else {"external_id": named.external_id}
                persons[person] = orjson.dumps(shown | external)
                size += len(persons[person])
            if size > self._max_bytes:
                raise answer_too_large(self._max_bytes)
        return persons

    def _search_group(self, searches: list[Search]) -> list[SearchMatches | Exception]:
        try:
            first, queries = searches[0], np.concatenate([search.queries for search in searches])
            options: dict[str, Any] = {"k": first.k, "filter": first.filter, "contract_id": first.contract_id}
            if first.threshold is not None:
                options["threshold"] = first.threshold
            matches = self._store.search(first.collection, queries, **options)
        except PlscError as error:
            if len(searches) == 1:
                return [error]
            return [found for search in searches for found in self._search_group([search])]
        rest = iter(matches)
        return [SearchMatches(search.collection, list(islice(rest, len(search.queries)))) for search in searches]


def answer_too_large(limit: int) -> ApiError:
    """The error for an answer of more than ``limit`` bytes."""
    return ApiError(400, f"the answer would be larger than {limit:,} bytes; ask for fewer matches, or fewer queries")
