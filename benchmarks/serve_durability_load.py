"""The service that benchmarks/serve_durability.py kills, and the callers who keep it busy until then."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

import httpx
from serve_durability_people import COLLECTION, Person

CALLERS = 4
PEOPLE = 250  # about so many are kept
WITHIN = 4  # seconds that the service promises
_COUNTED = ("acknowledged", "unanswered", "repeated", "deleted", "snapshots", "rotations")

_Person = TypeVar("_Person", bound=Person)
Work = Callable[[httpx.Client], None]  # is done again and again until the service is gone


class Gallery(Generic[_Person]):
    """What the callers know: everybody that they enrolled, by number, each touched by one caller at a time.

    Args:
        seed: of what is done.
        new_person: makes what is known of a person by number.
        counted: further figures.
    """

    def __init__(self, seed: int, new_person: Callable[[int], _Person], counted: Collection[str] = ()) -> None:
        self.people: dict[int, _Person] = {}
        self.chance = random.Random(seed)
        self.lock = threading.Lock()
        self.figures = dict.fromkeys((*_COUNTED, *counted), 0)
        self._new_person = new_person
        self._numbers = iter(range(10**9))
        self._busy = set[int]()

    def count(self, name: str) -> None:
        """Add one to a figure."""
        with self.lock:
            self.figures[name] += 1

    @contextmanager
    def somebody(self, *, new: bool, among: Collection[int] | None = None) -> Iterator[_Person | None]:
        """Somebody whom no other caller has: a new person, or one who is surely there, of the numbers ``among``."""
        with self.lock:
            if new:
                number = next(self._numbers)
                self.people[number] = self._new_person(number)
            else:
                wanted = self.people if among is None else {n: self.people[n] for n in among if n in self.people}
                free = [n for n, one in wanted.items() if n not in self._busy and one.is_settled]
                number = self.chance.choice(free) if free else -1
            self._busy.add(number)
        try:
            yield self.people.get(number)
        finally:
            with self.lock:
                self._busy.discard(number)

    @property
    def living(self) -> dict[int, _Person]:
        """Who is there for all that is known."""
        with self.lock:
            return {number: person for number, person in self.people.items() if None not in person.states}


class Caller:
    """Asks for changes of people, snapshots and compactions."""

    def __init__(self, gallery: Gallery[Any], seed: int) -> None:
        self._gallery, self._chance = gallery, random.Random(seed)

    def work(self, http: httpx.Client) -> None:
        """Ask for one change."""
        self._http = http
        crowded = len(self._gallery.living) > PEOPLE
        work = self._chance.choices(
            [self._enrol, self._replace, self._rename, self._delete, self._operate],
            [10, 6, 6, 14 if crowded else 6, 1],
        )[0]
        work()

    def _ask(self, method: str, path: str, body: Any = None, key: str | None = None) -> httpx.Response:
        headers = {} if key is None else {"Idempotency-Key": key}
        answer = self._http.request(method, path, json=body, headers=headers)
        assert answer.status_code < 300 or answer.status_code in (404, 409, 422), (method, path, answer.text)
        self._gallery.count("acknowledged")
        return answer

    def _enrol(self) -> None:
        with self._gallery.somebody(new=True) as person:
            assert person is not None
            person.enrol(self._ask)

    def _replace(self) -> None:
        with self._gallery.somebody(new=False) as person:
            if person is not None and person.external_id is not None:
                person.replace(self._ask)

    def _rename(self) -> None:
        with self._gallery.somebody(new=False) as person:
            if person is not None:
                person.rename(self._ask)

    def _delete(self) -> None:
        with self._gallery.somebody(new=False) as person:
            if person is not None:
                person.delete(self._ask)
                self._gallery.count("deleted")

    def _operate(self) -> None:
        if self._chance.random() < 0.5:
            self._ask("POST", f"/v1/collections/{COLLECTION}/compact")
            return
        answer = self._ask("POST", "/v1/snapshots", key=f"snapshot-{self._chance.random()}")
        self._gallery.count("snapshots")
        self._ask("DELETE", f"/v1/snapshots/{answer.json()['id']}")


@contextmanager
def served(store: Path, options: Sequence[str | Path]) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """`plsc serve` with ``options``, and its address once it serves."""
    command = [sys.executable, "-m", "plsc.tools.entry", "serve", "--store", str(store), "--port", "0"]
    command += ["--device", "cpu", "--compact-within", str(WITHIN), *map(str, options)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.startswith("serving at "), line
        yield process, line.split()[2].rstrip(":")
    finally:
        process.kill()
        process.communicate()


def load_and_kill(process: "subprocess.Popen[str]", address: str, seconds: float, works: Sequence[Work]) -> None:
    """Let each of ``works`` be done in a thread for some time, and end the service in the midst of it."""
    failures: list[BaseException] = []

    def run(work: Work) -> None:
        try:
            with contextlib.suppress(httpx.TransportError), httpx.Client(base_url=address, timeout=120) as http:
                while True:
                    work(http)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    time.sleep(0.2 + seconds)
    process.send_signal(signal.SIGKILL)
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
