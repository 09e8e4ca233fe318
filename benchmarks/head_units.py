"""The class head by each unit of this processor beside what the unit's fastest product allows.

    python benchmarks/head_units.py [--classes 500000] [--batch 64 256] [--rounds 2]

Two ranks of one thread, D = 512; a step is forward, backward and update. Prints the table of `plsc bench head --units`
and adds the rows, one for each unit and batch, to benchmarks/results/head_units.csv (or into --out). About a minute for
each unit and 64 samples.
"""

from results_file import add_row, script_parser

from plsc.bench.comparison import Comparison, Task
from plsc.bench.head import HEADS
from plsc.bench.report import unit_table
from plsc.bench.units import compare_units


def main() -> None:
    parser = script_parser(__doc__, results="head_units", rounds=2, classes=500_000, steps=2)
    parser.add_argument("--batch", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--contestants", nargs="+", default=["plsc"])
    args = parser.parse_args()
    task = Task("", 0, 0, steps=args.steps)
    result = compare_units(Comparison("head", HEADS, args.contestants, task, [args.classes], args.batch, args.rounds))
    print(unit_table(result["rows"], result["ratios"]))
    for row in result["rows"]:
        add_row("head_units", row, args.out)


if __name__ == "__main__":
    main()
