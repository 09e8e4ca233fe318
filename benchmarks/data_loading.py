"""Reading pictures beside webdataset, torchvision and datasets: images per second of processor time.

    python benchmarks/data_loading.py [--images 4000] [--workers 0 2] [--passes 3] [--rounds 3]

Prints the table of `plsc bench data`, and adds its rows to benchmarks/results/data_loading.csv (or into --out). About
ten minutes.
"""

from results_file import add_row, script_parser

from plsc.bench.comparison import BASELINES
from plsc.bench.data import LoadingComparison, compare_loading
from plsc.bench.report import loading_table


def main() -> None:
    sizes = {"images": 4000, "batch": 128, "passes": 3, "rounds": 3}
    parser = script_parser(__doc__, results="data_loading", **sizes)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2], help="(0 2)")
    args = parser.parse_args()
    plan = {name: getattr(args, name) for name in (*sizes, "workers")}
    result = compare_loading(LoadingComparison(**plan, baselines=str(BASELINES)))
    print(loading_table(result["rows"], result["ratios"]))
    for row in result["rows"]:
        add_row("data_loading", row, args.out)


if __name__ == "__main__":
    main()
