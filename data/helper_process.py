"""Calls by a process of its own, for one that was forked; run by its path, that process: ``helper_process.py FILE``.

The threads of libraries such as obstore and pylance do not live on in a forked process: a call there crashes, or never
returns. So a process that was forked from one that has used them lets another make its calls, and talks to it by
pipes. That one imports the file with the functions and nothing of plsc, which takes a tenth of a second.
"""

import contextlib
import os
import pickle
import runpy
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from typing import IO, Any


class CallError(Exception):
    """A call failed as its file foresees; the arguments are those of its error."""


class HelperProcess:
    """A process that calls functions of a file, and ends with the one that asks.

    Args:
        file: its path. ``CALLED`` are its functions, ``FORESEEN`` the errors whose arguments are answers; it imports
            nothing of plsc by itself.
    """

    def __init__(self, file: str) -> None:
        command = [sys.executable, "-P", __file__, file]  # the folder of this file is none of modules
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True)
        self._lock = threading.Lock()

    def call(self, name: str, args: tuple[Any, ...]) -> tuple[bool, Any]:
        """Whether a call failed, and its answer; EOFError or OSError where the process has ended."""
        calls, answers = self._process.stdin, self._process.stdout
        assert calls is not None
        assert answers is not None
        with self._lock:
            pickle.dump((name, args), calls)
            calls.flush()
            failed, answer = pickle.load(answers)
        return failed, answer

    def end(self) -> None:
        """End the process."""
        with contextlib.suppress(OSError), self._process:  # which closes its pipes
            self._process.kill()


_helpers: dict[tuple[int, str], HelperProcess] = {}  # of a process, for a file


def call_elsewhere(file: str, name: str, *args: Any) -> Any:
    """Call a function of a file in this process's helper for it, which is started where there is none.

    Raises:
        CallError: the function raised an error that the file foresees.
        EOFError: the helper has ended; the next call starts another.
    """
    own = os.getpid(), file
    helper = _helpers.get(own) or HelperProcess(file)
    _helpers[own] = helper
    try:
        failed, answer = helper.call(name, args)
    except BaseException as error:  # an answer may be under way that nobody waits for
        end_helper(file)
        if isinstance(error, OSError):
            raise EOFError from None
        raise
    if failed:
        raise CallError(*answer)
    return answer


def end_helper(file: str) -> None:
    """End this process's helper for a file."""
    _helpers.pop((os.getpid(), file)).end()


def serve(
    calls: IO[bytes],
    answers: IO[bytes],
    called: Iterable[Callable[..., Any]],
    foreseen: tuple[type[BaseException], ...],
) -> None:
    """Make the calls that come, until there are no more."""
    functions = {function.__name__: function for function in called}
    while True:
        try:
            name, args = pickle.load(calls)
        except EOFError:
            return
        try:
            answer: Any = False, functions[name](*args)
        except foreseen as error:
            answer = True, error.args
        pickle.dump(answer, answers, protocol=pickle.HIGHEST_PROTOCOL)
        answers.flush()


if __name__ == "__main__":
    _file = runpy.run_path(sys.argv[1])
    serve(sys.stdin.buffer, sys.stdout.buffer, _file["CALLED"], _file["FORESEEN"])
