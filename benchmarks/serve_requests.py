"""Requests a second, and processor time a request, of this service, an earlier checkout's, and this one encrypted.

    python benchmarks/serve_requests.py --against CHECKOUT [--rows 20000] [--turns 15] [--record]

CHECKOUT is another working tree of plsc with its own environment in .venv. All three services run at once, each on a
gallery of its own of ``rows`` persons; in every turn each is asked for ``seconds`` of each kind of request, in an order
that alternates: searches by vector and by picture (a 112-pixel JPEG), enrolments by vector and by picture, from one
caller and from many. Prints the medians of the rates, of the processor milliseconds that a request costs the service,
and of the turns' ratios to CHECKOUT's; --record adds a row per kind to results/serve_requests.csv. Enrolments wait for
the disk: TMPDIR=/dev/shm leaves its noise out.
"""

import argparse
import base64
import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
import torch
from PIL import Image
from results_file import add_row, script_parser

from plsc.models import create, save_model

DIM, K = 512, 10
COLLECTION = "people"
FILLED_AT_ONCE = 2000
DIFFERENT = 64  # requests of each kind
SEARCH, PERSONS = f"/v1/collections/{COLLECTION}/search", f"/v1/collections/{COLLECTION}/persons"
# What is asked: the route, what the query or the face is, and the callers at once.
KINDS: dict[str, tuple[str, str, int]] = {
    "search by vector": (SEARCH, "vector_b64", 1),
    "search by vector, 32 callers": (SEARCH, "vector_b64", 32),
    "search by picture": (SEARCH, "image", 1),
    "search by picture, 8 callers": (SEARCH, "image", 8),
    "enrol by vector": (PERSONS, "vector_b64", 1),
    "enrol by vector, 16 callers": (PERSONS, "vector_b64", 16),
    "enrol by picture": (PERSONS, "image", 1),
    "enrol a hundred by vector": (PERSONS, "vector_b64", 1),
}
TOGETHER = 100  # persons in a request of the last kind


def fill(folder: Path, rows: int, key_file: Path | None) -> None:
    """Fill a gallery; runs with the checkout's own code."""
    from plsc.embedding.embedder import open_embedder
    from plsc.gallery.sqlite.store import SqliteStore
    from plsc.gallery.values import NewPerson

    contract = open_embedder(folder / "model.safetensors", device=torch.device("cpu")).contract_id
    chance = np.random.default_rng(0)
    options: dict[str, Any] = {} if key_file is None else {"key_file": key_file}
    with contextlib.closing(SqliteStore(folder / "store", **options)) as store:
        store.create_collection(COLLECTION, DIM, contract)
        for first in range(0, rows, FILLED_AT_ONCE):
            vectors = chance.standard_normal((min(FILLED_AT_ONCE, rows - first), DIM)).astype(np.float32)
            store.add_persons(COLLECTION, [NewPerson(row[None], "somebody") for row in vectors], contract)
        store.compact(COLLECTION)


class Service(NamedTuple):
    """A running service."""

    address: str
    process: int

    def cpu_seconds(self) -> float:
        """Of its process and of those that it started, so far."""
        main = Path(f"/proc/{self.process}")
        children = [child for task in main.glob("task/*/children") for child in task.read_text().split()]
        fields = [
            Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            for process in [self.process, *children]
        ]
        return sum(int(times[11]) + int(times[12]) for times in fields) / os.sysconf("SC_CLK_TCK")


class Turn(NamedTuple):
    """What one service did in its turn."""

    rate: float  # answers a second
    cpu_ms: float  # of processor time for an answer


@contextlib.contextmanager
def serving(checkout: Path, folder: Path, rows: int, key_file: Path | None) -> Iterator[Service]:
    """A checkout's service on a gallery of its own."""
    folder.mkdir()
    torch.manual_seed(0)
    save_model(create("mobilefacenet", embedding_dim=DIM), folder / "model.safetensors")
    python = checkout / ".venv" / "bin" / "python"
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    task = [str(python), __file__, "--fill", str(folder), "--rows", str(rows)]
    task += ["--key", str(key_file)] if key_file else []
    subprocess.run(task, check=True, env=environment)
    command = [str(python), "-m", "plsc.tools.entry", "serve", "--model", str(folder / "model.safetensors")]
    command += ["--store", str(folder / "store"), "--port", "0", *(["--encrypt", str(key_file)] if key_file else [])]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=checkout)
    try:
        assert process.stdout is not None, "it is a pipe"
        yield Service(process.stdout.readline().split()[2].rstrip(":"), process.pid)
    finally:
        process.terminate()
        process.wait()


