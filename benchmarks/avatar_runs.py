"""Training on avatars by several recipes in turn, judged on avatars that none of them has seen."""

import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from results_file import RESULTS, add_row
from torch.distributed.run import main as torchrun

import plsc
from plsc import config as configuration
from plsc.bench.harness import thread_limits
from plsc.native.allocator import keep_freed_memory
from plsc.parallel import Mesh
from plsc.parallel.collectives import on_main
from plsc.parallel.mesh import shutdown, with_head_groups
from plsc.quickstart import CONFIG, UNSEEN
from plsc.train.trainer import train


@dataclass(frozen=True)
class Recipe:
    """A name, the keys that differ from the quickstart's configuration, and columns of its rows of results."""

    name: str
    settings: Mapping[str, Any]
    columns: Mapping[str, Any] = field(default_factory=dict)


def start_ranks(count: int) -> None:
    """Run this script as ``count`` ranks of one thread each, and exit; return where this is one of them."""
    if count > 1 and "RANK" not in os.environ:
        os.environ.update(thread_limits(1))
        torchrun(["--standalone", "--nproc-per-node", str(count), *sys.argv])
        sys.exit()


def compare(results: str, recipes: Sequence[Recipe], seeds: int, folder: Path = RESULTS) -> None:
    """Train by every recipe in turn, once per seed; add a row of each run to FOLDER/RESULTS.csv; print the means."""
    torch.set_num_threads(1)
    keep_freed_memory()  # as plsc train does
    mesh = plsc.init("cpu")
    accuracies: dict[str, list[float]] = {recipe.name: [] for recipe in recipes}
    for seed in range(seeds):
        for recipe in recipes:
            figures = trained({**recipe.settings, "seed": seed}, mesh)
            row = {
                **recipe.columns,
                "seed": seed,
                "accuracy": round(figures["accuracy"], 5),
                "rank1": round(figures["rank1"], 5),
                "loss": round(figures["loss"], 4),
                "seconds": round(figures["seconds"], 1),
            }
            if mesh.is_main:
                print(row, flush=True)
                add_row(results, row, folder)
            accuracies[recipe.name].append(figures["accuracy"])
    if mesh.is_main:
        for name, values in accuracies.items():
            print(f"{name}: mean accuracy {statistics.mean(values):.4f}")
    shutdown()


def trained(settings: Mapping[str, Any], mesh: Mesh) -> dict[str, Any]:
    """Train from scratch and return the figures on unseen identities, loss and seconds. Every rank calls."""
    config = configuration.load(CONFIG, {"log.to": (), **settings})
    folder = on_main(tempfile.mkdtemp, mesh)
    try:
        result = train(config, with_head_groups(mesh, config.head_ranks), out=f"{folder}/run", quiet=True)
    finally:
        if mesh.is_main:
            shutil.rmtree(folder)
    judged: dict[str, Any] = result["eval"][UNSEEN]
    return judged | {"loss": result["loss"], "seconds": result["seconds"]}
