"""Han characters that arrive block by block: does a run that goes on know the old ones and the new, beside a new run.

    python benchmarks/han_blocks.py [--characters 1000] [--block 200] [--steps 200] [--image-size 32] [--seeds 0 1 2]
    python benchmarks/han_blocks.py --characters 30000 --block 5000 --steps 6000 --image-size 48 --least-fonts 3

One run with dynamic.max_classes (plsc.DynamicHead) is resumed with --block further characters and --steps further steps
of 64 pictures until it has --characters. After each block it is judged on pictures in two typefaces that no step has
seen, among all characters so far:

- rank1: whether the nearest picture in the other typeface is of the same character;
- row1: whether the nearest class row of the checkpoint is the character's;

each for the characters of the newest block (new) and for the others (old). Then a run from scratch takes all steps on
all characters, and is judged alike. At last the run goes on with a further block's pictures alone, with
head.sample_rate = 0 and no weight decay: kept_rows is the share of the other rows that have the same bits after it.
Each adds a row to benchmarks/results/han_blocks.csv. Needs the fonts of docs/glyphs.md; the second line is full size.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from results_file import add_row, script_parser

import plsc
from plsc import config as configuration
from plsc.data import open_dataset
from plsc.features.dynamic.key_map import KeyMap
from plsc.native.allocator import keep_freed_memory
from plsc.parallel import Mesh
from plsc.parallel.mesh import shutdown
from plsc.train.checkpoint import CHECKPOINTS
from plsc.train.checkpoint_reader import open_checkpoint
from plsc.train.trainer import train

HELD_OUT = "ukai+NotoSerifCJK-Regular"
BATCH, FONTS = 64, 8
FIGURES = ("rank1_old", "rank1_new", "row1_old", "row1_new", "kept_rows")


class Blocks:
    """The runs of one seed in ``folder``."""

    def __init__(self, args: argparse.Namespace, seed: int, folder: Path, mesh: Mesh) -> None:
        self._args, self._seed, self._folder, self._mesh = args, seed, folder, mesh
        # in a run from scratch each picture is seen once, about
        self._variants = -(-args.steps * BATCH // (args.block * FONTS))

    def run(self) -> None:
        """Train, judge and add the rows."""
        args = self._args
        sizes = range(args.block, args.characters + 1, args.block)
        for number, size in enumerate(sizes, 1):
            self._row("blocks", "run", size, number * args.steps, self._data(size))
        self._row("scratch", "scratch", args.characters, len(sizes) * args.steps, self._data(args.characters))
        before = class_rows(self._folder / "run", self._mesh)
        last = len(sizes) * args.steps + max(args.steps // 4, 1)
        known, further = (self._names(size) for size in (args.characters, args.characters + args.block))
        codes = "+".join(sorted(name.split()[0].removeprefix("U+") for name in further - known))
        kept = {"head.sample_rate": 0.0, "optim.weight_decay": 0.0}
        result = self._train("run", last, f"glyphs:{codes}:{self._drawn()}", kept)
        after = class_rows(self._folder / "run", self._mesh)
        assert after.keys() == known | further
        same = np.mean([torch.equal(before[name], after[name]) for name in known])
        self._add("new alone", len(after), last, result, {"kept_rows": float(same)})

    def _row(self, way: str, out: str, size: int, steps: int, data: str) -> None:
        result = self._train(out, steps, data, {})
        self._add(way, size, steps, result, self._judge(self._folder / out, size))

    def _add(self, way: str, size: int, steps: int, result: dict[str, Any], figures: dict[str, float]) -> None:
        args = self._args
        row = {"way": way, "characters": size, "block": args.block, "steps": steps, "image_size": args.image_size}
        row |= {"seed": self._seed, **{name: rounded(figures.get(name)) for name in FIGURES}}
        row |= {"loss": round(result["loss"], 4), "seconds": round(result["seconds"], 1)}
        print(row, flush=True)
        add_row("han_blocks", row, args.out)

    def _data(self, size: int) -> str:
        return f"{self._characters(size)}:{self._drawn()}"

    def _characters(self, size: int) -> str:
        return f"glyphs:han:least_fonts={self._args.least_fonts}:part=seen:characters={size}"

    def _drawn(self) -> str:
        return f"fonts=-{HELD_OUT}:variants={self._variants}"

    def _names(self, size: int) -> set[str]:
        return set(open_dataset(self._data(size)).class_names)

    def _train(self, out: str, steps: int, data: str, more: dict[str, Any]) -> dict[str, Any]:
        changes = {
            "steps": steps,
            "seed": self._seed,
            "precision": "fp32",
            "data.train": data,
            "data.image_size": self._args.image_size,
            "data.batch_size": BATCH,
            "data.workers": 0,
            "dynamic.max_classes": self._args.characters + self._args.block,
            "optim.warmup_steps": max(self._args.steps // 10, 1),
            "eval.sets": [],
            "checkpoint.every_steps": self._args.steps,
            "log.to": (),
            **more,
        }
        config = configuration.load("han_small", changes)
        return train(config, self._mesh, out=self._folder / out, resume="auto", quiet=True)

    def _judge(self, out: Path, size: int) -> dict[str, float]:
        """Rank-1 on held-out typefaces among ``size`` characters, of the newest block's and of the others."""
        data = open_dataset(f"{self._characters(size)}:fonts={HELD_OUT}", image_size=self._args.image_size)
        unit = torch.nn.functional.normalize(torch.from_numpy(plsc.embed(plsc.load_model(out), data)))
        labels, names = torch.from_numpy(data.labels), data.class_names
        has_partner = torch.bincount(labels, minlength=len(names))[labels] > 1
        found = {"rank1": (labels[nearest_others(unit)] == labels, has_partner)}
        rows = class_rows(out, self._mesh)
        table = torch.nn.functional.normalize(torch.stack([rows[name].float() for name in names]))
        found["row1"] = ((unit @ table.T).argmax(1) == labels, torch.ones_like(has_partner))
        before = self._names(size - self._args.block) if size > self._args.block else set()
        is_old = torch.tensor([name in before for name in names])[labels]
        figures = {}
        for name, (hit, counts) in found.items():
            for age, mask in (("old", is_old & counts), ("new", ~is_old & counts)):
                figures[f"{name}_{age}"] = float(hit[mask].double().mean())
        return figures


