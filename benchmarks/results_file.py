"""What the scripts share: their options, and rows of benchmarks/results/*.csv with date, device and versions."""

import argparse
import csv
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from plsc.bench.comparison import BASELINES, Comparison, Contestant, Task, all_contestants, compare
from plsc.bench.harness import environment

RESULTS = Path(__file__).parent / "results"


def add_row(name: str, row: Mapping[str, Any], folder: Path = RESULTS) -> None:
    """Append ``row`` to FOLDER/NAME.csv behind the date, the device and the versions of what measured it."""
    path = folder / f"{name}.csv"
    is_new = not path.exists()
    whole = {**environment(), **row}
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(whole), lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerow(whole)


def print_and_add(name: str, row: Mapping[str, Any], folder: Path) -> None:
    """Print a row, a line for each figure, and :func:`add_row`."""
    width = max(map(len, row))
    for column, value in row.items():
        print(f"{column:>{width}} {value}")
    add_row(name, row, folder)


def script_parser(description: str | None, *, results: str | None = None, **defaults: Any) -> argparse.ArgumentParser:
    """Make a script's parser, with an option of a default's type for each of ``defaults``.

    Args:
        description: the script's docstring; it says what the options are.
        results: the name of the file of results, for which there is ``--out FOLDER`` then.
        defaults: of the options, by their names with underscores.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default, help=f"({default})")
    if results is not None:
        text = f"where {results}.csv is"
        parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER", help=text)
    return parser


def in_process(script: str, part: str, **options: object) -> dict[str, float]:
    """The figures that ``--part PART`` of a script prints as its last line, from a fresh process."""
    command = [sys.executable, script, "--part", part]
    command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def answers_in_turn(
    script: str, ways: Iterable[str], turns: int, args: argparse.Namespace, **environment: str
) -> dict[str, list[dict[str, Any]]]:
    """What ``script --serve WAY`` answers, by way: an object of JSON for each line that it is sent.

    The processes, one for each of ``ways``, take ``turns`` turns, so that other load meets them alike.
    """
    options = [word for name in ("backbone", "batch", "threads") for word in (f"--{name}", str(getattr(args, name)))]
    processes = {
        way: subprocess.Popen(
            [sys.executable, script, "--serve", way, *options],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for way in ways
    }
    answers: dict[str, list[dict[str, Any]]] = {way: [] for way in processes}
    for _ in range(turns):
        for way, process in processes.items():
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            answers[way].append(json.loads(process.stdout.readline()))
    for process in processes.values():
        process.communicate()
    return answers


def beside_peer(
    subject: str,
    ours: Mapping[str, Contestant],
    peer: Path,
    classes: Sequence[int],
    batch: int,
    rounds: int,
    names: Sequence[str] | None = None,
) -> dict[str, Any]:
    """:func:`plsc.bench.comparison.compare` of heads or loops, all or ``names``, with insightface's in ``peer``."""
    known = all_contestants(subject, ours, BASELINES)
    task = Task("", 0, 0, peer=str(peer.absolute()), baselines=str(BASELINES))
    return compare(Comparison(subject, known, names or tuple(known), task, classes, [batch], rounds))
