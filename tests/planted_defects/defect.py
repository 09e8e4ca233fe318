"""A defect, as data."""

from typing import NamedTuple


class Defect(NamedTuple):
    """A mistake.

    Attributes:
        name: what breaks.
        file: where.
        old: text of the file, which occurs in it exactly once.
        new: what stands in its place.
        tests: files whose tests guard against it, the quickest that do.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def planted(text: str, defect: Defect) -> str:
    """The file's ``text`` with the defect; :class:`LookupError` where its old text does not occur exactly once."""
    count = text.count(defect.old)
    if count != 1:
        raise LookupError(
            f"{defect.file} has {count} times {defect.old!r}: the code has moved on; plant {defect.name!r} elsewhere"
        )
    return text.replace(defect.old, defect.new)
