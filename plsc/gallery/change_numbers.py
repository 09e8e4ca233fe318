"""The numbers that a store gives its changes, handed from the thread that commits one to whoever logs it.

A store may count its changes, in their transactions, and tell the last number (``last_change``). So a log that names
the number of each shows later which changes have no line in it.
"""

from contextvars import ContextVar

_NUMBERS: ContextVar[list[int] | None] = ContextVar("numbers of changes", default=None)


def collect_changes() -> None:
    """Keep the numbers of changes made from here on in this context, and in copies of it."""
    _NUMBERS.set([])


def note_change(number: int) -> None:
    """Say that a change got a number and is committed."""
    numbers = _NUMBERS.get()
    if numbers is not None:
        numbers.append(number)


def take_changes() -> list[int]:
    """Return the numbers kept in this context since they were last taken."""
    numbers = _NUMBERS.get()
    if not numbers:
        return []
    taken = numbers[:]
    numbers.clear()
    return taken
