"""What all callers have together, and the part of it that one of them may have."""

from collections import Counter

from plsc.serve.errors import RETRY_SECONDS, ApiError


class Shared:
    """A number of things that callers hold for a while. Used in the event loop alone.

    Args:
        what: names them in errors, in the plural.
        most: held by all together.
        share: of ``most``, what one caller may have, and ``least`` in any case.
    """

    def __init__(self, what: str, most: int, share: float, least: int = 1) -> None:
        self._what, self._most, self._part = what, most, max(int(most * share), least)
        self._held: Counter[str | None] = Counter()
        self.total = 0

    @property
    def is_half_free(self) -> bool:
        """True if no more than half of them are held."""
        return self.total <= self._most / 2

    def check(self, owner: str | None, amount: int = 1) -> None:
        """:class:`ApiError` unless the caller of this name may have ``amount`` more: 429 for its own part, 503."""
        if self._part < self._most and self._held[owner] + amount > self._part:
            raise over_share(owner, f"{self._part:,} {self._what}")
        if self.total + amount > self._most:
            raise ApiError(503, f"{self._most:,} {self._what} are held for all callers already; ask again in a moment")

    def take(self, owner: str | None, amount: int = 1) -> None:
        """Give a caller ``amount`` more, or raise as :meth:`check` does."""
        self.check(owner, amount)
        self._held[owner] += amount
        self.total += amount

    def give_back(self, owner: str | None, amount: int = 1) -> None:
        """Take ``amount`` from a caller."""
        self._held[owner] -= amount
        self.total -= amount
        if not self._held[owner]:
            del self._held[owner]


def over_share(owner: str | None, what: str) -> ApiError:
    """The error for a token that has ``what`` already."""
    message = f"the token {owner} has {what} already, which is its share; ask again in a moment"
    return ApiError(429, message, {"Retry-After": str(RETRY_SECONDS)})
