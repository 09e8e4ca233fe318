"""Runs that several tests look at, and train once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.tiny_runs import run

TrainedOnce = Callable[[int, dict[str, Any]], Path]


@pytest.fixture(scope="session")
def trained_once(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> TrainedOnce:
    """``trained_once(world, changes)``: the folder of a whole run with these changes to TINY; tests only read it."""
    folders: dict[str, Path] = {}

    def find(world: int, changes: dict[str, Any]) -> Path:
        key = f"{world} {sorted(changes.items())}"
        if key not in folders:
            out = tmp_path_factory.mktemp("trained") / "run"
            ranks(world, run, out, changes)
            folders[key] = out
        return folders[key]

    return find
