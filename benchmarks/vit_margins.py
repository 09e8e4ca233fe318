"""Does ArcFace fail on vision transformers where CosFace works, and does the gradient through the margin decide it?

    python benchmarks/vit_margins.py [--omniglot FOLDER] [--backbones …] [--margins …] [--seeds 0 1 2]

trains vit_tiny and iresnet18 from scratch at 32 pixels by AdamW, with ArcFace (m = 0.5) by its exact gradient, ArcFace
by the straight-through gradient (arcface_torch's: the margin is applied, and not differentiated), and CosFace
(m = 0.4), the published margins. Data: avatars at s = 64, judged on unseen avatars; with FOLDER, also Omniglot at
s = 16 (with 64 its 964 classes are hardly learned in these epochs), whose pictures lie there in train/ and unseen/
(one folder a character), judged on unseen alphabets. A row per run is added to benchmarks/results/vit_margins.csv;
runs that it holds already are not repeated. 5 minutes a run on an idle core.
"""

import argparse
import csv
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from results_file import add_row, script_parser

import plsc
from plsc import config as configuration
from plsc.native.allocator import keep_freed_memory
from plsc.parallel import Mesh
from plsc.parallel.mesh import shutdown
from plsc.quickstart import CONFIG
from plsc.train.trainer import train

AVATARS = "avatars:300x20"
EPOCHS = {"avatars": 6, "omniglot": 2}
SCALES = {"avatars": 64.0, "omniglot": 16.0}
RATES = {"vit_tiny": 1e-3, "iresnet18": 1e-3}
ARCFACE: dict[str, Any] = {"head.margin": "arcface", "head.m": 0.5}
MARGINS: dict[str, dict[str, Any]] = {
    "arcface, exact": {**ARCFACE, "head.gradient": "exact"},
    "arcface, straight-through": {**ARCFACE, "head.gradient": "straight_through"},
    "cosface": {"head.margin": "cosface", "head.m": 0.4},
}
KEY = ("data", "epochs", "backbone", "margin", "s", "lr", "seed")


def main() -> None:
    parser = script_parser(__doc__, results="vit_margins")
    parser.add_argument(
        "--omniglot", type=Path, metavar="FOLDER", help="with train/ and unseen/; without, avatars only"
    )
    parser.add_argument("--backbones", nargs="+", choices=tuple(RATES), default=list(RATES))
    parser.add_argument("--margins", nargs="+", choices=tuple(MARGINS), default=list(MARGINS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as plsc train does
    mesh = plsc.init("cpu")
    known = known_runs(args.out)
    for row in planned_runs(args):
        if tuple(str(row[key]) for key in KEY) not in known:
            row |= figures(row, args.omniglot, mesh)
            print(row, flush=True)
            add_row("vit_margins", row, args.out)
    shutdown()


def planned_runs(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The columns that name each run, in the order in which they are trained: all of a seed before the next."""
    data = ["avatars", "omniglot"] if args.omniglot else ["avatars"]
    for seed, name, backbone, margin in itertools.product(args.seeds, data, args.backbones, args.margins):
        yield {
            "data": name,
            "epochs": EPOCHS[name],
            "backbone": backbone,
            "margin": margin,
            "s": SCALES[name],
            "lr": RATES[backbone],
            "seed": seed,
        }


def known_runs(folder: Path) -> set[tuple[str, ...]]:
    """The names of the runs that FOLDER/vit_margins.csv holds."""
    path = folder / "vit_margins.csv"
    if not path.exists():
        return set()
    with path.open(newline="") as file:
        return {tuple(row[key] for key in KEY) for row in csv.DictReader(file)}


def figures(run: dict[str, Any], omniglot: Path | None, mesh: Mesh) -> dict[str, Any]:
    """Train ``run`` from scratch and return its figures on unseen classes, its last loss and the seconds it took."""
    settings: dict[str, Any] = {
        "backbone": run["backbone"],
        "epochs": run["epochs"],
        "seed": run["seed"],
        "embedding_dim": 128,
        "data.image_size": 32,
        "data.batch_size": 32,
        "data.train": AVATARS,
        "head.s": run["s"],
        "optim.name": "adamw",
        "optim.lr": run["lr"],
        "optim.weight_decay": 0.05,
        "optim.warmup_epochs": 0.5,
        "log.to": (),
        **MARGINS[run["margin"]],
    }
    if run["data"] == "omniglot":
        settings |= {"data.train": f"{omniglot}/train", "eval.sets": [f"{omniglot}/unseen"], "data.augment": "affine"}
    config = configuration.load(CONFIG, settings)
    with tempfile.TemporaryDirectory() as folder:
        result = train(config, mesh, out=f"{folder}/run", quiet=True)
    (judged,) = result["eval"].values()
    rounded = {name: round(float(judged[name]), 5) for name in ("accuracy", "rank1")}
    return rounded | {"loss": round(result["loss"], 4), "seconds": round(result["seconds"], 1)}


if __name__ == "__main__":
    main()
