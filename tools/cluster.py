"""Cluster an embedding set: labels that plsc train reads, centres, and a report.

  plsc cluster photos.emb --k 10000 --out clusters/
  plsc cluster photos.emb --k 1000000 --out clusters/ --nproc 8 --mini-batch 1000000 --iterations 200 --top 10
  plsc cluster photos.emb --centres found.npy --out clusters/
  plsc cluster photos.emb --method connected --threshold 0.6 --links pairs.tsv --out clusters/
  plsc cluster photos.emb --method hdbscan --min-size 5 --out clusters/

kmeans is spherical k-means: every point goes to its nearest centre, exactly, and a centre is the normalised mean of its
points; empty ones are put elsewhere. With --centres it assigns every point to centres that something else found, and
moves none. connected joins what edges of --threshold and more connect in the graph of nearest neighbours; hdbscan takes
its dense parts (scikit-learn: pip install plsc-torch[cluster]). A line of --links is key<TAB>key<TAB>must|cannot. Train
with data.train = the pictures and data.labels = "clusters/labels.npy".

If the command is stopped, or killed, run it again: k-means goes on after its last iteration, with any number of
processes, and ends in the same centres, bit for bit. --overwrite starts anew. Each process searches on a GPU of its own
where there are any and the search is large (docs/clusters.md), else on the CPU.
"""

import argparse
from pathlib import Path
from typing import Any

from plsc.errors import UsageError
from plsc.files import new_folder
from plsc.progress import counted, note, show
from plsc.tools.entry import (
    above_0,
    add_result_options,
    add_verify_option,
    is_launched,
    launch_ranks,
    natural,
    number,
    positive,
)

HELP = "cluster an embedding set into classes to train on"
_OF_KMEANS = ("k", "iterations", "tolerance", "seeds", "balanced", "mini_batch", "centres", "top")
_OF_GRAPHS = ("threshold", "neighbours", "min_size", "links")
_ratio = number(float, lambda value: value >= 1, "it must be at least 1")
_cosine = number(float, lambda value: -1 <= value <= 1, "a cosine lies between -1 and 1")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add = parser.add_argument
    add("set", type=Path, metavar="EMB", help="embedding set")
    add("--out", required=True, type=Path, metavar="FOLDER", help="folder to write")
    add("--method", choices=("kmeans", "connected", "hdbscan"), default="kmeans", help="(kmeans)")
    add("--seed", type=natural, default=0, metavar="N", help="of all draws (0)")
    add(
        "--nproc",
        type=positive,
        default=1,
        metavar="N",
        help="processes that share the points of kmeans, one per GPU where there are any (1)",
    )
    add(
        "--threads",
        type=positive,
        metavar="N",
        help="CPU threads of a process (default: OMP_NUM_THREADS, else all cores)",
    )
    means = parser.add_argument_group("kmeans").add_argument
    means("--k", type=positive, metavar="N", help="clusters")
    means("--iterations", type=positive, metavar="N", help="at most (25)")
    means("--tolerance", type=above_0, metavar="R", help="end where the inertia falls by less than this share (0.0001)")
    means("--seeds", type=positive, metavar="N", help="try N first centres, and keep the least inertia (1)")
    means(
        "--balanced",
        type=_ratio,
        metavar="R",
        help="no cluster has more than R times the mean number of points, rounded up",
    )
    means("--mini-batch", type=positive, metavar="N", help="points of an iteration (all)")
    means("--centres", type=Path, metavar="NPY", help="assign to these centres (K, D), without iterations")
    means("--top", type=positive, metavar="K", help="write the K nearest centres of each row, with cosines")
    graphs = parser.add_argument_group("connected, hdbscan").add_argument
    graphs("--threshold", type=_cosine, metavar="T", help="connected: least cosine of an edge")
    graphs("--neighbours", type=positive, metavar="N", help="edges of a point (32; hdbscan: at least --min-size - 1)")
    graphs("--min-size", type=positive, metavar="N", help="points of the smallest cluster; others get label -1 (2)")
    graphs("--links", type=Path, metavar="TSV", help="pairs that belong together, or do not")
    add_verify_option(parser)
    add_result_options(parser, replaces="FOLDER, --json")


