"""Training on avatars by several recipes in turn, judged on avatars that none of them has seen."""

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from results_file import RESULTS, add_row

from plsc.files import read_json
from plsc.parallel.launch import launch
from plsc.quickstart.steps import CONFIG, UNSEEN


@dataclass(frozen=True)
class Recipe:
    """A name, the keys that differ from the quickstart's configuration, and columns of its rows of results."""

    name: str
    settings: Mapping[str, Any]
    columns: Mapping[str, Any] = field(default_factory=dict)


def compare(results: str, recipes: Sequence[Recipe], seeds: int, folder: Path = RESULTS) -> None:
    """Train by every recipe in turn, once per seed; add a row of each run to FOLDER/RESULTS.csv; print the means."""
    accuracies: dict[str, list[float]] = {}
    for seed in range(seeds):
        for recipe in recipes:
            figures = trained({**recipe.settings, "seed": seed})
            row = {
                **recipe.columns,
                "seed": seed,
                "accuracy": round(figures["accuracy"], 5),
                "rank1": round(figures["rank1"], 5),
                "loss": round(figures["loss"], 4),
                "seconds": round(figures["seconds"], 1),
            }
            print(row, flush=True)
            add_row(results, row, folder)
            accuracies.setdefault(recipe.name, []).append(figures["accuracy"])
    for name, values in accuracies.items():
        print(f"{name}: mean accuracy {statistics.mean(values):.4f}")


def trained(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Train from scratch on two ranks and return the figures on unseen identities, loss and seconds."""
    whole = {"log.tensorboard": False, **settings}
    overrides = [word for key, value in whole.items() for word in (f"--{key}", _text(value))]
    with tempfile.TemporaryDirectory() as folder:
        result_file = Path(folder) / "result.json"
        if launch(["train", CONFIG, "--out", f"{folder}/run", "--json", str(result_file), *overrides], nproc=2):
            raise SystemExit("the training did not end well: see above")
        result = read_json(result_file)
    judged: dict[str, Any] = result["eval"][UNSEEN]
    return judged | {"loss": result["loss"], "seconds": result["seconds"]}


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(value)
    return str(value).lower() if isinstance(value, bool) else str(value)
