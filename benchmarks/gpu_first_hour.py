"""The first hour of a GPU: each part of `make gpu-day` that no other script has. Each writes one JSON file of results.

    python benchmarks/gpu_first_hour.py PART FILE.json

compile: plsc doctor's kernels, with the seconds that each took to compile. checks: the head against float64 at 2
million classes. shapes: steps and passes at three batches, in bf16 and TF32.
counters: what ncu counts of a launch of each pass. sanitizer: compute-sanitizer over a small step. placement: a table
in host memory with and without CUDA_LAUNCH_BLOCKING, bit by bit. ranks: unequal batches on two ranks, against float64.
What this machine lacks for a part stands in its file as "note". Exit code 1 where a result is wrong.
"""
# mypy: disable-error-code="import-untyped"

import argparse
import csv
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import head_gpu_checks as checks
import torch
from head_gpu import Clock, in_turn, inside, release, training_step
from torch import Tensor

import plsc
from plsc.bench.harness import environment
from plsc.devices import copy_rate, measured_precisions, product_flops
from plsc.head.backends.torch_backend import Batch, PassInputs
from plsc.head.backends.triton_backend import runs_on
from plsc.head.backends.triton_update import update_rows
from plsc.head.low_precision import RowState
from plsc.head.update_rules import SgdRule, Update

DIM, CLASSES = 512, 2_000_000
BATCHES = (128, 512, 1024)
TABLES: dict[str, dict[str, Any]] = {
    "bf16": {"weight_dtype": torch.bfloat16, "momentum_dtype": torch.int8},
    "tf32": {"weight_dtype": torch.float32, "momentum_dtype": torch.float32, "fp32_precision": "tf32"},
}
NUMBER_BYTES = {"bf16": (2, 1), "tf32": (4, 4)}  # of weights and of momentum
PASSES = ("first_pass", "gradient_pass", "row_exponentials", "row_probabilities", "update_rows")  # the kernels' names
FUSED, STORED = partial(checks.in_shape, stored=False), partial(checks.in_shape, stored=True)
METRICS = {
    "gpu__time_duration.sum": "time",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": "tensor pipe, % of its peak",
    "lts__t_sector_hit_rate.pct": "hits in L2, %",
    "dram__bytes.sum": "bytes of HBM",
}
ROUNDS = 3
Report = dict[str, Any]


