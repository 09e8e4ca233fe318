"""The live ring: tests marked ``live`` reach beyond their process, and a failure of theirs is run twice more.

What the machine does at that moment may fail one. The last lines of a run name each that needed another run: one that
stands there often has a defect, or is one.
"""

import contextlib
from collections.abc import Iterable

import pytest
from _pytest.runner import runtestprotocol

RUNS = 3
_PROPERTY = "runs of a live test"  # a report takes it from the process that ran the test to the one that tells


def run_live(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    """Run a test marked ``live`` until it passes, RUNS times at most; False where it is not marked."""
    if item.get_closest_marker("live") is None or item.config.getoption("usepdb"):
        return False
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    earlier = []
    for run in range(1, RUNS + 1):
        del item.user_properties[:]
        item.user_properties.append((_PROPERTY, run))
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        failed = [report for report in reports if report.failed]
        if not failed or run == RUNS:
            break
        earlier += [(f"run {run} failed in {report.when}", report.longreprtext) for report in failed]
        with contextlib.suppress(Exception):  # the next run takes all fixtures anew, of whatever scope
            item.session._setupstate.teardown_exact(None)
    for report in reports:
        if report.failed:
            report.sections += earlier
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def summary(reports: Iterable[object]) -> list[str]:
    """Lines on the live tests among the reports of a run: none where none ran."""
    runs: dict[str, int] = {}
    for report in reports:
        if isinstance(report, pytest.TestReport):
            for name, count in report.user_properties:
                if name == _PROPERTY:
                    runs[report.nodeid] = count
    again = sorted(name for name, count in runs.items() if count > 1)
    if not runs:
        return []
    count = f"{len(again)} of {len(runs)}" if again else "none"
    return [f"live tests that needed another run: {count}", *(f"  {name}" for name in again)]
