"""Runs a target on inputs, and holds it to its bounds of time and memory; keeps the inputs on which it fails."""

import random
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from support.time_limit import alarm

from fuzz.mutations import mutated_bytes
from plsc.errors import PlscError
from plsc.sizes import status_bytes

LONGEST_MESSAGE = 1 << 17  # a line of the file; commands print the beginning alone
SECONDS, BYTES = 10.0, 256 << 20  # that one input may take: CPU time, and memory beyond what was in use


class Violation(Exception):
    """A target did what it must not do with any input."""


@dataclass(frozen=True)
class Target:
    """What is fuzzed.

    Attributes:
        name: of the reader or route.
        make: makes an input of a random generator.
        run: reads it; PlscError is its only exception, and whatever it returns has been checked.
    """

    name: str
    make: Callable[[random.Random], bytes]
    run: Callable[[bytes], None]


def damaged(name: str, valid: Sequence[bytes], run: Callable[[bytes], None], also: Sequence[bytes] = ()) -> Target:
    """What reads one of ``valid``, damaged; some damage takes a piece of another, or of ``also``."""
    return Target(name, lambda rng: mutated_bytes(rng.choice(valid), [*valid, *also], rng), run)


def damaged_member(name: str, members: Mapping[str, bytes], run: Callable[[str, bytes], None]) -> Target:
    """What reads several files of which one is damaged; an input is the number of that, and its bytes."""
    names, valid = list(members), list(members.values())

    def make(rng: random.Random) -> bytes:
        number = rng.randrange(len(names))
        return bytes([number]) + mutated_bytes(valid[number], valid, rng)

    return Target(name, make, lambda content: run(names[content[0] % len(names) if content else 0], content[1:]))


def files_below(folder: Path) -> dict[str, bytes]:
    """The files of a folder by their paths below it."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@dataclass(frozen=True)
class Failure:
    """An input on which a target fails, and how."""

    target: str
    number: int
    content: bytes
    reason: str


def fuzz(target: Target, seed: int, *, count: int | None = None, seconds: float | None = None) -> Iterator[Failure]:
    """Run ``target`` on inputs 0, 1, … of ``seed``, as many or as long as given; yields its failures."""
    deadline = None if seconds is None else time.monotonic() + seconds
    number = 0
    while (count is None or number < count) and (deadline is None or time.monotonic() < deadline):
        content = target.make(random.Random(f"{target.name} {seed} {number}"))
        reason = fault_of(target, content)
        if reason is not None:
            yield Failure(target.name, number, content, reason)
        number += 1


def fault_of(target: Target, content: bytes) -> str | None:
    """What goes wrong when ``target`` reads ``content``; None if nothing does."""
    try:
        with _bounded():
            target.run(content)
    except PlscError as error:
        return None if len(str(error)) < LONGEST_MESSAGE else f"a message of {len(str(error)):,} letters"
    except Exception:
        return traceback.format_exc()
    return None


def save(failure: Failure, folder: Path, seed: int) -> Path:
    """Keep the input in ``folder``; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{failure.target}-{seed}-{failure.number}"
    path.write_bytes(failure.content)
    path.with_name(f"{path.name}.txt").write_text(failure.reason, errors="replace")
    return path


@contextmanager
def _bounded() -> Iterator[None]:
    """Raise :class:`Violation` where the block takes too much CPU time, or too much memory at its peak."""

    def stop(*_: object) -> None:
        raise Violation(f"it takes more than {SECONDS} seconds")

    Path("/proc/self/clear_refs").write_text("5")
    before = status_bytes("VmHWM")
    with alarm(signal.ITIMER_PROF, signal.SIGPROF, SECONDS, stop):
        yield
    if (used := status_bytes("VmHWM") - before) > BYTES:
        raise Violation(f"it takes {used >> 20} MiB")
