"""Names of the ranks that hang: each rank tells the ranks' store where it is, and a thread looks at the clock.

The store is the one through which the ranks find each other. It works where collectives do not: before a process group
exists, while a collective waits for a rank that will not come, and while a GPU does not answer.
"""

import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, Store, rendezvous  # type: ignore[attr-defined]

from plsc.errors import PlscError, first_line

_POLL_SECONDS = 0.02
_WATCH_SECONDS = 0.5
_COMPILE_SECONDS = 300.0  # that a rank may compile at one place
_STACK_SECONDS = 3.0  # how long a rank waits for the others to tell what they are at
_YIELD_SECONDS = 5.0  # how long a rank that hangs itself leaves the report to others
_COLLECTIVE_FILES = ("/torch/distributed/", "/torch/nn/parallel/", "/plsc/parallel/collectives.py")
_COMPILER_FILES = "/triton/compiler/"


class RankMonitor:
    """The whereabouts of the ranks of a run, as torchrun's environment describes it.

    Args:
        limit: seconds in which no rank makes progress, after which those that the others wait for are taken to hang.
        on_hang: called with a line that names the ranks and what they are at, on one rank only, from another thread.
            It is to end the process; the other ranks end when their launcher notices.

    Raises:
        PlscError: the ranks' store cannot be reached.
    """

    def __init__(self, limit: float, on_hang: Callable[[str], None]) -> None:
        self.rank, self.world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self._limit, self._on_hang = limit, on_hang
        self._store = _join(limit) if self.world_size > 1 else None
        self._place, self._steps, self._since = "start", 0, time.monotonic()
        self._meetings = 0
        self._ended = threading.Event()
        self.at("start")
        threading.Thread(target=self._watch, name="plsc-rank-monitor", daemon=True).start()

    def at(self, place: str) -> None:
        """Tell where this rank is now: it makes progress."""
        self._place, self._since, self._compiled_for = place, time.monotonic(), 0.0
        self._steps += 1
        if self._store is not None:
            self._store.set(f"place/{self.rank}", json.dumps([self._steps, place, socket.gethostname()]))
            self._store.add("progress", 1)

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
        """Stop watching."""
        self._ended.set()

    def _watch(self) -> None:
        period = min(_WATCH_SECONDS, self._limit / 4)
        progress, since = 0, time.monotonic()
        while not self._ended.wait(period):
            now = time.monotonic()
            if self._is_compiling(period):
                self._since = now
                if self._store is not None:
                    self._store.add("progress", 1)
            seen = self._progress()
            if seen != progress:
                progress, since = seen, now
            if now - max(self._since, since) > self._limit:
                self._report()
                return

    def _progress(self) -> int:
        """A number that changes when any rank goes on."""
        try:
            return 0 if self._store is None else int(self._store.add("progress", 0))
        except (RuntimeError, ValueError):  # the store has gone: the report will say so
            return 0

    def _is_compiling(self, period: float) -> bool:
        """True while the main thread compiles a Triton kernel, which may take longer than any hanging rank should."""
        if not _Stack.of_main_thread().is_compiling:
            return False
        self._compiled_for += period
        return self._compiled_for < _COMPILE_SECONDS

    def _report(self) -> None:
        try:
            hanging, line = self._hanging()
            if self._store is not None:
                if self.rank in hanging and len(hanging) < self.world_size:
                    time.sleep(_YIELD_SECONDS)
                if self._store.add("reported", 1) > 1:
                    return
        except (RuntimeError, ValueError) as error:  # the store has gone, with the process that kept it
            line = f"rank {self.rank} is at {self._place!r}, and the ranks' store does not answer: {first_line(error)}"
        if not self._ended.is_set():
            self._on_hang(line)

    def _hanging(self) -> tuple[list[int], str]:
        """The ranks that the others wait for, and a line about them."""
        for_long = f"for {self._limit:g} s"
        stack = _Stack.of_main_thread()
        if self._store is None:
            return [0], f"no progress {for_long} at {self._place!r}, in {stack.innermost}"
        self._store.set(f"stack/{self.rank}", json.dumps([stack.innermost, stack.in_collective]))
        ranks = self._look()
        least = min(rank.steps for rank in ranks)
        behind = [rank for rank in ranks if rank.steps == least]
        if len(behind) == self.world_size:  # all at one place: some may wait there, in a collective, for others
            behind = [rank for rank in ranks if not rank.in_collective]
        where = behind[0].place if behind else ranks[0].place
        if not behind or len(behind) == self.world_size:
            everyone = ", ".join(f"rank {rank} in {seen.innermost}" for rank, seen in enumerate(ranks))
            return [*range(self.world_size)], f"no rank makes progress {for_long} at {where!r}: {everyone}"
        names = ", ".join(f"rank {ranks.index(rank)} ({rank.host}, in {rank.innermost})" for rank in behind)
        verb = "hangs" if len(behind) == 1 else "hang"
        return [ranks.index(rank) for rank in behind], f"{names} {verb} at {where!r}: the others wait {for_long}"

    def _look(self) -> "list[_Whereabouts]":
        """What the store knows of each rank, once all have told their stacks, or have had the time to."""
        assert self._store is not None
        deadline = time.monotonic() + _STACK_SECONDS
        keys = [f"stack/{rank}" for rank in range(self.world_size)]
        while time.monotonic() < deadline and not self._store.check(keys):
            time.sleep(_POLL_SECONDS)
        ranks = []
        for rank, key in enumerate(keys):
            stack = json.loads(self._store.get(key)) if self._store.check([key]) else ("no answer", False)
            known = self._store.check([f"place/{rank}"])
            place = json.loads(self._store.get(f"place/{rank}")) if known else (0, "the start", "unknown host")
            ranks.append(_Whereabouts(*place, *stack))
        return ranks


@dataclass(eq=False)
class _Whereabouts:
    """A rank as the store knows it."""

    steps: int
    place: str
    host: str
    innermost: str
    in_collective: bool


@dataclass(frozen=True)
class _Stack:
    """The main thread's innermost function, whether it is in a collective, where it waits for others, or compiles."""

    innermost: str
    in_collective: bool
    is_compiling: bool

    @classmethod
    def of_main_thread(cls) -> "_Stack":
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        frames = [] if frame is None else traceback.extract_stack(frame)
        if not frames:
            return cls("an unknown function", False, False)
        last = frames[-1]
        name = f"{last.name} ({Path(last.filename).name}:{last.lineno})"
        in_collective = any(part in each.filename for each in frames for part in _COLLECTIVE_FILES)
        return cls(name, in_collective, any(_COMPILER_FILES in each.filename for each in frames))


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
