"""The class head on one NVIDIA GPU: is it right, which of its variants is fastest, how near to the floor is it.

    python benchmarks/head_gpu.py [--minutes 8] [--only checks|variants|whole] [--out DIR]
    TRITON_INTERPRET=1 python benchmarks/head_gpu.py --dry      # every line once, tiny, on the CPU

needs torch with triton, numpy and this project. In one run it measures the floor (a bfloat16 product and a copy), runs
the checks of head_gpu_checks.py, times variants of each part in turn on 2 million classes, and whole training steps of
the head (exact, bfloat16 + int8) at 50 million classes with B = 512 and 10 million with B = 1024, as far as they fit:
also with exponentials kept in the memory that is left.
It prints a table and adds rows to benchmarks/results/head_gpu.csv. Shares are of the product rate measured in the same
run, over a step's four products: 8·B·C·D. What no time is left for is said and left out.
"""

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import head_gpu_checks as checks
import torch
from results_file import RESULTS, add_row
from torch import Tensor

from plsc.bench.harness import environment
from plsc.head.backends import triton_update
from plsc.head.backends.torch_backend import Batch, PassInputs, TorchBackend
from plsc.head.backends.triton_backend import is_interpreted
from plsc.head.backends.triton_tiles import Tile, force_tile
from plsc.head.class_table import ClassRows

Way = Callable[[], AbstractContextManager[Any]]

STATE_BYTES = 1544  # per class at D = 512, bfloat16 + int8
ROUNDS = 5
TILES = (
    Tile(64, 128, 128, stages=1, flipped=True),  # the first and the second pass on sm_90
    Tile(128, 64, 128, stages=1, flipped=True),
    Tile(32, 128, 128, stages=1, flipped=True),
    Tile(128, 32, 128, stages=1, flipped=True),
    Tile(64, 64, 128, flipped=True),
    Tile(64, 64, 128),
)


@dataclass(frozen=True)
class Sizes:
    """What is measured: ``variants`` and every one of ``whole`` are (classes, batch)."""

    dim: int
    variants: tuple[int, int]
    whole: tuple[tuple[int, int], ...]
    chunks: tuple[int, ...]
    square: int
    copied: int


FULL = Sizes(
    512,
    (2_000_000, 1024),
    ((50_000_000, 512), (50_000_000, 1024), (50_000_000, 2048), (10_000_000, 1024)),
    (8192, 16384, 65536, 131072),
    8192,
    4 << 30,
)
TINY = Sizes(32, (200, 16), ((300, 16), (200, 32)), (64, 128), 64, 1 << 16)


