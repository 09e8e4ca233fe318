"""Do steps that wait for no other rank train as accurate a model, and sooner where a rank is slow?

    python benchmarks/asynchronous.py [--ranks 3] [--steps 160] [--seeds 2] [--pace none steady …] [--methods sync …]

trains ResNet-8 by SGD at 32 pixels on avatars, a class table on each rank, and judges it on unseen avatars. At each
pace every method in turn takes as many steps; then, where a rank is slow, as many as it can in the seconds that the
synchronous run has just taken: its steps are the slowest rank's, while asynchronous ranks end each at a step of its
own, and meet. Paces: none; steady: the last rank sleeps 0.15 s before every step; pauses: each rank in turn sleeps
1.2 s, once in 24 steps. The learning rate is constant, as no run knows its last step. Adds a row per run to
benchmarks/results/asynchronous.csv: loss (the mean over ranks of their last ten steps), accuracy, seconds, steps of the
slowest and of the fastest rank, the largest staleness of any step. About ten minutes a seed on two idle cores.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from avatar_runs import start_ranks
from results_file import add_row, script_parser

import plsc
from plsc import config as configuration
from plsc.native.allocator import keep_freed_memory
from plsc.parallel import Mesh
from plsc.parallel.collectives import all_gather_object, barrier
from plsc.parallel.mesh import shutdown, with_head_groups
from plsc.quickstart import CONFIG, UNSEEN
from plsc.train.components import TrainComponents, build, with_preprocessing
from plsc.train.evaluate import evaluate_sets
from plsc.train.micro_batches import MicroBatch, micro_batches
from plsc.train.stages import RunSchedule
from plsc.train.state import Position
from plsc.train.step import Stepper
from plsc.train.tables import open_training_data

BASE: dict[str, Any] = {
    "backbone": "resnet8",
    "precision": "fp32",
    "data.image_size": 32,
    "data.batch_size": 8,
    "data.workers": 0,
    "steps": 1_000_000,  # of which a run takes the first
    "head_ranks": 1,
    "head.placement": "host",
    "optim.name": "sgd",
    "optim.betas": None,  # which sgd does not read
    "optim.lr": 0.05,
    "optim.weight_decay": 5e-4,
    "optim.schedule": "constant",
    "optim.warmup_steps": 20,
}
FULL = {"asynchronous.mode": "full"}
METHODS: dict[str, dict[str, Any]] = {
    "sync": {},
    "geo": {
        "averaging.name": "local_sgd",
        "averaging.period": 4,
        "replicas.averaging_period": 4,
        "replicas.staleness": 2,
    },
    "half 4, staleness 8": {
        "asynchronous.mode": "half",
        "asynchronous.period": 4,
        "asynchronous.staleness": 8,
    },
    "full, staleness 2": {**FULL, "asynchronous.staleness": 2},
    "full, staleness 8": {**FULL, "asynchronous.staleness": 8},
    "full, staleness 10000": {**FULL, "asynchronous.staleness": 10_000},  # as good as no bound, as in Paddle
}
SLEEP, PAUSE, PAUSE_STEPS = 0.15, 1.2, 24
LAST = 10  # steps whose losses are averaged


@dataclass(frozen=True)
class Limit:
    """The end of a run: after so many steps, or after so many seconds."""

    steps: int = 0
    seconds: float = float("inf")


def main() -> None:
    parser = script_parser(__doc__, results="asynchronous", data="avatars:100x12", ranks=3, steps=160, seeds=2)
    parser.add_argument("--pace", nargs="+", choices=("none", "steady", "pauses"), default=["none", "steady", "pauses"])
    parser.add_argument("--methods", nargs="+", choices=tuple(METHODS), default=list(METHODS))
    args = parser.parse_args()
    start_ranks(args.ranks)
    torch.set_num_threads(1)
    keep_freed_memory()  # as plsc train does
    mesh = with_head_groups(plsc.init("cpu"), 1)
    for seed in range(args.seeds):
        for pace in args.pace:
            base = {**BASE, "data.train": args.data, "seed": seed}
            columns = {"ranks": args.ranks, "data": args.data, "seed": seed, "pace": pace}
            seconds = 0.0
            for method in args.methods:
                figures = trained({**base, **METHODS[method]}, mesh, pace, Limit(steps=args.steps))
                seconds = seconds or figures["seconds"]  # of the first method, which is the synchronous one
                report(mesh, {**columns, "equal": "steps", "method": method, **figures}, args)
            for method in args.methods if pace != "none" else ():
                figures = trained({**base, **METHODS[method]}, mesh, pace, Limit(seconds=seconds))
                report(mesh, {**columns, "equal": "seconds", "method": method, **figures}, args)
    shutdown()


def report(mesh: Mesh, row: Mapping[str, Any], args: Any) -> None:
    """Print a row and add it to the results."""
    if mesh.is_main:
        print(dict(row), flush=True)
        add_row("asynchronous", row, args.out)


def trained(settings: Mapping[str, Any], mesh: Mesh, pace: str, limit: Limit) -> dict[str, Any]:
    """Train from scratch until ``limit``; figures of all ranks, the same on each. Every rank calls."""
    config = with_preprocessing(configuration.load(CONFIG, {**settings, "log.to": ()}))
    components = build(config, open_training_data(config), mesh)
    position = Position()
    schedule, stepper, losses = RunSchedule(components, position), Stepper(components), list[float]()
    barrier(mesh)
    begin = time.monotonic()
    for group in groups(components):
        time.sleep(sleep_before(position.step, pace, mesh))
        is_over = time.monotonic() - begin >= limit.seconds or position.step + 1 == limit.steps
        result = stepper.step(group, position.step, int(is_over)).result()
        losses.append(result.loss)
        schedule.advance()
        if result.stop or (is_over and components.strategy.steps_alone):
            break
    with components.averaged():
        seconds = time.monotonic() - begin
        judged = evaluate_sets(components)[UNSEEN]
    staleness = components.exchange.figures().get("staleness", 0)
    components.exchange.close()
    own = {"loss": fmean(losses[-LAST:]), "steps": position.step, "staleness": staleness, "seconds": seconds}
    everyone = all_gather_object(own, mesh)
    return {
        "loss": round(fmean(each["loss"] for each in everyone), 4),
        "accuracy": round(judged["accuracy"], 5),
        "rank1": round(judged["rank1"], 5),
        "seconds": round(max(each["seconds"] for each in everyone), 2),
        "least_steps": min(each["steps"] for each in everyone),
        "most_steps": max(each["steps"] for each in everyone),
        "staleness": max(each["staleness"] for each in everyone),
    }


def groups(components: TrainComponents) -> Iterator[list[MicroBatch]]:
    """This rank's batches, for ever."""
    while True:
        yield from micro_batches(components.loader, components.config.optim.accumulate, components.class_loss.split)


def sleep_before(step: int, pace: str, mesh: Mesh) -> float:
    """Seconds that this rank sleeps before a step."""
    if pace == "steady":
        return SLEEP if mesh.rank == mesh.world_size - 1 else 0.0
    turn = (step + PAUSE_STEPS * mesh.rank // mesh.world_size) % PAUSE_STEPS
    return PAUSE if pace == "pauses" and turn == PAUSE_STEPS - 1 else 0.0


if __name__ == "__main__":
    main()
