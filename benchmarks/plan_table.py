"""The predictions of docs/measured.md: images/s that `plsc plan` expects for 1 to 1,024 GPUs, 1M to 400M classes.

    python benchmarks/plan_table.py [--device h100] [--gpu-memory 80GB] [--backbone iresnet50] [--batch 128]

Takes for each number of GPUs and classes the setup that the plan recommends, prints the table as Markdown, and writes
benchmarks/results/plan_table.csv. A plan, not a measurement: nothing is run but the backbone's Python.
"""

import argparse
import csv
import io

from results_file import RESULTS, script_parser

from plsc import config as configuration
from plsc.config import Config
from plsc.files import atomic_write
from plsc.plan import CapacityError, Hardware, Links, Plan, link_speed, named_device, parse_memory, plan

GPUS = (1, 2, 4, 8, 16, 64, 256, 1024)
CLASSES = (1, 2, 5, 10, 20, 45, 50, 100, 200, 400)  # millions
SHORT = {"float32": "f32", "bfloat16": "bf16", "int8": "i8", "none": "–"}


def main() -> None:
    """Plan every cell, print and write."""
    args = script_parser(__doc__, device="h100", gpu_memory="80GB", backbone="iresnet50", batch=128).parse_args()
    config = configuration.from_dict({"backbone": args.backbone, "data": {"batch_size": args.batch}})
    device = named_device(args.device)
    links = Links(
        link_speed("nvlink" if device.nvlink else "pcie", device, "--link"),
        link_speed("infiniband", device, "--between"),
    )
    hardware = Hardware(device, parse_memory(args.gpu_memory), links)
    plans = {(gpus, millions): _planned(config, millions, hardware, gpus) for millions in CLASSES for gpus in GPUS}
    print(_markdown(plans))
    _write_csv(plans, args)


def _planned(config: Config, millions: int, hardware: Hardware, gpus: int) -> Plan | None:
    try:
        return plan(config, millions * 1_000_000, hardware, gpus=gpus)
    except CapacityError:
        return None


def _markdown(plans: dict[tuple[int, int], Plan | None]) -> str:
    lines = ["| classes | " + " | ".join(f"{gpus:,} GPU{'s' if gpus > 1 else ''}" for gpus in GPUS) + " |"]
    lines.append("|---:|" + "---:|" * len(GPUS))
    for millions in CLASSES:
        cells = (_cell(plans[gpus, millions]) for gpus in GPUS)
        lines.append(f"| {millions}M | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(planned: Plan | None) -> str:
    """Images/s, then weights and momentum, then the ranks of a group where there are several groups."""
    if planned is None:
        return "does not fit"
    choice = planned.advice.choice
    stored = "/".join(SHORT[name] for name in choice.run.storage)
    groups = f", K={choice.run.head_ranks:,}" if choice.run.replicas > 1 else ""
    return f"{choice.timing.images_per_second:,.0f} ({stored}{groups})"


def _write_csv(plans: dict[tuple[int, int], Plan | None], args: argparse.Namespace) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        [
            "kind",
            "device",
            "gpu_memory",
            "backbone",
            "batch_per_gpu",
            "gpus",
            "classes",
            "fits",
            "weight_dtype",
            "momentum_dtype",
            "head_ranks",
            "gpu_bytes",
            "step_seconds",
            "head_seconds",
            "images_per_second",
        ]
    )
    given = ["plan", args.device, args.gpu_memory, args.backbone, args.batch]
    for (gpus, millions), planned in plans.items():
        writer.writerow([*given, gpus, millions * 1_000_000, *_figures(planned)])
    with atomic_write(RESULTS / "plan_table.csv") as path:
        path.write_text(text.getvalue(), encoding="utf-8")


def _figures(planned: Plan | None) -> list[object]:
    if planned is None:
        return [False, *[""] * 7]
    choice = planned.advice.choice
    head = sum(seconds for name, seconds in choice.timing.parts.items() if name.startswith("head"))
    return [
        True,
        *choice.run.storage,
        choice.run.head_ranks,
        choice.memory.total,
        f"{choice.timing.seconds:.6f}",
        f"{head:.6f}",
        round(choice.timing.images_per_second),
    ]


if __name__ == "__main__":
    main()
