"""Does a class table in bfloat16 with int8 state learn as well as one in float32? On avatars, judged on unseen ones.

    python benchmarks/low_precision_accuracy.py [--data avatars:1000x20] [--epochs 4] [--seeds 3]
                                                [--optimizer adamw|sgd] [--sample-rates 1.0 …]

trains the same recipe once per seed and kind of table, in turn, and adds a row per run to
benchmarks/results/low_precision_accuracy.csv. About two minutes a run on two CPU cores.
"""

import argparse
from typing import Any

from avatar_runs import Recipe, compare, start_ranks

TABLES = {"float32": ("float32", "float32"), "bfloat16+int8": ("bfloat16", "int8")}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "sgd": {"optim.name": "sgd", "optim.lr": 0.1, "optim.weight_decay": 5e-4},
}


def recipe(args: argparse.Namespace, table: str, sample_rate: float) -> Recipe:
    """The quickstart's recipe with this table, a part of whose classes is taken in each step."""
    weight, momentum = TABLES[table]
    settings = {
        "data.train": args.data,
        "epochs": args.epochs,
        "head.weight_dtype": weight,
        "head.momentum_dtype": momentum,
        "head.sample_rate": sample_rate,
        **OPTIMIZERS[args.optimizer],
    }
    columns = {
        "data": args.data,
        "epochs": args.epochs,
        "optimizer": args.optimizer,
        "table": table,
        "sample_rate": sample_rate,
    }
    return Recipe(f"{table}, sampled {sample_rate}", settings, columns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="avatars:1000x20")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--optimizer", choices=tuple(OPTIMIZERS), default="adamw")
    parser.add_argument("--sample-rates", type=float, nargs="+", default=[1.0])
    args = parser.parse_args()
    start_ranks(2)
    recipes = [recipe(args, table, rate) for rate in args.sample_rates for table in TABLES]
    compare("low_precision_accuracy", recipes, args.seeds)


if __name__ == "__main__":
    main()