@dataclass
class Clock:
    """Times work on a device, and says how much of the whole run's time is left."""

    device: torch.device
    end: float

    def left(self) -> float:
        """Seconds."""
        return self.end - time.monotonic()

    def milliseconds(self, work: Callable[[], object]) -> float:
        """Of one run, until the device has done it all."""
        self.wait()
        start = time.perf_counter()
        work()
        self.wait()
        return 1e3 * (time.perf_counter() - start)

    def wait(self) -> None:
        """Until the device has nothing to do."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class Table:
    """Prints rows as they come and adds them to FOLDER/head_gpu.csv; ``rate`` is in operations per millisecond."""

    def __init__(self, rate: float, folder: Path) -> None:
        self.rate, self.folder = rate, folder
        print(f"\n{'part':<10} {'variant':<46} {'C':>11} {'B':>5} {'ms':>10} {'ns/class':>9} {'of rate':>8} {'GiB':>6}")

    def add(
        self,
        part: str,
        variant: str,
        size: tuple[int, int],
        dim: int,
        milliseconds: list[float],
        products: int,
        peak: float = 0.0,
    ) -> None:
        """A row: the median of ``milliseconds``, and its share of the rate if it makes ``products`` of them."""
        (classes, batch), median = size, statistics.median(milliseconds)
        share = 2 * products * classes * batch * dim / self.rate / median
        each = 1e6 * median / classes
        print(
            f"{part:<10} {variant:<46} {classes:>11,} {batch:>5} {median:>10.3f} {each:>9.2f} "
            f"{share:>8.1%} {peak:>6.2f}",
            flush=True,
        )
        row = {
            "part": part,
            "variant": variant,
            "classes": classes,
            "batch": batch,
            "dim": dim,
            "milliseconds": round(median, 4),
            "least": round(min(milliseconds), 4),
            "ns_per_class": round(each, 3),
            "share_of_product_rate": round(share, 4),
            "peak_gib": round(peak, 3),
            "product_tflops": round(self.rate / 1e9, 1),
        }
        add_row("head_gpu", row, self.folder)


def measure_floor(clock: Clock, sizes: Sizes) -> float:
    """Print the product's and the copy's rate; the former in operations per millisecond."""
    n = sizes.square
    a, b = (torch.randn(n, n, device=clock.device).bfloat16() for _ in range(2))
    product_ms = in_turn(clock, {"product": lambda: [a @ b for _ in range(10)]}, 3)["product"]
    rate = 10 * 2 * n**3 / min(product_ms)
    source = torch.zeros(sizes.copied, dtype=torch.uint8, device=clock.device)
    target = torch.empty_like(source)
    copy_ms = min(in_turn(clock, {"copy": lambda: target.copy_(source)}, 5)["copy"])
    print(f"product of bfloat16 {n} x {n} x {n}: {rate / 1e9:,.1f} TFLOP/s")
    print(f"copy, read and written: {2 * sizes.copied / copy_ms / 1e9:,.2f} TB/s")
    return rate


def in_turn(clock: Clock, works: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each, alternating; a first run of each is not counted. What fails is said and left out."""
    times: dict[str, list[float]] = {}
    for name, work in works.items():
        try:
            clock.milliseconds(work)
            times[name] = []
        except Exception as error:  # a variant that this GPU cannot run is no reason to measure nothing
            print(f"{name}: {type(error).__name__}: {str(error).splitlines()[0][:150]}", flush=True)
    for _ in range(rounds):
        for name, spent in times.items():
            spent.append(clock.milliseconds(works[name]))
    return times


def run_checks(clock: Clock, dry: bool) -> bool:
    """Print each check's verdict; False if any failed."""
    chosen = list(checks.SMALL) if clock.device.type == "cpu" else list(checks.CHECKS)
    fine = True
    for check in chosen:
        try:
            verdict = check(clock.device, **(checks.SMALL[check] if dry else {}))
            print(f"right  {check.__name__}: {verdict}", flush=True)
        except Exception as error:  # the rest is worth knowing all the same
            fine = False
            print(f"WRONG  {check.__name__}: {type(error).__name__}: {error}", flush=True)
        release(clock)
    return fine


def time_variants(clock: Clock, sizes: Sizes, table: Table) -> None:
    """Each part of a step by each way of doing it, on the same data."""
    (classes, batch), dim = sizes.variants, sizes.dim
    head, optimizer = checks.some_head(clock.device, classes, dim)
    x, y = checks.some_batch(clock.device, classes, dim, batch)
    features = torch.nn.functional.normalize(x).bfloat16()
    given = Batch(features, y, torch.zeros(batch, device=clock.device), head.margin, {})
    time_steps(clock, sizes, table, head, optimizer, partial(training_step, head, optimizer, x, y))
    time_updates(clock, sizes, table, head, optimizer)
    for chunk in sizes.chunks:
        for part, work in passes_over(head.backend, head.softmax.table.rows(None), given, chunk).items():
            if clock.left() < 20:
                print(f"no time left for {part} at {chunk} classes a chunk")
                continue
            works = {f"{name}, chunk {chunk}": inside(way, work) for name, way in ways_of_a_pass().items()}
            for name, spent in in_turn(clock, works, ROUNDS).items():
                table.add(part, name, (classes, batch), dim, spent, products=2)


