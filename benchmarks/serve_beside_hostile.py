"""How much longer a caller's searches take beside another caller who has a token and sends the dearest requests.

    python benchmarks/serve_beside_hostile.py [--persons 20000] [--hostile-callers 4] [--seconds 5] [--record]

Starts plsc serve with two tokens of role read. One caller searches by vector and by picture in turn, first alone, then
beside the other, who sends pictures of 12 million pixels that are a few kilobytes, or searches with the longest filter,
over several connections at once. All are on this machine, so that what the hostile caller's own process takes counts
against the service. Prints milliseconds, and what is added to the median, the 95th percentile and the worst; --record
adds a row per kind to benchmarks/results/serve_beside_hostile.csv. Two minutes.
"""

import argparse
import base64
import contextlib
import io
import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image
from results_file import add_row, script_parser
from serve_under_attack import serving

from plsc.serve.tokens import add_token

DIM, SIDE = 128, 3464  # SIDE ** 2 is just below the 12 million pixels that a picture may have
CONDITIONS = 16  # as many as a filter may have
SEARCH, PERSONS = "/v1/collections/staff/search", "/v1/collections/staff/persons"
ENROLLED_AT_ONCE = 100


def main() -> None:
    parser = script_parser(__doc__, persons=20_000)
    parser.add_argument("--hostile-callers", type=int, default=4, metavar="N", help="connections of the hostile caller")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--record", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, serving(Path(name)) as service:
        address, tokens = f"http://127.0.0.1:{service.port}", Path(name) / "tokens.toml"
        roles = {"friend": "read", "hostile": "read", "enroller": "admin"}
        secrets = [add_token(tokens, who, role, allow=("vectors",)) for who, role in roles.items()]
        friend, hostile, enroller = ({"Authorization": f"Bearer {one}"} for one in secrets)
        wait_for_token(address, enroller)
        enrol(address, enroller, args.persons)
        for kind, body in hostile_requests().items():
            row = measure(address, friend, (hostile, body), kind, args)
            print(", ".join(f"{field} {value}" for field, value in row.items()), flush=True)
            if args.record:
                add_row("serve_beside_hostile", row)


def hostile_requests() -> dict[str, dict[str, Any]]:
    """The bodies of the dearest searches."""
    plain = Image.new("RGB", (SIDE, SIDE), "teal")
    conditions = {f"key {number}": {"gte": 0} for number in range(CONDITIONS)}
    kinds: dict[str, dict[str, Any]] = {
        "progressive JPEG": {"query": {"image": scans_of(plain.convert("L"), 80)}},
        "WEBP": {"query": {"image": encoded(plain, "WEBP")}},
        "PNG": {"query": {"image": encoded(plain, "PNG")}},
        "32 WEBPs a request": {"queries": [{"image": encoded(plain, "WEBP")}] * 32},
        "filter": {"query": {"vector": [1.0] * DIM}, "filter": conditions},
    }
    return kinds


def encoded(picture: Image.Image, kind: str, **options: Any) -> str:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return base64.b64encode(file.getvalue()).decode()


def scans_of(picture: Image.Image, scans: int) -> str:
    """A progressive JPEG whose last scan is repeated: a pass over the picture for each."""
    data = base64.b64decode(encoded(picture, "JPEG", progressive=True))
    last = data.rindex(b"\xff\xda")
    scan = data[last:-2][: 2 + int.from_bytes(data[last + 2 : last + 4], "big") + 30]
    return base64.b64encode(data[:-2] + scan * scans + data[-2:]).decode()


def enrol(address: str, headers: dict[str, str], count: int) -> None:
    """Persons with a vector and sixteen numbers each."""
    chance = np.random.default_rng(0)
    metadata = {f"key {number}": number for number in range(CONDITIONS)}
    with httpx.Client(base_url=address, headers=headers, timeout=60) as client:
        for first in range(0, count, ENROLLED_AT_ONCE):
            rows = chance.standard_normal((min(ENROLLED_AT_ONCE, count - first), DIM))
            persons = [{"metadata": metadata, "faces": [{"vector": row.tolist()}]} for row in rows]
            client.post(PERSONS, json={"persons": persons}).raise_for_status()


def wait_for_token(address: str, headers: dict[str, str]) -> None:
    """Return once the service has read the file of tokens again."""
    while httpx.get(f"{address}/v1/info", headers=headers).status_code == 401:
        time.sleep(0.1)


def measure(
    address: str,
    friend: dict[str, str],
    hostile: tuple[dict[str, str], dict[str, Any]],
    kind: str,
    args: argparse.Namespace,
) -> dict[str, object]:
    """The friend's times alone and beside the hostile caller, by what is searched for."""
    row: dict[str, object] = {"kind": kind, "persons": args.persons, "hostile_callers": args.hostile_callers}
    alone = times(address, friend, args.seconds)
    with asking(address, *hostile, args.hostile_callers) as answered:
        time.sleep(1)
        beside = times(address, friend, args.seconds)
        row["answered_to_the_hostile"] = answered.value
    for form in alone:
        for name, share in (("median", 0.5), ("p95", 0.95), ("worst", 1.0)):
            before, after = (float(np.quantile(of[form], share)) for of in (alone, beside))
            row |= {
                f"{form}_{name}_ms": round(before, 1),
                f"{form}_{name}_beside_ms": round(after, 1),
                f"{form}_{name}_added_ms": round(after - before, 1),
            }
    return row


def times(address: str, headers: dict[str, str], seconds: float) -> dict[str, list[float]]:
    """Milliseconds of searches by vector and by picture, one after the other for ``seconds``."""
    chance = np.random.default_rng(1)
    face = Image.fromarray(chance.integers(0, 256, (48, 48, 3), np.uint8))
    queries = {"vector": {"vector": chance.standard_normal(DIM).tolist()}, "image": {"image": encoded(face, "PNG")}}
    found: dict[str, list[float]] = {form: [] for form in queries}
    with httpx.Client(base_url=address, headers=headers, timeout=60) as client:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            for form, query in queries.items():
                begun = time.perf_counter()
                client.post(SEARCH, json={"query": query, "k": 5}).raise_for_status()
                found[form].append(1000 * (time.perf_counter() - begun))
    return found


@contextlib.contextmanager
def asking(address: str, headers: dict[str, str], body: dict[str, Any], callers: int) -> Iterator[Any]:
    """Let processes ask meanwhile, as fast as they are answered; yields the number of answers, a shared value."""
    spawning = multiprocessing.get_context("spawn")
    answered = spawning.Value("i", 0)
    processes = [spawning.Process(target=ask, args=(address, headers, body, answered)) for _ in range(callers)]
    try:
        for process in processes:
            process.start()
        while not answered.value:  # all run now, and have asked
            time.sleep(0.05)
        yield answered
    finally:
        for process in processes:
            process.kill()
            process.join()


def ask(address: str, headers: dict[str, str], body: dict[str, Any], answered: Any) -> None:
    with httpx.Client(base_url=address, headers=headers, timeout=60) as client:
        while True:
            client.post(SEARCH, json=body)
            with answered.get_lock():
                answered.value += 1


if __name__ == "__main__":
    main()
