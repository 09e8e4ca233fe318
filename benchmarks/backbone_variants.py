"""Variants of our training step for several backbones, one after the other: `plsc bench train --variants` of each.

    python benchmarks/backbone_variants.py FOLDER iresnet50 vit_base vit_large [--classes 1000000]
    python benchmarks/backbone_variants.py FOLDER --dry resnet8                 # tiny, on a CPU

The rows of a backbone are in FOLDER/BACKBONE/variants.csv, which is written after each turn. A turn may take --limit
seconds, of which compiling takes most.
"""

import sys
from pathlib import Path

from results_file import script_parser

from plsc.tools import entry

_TINY = ["--image-size", "32", "--dim", "16", "--batch", "4", "--classes", "30", "--steps", "1"]
_TINY += ["--device", "cpu", "--contestants", "fp32", "bf16", "graphs"]


def main() -> int:
    parser = script_parser(__doc__, classes=1_000_000, batch=128, steps=20, rounds=1, limit=240.0)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("backbones", nargs="+", metavar="BACKBONE")
    parser.add_argument("--dry", action="store_true", help="a few variants, tiny, on a CPU")
    args = parser.parse_args()
    sizes = ["--classes", str(args.classes), "--batch", str(args.batch), "--steps", str(args.steps)]
    codes = []
    for backbone in args.backbones:
        words = ["bench", "train", "--variants", "--backbone", backbone, "--out", str(args.folder / backbone)]
        words += ["--rounds", str(args.rounds), "--limit", f"{args.limit:g}", *(_TINY if args.dry else sizes)]
        codes.append(entry.main(words))
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
