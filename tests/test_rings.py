"""The rules of the rings: what the first one forbids, what is run again, which cases are left out."""

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import get_context

import pytest
from support.hermetic import harness, hermetic, unwatched

FORBIDDEN: dict[str, Callable[[], object]] = {
    "subprocess.Popen": lambda: subprocess.run([sys.executable, "-c", ""]),
    "os.fork": os.fork,
    "os.posix_spawn": lambda: os.posix_spawn(sys.executable, [sys.executable, "-c", ""], {}),
    "multiprocessing.start": lambda: get_context("spawn").Process(target=print).start(),
    "socket.bind": lambda: socket.socket().bind(("127.0.0.1", 0)),
    "socket.connect": lambda: socket.socket(socket.AF_INET6).connect(("::1", 9)),
    "tests.sleep": lambda: time.sleep(0.001),
    "os.kill": lambda: os.kill(os.getpid(), signal.SIGURG),
}


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
@pytest.mark.parametrize("event", FORBIDDEN)
def test_what_reaches_beyond_the_process_fails_and_names_the_mark(event: str) -> None:
    with pytest.raises(pytest.fail.Exception, match=rf"{event}\(.*mark the test live"), hermetic():
        FORBIDDEN[event]()


def run(function: Callable[[], None]) -> None:
    """In a thread."""
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def test_a_thread_that_swallows_the_failure_does_not_hide_it() -> None:
    def swallow() -> None:
        with pytest.raises(pytest.fail.Exception):
            time.sleep(0.001)

    with pytest.raises(pytest.fail.Exception, match=r"tests\.sleep"), hermetic():
        run(swallow)


def test_what_stays_within_the_process_and_the_suites_own_door_are_free() -> None:
    with hermetic():
        time.sleep(0)
        os.kill(os.getpid(), 0)
        near, far = socket.socketpair()
        near.close()
        far.close()
        with harness():
            subprocess.run([sys.executable, "-c", ""], check=True)


def test_what_a_live_test_left_to_the_collector_is_not_held_against_the_next() -> None:
    class Loader:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGURG)  # as a loader's iterator does to its workers

    gc.disable()  # it is to be collected by the harness alone
    try:
        with unwatched():
            Loader()
        with hermetic():
            gc.collect()
    finally:
        gc.enable()


RINGS = """
import pytest
from support.live_ring import run_live, summary
from support.rings import mark_second_ring, unknown_cases

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    return run_live(item, nextitem) or None

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        mark_second_ring(item)
    print("unknown", unknown_cases(items))

def pytest_configure(config):
    for mark in ("live", "exhaustive", "first_ring"):
        config.addinivalue_line("markers", mark)

def pytest_terminal_summary(terminalreporter):
    for line in summary(report for reports in terminalreporter.stats.values() for report in reports):
        terminalreporter.write_line(line)
"""


@pytest.fixture
def ring(pytester: pytest.Pytester) -> pytest.Pytester:
    """A folder of tests under the rules of the rings."""
    pytester.makeconftest(RINGS)
    return pytester


def test_a_live_test_runs_twice_more_with_fixtures_of_its_own_and_is_told(ring: pytest.Pytester) -> None:
    ring.makepyfile(
        """
        import pytest

        made, asked = [], []

        @pytest.fixture(scope="module")
        def world():
            made.append(1)
            assert len(made) > 1
            return len(made)

        @pytest.mark.live
        def test_second(world, tmp_path):
            asked.append(world)
            assert world == 3

        @pytest.mark.live
        def test_never():
            assert False, "as ever"

        @pytest.mark.live
        def test_at_once():
            assert asked == [2, 3]

        def test_not_live():
            asked.append(0)
            assert asked != [2, 3, 0]
        """
    )
    result = ring.runpytest_inprocess()
    result.assert_outcomes(passed=2, failed=2)
    result.stdout.fnmatch_lines(["*run 1 failed in call*", "*run 2 failed in call*"])
    result.stdout.re_match_lines(["live tests that needed another run: 2 of 3", ".*::test_never", ".*::test_second"])


def test_no_line_of_reruns_without_live_tests_and_none_where_all_pass(ring: pytest.Pytester) -> None:
    ring.makepyfile("def test_here(): pass")
    ring.runpytest_inprocess().stdout.no_fnmatch_line("live tests*")
    ring.makepyfile(test_far="import pytest\n@pytest.mark.live\ndef test_far(): pass")
    ring.runpytest_inprocess().stdout.fnmatch_lines(["live tests that needed another run: none"])


def test_cases_that_first_ring_does_not_name_are_left_out_and_unknown_names_are_told(ring: pytest.Pytester) -> None:
    ring.makepyfile(
        """
        import pytest

        @pytest.mark.first_ring("1-b", "3-b")
        @pytest.mark.parametrize("name", "ab")
        @pytest.mark.parametrize("number", [1, 2])
        def test_pairs(number, name):
            assert (number, name) == (1, "b")
        """
    )
    result = ring.runpytest_inprocess("-s", "-m", "not exhaustive")
    result.assert_outcomes(passed=1, deselected=3)
    result.stdout.fnmatch_lines(["unknown *test_pairs?3-b?'?"])
