"""``python tests/gpu_trace``: trace all steps, print what differs from counts.json; ``--update`` writes it."""

import argparse
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from gpu_trace import ratchet, runtime  # noqa: E402
from gpu_trace.runner import summaries, trace_all  # noqa: E402
from gpu_trace.scenarios import SCENARIOS  # noqa: E402


def main() -> int:
    """Compare, and write where asked; 1 where a count is worse than the committed one."""
    parser = argparse.ArgumentParser(prog="python tests/gpu_trace", description=__doc__)
    parser.add_argument("--update", action="store_true", help="write counts.json, unless a count became worse")
    parser.add_argument("--raise", dest="raised", action="store_true", help="with --update: write worse counts too")
    arguments = parser.parse_args()
    missing = runtime.missing()
    if missing is not None:
        print(f"cannot trace here: {missing}", file=sys.stderr)
        return 2
    new = summaries(trace_all(SCENARIOS))
    changes = ratchet.compare(ratchet.committed(), new) if ratchet.COUNTS.exists() else []
    for change in changes:
        print(change)
    worse = any(change.worse for change in changes)
    if arguments.update and (arguments.raised or not worse):
        ratchet.write(new)
    elif arguments.update:
        print("not written: --update --raise also takes counts that became worse", file=sys.stderr)
    return int(worse and not arguments.raised)


if __name__ == "__main__":
    sys.exit(main())
