"""Measure this project against its baselines, in one run and in turn.

plsc bench head                                     class heads on this machine, in about two minutes
plsc bench head --partial-fc insightface/recognition/arcface_torch --classes 500000 --out results
plsc bench head --units --classes 500000            by AMX, AVX-512 BF16, AVX-512, AVX2 in turn, beside their floors
plsc bench train                                    backbone and head, and arcface_torch's loop, two minutes
plsc bench train --variants --backbone vit_base     our loop alone: fp32, bf16, compiled, as CUDA graphs, in fp8
plsc bench search                                   exact search beside numpy, faiss and usearch, four minutes
plsc bench cluster                                  spherical k-means beside faiss, from the same first centres
plsc bench data                                     reading pictures, beside webdataset, torchvision and datasets
plsc bench serve                                    the service with and without batching, four minutes

The baselines are no part of the package: they stand in benchmarks/baselines.py of a checkout. plsc finds the file if it
runs from a checkout; else --baselines FILE names it, and without it ours are measured alone.
"""

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from plsc.errors import UsageError
from plsc.progress import note, show
from plsc.tools.entry import above_0, add_action, add_actions, natural, number, positive

HELP = "measure the class head, training, the search, k-means, reading or the service against its baselines"
_SIZES: dict[str, dict[str, Any]] = {
    "cpu": {"classes": [10_000, 100_000], "batch": [64]},
    "cuda": {"classes": [100_000, 1_000_000, 10_000_000], "batch": [1024]},
}
_TRAINED: dict[str, dict[str, Any]] = {
    "cpu": {"backbone": "iresnet18", "classes": [10_000], "batch": [8], "precision": "fp32"},
    "cuda": {"backbone": "iresnet50", "classes": [1_000_000], "batch": [128], "precision": "fp16"},
}
_QUERIES = number(int, lambda value: 1 <= value <= 1024, "it must lie between 1 and 1024")  # plsc.bench.search.QUERIES
_SHARE = number(float, lambda value: 0 < value < 1, "it must lie between 0 and 1")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the sub-commands."""
    actions = add_actions(parser, "COMMAND")
    _configure_steps(actions)
    _configure_queries(actions)


def _configure_steps(actions: Any) -> None:
    head = _command(actions, "head", _head, "class heads: time and memory over the number of classes")
    text = "training loops: images per second and memory of backbone and head"
    train = _command(actions, "train", _train, text)
    add = head.add_argument
    add("--classes", type=positive, nargs="+", metavar="C", help="(10000 100000; on a GPU 100000 1000000 10000000)")
    add("--batch", type=positive, nargs="+", metavar="B", help="samples per rank (64; on a GPU 1024)")
    add("--units", action="store_true", help="by each unit of this processor, beside its fastest product's time")
    add("--sample-rate", type=_SHARE, default=0.1, metavar="R", help="share of classes of the sampled heads (0.1)")
    peer = "recognition/arcface_torch of an insightface checkout"
    add("--partial-fc", dest="peer", type=Path, metavar="FOLDER", help=peer)
    add = train.add_argument
    add("--backbone", metavar="NAME", help="(iresnet18; on a GPU iresnet50)")
    add("--classes", type=positive, nargs=1, metavar="C", help="(10000; on a GPU 1000000)")
    add("--batch", type=positive, nargs=1, metavar="B", help="images per rank (8; on a GPU 128)")
    add(
        "--image-size",
        type=positive,
        default=112,
        metavar="S",
        help="side of the images (112, arcface_torch's only one)",
    )
    add("--precision", choices=("fp32", "bf16", "fp16"), help="of the backbone (fp32; on a GPU fp16)")
    add("--variants", action="store_true", help="our loop in its variants, on one rank")
    add("--arcface-torch", dest="peer", type=Path, metavar="FOLDER", help=peer)
    for command, unmeasured in ((head, "one that is"), (train, "two that are")):
        add = command.add_argument
        add("--nproc", type=positive, metavar="N", help="ranks (2; on GPUs as many as there are)")
        text = f"measured steps of a turn, after {unmeasured} not (3)"
        add("--steps", type=positive, default=3, metavar="N", help=text)
        add("--device", choices=("cpu", "cuda"), help="(cuda where there is a GPU)")


def _configure_queries(actions: Any) -> None:
    threads = min(2, os.cpu_count() or 1)
    text = "exact searches: queries per second, latency, memory"
    search = _command(actions, "search", _search, text, rounds=3, threads=threads)
    text = "reading pictures: images per CPU second, by form of data set"
    data = _command(actions, "data", _data, text, rounds=3, dim=None)
    add = data.add_argument
    add("--images", type=positive, default=4000, metavar="N", help="pictures, drawn faces of 112 pixels (4000)")
    text = "numbers of loader processes; 0 reads in the process itself (0 2)"
    add("--workers", type=natural, nargs="+", default=[0, 2], metavar="N", help=text)
    add("--batch", type=positive, default=128, metavar="B", help="images in a batch (128)")
    add("--passes", type=positive, default=3, metavar="N", help="times that a turn reads all pictures (3)")
    text = "the service: searches per second and latency over the callers"
    serve = _command(actions, "serve", _serve, text, rounds=3, threads=threads, limit=900.0)
    text = "spherical k-means: CPU time and inertia"
    cluster = _command(actions, "cluster", _cluster, text, rounds=1, threads=threads, limit=3600.0, dim=256)
    add = cluster.add_argument
    add("--rows", type=positive, default=200_000, metavar="N", help="points (200000)")
    add("--k", type=positive, default=10_000, metavar="K", help="centres (10000)")
    add("--iterations", type=positive, default=25, metavar="N", help="(25)")
    for command, rows in ((search, "vectors searched"), (serve, "people in the gallery")):
        command.add_argument("--rows", type=positive, default=200_000, metavar="N", help=f"{rows} (200000)")
    add = search.add_argument
    add("--batch", type=_QUERIES, nargs="+", default=[1, 32, 256], metavar="B", help="queries in a search (1 32 256)")
    add("--seconds", type=above_0, default=1.0, metavar="S", help="seconds of each batch size in a turn (1)")
    add = serve.add_argument
    add("--clients", type=_QUERIES, nargs="+", default=[1, 8, 32, 64], metavar="C", help="callers at once (1 8 32 64)")
    add("--seconds", type=above_0, default=3.0, metavar="S", help="seconds of each number of callers in a turn (3)")
    add("--form", choices=("vector", "vector_b64"), default="vector_b64", help="encoding of queries (vector_b64)")


def _command(
    actions: Any,
    name: str,
    run: Any,
    text: str,
    *,
    rounds: int = 2,
    threads: int = 1,
    limit: float = 300.0,
    dim: int | None = 512,
) -> argparse.ArgumentParser:
    """Declare a sub-command with the options that all have; the numbers are defaults. None: there is no --dim."""
    command = add_action(actions, name, run, text)
    add = command.add_argument
    if dim is not None:
        add("--dim", type=positive, default=dim, metavar="D", help="width of the embeddings (%(default)d)")
    add("--threads", type=positive, default=threads, metavar="T", help="CPU threads of a process (%(default)d)")
    add("--rounds", type=positive, default=rounds, metavar="N", help="turns of each (%(default)d)")
    add("--limit", type=above_0, default=limit, metavar="S", help="seconds that a turn may take (%(default)g)")
    add("--out", type=Path, metavar="FOLDER", help=f"write {name}.csv and {name}.png into it")
    if name != "serve":
        add("--contestants", nargs="+", metavar="NAME", help="only these, in this order")
        text = "benchmarks/baselines.py of a checkout (found where plsc runs from one)"
        add("--baselines", type=Path, metavar="FILE", help=text)
    return command


def _head(args: argparse.Namespace) -> dict[str, Any]:
    """Compare class heads: a step is forward, backward and update, of the head alone.

    Each head runs in freshly started ranks of its own, so that its memory is its own; all take turns, --rounds times.
    Shown are medians, per step and rank. The roofline is what the machine's rate at one matrix product, measured in the
    same run, implies for the four products of an exact step (8·B·C·D operations): its fastest, PyTorch's or ours.

    contestants: floor (the roofline), plsc (bf16 weights, int8 momentum), plsc-no-momentum (bf16), plsc-fp32,
    plsc-sampled, plsc-fp32-sampled; with --baselines dense (all logits, autograd) and linear-cross-entropy (torch's
    fused loss, no margin), both with DistributedDataParallel; partial-fc and partial-fc-sampled (insightface's
    PartialFC_V2, read from the folder that --partial-fc names).

    --units limits our kernels, MKL and oneDNN to one unit of this CPU after the other, the best first: amx,
    avx512-bf16, avx512, avx2, or on ARM neon-bf16, neon. By each it measures plsc, or the exact heads that
    --contestants names, and the unit's roofline. "share" is the products' time over the head's; "of both" adds the time
    of a copy of the step's bytes. A unit that this processor lacks gets a row that says so. With PLSC_CPU=UNIT that one
    is measured alone.

    A head that fails or does not fit into memory gets a row with the reason.
    """
    from plsc.bench.head import HEADS
    from plsc.bench.report import draw_heads, head_table, unit_table

    if args.units:
        return _units(args, HEADS, unit_table)
    return _steps(args, HEADS, _SIZES, "--partial-fc", head_table, draw_heads)


def _units(args: argparse.Namespace, heads: Any, table: Callable[[Any, Any], str]) -> dict[str, Any]:
    """Compare units of this CPU."""
    from plsc.bench.comparison import Comparison, Task
    from plsc.bench.units import compare_units, measured_units

    if args.device == "cuda" or args.peer is not None:
        other = "--device cuda" if args.peer is None else "--partial-fc"
        raise UsageError(f"--units measures our heads on this CPU: leave {other} out")
    measured_units()
    task = Task("", 0, 0, args.dim, args.nproc or min(2, os.cpu_count() or 1), args.threads, args.steps)
    classes, batches = args.classes or _SIZES["cpu"]["classes"], args.batch or _SIZES["cpu"]["batch"]
    names = args.contestants or ("plsc",)
    comparison = Comparison("head", heads, names, task, classes, batches, args.rounds, args.limit)
    return _report(args, lambda: compare_units(comparison), table, None)


def _train(args: argparse.Namespace) -> dict[str, Any]:
    """Compare training loops: a step is forward, backward and update of backbone and class head; no data is read.

    Each loop runs in freshly started ranks of its own, so that its memory is its own; all take turns, --rounds times.
    Shown are medians: images per second of all ranks, and seconds per step and rank. All train the same backbone by SGD
    with ArcFace, and clip its gradient at 5. Ours normalises uint8 images on the device; the others get them ready.

    contestants: plsc (the step of `plsc train`; table in bf16 with int8 momentum), plsc-fp32 (table in float32); with
    --baselines arcface-torch (insightface's own backbone and PartialFC_V2, read from the folder that --arcface-torch
    names, under the loop of its train_v2.py written again), plain (our backbone under DistributedDataParallel, all
    logits, autograd).

    A loop that fails or does not fit into memory gets a row with the reason.

    --variants measures ours alone, on one rank, the table in bf16 with int8 momentum: fp32, bf16, compile, graphs (of
    CUDA: compile_mode = "reduce-overhead"), fp16; nchw (without channels_last) of convolutional networks; fp8 and
    fp8-compile of vit_*. --contestants names some. All but nchw have channels_last; the optimizer is torch's fused one
    in all. Beside the rate stand its ratio to fp32's, the MFU that `plsc train` shows, and on a GPU, of a step, the
    host's launches, the kernels, and the share of its time in which the GPU computes nothing. --out has variants.csv,
    which is written after each turn.
    """
    from plsc.bench.report import draw_training, train_table
    from plsc.bench.train import LOOPS
    from plsc.models import names

    if args.backbone not in (None, *names()):
        raise UsageError(f"--backbone {args.backbone}: choose from {', '.join(names())}")
    if args.variants:
        return _variants(args)
    return _steps(args, LOOPS, _TRAINED, "--arcface-torch", train_table, draw_training)


def _variants(args: argparse.Namespace) -> dict[str, Any]:
    """Compare variants of our loop."""
    from plsc.bench.comparison import Comparison, Task
    from plsc.bench.harness import write_csv
    from plsc.bench.report import variant_table
    from plsc.bench.variants import compare_variants, variants_of

    given = {"--arcface-torch": args.peer, "--baselines": args.baselines, "--precision": args.precision}
    for option in (option for option, value in given.items() if value is not None):
        raise UsageError(f"--variants measures our loop in precisions of its own: leave {option} out")
    if args.nproc not in (None, 1):
        raise UsageError(f"--variants measures one rank: leave --nproc {args.nproc} out")
    device = _device(args)
    values = {**_TRAINED[device], **{name: value for name, value in vars(args).items() if value is not None}}
    sizes = {name: values[name] for name in ("dim", "threads", "steps", "backbone", "image_size")}
    known = variants_of(values["backbone"])
    task = Task("", 0, 0, nproc=1, device=device, **sizes)
    names = args.contestants or tuple(known)
    comparison = Comparison("variants", known, names, task, values["classes"], values["batch"], args.rounds, args.limit)

    def write(rows: list[dict[str, Any]]) -> None:
        if args.out is not None:
            write_csv(rows, args.out / "variants.csv")

    return _report(args, lambda: compare_variants(comparison, write), variant_table, None, "variants")


def _steps(
    args: argparse.Namespace,
    ours: Any,
    sizes: dict[str, dict[str, Any]],
    peer_option: str,
    table: Callable[[Any, Any], str],
    draw: Callable[[Any, Path], None],
) -> dict[str, Any]:
    """Compare heads or loops, at the sizes that are usual on the device where none are given."""
    import torch

    from plsc.bench.comparison import Comparison, Task, all_contestants, compare

    device = _device(args)
    ranks = torch.cuda.device_count() if device == "cuda" else min(2, os.cpu_count() or 1)
    given = {name: value for name, value in vars(args).items() if value is not None}
    values = {**sizes[device], "nproc": ranks, **given, "device": device}
    baselines = _baselines(args)
    if baselines is None and args.peer is not None:
        raise UsageError(f"{peer_option} needs --baselines FILE: benchmarks/baselines.py of a checkout")
    values |= {"baselines": baselines, "peer": None if args.peer is None else str(args.peer)}
    known = all_contestants(args.action, ours, baselines)
    fields = Task.__dataclass_fields__.keys() & values.keys() - {"classes", "batch"}
    task = Task("", 0, 0, **{name: values[name] for name in fields})
    default = [name for name, contestant in known.items() if contestant.peer is None or args.peer is not None]
    names = args.contestants if args.contestants is not None else default
    comparison = Comparison(
        args.action, known, names, task, values["classes"], values["batch"], args.rounds, args.limit
    )
    if args.peer is None and baselines is not None:
        note(f"insightface's is left out: {peer_option} FOLDER names a checkout that has it")
    return _report(args, lambda: compare(comparison), table, draw)


def _device(args: argparse.Namespace) -> str:
    """The device that is measured."""
    import torch

    device: str = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no GPU here; leave it out to measure on the CPU")
    return device


def _baselines(args: argparse.Namespace) -> str | None:
    """The file of baselines that was given, or this checkout's; a line where there is none."""
    from plsc.bench.comparison import BASELINES

    if args.baselines is None and not BASELINES.is_file():
        note("baselines are left out: --baselines FILE names benchmarks/baselines.py of a checkout")
        return None
    return str(args.baselines or BASELINES)


