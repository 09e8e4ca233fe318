"""A compiled backbone learns what the same backbone learns without."""

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.tiny_runs import losses, run
from torch._dynamo.utils import counters

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

Ranks = Any


class Listener(logging.Handler):
    """Keeps what torch logs from a warning on."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []
        self.loggers = [logging.getLogger(name) for name in ("torch", "torch._dynamo")]  # the second passes nothing on

    def __enter__(self) -> "Listener":
        for logger in self.loggers:
            logger.addHandler(self)
        return self

    def __exit__(self, *ended: object) -> None:
        for logger in self.loggers:
            logger.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def on_rank(mesh: Any, out: Path, changes: dict[str, Any]) -> tuple[int, list[str]]:
    """Train; how many graphs torch compiled meanwhile, and what it logged."""
    counters.clear()
    with Listener() as listener:
        run(mesh, out, changes)
    return counters["stats"]["unique_graphs"], listener.said


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_two_ranks_compiled_have_the_losses_of_two_that_are_not(tmp_path: Path, ranks: Ranks) -> None:
    changes = {"backbone": "plain", "epochs": 2}
    for graphs, said in ranks(2, on_rank, tmp_path / "compiled", {**changes, "compile": True}):
        assert graphs > 0
        assert said == []
    assert [graphs for graphs, _ in ranks(2, on_rank, tmp_path / "plain", changes)] == [0, 0]
    compiled, plain = losses(tmp_path / "compiled"), losses(tmp_path / "plain")
    assert len(plain) == 6
    assert compiled == pytest.approx(plain, rel=1e-3)