def run(args: argparse.Namespace) -> dict[str, Any] | None:
    """Cluster, print a summary, and return the report (on the first rank)."""
    _check(args)
    from plsc.embedding.embedding_set import EmbeddingSet

    if args.nproc > 1 and not is_launched():
        EmbeddingSet(args.set)  # that there is one is told once; a table is made a set by one process
        with new_folder(args.out):
            launch_ranks(args)
        return None
    import torch

    from plsc.cluster.folder import GraphOptions, cluster
    from plsc.cluster.given import GivenCentres
    from plsc.cluster.kmeans import KMeansOptions
    from plsc.cluster.scan import SearchDevice
    from plsc.parallel.collectives import raise_on_all_ranks
    from plsc.parallel.mesh import default_device, initialised

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    names = _OF_KMEANS if args.method == "kmeans" else _OF_GRAPHS
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    top = given.pop("top", 0)
    options: KMeansOptions | GivenCentres | GraphOptions
    if args.method != "kmeans":
        options = GraphOptions(args.method, **given)
    else:
        options = GivenCentres(**given) if args.centres is not None else KMeansOptions(seed=args.seed, **given)
    with initialised("cpu") as mesh:  # what ranks exchange is in the host's memory, also where GPUs search
        device = raise_on_all_ranks(mesh, lambda: default_device(mesh.local_rank))
        if device.type == "cuda" and mesh.is_main:
            note(f"cluster: large searches run on {torch.cuda.get_device_name(device)}")
        where = SearchDevice(device)
        report = cluster(
            EmbeddingSet(args.set), args.out, options, mesh, top=top, where=where, overwrite=args.overwrite
        )
    if not mesh.is_main:
        return None
    _show(args.out, report)
    return {"out": str(args.out), **report}


def _check(args: argparse.Namespace) -> None:
    """UsageError for options that another method has, and for those that a method needs."""
    others = _OF_GRAPHS if args.method == "kmeans" else _OF_KMEANS
    for name in others:
        if getattr(args, name) is not None:
            raise UsageError(f"--{name.replace('_', '-')} is not an option of --method {args.method}; leave it out")
    for name in _OF_KMEANS[:-2] if args.centres is not None else ():
        if getattr(args, name) is not None:
            raise UsageError(f"--{name.replace('_', '-')} is not for --centres, which stay as they are; leave it out")
    if args.method == "kmeans" and args.k is None and args.centres is None:
        raise UsageError("--k is missing: how many clusters; or --method connected or hdbscan, which find the number")
    if args.method == "connected" and args.threshold is None:
        raise UsageError("--threshold is missing: the least cosine that connects two rows")
    if args.method == "hdbscan" and args.threshold is not None:
        raise UsageError("--threshold is an option of --method connected; leave it out")
    if args.method != "kmeans" and (args.nproc > 1 or is_launched()):
        raise UsageError("--nproc is for --method kmeans; leave it out")
    if args.balanced is not None and args.top is not None:
        raise UsageError("--top lists the nearest centres, which --balanced does not keep to; leave one of them out")
    if args.balanced is not None and args.mini_batch is not None:
        raise UsageError("--balanced needs all points in each iteration, not --mini-batch; leave one of them out")


def _show(folder: Path, report: dict[str, Any]) -> None:
    sizes, left = report["sizes"], report["rows"] - report["labelled"]
    size = f"{counted(report['clusters'], 'cluster')} of {sizes['least']:,} to {sizes['most']:,} points"
    show(f"{folder}: {size}, median {sizes['median']:g}, inertia {report['inertia']:.6g}")
    if left:
        show(f"{counted(left, 'row')} without a cluster (label -1)")
    if (found := report["agreement"]) is not None:
        show(
            f"against the classes of the set: purity {found['purity']:.4f}, B-cubed F {found['bcubed_f']:.4f} "
            f"(precision {found['bcubed_precision']:.4f}, recall {found['bcubed_recall']:.4f}), NMI {found['nmi']:.4f}"
        )
    show(f'train with data.labels = "{folder / "labels.npy"}"; the report: {folder / "report.png"}')
