"""Which optimizer keeps its accuracy when the batch grows eight times and the epochs stay?

    python benchmarks/large_batch.py [--recipes "sgd" "lars x8" …] [--data avatars:150x12] [--epochs 8] [--seeds 3]

trains ResNet-8 with a batch of 32 images by SGD, and with batches of 256, which leave an eighth of the steps: by SGD at
the same learning rate and at eight times it, by LARS and by LAMB, all after a warm-up, the class head by AdamW in all.
Real batches, in one process: batch normalisation sees all of them. Once per seed and recipe in turn; judged on unseen
avatars; a row per run is added to benchmarks/results/large_batch.csv. About 20 seconds a run on an idle core.
"""

import argparse
from typing import Any

from avatar_runs import Recipe, compare
from results_file import script_parser

BATCH, TIMES = 32, 8
BASE: dict[str, Any] = {"data.image_size": 32, "optim.weight_decay": 5e-4, "optim.head": "adamw"}
SMALL: dict[str, Any] = {**BASE, "data.batch_size": BATCH, "optim.head_lr": 0.007}
LARGE: dict[str, Any] = {
    **BASE,
    "data.batch_size": BATCH * TIMES,
    "optim.head_lr": 0.02,  # √8 times that
    "optim.warmup_epochs": 1.0,
}
RECIPES: dict[str, dict[str, Any]] = {
    "sgd": {**SMALL, "optim.name": "sgd", "optim.lr": 0.05},
    "sgd x8": {**LARGE, "optim.name": "sgd", "optim.lr": 0.05},
    "sgd x8, linear": {**LARGE, "optim.name": "sgd", "optim.lr": 0.4},
    "lars x8": {**LARGE, "optim.name": "lars", "optim.lr": 30},
    "lamb x8": {**LARGE, "optim.name": "lamb", "optim.lr": 0.05},
}


def recipe(args: argparse.Namespace, name: str) -> Recipe:
    """Training by recipe ``name``; its columns say how."""
    settings = {**RECIPES[name], "data.train": args.data, "epochs": args.epochs}
    columns = {
        "data": args.data,
        "epochs": args.epochs,
        "recipe": name,
        "batch": settings["data.batch_size"],
        "lr": settings["optim.lr"],
    }
    return Recipe(name, settings, columns)


def main() -> None:
    parser = script_parser(__doc__, results="large_batch", data="avatars:150x12", epochs=8, seeds=3)
    parser.add_argument("--recipes", nargs="+", choices=tuple(RECIPES), default=list(RECIPES))
    args = parser.parse_args()
    compare("large_batch", [recipe(args, name) for name in args.recipes], args.seeds, args.out)


if __name__ == "__main__":
    main()
