"""The head's step and a training step of this checkout beside those of another commit, in turn.

    python benchmarks/two_commits.py --before COMMIT [--rounds 5]

The other commit is checked out into a temporary folder. Each turn is `plsc bench head` or `plsc bench train` of one of
both, on one rank. A row has the least processor time of a step in each, which other work on the machine disturbs least,
and before / now of these; above 1 the step has become faster. Adds rows to benchmarks/results/two_commits.csv.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from results_file import RESULTS, print_and_add

ROOT = Path(__file__).parents[1]
BENCHES = {
    "head, plsc-fp32": ("head", "--contestants", "plsc-fp32", "--classes", "100000", "--steps", "8"),
    "head, plsc": ("head", "--contestants", "plsc", "--classes", "100000", "--steps", "8"),
    "head, plsc-fp32-sampled": ("head", "--contestants", "plsc-fp32-sampled", "--classes", "100000", "--steps", "20"),
    "training step, plsc-fp32": ("train", "--contestants", "plsc-fp32", "--steps", "6"),
}


def main() -> None:
    """Take turns, and print and write a row for each bench."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", required=True, metavar="COMMIT", help="the commit to compare with")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="turns of each (default: 5)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        before = Path(folder) / "before"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(before), args.before], check=True)
        try:
            for name, words in BENCHES.items():
                row = {"bench": name, "before": args.before, **compared(words, before, args.rounds)}
                print_and_add("two_commits", row, RESULTS)
        finally:
            subprocess.run([*git, "remove", "--force", str(before)], check=True)


def compared(words: tuple[str, ...], before: Path, rounds: int) -> dict[str, Any]:
    """The figures of one bench."""
    taken: dict[Path, list[float]] = {before: [], ROOT: []}
    for turn in range(rounds + 1):  # the first one compiles kernels, and is not counted
        for checkout, seconds in taken.items():
            measured = seconds_of_a_step(checkout, words)
            seconds += [measured] if turn else []
    ratios = [was / now for was, now in zip(taken[before], taken[ROOT], strict=True)]
    least = {checkout: min(seconds) for checkout, seconds in taken.items()}
    return {
        "rounds": rounds,
        "before_ms": round(1e3 * least[before], 1),
        "now_ms": round(1e3 * least[ROOT], 1),
        "ratio": round(least[before] / least[ROOT], 3),
        "ratio_low": round(min(ratios), 3),
        "ratio_high": round(max(ratios), 3),
    }


def seconds_of_a_step(checkout: Path, words: tuple[str, ...]) -> float:
    """Processor seconds of a step, as a turn of a checkout measures them."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        command = [sys.executable, "-m", "plsc.tools.entry", "bench", *words, "--nproc", "1", "--rounds", "1"]
        paths = {**os.environ, "PYTHONPATH": str(checkout)}
        subprocess.run([*command, "--json", str(found)], check=True, stdout=subprocess.DEVNULL, cwd=folder, env=paths)
        return float(json.loads(found.read_text())["rows"][0]["cpu_s"])


if __name__ == "__main__":
    main()
