"""Everything that only a GPU can tell, in one go: examination, GPU tests, benchmarks of the head. Under 40 minutes.

    make gpu-day                                    # or: python benchmarks/gpu_day.py [--out FOLDER] [--only PART …]
    python benchmarks/gpu_day.py --allow-cpu        # every part once, tiny, to see that the script itself runs

needs torch with triton, numpy, pytest and this project's folder; nothing is installed. The parts run one after the
other, the most important first, each within a time limit. Results lie in gpu-day/DATE-GPU: each part's output as
NAME.log, what it found (doctor.json, tests.xml, head_gpu.csv, peers.json), and summary.md. Start it again to go on: a
part that ended by itself is not run again. Exit code 0 where every part is well, 1 where one is not, 2 without a GPU.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

ROOT = Path(__file__).parents[1]
NAMES = {
    "doctor": "versions, kernels against float64, rates, collectives, a training step, plan beside measured",
    "tests": "the tests that only a GPU can make",
    "head": "whole steps of the head at 50 and 10 million classes, as far as they fit",
    "peers": "the head beside dense logits and torch's fused loss",
    "variants": "which variant of each kernel is fastest",
}
_VERDICTS = (0, 1)  # exit codes of a part that came to a result, good or bad; others, and time-outs, are tried again
_LAST_LINES = 3
_GRACE_SECONDS = 10.0


@dataclass(frozen=True)
class Part:
    """One command of the day.

    Attributes:
        name: of its files.
        command: behind the interpreter.
        minutes: after which it is ended.
        environment: variables on top of the process's.
    """

    name: str
    command: list[str]
    minutes: float
    environment: dict[str, str] = field(default_factory=dict)


def parts(out: Path, gpus: int, minutes: float) -> list[Part]:
    """The day on ``gpus`` GPUs, most important first; tiny on a CPU where there is none."""
    doctor = ["-m", "plsc.tools.entry", "doctor", "--json", str(out / "doctor.json"), "--overwrite"]
    tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", f"--junitxml={out / 'tests.xml'}"]
    tests += [str(path.relative_to(ROOT)) for path in gpu_tests()]
    head = ["benchmarks/head_gpu.py", "--out", str(out)]
    bench = ["-m", "plsc.tools.entry", "bench", "head", "--json", str(out / "peers.json"), "--overwrite"]
    if not gpus:
        interpreted = {"TRITON_INTERPRET": "1"}
        sections = ["--only", "versions", "machine", "choices"]
        tiny = ["--classes", "500", "--batch", "8", "--dim", "32", "--rounds", "1", "--steps", "1", "--nproc", "1"]
        return [
            Part("doctor", [*doctor, *sections], minutes),
            Part("tests", tests, minutes),
            Part("head", [*head, "--dry", "--only", "whole"], minutes, interpreted),
            Part("peers", [*bench, *tiny, "--contestants", "plsc", "dense"], minutes),
        ]
    ranks = ["--nproc", str(gpus)] if gpus > 1 else []
    return [
        Part("doctor", [*doctor, *ranks], 8),
        Part("tests", tests, 10),
        Part("head", [*head, "--only", "whole", "--minutes", "5"], 6),
        Part("peers", [*bench, "--limit", "60", "--rounds", "1"], 7),
        Part("variants", [*head, "--only", "variants", "--minutes", "6"], 7),
    ]


def gpu_tests() -> Iterator[Path]:
    """The files with tests that need a GPU: others may import what is not installed here."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if "mark.gpu" in path.read_text(encoding="utf-8"):
            yield path


# Running -------------------------------------------------------------------------------------------------------------


def state_of(out: Path, part: Part) -> dict[str, Any] | None:
    """How a part ended, if it ran: its exit code (None: ended by its time limit) and seconds."""
    path = out / f"{part.name}.state.json"
    return json.loads(path.read_text()) if path.exists() else None


def is_finished(state: dict[str, Any] | None) -> bool:
    """Whether a part came to a result."""
    return state is not None and state["code"] in _VERDICTS


