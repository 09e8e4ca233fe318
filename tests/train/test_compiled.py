"""A compiled backbone learns what the same backbone learns without."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import losses, run

Ranks = Any


def on_rank(mesh: Any, out: Path, changes: dict[str, Any]) -> list[str]:
    """Train, and have said back what torch logged meanwhile."""
    import logging

    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    listener = Listener(logging.WARNING)
    for name in ("torch", "torch._dynamo"):  # the second keeps what is below it to itself
        logging.getLogger(name).addHandler(listener)
    run(mesh, out, changes)
    return said


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_two_ranks_compiled_have_the_losses_of_two_that_are_not(tmp_path: Path, ranks: Ranks) -> None:
    changes = {"backbone": "plain", "epochs": 2}
    said = ranks(2, on_rank, tmp_path / "compiled", {**changes, "compile": True})
    ranks(2, on_rank, tmp_path / "plain", changes)
    compiled, plain = losses(tmp_path / "compiled"), losses(tmp_path / "plain")
    assert len(plain) == 6
    assert compiled == pytest.approx(plain, rel=1e-3)
    assert said == [[], []]