def encoded_requests(kind: str, address: str) -> list[bytes]:
    """Requests of a kind, as they are sent."""
    path, form, _ = KINDS[kind]
    chance = np.random.default_rng(1)
    requests = []
    for _ in range(DIFFERENT):
        items = [{form: encoded_face(chance, form)} for _ in range(TOGETHER if "hundred" in kind else 1)]
        persons = [{"name": "new", "faces": [item]} for item in items]
        content: dict[str, Any] = {"query": items[0], "k": K} if path == SEARCH else persons[0]
        body = json.dumps({"persons": persons} if len(persons) > 1 else content).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {urlsplit(address).netloc}\r\nContent-Type: application/json\r\n"
        requests.append(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return requests


def encoded_face(chance: np.random.Generator, form: str) -> str:
    """A vector, or a picture of 112 pixels, in base64."""
    if form != "image":
        return base64.b64encode(chance.standard_normal(DIM).astype("<f4").tobytes()).decode()
    file = io.BytesIO()
    coarse = Image.fromarray(chance.integers(0, 256, (14, 14, 3), np.uint8))
    coarse.resize((112, 112)).save(file, "JPEG", quality=90)
    return base64.b64encode(file.getvalue()).decode()


def compare(args: argparse.Namespace) -> None:
    """Let the services take turns, and print what they did."""
    here = Path(__file__).parents[1]
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as services:
        folder = Path(name)
        key_file = folder / "gallery.key"
        key_file.write_text(base64.b64encode(os.urandom(32)).decode())
        key_file.chmod(0o600)
        contestants: dict[str, tuple[Path, Path | None]] = {
            "before": (args.against.resolve(), None),
            "plain": (here, None),
            "encrypted": (here, key_file),
        }
        running = {
            name: services.enter_context(serving(checkout, folder / name, args.rows, key))
            for name, (checkout, key) in contestants.items()
        }
        for kind in args.kinds:
            report(kind, measure(kind, running, args), args)


def measure(kind: str, services: dict[str, Service], args: argparse.Namespace) -> dict[str, list[Turn]]:
    """What each service did, by turn."""
    from plsc.bench.serve_worker import call_service  # not where an earlier checkout runs this file

    requests = {name: encoded_requests(kind, service.address) for name, service in services.items()}
    found: dict[str, list[Turn]] = {name: [] for name in services}
    for turn in range(args.turns + 1):
        for name in list(services)[:: 1 if turn % 2 else -1]:
            url = urlsplit(services[name].address)
            before = services[name].cpu_seconds()
            times = call_service((str(url.hostname), url.port or 80), requests[name], KINDS[kind][2], args.seconds)
            used = services[name].cpu_seconds() - before
            if turn:  # the first warms up
                found[name].append(Turn(max(1, len(times)) / args.seconds, 1000 * used / max(1, len(times))))
    return found


def report(kind: str, found: dict[str, list[Turn]], args: argparse.Namespace) -> None:
    row: dict[str, object] = {"kind": kind, "rows": args.rows, "turns": args.turns, "disk": args.disk}
    for name, turns in found.items():
        row[f"{name}_rate"] = round(statistics.median(turn.rate for turn in turns), 1)
        row[f"{name}_cpu_ms"] = round(statistics.median(turn.cpu_ms for turn in turns), 3)
    for name in ("plain", "encrypted"):
        pairs = list(zip(found[name], found["before"], strict=True))
        for field in Turn._fields:
            ratios = [getattr(one, field) / getattr(before, field) for one, before in pairs]
            low, median, high = (round(value, 3) for value in np.quantile(ratios, [0.25, 0.5, 0.75]))
            row |= {f"{name}_{field}_by_before": median, f"{name}_{field}_quartiles": f"{low}-{high}"}
    print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    if args.record:
        add_row("serve_requests", row)


def main() -> None:
    parser = script_parser(__doc__, rows=20_000, turns=15, seconds=1.0)
    parser.add_argument("--against", type=Path, metavar="CHECKOUT")
    parser.add_argument("--kinds", nargs="+", choices=tuple(KINDS), default=list(KINDS))
    parser.add_argument("--disk", default="a file system", help="what TMPDIR lies on, for the row")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--fill", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--key", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.fill:
        fill(args.fill, args.rows, args.key)
    elif args.against is None:
        sys.exit("--against CHECKOUT is needed")
    else:
        compare(args)


if __name__ == "__main__":
    main()
