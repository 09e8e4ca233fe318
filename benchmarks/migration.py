"""Move a served gallery to another model, three ways, while somebody searches it every 50 ms.

    python benchmarks/migration.py --crops crops/ --old old.onnx --new new.onnx

``crops/`` has a folder of aligned pictures for each person (`plsc data align`). Each way enrols them with the old
model in a service of its own (``plsc serve --next-model``), and moves them:

- kept: the service has kept the pictures, and embeds them by itself;
- sent: it has not, and they are sent again;
- adapter: those of ``--learned`` faces are sent again, and the rest is estimated from these; once for each number.

Meanwhile a thread searches for enrolled pictures: each search has to be answered, and with the right person at a score
that a picture has with itself, which none has with a vector of another model; beside estimates nobody else may have
it. At the end "kept" and "sent" are compared with a fresh enrolment by the new model, row for row. All ways roll back
and cut over once more after ``--after`` further enrolments.

Prints and records: TAR at a false-match rate of 1e-3 of all pairs in the old space and after each way, how far the
rows are from fresh ones, searches, failures, the slowest search, and how long filling and cut-over took.
"""

import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from results_file import add_row, script_parser

from plsc.client import Client
from plsc.evaluation.roc import all_pairs_roc, tar_at_far
from plsc.gallery.backends import opened_store

GALLERY = "people"
FMR = 1e-3
_OF_ROWS = ("rows", "equal_rows", "least_cosine", "estimated")
MEASURED = (*_OF_ROWS, "searches", "wrong", "slowest_search_s", "fill_s", "cut_over_s")
SAME = 0.98  # a score of one picture with itself, decoded twice
Float32 = npt.NDArray[np.float32]


@contextmanager
def serving(store: Path, model: Path, *options: str) -> Iterator[Client]:
    """A service of its own process, and a client."""
    command = [
        str(Path(sys.executable).with_name("plsc")),
        "serve",
        "--model",
        str(model),
        "--store",
        str(store),
        "--port",
        "0",
    ]
    process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        address = next(word.rstrip(":") for line in process.stdout if "serving at" in line for word in line.split()[2:])
        with Client(address, timeout=600) as client:
            yield client
    finally:
        process.terminate()
        process.wait()


class Searcher:
    """Searches for enrolled pictures every 50 ms, until it is closed."""

    def __init__(self, client: Client, people: dict[int, list[Path]], *, estimates: bool) -> None:
        self._client, self._people, self._estimates = client, people, estimates
        self._ends = threading.Event()
        self.searches, self.wrong, self.slowest = 0, list[str](), 0.0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._ends.set()
        self._thread.join()

    def _run(self) -> None:
        chance = random.Random(0)
        while not self._ends.wait(0.05):
            person = chance.choice([*self._people])
            begun = time.monotonic()
            try:
                found = self._client.search(GALLERY, chance.choice(self._people[person]), k=2)  # a picture may be twice
            except Exception as error:
                self.wrong.append(f"{type(error).__name__}: {error}")
            else:
                like = {one.person.id for one in found if one.score >= SAME}
                if person not in like and (like or not self._estimates):
                    told = ", ".join(f"{one.person.id} at {one.score:.3f}" for one in found)
                    self.wrong.append(f"person {person} was answered with {told}")
            self.searches += 1
            self.slowest = max(self.slowest, time.monotonic() - begun)


def enrol(client: Client, people: Sequence[list[Path]]) -> dict[int, list[Path]]:
    """Enrol people; returns their pictures by id."""
    client.create_collection(GALLERY)
    return {client.add_person(GALLERY, pictures[0].parent.name, faces=pictures).id: pictures for pictures in people}


def until_filled(client: Client) -> None:
    """Wait until every face has a second vector."""
    while client.migration(GALLERY)["lacking"]:
        time.sleep(0.2)


def send_again(client: Client, people: dict[int, list[Path]], most: int) -> int:
    """Send pictures of people who are missing again, of up to ``most`` faces; returns how many were assigned."""
    count = 0
    for person in list(client.missing(GALLERY)):
        if count < most:
            count += len(client.send_pictures(GALLERY, person["id"], people[person["id"]]))
    return count


