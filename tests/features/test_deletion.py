"""A rare feature lives in one room: its folder is taken away, and the core's tests pass without it."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FEATURES = ["asynchronous", "averaging", "compatible", "fp8", "frozen"]
CONFIGURATION = ["tests/test_config.py", "tests/test_config_refusals.py"]
TRAIN = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "tests/train").glob("test_*.py"))
# The core's tests in parts, each of which ends long before the limit of a test; of the trainer's, every third file.
CORE = {
    "head": ["tests/head"],
    "parallel": ["tests/optim", "tests/parallel", *CONFIGURATION],
    "train": TRAIN[::3],
}

# Every module of the core that names what a feature may have, and those of the features that are left.
IMPORT_ALL = """
import importlib, pkgutil
import plsc.features, plsc.head, plsc.parallel, plsc.plan, plsc.train
from plsc.config import KEYS
modules = [
    found.name
    for package in (plsc.features, plsc.head, plsc.parallel, plsc.plan, plsc.train)
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    if not found.name.endswith(("__main__", "_kernels"))
]
assert len(modules) > 100, modules
for name in modules:
    importlib.import_module(name)
print({key.partition(".")[0] for key in KEYS})
"""


def copy_without(folder: Path, features: list[str]) -> None:
    """Copy the checkout into ``folder``, without the folders of ``features``."""
    ignored = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "quickstart-*", "*.egg-info")
    shutil.copytree(ROOT, folder, symlinks=True, ignore=ignored, dirs_exist_ok=True)
    for feature in features:
        shutil.rmtree(folder / "plsc/features" / feature)
        shutil.rmtree(folder / "tests/features" / feature)


def run(folder: Path, *words: str) -> str:
    """What Python prints in the copy; AssertionError where it fails."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    found = subprocess.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, (found.stdout + found.stderr)[-4000:]
    return found.stdout


@pytest.mark.live
@pytest.mark.parametrize("feature", FEATURES)
def test_the_keys_of_the_others_stay_where_one_is_gone(feature: str, tmp_path: Path) -> None:
    copy_without(tmp_path, [feature])
    sections = run(tmp_path, "-W", "error", "-c", IMPORT_ALL)
    assert f"'{feature}'" not in sections
    assert all(f"'{other}'" in sections for other in FEATURES if other != feature)


@pytest.mark.live
@pytest.mark.slow
@pytest.mark.parametrize("part", CORE)
def test_the_cores_first_ring_passes_without_any_of_them(part: str, tmp_path: Path) -> None:
    copy_without(tmp_path, FEATURES)
    said = run(tmp_path, "-m", "pytest", "-q", "-m", "not exhaustive", "-p", "no:cacheprovider", *CORE[part])
    assert re.search(r"[1-9][0-9]+ passed", said)
