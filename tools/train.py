"""Train a recognition model: a backbone and a class head with any number of classes.

    plsc train avatars_quickstart --nproc 2 --out runs/avatars

CONFIG is a TOML file, or the name of a configuration that ships with plsc (listed below). It sets the data, the
backbone and whatever else differs from the defaults. `plsc train --list-keys` lists every key, `--list-keys optim` a
section, `--list-keys lr` the keys about a word. Any key can also be given here, and then overrides the file:

    plsc train my.toml --data.train faces.rec --optim.lr 0.05 --epochs 10

--nproc N starts N ranks on this machine, one per GPU (or sharing the CPU's cores). On several machines with a common
file system, run it on each, with its number, and the address at which the others reach the first:

    plsc train my.toml --nproc 8 --nnodes 2 --node-rank 0 --master-addr node0 --out /shared/run     on node0
    plsc train my.toml --nproc 8 --nnodes 2 --node-rank 1 --master-addr node0 --out /shared/run     on node1

The first machine prints the lines for all of them, as --dry-run does without starting anything. torchrun works too. It
prints a report of its own after our line where a rank fails. On each of the two machines:

    OMP_NUM_THREADS=8 torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint node0:29500 \\
        --no-python plsc train my.toml --out /shared/run

The run directory holds config.toml (every key), train.log, metrics.jsonl, tensorboard/ (log.to names other trackers
and files too: csv, wandb, mlflow), checkpoints/, classes.json
(the name of each class number), model.safetensors (the last weights) and best.safetensors (those of the best mean
accuracy on eval.sets, if there are any), progress.json (the step of the last weights, and the run's number of steps);
with --profile, profile/ too. Where a command takes a RUN it means the last
weights, and with --best the best. A run that was stopped, by whatever, goes on with --resume auto, on any number of
ranks.

A config of arcface_torch (NAME.py) is translated by --as-toml; docs/arcface_torch.md has all its names beside ours.
"""

import argparse
import os
import warnings
from pathlib import Path
from typing import Any

from plsc import arcface_torch
from plsc import config as configuration
from plsc.config import Config
from plsc.errors import PlscError, UsageError
from plsc.progress import note, show
from plsc.tools.entry import add_outside_option, add_verify_option, is_launched, print_error

HELP = "train a backbone and a class head from a TOML configuration"

accepts_overrides = True
_PROFILED_STEPS = 5
_MONITOR_SECONDS = 30.0  # in which the monitor of the ranks finds those that hang, and reports them


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments; --KEY VALUE pairs are the configuration's business."""
    names = ", ".join(configuration.shipped())
    add = parser.add_argument
    add("config", metavar="CONFIG", nargs="?", type=Path, help=f"a TOML file, or one of {names}")
    add("--nproc", metavar="N", type=int, default=1, help="ranks to start on this machine")
    add("--out", metavar="RUN", type=Path, help="the run directory (default: runs/CONFIG's name)")
    text = "go on from the newest checkpoint of --out (auto; begins where there is none), or from a checkpoint"
    add("--resume", metavar="auto|FOLDER", help=text)
    add_outside_option(parser)
    add_verify_option(parser)
    add("--nnodes", metavar="N", type=int, default=1, help="machines that take part (default: 1)")
    add("--node-rank", metavar="R", type=int, default=0, help="the number of this one, from 0")
    add("--master-addr", metavar="HOST", help="the first machine's address, for --nnodes above 1")
    add("--master-port", metavar="P", type=int, default=29500, help="a free port of it (29500)")
    text = 'parallel.strategy = "auto": the link between machines, per GPU, as of plsc plan (default: infiniband)'
    add("--between", metavar="NAME|GB/s", help=text)
    text = f"write a trace and a picture of some steps into RUN/profile ({_PROFILED_STEPS}; as --log.profile STEPS)"
    add("--profile", metavar="STEPS", nargs="?", type=int, const=_PROFILED_STEPS, help=text)
    text = "check the request, print what would be started on each machine, and end"
    add("--dry-run", action="store_true", help=text)
    text = "print CONFIG as TOML, every key or an arcface_torch config's, and end"
    add("--as-toml", action="store_true", help=text)
    text = (
        "list every configuration key, those of a section, or those that are about a word, and end; with CONFIG, "
        "its values beside the defaults"
    )
    add("--list-keys", metavar="SECTION|WORD", nargs="?", const="", help=text)
    add("--keys", action="store_true", help=argparse.SUPPRESS)  # its former name, until 0.2
    parser.epilog = "--KEY VALUE: any key of the configuration, e.g. --epochs 3 --optim.lr 0.05 (see --list-keys)"


