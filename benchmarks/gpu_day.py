"""Everything that only a GPU can tell, in one go and two hours: examination, checks, GPU tests, head, whole steps.

    make gpu-day                                    # or: python benchmarks/gpu_day.py [--out FOLDER] [--only PART …]
    make gpu-day ARGS="--again tests shapes"        # these once more, though they have results
    python benchmarks/gpu_day.py --allow-cpu        # every part once, tiny, to see that the script itself runs

needs torch with triton, numpy, pytest and this project's folder; nothing is installed. The parts run one after the
other, the most important first, each within a time limit. Results lie in gpu-day/DATE-GPU: each part's output as
NAME.log, what it found as NAME.json (tests.xml, head_gpu.csv), summary.md, and report.html with pictures. All of that
is in gpu-day/DATE-GPU.tar.gz, the one file to send. Start it again to go on: a part is finished when it has ended by
itself and its file of results is there, whatever they say; one that lacked a module, say, is run again. Exit code 0
where every part is well, 1 where one is not, 2 without a GPU.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
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
    "compile": "the kernels against float64, and how long each took to compile",
    "doctor": "versions, kernels against float64, rates, collectives, a training step, plan beside measured",
    "checks": "the head against float64 at 2 million classes, with eight places to park gradients",
    "shapes": "steps and passes at B = 128, 512, 1,024, bf16 and TF32: by torch, logits or gradient stored, fused",
    "counters": "what ncu counts of a launch of each pass",
    "sanitizer": "compute-sanitizer over a small step",
    "placement": "a table in host memory with and without CUDA_LAUNCH_BLOCKING, bit by bit",
    "ranks": "unequal batches on two GPUs against float64",
    "tests": "the tests that only a GPU can make",
    "resume": "a training killed with -9 and resumed, beside one that was not, bit by bit",
    "backbones": "variants of a whole step of iresnet50, vit_base and vit_large at 1 million classes",
    "published": "whole steps from 1 million classes on beside eight V100 as arcface_torch published them",
    "head": "whole steps of the head at 50 and 10 million classes, as far as they fit",
    "peers": "the head beside dense logits and torch's fused loss",
    "search": "the exact search of 1 and 10 million rows by Triton's kernels and by torch; plsc cluster beside the CPU",
    "variants": "which variant of each kernel is fastest",
}
_LAST_LINES = 3
_GRACE_SECONDS = 10.0


@dataclass(frozen=True)
class Part:
    """One command of the day.

    Attributes:
        name: of its files.
        command: behind the interpreter.
        minutes: after which it is ended.
        result: the file in the day's folder without which it came to no result.
        environment: variables on top of the process's.
    """

    name: str
    command: list[str]
    minutes: float
    result: str
    environment: dict[str, str] = field(default_factory=dict)


def parts(out: Path, gpus: int, minutes: float) -> list[Part]:
    """The day on ``gpus`` GPUs, most important first; tiny on a CPU where there is none."""
    tests = ["-m", "pytest", "-q", "-W", "default", "-p", "no:cacheprovider", "-m", "gpu"]
    tests += [f"--junitxml={out / 'tests.xml'}", *(str(path.relative_to(ROOT)) for path in gpu_tests())]
    doctor = ["-m", "plsc.tools.entry", "doctor", "--json", str(out / "doctor.json"), "--overwrite"]
    bench = ["-m", "plsc.tools.entry", "bench", "head", "--json", str(out / "peers.json"), "--overwrite"]
    folders = {name: ["benchmarks/head_gpu.py", "--out", str(out / name)] for name in ("head", "variants")}
    folders["search"] = ["benchmarks/search_gpu.py", "--out", str(out / "search")]
    if not gpus:
        interpreted = {"TRITON_INTERPRET": "1"}
        tiny = ["--classes", "500", "--batch", "8", "--dim", "32", "--rounds", "1", "--steps", "1", "--nproc", "1"]
        return [
            _first("compile", out, minutes),
            Part("doctor", [*doctor, "--only", "versions", "machine", "choices"], minutes, "doctor.json"),
            _first("checks", out, minutes, interpreted),
            _first("shapes", out, minutes, interpreted),
            *(_first(name, out, minutes) for name in ("counters", "sanitizer", "placement", "ranks")),
            Part("tests", tests, minutes, "tests.xml"),
            *_whole_steps(out, dry=True),
            Part("head", [*folders["head"], "--dry", "--only", "whole"], minutes, "head.log", interpreted),
            Part("peers", [*bench, *tiny, "--contestants", "plsc", "dense"], minutes, "peers.json"),
            Part("search", [*folders["search"], "--dry"], minutes, "search.log", interpreted),
        ]
    ranks = ["--nproc", str(gpus)] if gpus > 1 else []
    return [
        _first("compile", out, 5),
        Part("doctor", [*doctor, *ranks], 6, "doctor.json"),
        _first("checks", out, 3),
        _first("shapes", out, 6),
        _first("counters", out, 5),
        _first("sanitizer", out, 4),
        _first("placement", out, 1),
        _first("ranks", out, 1),
        Part("tests", tests, 8, "tests.xml"),
        *_whole_steps(out),
        Part("head", [*folders["head"], "--only", "whole", "--minutes", "4"], 5, "head/head_gpu.csv"),
        Part("peers", [*bench, "--limit", "60", "--rounds", "1"], 5, "peers.json"),
        Part("search", [*folders["search"], "--minutes", "5"], 6.5, "search/search_gpu.csv"),
        Part("variants", [*folders["variants"], "--only", "variants", "--minutes", "3"], 3.5, "variants/head_gpu.csv"),
    ]


def _whole_steps(out: Path, *, dry: bool = False) -> list[Part]:
    """The parts about a training step of backbone and head, tiny on a CPU where ``dry``."""
    names = ["resnet8"] if dry else ["iresnet50", "vit_base", "vit_large"]
    backbones = ["benchmarks/backbone_variants.py", str(out / "backbones"), *(["--dry"] if dry else []), *names]
    published = ["benchmarks/published_throughput.py", "--out", str(out / "published"), "--rounds", "1"]
    published += ["--dry", "--classes", "100", "200", "--steps", "1"] if dry else []
    resume = ["benchmarks/resume_killed.py", str(out / "resume.json"), *(["--device", "cpu"] if dry else [])]
    return [
        Part("resume", resume, 4, "resume.json"),
        Part("backbones", backbones, 24, f"backbones/{names[0]}/variants.csv"),
        Part("published", published, 10, "published/published_on_one_gpu.csv"),
    ]


def _first(name: str, out: Path, minutes: float, environment: dict[str, str] | None = None) -> Part:
    """A part of gpu_first_hour.py."""
    command = ["benchmarks/gpu_first_hour.py", name, str(out / f"{name}.json")]
    return Part(name, command, minutes, f"{name}.json", environment or {})


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


def is_finished(out: Path, part: Part) -> bool:
    """Whether a part came to a result, good or bad: it ended by itself, and left its file of them."""
    state = state_of(out, part)
    return state is not None and state["code"] is not None and (out / part.result).exists()


def run(part: Part, out: Path, limit: float) -> None:
    """Run a part for at most ``limit`` seconds; its output and how it ended are left in ``out``."""
    environment = {**os.environ, **part.environment}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment["PYTHONUNBUFFERED"] = "1"
    start, code = time.monotonic(), None
    (out / part.result).parent.mkdir(parents=True, exist_ok=True)
    (out / part.result).unlink(missing_ok=True)  # a former run's
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
        lines.append(f"| [{part.name}]({part.name}.log) | {NAMES[part.name]} | {verdict(out, part)} | {seconds} |")
    complaints = [*doctors_complaints(out), *tests_complaints(out), *first_hours_complaints(out)]
    if complaints:
        lines += ["", "## What is wrong", "", *(f"- {complaint}" for complaint in complaints)]
    for part in day:
        log = out / f"{part.name}.log"
        if log.exists():
            last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-_LAST_LINES:]
            lines += ["", f"## {part.name}, its last lines", "", "```text", *last, "```"]
    return "\n".join(lines) + "\n"


def verdict(out: Path, part: Part) -> str:
    """A part's end in words."""
    state = state_of(out, part)
    if state is None:
        return "not run yet"
    if state["code"] is None:
        return "ended by its time limit"
    if not is_finished(out, part):
        return f"no result (exit code {state['code']}): see its log; the next start runs it again"
    note = found(out, part.name).get("note")
    return note or ("ok" if state["code"] == 0 else f"FAIL (exit code {state['code']})")


