"""Names of the ranks that hang: each rank tells the ranks' store where it is, and a thread looks at the clock.

The store is the one through which the ranks find each other. It works where collectives do not: before a process group
exists, while a collective waits for a rank that will not come, and while a GPU does not answer.
"""

import contextlib
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, Store, rendezvous  # type: ignore[attr-defined]

from plsc.errors import PlscError, first_line

_POLL_SECONDS = 0.02
_BEAT_SECONDS = 0.5
_COMPILE_SECONDS = 300.0  # that a rank may compile at one place
_BEATS_OF_SILENCE = 6  # that a rank leaves out before it is taken not to run at all
_YIELD_SECONDS = 5.0  # how long a rank that hangs itself leaves the report to others
_STACK_FRAMES = 16
_COLLECTIVE_FILES = (
    "/torch/distributed/",
    "/torch/nn/parallel/",
    "/plsc/parallel/collectives.py",
    "/plsc/optim/verdict.py",  # a host waits there for a device, and that for the other ranks
)
_COMPILER_FILES = ("/triton/compiler/", "/torch/_dynamo/", "/torch/_inductor/")


@dataclass(frozen=True)
class Hang:
    """A standstill of all ranks.

    Attributes:
        line: names the ranks that the others wait for, their machines, and what they are at.
        stacks: a line for each of these ranks: the functions that its main thread is in, the innermost first.
    """

    line: str
    stacks: tuple[str, ...] = ()


