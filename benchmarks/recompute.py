"""Memory and time of a backbone's passes with and without recomputed activations.

    python benchmarks/recompute.py [--backbone iresnet50] [--batch 8] [--rounds 5] [--threads 1]

Each way has a process of its own, which reads its peak of resident memory above the weights after a warm-up; the
processes take turns, a pass each, so that other load meets them alike, and give processor time. The table also has the
peak that the planner finds on fake tensors, and the largest batch whose activations take --memory GB, on the line
through its peaks at two batches. Adds rows to benchmarks/results/recompute.csv. A minute or two.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from results_file import add_row, answers_in_turn, script_parser

from plsc.models import Backbone, create
from plsc.models.recompute_budget import recompute_activations
from plsc.plan.backbone import profile_backbone
from plsc.sizes import status_bytes

SIDE = 112
# Freed memory goes back to the system at once, so that the peak is that of what is in use.
RETURN_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
WAYS: dict[str, tuple[str, float]] = {
    "none": ("none", 1.0),
    "budget 0.6": ("budget", 0.6),
    "budget 0.4": ("budget", 0.4),
    "every block": ("every_k", 1.0),
}


def build(name: str, way: str, batch: int) -> tuple[Backbone, int]:
    """The backbone in training mode, whose weights' gradients are dropped when they are there; blocks recomputed."""
    torch.manual_seed(0)
    model = create(name, embedding_dim=512, image_size=SIDE).train()
    method, budget = WAYS[way]
    count = recompute_activations(model, method, budget=budget, images=batch)
    for weight in model.parameters():
        if weight.requires_grad:
            weight.register_post_accumulate_grad_hook(_forget)
    return model, count


def _forget(weight: torch.Tensor) -> None:
    weight.grad = None


def serve(name: str, way: str, batch: int, threads: int) -> None:
    """Take a pass for each line of standard input; answer with processor seconds and the peak in bytes."""
    torch.set_num_threads(threads)
    model, count = build(name, way, batch)
    images = torch.randn(batch, 3, SIDE, SIDE)
    model(images[:2]).sum().backward()  # libraries, kernels
    before = status_bytes("VmRSS")
    for _ in sys.stdin:
        Path("/proc/self/clear_refs").write_text("5")
        start = time.process_time()
        model(images).sum().backward()
        seconds = time.process_time() - start
        peak = status_bytes("VmHWM") - before
        print(json.dumps({"blocks": count, "seconds": seconds, "peak": peak}), flush=True)


def measure(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Medians over rounds in which each way takes a pass, after one that does not count."""
    passes = answers_in_turn(__file__, args.ways, args.rounds + 1, args, **RETURN_MEMORY)
    return {
        way: {
            "blocks": first["blocks"],
            "seconds": statistics.median(each["seconds"] for each in rest),
            "peak": max(each["peak"] for each in rest),
        }
        for way, (first, *rest) in passes.items()
    }


def modelled(name: str, way: str, batch: int, memory: int) -> tuple[int, int]:
    """The peak on fake tensors in bytes, and the largest batch that ``memory`` holds, on the line through two peaks."""
    model, _ = build(name, way, batch)
    few, many = (profile_backbone(model, n, SIDE, "fp32", keep_gradients=False).peak for n in (batch, 8 * batch))
    per_image = (many - few) / (7 * batch)
    return few, int((memory - few) // per_image) + batch


def main() -> None:
    parser = script_parser(__doc__, backbone="iresnet50", batch=8, rounds=5, threads=1)
    parser.add_argument("--ways", nargs="+", choices=tuple(WAYS), default=list(WAYS), help="none has to be among them")
    parser.add_argument("--memory", type=float, default=8.0, help="GB of activations, for the largest batch")
    parser.add_argument("--serve", choices=tuple(WAYS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.backbone, args.serve, args.batch, args.threads)
        return
    found = measure(args)
    print(f"{args.backbone}, fp32, {args.batch} images, {args.threads} threads")
    print(f"{'':<12} {'blocks':>6} {'peak MB':>8} {'':>6} {'modelled':>8} {'seconds':>8} {'':>6} {'batch':>6}")
    base = found["none"]
    for way, row in found.items():
        planned, largest = modelled(args.backbone, way, args.batch, int(args.memory * 1e9))
        figures = {
            "backbone": args.backbone,
            "batch": args.batch,
            "threads": args.threads,
            "rounds": args.rounds,
            "recompute": way,
            "blocks": row["blocks"],
            "peak_bytes": row["peak"],
            "peak_ratio": round(row["peak"] / base["peak"], 4),
            "modelled_peak_bytes": planned,
            "cpu_seconds": round(row["seconds"], 4),
            "time_ratio": round(row["seconds"] / base["seconds"], 4),
            "memory_gb": args.memory,
            "largest_batch": largest,
        }
        add_row("recompute", figures)
        print(
            f"{way:<12} {row['blocks']:6} {row['peak'] / 1e6:8.0f} {figures['peak_ratio']:6.2f} {planned / 1e6:8.0f} "
            f"{row['seconds']:8.3f} {figures['time_ratio']:6.2f} {largest:6}",
            flush=True,
        )


if __name__ == "__main__":
    main()
