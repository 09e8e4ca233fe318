"""The clustering loop on labelled data whose labels stay hidden: rank-1 on unseen classes after each round.

    python benchmarks/cluster_loop.py --train omniglot/train --unseen omniglot/unseen [--k 1500] [--steps 500]

The start is self-supervised: some pictures, --instances of them, are a class each, and a network learns from scratch to
tell their distortions apart (Dosovitskiy et al., "Discriminative Unsupervised Feature Learning with Convolutional
Neural Networks", NeurIPS 2014). Then, in each of --rounds, `plsc embed`, `plsc cluster` and `plsc train` by the recipe
cluster_omniglot, from the weights of the round before. The supervised model begins at the same start and takes all
rounds' steps in one run, with the true labels. Labels of the training part are read by that run alone, and for the
purity of the clusters, which nothing uses. With --folder, runs are kept, and the same command goes on with the run in
which it was stopped. Omniglot has a folder for each class: train/ with the 964 of the background set, unseen/ with the
659 of the evaluation set.
"""

import argparse
import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from results_file import print_and_add, script_parser

from plsc.data import open_dataset
from plsc.errors import PlscError
from plsc.tools.entry import main as plsc

RECIPE = "cluster_omniglot"


class Loop:
    """The runs of one loop in ``folder``."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self._args, self._folder = args, folder

    def run(self) -> dict[str, Any]:
        """Train start, rounds and the supervised model; the figures of a row."""
        args = self._args
        rank1 = {"start": self._train("start", args.steps, data_labels=self._instances(), head_init_rows="")}
        purity, before = [], "start"
        for number in range(1, args.rounds + 1):
            clusters = self._cluster(before, number)
            purity.append(json.loads((clusters / "report.json").read_text())["agreement"]["purity"])
            name = f"round {number}"
            rank1[name] = self._train(
                name,
                args.steps,
                start=before,
                data_labels=str(clusters / "labels.npy"),
                head_init_rows=str(clusters / "centres.npy"),
            )
            before = name
        steps = args.rounds * args.steps
        supervised = self._train("supervised", steps, start="start", data_labels="", head_init_rows="")
        named = {f"rank-1, {name}": round(value, 4) for name, value in rank1.items()}
        return {
            **named,
            "rank-1, supervised": round(supervised, 4),
            "share of supervised": round(rank1[before] / supervised, 3),
            "purity": " ".join(f"{value:.3f}" for value in purity),
        }

    def _instances(self) -> str:
        """A label of its own for each of some pictures, and none for the others."""
        count = len(open_dataset(self._args.train, image_size=None))
        chosen = np.random.default_rng(self._args.seed).permutation(count)[: self._args.instances]
        labels = np.full(count, -1, np.int64)
        labels[chosen] = np.arange(len(chosen))
        np.save(self._folder / "instances.npy", labels)
        return str(self._folder / "instances.npy")

    def _cluster(self, run: str, number: int) -> Path:
        made, clusters = self._folder / f"{number}.emb", self._folder / f"clusters {number}"
        if not (clusters / "report.json").exists():
            words = ("--data", self._args.train, "--out", str(made), "--workers", "0", "--overwrite")
            command("embed", str(self._folder / run), *words)
            words = ("--k", str(self._args.k), "--seed", str(self._args.seed), "--out", str(clusters), "--overwrite")
            command("cluster", str(made), *words)
        return clusters

    def _train(self, name: str, steps: int, start: str = "", **settings: str) -> float:
        """Train a run and return its rank-1 on unseen classes."""
        out, result = self._folder / name, self._folder / f"{name}.json"
        words = ["--out", str(out), "--json", str(result), "--steps", str(steps), "--seed", str(self._args.seed)]
        words += ["--optim.warmup_steps", str(max(steps // 8, 1)), "--log.to", "[]", "--data.workers", "0"]
        words += ["--data.train", self._args.train, "--eval.sets", self._args.unseen]
        if start:
            words += ["--init_weights", str(self._folder / start / "model.safetensors")]
        for key, value in settings.items():
            words += [f"--{key.replace('_', '.', 1)}", value]
        if not result.exists():
            shutil.rmtree(out, ignore_errors=True)  # of a run that was stopped
            command("train", RECIPE, *words)
        (judged,) = json.loads(result.read_text())["eval"].values()
        return float(judged["rank1"])


def command(*words: str) -> None:
    if plsc(list(words)) != 0:
        raise PlscError(f"plsc {' '.join(words)} failed")


def main() -> None:
    options = {"k": 1500, "instances": 1500, "rounds": 3, "steps": 500, "seed": 0}
    parser = script_parser(__doc__, results="cluster_loop", **options)
    parser.add_argument("--train", required=True, metavar="DIR", help="labelled pictures, whose labels stay hidden")
    parser.add_argument("--unseen", required=True, metavar="DIR", help="labelled pictures of other classes")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="where runs are kept (a temporary folder)")
    args = parser.parse_args()
    with TemporaryDirectory() as scratch:
        folder: Path = args.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        figures = Loop(args, folder).run()
    given = {"data": Path(args.train).parent.name or args.train, **{name: getattr(args, name) for name in options}}
    print_and_add("cluster_loop", {**given, **figures}, args.out)


if __name__ == "__main__":
    main()