class RankMonitor:
    """The whereabouts of the ranks of a run, as torchrun's environment describes it.

    A thread tells the ranks' store twice a second what the main thread is at; the main thread never waits for it.

    Args:
        limit: seconds in which no rank makes progress, after which those that the others wait for are taken to hang.
        on_hang: called on one rank only, from another thread, with the ranks that hang. It is to end the process.
        store: of the ranks, for this monitor alone; by default the one that the environment names is joined.
        leave: called on the other ranks then, from another thread; by default they end when their launcher notices.
        on_late: called on one rank only, from another thread, at each standstill of ``late`` seconds.
        late: seconds without progress of any rank; 0: never.

    Raises:
        PlscError: the ranks' store cannot be reached.
    """

    def __init__(
        self,
        limit: float,
        on_hang: Callable[[Hang], None],
        *,
        store: Store | None = None,
        leave: Callable[[], None] = lambda: None,
        on_late: Callable[[Hang], None] = lambda hang: None,
        late: float = 0.0,
    ) -> None:
        self.rank, self.world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self._limit, self._late = limit, late
        self._on_hang, self._on_late, self._leave = on_hang, on_late, leave
        self._period = min(_BEAT_SECONDS, limit / 4)
        self._store = _join(limit) if self.world_size > 1 and store is None else store
        self._own_store = self._store if self._store is None else self._store.clone()
        self._meetings, self._beats = 0, 0
        self._position, self._marks, self._told_marks = 0, 0, -1
        self._ended = threading.Event()
        self.at("start")
        self._thread = threading.Thread(target=self._watch, name="plsc-rank-monitor", daemon=True)
        self._thread.start()

    def at(self, place: str, position: int | None = None, *, limited: bool = True) -> None:
        """Tell where this rank is now: it makes progress.

        Args:
            place: what it does there, in words.
            position: grows with the progress of a rank, and is the same on all ranks at one place; by default the
                number of calls.
            limited: False where one rank may work for long while the others wait in a collective; it makes progress
                while it is in none.
        """
        self._place, self._limited = place, limited
        self._since, self._compiled_for = time.monotonic(), 0.0
        self._position = self._position + 1 if position is None else position
        self._marks += 1

    def meet(self, place: str) -> None:
        """Wait until every rank is at ``place``. All ranks call, in the same order."""
        self.at(place)
        if self._store is None:
            return
        self._meetings += 1
        key = f"meeting/{self._meetings}"
        self._store.add(key, 1)
        while self._store.add(key, 0) < self.world_size:
            time.sleep(_POLL_SECONDS)

    def gather(self, name: str, value: Any) -> list[Any]:
        """Every rank's ``value`` (anything JSON holds), in rank order. All ranks call."""
        if self._store is None:
            return [value]
        self._store.set(f"{name}/{self.rank}", json.dumps(value))
        self.meet(name)
        return [json.loads(self._store.get(f"{name}/{rank}")) for rank in range(self.world_size)]

    def end(self) -> None:
        """Stop watching. A process must not end before: a thread in the store's code would make it abort."""
        self._ended.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_YIELD_SECONDS)

    def _watch(self) -> None:
        progress, since, last, is_told = 0, time.monotonic(), time.monotonic(), False
        while not self._ended.wait(self._period):
            now = time.monotonic()
            if now - last > _BEATS_OF_SILENCE * self._period:  # this process did not run, as after SIGSTOP
                since = now
            last = now
            seen = self._beat(now)
            if seen != progress:
                progress, since, is_told = seen, now, False
            idle = now - max(self._since, since)
            if idle > self._limit:
                self._report()
                return
            if self._late and idle > self._late and not is_told:
                is_told = True
                self._tell(progress)

    def _beat(self, now: float) -> int:
        """Publish where this rank is; returns a number that changes when any rank goes on."""
        stack = _Stack.of_main_thread()
        moved = self._marks != self._told_marks
        if not (self._limited or stack.in_collective) or self._is_compiling(stack):
            self._since, moved = now, True
        if self._own_store is None:
            return 0
        self._told_marks, self._beats = self._marks, self._beats + 1
        functions = stack.functions if now - self._since > self._period else ()
        place = self._position, self._place, socket.gethostname()
        try:
            whereabouts = json.dumps([*place, self._beats, functions, stack.in_collective])
            self._own_store.set(f"place/{self.rank}", whereabouts)
            return int(self._own_store.add("progress", int(moved)))
        except (RuntimeError, ValueError):  # the store has gone: the report will say so
            return 0

    def _is_compiling(self, stack: "_Stack") -> bool:
        """True while the main thread compiles a kernel, which may take longer than any hanging rank should."""
        if not stack.is_compiling:
            return False
        self._compiled_for += self._period
        return self._compiled_for < _COMPILE_SECONDS

    def _tell(self, progress: int) -> None:
        """Let one rank tell of a standstill."""
        with contextlib.suppress(RuntimeError, ValueError):  # the store has gone: the report will say so
            if self._own_store is None or self._own_store.add(f"told/{progress}", 1) == 1:
                _, hang = self._hanging(self._late)
                self._on_late(hang)

    def _report(self) -> None:
        try:
            hanging, hang = self._hanging(self._limit)
            if self._own_store is not None:
                if self.rank in hanging and len(hanging) < self.world_size:
                    self._beat_for(_YIELD_SECONDS)
                if self._own_store.add("reported", 1) > 1:
                    self._leave()
                    return
        except (RuntimeError, ValueError) as error:  # the store has gone, with the process that kept it
            line = f"rank {self.rank} is at {self._place!r}, and the ranks' store does not answer: {first_line(error)}"
            hang = Hang(line)
        if not self._ended.is_set():
            self._on_hang(hang)

    def _hanging(self, seconds: float) -> tuple[list[int], Hang]:
        """The ranks that the others wait for, and what is known of them."""
        for_long = f"for {seconds:g} s"
        if self._own_store is None:
            stack = _Stack.of_main_thread()
            line = f"no progress {for_long} at {self._place!r}, in {stack.functions[0]}"
            return [0], Hang(line, (" < ".join(stack.functions),))
        ranks = self._look(self._own_store)
        behind = _behind(ranks)
        where = behind[0].place if behind else ranks[0].place
        if len(behind) in (0, self.world_size):
            return [*range(self.world_size)], Hang(f"no rank makes progress {for_long} at {where!r}: {_grouped(ranks)}")
        names = ", ".join(f"rank {rank.number} ({rank.host}, {rank.activity})" for rank in behind)
        verb = "hangs" if len(behind) == 1 else "hang"
        stacks = tuple(f"rank {rank.number}: {' < '.join(rank.functions)}" for rank in behind if rank.functions)
        return [rank.number for rank in behind], Hang(
            f"{names} {verb} at {where!r}: the others wait {for_long}", stacks
        )

    def _look(self, store: Store) -> "list[_Whereabouts]":
        """What the store knows of each rank, and whether it still publishes that."""
        before = [self._read(store, rank) for rank in range(self.world_size)]
        self._beat_for(_BEATS_OF_SILENCE * self._period)
        ranks = [self._read(store, rank) for rank in range(self.world_size)]
        for former, rank in zip(before, ranks, strict=True):
            rank.is_silent = former.beats == rank.beats
        return ranks

    def _read(self, store: Store, rank: int) -> "_Whereabouts":
        key = f"place/{rank}"
        if not store.check([key]):
            return _Whereabouts(rank)
        return _Whereabouts(rank, *json.loads(store.get(key)))

    def _beat_for(self, seconds: float) -> None:
        """Let time pass, in which other ranks see that this one runs."""
        end = time.monotonic() + seconds
        while (now := time.monotonic()) < end and not self._ended.is_set():
            self._beat(now)
            time.sleep(self._period)


