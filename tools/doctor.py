"""Examine this machine and the kernels on it: ok or FAIL a line, what was found, and what to do where it is wrong.

  versions     of everything that computes, and whether they go together
  machine      driver, processor, memory, space, GPUs and their links; the compiled CPU kernels
  choices      what a class head of each storage and the exact search compute with here, and why
  kernels      each kernel that runs here against float64: the error beside its bound
  rates        products, memory, and the bus to the GPU
  collectives  exact or not, and the bus bandwidth, with several ranks
  training     a few steps on all ranks: twice bit by bit the same, and beside float64 in one piece
  plan         what plsc plan predicts of the head here, beside what was measured

Without a GPU it takes about 16 s of processor time. A terminal shows what is being looked at.
Exit code 1 if a line FAILs. A rank that hangs is named after --limit seconds. Send the file of --json with a question
or a bug report: it holds versions, figures and host names, and nothing else of your files.

  plsc doctor --json doctor.json
  plsc doctor --nproc 8 --json doctor.json
  torchrun --nproc-per-node 8 --no-python plsc doctor --json doctor.json
  PLSC_CPU=avx2 plsc doctor --only kernels
"""

import argparse
from typing import Any

from plsc.doctor import LIMIT_SECONDS, SECTIONS
from plsc.files import write_json
from plsc.tools.entry import above_0, is_launched, launch_ranks

HELP = "examine this machine: versions, kernels against float64, rates, a training step; ok or FAIL a line"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--nproc", metavar="N", type=int, default=1, help="ranks on this machine (1; one per GPU)")
    parser.add_argument("--only", nargs="+", metavar="SECTION", choices=SECTIONS, help="these sections alone")
    text = "seconds without progress after which a rank is reported as hanging (%(default)g)"
    parser.add_argument("--limit", metavar="S", type=above_0, default=LIMIT_SECONDS, help=text)


def run(args: argparse.Namespace) -> dict[str, Any] | None:
    """Start the ranks, or be one: print the report; its values as ``--json`` stores them."""
    if args.nproc != 1 and not is_launched():
        launch_ranks(args)
        return None
    from plsc.doctor.examination import Examination

    def save(report: dict[str, Any]) -> None:
        if args.json is not None:
            write_json(args.json, report)

    return Examination(args.only or (), args.limit, save).run()


def exit_code(report: dict[str, Any] | None) -> int:
    """0 if all lines are ok, else 1; None of a rank that does not report."""
    return 0 if report is None or report["ok"] else 1
