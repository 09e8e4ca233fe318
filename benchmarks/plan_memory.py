"""Does a training step take the memory that `plsc plan` says? On a GPU where there is one, else on the CPU.

    python benchmarks/plan_memory.py [--classes 200000] [--backbone resnet8] [--batch 64] [--weights bfloat16] …

takes two steps in a process of its own, compares the bytes of all state and the peak with the plan's, and adds a row to
benchmarks/results/plan_memory.csv (--no-row: does not). On the CPU the peak is that of the process's resident memory
above what the libraries and a first small step took; on a GPU what the allocator gave out.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from results_file import add_row, script_parser
from torch import Tensor

from plsc import config as configuration
from plsc.config import Config
from plsc.data import open_dataset
from plsc.devices import Device
from plsc.parallel import Mesh
from plsc.plan.advice import profile_of
from plsc.plan.memory import plan_memory
from plsc.plan.plan_config import PlanConfig
from plsc.train.components import TrainComponents, build
from plsc.train.micro_batches import MicroBatch
from plsc.train.step import Stepper

# Freed memory goes back to the system at once, so that the peak is that of what is in use.
_RETURN_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}


def main() -> None:
    """Measure in a fresh process, print, and add a row."""
    parser = script_parser(
        __doc__,
        classes=200_000,
        dim=512,
        backbone="resnet8",
        image_size=112,
        batch=64,
        precision="fp32",
        weights="float32",
        momentum="float32",
        optimizer="sgd",
        sample_rate=1.0,
    )
    parser.add_argument("--no-row", action="store_true")
    parser.add_argument("--measure-here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure_here:
        print(json.dumps(measured(args)))
        return
    command = [sys.executable, __file__, "--measure-here", *sys.argv[1:]]
    done = subprocess.run(command, env={**os.environ, **_RETURN_MEMORY}, stdout=subprocess.PIPE, text=True, check=True)
    figures = json.loads(done.stdout)
    print(json.dumps(figures))
    if not args.no_row:
        add_row("plan_memory", figures)


def measured(args: argparse.Namespace) -> dict[str, Any]:
    """Bytes of state and of the peak, measured and planned."""
    mesh = Mesh(0, 1, 0, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    config = _config(args, args.classes)
    _step(build(_config(args, 100), open_dataset("avatars:100x1"), mesh), steps=1)
    gc.collect()
    before = _reset_peak(mesh.device)
    dataset = open_dataset(config.data.train)
    components = build(config, dataset, mesh)
    stepper = _step(components, steps=2)
    peak = _peak(mesh.device) - before
    state = sum(tensor.nbytes for tensor in _state(components, stepper))
    run = PlanConfig(config, args.classes, world=1, per_node=1, head_ranks=1)
    plan = plan_memory(run, profile_of(run), Device("", mesh.device.type, {}, 0.0))
    planned = sum(plan.kept.values())
    return {
        **{name: value for name, value in vars(args).items() if name not in ("no_row", "measure_here")},
        "state_bytes": state,
        "planned_state_bytes": planned,
        "state_ratio": round(planned / state, 4),
        "peak_bytes": peak,
        "planned_peak_bytes": plan.computed,
        "peak_ratio": round(plan.computed / peak, 4),
    }


def _config(args: argparse.Namespace, classes: int) -> Config:
    return configuration.from_dict(
        {
            "backbone": args.backbone,
            "embedding_dim": args.dim,
            "precision": args.precision,
            "data": {
                "train": f"avatars:{classes}x1",
                "image_size": args.image_size,
                "batch_size": args.batch,
                "workers": 0,
                "cache": "none",
            },
            "head": {"weight_dtype": args.weights, "momentum_dtype": args.momentum, "sample_rate": args.sample_rate},
            "optim": {"name": args.optimizer},
        }
    )


def _step(components: TrainComponents, steps: int) -> Stepper:
    data = components.config.data
    stepper = Stepper(components)
    for number in range(steps):
        images = torch.randint(256, (data.batch_size, *data.preprocessing.shape), dtype=torch.uint8)
        labels = torch.randint(components.tables[0].head.num_classes, (data.batch_size,))
        stepper.step([MicroBatch(images, labels, [data.batch_size])], number)
    return stepper


def _state(components: TrainComponents, stepper: Stepper) -> Iterable[Tensor]:
    """Every tensor that stays from step to step."""
    head = components.tables[0].head
    yield from (head.weight, head.inverse_norms())
    for shard in components.head_optimizers[0].sharded_state().values():
        yield shard.blocks[0].local
    yield from (
        *components.strategy.backbone.parameters(),
        *components.strategy.backbone.buffers(),
        *stepper.statistics.before.values(),
    )
    for state in components.optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def _reset_peak(device: torch.device) -> int:
    """Begin to look for the peak; the bytes in use now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")
    return _resident("VmRSS")


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else _resident("VmHWM")


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


if __name__ == "__main__":
    main()
