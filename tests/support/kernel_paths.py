"""By which parts of a CPU's instructions tests run the compiled kernels: in the first ring the machine's best alone."""

from typing import Any

import pytest

from plsc.native import build


def kernel_paths(*without: str) -> list[Any]:
    """Parameters: names for no compiled kernels, this machine's best path, and in the second ring the others."""
    paths = build.available_paths()
    lesser = [pytest.param(path, marks=pytest.mark.exhaustive) for path in paths[:-1]]
    return [*without, *lesser, *paths[-1:]]


def use_path(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute by ``path`` from here on; by PyTorch where it names none."""
    if path in build.available_paths():
        monkeypatch.setenv("PLSC_CPU", path)
    else:
        monkeypatch.setenv("PLSC_NATIVE", "0")