def found(out: Path, name: str) -> dict[str, Any]:
    """A part's file of results; empty where it has none, or none of this kind."""
    path = out / f"{name}.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


def doctors_complaints(out: Path) -> Iterator[str]:
    """The lines of doctor.json that FAIL."""
    path = out / "doctor.json"
    if path.exists():
        for section, lines in json.loads(path.read_text())["sections"].items():
            for name, line in lines.items():
                if line["state"] == "FAIL":
                    yield f"doctor, {section}, {name}: {line['text']} ({line['advice']})"


def first_hours_complaints(out: Path) -> Iterator[str]:
    """What is wrong in the parts of gpu_first_hour.py."""
    for name, check in found(out, "checks").get("checks", {}).items():
        if not check["right"]:
            yield f"checks, {name}: {check['text']}"
    for name, tool in found(out, "sanitizer").get("tools", {}).items():
        if tool["code"]:
            yield f"sanitizer, {name}: exit code {tool['code']}, {tool['text'].strip().splitlines()[-1:]}"
    if len(set(found(out, "placement").get("digests", {}).values())) > 1:
        yield "placement: a table in host memory is another one where launches do not wait: copies and steps race"
    if not found(out, "resume").get("right", True):
        yield f"resume: {found(out, 'resume')['note']}"
    if not found(out, "ranks").get("right", True):
        yield f"ranks: {found(out, 'ranks').get('errors') or found(out, 'ranks').get('text')}"


