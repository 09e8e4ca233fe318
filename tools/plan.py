"""Plan a training run before a GPU is rented: what fits, how long a step takes, what to choose and why.

    plsc plan configs/webface42m_iresnet100_exact.toml --classes 2059906 --gpus 8 --gpu-memory 80GB

CONFIG.toml is the one that would be trained; any of its keys can be given here too, as to plsc train. The number of
classes is that of [data].train where it is at hand, else --classes. Counts can be written as 2M, 500k or 1e6. The
answer is a model of the work at named, given or measured speeds. It is a plan, not a measurement: throughputs that
others published are planned with a median error of 22.6%; of plsc's own, an H100 confirmed the head's within 10%.

The answer ends with a recommendation, and with the keys to paste into CONFIG.toml for it. Where the number of images
is known, the hours of the whole run and its GPU hours are given too.

--gpu-memory 80GB is a card sold as such: 97.5% of 80 GiB is taken as usable. 78GiB and 84e9 are taken as they are. A
plan fits where it leaves a hundredth of that free.
Exit code 1 where nothing fits, with what to change.
"""

import argparse
from pathlib import Path
from typing import Any

from plsc import config as configuration
from plsc import sizes
from plsc.config import Config
from plsc.errors import PlscError, UsageError
from plsc.progress import note, show
from plsc.tools.entry import above_0, number

HELP = "what fits on which GPUs and how long a step takes, before one is rented"

accepts_overrides = True

# Short options for keys that decide how the backbone lies on the ranks.
_PLACEMENT = {
    "--strategy": ("parallel.strategy", "ddp, zero1, zero2, fsdp, hsdp, or auto, which chooses and says why"),
    "--shard-ranks": ("parallel.shard_ranks", "hsdp: ranks that share one set of weights"),
    "--tp": ("parallel.tp", "ranks of a tensor parallel group"),
    "--pp": ("parallel.pp", "ranks of a pipeline"),
    "--comm-hook": ("parallel.comm_hook", "compression of the gradients: bf16, fp16, powersgd, dgc"),
    "--recompute": ("recompute", "activations to recompute in the backward pass: none, every_k, budget"),
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments; --KEY VALUE pairs are the configuration's business."""
    add = parser.add_argument
    add("config", metavar="CONFIG.toml", nargs="?", type=Path, help="what would be trained")
    add("--gpus", metavar="N", type=_count, default=1, help="GPUs, a rank each (default: 1)")
    add("--gpus-per-node", metavar="N", type=_count, default=8, help="GPUs of a machine (default: 8)")
    add("--gpu-memory", metavar="80GB", help="memory of a GPU (default: the named device's)")
    add("--host-memory", metavar="1TB", help="memory of a machine that tables may take (default: none)")
    text = "classes, as 2059906, 2M or 1e6, where the data is not at hand"
    add("--classes", metavar="C", type=_count, help=text)
    images = number(_count, lambda value: value >= 1, "at least one is needed")
    add("--images", metavar="N", type=images, help="images of an epoch, likewise")
    add("--device", metavar="NAME", default="h100", help="h100 (default), h200, b200, a100, v100, t4, …")
    add("--measure", action="store_true", help="measure the speeds of this machine instead")
    add("--tflops", metavar="X", type=float, help="TFLOP/s that large products in 16 bits reach")
    add("--bandwidth", metavar="GB/s", type=float, help="what a copy reads and writes per second")
    text = "inside a machine: nvlink (default, where there is one), pcie, or GB/s"
    add("--link", metavar="NAME|GB/s", help=text)
    text = "between machines, per GPU (default: infiniband)"
    add("--between", metavar="NAME|GB/s", default="infiniband", help=text)
    for option, (key, help_text) in _PLACEMENT.items():
        parser.add_argument(option, metavar=key.rpartition(".")[2].upper(), help=f"{help_text} ({key})")
    parser.add_argument("--offload", action="store_true", help="keep the backbone in host memory (parallel.offload)")
    parser.add_argument("--images-per-second", metavar="R", type=above_0, help="sampling is considered below this rate")
    parser.epilog = (
        "--KEY VALUE: any key of the configuration (plsc train --list-keys), as --head.weight_dtype bfloat16"
    )


def _count(text: str) -> int:
    try:
        return sizes.parse_count(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Plan, and print it."""
    config = configuration.load(
        args.config, {**configuration.parse_arguments(args.overrides, args.options), **_placement(args)}
    )
    from plsc.plan import plan
    from plsc.plan.planner import as_text

    config = _sized(config)
    hardware = _machine(args)
    classes, images = _counts(config, args)
    result = plan(
        config,
        classes,
        hardware,
        gpus=args.gpus,
        gpus_per_node=args.gpus_per_node,
        images=images,
        wanted=args.images_per_second,
    )
    show(*as_text(result).split("\n"))
    return result.as_dict()


def _sized(config: Config) -> Config:
    """Set the image size that init_weights bring; weights that are not at hand do not keep a run from being planned."""
    from plsc.train.components import with_preprocessing

    try:
        return with_preprocessing(config)
    except PlscError as error:
        if config.data.image_size is None:
            note(f"note: planned for images of 112x112: {error}")
        return config


def _placement(args: argparse.Namespace) -> dict[str, str]:
    """Keys that are given by their short options."""
    given = {key: getattr(args, option[2:].replace("-", "_")) for option, (key, _) in _PLACEMENT.items()}
    return {key: value for key, value in given.items() if value is not None} | (
        {"parallel.offload": "true"} if args.offload else {}
    )


def _machine(args: argparse.Namespace) -> Any:
    from plsc.plan import Hardware, Links, link_speed, measure_device, named_device, parse_memory
    from plsc.plan.devices import with_speeds

    device = measure_device() if args.measure else named_device(args.device)
    device = with_speeds(device, args.tflops, args.bandwidth)
    inside = args.link if args.link is not None else ("nvlink" if device.nvlink else "pcie")
    links = Links(link_speed(inside, device, "--link"), link_speed(args.between, device, "--between"))
    memory = parse_memory(args.gpu_memory) if args.gpu_memory is not None else device.memory
    if memory is None:
        raise UsageError("how much memory a rank has is not known here; give --gpu-memory, as in 16GiB")
    host = sizes.parse_memory(args.host_memory, "--host-memory") if args.host_memory is not None else None
    return Hardware(device, memory, links, host)


def _counts(config: Config, args: argparse.Namespace) -> tuple[list[int], int | None]:
    """Classes of each table, and images of an epoch: as given, else the data's."""
    tables = configuration.class_tables(config)
    if args.classes is not None and tables[0].name:
        raise UsageError("--classes is of a single table; give each table its own classes")
    given = [table.classes if args.classes is None else args.classes for table in tables]
    known = [count for count in given if count is not None]
    if len(known) == len(given):
        return known, args.images
    from plsc.data import is_named
    from plsc.train.tables import classes_of, open_training_data

    for table in tables:
        source = table.config.data.train
        if not is_named(source):
            mend = f"classes in table {table.name}" if table.name else "--classes C"
            raise UsageError(f"data.train = {source} is not here to count its classes; give {mend}")
    dataset = open_training_data(config)
    return classes_of(dataset), args.images if args.images is not None else dataset.mixture.epoch_length
