"""Kill `plsc serve` at random moments under load, again and again, and see whether it kept its word.

    python benchmarks/serve_durability.py --rounds 100 [--encrypt] [--record]

In each round the service is started on the store that the last kill left, asked about everything, and put under load
over HTTP by several callers until SIGKILL: they enrol people under idempotency keys, with vectors and with pictures,
replace them by external ids, rename and delete them, take and delete snapshots, and compact. Then:

- what was acknowledged is there as it was acknowledged, once, and found by search; of what was asked without an answer
  either the former or the new state is there; an enrolment sent again under its key is done once;
- nobody whose deletion was acknowledged is listed, found or shown, and no thumbnail of them is left;
- the audit log's chain holds, and each of the store's changes has one line in it or is in a gap (benchmarks/
  serve_durability_files.py);
- every few rounds: no file of the store holds a text or vector of who is not there any more, within the time promised;
  the store passes its own check; and an encrypted one gets another key, in a process that is killed as well.
"""

import base64
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
from results_file import add_row, script_parser
from serve_durability_files import await_forgotten, verify_audit, verify_store, verify_thumbnails
from serve_durability_people import COLLECTION, DIM, PICTURE_SIZE, Person, vector

from plsc.models import create, save_model

CALLERS = 4
PEOPLE = 250  # about so many are kept
FILES_EVERY = 5  # rounds
WITHIN = 4  # seconds that the service promises


class Gallery:
    """What the callers know: everybody that they enrolled, by number, each touched by one caller at a time."""

    def __init__(self, seed: int) -> None:
        self.people: dict[int, Person] = {}
        self.chance = random.Random(seed)
        self.lock = threading.Lock()
        self.figures = dict.fromkeys(("acknowledged", "unanswered", "repeated", "deleted", "snapshots", "rotations"), 0)
        self._numbers = iter(range(10**9))
        self._busy = set[int]()

    def count(self, name: str) -> None:
        with self.lock:
            self.figures[name] += 1

    @contextmanager
    def somebody(self, *, new: bool) -> Iterator[Person | None]:
        """Somebody whom no other caller has: a new person, or one who is surely there."""
        with self.lock:
            if new:
                number = next(self._numbers)
                self.people[number] = Person(number)
            else:
                free = [n for n, one in self.people.items() if n not in self._busy and one.is_settled]
                number = self.chance.choice(free) if free else -1
            self._busy.add(number)
        try:
            yield self.people.get(number)
        finally:
            with self.lock:
                self._busy.discard(number)

    @property
    def living(self) -> dict[int, Person]:
        """Who is there for all that is known."""
        with self.lock:
            return {number: person for number, person in self.people.items() if None not in person.states}


class Caller:
    """Asks for changes until the service is gone; a thread each."""

    def __init__(self, gallery: Gallery, address: str, seed: int) -> None:
        self._gallery, self._chance = gallery, random.Random(seed)
        self._http = httpx.Client(base_url=address, timeout=120)

    def run(self) -> None:
        with contextlib.suppress(httpx.TransportError), self._http:
            while True:
                crowded = len(self._gallery.living) > PEOPLE
                work = self._chance.choices(
                    [self._enrol, self._replace, self._rename, self._delete, self._operate],
                    [10, 6, 6, 14 if crowded else 6, 1],
                )[0]
                work()

    def _ask(self, method: str, path: str, body: Any = None, key: str | None = None) -> httpx.Response:
        headers = {} if key is None else {"Idempotency-Key": key}
        answer = self._http.request(method, path, json=body, headers=headers)
        assert answer.status_code < 300 or answer.status_code in (404, 409), (method, path, answer.text)
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


def verify(gallery: Gallery, http: httpx.Client) -> None:
    """Compare the service with what it acknowledged, and take over what was done without an answer."""

    def ask(method: str, path: str, body: Any = None, key: str | None = None) -> httpx.Response:
        answer = http.request(method, path, json=body, headers={} if key is None else {"Idempotency-Key": key})
        assert answer.status_code < 300, (method, path, answer.text)
        return answer

    for person in gallery.people.values():
        if person.is_new and not person.is_settled:  # as a caller does who got no answer
            person.enrol(ask)
            gallery.count("repeated")
    found = everybody(http)
    for number, person in list(gallery.people.items()):
        gallery.figures["unanswered"] += len(person.states) > 1
        person.settle(found.pop(number, None))
    assert not found, f"nobody enrolled {sorted(found)[:5]}"
    verify_searches(gallery, http)


def everybody(http: httpx.Client) -> dict[int, dict[str, Any]]:
    """All persons of the service, by their numbers; nobody is there twice."""
    found: dict[int, dict[str, Any]] = {}
    after: int | None = 0
    while after is not None:
        page = http.get(f"/v1/collections/{COLLECTION}/persons", params={"after": after, "limit": 1000}).json()
        for view in page["persons"]:
            number = view["metadata"]["number"]
            assert number not in found, f"person {number} is there twice"
            found[number] = view
        after = page.get("next")
    return found