def pack(out: Path) -> Path:
    """Everything of the day as one archive beside its folder."""
    archive = out.with_name(f"{out.name}.tar.gz")
    with tarfile.open(archive, "w:gz") as file:
        file.add(out, out.name)
    return archive


def tests_complaints(out: Path) -> Iterator[str]:
    """The tests that failed, and the first line of why."""
    path = out / "tests.xml"
    if path.exists():
        for case in ElementTree.parse(path).iter("testcase"):
            for problem in [*case.findall("failure"), *case.findall("error")]:
                yield f"test {case.get('classname')}::{case.get('name')}: {problem.get('message', '').splitlines()[0]}"


def main() -> int:
    """Run what has no result yet."""
    from gpu_day_page import page  # beside this file, from which Python runs it

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="of the results (gpu-day/DATE-GPU)")
    parser.add_argument("--minutes", type=float, default=117.0, help="no part goes on for longer (%(default)g)")
    parser.add_argument("--only", nargs="+", metavar="PART", choices=NAMES, help=f"of {', '.join(NAMES)}")
    parser.add_argument("--again", nargs="+", default=[], metavar="PART", choices=NAMES, help="these once more")
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
    whole = parts(out, gpus, args.minutes)
    day = [part for part in whole if part.name in (args.only or NAMES)]
    title = f"{gpus or 'no'} GPU, {device}"
    for part in day:
        limit = min(60 * part.minutes, deadline - time.monotonic())
        if is_finished(out, part) and part.name not in args.again:
            print(f"{part.name}: done before, {verdict(out, part)}", flush=True)
        elif limit > 0:
            print(f"{part.name}: {NAMES[part.name]}; at most {limit / 60:.0f} min", flush=True)
            run(part, out, limit)
            print(f"{part.name}: {verdict(out, part)}", flush=True)
        text = summary(out, whole, title)
        (out / "summary.md").write_text(text, encoding="utf-8")
        (out / "report.html").write_text(page(title, text, found(out, "shapes"), found(out, "compile")), "utf-8")
    print(f"results: {out}/report.html and summary.md; to send: {pack(out)}")
    return 0 if all((state_of(out, part) or {}).get("code") == 0 for part in day) else 1


if __name__ == "__main__":
    raise SystemExit(main())
