"""Do everything once, on images that plsc draws itself: train with two ranks, evaluate on identities never trained
on, embed them, build an index, search, export to ONNX.

    plsc quickstart --out quickstart

It takes about five minutes on two CPU cores and writes report.html (look at it), report.json, the run, the
embeddings, the index and model.onnx. If it is stopped, the same command resumes it.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from plsc.tools.entry import main

HELP = "train, evaluate, embed, index, search and export once, on built-in data"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--out", metavar="DIR", type=Path, default=Path("quickstart"), help="where (quickstart)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run the steps and write the report."""
    from plsc.quickstart.report import write_report
    from plsc.quickstart.steps import QuickstartPaths, run_quickstart

    paths = QuickstartPaths(args.out)
    result = run_quickstart(paths)
    page = write_report(paths, result)
    trained = result.report["trained"]
    print(
        f"\nunseen identities: accuracy {trained['accuracy']:.4f}, rank-1 {trained['rank1']:.4f}; "
        f"{result.report['seconds']:.0f} s in all\nlook at {page}"
    )
    return result.report


if __name__ == "__main__":
    raise SystemExit(main(["quickstart", *sys.argv[1:]]))