def this_device() -> torch.device:
    """The first GPU, or the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


# Compilation and checks ----------------------------------------------------------------------------------------------


def compile_kernels() -> Report:
    """Run doctor's section of kernels with Triton's compilations timed."""
    if not torch.cuda.is_available():
        return {"note": "no GPU", "kernels": []}
    from triton import knobs

    from plsc.tools.entry import main

    compiled: list[dict[str, Any]] = []

    def listen(*, src: Any, metadata: dict[str, Any], times: Any, cache_hit: bool, **_: Any) -> None:
        stages = {name: spent / 1e6 for name, spent in times.lowering_stages}
        compiled.append({"kernel": src.name, "seconds": times.total / 1e6, "cached": cache_hit, "stages": stages})

    knobs.compilation.listener = listen
    code = main(["doctor", "--only", "kernels"])
    return {"kernels": compiled, "right": code == 0}


def check_large() -> Report:
    """passes_agree at 2 million classes."""
    device = this_device()
    if not runs_on(device):
        return {"note": "no GPU", "checks": {}}
    sizes = checks.SMALL[checks.passes_agree] if device.type == "cpu" else {"classes": fitting(device), "batch": 32}
    try:
        found = {"passes_agree": {"right": True, "text": checks.passes_agree(device, **sizes)}}
    except Exception as error:  # the report says which
        found = {"passes_agree": {"right": False, "text": f"{type(error).__name__}: {error}"}}
    return {"checks": found, "right": all(each["right"] for each in found.values())}


def fitting(device: torch.device) -> int:
    """Classes up to 2 million whose rows, in float64 a few times over, fit into the device's free memory."""
    free, _ = torch.cuda.mem_get_info(device)
    return min(CLASSES, free // (8 * 6 * DIM))


# Shapes --------------------------------------------------------------------------------------------------------------


def time_shapes() -> Report:
    """Steps and single passes, in turns, at each batch and precision; with the device's own rates."""
    device = this_device()
    small = device.type == "cpu"
    clock = Clock(device, time.monotonic() + 330)
    side, copied = (64, 1 << 16) if small else (8192, 2 << 30)
    rates = {name: product_flops(side, name, device) for name in measured_precisions(device)}
    report: Report = {"device": environment()["device"], "rates": rates, "bandwidth": copy_rate(copied, device)}
    rows = report["rows"] = []
    for precision in TABLES if "tf32" in rates else ("bf16",):
        for batch in (8, 16) if small else BATCHES:
            if clock.left() < 20:
                report["cut"] = f"no time left for {precision} at B = {batch}"
                continue
            classes, dim = (200, 32) if small else (min(CLASSES, fitting(device)), DIM)
            rows += time_shape(clock, precision, classes, dim, batch)
            release(clock)
    return report


def time_shape(clock: Clock, precision: str, classes: int, dim: int, batch: int) -> Iterator[dict[str, Any]]:
    """A row for each way to make a step, and for each kernel."""
    head, optimizer = checks.some_head(clock.device, classes, dim, **TABLES[precision])
    x, y = checks.some_batch(clock.device, classes, dim, batch)
    step = partial(training_step, head, optimizer, x, y)
    works: dict[tuple[str, str], Callable[[], object]] = {
        ("step", "torch"): inside(partial(checks.plain_path, optimizer), step),
        ("step", "fused"): inside(FUSED, step),
        ("step", "weights stored"): inside(STORED, step),
        **kernels_of(head, x, y),
    }
    names = {f"{part}, {way}": (part, way) for part, way in works}
    weight, momentum = NUMBER_BYTES[precision]
    moved = {"pass 1": weight, "pass 2": weight + 4, "pass 2 + update": 2 * (weight + momentum)}
    for name, spent in in_turn(clock, {name: works[key] for name, key in names.items()}, ROUNDS).items():
        part, way = names[name]
        bytes_of_number = moved.get(part, 3 * weight + 2 * momentum)
        yield {
            "precision": precision,
            "batch": batch,
            "classes": classes,
            "part": part,
            "way": way,
            "milliseconds": min(spent),
            "flops": (8 if part == "step" else 4) * classes * batch * dim,
            "bytes": bytes_of_number * classes * dim,
        }


def kernels_of(head: plsc.ShardedHead, x: Tensor, y: Tensor) -> dict[tuple[str, str], Callable[[], object]]:
    """Each pass by itself, by torch and by the kernels, and the pass that ends with the update."""
    device, batch = x.device, len(x)
    rows, backend = head.softmax.table.rows(None), head.backend
    features = torch.nn.functional.normalize(x).to(head.weight.dtype)
    log_z, scale, pull = (torch.full((batch,), value, device=device) for value in (20.0, 1.0, -1.0))
    given = Batch(features, y, torch.zeros(batch, device=device), head.margin, {})
    inputs = PassInputs(rows, given, log_z, scale, pull, head.softmax.chunk_size(batch))
    assert isinstance(head.momentum_dtype, torch.dtype)
    state = RowState(len(head.weight), head.dim, head.momentum_dtype, device)
    update = Update(SgdRule(0.0, 0.9, 0.0, nesterov=False), 1.0, "stochastic", seed=0, step=1, first_row=0)

    def first() -> object:
        return backend.first_pass(rows, given, inputs.chunk_size, with_grad=True)

    def second() -> None:
        for _ in backend.second_pass(inputs):
            pass

    works: dict[tuple[str, str], Callable[[], object]] = {
        ("pass 1", "torch"): inside(checks.plain_path, first),
        ("pass 2", "torch"): inside(checks.plain_path, second),
    }
    if runs_on(device):
        together = partial(backend.update_pass, inputs, update_rows, lambda chunk: {"momentum": state}, update)
        for name, shape in (("kernel", FUSED), ("weights stored", STORED)):
            works[("pass 1", name)], works[("pass 2", name)] = inside(shape, first), inside(shape, second)
            works[("pass 2 + update", name)] = inside(shape, together)
    return works


# Tools of CUDA's -----------------------------------------------------------------------------------------------------


def launch_once(classes: int) -> Report:
    """Steps with fused passes and with weights stored: what counters and sanitizers watch."""
    head, optimizer = checks.some_head(this_device(), classes, DIM)
    x, y = checks.some_batch(this_device(), classes, DIM, 512)
    for way in (FUSED, FUSED, STORED, STORED):
        with way():
            training_step(head, optimizer, x, y)
    return {"note": "launched"}


def _launcher(classes: int) -> list[str]:
    return [sys.executable, __file__, "launch", os.devnull, "--classes", str(classes)]


def _watched(command: list[str]) -> "subprocess.CompletedProcess[str]":
    variables = {**os.environ, "PLSC_SELF_CHECK": "0"}
    return subprocess.run(command, env=variables, capture_output=True, text=True, errors="replace")


def count_launches() -> Report:
    """What ncu counts of one launch of each pass at 2 million classes."""
    tool = shutil.which("ncu")
    if not torch.cuda.is_available() or tool is None:
        return {"note": "ncu is not installed" if torch.cuda.is_available() else "no GPU", "kernels": {}}
    classes, found = fitting(this_device()), {}
    for kernel in PASSES:
        options = ["--csv", "--kernel-name", kernel, "--launch-count", "1", "--metrics", ",".join(METRICS)]
        done = _watched([tool, *options, *_launcher(classes)])
        found[kernel] = counters(done.stdout) or {"problem": (done.stdout + done.stderr)[-400:]}
    return {"classes": classes, "kernels": found}


def counters(printed: str) -> dict[str, str]:
    """The metrics in what ncu --csv printed, by name, each with its unit."""
    lines = printed.splitlines()
    start = next((number for number, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    rows = csv.DictReader(io.StringIO("\n".join(lines[start:])))
    known = (row for row in rows if row.get("Metric Name") in METRICS)
    return {METRICS[row["Metric Name"]]: f"{row['Metric Value']} {row['Metric Unit']}".strip() for row in known}


def sanitize() -> Report:
    """compute-sanitizer's memcheck and racecheck; the latter sees shared memory only."""
    tool = shutil.which("compute-sanitizer")
    if not torch.cuda.is_available() or tool is None:
        missing = "compute-sanitizer is not installed" if torch.cuda.is_available() else "no GPU"
        return {"note": missing, "tools": {}}
    found = {}
    for name in ("memcheck", "racecheck"):
        done = _watched([tool, "--tool", name, "--error-exitcode", "9", *_launcher(20_000)])
        found[name] = {"code": done.returncode, "text": (done.stdout + done.stderr)[-400:]}
    return {"tools": found, "right": all(each["code"] == 0 for each in found.values())}


# Placement and ranks -------------------------------------------------------------------------------------------------


def hash_placed() -> Report:
    """The digest of a table in host memory, its norms and its momentum, after three steps."""
    torch.manual_seed(0)
    head, optimizer = checks.some_head(this_device(), 9001, 64, placement="host", chunk_classes=1024, seed=3)
    digest = hashlib.sha256()
    for _ in range(3):
        training_step(head, optimizer, *checks.some_batch(this_device(), 9001, 64, 32))
    for table in (head.weight.detach(), head.inverse_norms(), *checks.states_of(optimizer)):
        digest.update(table.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return {"digest": digest.hexdigest()}


def compare_blocking() -> Report:
    """Two fresh processes: one in which every launch waits for its end, and one in which copies and steps overlap."""
    digests = {}
    for blocking in ("0", "1"):
        file = Path(os.environ.get("TMPDIR", "/tmp")) / f"plsc-placement-{os.getpid()}-{blocking}.json"
        command = [sys.executable, __file__, "hash", str(file)]
        subprocess.run(command, env={**os.environ, "CUDA_LAUNCH_BLOCKING": blocking}, check=True)
        digests[blocking] = json.loads(file.read_text())["digest"]
        file.unlink()
    return {"digests": digests, "right": len(set(digests.values())) == 1}


def compare_ranks() -> Report:
    """Start two ranks of :func:`unequal_batches`, on two GPUs, or by gloo where there is no GPU."""
    if torch.cuda.device_count() == 1:
        return {"note": "one GPU"}
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from plsc.parallel.launch import rank_environment  # what torchrun would set

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, __file__, "unequal", os.devnull]
    ranks = [
        subprocess.Popen(command, env={**os.environ, **rank_environment(rank, 2, store.port)}, stdout=subprocess.PIPE)
        for rank in range(2)
    ]
    printed = [rank.communicate()[0].decode() for rank in ranks]
    if any(rank.returncode for rank in ranks):
        return {"right": False, "text": f"ranks ended with {[rank.returncode for rank in ranks]}"}
    errors = json.loads(printed[0].splitlines()[-1])
    return {"errors": errors, "right": max(errors.values()) < 2e-5}


def unequal_batches() -> Report:
    """A step over 5 and 11 samples: loss, embeddings' gradient and table, relative to float64 in one piece."""
    from plsc.parallel import init
    from plsc.parallel.collectives import all_gather_rows

    mesh, sizes, lr, s, m = init(), (5, 11), 0.2, 16.0, 0.2
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(size, 64, generator=generator, dtype=torch.float64) for size in (403, sum(sizes)))
    y = torch.randint(403, (len(x),), generator=generator)
    head = plsc.ShardedHead(64, 403, mesh, plsc.CosFace(s=s, m=m))
    with torch.no_grad():
        head.weight.copy_(weight[slice(*head.class_range)])
    optimizer = plsc.HeadSGD(head, lr=lr)
    mine = x.split(sizes)[mesh.rank].float().to(mesh.device).requires_grad_()
    loss = head(mine, y.split(sizes)[mesh.rank].to(mesh.device))
    loss.backward()
    optimizer.step()
    assert mine.grad is not None
    gradient = all_gather_rows(mine.grad / mesh.world_size, mesh)  # what DDP would average
    table = all_gather_rows(head.weight.detach(), mesh)
    want = dense_step(weight, x, y, s, m, lr)
    pairs = zip(("loss", "embeddings' gradient", "table"), (loss.detach(), gradient, table), want, strict=True)
    errors = {name: checks.relative_error(got.cpu(), wanted) for name, got, wanted in pairs}
    if mesh.is_main:
        print(json.dumps(errors), flush=True)
    return {"errors": errors}


def dense_step(weight: Tensor, x: Tensor, y: Tensor, s: float, m: float, lr: float) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, embeddings' gradient and table after a step of CosFace, in one piece and the dtype of what is given."""
    weight, x = weight.clone().requires_grad_(), x.clone().requires_grad_()
    cosines = torch.nn.functional.normalize(x) @ torch.nn.functional.normalize(weight).T
    margin = m * torch.nn.functional.one_hot(y, len(weight))
    loss = torch.nn.functional.cross_entropy(s * (cosines - margin), y)
    loss.backward()
    assert weight.grad is not None
    assert x.grad is not None
    return loss.detach(), x.grad, (weight - lr * weight.grad).detach()


PARTS: dict[str, Callable[[], Report]] = {
    "compile": compile_kernels,
    "checks": check_large,
    "shapes": time_shapes,
    "counters": count_launches,
    "sanitizer": sanitize,
    "placement": compare_blocking,
    "ranks": compare_ranks,
}
_INNER = ("launch", "hash", "unequal")  # processes that parts start


def main() -> int:
    """Run a part, and write its file last: where it is, the part came to a result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=(*PARTS, *_INNER))
    parser.add_argument("file", type=Path)
    parser.add_argument("--classes", type=int, default=CLASSES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    inner: dict[str, Callable[[], Report]] = {
        "launch": partial(launch_once, args.classes),
        "hash": hash_placed,
        "unequal": unequal_batches,
    }
    report = (PARTS | inner)[args.part]()
    text = json.dumps(report, indent=1)
    if args.part in PARTS:
        print(text)
    args.file.write_text(text, encoding="utf-8")
    return 0 if report.get("right", True) else 1


if __name__ == "__main__":
    raise SystemExit(main())