def time_steps(clock: Clock, sizes: Sizes, table: Table, head: Any, optimizer: Any, step: Callable[[], float]) -> None:
    """Whole steps without kernels, fused, and with weights stored: in wide blocks, kept, in other chunks."""
    ways: dict[str, Way] = {
        "torch": partial(checks.plain_path, optimizer),
        "kernels, fused": partial(checks.in_shape, stored=False),
    }
    classes, batch = sizes.variants
    for name, is_wide in (("weights stored", False), ("weights stored in wide blocks", True)):
        for memory in (0, 2 * classes * batch):
            for chunk in (None, *sizes.chunks):
                label = name + ", exponentials kept" * (memory > 0) + (f", chunk {chunk}" if chunk else "")
                ways[label] = partial(_stored_with, head, is_wide, memory, chunk)
    works = {f"exact, by {name}": inside(way, step) for name, way in ways.items()}
    for name, spent in in_turn(clock, works, ROUNDS).items():
        table.add("step", name, sizes.variants, sizes.dim, spent, products=4)


def training_step(head: Any, optimizer: Any, x: Tensor, y: Tensor) -> float:
    """Forward, backward and the table's update; the loss."""
    mine = x.clone().requires_grad_()
    loss = head(mine, y)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def passes_over(backend: TorchBackend, rows: ClassRows, batch: Batch, chunk: int) -> dict[str, Callable[[], object]]:
    """Both passes, as the head runs them."""
    log_z = torch.full(batch.position.shape, 20.0, device=batch.position.device)
    ones = torch.ones_like(log_z)

    def second() -> None:
        for _ in backend.second_pass(PassInputs(rows, batch, log_z, ones, -ones, chunk)):
            pass

    return {"pass 1": lambda: backend.first_pass(rows, batch, chunk, with_grad=True), "pass 2": second}


def ways_of_a_pass() -> dict[str, Way]:
    """By torch, by the kernels as they ship, and with other tiles."""
    ways: dict[str, Way] = {"torch": checks.plain_path, "kernels": partial(checks.in_shape, stored=False)}
    ways["kernels, weights stored"] = partial(checks.in_shape, stored=True)
    for tile in TILES:
        ways[f"tile {_named(tile)}"] = partial(_fused_with, tile)
    return ways


@contextmanager
def _stored_with(head: Any, is_wide: bool, memory: int, chunk: int | None) -> Iterator[None]:
    """Store weights, and keep exponentials in so many bytes; ``chunk`` classes at a time, unless it is None."""
    with (
        checks.in_shape(stored=True, is_wide=is_wide),
        patch.object(head.backend, "exponentials_memory", memory),
        patch.object(head.softmax, "chunk_classes", chunk),
    ):
        yield


@contextmanager
def _fused_with(tile: Tile) -> Iterator[None]:
    """Take ``tile`` in fused passes."""
    with checks.in_shape(stored=False), force_tile(tile):
        yield


def inside(way: Way, work: Callable[[], object]) -> Callable[[], None]:
    """``work`` done within ``way()``."""

    def both() -> None:
        with way():
            work()

    return both


def _named(tile: Tile) -> str:
    flipped = " flipped" if tile.flipped else ""
    return f"{tile.samples}x{tile.slots}x{tile.columns} s{tile.stages}{flipped}"


def time_updates(clock: Clock, sizes: Sizes, table: Table, head: Any, optimizer: Any) -> None:
    """The rows' update from the gradient by unit rows."""
    n = sizes.chunks[-2]
    chunk = next(head.softmax.table.rows(None).chunks(n))
    gradient = torch.randn(n, sizes.dim, device=clock.device)
    ways: dict[str, Way] = {"torch": partial(checks.plain_path, optimizer)}
    for elements in (512, 1024, 2048, 4096):
        ways[f"kernel, {elements} elements a program"] = partial(patch.object, triton_update, "_ELEMENTS", elements)
    works = {
        name: inside(way, lambda: optimizer._updater(chunk, gradient, optimizer._state.of(chunk), optimizer._step(1.0)))
        for name, way in ways.items()
    }
    for name, spent in in_turn(clock, works, ROUNDS).items():
        table.add("update", name, (n, sizes.variants[1]), sizes.dim, spent, products=0)
    head.softmax.table.norms_are_current()


