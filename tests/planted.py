"""Plants each defect of tests/planted_defects in a copy of this checkout, and tells which ring of tests catches it.

    python tests/planted.py [--only WORD] [--list] [--whole] [--processes N]

A defect is caught by ``make test`` where a test outside of the marker "exhaustive" fails, by ``make test-all`` where
one within it does, and survives where none does. The tests are those of the files that guard it, or all with
``--whole``; they have to pass without any defect. The exit status is 1 where a defect survives, or where ``make test``
catches fewer than nine of ten.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from planted_defects import DEFECTS, Defect, planted

ROOT = Path(__file__).parents[1]
# What a ring's target runs beyond the one before it, as pytest's marker expression.
RINGS = {"make test": "not exhaustive", "make test-all": "exhaustive"}
_FIRST = "make test"
LEAST_SHARE = 0.9  # of the defects that make test has to catch
LIMIT_SECONDS = 1800.0  # of a run; tests that hang end by themselves long before
# The package of the copy has to be imported, and not the one that is installed.
_PYTEST = (
    "import os, sys, plsc, pytest\n"
    "assert os.path.dirname(plsc.__file__) == os.path.join(os.getcwd(), 'plsc'), plsc.__file__\n"
    "sys.exit(pytest.main(sys.argv[1:]))"
)
_PASSED, _FAILED, _NOTHING_TO_RUN = 0, 1, 5  # pytest's exit statuses; its others say that it could not run


class Verdict(NamedTuple):
    """The ring that catches a defect, and the test that fails first; None and "" where it survives."""

    defect: Defect
    ring: str | None
    test: str
    seconds: float


class Runner:
    """Runs tests of copies, whose compiled kernels lie in one temporary cache."""

    def __init__(self, scratch: Path, whole: bool) -> None:
        self._scratch, self._whole = scratch, whole

    def first_failure(self, copy: Path, ring: str, tests: Sequence[str]) -> str:
        """The test of a ring that fails first in ``copy``, or "". Exits where the tests cannot be run."""
        command = ["-x", "-q", "-p", "no:cacheprovider", "-m", RINGS[ring], *(["tests"] if self._whole else tests)]
        environment = {**os.environ, "PYTHONPATH": str(copy), "XDG_CACHE_HOME": str(self._scratch / "cache")}
        process = subprocess.Popen(
            [sys.executable, "-c", _PYTEST, *command],
            cwd=copy,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"no end within {LIMIT_SECONDS:g} s"
        if process.returncode in (_PASSED, _NOTHING_TO_RUN):
            return ""
        found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", output, re.MULTILINE)
        if process.returncode != _FAILED or found is None:
            raise SystemExit(f"the tests could not be run in {copy}:\n{output[-4000:]}")
        return found[1]

    def verdict(self, defect: Defect) -> Verdict:
        """Plant a defect, and run its tests ring by ring."""
        began = time.monotonic()
        with self.copied() as copy:
            path = copy / defect.file
            path.write_text(planted(path.read_text(encoding="utf-8"), defect), encoding="utf-8")
            for ring in RINGS:
                if failure := self.first_failure(copy, ring, defect.tests):
                    if ring != _FIRST:
                        self.require_green(ring, [failure])
                    return Verdict(defect, ring, failure, time.monotonic() - began)
        return Verdict(defect, None, "", time.monotonic() - began)

    def require_green(self, ring: str, tests: Sequence[str]) -> None:
        """Exit unless the tests of a ring pass without any defect."""
        with self.copied() as copy:
            if failure := self.first_failure(copy, ring, tests):
                raise SystemExit(f"without any defect fails {failure}: mend that first")

    @contextmanager
    def copied(self) -> Iterator[Path]:
        """A copy of the files that git tracks, or would; links stay links."""
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        copy = Path(tempfile.mkdtemp(dir=self._scratch))
        for name in filter(None, listed.stdout.split("\0")):
            if os.path.lexists(ROOT / name):  # a removal may not be committed yet
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
        try:
            yield copy
        finally:
            shutil.rmtree(copy)


def main() -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", metavar="WORD", default="", help="the defects with WORD in their name or file")
    parser.add_argument("--list", action="store_true", help="list the defects and run nothing")
    parser.add_argument("--whole", action="store_true", help="run all tests, and not the guarding files alone")
    parser.add_argument("--processes", metavar="N", type=int, default=1, help="defects that are tried at a time")
    args = parser.parse_args()
    defects = [each for each in DEFECTS if args.only in f"{each.name} {each.file}"]
    if args.list:
        print(*(f"{each.file}: {each.name}" for each in defects), sep="\n")
        return 0
    counts = dict.fromkeys([*RINGS, "SURVIVES"], 0)
    with tempfile.TemporaryDirectory(prefix="planted-") as scratch, ThreadPoolExecutor(args.processes) as pool:
        runner = Runner(Path(scratch), args.whole)
        runner.require_green(_FIRST, sorted({test for defect in defects for test in defect.tests}))
        for defect, ring, test, seconds in pool.map(runner.verdict, defects):
            counts[ring or "SURVIVES"] += 1
            print(f"{ring or 'SURVIVES':13}  {defect.name}  {defect.file}  {test}  {seconds:.0f} s", flush=True)
    print(f"{len(defects)} defects: " + ", ".join(f"{name} {count}" for name, count in counts.items()))
    return int(counts["SURVIVES"] > 0 or counts[_FIRST] < LEAST_SHARE * len(defects))


if __name__ == "__main__":
    raise SystemExit(main())
