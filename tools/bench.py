"""Measure this project against its baselines, in one run and in turn.

plsc bench head                                     class heads on this machine, in about two minutes
plsc bench head --partial-fc insightface/recognition/arcface_torch --classes 500000 --out results
plsc bench train                                    backbone and head, and arcface_torch's loop, two minutes
plsc bench search                                   exact search beside numpy, faiss and usearch, four minutes
plsc bench serve                                    the service with and without batching, four minutes
"""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from plsc.errors import UsageError
from plsc.progress import note, show
from plsc.tools.entry import add_result_options

HELP = "measure the class head, training, the search or the service against its baselines"
_SIZES: dict[str, dict[str, list[int]]] = {
    "cpu": {"classes": [10_000, 100_000], "batch": [64]},
    "cuda": {"classes": [100_000, 1_000_000, 10_000_000], "batch": [1024]},
}
_TRAINED: dict[str, dict[str, Any]] = {
    "cpu": {"backbone": "iresnet18", "classes": 10_000, "batch": 8, "precision": "fp32"},
    "cuda": {"backbone": "iresnet50", "classes": 1_000_000, "batch": 128, "precision": "fp16"},
}
_HEAD = """Compare class heads: a step is forward, backward and update, of the head alone.

Each head runs in freshly started ranks of its own, so that its memory is its own; all take turns, --rounds times.
Shown are medians, per step and rank. The roofline is what the machine's rate at one matrix product, measured in the
same run, implies for the four products of an exact step (8·B·C·D operations).

contestants: plsc (bf16 weights, int8 momentum), plsc-no-momentum (bf16), plsc-fp32, plsc-sampled,
plsc-fp32-sampled; dense (all logits, autograd) and linear-cross-entropy (torch's fused loss, no margin), both with
DistributedDataParallel; partial-fc and partial-fc-sampled (insightface's PartialFC_V2, read from the folder that
--partial-fc names); floor (the roofline).

A head that fails or does not fit into memory gets a row with the reason.
"""
_TRAIN = """Compare training loops: a step is forward, backward and update of backbone and class head; no data is read.

Each loop runs in freshly started ranks of its own, so that its memory is its own; all take turns, --rounds times.
Shown are medians: images per second of all ranks, and seconds per step and rank. All train the same backbone by SGD
with ArcFace, and clip its gradient at 5. Ours normalises uint8 images on the device; the others get them ready.

contestants: plsc (the step of `plsc train`; table in bf16 with int8 momentum), plsc-fp32 (table in float32),
arcface-torch (insightface's own backbone and PartialFC_V2, read from the folder that --arcface-torch names, under the
loop of its train_v2.py written again), plain (our backbone under DistributedDataParallel, all logits, autograd).

A loop that fails or does not fit into memory gets a row with the reason.
"""
_SEARCH = """Compare exact searches for the ten nearest of many unit vectors, clustered by identity as faces are.

Each search runs in freshly started processes; all take turns, --rounds times. Recall is against float64; memory is
the peak above the libraries.

contestants: plsc (bf16 candidates, ranked in high precision), plsc-fp32, numpy, faiss (as shipped), faiss-tuned (the
best of four block sizes for each batch), usearch (where it is installed).
"""
_SERVE = """Measure the service with callers on this machine, each with one request in flight.

A gallery of people with a face each is enrolled; then plsc serve, plsc serve --max-batch 1 and the store alone
(searching for as many queries at once as there are callers) take turns, --rounds times, each in fresh processes. The
callers are one process, and share the cores with the service.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the sub-commands."""
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _configure_head(commands)
    _configure_train(commands)
    _configure_search(commands)
    _configure_serve(commands)


def _configure_head(commands: Any) -> None:
    head = _command(commands, "head", "class heads: time and memory over the number of classes", _HEAD)
    add = head.add_argument
    add("--classes", type=int, nargs="+", metavar="C", help="(10000 100000; on a GPU 100000 1000000 10000000)")
    add("--batch", type=int, nargs="+", metavar="B", help="samples per rank (64; on a GPU 1024)")
    add("--dim", type=int, default=512, metavar="D", help="width of the embeddings (512)")
    add("--nproc", type=int, metavar="N", help="ranks (2; on GPUs as many as there are)")
    add("--threads", type=int, default=1, metavar="T", help="CPU threads of a rank (1)")
    add("--rounds", type=int, default=2, metavar="N", help="turns of every head (2)")
    add("--steps", type=int, default=3, metavar="N", help="measured steps of a turn, after one that is not (3)")
    add("--sample-rate", type=float, default=0.1, metavar="R", help="share of classes of the sampled heads (0.1)")
    add("--contestants", nargs="+", metavar="NAME", help="only these, in this order")
    add("--partial-fc", type=Path, metavar="FOLDER", help="recognition/arcface_torch of an insightface checkout")
    add("--device", choices=("cpu", "cuda"), help="(cuda where there is a GPU)")
    add("--limit", type=float, default=300, metavar="S", help="seconds that a turn may take (300)")