def time_whole_steps(clock: Clock, sizes: Sizes, table: Table) -> None:
    """Forward, backward and update, exact, at each of the large sizes; a table serves all of its batches."""
    for wanted in dict.fromkeys(classes for classes, _ in sizes.whole):
        if clock.left() < 45 and clock.device.type == "cuda":
            print(f"no time left for {wanted:,} classes")
            continue
        try:
            release(clock)
            classes = fitting_classes(clock.device, wanted)
            batches = [batch for each, batch in sizes.whole if each == wanted]
            time_whole_step(clock, classes, batches, sizes.dim, table)
        except torch.OutOfMemoryError as error:
            print(f"{wanted:,} classes: {str(error).splitlines()[0]}", flush=True)
        release(clock)


def time_whole_step(clock: Clock, classes: int, batches: list[int], dim: int, table: Table) -> None:
    """Add rows with time and peak memory."""
    start = time.monotonic()
    head, optimizer = checks.some_head(clock.device, classes, dim)
    head.inverse_norms()
    clock.wait()
    print(f"made {classes:,} classes in {time.monotonic() - start:.1f} s; {head.backend.describe()}", flush=True)
    for batch in batches:
        x, y = checks.some_batch(clock.device, classes, dim, batch)
        for memory in dict.fromkeys((0, _memory_left(clock.device))):
            head.backend.exponentials_memory, peak = memory, Peak(clock.device)
            spent = in_turn(clock, {"step": partial(training_step, head, optimizer, x, y)}, ROUNDS).get("step")
            if spent:
                variant = f"exact, bf16 + int8, chunk {head.softmax.chunk_size(batch)}"
                variant += f", {memory / 2**30:.0f} GiB for exponentials" * (memory > 0)
                table.add("step", variant, (classes, batch), dim, spent, products=4, peak=peak.gib())
    print(f"  state {STATE_BYTES * classes / 2**30:.2f} GiB; mean norm {head.mean_norm():.3f}")


def _memory_left(device: torch.device) -> int:
    """Bytes for exponentials, of which the scratch of a step is left out."""
    if device.type == "cpu":
        return 1 << 12
    torch.cuda.empty_cache()
    return max(torch.cuda.mem_get_info(device)[0] - (4 << 30), 0)


class Peak:
    """Device memory held by tensors at most, from here on."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def gib(self) -> float:
        """GiB; 0 on a CPU."""
        return torch.cuda.max_memory_allocated(self.device) / 2**30 if self.device.type == "cuda" else 0.0


def fitting_classes(device: torch.device, classes: int) -> int:
    """``classes``, or as many as this GPU holds beside a chunk's scratch."""
    if device.type != "cuda":
        return classes
    free, _ = torch.cuda.mem_get_info(device)
    fitting = int((free - (2 << 30)) / STATE_BYTES)
    if fitting < classes:
        print(f"{classes:,} classes do not fit: {free / 2**30:.1f} GiB are free; taking {fitting:,}")
    return min(classes, fitting)


def release(clock: Clock) -> None:
    """Give memory back to the device."""
    gc.collect()
    if clock.device.type == "cuda":
        torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0, help="no part begins that would end later")
    parser.add_argument("--only", choices=("checks", "variants", "whole"))
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="of head_gpu.csv (%(default)s)")
    parser.add_argument("--dry", action="store_true", help="tiny sizes, on the CPU where there is no GPU; keeps no row")
    args = parser.parse_args()
    if not torch.cuda.is_available() and not (args.dry and is_interpreted()):
        print("needs an NVIDIA GPU; TRITON_INTERPRET=1 and --dry run every line at tiny sizes without one")
        return 2
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    clock = Clock(device, time.monotonic() + 60 * args.minutes - 30)
    sizes = TINY if args.dry else FULL
    print(*environment().values(), sep=", ")
    rate = measure_floor(clock, sizes)
    fine = run_checks(clock, args.dry) if args.only in (None, "checks") else True
    with tempfile.TemporaryDirectory() as thrown_away:
        table = Table(rate, Path(thrown_away) if args.dry else args.out)
        if args.only in (None, "whole"):
            time_whole_steps(clock, sizes, table)
        if args.only in (None, "variants"):
            time_variants(clock, sizes, table)
    return 0 if fine else 1


if __name__ == "__main__":
    raise SystemExit(main())