def nearest_others(unit: torch.Tensor) -> torch.Tensor:
    """The row (N,) that is nearest to each of unit rows (N, D), but for itself."""
    found = []
    for own in torch.arange(len(unit)).split(1024):
        cosines = unit[own] @ unit.T
        cosines[torch.arange(len(own)), own] = -2.0
        found.append(cosines.argmax(1))
    return torch.cat(found)


def class_rows(out: Path, mesh: Mesh) -> dict[str, torch.Tensor]:
    """The rows of a run's newest checkpoint by the names of their classes."""
    stored = open_checkpoint(max((out / CHECKPOINTS).glob("step-*")), mesh)
    weight, keys = stored.read("head.")["weight"], KeyMap()
    keys.load_state(stored.read("keys."), [0])
    classes: NDArray[np.int64] = keys.classes
    return {keys.names[key]: weight[row] for key, row in zip(keys.keys.tolist(), classes.tolist(), strict=True)}


def rounded(figure: float | None) -> float | str:
    """A share for a row; nothing where there is none."""
    return "" if figure is None or np.isnan(figure) else round(figure, 4)


def main() -> None:
    sizes = {"characters": 1000, "block": 200, "steps": 200, "image_size": 32, "least_fonts": 10}
    parser = script_parser(__doc__, results="han_blocks", **sizes)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as plsc train does
    mesh = plsc.init("cpu")
    for seed in args.seeds:
        with tempfile.TemporaryDirectory() as folder:
            Blocks(args, seed, Path(folder), mesh).run()
    shutdown()


if __name__ == "__main__":
    main()
