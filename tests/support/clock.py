"""A clock for tests, which stands still until it is told to go on."""


class Clock:
    """Seconds in ``now``, which tests set; calling it tells them."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
