"""Scores as a caller may see them: exact with the right to send vectors, else rounded, so that a score tells less."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from plsc.gallery.values import Match
from plsc.serve.access import Caller, includes
from plsc.serve.settings import Settings


@dataclass(frozen=True)
class ScoreView:
    """What one caller sees of scores.

    A threshold that a caller sends is compared with the rounded score: compared with the exact one, a few searches
    with other thresholds would find it. The service's own threshold, which callers cannot move, judges exact scores.

    Attributes:
        step: scores are multiples of it; 0 leaves them exact.
        least: matches with lower exact scores are not shown, None shows all.
        threshold: the service's own.
    """

    step: float
    least: float | None
    threshold: float | None

    @classmethod
    def of(cls, caller: Caller, settings: Settings) -> "ScoreView":
        """The view of ``caller``; whoever may only search sees no person below the service's threshold."""
        step = 0.0 if "vectors" in caller.rights else settings.score_step
        least = None if includes(caller.role, "read") else settings.threshold
        return cls(step, least, settings.threshold)

    def score(self, exact: float) -> float:
        """The score as shown."""
        return exact if self.step == 0 else round(round(exact / self.step) * self.step, 6)

    def search_threshold(self, asked: float | None) -> float | None:
        """The least exact score of matches that are shown where the caller asks for ``asked`` as the least shown."""
        if asked is not None and self.step > 0:
            asked = (math.ceil(asked / self.step - 1e-6) - 0.5) * self.step
        given = [threshold for threshold in (asked, self.least) if threshold is not None]
        return max(-1.0, *given) if given else None

    def matches(self, found: Sequence[Match], asked: float | None) -> list[tuple[Match, bool | None]]:
        """The matches as shown, with whether each reaches the threshold; where scores are equal, by person."""
        if self.step == 0:
            return [(match, self.same_person(match.score, asked)) for match in found]
        rounded = [match._replace(score=self.score(match.score)) for match in found]
        judged = [self.same_person(match.score, asked) for match in found]
        shown = [pair for pair in zip(rounded, judged, strict=True) if asked is None or pair[0].score >= asked]
        return sorted(shown, key=lambda pair: (-pair[0].score, pair[0].person))

    def same_person(self, exact: float, asked: float | None = None) -> bool | None:
        """Whether a score reaches the caller's threshold, else the service's; None without any."""
        if asked is not None:
            return self.score(exact) >= asked
        return None if self.threshold is None else exact >= self.threshold
