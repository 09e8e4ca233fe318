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

With --migrate the service has a second model (--next-model), and a further caller moves the collection to it, back, and
on, step by step; persons expire, and snapshots are restored. Then all of that has to hold in both spaces (benchmarks/
serve_durability_moves.py).
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
from results_file import add_row, script_parser
from serve_durability_load import load_and_kill, served
from serve_durability_moves import MovingTrial
from serve_durability_people import COLLECTION
from serve_durability_trial import Trial

FILES_EVERY = 5  # rounds


def play(trial: Trial, rounds: int, minutes: float, seconds: float, seed: int) -> dict[str, Any]:
    """Run the rounds, or as many as ``minutes`` allow; returns figures. AssertionError: a promise was broken."""
    gallery, begun, number = trial.gallery, time.monotonic(), 0
    for number in range(1, rounds + 1):
        looks_into_files = number % FILES_EVERY == 0 or number == rounds
        with served(trial.store, trial.options()) as (process, address):
            with httpx.Client(base_url=address, timeout=120) as http:
                if number == 1:
                    assert http.post("/v1/collections", json={"name": COLLECTION}).status_code == 201
                trial.verify(http, files=looks_into_files)
            load_and_kill(process, address, seconds * gallery.chance.random(), trial.works(seed + number))
        print(f"round {number}: {len(gallery.living)} people, {gallery.figures}", file=sys.stderr, flush=True)
        trial.after_kill(files=looks_into_files)
        if looks_into_files and time.monotonic() - begun > 60 * minutes:
            break
    spent = round(time.monotonic() - begun, 1)
    rest = {"people": len(gallery.living), "slowest_forgetting_seconds": round(trial.slowest, 1), "seconds": spent}
    return {"rounds": number, "encrypted": bool(trial.keys), **gallery.figures, **rest}


def main() -> None:
    """Read the arguments, play, print the figures as JSON."""
    parser = script_parser(__doc__, rounds=100, seed=0)
    parser.add_argument("--minutes", type=float, default=1e9, help="end after the round of this time (no end)")
    parser.add_argument("--seconds", type=float, default=3.0, help="longest load of a round")
    parser.add_argument("--encrypt", action="store_true", help="an encrypted store")
    parser.add_argument("--migrate", action="store_true", help="move the collection between two models meanwhile")
    parser.add_argument("--record", action="store_true", help="add the figures to results/serve_durability[_moves].csv")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="plsc-serve-") as folder:
        trial = (MovingTrial if args.migrate else Trial)(Path(folder), args.seed, args.encrypt)
        row = play(trial, args.rounds, args.minutes, args.seconds, args.seed)
    print(json.dumps(row))
    if args.record:
        add_row("serve_durability_moves" if args.migrate else "serve_durability", row)


if __name__ == "__main__":
    main()
