"""Our exact training loop on one GPU beside what arcface_torch published for eight V100.

    python benchmarks/published_throughput.py [--classes 1000000 …] [--out FOLDER]
    python benchmarks/published_throughput.py --dry                          # tiny, on a CPU

IResNet-50 in fp16, 128 images a GPU, all classes in every step, from a million classes on up to the first number that
fails. Beside each stand the images/s of benchmarks/published_throughput.csv at as many classes: of eight GPUs, model
parallel with all classes, and with a tenth of them (partial_fc). Adds a row to FOLDER/published_on_one_gpu.csv after
each measurement. About half a minute a row on an H100 is expected; not measured.
"""

import csv
import sys
from pathlib import Path
from typing import Any

from results_file import add_row, script_parser

from plsc.bench.comparison import Comparison, Task, result_row
from plsc.bench.train import LOOPS

PUBLISHED = Path(__file__).with_name("published_throughput.csv")
NAME = "published_on_one_gpu"
CLASSES = (1_000_000, 2_000_000, 4_000_000, 5_500_000, 8_000_000, 16_000_000, 29_000_000, 40_000_000, 50_000_000)
_PUBLISHED_AT = {"software": "arcface_torch", "gpu": "v100", "gpus": "8", "batch_per_gpu": "128", "precision": "fp16"}


def main() -> int:
    parser = script_parser(__doc__, results=NAME, rounds=2, steps=20, limit=240.0)
    parser.add_argument("--classes", type=int, nargs="+", default=CLASSES, help="ascending")
    parser.add_argument("--dry", action="store_true", help="a tiny backbone, on a CPU")
    args = parser.parse_args()
    tiny = {"backbone": "resnet8", "image_size": 32, "dim": 16, "precision": "fp32", "device": "cpu"}
    large = {"backbone": "iresnet50", "precision": "fp16", "device": "cuda"}
    task = Task("", 0, 0, nproc=1, steps=args.steps, **(tiny if args.dry else large))
    batch = 4 if args.dry else 128
    comparison = Comparison("train", LOOPS, ("plsc",), task, args.classes, [batch], args.rounds, args.limit)
    args.out.mkdir(parents=True, exist_ok=True)
    print(
        f"{'classes':>12} {'images/s':>9} {'MiB':>8}   8 V100: all classes, a tenth of them (arcface_torch)", flush=True
    )
    for number, classes in enumerate(args.classes):
        results = [comparison.turn("plsc", classes, batch) for _ in range(args.rounds)]
        row = result_row(comparison, "plsc", classes, batch, results)
        others = {head: published(classes, head) for head in ("model_parallel", "partial_fc")}
        add_row(NAME, row | {f"published_{head}": rate for head, rate in others.items()}, args.out)
        rates = ", ".join("-" if rate is None else f"{rate:,.0f}" for rate in others.values())
        figures = row["note"] if row["failed"] else f"{row['images_per_second']:>9,.0f} {row['memory_mib']:>8,.0f}"
        print(f"{classes:>12,} {figures}   {rates}", flush=True)
        if row["failed"]:
            return int(number == 0)
    return 0


def published(classes: int, head: str) -> float | None:
    """Images/s of eight V100 together, by the first row for so many classes; None where there is none."""
    with PUBLISHED.open(newline="", encoding="utf-8") as file:
        rows: list[dict[str, Any]] = list(csv.DictReader(file))
    wanted = {**_PUBLISHED_AT, "backbone": "iresnet50", "classes": str(classes), "head": head}
    found = (row for row in rows if all(row[key] == value for key, value in wanted.items()))
    return next((float(row["images_per_second"]) for row in found), None)


if __name__ == "__main__":
    sys.exit(main())
