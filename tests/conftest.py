"""Fixtures that every test may use."""

import contextlib
import gc
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

# Commands that tests start would take every core for their threads, which wait for each other by spinning, beside the
# other process of tests.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch

if importlib.util.find_spec("hypothesis") is not None:  # make gpu-day takes an interpreter that may not have it
    import hypothesis

    # A busy machine is no failure, nor is a folder that a test's examples share.
    checks = [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture]
    hypothesis.settings.register_profile("other", deadline=None, suppress_health_check=checks)
    hypothesis.settings.register_profile("plsc", hypothesis.settings.get_profile("other"), derandomize=True)
    hypothesis.settings.load_profile("plsc")
    # Examples would hang on the constants of the modules that a process has imported by then.
    providers = importlib.import_module("hypothesis.internal.conjecture.providers")
    if hasattr(providers, "_get_local_constants") and hasattr(providers, "_local_constants"):
        providers._get_local_constants = lambda none=providers._local_constants: none

for folder in (Path(__file__).parent, Path(__file__).parents[1]):  # tests share reference.py and support/;
    sys.path.insert(0, str(folder))  # the pool's workers import the test modules by their full names

from support.hermetic import harness, hermetic, unwatched  # noqa: E402
from support.interpreter import Interpreter  # noqa: E402
from support.live_ring import run_live, summary  # noqa: E402
from support.measured import Commands  # noqa: E402
from support.ranks import RankPool  # noqa: E402
from support.rings import keeps_to_its_process, mark_second_ring, unknown_cases  # noqa: E402
from support.time_limit import time_limit  # noqa: E402

pytest_plugins = ["pytester"]  # tests of the rings run tests


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    """A test draws the same numbers whatever ran before it, and others than a head or loader of seed 0 does."""
    torch.manual_seed(1234)


@pytest.fixture(autouse=True)
def _umask() -> Iterator[None]:
    """Commands that keep a gallery close their files to others, for the rest of their process."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture(autouse=True, scope="session")
def _strict_ranks() -> Iterator[None]:
    """A warning is an error on the ranks that commands start from this process, too."""
    from plsc.parallel import launch

    environment = launch.rank_environment
    with pytest.MonkeyPatch.context() as patch:
        strict = {"PYTHONWARNINGS": "error"}
        patch.setattr(launch, "rank_environment", lambda *args: {**environment(*args), **strict})
        yield


@pytest.fixture(autouse=True, scope="session")
def _kernels() -> None:
    """Compile the CPU kernels before a test needs them, which may start no compiler."""
    from plsc.native import build

    with harness(), pytest.MonkeyPatch.context() as patch:
        for path in (os.environ.get("PLSC_CPU"), *build.available_paths()[-1:]):
            if path:
                patch.setenv("PLSC_CPU", path)
            for source in ("head_kernels", "scan_kernels"):
                build.library(source)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """``ranks(world, function, *args)``: the results of ``function(mesh, *args)`` on ``world`` gloo ranks."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def commands() -> Iterator[Commands]:
    """``commands(*words)``: what a plsc command in a fork did, and what it cost."""
    running = Commands()
    yield running
    running.close()


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    """``interpreter(function, *args)``: its result where Triton's kernels are interpreted on the CPU."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs triton")
    process = Interpreter()
    yield process
    process.close()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """A live test may run again."""
    return run_live(item, nextitem) or None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Limit the time of fixtures: one may do the work of a whole file, but ends before faulthandler_timeout."""
    with time_limit(540), watched(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Limit the time of each test."""
    with time_limit(), watched(item):
        return (yield)


def has_feature(name: str) -> bool:
    """Whether the rare feature is there."""
    return (Path(__file__).parents[1] / "plsc/features" / name).is_dir()


@contextlib.contextmanager
def watched(item: pytest.Item) -> Iterator[None]:
    """The first ring's tests keep to their process, but for those that say ``live``; GPUs' compilers are processes."""
    if not keeps_to_its_process(item):
        with unwatched():
            yield
        return
    from plsc.models import trial

    # A model is tried in a process of its own, whose limits keep a wrong one from taking this one's memory.
    doors = {name: harness()(getattr(trial, name)) for name in ("_spawned", "_forked")}
    with mock.patch.multiple(trial, **doors), hermetic():
        yield


@pytest.hookimpl(tryfirst=True)  # before -m chooses by the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the second ring. Tests marked gpu say why they do not run where there is none.

    A rare feature's folder can be taken away, and the tests that are of it go with it.
    """
    gone = [item for item in items if any(not has_feature(mark.args[0]) for mark in item.iter_markers("feature"))]
    items[:] = [item for item in items if item not in gone]
    for item in items:
        mark_second_ring(item)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    if config.args == config.getini("testpaths") and (unknown := unknown_cases(items)):  # everything was collected
        raise pytest.UsageError(f"first_ring names no case by {unknown}")


def pytest_collection_finish() -> None:
    """Spare the collector what stays: it takes seconds to go through all tests, and each service does as it starts."""
    gc.collect()
    gc.freeze()
    if "plsc.serve.server" in sys.modules:
        sys.modules["plsc.serve.server"].gc = mock.Mock()  # type: ignore[attr-defined]


def pytest_unconfigure() -> None:
    """Let the interpreter's end clear them."""
    gc.unfreeze()


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Under pytest-xdist, hand the number of deselected tests to the process that writes the summary."""
    output: dict[str, Any] | None = getattr(items[0].config, "workeroutput", None)
    if output is not None:
        output["deselected"] = output.get("deselected", 0) + len(items)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Keep a worker's number; every worker collects, and deselects, the same tests."""
    node.config.stash[DESELECTED] = getattr(node, "workeroutput", {}).get("deselected", 0)


DESELECTED = pytest.StashKey[int]()
LEFT_OUT = {
    "not exhaustive": "the second ring: live and slow tests, other engines and options; 'make test-all'",
}
SKIP_HINTS = {
    "needs Chromium": "the page's tests; install Chromium to run them (Debian, Ubuntu: apt-get install chromium)",
    "needs a CUDA device": "GPU tests; run them on a machine with an NVIDIA GPU",
    "needs a C++ compiler": "tests of compiled CPU kernels; install g++ or clang++, or name a compiler in CXX",
    "needs bash and curl": "blocks of the documentation; install curl to run them",
    "Han fonts or Unihan": "tests of Han characters; apt-get install the fonts of docs/glyphs.md and unicode-data",
    "is not installed": "tests beside optional peers; 'make install' installs them",
}


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say in a line each what was left out, and how to run it."""
    reasons = [str(report.longrepr) for report in terminalreporter.stats.get("skipped", [])]
    for reason, hint in SKIP_HINTS.items():
        count = sum(reason in text for text in reasons)
        if count:
            terminalreporter.write_line(f"{count} skipped: {hint}")
    left_out = LEFT_OUT.get(config.getoption("markexpr"))
    if left_out is not None:
        count = len(terminalreporter.stats.get("deselected", [])) or config.stash.get(DESELECTED, 0)
        terminalreporter.write_line(f"{count} left out: {left_out}")
    for line in summary(report for reports in terminalreporter.stats.values() for report in reports):
        terminalreporter.write_line(line)
