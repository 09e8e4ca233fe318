"""Count the files that a training step, a search and an enrolment enter, and write the table in docs/architecture.md.

    python docs/trace_journeys.py [--files] [--check]

A small run is trained and then served by the commands themselves, in this process, on the CPU. Each journey is taken
several times, and the one that entered the fewest files is counted: a thread's periodic work may fall into another. The
interpreter's profiler counts every file of plsc with a function that was called in any thread, and how often a thread
went from one to another. Decoding takes place in processes of its own, and is not counted.
"""

import argparse
import base64
import http.client
import io
import json
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
TAKEN = 4  # times that each journey is taken
RECIPE = ("--data.train", "avatars:16x8", "--eval.sets", "avatars:8x4", "--epochs", "2", "--data.batch_size", "64")


class Journey:
    """The files of plsc that calls enter while :meth:`traced` is active, in the order of their first entry."""

    def __init__(self) -> None:
        self.files: list[str] = []  # of the journey with the fewest …
        self.moves = 0
        self._files: list[str] = []  # … and of the newest
        self._moves = 0
        self._active = False
        self._last: dict[int, str] = {}

    @contextmanager
    def traced(self) -> Iterator[None]:
        """Count the calls of all threads; keep the counts unless an earlier journey entered fewer files."""
        self._files, self._moves, self._last, self._active = [], 0, {}, True
        try:
            yield
        finally:
            self._active = False
            if not self.files or len(self._files) <= len(self.files):
                self.files, self.moves = self._files, self._moves

    def profile(self, frame: FrameType, event: str, _: object) -> None:
        """Take note of a call; the interpreter's profiling function (sys.setprofile) of every thread."""
        if event != "call" or not self._active:
            return
        name = _within_plsc(frame.f_code.co_filename)
        thread = threading.get_ident()
        if name is None or name == self._last.get(thread):
            return
        self._moves += thread in self._last
        self._last[thread] = name
        if name not in self._files:
            self._files.append(name)


def _within_plsc(file: str) -> str | None:
    for folder in ("plsc", "models", "data"):
        if file.startswith(f"{ROOT}{os.sep}{folder}{os.sep}"):
            return os.path.relpath(file, ROOT).removeprefix("plsc/")
    return None


def train(journey: Journey, run: Path) -> None:
    """Train the small run; its last step is the journey, from the batch to the update's result."""
    from plsc.tools.entry import main
    from plsc.train.step import Stepper

    step = Stepper.step

    def traced(self: Stepper, *arguments: Any, **options: Any) -> Any:
        with journey.traced():
            taken = step(self, *arguments, **options)
            taken.result()
        return taken

    with patch.object(Stepper, "step", traced):
        assert main(["train", "avatars_quickstart", *RECIPE, "--out", str(run)]) == 0


class Caller:
    """A connection to the service, kept alive, with a picture to send."""

    def __init__(self, port: int) -> None:
        from PIL import Image

        from plsc.data.avatars import render_avatar

        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        file = io.BytesIO()
        Image.fromarray(render_avatar(0, 0, 48)).save(file, "PNG")
        self.picture = {"image": base64.b64encode(file.getvalue()).decode()}

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """The answer, decoded; an answer that tells of an error ends the script."""
        text = None if body is None else json.dumps(body)
        self._connection.request(method, path, text, {"Content-Type": "application/json"})
        answer = self._connection.getresponse()
        data = answer.read()
        assert answer.status < 300, f"{method} {path}: {answer.status} {data!r}"
        return json.loads(data) if data else None


def serve(take: Callable[[Caller], None], run: Path, store: Path) -> None:
    """Serve the run by plsc serve, and call ``take`` in a thread once it is ready."""
    from plsc.tools.entry import main

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def call() -> None:
        try:
            _wait_until_ready(port)
            take(Caller(port))
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    caller = threading.Thread(target=call)
    caller.start()
    assert main(["serve", "--model", str(run), "--store", str(store), "--port", str(port)]) == 0
    caller.join()


def _wait_until_ready(port: int) -> None:
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        try:
            connection.request("GET", "/health/ready")
            if connection.getresponse().status == 200:
                return
        except OSError:  # it does not listen yet
            pass
        time.sleep(0.1)


def measure() -> dict[str, Journey]:
    """Take every journey."""
    journeys = {name: Journey() for name in ("a training step", "a search by picture", "an enrolment")}
    step, search, enrolment = journeys.values()
    active = list(journeys.values())

    def profile(frame: FrameType, event: str, argument: object) -> None:
        for journey in active:
            journey.profile(frame, event, argument)

    def take(caller: Caller) -> None:
        caller.ask("POST", "/v1/collections", {"name": "people"})
        for number in range(TAKEN):
            with enrolment.traced():
                person = {"name": f"Person {number}", "faces": [caller.picture]}
                caller.ask("POST", "/v1/collections/people/persons", person)
        for _ in range(TAKEN):
            with search.traced():
                caller.ask("POST", "/v1/collections/people/search", {"query": caller.picture, "k": 3})

    threading.setprofile(profile)
    sys.setprofile(profile)
    with tempfile.TemporaryDirectory() as folder:
        train(step, Path(folder) / "run")
        serve(take, Path(folder) / "run", Path(folder) / "gallery")
    sys.setprofile(None)
    threading.setprofile(None)
    return journeys


def main() -> None:
    """Measure, print, and write the table or compare with it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", action="store_true", help="print the files of each journey, in order of entry")
    parser.add_argument("--check", action="store_true", help="fail where a journey enters more files than in the table")
    args = parser.parse_args()
    journeys = measure()
    rows = [f"| {name} | {len(taken.files)} | {taken.moves} |" for name, taken in journeys.items()]
    table = "\n".join(["| journey | files entered | moves between files |", "|---|---:|---:|", *rows])
    print(table)
    if args.files:
        print(*(f"{name}: {' '.join(taken.files)}" for name, taken in journeys.items()), sep="\n")
    text = PAGE.read_text(encoding="utf-8")
    (written,) = re.findall(r"^\| journey \|.*?(?=\n\n)", text, re.DOTALL | re.MULTILINE)
    if not args.check:
        PAGE.write_text(text.replace(written, table), encoding="utf-8")
        return
    for name, taken in journeys.items():
        said = int(re.search(rf"{name} \| (\d+)", written)[1])  # type: ignore[index]
        if len(taken.files) > said:
            sys.exit(f"{name} enters {len(taken.files)} files, and {PAGE} says {said}: {' '.join(taken.files)}")


if __name__ == "__main__":
    main()
