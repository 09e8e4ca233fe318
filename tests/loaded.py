"""Runs the first ring again and again beside busy processes: a test that can fail by chance fails here.

    python tests/loaded.py [--runs N] [--busy N] [--out FILE] [-- COMMAND…]

COMMAND is ``make test`` where none is given. The last lines of each run are kept in FILE, with the live tests that
needed another run. The exit status is 1 where a run was not green.
"""

import argparse
import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINES = 40  # of a run's output: the failures' names and what was left out
_BUSY = "while True: pass"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10, metavar="N", help="runs (default: 10)")
    parser.add_argument("--busy", type=int, default=2, metavar="N", help="busy processes beside them (default: 2)")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "loaded.txt", metavar="FILE", help="of last lines")
    parser.add_argument("command", nargs="*", metavar="COMMAND", help="what to run in place of make test")
    args = parser.parse_args(arguments)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text("")
    red = 0
    with busy(args.busy):
        for run in range(1, args.runs + 1):
            green, told = one_run(args.command or ["make", "test"])
            red += not green
            head = f"run {run} of {args.runs}: {'green' if green else 'RED'}"
            print(f"{head}: {told[-1] if told else ''}", flush=True)
            with args.out.open("a") as file:
                file.write("\n".join([head, *told, ""]) + "\n")
    print(f"{args.runs - red} of {args.runs} green; the last lines of each are in {args.out}")
    return int(red > 0)


def one_run(command: Sequence[str]) -> tuple[bool, list[str]]:
    """Whether the command ended well, and its last lines, with how long it took."""
    begun = time.monotonic()
    done = subprocess.run(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    lines = done.stdout.splitlines()[-LINES:]
    return done.returncode == 0, [*lines, f"exit status {done.returncode} after {time.monotonic() - begun:.0f} s"]


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes that take a core each, within the block."""
    processes = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


if __name__ == "__main__":
    sys.exit(main())