@dataclass(eq=False)
class _Whereabouts:
    """A rank as the store knows it."""

    number: int
    position: int = -1
    place: str = "the start"
    host: str = "unknown host"
    beats: int = 0
    functions: Sequence[str] = ()
    in_collective: bool = False
    is_silent: bool = False

    @property
    def activity(self) -> str:
        """What it does, in words."""
        return "no answer" if self.is_silent else f"in {self.functions[0]}" if self.functions else "at work"


def _behind(ranks: Sequence[_Whereabouts]) -> list[_Whereabouts]:
    """Those that do not run at all, else those that have come least far; none where all are in one collective."""
    if silent := [rank for rank in ranks if rank.is_silent]:
        return silent
    least = min(rank.position for rank in ranks)
    behind = [rank for rank in ranks if rank.position == least]
    if len(behind) < len(ranks):
        return behind
    return [rank for rank in ranks if not rank.in_collective]  # some may wait there, in a collective, for others


def _grouped(ranks: Sequence[_Whereabouts]) -> str:
    """What ranks do, of many that do the same the first."""
    groups: dict[str, list[int]] = {}
    for rank in ranks:
        groups.setdefault(rank.activity, []).append(rank.number)
    return ", ".join(
        f"rank {numbers[0]}{f' and {len(numbers) - 1} more' if len(numbers) > 1 else ''} {activity}"
        for activity, numbers in groups.items()
    )


@dataclass(frozen=True)
class _Stack:
    """The main thread's functions, innermost first; whether it is in a collective, waiting for others, or compiles."""

    functions: tuple[str, ...]
    in_collective: bool
    is_compiling: bool

    @classmethod
    def of_main_thread(cls) -> "_Stack":
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        frames = [] if frame is None else [(each, line) for each, line in traceback.walk_stack(frame)]
        if not frames:
            return cls(("an unknown function",), False, False)
        files = [each.f_code.co_filename for each, _ in frames]
        functions = [f"{each.f_code.co_name} ({Path(each.f_code.co_filename).name}:{line})" for each, line in frames]
        return cls(tuple(functions[:_STACK_FRAMES]), _any_in(files, _COLLECTIVE_FILES), _any_in(files, _COMPILER_FILES))


def _any_in(files: Sequence[str], parts: Sequence[str]) -> bool:
    return any(part in file for file in files for part in parts)


def _join(limit: float) -> Store:
    """The store at MASTER_ADDR and MASTER_PORT, under a prefix of its own."""
    try:
        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=limit)))
    except (RuntimeError, ValueError) as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise PlscError(
            f"rank {os.environ.get('RANK')} cannot reach the ranks' store at {address}: {first_line(error)}; "
            "check that the first machine runs, and that its address and port are open"
        ) from None
    return PrefixStore("plsc/monitor", store)