def verify_searches(gallery: Gallery, http: httpx.Client) -> None:
    """Who is there is found by the own vector, and who was deleted last by none."""
    gone = [person for person in gallery.people.values() if person.states == {None}][-150:]
    for person in [*gallery.living.values(), *gone]:
        (state,) = person.states
        if person.has_picture:
            continue
        faces = [state.face] if state is not None else range(person.faces)
        for face in faces:
            query = {"query": {"vector": vector(person.number, face)}, "k": 1}
            matches = http.post(f"/v1/collections/{COLLECTION}/search", json=query).json()["results"][0]["matches"]
            same = [match["person"]["id"] for match in matches if match["score"] > 0.9999]
            assert same == ([] if state is None else [person.id]), f"person {person.number}: {matches}, {state}"


def play(folder: Path, rounds: int, minutes: float, seconds: float, encrypt: bool, seed: int) -> dict[str, Any]:
    """Run the rounds, or as many as ``minutes`` allow; returns figures. AssertionError: a promise was broken."""
    gallery, begun = Gallery(seed), time.monotonic()
    torch.manual_seed(0)
    save_model(create("resnet8", embedding_dim=DIM, image_size=PICTURE_SIZE), folder / "model.safetensors")
    keys = [new_key(folder / "gallery.key")] if encrypt else []
    number, slowest = 0, 0.0
    for number in range(1, rounds + 1):
        looks_into_files = number % FILES_EVERY == 0 or number == rounds
        with served(folder, keys[-1] if keys else None) as (process, address):
            with httpx.Client(base_url=address, timeout=120) as http:
                if number == 1:
                    assert http.post("/v1/collections", json={"name": COLLECTION}).status_code == 201
                verify(gallery, http)
                verify_audit(folder / "store")
                verify_thumbnails(folder / "store", everybody(http).values())
                if looks_into_files:
                    slowest = max(slowest, await_forgotten(folder / "store", list(gallery.people.values()), encrypt))
            load_and_kill(gallery, process, address, seconds * gallery.chance.random(), seed + number)
        print(f"round {number}: {len(gallery.living)} people, {gallery.figures}", file=sys.stderr, flush=True)
        if looks_into_files:
            if keys:
                keys.append(rotate(folder, keys[-1], gallery))
            verify_store(folder / "store", keys[-1] if keys else None)
            if time.monotonic() - begun > 60 * minutes:
                break
    spent = round(time.monotonic() - begun, 1)
    rest = {"people": len(gallery.living), "slowest_forgetting_seconds": round(slowest, 1), "seconds": spent}
    return {"rounds": number, "encrypted": encrypt, **gallery.figures, **rest}


@contextmanager
def served(folder: Path, key: Path | None) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """`plsc serve`, and its address once it serves."""
    command = [sys.executable, "-m", "plsc.tools.entry", "serve", "--model", str(folder / "model.safetensors")]
    command += ["--store", str(folder / "store"), "--port", "0", "--device", "cpu", "--compact-within", str(WITHIN)]
    command += ["--keep-thumbnails"] if key is None else ["--encrypt", str(key)]
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


def load_and_kill(gallery: Gallery, process: "subprocess.Popen[str]", address: str, seconds: float, seed: int) -> None:
    """Let callers work for some time, and end the service in the midst of it."""
    failures: list[BaseException] = []

    def run(number: int) -> None:
        try:
            Caller(gallery, address, 1000 * seed + number).run()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(CALLERS)]
    for thread in threads:
        thread.start()
    time.sleep(0.2 + seconds)
    process.send_signal(signal.SIGKILL)
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def new_key(path: Path) -> Path:
    path.write_bytes(base64.b64encode(os.urandom(32)))
    path.chmod(0o600)
    return path


def rotate(folder: Path, old: Path, gallery: Gallery) -> Path:
    """Change the key, in a process that may be killed meanwhile; returns the key file that the store is under then."""
    new = new_key(folder / f"gallery-{gallery.figures['rotations']}.key")
    command = [sys.executable, "-m", "plsc.tools.entry", "gallery", "rotate-key", str(folder / "store")]
    command += ["--encrypt", str(old), "--new-key", str(new)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(gallery.chance.choice([0.5, 1.0, 1.5, 60.0]))
    process.kill()
    _, told = process.communicate()
    assert process.returncode in (0, -signal.SIGKILL), told
    gallery.count("rotations")
    return next(key for key in (new, old) if opens(folder / "store", key))


def opens(store: Path, key: Path) -> bool:
    """True if the store's keys are under this key file."""
    from plsc.errors import UsageError
    from plsc.gallery.sqlite import KEYS
    from plsc.gallery.sqlite.keys import KeyTable, read_key_file

    try:
        KeyTable(store / KEYS, read_key_file(key), writable=False).close()
    except UsageError:
        return False
    return True


def main() -> None:
    """Read the arguments, play, print the figures as JSON."""
    parser = script_parser(__doc__, rounds=100, seed=0)
    parser.add_argument("--minutes", type=float, default=1e9, help="end after the round of this time (no end)")
    parser.add_argument("--seconds", type=float, default=3.0, help="longest load of a round")
    parser.add_argument("--encrypt", action="store_true", help="an encrypted store")
    parser.add_argument("--record", action="store_true", help="add the figures to results/serve_durability.csv")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="plsc-serve-") as folder:
        row = play(Path(folder), args.rounds, args.minutes, args.seconds, args.encrypt, args.seed)
    print(json.dumps(row))
    if args.record:
        add_row("serve_durability", row)


if __name__ == "__main__":
    main()
