"""What the service's HTTP costs without a scan, and what each library under it saves.

    python benchmarks/serve_http.py [--rounds 5] [--clients 32]

`plsc serve` with a store that answers at once: as it is; on asyncio's own event loop instead of uvloop's; with the
standard library's base64 instead of pybase64. Each in a process of its own, all in turn; prints the medians and adds
them to benchmarks/results/serve_http.csv. 15 seconds a round on two cores.
"""

import argparse
import binascii
import contextlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

from results_file import add_row, script_parser

from plsc.bench.serve_worker import COLLECTION, make_gallery, send_load
from plsc.gallery.sqlite.store import SqliteStore
from plsc.gallery.values import Match
from plsc.tools.entry import main as plsc

ROWS, DIM = 1000, 512
VARIANTS = {
    "as it is": "everything",
    "asyncio": "without uvloop",
    "binascii": "without pybase64",
}


def serve(variant: str, folder: str) -> None:
    """Serve the gallery in ``folder`` with ten matches for every query, without what ``variant`` leaves out."""
    matches = [Match(place, place, 1 - place / 100) for place in range(1, 11)]
    model, store = f"{folder}/model.safetensors", f"{folder}/store"
    with contextlib.ExitStack() as patched:
        patched.enter_context(mock.patch.object(SqliteStore, "search", partial(answered, matches)))
        if variant == "asyncio":
            patched.enter_context(mock.patch("plsc.serve.server.find_spec", return_value=None))
        if variant == "binascii":
            patched.enter_context(mock.patch("pybase64.b64decode", decoded))
        raise SystemExit(plsc(["serve", "--model", model, "--store", store, "--port", "0", "--device", "cpu"]))


def answered(matches: list[Match], collection: str, queries: Any, **asked: Any) -> list[list[Match]]:
    """A store's search without searching."""
    return [matches] * len(queries)


def decoded(text: str, validate: bool) -> bytes:
    """The standard library's decoding."""
    return binascii.a2b_base64(text, strict_mode=validate)


@contextlib.contextmanager
def served(variant: str, folder: str) -> Iterator[str]:
    """The address of a running service."""
    command = [sys.executable, __file__, "--serve", variant, "--folder", folder]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[2].rstrip(":")
    finally:
        process.terminate()
        process.wait()


def rate(address: str, folder: str, clients: int) -> float:
    """Requests a second over two seconds, by callers in this process."""
    task: dict[str, Any] = {
        "data": folder,
        "address": address,
        "path": f"/v1/collections/{COLLECTION}/search",
        "clients": clients,
        "seconds": 2.0,
        "form": "vector_b64",
    }
    return float(send_load(task)["qps"])


def compare(rounds: int, clients: int) -> None:
    """Let all take turns, and write down what they did."""
    found: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    with tempfile.TemporaryDirectory() as folder:
        make_gallery({"data": folder, "rows": ROWS, "dim": DIM})
        for _ in range(rounds):
            for variant in VARIANTS:
                with served(variant, folder) as address:
                    found[variant].append(rate(address, folder, clients))
    for variant, label in VARIANTS.items():
        ratio = statistics.median(whole / one for whole, one in zip(found["as it is"], found[variant], strict=True))
        median = statistics.median(found[variant])
        print(f"{label}: {median:,.0f} requests/s; as it is, {ratio:.2f} times as many")
        add_row(
            "serve_http",
            {
                "variant": label,
                "clients": clients,
                "rounds": rounds,
                "requests_per_second": round(median, 1),
                "whole_by_this": round(ratio, 3),
            },
        )


def main() -> None:
    parser = script_parser(__doc__, rounds=5, clients=32)
    parser.add_argument("--serve", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.folder)
    compare(args.rounds, args.clients)


if __name__ == "__main__":
    main()