def move(
    args: Any, way: str, learned: int, folder: Path, people: Sequence[list[Path]], late: Sequence[list[Path]]
) -> dict[str, Any]:
    """Enrol, move by a way, and return the figures; the moved store is left in ``folder``."""
    options = ["--next-model", str(args.new), *(["--keep-pictures"] if way == "kept" else []), *args.serve]
    with serving(folder, args.old, *options) as client:
        enrolled = enrol(client, people)
        searcher = Searcher(client, enrolled, estimates=way == "adapter")
        try:
            begun = time.monotonic()
            client.begin_migration(GALLERY)
            if way == "kept":
                until_filled(client)
            else:
                send_again(client, enrolled, learned if way == "adapter" else sys.maxsize)
            estimated = client.migrate(GALLERY, "estimate")["estimated"] if way == "adapter" else 0
            filled = time.monotonic()
            client.migrate(GALLERY, "cut-over", max_loss=1)
            cut = time.monotonic()
            since = [client.add_person(GALLERY, pictures[0].parent.name, faces=pictures).id for pictures in late]
            client.migrate(GALLERY, "roll-back")
            assert {*since} <= {person.id for person in client.persons(GALLERY)}, "somebody was lost by the roll back"
            for person, pictures in zip(since, late, strict=True):
                (best,) = client.search(GALLERY, pictures[0], k=1)
                assert best.person.id == person, "somebody who came since is not found after the roll back"
            client.migrate(GALLERY, "cut-over", max_loss=1)
        finally:
            searcher.close()
        client.migrate(GALLERY, "finish")
    return {
        "estimated": estimated,
        "searches": searcher.searches,
        "wrong": len(searcher.wrong),
        "first_wrong": searcher.wrong[:1],
        "slowest_search_s": round(searcher.slowest, 2),
        "fill_s": round(filled - begun, 1),
        "cut_over_s": round(cut - filled, 1),
    }


def rows_of(folder: Path) -> tuple[Float32, npt.NDArray[np.int64]]:
    """All vectors of a store by ascending person and face, and whose they are."""
    with opened_store(folder) as store:
        found = [(store.vectors(GALLERY, one.id), one.id) for one in store.persons(GALLERY, limit=1_000_000)]
    return (
        np.concatenate([rows for rows, _ in found]),
        np.concatenate([np.full(len(rows), person, dtype=np.int64) for rows, person in found]),
    )


def tar(rows: Float32, persons: npt.NDArray[np.int64]) -> float | None:
    """TAR at ``FMR`` of all pairs; None: there are too few."""
    return tar_at_far(all_pairs_roc(rows, persons), FMR)


def play(args: Any, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the figures of each way."""
    everyone = [sorted(path.iterdir()) for path in sorted(args.crops.iterdir()) if path.is_dir()]
    chosen = [pictures for pictures in everyone if len(pictures) >= args.pictures][: args.persons + args.after]
    people, late = chosen[: args.persons], chosen[args.persons :]
    with serving(folder / "old", args.old) as client:
        enrol(client, [*people, *late])
    old = tar(*rows_of(folder / "old"))
    with serving(folder / "fresh", args.new) as client:
        enrol(client, [*people, *late])
    fresh, owners = rows_of(folder / "fresh")
    yield {"way": "old model", "learned": None, "tar": old, **dict.fromkeys(MEASURED)}
    yield {"way": "fresh enrolment", "learned": None, "tar": tar(fresh, owners), **dict.fromkeys(MEASURED)}
    for way, learned in [(one, most) for one in args.ways for most in (args.learned if one == "adapter" else [0])]:
        figures = move(args, way, learned, folder / f"{way}-{learned}", people, late)
        rows, persons = rows_of(folder / f"{way}-{learned}")
        cosines = np.sum(rows.astype(np.float64) * fresh, axis=1) if len(rows) == len(fresh) else np.zeros(1)
        equal = int(np.sum(np.all(rows == fresh, axis=1))) if len(rows) == len(fresh) else 0
        yield {
            "way": way,
            "learned": learned or None,
            "tar": tar(rows, persons),
            "rows": len(rows),
            "equal_rows": equal,
            "least_cosine": round(float(cosines.min()), 6),
            **figures,
        }


def main() -> None:
    """Read the arguments, play, print the figures as JSON."""
    parser = script_parser(__doc__)
    parser.add_argument("--crops", type=Path, required=True, help="folders of aligned pictures")
    parser.add_argument("--old", type=Path, required=True, help="the model that the gallery is enrolled with")
    parser.add_argument("--new", type=Path, required=True, help="the model that it is moved to")
    parser.add_argument("--persons", type=int, default=400)
    parser.add_argument("--after", type=int, default=20, help="persons enrolled between cut-over and roll back (20)")
    parser.add_argument("--pictures", type=int, default=2, help="that a person has at the least (2)")
    parser.add_argument("--learned", type=int, nargs="+", default=[500], help="faces that adapters learn from (500)")
    parser.add_argument("--models", default="", help="their names in the results")
    parser.add_argument("--ways", nargs="+", default=["kept", "sent", "adapter"])
    parser.add_argument("--serve", nargs="*", default=[], help="further options of plsc serve")
    parser.add_argument("--record", action="store_true", help="add the figures to results/migration.csv")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for figures in play(args, Path(folder)):
            print(json.dumps(figures), flush=True)
            if args.record:
                about = {"models": args.models, "persons": args.persons, **figures}
                about.pop("first_wrong", None)
                add_row("migration", about)


if __name__ == "__main__":
    main()
