"""Which exchange of gradients trains fastest over which network? Two ranks, each in its own network namespace.

    sudo python benchmarks/slow_network.py [--methods none dgc …] [--networks 1000 100 1000:20 …] [--rounds 2]

The namespaces are joined by a link whose rate tc limits (benchmarks/slow_link.py); RATE:MS adds a round-trip time. For
each network, two processes of one thread train IResNet-18 at 32 pixels by every method in turn, as often as there
are rounds. A rate is that of the fastest step, which work beside it disturbs least (of averages of weights, of the
fastest step with an exchange and the fastest without); the medians' rate stands beside it. CPU time is that of the
first rank, bytes are those that its device sent, with the headers of TCP. Prints a row per network and
method, and adds it to benchmarks/results/slow_network.csv. About 15 minutes on two idle cores; needs root, iproute2.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from results_file import add_row, script_parser
from slow_link import Network, output_of_ranks, require_privileges, slow_link

import plsc
from plsc import config as configuration
from plsc.native.allocator import keep_freed_memory
from plsc.parallel.mesh import shutdown
from plsc.train.metrics import METRICS
from plsc.train.trainer import train

BASE: dict[str, Any] = {
    "backbone": "iresnet18",
    "precision": "bf16",
    "data.train": "avatars:64x4",
    "data.image_size": 32,
    "data.batch_size": 16,
    "data.workers": 0,
    "log.every_steps": 1,
    "log.to": (),
}
METHODS: dict[str, dict[str, Any]] = {
    "none": {},
    "bf16": {"parallel.comm_hook": "bf16"},
    "powersgd": {"parallel.comm_hook": "powersgd", "parallel.powersgd_start_step": 2},
    "dgc": {"parallel.comm_hook": "dgc", "parallel.dgc_warmup_epochs": 0},
    "local_sgd": {"averaging.name": "local_sgd", "averaging.period": 8},
    "diloco": {"averaging.name": "diloco", "averaging.period": 16},
}
NETWORKS = ("1000", "100", "1000:20", "100:20")
FIRST_STEPS, STEPS = 3, 8  # DDP and PowerSGD begin anew after the first; of averages, a whole period is timed


def main() -> None:
    parser = script_parser(__doc__, results="slow_network", rounds=2)
    parser.add_argument("--methods", nargs="+", choices=tuple(METHODS), default=list(METHODS))
    parser.add_argument("--networks", nargs="+", type=_network, default=[_network(each) for each in NETWORKS])
    parser.add_argument("--work-in", type=Path, help=argparse.SUPPRESS)  # a rank's folder
    args = parser.parse_args()
    if args.work_in is not None:
        work(args.methods, args.rounds, args.work_in)
        return
    require_privileges()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the namespaces are removed on the way out
    for network in args.networks:
        plain = None
        for row in measured(network, args.methods, args.rounds):
            plain = row["steps_per_second"] if plain is None else plain  # of the first method
            row["times_first"] = round(row["steps_per_second"] / plain, 2)
            print(f"{network.name:>18} " + " ".join(f"{name} {value}" for name, value in row.items()), flush=True)
            add_row("slow_network", {"network": network.name, "rounds": args.rounds, **row}, args.out)


def _network(text: str) -> Network:
    rate, _, delay = text.partition(":")
    return Network(int(rate), float(delay or 0))


def measured(network: Network, methods: list[str], rounds: int) -> list[dict[str, Any]]:
    """Train over ``network`` by each method in turn, ``rounds`` times; a row of medians for each."""
    with slow_link(network) as ends, tempfile.TemporaryDirectory() as folder:
        options = ["--methods", *methods, "--rounds", str(rounds), "--work-in", folder]
        output = output_of_ranks(ends, 2, [__file__, *options])
    figures: dict[str, list[dict[str, Any]]] = {method: [] for method in methods}
    for line in output.splitlines():
        figure = json.loads(line)
        figures[figure["method"]].append(figure)
    return [_row(method, figures[method]) for method in methods]


def _row(method: str, figures: list[dict[str, Any]]) -> dict[str, Any]:
    """Rates by each kind of step, those that end with an average of weights and those that do not."""
    period: int = METHODS[method].get("averaging.period", 1)
    ends = [(FIRST_STEPS + 1 + index) % period == 0 for index in range(len(figures[0]["steps"]))]
    kinds: list[tuple[int, list[dict[str, float]]]] = [
        (times, [step for each in figures for step, end in zip(each["steps"], ends, strict=True) if end is is_end])
        for is_end, times in ((True, 1), (False, period - 1))
        if times
    ]

    def mean(column: str, choose: Callable[[list[float]], float]) -> float:
        total: float = sum(times * choose([step[column] for step in steps]) for times, steps in kinds)
        return total / period

    return {
        "method": method,
        "steps_per_second": round(1 / mean("seconds", min), 3),
        "median_steps_per_second": round(1 / mean("seconds", median), 3),
        "cpu_seconds_per_step": round(mean("cpu_seconds", median), 3),
        "sent_mb_per_step": round(mean("sent_mb", median), 3),
    }


# In a rank -----------------------------------------------------------------------------------------------------------


def work(methods: list[str], rounds: int, folder: Path) -> None:
    """Train by every method in turn; the first rank prints a line of JSON for each time."""
    torch.set_num_threads(1)
    keep_freed_memory()  # as plsc train does
    mesh = plsc.init("cpu")
    for number in range(rounds):
        for method in methods:
            steps = METHODS[method].get("averaging.period", STEPS)
            settings = {**BASE, **METHODS[method], "steps": FIRST_STEPS + steps}
            out = folder / f"{method}-{number}"
            with _marks(out / METRICS) as marks:
                train(configuration.load(overrides=settings), mesh, out=out, quiet=True)
            if mesh.is_main:
                steps_taken = [_difference(*pair) for pair in pairwise(marks[FIRST_STEPS - 1 : FIRST_STEPS + steps])]
                print(json.dumps({"method": method, "steps": steps_taken}), flush=True)
    shutdown()


def _difference(before: tuple[float, float, int], after: tuple[float, float, int]) -> dict[str, float]:
    seconds, cpu_seconds, sent = (b - a for a, b in zip(before, after, strict=True))
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "sent_mb": sent / 1e6}


@contextmanager
def _marks(path: Path) -> Iterator[list[tuple[float, float, int]]]:
    """Yield a list that gets (time, CPU time, bytes sent by the device) as ``path`` gets the line of each step."""
    marks: list[tuple[float, float, int]] = []
    counter = Path(f"/sys/class/net/{os.environ['LINK_DEVICE']}/statistics/tx_bytes")
    over = threading.Event()

    def look() -> None:
        if path.exists():
            lines = path.read_bytes().count(b"\n")
            marks.extend([(time.monotonic(), time.process_time(), int(counter.read_text()))] * (lines - len(marks)))

    def watch() -> None:
        while not over.wait(0.002):
            look()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield marks
    finally:
        over.set()
        thread.join()
        look()


if __name__ == "__main__":
    main()
