"""Fixtures that every test may use."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

for folder in (Path(__file__).parent, Path(__file__).parents[1]):  # tests share reference.py and support/;
    sys.path.insert(0, str(folder))  # the pool's workers import the test modules by their full names

from support.interpreter import Interpreter  # noqa: E402
from support.ranks import RankPool  # noqa: E402


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """``ranks(world, function, *args)``: the results of ``function(mesh, *args)`` on ``world`` gloo ranks."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    """``interpreter(function, *args)``: its result where Triton's kernels are interpreted on the CPU."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs triton")
    process = Interpreter()
    yield process
    process.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked gpu say why they do not run where there is none."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
