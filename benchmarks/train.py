"""Training loops beside each other: the table of `plsc bench train`, with arcface_torch's own backbone and loop.

    python benchmarks/train.py --arcface-torch insightface/recognition/arcface_torch [--classes 10000 100000]

IResNet-18 at 112 pixels in float32, 8 images on each of two ranks of one thread. Adds the rows to
benchmarks/results/train.csv (or into --out). About two minutes for each number of classes.
"""

import argparse
from pathlib import Path

from results_file import RESULTS, add_row

from plsc.bench.report import train_table
from plsc.bench.train import TrainComparison, compare_training
from plsc.bench.train_baselines import LOOPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arcface-torch", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--classes", type=int, nargs="+", default=[10_000])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER", help="where train.csv is")
    args = parser.parse_args()
    for classes in args.classes:
        plan = TrainComparison(tuple(LOOPS), classes=classes, rounds=args.rounds, arcface_torch=args.arcface_torch)
        result = compare_training(plan)
        print(train_table(result["rows"], result["ratios"]), end="\n\n")
        for row in result["rows"]:
            add_row("train", row, args.out)


if __name__ == "__main__":
    main()
