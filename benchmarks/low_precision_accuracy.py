"""Does a class table in bfloat16 with int8 state learn as well as one in float32? On avatars, judged on unseen ones.

    python benchmarks/low_precision_accuracy.py [--data avatars:1000x20] [--epochs 4] [--seeds 3]
                                                [--optimizer adamw|sgd] [--sample-rates 1.0 …]

trains the same recipe once per seed and kind of table, in turn, and adds a row per run to
benchmarks/results/low_precision_accuracy.csv. About two minutes a run on two CPU cores.
"""

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from results_file import add_row

from plsc.files import read_json
from plsc.parallel.launch import launch
from plsc.quickstart.steps import CONFIG, UNSEEN

TABLES = {"float32": ("float32", "float32"), "bfloat16+int8": ("bfloat16", "int8")}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "sgd": {"optim.name": "sgd", "optim.lr": 0.1, "optim.weight_decay": 5e-4},
}


def trained(data: str, epochs: int, seed: int, table: str, optimizer: str, sample_rate: float) -> dict[str, Any]:
    """Train from scratch on two ranks and return the figures on unseen identities."""
    weight, momentum = TABLES[table]
    settings = {
        "data.train": data,
        "epochs": epochs,
        "seed": seed,
        "head.weight_dtype": weight,
        "head.momentum_dtype": momentum,
        "head.sample_rate": sample_rate,
        "log.tensorboard": False,
        **OPTIMIZERS[optimizer],
    }
    overrides = [word for key, value in settings.items() for word in (f"--{key}", str(value).lower())]
    with tempfile.TemporaryDirectory() as folder:
        result_file = Path(folder) / "result.json"
        if launch(["train", CONFIG, "--out", f"{folder}/run", "--json", str(result_file), *overrides], nproc=2):
            raise SystemExit("the training did not end well: see above")
        result = read_json(result_file)
    judged: dict[str, Any] = result["eval"][UNSEEN]
    return judged | {"loss": result["loss"], "seconds": result["seconds"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="avatars:1000x20")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--optimizer", choices=tuple(OPTIMIZERS), default="adamw")
    parser.add_argument("--sample-rates", type=float, nargs="+", default=[1.0])
    args = parser.parse_args()
    means: dict[str, list[float]] = {}
    for seed in range(args.seeds):
        for rate in args.sample_rates:
            for table in TABLES:
                figures = trained(args.data, args.epochs, seed, table, args.optimizer, rate)
                row = {
                    "data": args.data,
                    "epochs": args.epochs,
                    "optimizer": args.optimizer,
                    "table": table,
                    "sample_rate": rate,
                    "seed": seed,
                    "accuracy": round(figures["accuracy"], 5),
                    "rank1": round(figures["rank1"], 5),
                    "loss": round(figures["loss"], 4),
                    "seconds": round(figures["seconds"], 1),
                }
                print(row, flush=True)
                add_row("low_precision_accuracy", row)
                means.setdefault(f"{table}, sampled {rate}", []).append(figures["accuracy"])
    for name, values in means.items():
        print(f"{name}: mean accuracy {statistics.mean(values):.4f}")


if __name__ == "__main__":
    main()
