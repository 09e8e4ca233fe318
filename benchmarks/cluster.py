"""Spherical k-means beside faiss.Kmeans, faiss.SuperKmeans and superkmeans on all points, from the same first centres.

    python benchmarks/cluster.py [--rows 200000] [--dim 256] [--k 10000] [--iterations 25] [--rounds 1] [--threads 2]
        [--contestants plsc,superkmeans]

Prints the table of `plsc bench cluster`, and adds its rows to benchmarks/results/cluster.csv (or into --out).
superkmeans is not among the dependencies: `pip install superkmeans`.
"""

from results_file import add_row, script_parser

from plsc.bench.cluster import ClusterComparison, compare_clusterings
from plsc.bench.comparison import BASELINES
from plsc.bench.report import cluster_table


def main() -> None:
    sizes = {"rows": 200_000, "dim": 256, "k": 10_000, "iterations": 25, "rounds": 1, "threads": 2}
    args = script_parser(__doc__, results="cluster", contestants="", **sizes).parse_args()
    names = args.contestants.split(",") if args.contestants else ()
    plan = ClusterComparison(names, **{name: getattr(args, name) for name in sizes}, baselines=str(BASELINES))
    result = compare_clusterings(plan)
    print(cluster_table(result["rows"], result["ratios"]))
    for row in result["rows"]:
        add_row("cluster", row, args.out)


if __name__ == "__main__":
    main()