def _search(args: argparse.Namespace) -> dict[str, Any]:
    """Compare exact searches for the ten nearest of many unit vectors, clustered by identity as faces are.

    Each search runs in freshly started processes; all take turns, --rounds times. Recall is against float64; memory is
    the peak above the libraries.

    contestants: plsc-int8, plsc (candidates by int8 and bf16, ranked in high precision), plsc-fp32; with --baselines
    numpy, faiss (as shipped), faiss-tuned (the best of four block sizes for each batch), usearch (where it is
    installed).
    """
    from plsc.bench.report import draw_searches, search_table
    from plsc.bench.search import SearchComparison, compare_searches

    values = (args.rows, args.dim, args.batch, args.threads, args.rounds, args.seconds, args.limit, _baselines(args))
    comparison = SearchComparison(tuple(args.contestants or ()), *values)
    return _report(args, lambda: compare_searches(comparison), search_table, draw_searches)


def _cluster(args: argparse.Namespace) -> dict[str, Any]:
    """Compare spherical k-means over points that are clustered by identity, from the same first centres.

    Each runs in freshly started processes; all take turns, --rounds times. CPU time is of the whole run, with what it
    reads and writes; the inertia, the sum of squared distances, is computed for all by one program afterwards.

    contestants: plsc (plsc cluster, until no centre changes); with --baselines faiss (faiss.Kmeans on all points).
    """
    from plsc.bench.cluster import ClusterComparison, compare_clusterings
    from plsc.bench.report import cluster_table, draw_clusterings

    values = (args.rows, args.dim, args.k, args.iterations, args.threads, args.rounds, args.limit, _baselines(args))
    comparison = ClusterComparison(tuple(args.contestants or ()), *values)
    return _report(args, lambda: compare_clusterings(comparison), cluster_table, draw_clusterings)