def _configure_train(commands: Any) -> None:
    train = _command(commands, "train", "training loops: images per second and memory of backbone and head", _TRAIN)
    add = train.add_argument
    add("--backbone", metavar="NAME", help="(iresnet18; on a GPU iresnet50)")
    add("--classes", type=int, metavar="C", help="(10000; on a GPU 1000000)")
    add("--batch", type=int, metavar="B", help="images per rank (8; on a GPU 128)")
    add("--image-size", type=int, default=112, metavar="S", help="side of the images (112, arcface_torch's only one)")
    add("--dim", type=int, default=512, metavar="D", help="width of the embeddings (512)")
    add("--nproc", type=int, metavar="N", help="ranks (2; on GPUs as many as there are)")
    add("--threads", type=int, default=1, metavar="T", help="CPU threads of a rank (1)")
    add("--precision", choices=("fp32", "bf16", "fp16"), help="of the backbone (fp32; on a GPU fp16)")
    add("--rounds", type=int, default=2, metavar="N", help="turns of every loop (2)")
    add("--steps", type=int, default=3, metavar="N", help="measured steps of a turn, after two that are not (3)")
    add("--contestants", nargs="+", metavar="NAME", help="only these, in this order")
    add("--arcface-torch", type=Path, metavar="FOLDER", help="recognition/arcface_torch of an insightface checkout")
    add("--device", choices=("cpu", "cuda"), help="(cuda where there is a GPU)")
    add("--limit", type=float, default=300, metavar="S", help="seconds that a turn may take (300)")


def _configure_search(commands: Any) -> None:
    search = _command(commands, "search", "exact searches: queries per second, latency, memory", _SEARCH)
    add = search.add_argument
    add("--rows", type=int, default=200_000, metavar="N", help="vectors searched (200000)")
    add("--dim", type=int, default=512, metavar="D", help="their width (512)")
    add("--batch", type=int, nargs="+", default=[1, 32, 256], metavar="B", help="queries in a search (1 32 256)")
    add("--threads", type=int, default=min(2, os.cpu_count() or 1), metavar="T", help="CPU threads (2)")
    add("--rounds", type=int, default=3, metavar="N", help="turns of every search (3)")
    add("--seconds", type=float, default=1.0, metavar="S", help="seconds of each batch size in a turn (1)")
    add("--limit", type=float, default=300, metavar="S", help="seconds that a turn may take (300)")
    add("--contestants", nargs="+", metavar="NAME", help="only these, in this order")


def _configure_serve(commands: Any) -> None:
    serve = _command(commands, "serve", "the service: searches per second and latency over the callers", _SERVE)
    add = serve.add_argument
    add("--rows", type=int, default=200_000, metavar="N", help="people in the gallery (200000)")
    add("--dim", type=int, default=512, metavar="D", help="width of the embeddings (512)")
    add("--clients", type=int, nargs="+", default=[1, 8, 32, 64], metavar="C", help="callers at once (1 8 32 64)")
    add("--threads", type=int, default=min(2, os.cpu_count() or 1), metavar="T", help="CPU threads (2)")
    add("--rounds", type=int, default=3, metavar="N", help="turns of each (3)")
    add("--seconds", type=float, default=3.0, metavar="S", help="seconds of each number of callers in a turn (3)")
    add("--form", default="vector_b64", metavar="F", help="encoding of queries: vector or vector_b64 (vector_b64)")
    add("--limit", type=float, default=900, metavar="S", help="seconds that a step may take (900)")


