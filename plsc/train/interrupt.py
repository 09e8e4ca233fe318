"""SIGTERM and SIGINT as a wish to stop: noted at once, obeyed by all ranks after the step in hand."""

import signal
from types import FrameType, TracebackType

from plsc.errors import PlscError

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(PlscError):
    """The run was asked to stop, and has saved its state."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + number  # as a shell reports it: 130 after SIGINT, 143 after SIGTERM


class StopRequest:
    """Within ``with StopRequest() as stop:``, ``stop.signal`` is the number of the signal that came, else 0.

    A second signal is not caught: it ends the process as it always would.
    """

    def __init__(self) -> None:
        self.signal = 0
        self._before: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> "StopRequest":
        try:
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        except ValueError:  # not the main thread: whoever runs us there handles the signals
            self._before = {}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
