"""Exact search beside numpy, faiss and usearch: queries per second, latency, recall and memory.

    python benchmarks/search.py [--rows 200000] [--dim 512] [--rounds 3]

Prints the table of `plsc bench search`, adds its rows to benchmarks/results/search.csv (or into --out) and draws
--picture. About four minutes.
"""

import argparse
from pathlib import Path

from results_file import RESULTS, add_row

from plsc.bench.report import draw_searches, search_table
from plsc.bench.search import SearchComparison, compare_searches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER", help="where search.csv is")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="docs/search.png, say")
    args = parser.parse_args()
    plan = SearchComparison(rows=args.rows, dim=args.dim, rounds=args.rounds, threads=args.threads)
    result = compare_searches(plan)
    print(search_table(result["rows"], result["ratios"]))
    for row in result["rows"]:
        add_row("search", row, args.out)
    if args.picture is not None:
        draw_searches(result["rows"], args.picture)


if __name__ == "__main__":
    main()
