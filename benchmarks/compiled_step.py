"""Time of a training step's passes and update with and without torch.compile, on this machine's processor.

    python benchmarks/compiled_step.py [--backbone iresnet18] [--batch 8] [--rounds 7] [--threads 1]

Each way has a process of its own; the processes take turns, a step each, so that other load meets them alike, and give
processor time. A step is forward and backward of random images at 112 pixels in float32, and SGD's update; the class
head, which is never compiled, is left out. Adds rows to benchmarks/results/compiled_step.csv. A minute or two.
"""

import argparse
import json
import statistics
import sys
import time

import torch
from results_file import add_row, answers_in_turn, script_parser

from plsc.models import create

SIDE = 112
WAYS = {"eager": False, "compile": True}


def serve(name: str, way: str, batch: int, threads: int) -> None:
    """Take a step for each line of standard input; answer with the seconds of the processor, of all threads."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    backbone = create(name, embedding_dim=512, image_size=SIDE).train()
    net = torch.compile(backbone) if WAYS[way] else backbone
    optimizer = torch.optim.SGD(backbone.parameters(), 1e-3, momentum=0.9, weight_decay=5e-4)
    images = torch.randn(batch, 3, SIDE, SIDE)
    for _ in sys.stdin:
        start, wall = time.process_time(), time.perf_counter()
        net(images).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        answer = {"seconds": time.process_time() - start, "wall": time.perf_counter() - wall}
        print(json.dumps(answer), flush=True)


def main() -> None:
    parser = script_parser(__doc__, backbone="iresnet18", batch=8, rounds=7, threads=1)
    parser.add_argument("--serve", choices=tuple(WAYS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.backbone, args.serve, args.batch, args.threads)
        return
    steps = answers_in_turn(__file__, WAYS, args.rounds + 2, args)  # the first one compiles
    medians = {way: statistics.median(step["seconds"] for step in steps[way][2:]) for way in WAYS}
    print(f"{args.backbone}, fp32, {args.batch} images, {args.threads} threads")
    print(f"{'':<8} {'first step':>10} {'seconds':>8} {'least':>8} {'':>6}")
    for way, seconds in medians.items():
        figures = {
            "backbone": args.backbone,
            "batch": args.batch,
            "threads": args.threads,
            "rounds": args.rounds,
            "way": way,
            "first_step_seconds": round(steps[way][0]["wall"], 2),
            "cpu_seconds": round(seconds, 4),
            "least_cpu_seconds": round(min(step["seconds"] for step in steps[way][2:]), 4),
            "time_ratio": round(seconds / medians["eager"], 4),
        }
        add_row("compiled_step", figures)
        print(
            f"{way:<8} {figures['first_step_seconds']:10.1f} {seconds:8.3f} {figures['least_cpu_seconds']:8.3f} "
            f"{figures['time_ratio']:6.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
