"""Do further labels help where classes are new: Han characters with radical, strokes and reading, or without.

    python benchmarks/glyph_labels.py [--seeds 0 1 2] [--labels …] [--characters 1000] [--steps 1000]

trains resnet7 at 32 pixels on the same pictures, in eight typefaces, by the character alone and by several labels of a
picture, in steps of 64; and judges both on characters that neither has seen, in two typefaces that
neither has seen: rank-1 asks for the character in the other one. A row per run is added to
benchmarks/results/glyph_labels.csv; runs that it holds already are not repeated. Needs the fonts of docs/glyphs.md.
"""

import csv
import tempfile
from pathlib import Path
from typing import Any

import torch
from results_file import add_row, script_parser

import plsc
from plsc import config as configuration
from plsc.native.allocator import keep_freed_memory
from plsc.parallel import Mesh
from plsc.parallel.mesh import shutdown
from plsc.train.trainer import train

HELD_OUT = "ukai+NotoSerifCJK-Regular"
# Which labels a picture has, and what their losses become.
LABELS = {
    "character": ("character", "mean"),
    "all, summed": ("character+radical+strokes+reading", "sum"),
    "all, mean": ("character+radical+strokes+reading", "mean"),
    "character, radical and strokes, mean": ("character+radical+strokes", "mean"),
}
BATCH, FONTS = 64, 8
KEY = ("labels", "characters", "steps", "seed")


def main() -> None:
    parser = script_parser(__doc__, results="glyph_labels", characters=1000, steps=1000)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--labels", nargs="+", choices=tuple(LABELS), default=list(LABELS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as plsc train does
    mesh = plsc.init("cpu")
    known = known_runs(args.out / "glyph_labels.csv")
    for seed in args.seeds:
        for labels in args.labels:
            run = {"labels": labels, "characters": args.characters, "steps": args.steps, "seed": seed}
            if tuple(str(run[key]) for key in KEY) not in known:
                row = run | figures(run, mesh)
                print(row, flush=True)
                add_row("glyph_labels", row, args.out)
    shutdown()


def known_runs(path: Path) -> set[tuple[str, ...]]:
    """The names of the runs that a file of results holds."""
    if not path.exists():
        return set()
    with path.open(newline="") as file:
        return {tuple(row[key] for key in KEY) for row in csv.DictReader(file)}


def figures(run: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
    """Train ``run`` from scratch and return its figures on unseen characters, its last loss and the seconds it took."""
    variants = -(-run["steps"] * BATCH // (run["characters"] * FONTS))  # each picture is seen once, about
    source = f"glyphs:han:least_fonts=10:part=seen:characters={run['characters']}:fonts=-{HELD_OUT}:variants={variants}"
    labels, reduction = LABELS[run["labels"]]
    unseen = f"glyphs:han:least_fonts=10:part=unseen:fonts={HELD_OUT}"
    changes = {
        "steps": run["steps"],
        "seed": run["seed"],
        "precision": "fp32",
        "data.train": source if labels == "character" else f"{source}:labels={labels}",
        "data.image_size": 32,
        "data.batch_size": BATCH,
        "data.workers": 0,
        "labels.reduction": reduction,
        "optim.warmup_steps": run["steps"] // 10,
        "eval.sets": [unseen],
        "log.to": (),
    }
    with tempfile.TemporaryDirectory() as folder:
        result = train(configuration.load("han_small", changes), mesh, out=f"{folder}/run", quiet=True)
    (judged,) = result["eval"].values()
    rounded = {name: round(float(judged[name]), 5) for name in ("accuracy", "rank1")}
    return rounded | {"loss": round(result["loss"], 4), "seconds": round(result["seconds"], 1)}


if __name__ == "__main__":
    main()
