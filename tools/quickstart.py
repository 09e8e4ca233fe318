"""Do everything once, on images that plsc draws itself: train with two ranks, evaluate on identities never trained
on, embed them, build an index, search, export to ONNX, fill a gallery.

    plsc quickstart --out quickstart
    plsc quickstart --serve

It takes two to seven minutes on two CPU cores and writes report.html (look at it), report.json, the run, the
embeddings, the index, model.onnx, the gallery with its calibration, and queries/*.jpg to drop on the page of the
service: ten that find their people, hard-1.jpg, which is refused, and two strangers. If it is stopped, the same command
resumes it; of a finished quickstart it begins anew. --serve then serves the gallery; of a finished one it does so at
once.
"""

import argparse
import importlib.util
import os
import socket
from pathlib import Path
from typing import Any

from plsc.errors import PlscError, UsageError
from plsc.progress import show
from plsc.quickstart import QuickstartPaths
from plsc.tools.entry import main

_OF_EXTRAS = ("faiss", "httpx", "onnx", "onnxruntime", "onnxscript", "uvicorn")  # imported after minutes of training
_INSTALL = "pip install 'plsc-torch[serve]'"  # brings all of them
PORT = 8080  # of plsc serve
HELP = "train, evaluate, embed, index, search, export and fill a gallery once, on built-in data"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--out", metavar="DIR", type=Path, default=Path("quickstart"), help="where (quickstart)")
    parser.add_argument("--serve", action="store_true", help="serve the gallery then, at http://127.0.0.1:8080")


def run(args: argparse.Namespace) -> dict[str, Any] | None:
    """Run the steps and write the report; serve what they made if that was asked for."""
    missing = [name for name in _OF_EXTRAS if importlib.util.find_spec(name) is None]
    if missing:
        raise PlscError(f"it takes every part of plsc once, and {', '.join(missing)} are missing: {_INSTALL}")
    paths = QuickstartPaths(args.out)
    if args.serve:
        _check_port(paths)  # before minutes of training
    report = None if args.serve and paths.report.exists() else _run_steps(paths)
    if args.serve:
        show("", f"search by a picture of {paths.queries}/ on the page of the service, whose address follows", "")
        show(f"    {paths.serve_command}", "")
        code = main(paths.serve_arguments)
        if code:
            raise SystemExit(code)
    else:
        show(f"to search by a picture of {paths.queries}/, open http://127.0.0.1:{PORT} after", "")
        show(f"    {paths.serve_command}", "")
    return report


def _check_port(paths: QuickstartPaths) -> None:
    try:
        socket.create_server(("127.0.0.1", PORT)).close()
    except OSError as error:
        raise UsageError(
            f"cannot serve at 127.0.0.1 port {PORT}: {os.strerror(error.errno or 0)}; leave --serve out, and serve by "
            f"`{paths.serve_command} --port N` then"
        ) from None


def _run_steps(paths: QuickstartPaths) -> dict[str, Any]:
    from plsc.quickstart.report import write_report
    from plsc.quickstart.steps import run_quickstart

    result = run_quickstart(paths)
    page = write_report(paths, result)
    trained = result.report["trained"]
    show(
        "",
        f"unseen identities: accuracy {trained['accuracy']:.4f}, rank-1 {trained['rank1']:.4f}; "
        f"{result.report['seconds']:.0f} s in all",
        f"look at {page}",
    )
    return result.report
