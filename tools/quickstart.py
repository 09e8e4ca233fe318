"""Do everything once, on pictures that plsc draws by itself: train with two ranks, evaluate on identities
never trained on, embed them, build an index, search, export to ONNX.

    plsc quickstart --out quickstart

It takes about five minutes on two CPU cores and writes report.html (look at it), report.json, the run, the
embeddings, the index and model.onnx. If it is stopped, the same command goes on where it stood.
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
    """Follow the course and draw its report."""
    from plsc.quickstart.course import Course, follow
    from plsc.quickstart.report import write_report

    course = Course(args.out)
    findings = follow(course)
    page = write_report(course, findings)
    trained = findings.report["trained"]
    print(
        f"\nunseen identities: accuracy {trained['accuracy']:.4f}, rank-1 {trained['rank1']:.4f}; "
        f"{findings.report['seconds']:.0f} s in all\nlook at {page}"
    )
    return findings.report


if __name__ == "__main__":
    raise SystemExit(main(["quickstart", *sys.argv[1:]]))
