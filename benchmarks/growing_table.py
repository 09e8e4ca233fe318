"""A class table that grows from 1,000 classes to 100,000 while it trains: is it right, how fast, and how large.

    python benchmarks/growing_table.py [correctness] [throughput] [memory] [--classes 100000] …

Each part adds a row to benchmarks/results/growing_table.csv; without one named, all three run.

- correctness: plsc.DynamicHead in float64 (--exact-dim) on 4 gloo ranks. Each step brings --new keys, and every five
  steps some are removed, merged, split and renamed. All ranks are killed by SIGKILL at --kills random moments; from the
  last saved state, of every 20th step, it goes on at 3 ranks, then at 4 again. Every loss, those that were computed
  again too, and the rows at the end are compared with a dict of rows and dense float64 (growing_classes.py).
- throughput: a step (forward, backward, update) of plsc.DynamicHead with --classes classes, and of one that gets
  --coming of them anew in each step, beside plsc.ShardedHead's with as many, in float32 with the same batches and in
  turns, on 1 and 2 ranks of one thread: the medians over --turns of samples/s, of their ratios to the fixed table's,
  and of such ratios by the processor time of all ranks, which other work on the machine disturbs less. Between turns
  the new classes are removed, so that there are as many as before.
- memory: how much the peak of a process's resident memory grows while a table grows from 1,000 to --grown classes in
  float32, beside the bytes of the final table (weights, momentum, norms). Steps are sampled at 0.01; memory is reserved
  for twice as many classes.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from growing_classes import DECAY, LR, MARGIN, MOMENTUM, SCALE, Rows, Stream
from lone_head import forget_peak, resident
from results_file import print_and_add, script_parser
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import plsc
from plsc.files import atomic_write
from plsc.parallel import Mesh
from plsc.parallel.collectives import all_gather_object, barrier
from plsc.parallel.launch import rank_environment
from plsc.parallel.mesh import shutdown

FIRST, SEED, SAVE_EVERY, WORLDS = 1000, 0, 20, (4, 3)
PARTS = ("correctness", "throughput", "memory")
COLUMNS = (
    *("part", "classes", "dim", "batch", "ranks", "steps", "kills", "steps_again", "loss_difference"),
    *("row_difference", "fixed_samples_s", "held_samples_s", "growing_samples_s", "held_ratio", "growing_ratio"),
    *("held_cpu_ratio", "growing_cpu_ratio"),
    *("table_mib", "peak_mib", "peak_ratio", "seconds"),
)
LIMIT_SECONDS = 1800.0  # for a step of the correctness run, or a part on ranks


def main() -> None:
    options = {"classes": 100_000, "new": 320, "exact_dim": 32, "kills": 8, "batch": 256, "coming": 128, "turns": 9}
    parser = script_parser(__doc__, results="growing_table", **options, grown=1_000_000, grown_dim=128)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--dims", nargs="+", type=int, default=[128, 512], help="of throughput's tables (128 512)")
    parser.add_argument("--worker", choices=[*PARTS], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.worker:
        {"correctness": train_exactly, "throughput": take_turns, "memory": grow}[args.worker](args)
        return
    parts = {"correctness": correctness, "throughput": throughput, "memory": memory}
    if not set(args.parts) <= parts.keys():
        parser.error(f"parts are {', '.join(parts)}")
    for name in args.parts or parts:
        for row in parts[name](args):
            begin = row.pop("begin")
            row["seconds"] = round(time.monotonic() - begin)
            print_and_add("growing_table", {column: row.get(column, "") for column in COLUMNS}, args.out)


# Correctness.


def correctness(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Run the killed ranks and the oracle; one row."""
    begin = time.monotonic()
    args.steps = Stream(args.exact_dim, FIRST, args.new, SEED).steps_to(args.classes)
    losses, oracle = expected(args)
    with TemporaryDirectory() as name:
        folder, draw = Path(name), random.Random(SEED)
        moments = sorted(draw.sample(range(SAVE_EVERY // 2, args.steps), args.kills))
        worlds = itertools.cycle(WORLDS)
        for moment, world in zip(moments, worlds, strict=False):
            kill_after(moment, started("correctness", world, args, folder=folder), folder, draw)
        for process in started("correctness", next(worlds), args, folder=folder):
            assert process.wait() == 0
        found = told_losses(folder)
        final = torch.load(folder / "final.pt", weights_only=True)
    assert {step for step, _ in found} == set(range(args.steps))
    differences = [abs(loss / losses[step] - 1) for step, loss in found]
    assert final["keys"].tolist() == sorted(oracle.place)
    rows = oracle.rows[[oracle.place[key] for key in final["keys"].tolist()]]
    yield {
        "part": "correctness",
        "begin": begin,
        "classes": len(oracle.place),
        "dim": args.exact_dim,
        "batch": len(Stream(args.exact_dim, FIRST, args.new, SEED).next()[0]),
        "ranks": "4 and 3",
        "steps": args.steps,
        "kills": args.kills,
        "steps_again": len(found) - args.steps,
        "loss_difference": f"{max(differences):.1e}",
        "row_difference": f"{float((final['rows'][:, 0] - rows).norm() / rows.norm()):.1e}",
    }


def expected(args: argparse.Namespace) -> tuple[list[float], Rows]:
    """The oracle's loss of each step, and its rows after the last."""
    stream = Stream(args.exact_dim, FIRST, args.new, SEED)
    oracle, losses = Rows(args.exact_dim, FIRST + args.steps * (args.new + 5)), []
    oracle.insert(stream.keys.tolist(), stream.first_rows())
    for step in range(args.steps):
        keys, changes = stream.next()
        losses.append(oracle.step(stream.embeddings(step, len(keys)), keys))
        for name, *arguments in changes:
            getattr(oracle, name)(*arguments)
    assert sorted(oracle.place) == sorted(stream.keys.tolist())
    return losses, oracle


def train_exactly(args: argparse.Namespace) -> None:
    """Be a rank: go on from the newest state in ``args.folder`` to the last step."""
    mesh, stream = plsc.init("cpu"), Stream(args.exact_dim, FIRST, args.new, SEED)
    precision: dict[str, Any] = {"weight_dtype": torch.float64, "momentum_dtype": torch.float64}
    margin = plsc.CosFace(s=SCALE, m=MARGIN)
    head = plsc.DynamicHead(args.exact_dim, args.classes + 5 * args.new, mesh, margin, **precision)
    optimizer = plsc.HeadSGD(head, lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    if not (done := load(mesh, head, optimizer, args.folder)):
        head.insert(torch.from_numpy(stream.keys), stream.first_rows())
    for step in range(args.steps):
        keys, changes = stream.next()
        if step < done:
            continue
        part = np.array_split(np.arange(len(keys)), mesh.world_size)[mesh.rank]
        loss = head(stream.embeddings(step, len(keys))[part].requires_grad_(), torch.from_numpy(keys[part]))
        loss.backward()
        optimizer.step()
        if mesh.is_main:
            with (args.folder / "losses.jsonl").open("a") as file:
                file.write(json.dumps([step, loss.item()]) + "\n")
        for name, *arguments in changes:
            getattr(head, name)(*arguments)
        if (step + 1) % SAVE_EVERY == 0:
            save(step + 1, mesh, head, optimizer, args.folder)
    rows = head.rows_of(torch.from_numpy(head.key_map.keys))
    if mesh.is_main:
        torch.save({"keys": torch.from_numpy(head.key_map.keys), "rows": rows}, args.folder / "final.pt")
    shutdown()


def save(step: int, mesh: Mesh, head: plsc.DynamicHead, optimizer: plsc.HeadSGD, folder: Path) -> None:
    """Write all state after ``step`` steps; a folder of its name holds the whole of it, or there is none."""
    from torch.distributed import checkpoint

    unfinished = folder / "unfinished"
    if mesh.is_main:
        shutil.rmtree(unfinished, ignore_errors=True)
    barrier(mesh)
    state = {**head.sharded_state(), **optimizer.sharded_state()}
    checkpoint.save(state, checkpoint_id=unfinished / "rows", process_group=mesh.group)
    if mesh.is_main:
        torch.save(head.key_state(), unfinished / "keys.pt")
        unfinished.rename(folder / f"step-{step:06d}")
        for older in sorted(folder.glob("step-*"))[:-1]:
            shutil.rmtree(older)


def load(mesh: Mesh, head: plsc.DynamicHead, optimizer: plsc.HeadSGD, folder: Path) -> int:
    """Take the newest state, if there is one; the number of its steps."""
    from torch.distributed import checkpoint

    newest = max(folder.glob("step-*"), default=None)
    if newest is None:
        return 0
    head.load_key_state(torch.load(newest / "keys.pt", weights_only=True))
    state = {**head.sharded_state(), **optimizer.sharded_state()}
    checkpoint.load(state, checkpoint_id=newest / "rows", process_group=mesh.group)
    return int(newest.name.removeprefix("step-"))


def kill_after(step: int, ranks: list[subprocess.Popen[bytes]], folder: Path, draw: random.Random) -> None:
    """Kill all ranks a random moment after a step, which may fall into a step, a change or a checkpoint."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while max((number for number, _ in told_losses(folder)), default=-1) < step:
        assert all(process.poll() is None for process in ranks), "a rank ended by itself: see above"
        assert time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(draw.uniform(0.0, 1.5))
    for process in ranks:
        process.kill()
    codes = [process.wait() for process in ranks]
    print(f"killed after step {step} on {len(ranks)} ranks", flush=True)
    assert codes == [-signal.SIGKILL] * len(ranks), codes


def told_losses(folder: Path) -> list[tuple[int, float]]:
    """Step and loss of all steps that were taken, some of them several times."""
    path = folder / "losses.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    told = []
    for line in lines:
        with contextlib.suppress(ValueError):  # of a rank that was killed as it wrote
            told.append(tuple(json.loads(line)))
    return told


def started(part: str, world: int, args: argparse.Namespace, **more: object) -> list[subprocess.Popen[bytes]]:
    """Ranks of one thread that do ``part``."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    STORES.append(store)  # as long as the ranks
    names = ("classes", "new", "exact_dim", "batch", "coming", "turns", "grown", "grown_dim", "steps")
    options = {name: getattr(args, name) for name in names if getattr(args, name) is not None} | more
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, __file__, "--worker", part, *words]
    threads = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environments = [rank_environment(rank, world, store.port) | threads for rank in range(world)]
    return [subprocess.Popen(command, env={**os.environ, **each}) for each in environments]


STORES: list[TCPStore] = []


def figures_of(part: str, world: int, args: argparse.Namespace, **more: object) -> dict[str, Any]:
    """What the first rank of ``part`` has found."""
    with TemporaryDirectory() as name:
        for process in started(part, world, args, folder=Path(name), **more):
            assert process.wait(LIMIT_SECONDS) == 0
        found: dict[str, Any] = json.loads((Path(name) / "figures.json").read_text())
    return found


def tell(folder: Path, figures: dict[str, Any]) -> None:
    with atomic_write(folder / "figures.json") as tmp_path:
        tmp_path.write_text(json.dumps(figures))


# Throughput.


def throughput(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each width and number of ranks."""
    for dim, world in itertools.product(args.dims, (1, 2)):
        begin = time.monotonic()
        found = figures_of("throughput", world, args, dims=dim)
        (fixed, fixed_cpu), (held, held_cpu), (growing, growing_cpu) = (
            np.array(found[way]).T for way in ("fixed", "held", "growing")
        )
        yield {
            "part": "throughput",
            "begin": begin,
            "classes": args.classes,
            "dim": dim,
            "batch": args.batch,
            "ranks": world,
            "fixed_samples_s": median(fixed),
            "held_samples_s": median(held),
            "growing_samples_s": median(growing),
            "held_ratio": median(held / fixed),
            "growing_ratio": median(growing / fixed),
            "held_cpu_ratio": median(fixed_cpu / held_cpu),
            "growing_cpu_ratio": median(fixed_cpu / growing_cpu),
        }


def median(values: np.ndarray[Any, Any]) -> float:
    return round(float(np.median(values)), 3)


STEPS_OF_TURN = 3


def take_turns(args: argparse.Namespace) -> None:
    """Be a rank: samples/s and all ranks' CPU time of each turn of a fixed table, and of one that holds or grows."""
    mesh, (dim,) = plsc.init("cpu"), args.dims
    options: dict[str, Any] = {"weight_dtype": torch.float32, "momentum_dtype": torch.float32}
    margin, generator = plsc.CosFace(s=32.0, m=0.2), np.random.default_rng(SEED)
    fixed = plsc.ShardedHead(dim, args.classes, mesh, margin, **options)
    room = args.coming * (STEPS_OF_TURN + 1)
    dynamic = plsc.DynamicHead(dim, args.classes + room, mesh, margin, **options)
    keys = generator.integers(0, 2**62, args.classes)
    for part in np.array_split(keys, 20):
        dynamic.insert(torch.from_numpy(part), torch.from_numpy(generator.standard_normal((len(part), dim)) * 0.01))
    optimizers = {head: plsc.HeadSGD(head, lr=0.1, momentum=0.9, weight_decay=5e-4) for head in (fixed, dynamic)}
    figures: dict[str, list[tuple[float, float]]] = {"fixed": [], "held": [], "growing": []}
    for turn in range(-1, args.turns):
        batches = [draw_batch(args, dim, mesh, generator) for _ in range(STEPS_OF_TURN)]
        new = generator.integers(2**62, 2**63, (STEPS_OF_TURN, args.coming), np.int64)
        for way in figures:
            head = fixed if way == "fixed" else dynamic
            labels = [of_way(way, chosen, keys, come) for (_, chosen), come in zip(batches, new, strict=True)]
            barrier(mesh)
            begin, cpu = time.perf_counter(), time.process_time()
            for (x, _), label in zip(batches, labels, strict=True):
                own = torch.from_numpy(np.array_split(label, mesh.world_size)[mesh.rank])
                head(x.requires_grad_(), own).backward()
                optimizers[head].step()
            barrier(mesh)
            rate = STEPS_OF_TURN * args.batch / (time.perf_counter() - begin)
            all_cpu = sum(all_gather_object(time.process_time() - cpu, mesh))
            figures[way] += [(rate, all_cpu)] if turn >= 0 else []
            if way == "growing":
                assert dynamic.num_classes == args.classes + new.size
                dynamic.remove(torch.from_numpy(new.flatten()))
    if mesh.is_main:
        tell(args.folder, figures)
    shutdown()


def draw_batch(
    args: argparse.Namespace, dim: int, mesh: Mesh, generator: np.random.Generator
) -> tuple[torch.Tensor, np.ndarray[Any, Any]]:
    """This rank's embeddings, and the class numbers of the global batch."""
    x = torch.from_numpy(generator.standard_normal((args.batch, dim)).astype(np.float32))
    return x.tensor_split(mesh.world_size)[mesh.rank].clone(), generator.integers(0, args.classes, args.batch)


def of_way(
    way: str, chosen: np.ndarray[Any, Any], keys: np.ndarray[Any, Any], new: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    """Labels (batch,) of class numbers ``chosen``: themselves, their keys, or the new keys and the others' keys."""
    if way == "fixed":
        return chosen
    labels: np.ndarray[Any, Any] = keys[chosen]
    if way == "growing":
        labels[:: len(labels) // len(new)][: len(new)] = new
    return labels


# Memory.


def memory(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The row of one process."""
    begin = time.monotonic()
    found = figures_of("memory", 1, args)
    sizes = {"part": "memory", "begin": begin, "classes": args.grown, "dim": args.grown_dim, "ranks": 1}
    ratio = round(found["peak_mib"] / found["table_mib"], 3)
    yield {**sizes, **{name: round(value) for name, value in found.items()}, "peak_ratio": ratio}


NEW_AT_ONCE = 2048  # of a step of the memory's part


def grow(args: argparse.Namespace) -> None:
    """Be the process: MiB of the final table, and by how much the peak of the memory grows from before the head."""
    mesh = plsc.init("cpu")
    warm = made(args, mesh, 10 * NEW_AT_ONCE)
    for step in range(3):  # the libraries' own memory, and the batches'
        grow_by(warm, step, NEW_AT_ONCE)
    del warm
    before = resident("VmRSS")
    forget_peak()
    pair = made(args, mesh, 2 * args.grown)
    head, optimizer = pair
    head.insert(torch.arange(2**62, 2**62 + FIRST))
    steps = 0
    while head.num_classes < args.grown:
        grow_by(pair, steps, min(NEW_AT_ONCE, args.grown - head.num_classes))
        steps += 1
    peak = resident("VmHWM") - before
    momentum = sum(shard.blocks[0].local.nbytes for shard in optimizer.sharded_state().values())
    table = head.weight.nbytes + momentum + head.inverse_norms().nbytes
    tell(args.folder, {"table_mib": table / 2**20, "peak_mib": peak, "steps": steps, "batch": NEW_AT_ONCE})


def made(args: argparse.Namespace, mesh: Mesh, room: int) -> tuple[plsc.DynamicHead, plsc.HeadSGD]:
    options: dict[str, Any] = {"weight_dtype": torch.float32, "momentum_dtype": torch.float32, "sample_rate": 0.01}
    head = plsc.DynamicHead(args.grown_dim, room, mesh, plsc.CosFace(s=32.0, m=0.2), **options)
    return head, plsc.HeadSGD(head, lr=0.1, momentum=0.9, weight_decay=5e-4)


def grow_by(pair: tuple[plsc.DynamicHead, plsc.HeadSGD], step: int, count: int) -> None:
    """Take a step that brings so many classes."""
    head, optimizer = pair
    keys = torch.arange(step * NEW_AT_ONCE, step * NEW_AT_ONCE + count)
    x = torch.randn(count, head.dim, generator=torch.Generator().manual_seed(step))
    head(x.requires_grad_(), keys).backward()
    optimizer.step()


if __name__ == "__main__":
    main()
