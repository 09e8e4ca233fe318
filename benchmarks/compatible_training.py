"""Can a new model's queries search the gallery of an old one: with [compatible], and without.

    python benchmarks/compatible_training.py [--sets avatars han] [--ways free rows means] [--seeds 0 1 2]

An old model (resnet7 at 32 pixels, --old-steps of 64 pictures of --old-classes classes) has embedded a gallery. A new
one learns --steps from --classes classes, the old ones among them, from other first weights: free; with
compatible.with = the old run, whose class table has a row for each old class (rows); or with the embeddings that the
old model makes of two pictures of every class, so that the new classes have a centre too (means). Each is judged on
classes that neither model has seen, by all four of query and gallery. A row per run is added to
benchmarks/results/compatible_training.csv. Of compatible ones, benchmarks/results/compatible_mixed.csv has the rank-1
of each model's queries in one gallery of both, in which the new one has enrolled every other class. Han characters need
the fonts of docs/glyphs.md.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from results_file import add_row, script_parser

import plsc
from plsc import config as configuration
from plsc.data import open_dataset
from plsc.embedding.set_writer import write_embedding_set
from plsc.evaluation.compatibility import CELLS, evaluate_cells
from plsc.evaluation.search import identification
from plsc.native.allocator import keep_freed_memory
from plsc.parallel import Mesh
from plsc.parallel.mesh import shutdown
from plsc.train.trainer import train

HELD_OUT = "ukai+NotoSerifCJK-Regular"
RECIPES = {"avatars": "avatars_quickstart", "han": "han_small"}
WAYS = ("free", "rows", "means")
UNSEEN = {
    "avatars": "avatars:200x5@1000000",
    "han": f"glyphs:han:least_fonts=10:part=unseen:characters=600:fonts={HELD_OUT}",
}
PIXELS, FAR = 32, "1e-2"


def main() -> None:
    parser = script_parser(
        __doc__,
        results="compatible_training",
        classes=500,
        steps=150,
        old_classes=200,
        old_steps=80,
        weight=1.0,
        m=0.2,
    )
    parser.add_argument("--sets", nargs="+", choices=tuple(RECIPES), default=list(RECIPES))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as plsc train does
    mesh = plsc.init("cpu")
    with tempfile.TemporaryDirectory() as folder:
        for seed in args.seeds:
            for name in args.sets:
                compare(args, name, seed, Path(folder) / f"{name}-{seed}", mesh)
    shutdown()


def compare(args: argparse.Namespace, name: str, seed: int, folder: Path, mesh: Mesh) -> None:
    """Train an old model, and a new one each way; judge and add the rows."""
    old = folder / "old"
    learn(name, args.old_classes, old, {"steps": args.old_steps, "seed": 1000 + seed}, mesh)
    for way in args.ways:
        new = folder / way
        changes = {"steps": args.steps, "seed": seed}
        if way != "free":
            source = old if way == "rows" else embedded(old, pictures(name, args.classes, 2))
            changes |= {"compatible.with": str(source), "compatible.weight": args.weight, "compatible.m": args.m}
        result = learn(name, args.classes, new, changes, mesh)
        names = ("classes", "steps", "old_classes", "old_steps", "weight", "m")
        row = {"set": name, "way": way, **{key: getattr(args, key) for key in names}, "seed": seed}
        row |= {**cells(name, old, new, mesh), "seconds": round(result["seconds"], 1)}
        print(row, flush=True)
        add_row("compatible_training", row, args.out)
        if way != "free":
            found = mixed(name, old, new)
            print(found, flush=True)
            about = {
                "set": name,
                "way": way,
                "seed": seed,
                **{key: row[key] for key in ("old_old_rank1", "new_old_rank1")},
            }
            add_row("compatible_mixed", {**about, **found}, args.out)


def learn(name: str, classes: int, out: Path, changes: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
    """Train on so many classes as the shipped configuration does, but for ``changes``."""
    fixed = {
        "precision": "fp32",
        "data.train": pictures(name, classes, 8),
        "data.image_size": PIXELS,
        "data.batch_size": 64,
        "data.workers": 0,
        "data.cache": f"disk:{out.parents[1]}",  # of the pictures, which all runs share
        "optim.warmup_steps": changes["steps"] // 10,
        "eval.sets": [],
        "log.to": (),
    }
    config = configuration.load(RECIPES[name], {**fixed, **changes})
    return train(config, mesh, out=out, quiet=True)


def pictures(name: str, classes: int, each: int) -> str:
    """So many pictures of each of the first classes; further classes come behind them."""
    if name == "avatars":
        return f"avatars:{classes}x{each}"
    fonts = f"-{HELD_OUT}" if each == 8 else "NotoSansCJK-Regular+uming"
    return f"glyphs:han:least_fonts=10:part=seen:characters={classes}:fonts={fonts}:variants=1"


def embedded(model: Path, data: str) -> Path:
    """The embedding set that a model makes of labelled pictures, as ``plsc embed`` does."""
    images, loaded = open_dataset(data, image_size=PIXELS), plsc.load_model(model)
    out = model.parent / "embedded"
    rows = plsc.embed(loaded, images)
    write_embedding_set(
        out, rows, contract_id=loaded.contract_id, labels=images.labels, class_names=list(images.class_names)
    )
    return out


def cells(name: str, old: Path, new: Path, mesh: Mesh) -> dict[str, float]:
    """Rank-1 and TAR of each query in each gallery, on unseen classes."""
    both = plsc.load_model(old), plsc.load_model(new)
    (found,) = evaluate_cells(*both, [UNSEEN[name]], mesh=mesh, quiet=True).values()
    figures = {}
    for cell in CELLS:
        column = cell.replace("/", "_")
        figures[f"{column}_rank1"] = round(found[cell]["rank1"], 4)
        figures[f"{column}_tar"] = round(found[cell]["tar@far"][FAR], 4)
    return figures


def mixed(name: str, old: Path, new: Path) -> dict[str, float]:
    """Rank-1 of each model's queries in a gallery of which either model has enrolled every other class."""
    images = open_dataset(UNSEEN[name], image_size=PIXELS)
    rows = {who: plsc.embed(plsc.load_model(run), images) for who, run in (("old", old), ("new", new))}
    labels = np.asarray(images.labels)
    units = {who: each / np.linalg.norm(each, axis=1, keepdims=True) for who, each in rows.items()}
    gallery = np.where(labels[:, None] % 2 == 0, units["new"], units["old"])
    return {
        f"{who}_mixed_rank1": round(identification(each, labels, gallery=gallery)["rank1"], 4)
        for who, each in units.items()
    }


if __name__ == "__main__":
    main()
