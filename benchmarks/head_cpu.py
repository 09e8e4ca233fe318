"""The class head on a CPU beside PartialFC_V2: processor time and memory, exact and sampled.

    python benchmarks/head_cpu.py --partial-fc insightface/recognition/arcface_torch [--classes 500000] [--rounds 3]

Two ranks of one thread, D = 512, 64 samples a rank; a step is forward, backward and update. Prints the table of
`plsc bench head` and what share of the peer's processor time and memory ours takes, and adds the rows to
benchmarks/results/head_cpu.csv (or into --out). About two minutes; each peer's rank needs 4 GB at 500,000 classes.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from results_file import add_row, beside_peer, script_parser

from plsc.bench.head import HEADS as OURS
from plsc.bench.report import head_table

HEADS = ("floor", "plsc", "partial-fc", "plsc-sampled", "partial-fc-sampled")
PAIRS = (("plsc", "partial-fc"), ("plsc-sampled", "partial-fc-sampled"))


def shares(ratios: list[Mapping[str, Any]]) -> list[str]:
    """A line per pair: our share of the peer's processor time and memory."""
    lines = []
    for ratio in ratios:
        if (ratio["ours"], ratio["peer"]) in PAIRS:
            cpu, memory = 1 / ratio["cpu_s"], 1 / ratio["memory_mib"]
            lines.append(
                f"{ratio['ours']} takes {cpu:.3f} of the CPU seconds and {memory:.3f} of the memory "
                f"of {ratio['peer']} at {ratio['classes']:,} classes"
            )
    return lines


def main() -> None:
    parser = script_parser(__doc__, results="head_cpu", rounds=3)
    parser.add_argument("--partial-fc", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--classes", type=int, nargs="+", default=[500_000])
    args = parser.parse_args()
    result = beside_peer("head", OURS, args.partial_fc, args.classes, 64, args.rounds, HEADS)
    print(head_table(result["rows"], result["ratios"]))
    print(f"\nthe processor's faster product is in {result['rows'][0]['note']}")
    print("\n".join(shares(result["ratios"])))
    for row in result["rows"]:
        add_row("head_cpu", row, args.out)


if __name__ == "__main__":
    main()