def _data(args: argparse.Namespace) -> dict[str, Any]:
    """Compare what reads pictures for training, by images per second of processor time, loader processes included.

    Drawn faces are written as JPEG in several forms, all into a temporary folder. Then all take turns, --rounds times,
    each in fresh processes; each gives batches of pixels and labels, in an order that is drawn anew, not augmented.

    contestants: decode (the pictures' bytes in memory, decoded only), plsc-rec, plsc-folder, plsc-tars, plsc-parquet
    (the loader of plsc train, without its cache); with --baselines webdataset, imagefolder (torchvision's, with torch's
    DataLoader), datasets (Hugging Face's, of Parquet), each as its pages show; webdataset-fast and imagefolder-fast
    decode as plsc does.
    """
    from plsc.bench.data import LoadingComparison, compare_loading
    from plsc.bench.report import draw_loading, loading_table

    sizes = (args.images, args.workers, args.batch, args.passes, args.threads, args.rounds, args.limit)
    comparison = LoadingComparison(tuple(args.contestants or ()), *sizes, _baselines(args))
    return _report(args, lambda: compare_loading(comparison), loading_table, draw_loading)


def _serve(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the service with callers on this machine, each with one request in flight.

    A gallery of people with a face each is enrolled; then plsc serve, plsc serve --max-batch 1 and the store alone
    (searching for as many queries at once as there are callers) take turns, --rounds times, each in fresh processes.
    The callers are one process, and share the cores with the service.
    """
    from plsc.bench.report import draw_serving, serve_table
    from plsc.bench.serve import ServeComparison, compare_serving

    values = (args.rows, args.dim, args.clients, args.threads, args.rounds, args.seconds, args.form, args.limit)
    comparison = ServeComparison(*values)
    return _report(args, lambda: compare_serving(comparison), serve_table, draw_serving)


def _report(
    args: argparse.Namespace,
    compare: Callable[[], dict[str, Any]],
    table: Callable[[Any, Any], str],
    draw: Callable[[Any, Path], None] | None,
    name: str | None = None,
) -> dict[str, Any]:
    """Compare, print the table, and write CSV and picture, of the action's or another name, where --out asks."""
    from plsc.bench.harness import write_csv
    from plsc.files import make_folder

    if args.out is not None:
        make_folder(args.out)  # a folder that cannot be written fails now, not after minutes
    result = compare()
    show(*table(result["rows"], result["ratios"]).split("\n"))
    if args.out is not None:
        name = name or args.action
        written = [args.out / f"{name}.csv", *([args.out / f"{name}.png"] if draw else [])]
        write_csv(result["rows"], written[0])
        if draw is not None:
            draw(result["rows"], written[1])
        show("", f"written: {', '.join(map(str, written))}")
    return result