def run(part: Part, out: Path, limit: float) -> None:
    """Run a part for at most ``limit`` seconds; its output and how it ended are left in ``out``."""
    environment = {**os.environ, **part.environment}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment["PYTHONUNBUFFERED"] = "1"
    start, code = time.monotonic(), None
    with (out / f"{part.name}.log").open("wb") as log:
        log.write(f"$ {shlex.join(['python', *part.command])}\n".encode())
        log.flush()
        process = subprocess.Popen(
            [sys.executable, *part.command], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            log.write(f"\nended after {limit:.0f} s, its time limit\n".encode())
        finally:
            end(process)
    state = {"code": code, "seconds": round(time.monotonic() - start, 1), "date": datetime.now(UTC).isoformat()}
    (out / f"{part.name}.state.json").write_text(json.dumps(state))


def end(process: "subprocess.Popen[bytes]") -> None:
    """End a process that still runs: politely first, since a launcher has ranks to end."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


# The summary ---------------------------------------------------------------------------------------------------------


def summary(out: Path, day: list[Part], device: str) -> str:
    """The day as a page: a line for each part, what doctor and tests complain about, and each part's last lines."""
    lines = [f"# {device}, {out.name}", "", f"torch {torch.__version__}, CUDA {torch.version.cuda}", ""]
    lines += ["| part | what it tells | result | seconds |", "|---|---|---|---:|"]
    for part in day:
        state = state_of(out, part)
        seconds = "" if state is None else f"{state['seconds']:.0f}"
        lines.append(f"| [{part.name}]({part.name}.log) | {NAMES[part.name]} | {verdict(state)} | {seconds} |")
    complaints = [*doctors_complaints(out), *tests_complaints(out)]
    if complaints:
        lines += ["", "## What is wrong", "", *(f"- {complaint}" for complaint in complaints)]
    for part in day:
        log = out / f"{part.name}.log"
        if log.exists():
            last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-_LAST_LINES:]
            lines += ["", f"## {part.name}, its last lines", "", "```text", *last, "```"]
    return "\n".join(lines) + "\n"


def verdict(state: dict[str, Any] | None) -> str:
    """A part's end in words."""
    if state is None:
        return "not run: no time was left"
    if state["code"] is None:
        return "ended by its time limit"
    return "ok" if state["code"] == 0 else f"FAIL (exit code {state['code']})"


def doctors_complaints(out: Path) -> Iterator[str]:
    """The lines of doctor.json that FAIL."""
    path = out / "doctor.json"
    if path.exists():
        for section, lines in json.loads(path.read_text())["sections"].items():
            for name, line in lines.items():
                if line["state"] == "FAIL":
                    yield f"doctor, {section}, {name}: {line['text']} ({line['advice']})"


def tests_complaints(out: Path) -> Iterator[str]:
    """The tests that failed, and the first line of why."""
    path = out / "tests.xml"
    if path.exists():
        for case in ElementTree.parse(path).iter("testcase"):
            for problem in [*case.findall("failure"), *case.findall("error")]:
                yield f"test {case.get('classname')}::{case.get('name')}: {problem.get('message', '').splitlines()[0]}"


def main() -> int:
    """Run what has not run yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="of the results (gpu-day/DATE-GPU)")
    parser.add_argument("--minutes", type=float, default=38.0, help="no part goes on for longer (%(default)g)")
    parser.add_argument("--only", nargs="+", metavar="PART", choices=NAMES, help=f"of {', '.join(NAMES)}")
    parser.add_argument("--allow-cpu", action="store_true", help="without a GPU: every part once, tiny")
    args = parser.parse_args()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not gpus and not args.allow_cpu:
        print("gpu-day needs an NVIDIA GPU that torch sees; --allow-cpu runs every part once, tiny", file=sys.stderr)
        return 2
    device = torch.cuda.get_device_name(0) if gpus else "CPU"
    name = f"{datetime.now(UTC).date()}-{re.sub(r'[^A-Za-z0-9]+', '-', device)}"
    out = (args.out or ROOT / "gpu-day" / name).absolute()
    out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * args.minutes
    day = [part for part in parts(out, gpus, args.minutes) if part.name in (args.only or NAMES)]
    for part in day:
        limit = min(60 * part.minutes, deadline - time.monotonic())
        if is_finished(state_of(out, part)):
            print(f"{part.name}: done before, {verdict(state_of(out, part))}", flush=True)
        elif limit > 0:
            print(f"{part.name}: {NAMES[part.name]}; at most {limit / 60:.0f} min", flush=True)
            run(part, out, limit)
            print(f"{part.name}: {verdict(state_of(out, part))}", flush=True)
        (out / "summary.md").write_text(summary(out, day, f"{gpus or 'no'} GPU, {device}"), encoding="utf-8")
    print(f"results: {out}/summary.md")
    return 0 if all((state_of(out, part) or {}).get("code") == 0 for part in day) else 1


if __name__ == "__main__":
    raise SystemExit(main())