def _command(commands: Any, name: str, summary: str, description: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=description,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--out", type=Path, metavar="FOLDER", help=f"write {name}.csv and {name}.png into it")
    add_result_options(command, subcommand=True)
    return command


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run the sub-command; its result is what --json writes."""
    return {"head": _head, "train": _train, "search": _search, "serve": _serve}[args.command](args)


def _head(args: argparse.Namespace) -> dict[str, Any]:

    from plsc.bench.head import HeadComparison, compare_heads
    from plsc.bench.head_baselines import IMPLEMENTATIONS, NEED_PARTIAL_FC, ROOFLINE
    from plsc.bench.report import draw_heads, head_table

    device, ranks = _device(args)
    default_names = [ROOFLINE, *(name for name in IMPLEMENTATIONS if args.partial_fc or name not in NEED_PARTIAL_FC)]
    comparison = HeadComparison(
        args.contestants if args.contestants is not None else default_names,
        args.classes if args.classes is not None else _SIZES[device]["classes"],
        args.batch if args.batch is not None else _SIZES[device]["batch"],
        args.dim,
        args.nproc if args.nproc is not None else ranks,
        args.threads,
        args.rounds,
        args.steps,
        device,
        args.sample_rate,
        args.partial_fc,
        args.limit,
    )
    if args.partial_fc is None:
        note("PartialFC_V2 is left out: --partial-fc FOLDER names a checkout that has it")
    return _report(args, lambda: compare_heads(comparison), head_table, draw_heads)


def _device(args: argparse.Namespace) -> tuple[str, int]:
    """The device asked for, or the GPU where there is one; and how many ranks it has by default."""
    import torch

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no GPU here; leave it out to measure on the CPU")
    return device, torch.cuda.device_count() if device == "cuda" else min(2, os.cpu_count() or 1)


def _train(args: argparse.Namespace) -> dict[str, Any]:
    from plsc.bench.report import draw_training, train_table
    from plsc.bench.train import TrainComparison, compare_training
    from plsc.bench.train_baselines import LOOPS, NEEDS_PEER

    device, ranks = _device(args)
    defaults = _TRAINED[device] | {"nproc": ranks}
    defaults["contestants"] = [name for name in LOOPS if args.arcface_torch or name != NEEDS_PEER]
    given = {name: getattr(args, name) for name in defaults if getattr(args, name) is not None}
    values = {**defaults, **given}
    comparison = TrainComparison(
        values["contestants"],
        values["backbone"],
        values["classes"],
        values["batch"],
        args.image_size,
        args.dim,
        values["nproc"],
        args.threads,
        args.rounds,
        args.steps,
        device,
        values["precision"],
        args.arcface_torch,
        args.limit,
    )
    if args.arcface_torch is None:
        note("arcface_torch is left out: --arcface-torch FOLDER names a checkout that has it")
    return _report(args, lambda: compare_training(comparison), train_table, draw_training)


def _search(args: argparse.Namespace) -> dict[str, Any]:
    from plsc.bench.report import draw_searches, search_table
    from plsc.bench.search import IMPLEMENTATIONS, SearchComparison, compare_searches

    comparison = SearchComparison(
        args.contestants or tuple(IMPLEMENTATIONS),
        args.rows,
        args.dim,
        args.batch,
        args.threads,
        args.rounds,
        args.seconds,
        args.limit,
    )
    return _report(args, lambda: compare_searches(comparison), search_table, draw_searches)


def _serve(args: argparse.Namespace) -> dict[str, Any]:
    from plsc.bench.report import draw_serving, serve_table
    from plsc.bench.serve import ServeComparison, compare_serving

    comparison = ServeComparison(
        args.rows, args.dim, args.clients, args.threads, args.rounds, args.seconds, args.form, args.limit
    )
    return _report(args, lambda: compare_serving(comparison), serve_table, draw_serving)


def _report(
    args: argparse.Namespace,
    compare: Callable[[], dict[str, Any]],
    table: Callable[[Any, Any], str],
    draw: Callable[[Any, Path], None],
) -> dict[str, Any]:
    """Compare, print the table, and write CSV and picture where --out asks for them."""
    from plsc.bench.harness import write_csv
    from plsc.files import make_folder

    if args.out is not None:
        make_folder(args.out)  # a folder that cannot be written fails now, not after minutes
    result = compare()
    show(*table(result["rows"], result["ratios"]).split("\n"))
    if args.out is not None:
        csv_path, picture = args.out / f"{args.command}.csv", args.out / f"{args.command}.png"
        write_csv(result["rows"], csv_path)
        draw(result["rows"], picture)
        show("", f"written: {csv_path}, {picture}")
    return result


if __name__ == "__main__":
    from plsc.tools.entry import main

    raise SystemExit(main(["bench", *sys.argv[1:]]))
