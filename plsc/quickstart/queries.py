"""The pictures to search by that a quickstart leaves, chosen by searching with the very files, as the service will.

A threshold lets some pictures of a person through and refuses others; how many, the training decides. So every picture
that was kept back is tried, and the report tells how all of them ended beside the few that are left.
"""

import enum
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from plsc.files import replacing_folder
from plsc.gallery.values import Match

MARGIN = 0.02  # of a score from the threshold: far more than another decoder, batch or processor moves it
BEST = 2  # matches of a search that decide: its person's, and the next one's
_LEFT = 10  # pictures of people who are found
_STRANGERS_LEFT = 2
HARD = "hard-1"


class Outcome(enum.Enum):
    """How a search by a picture ends."""

    FOUND = enum.auto()  # its person matches, and nobody else
    REFUSED = enum.auto()  # nobody matches
    UNSUITABLE = enum.auto()  # somebody else matches, or a score lies within the margin


class Trial(NamedTuple):
    """A picture and its search: the JPEG file, whom it shows, that person's id (None: not enrolled), best matches."""

    jpeg: bytes
    name: str
    person: int | None
    matches: Sequence[Match]

    def outcome(self, threshold: float) -> Outcome:
        """How the search ends at ``threshold``, on any machine."""
        if any(abs(match.score - threshold) < MARGIN for match in self.matches):
            return Outcome.UNSUITABLE
        above = [match.person for match in self.matches if match.score > threshold]
        if not above:
            return Outcome.REFUSED
        return Outcome.FOUND if above == [self.person] else Outcome.UNSUITABLE

    @property
    def is_near(self) -> bool:
        """True if its own person is the nearest."""
        return bool(self.matches) and self.matches[0].person == self.person


def choose_queries(
    known: Sequence[Trial], strangers: Sequence[Trial], threshold: float
) -> tuple[dict[str, Trial], dict[str, Any]]:
    """Choose ten pictures that find their people, one that is refused, and two of strangers.

    Fewer where fewer pass. The ten are spread over all that pass; the refused one is of those whose person is the
    nearest the one that comes closest to the threshold.

    Returns:
        The pictures by the names of their files, and how many were tried, passed and are left.
    """
    found = [trial for trial in known if trial.outcome(threshold) is Outcome.FOUND]
    refused = [trial for trial in known if trial.is_near and trial.outcome(threshold) is Outcome.REFUSED]
    nobody = [trial for trial in strangers if trial.outcome(threshold) is Outcome.REFUSED]
    places = np.unique(np.linspace(0, len(found) - 1, min(_LEFT, len(found)), dtype=np.int64))
    chosen = {found[place].name: found[place] for place in places}
    hard = max(refused, key=lambda trial: trial.matches[0].score, default=None)
    files = dict(chosen) if hard is None else {**chosen, HARD: hard}
    files |= {f"stranger-{number}": trial for number, trial in enumerate(nobody[:_STRANGERS_LEFT], start=1)}
    figures = {
        "threshold": threshold,
        "tried": len(known),
        "passed": len(found),
        "found": len(chosen),
        "hard": None if hard is None else hard.name,
        "strangers_tried": len(strangers),
        "strangers_refused": len(nobody),
        "queries": len(files),
    }
    return files, figures


def write_queries(folder: Path, files: Mapping[str, Trial]) -> None:
    """Write the pictures into ``folder``, whose former ones go."""
    tmp_path = folder.with_name(f".{folder.name}.tmp")
    with replacing_folder(folder, tmp_path, Path.mkdir):
        for name, trial in files.items():
            (tmp_path / f"{name}.jpg").write_bytes(trial.jpeg)
