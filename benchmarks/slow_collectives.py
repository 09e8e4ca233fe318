"""Does the planner know how long collectives take over a slow network? Gloo's, between two network namespaces.

    sudo python benchmarks/slow_collectives.py [--networks 100 1000] [--ranks 2 4] [--times 5]

The namespaces are joined by a link whose rate tc limits (benchmarks/slow_link.py), half of the ranks in each. Each
collective of a step runs as plsc calls it, one after another over the same link: the all-gather of embeddings, the
reduce-scatter of their gradients (on gloo an all-reduce, of which a rank keeps its slice) and the all-reduce of a
backbone's gradients. Prints the median seconds beside plsc.plan's, and adds a row for each to
benchmarks/results/slow_collectives.csv. About a minute; needs root and iproute2.
"""

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from results_file import RESULTS, add_row, script_parser
from slow_link import Network, output_of_ranks, require_privileges, slow_link

import plsc
from plsc.parallel.collectives import all_gather_equal, all_reduce_sum, barrier, reduce_scatter_rows
from plsc.parallel.mesh import shutdown
from plsc.plan import Links
from plsc.plan.devices import Collective

BATCH, DIM, NUMBERS = 512, 512, 2_000_000  # samples of a rank, of an embedding, of a backbone
PAYLOAD = 1448 / 1514  # of an Ethernet frame of TCP with time stamps
LOOPBACK = 1e9  # bytes per second between ranks of a namespace; far above the link's


def main() -> None:
    """Measure, predict, print, and add rows."""
    parser = script_parser(__doc__, times=5)
    parser.add_argument("--networks", nargs="+", type=int, default=[100, 1000], metavar="MBIT")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)  # a rank's
    args = parser.parse_args()
    if args.work:
        work(args.times)
        return
    require_privileges()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the namespaces are removed on the way out
    for mbit in args.networks:
        for ranks in args.ranks:
            network = Network(mbit)
            for name, seconds in measured(network, ranks, args.times).items():
                row = {"network": network.name, "ranks": ranks, "collective": name, "seconds": round(seconds, 4)}
                planned = predicted(name, mbit, ranks)
                row |= {"planned_seconds": round(planned, 4), "ratio": round(planned / seconds, 3)}
                print(row, flush=True)
                add_row("slow_collectives", row, args.out)


def predicted(name: str, mbit: int, ranks: int) -> float:
    """Seconds of a collective by the planner, half of the ranks to a node, which share its link."""
    per_node = ranks // 2
    links = Links(LOOPBACK, mbit * 1e6 / 8 * PAYLOAD / per_node)
    rows = 4 * BATCH * DIM
    summed = 2 * (ranks - 1) / ranks
    moved: dict[str, tuple[Collective, float]] = {
        "all-gather": ("all_gather", (ranks - 1) * rows),
        "reduce-scatter": ("all_reduce", summed * ranks * rows),
        "all-reduce": ("all_reduce", summed * 4 * NUMBERS),
    }
    collective, sent = moved[name]
    return links.seconds(sent, ranks, per_node, collective=collective)


def measured(network: Network, ranks: int, times: int) -> dict[str, float]:
    """Median seconds of each collective."""
    with slow_link(network) as ends:
        figures: dict[str, float] = json.loads(
            output_of_ranks(ends, ranks, [__file__, "--work", "--times", str(times)])
        )
    return figures


def work(times: int) -> None:
    """Run every collective in turn on this rank; the first one prints their median seconds as JSON."""
    torch.set_num_threads(1)
    mesh = plsc.init("cpu")
    ranks = mesh.world_size
    rows, every = torch.ones(BATCH, DIM), torch.ones(ranks * BATCH, DIM)
    gradients = torch.ones(NUMBERS)
    calls: dict[str, Callable[[], Any]] = {
        "all-gather": lambda: all_gather_equal(rows, mesh),
        "reduce-scatter": lambda: reduce_scatter_rows(every, [BATCH] * ranks, mesh),
        "all-reduce": lambda: all_reduce_sum(gradients, mesh),
    }
    figures = {}
    for name, call in calls.items():
        taken = []
        for _ in range(1 + times):  # the first one finds the link's burst unspent
            barrier(mesh)
            start = time.perf_counter()
            call()
            taken.append(time.perf_counter() - start)
        figures[name] = median(taken[1:])
    if mesh.is_main:
        print(json.dumps(figures))
    shutdown()


if __name__ == "__main__":
    main()