def run(args: argparse.Namespace) -> dict[str, Any] | None:
    """Check the request, then start the ranks, or be one."""
    if args.keys:
        warnings.warn(
            "--keys is now called --list-keys; the old name goes with the next release", FutureWarning, stacklevel=2
        )
    if args.keys or args.list_keys is not None:
        _list_keys(args)
        return None
    if args.config is None:
        raise UsageError("no configuration: plsc train CONFIG.toml, or a shipped one (plsc train --help lists them)")
    if args.as_toml and args.config.suffix == ".py":
        show(*arcface_torch.to_toml(args.config).rstrip("\n").split("\n"))
        return None
    if args.profile is not None:
        args.overrides = [*args.overrides, "--log.profile", str(args.profile)]
    config = _load(args)
    if args.as_toml:
        show(*configuration.to_toml(config).rstrip("\n").split("\n"))
        return None
    if args.between is not None:
        from plsc.plan.devices import check_link  # which imports torch, and all that trains

        check_link(args.between, "--between")
    if args.nnodes > 1 and args.master_addr is None:
        raise UsageError(f"--nnodes {args.nnodes} needs --master-addr: the first machine's address, the same on all")
    if is_launched() or (args.nproc == args.nnodes == 1 and not args.dry_run):
        return _train_here(config, args)
    _launch(config, args)
    return None


def _list_keys(args: argparse.Namespace) -> None:
    """Print the keys; a word that names a configuration, in CONFIG's place, is that."""
    word = args.list_keys or ""
    if args.config is None and (Path(word).suffix == ".toml" or word in configuration.shipped()):
        args.config, word = Path(word), ""
    config = _load(args) if args.config is not None or args.overrides else None
    show(*configuration.describe(word, config).split("\n"))


def _launch(config: Config, args: argparse.Namespace) -> None:
    """Start the ranks of this machine and wait for them, or say what would be started."""
    from plsc.parallel.launch import Nodes, commands_of_nodes, launch
    from plsc.parallel.mesh import check_head_ranks

    nodes = Nodes()
    if args.nnodes != 1:
        nodes = Nodes(args.nnodes, args.node_rank, args.master_addr, args.master_port)
    ranks = args.nproc * nodes.count
    check_head_ranks(config.head_ranks, ranks)
    config.parallel.strategy_options().check_world(ranks)
    for section in config.features_on:
        section.check_world(ranks)
    arguments = _rank_arguments(args)
    if args.dry_run or (nodes.count > 1 and nodes.rank == 0):
        lines = commands_of_nodes(arguments, args.nproc, nodes)
        for number, line in enumerate(lines):
            first, last = number * args.nproc, (number + 1) * args.nproc - 1
            text = f"machine {number} of {len(lines)}, ranks {first} to {last}: {line}"
            (show if args.dry_run else note)(text)
    if args.dry_run:
        return
    if nodes.count == 1 and _run_folder(args).exists():  # of several machines, one may have begun the run
        from plsc.train.resumption import check_folder  # which imports all that trains

        check_folder(_run_folder(args), args.resume)
    code = launch(arguments, args.nproc, nodes)
    if code:
        raise SystemExit(code)  # a rank has reported why


def _load(args: argparse.Namespace) -> Config:
    """Read the configuration; of a launcher and its ranks, the first rank alone warns of keys' former names."""
    with warnings.catch_warnings():
        if os.environ.get("RANK", "0") != "0" or (args.nproc * args.nnodes > 1 and not is_launched()):
            warnings.simplefilter("ignore", FutureWarning)
        return configuration.load(args.config, configuration.parse_arguments(args.overrides, args.options))


def _run_folder(args: argparse.Namespace) -> Path:
    return Path(args.out or Path("runs") / args.config.stem)


def _rank_arguments(args: argparse.Namespace) -> list[str]:
    options = {"--out": args.out, "--resume": args.resume, "--json": args.json, "--between": args.between}
    arguments = [word for name, value in options.items() if value is not None for word in (name, str(value))]
    arguments += ["--overwrite"] if args.overwrite else []
    arguments += ["--allow-outside"] if args.allow_outside else []
    return ["train", str(args.config), *arguments, *args.overrides]


def _train_here(config: Config, args: argparse.Namespace) -> dict[str, Any] | None:
    import plsc
    from plsc.native.allocator import keep_freed_memory
    from plsc.parallel import shutdown
    from plsc.train import train
    from plsc.train.failures import (
        RankWatch,
        as_lost_rank,
        end_after_reporter,
        is_reporting_rank,
        report_and_end,
        stop_with_agent,
    )
    from plsc.train.report import closing_lines

    stop_with_agent()
    keep_freed_memory()
    mesh = plsc.init(head_ranks=config.head_ranks, timeout=_collective_seconds(config))
    out = _run_folder(args)

    def report(error: PlscError) -> None:
        print_error("plsc train", str(error))

    try:
        with RankWatch(mesh, report):
            why: tuple[str, ...] = ()
            if config.parallel.strategy == "auto":
                from plsc.plan.strategy_choice import choose_on_ranks

                chosen = choose_on_ranks(config, mesh, args.between or "infiniband")
                config, why = chosen.config, chosen.why
            result = train(config, mesh, out=out, resume=args.resume, notes=why, on_hang=report)
        shutdown()
    except (PlscError, RuntimeError) as error:
        failure = error if isinstance(error, PlscError) else as_lost_rank(error, mesh)
        if failure is None or mesh.world_size == 1:
            raise
        if is_reporting_rank(mesh):
            report_and_end(failure, report)
        end_after_reporter(failure)
    if not mesh.is_main:
        return None
    show(*closing_lines(out, result))
    return result


def _collective_seconds(config: Config) -> float | None:
    """The time-out of GPUs' collectives: later than the monitor's, which names the ranks; hosts' have none."""
    import torch

    return config.parallel.timeout_seconds + _MONITOR_SECONDS if torch.cuda.is_available() else None
