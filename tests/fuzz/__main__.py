"""Run fuzz targets for as long as one likes: python tests/fuzz --seconds 60 --target rec; make fuzz does it.

Each target runs in its turn, for its share of the time. Inputs on which one fails are kept in --failures, with the
command that repeats each; the exit code is 1 then.
"""

import argparse
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from support.live_service import live_service  # noqa: E402
from support.measured import Commands  # noqa: E402
from untrusted.samples import make_samples  # noqa: E402

from fuzz import guarded_routes, protected_files, readers, routes  # noqa: E402
from fuzz.driver import Target, fault_of, fuzz, save  # noqa: E402

ROUND_SECONDS = 10.0  # a target's turn at most, so that a short run reaches every target


@contextmanager
def all_targets(folder: Path) -> Iterator[list[Target]]:
    """Every target, with its samples and a live service; they write below ``folder``."""
    (folder / "samples").mkdir(parents=True)
    commands = Commands()
    try:
        samples = make_samples(folder / "samples", commands)
    finally:
        commands.close()
    with live_service(folder / "service") as live, guarded_routes.guarded_service(folder / "guarded") as guarded:
        yield [
            *readers.targets(samples, folder / "read"),
            *protected_files.targets(samples, folder / "protected"),
            *routes.targets(live),
            *guarded_routes.targets(guarded),
        ]


def main() -> int:
    """Fuzz, or repeat one input; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0, help="of all targets together (300)")
    parser.add_argument("--target", default="", help="those whose name holds this text (all)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), help="(a random one)")
    parser.add_argument("--failures", type=Path, default=Path("fuzz-failures"), help="folder of inputs that fail")
    parser.add_argument("--input", type=Path, help="run --target on this file alone")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, all_targets(Path(folder)) as found:
        chosen = [target for target in found if args.target in target.name]
        if not chosen:
            parser.error(f"no target has {args.target!r} in its name; they are {', '.join(t.name for t in found)}")
        if args.input is not None:
            return _repeat(chosen[0], args.input)
        return _fuzz(chosen, args)


def _repeat(target: Target, path: Path) -> int:
    reason = fault_of(target, path.read_bytes())
    print(reason or f"{target.name}: nothing goes wrong")
    return int(reason is not None)


def _fuzz(chosen: list[Target], args: argparse.Namespace) -> int:
    failures, share = 0, args.seconds / len(chosen)
    rounds = max(round(share / ROUND_SECONDS), 1)
    for turn in range(rounds):
        for target in chosen:
            for failure in fuzz(target, args.seed + turn, seconds=share / rounds):
                failures += 1
                path = save(failure, args.failures, args.seed + turn)
                print(f"{target.name}: {failure.reason.strip().splitlines()[-1][:300]}")
                print(f"  python tests/fuzz --target {target.name!r} --input {str(path)!r}", flush=True)
    print(f"{len(chosen)} targets, seeds {args.seed} to {args.seed + rounds - 1}, {failures} failures")
    return int(failures > 0)


if __name__ == "__main__":
    raise SystemExit(main())
