"""Measure this project beside its peers, in one run and in turn.

plsc bench head                                     class heads on this machine, in about two minutes
plsc bench head --partial-fc insightface/recognition/arcface_torch --classes 500000 --out results
plsc bench search                                   exact search beside numpy, faiss and usearch, four minutes
plsc bench serve                                    the service with and without batching, four minutes
"""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from plsc.errors import UsageError

HELP = "measure the class head, the search or the service beside its peers"
_SIZES: dict[str, dict[str, list[int]]] = {
    "cpu": {"classes": [10_000, 100_000], "batch": [64]},
    "cuda": {"classes": [100_000, 1_000_000, 10_000_000], "batch": [1024]},
}
_HEAD = """Compare class heads: a step is forward, backward and update, of the head alone.

Each contestant runs in freshly started ranks of its own, so that its memory is its own; all take their turn, and
that --rounds times. Shown are medians, per step and rank. The floor is what the machine's rate at one bfloat16
product, measured in the same run, implies for the four products of an exact step (8·B·C·D operations).

contestants: plsc (bf16 weights, int8 momentum), plsc-no-momentum (bf16), plsc-fp32, plsc-sampled,
plsc-fp32-sampled; dense (all logits, autograd) and linear-cross-entropy (torch's fused loss, no margin), both with
DistributedDataParallel; partial-fc and partial-fc-sampled (insightface's PartialFC_V2, read from the folder that
--partial-fc names); floor.

A contestant that fails or does not fit gets a row that says why.
"""
_SEARCH = """Compare exact searches for the ten nearest of many unit vectors, gathered by identity as faces are.

Each contestant searches in freshly started processes, all take their turn, and that --rounds times. Recall is against
float64; memory is the peak above the libraries.

contestants: plsc (bf16 candidates, ranked in high precision), plsc-fp32, numpy, faiss (as shipped), faiss-tuned (the
best of four block sizes for each batch), usearch (where it is installed).
"""
_SERVE = """Measure the service with callers on this machine, each with one request in flight.

A gallery of persons with a face each is enrolled; then plsc serve, plsc serve --max-batch 1 and the store alone
(asked for as many queries at once as there are callers) take turns, --rounds times, each in fresh processes. The
callers are one process that speaks HTTP by hand, and share the cores with the service.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the sub-commands."""
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    head = commands.add_parser(
        "head",
        help="class heads: time and memory over the number of classes",
        description=_HEAD,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = head.add_argument
    add("--classes", type=int, nargs="+", metavar="C", help="(10000 100000; on a GPU 100000 1000000 10000000)")
    add("--batch", type=int, nargs="+", metavar="B", help="samples per rank (64; on a GPU 1024)")
    add("--dim", type=int, default=512, metavar="D", help="width of the embeddings (512)")
    add("--nproc", type=int, metavar="N", help="ranks (2; on GPUs as many as there are)")
    add("--threads", type=int, default=1, metavar="T", help="CPU threads of a rank (1)")
    add("--rounds", type=int, default=2, metavar="N", help="turns of every contestant (2)")
    add("--steps", type=int, default=3, metavar="N", help="measured steps of a turn, after one that is not (3)")
    add("--sample-rate", type=float, default=0.1, metavar="R", help="of the sampled contestants (0.1)")
    add("--contestants", nargs="+", metavar="NAME", help="only these, in this order")
    add("--partial-fc", type=Path, metavar="FOLDER", help="recognition/arcface_torch of an insightface checkout")
    add("--device", choices=("cpu", "cuda"), help="(cuda where there is a GPU)")
    add("--limit", type=float, default=300, metavar="S", help="seconds that a turn may take (300)")
    add("--out", type=Path, metavar="FOLDER", help="write head.csv and head.png into it")
    _add_json(head)
    _configure_search(commands)


def _add_json(command: argparse.ArgumentParser) -> None:
    # The outer parser has --json too, before the sub-command; here it may follow.
    text = "write the result into FILE as JSON"
    command.add_argument("--json", metavar="FILE", type=Path, default=argparse.SUPPRESS, help=text)


def _configure_search(commands: Any) -> None:
    search = commands.add_parser(
        "search",
        help="exact searches: queries per second, latency, memory",
        description=_SEARCH,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = search.add_argument
    add("--rows", type=int, default=200_000, metavar="N", help="vectors searched (200000)")
    add("--dim", type=int, default=512, metavar="D", help="their width (512)")
    add("--batch", type=int, nargs="+", default=[1, 32, 256], metavar="B", help="queries in a search (1 32 256)")
    add("--threads", type=int, default=min(2, os.cpu_count() or 1), metavar="T", help="CPU threads (2)")
    add("--rounds", type=int, default=3, metavar="N", help="turns of every contestant (3)")
    add("--seconds", type=float, default=1.0, metavar="S", help="that a turn measures each batch (1)")
    add("--limit", type=float, default=300, metavar="S", help="seconds that a turn may take (300)")
    add("--contestants", nargs="+", metavar="NAME", help="only these, in this order")
    add("--out", type=Path, metavar="FOLDER", help="write search.csv and search.png into it")
    _add_json(search)
    _add_serve(commands)


def _add_serve(commands: Any) -> None:
    serve = commands.add_parser(
        "serve",
        help="the service: searches per second and latency over the callers",
        description=_SERVE,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = serve.add_argument
    add("--rows", type=int, default=200_000, metavar="N", help="persons in the gallery (200000)")
    add("--dim", type=int, default=512, metavar="D", help="width of the embeddings (512)")
    add("--clients", type=int, nargs="+", default=[1, 8, 32, 64], metavar="C", help="callers at once (1 8 32 64)")
    add("--threads", type=int, default=min(2, os.cpu_count() or 1), metavar="T", help="CPU threads (2)")
    add("--rounds", type=int, default=3, metavar="N", help="turns of each (3)")
    add("--seconds", type=float, default=3.0, metavar="S", help="that a turn measures each number of callers (3)")
    add("--form", default="vector_b64", metavar="F", help="how queries are sent: vector or vector_b64 (vector_b64)")
    add("--limit", type=float, default=900, metavar="S", help="seconds that a step may take (900)")
    add("--out", type=Path, metavar="FOLDER", help="write serve.csv and serve.png into it")
    _add_json(serve)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run the sub-command; its result is what --json writes."""
    return {"head": _head, "search": _search, "serve": _serve}[args.command](args)


def _head(args: argparse.Namespace) -> dict[str, Any]:
    from plsc.bench.compare import compare
    from plsc.bench.report import draw, ratio_lines, table
    from plsc.files import make_folder

    comparison = _comparison(args)
    if args.out is not None:
        make_folder(args.out)
    if args.partial_fc is None:
        print("PartialFC_V2 is left out: --partial-fc FOLDER names a checkout that has it", file=sys.stderr)
    result = compare(comparison)
    print(table(result["rows"]))
    if text := ratio_lines(result["ratios"], result["rows"]):
        print(f"\n{text}")
    _write(args, result["rows"], draw)
    return result


def _write(
    args: argparse.Namespace, rows: list[dict[str, Any]], draw: Callable[[list[dict[str, Any]], Path], None]
) -> None:
    """The rows and their picture, named after the command, where --out asks for them."""
    from plsc.bench.report import write_csv

    if args.out is None:
        return
    table, picture = args.out / f"{args.command}.csv", args.out / f"{args.command}.png"
    write_csv(rows, table)
    draw(rows, picture)
    print(f"\nwritten: {table}, {picture}")


def _search(args: argparse.Namespace) -> dict[str, Any]:
    from plsc.bench.search import SearchComparison, compare_searches
    from plsc.bench.search_contestants import CONTESTANTS
    from plsc.bench.search_report import draw_searches, search_table
    from plsc.files import make_folder

    comparison = SearchComparison(
        args.contestants or tuple(CONTESTANTS),
        args.rows,
        args.dim,
        args.batch,
        args.threads,
        args.rounds,
        args.seconds,
        args.limit,
    )
    if args.out is not None:
        make_folder(args.out)
    result = compare_searches(comparison)
    print(search_table(result["rows"], result["ratios"]))
    _write(args, result["rows"], draw_searches)
    return result


def _serve(args: argparse.Namespace) -> dict[str, Any]:
    from plsc.bench.serve import ServeComparison, compare_serving
    from plsc.bench.serve_report import draw_serving, serve_table
    from plsc.files import make_folder

    comparison = ServeComparison(
        args.rows, args.dim, args.clients, args.threads, args.rounds, args.seconds, args.form, args.limit
    )
    if args.out is not None:
        make_folder(args.out)
    result = compare_serving(comparison)
    print(serve_table(result["rows"], result["ratios"]))
    _write(args, result["rows"], draw_serving)
    return result


def _comparison(args: argparse.Namespace) -> Any:
    from plsc.bench.compare import Comparison
    from plsc.bench.contestants import CONTESTANTS, FLOOR, NEED_PARTIAL_FC

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no GPU here; leave it out to measure on the CPU")
    everyone = [FLOOR, *(name for name in CONTESTANTS if args.partial_fc is not None or name not in NEED_PARTIAL_FC)]
    nproc = args.nproc
    if nproc is None:
        nproc = torch.cuda.device_count() if device == "cuda" else min(2, os.cpu_count() or 1)
    return Comparison(
        contestants=args.contestants if args.contestants is not None else everyone,
        classes=args.classes if args.classes is not None else _SIZES[device]["classes"],
        batches=args.batch if args.batch is not None else _SIZES[device]["batch"],
        dim=args.dim,
        nproc=nproc,
        threads=args.threads,
        rounds=args.rounds,
        steps=args.steps,
        device=device,
        sample_rate=args.sample_rate,
        partial_fc=args.partial_fc,
        limit=args.limit,
    )


if __name__ == "__main__":
    from plsc.tools.entry import main

    raise SystemExit(main(["bench", *sys.argv[1:]]))
