"""Exact search beside numpy, faiss and usearch: queries per second, latency, recall and memory.

    python benchmarks/search.py [--rows 200000] [--dim 512] [--rounds 3]

Prints the table of `plsc bench search`, adds its rows to benchmarks/results/search.csv (or into --out) and draws
--picture. About four minutes.
"""

from pathlib import Path

from results_file import add_row, script_parser

from plsc.bench.comparison import BASELINES
from plsc.bench.report import draw_searches, search_table
from plsc.bench.search import SearchComparison, compare_searches


def main() -> None:
    parser = script_parser(__doc__, results="search", rows=200_000, dim=512, rounds=3, threads=2)
    parser.add_argument("--picture", type=Path, metavar="FILE", help="docs/search.png, say")
    args = parser.parse_args()
    sizes = {"rows": args.rows, "dim": args.dim, "rounds": args.rounds, "threads": args.threads}
    plan = SearchComparison(**sizes, baselines=str(BASELINES))
    result = compare_searches(plan)
    print(search_table(result["rows"], result["ratios"]))
    for row in result["rows"]:
        add_row("search", row, args.out)
    if args.picture is not None:
        draw_searches(result["rows"], args.picture)


if __name__ == "__main__":
    main()
