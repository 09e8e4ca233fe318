"""Training loops beside each other: the table of `plsc bench train`, with arcface_torch's own backbone and loop.

    python benchmarks/train.py --arcface-torch insightface/recognition/arcface_torch [--classes 10000 100000]

IResNet-18 at 112 pixels in float32, 8 images on each of two ranks of one thread. Adds the rows to
benchmarks/results/train.csv (or into --out). About two minutes for each number of classes.
"""

from pathlib import Path

from results_file import add_row, beside_peer, script_parser

from plsc.bench.report import train_table
from plsc.bench.train import LOOPS


def main() -> None:
    parser = script_parser(__doc__, results="train", rounds=2)
    parser.add_argument("--arcface-torch", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--classes", type=int, nargs="+", default=[10_000])
    args = parser.parse_args()
    for classes in args.classes:
        result = beside_peer("train", LOOPS, args.arcface_torch, [classes], 8, args.rounds)
        print(train_table(result["rows"], result["ratios"]), end="\n\n")
        for row in result["rows"]:
            add_row("train", row, args.out)


if __name__ == "__main__":
    main()
