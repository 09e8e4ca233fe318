"""The beginning of a run: what its folder and the request say, the checkpoint to go on from, and lines about that.

After a restart by torchrun, that is the run that the same launch had begun or resumed.
"""

import contextlib
import dataclasses
import os
import socket
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from plsc import config as configuration
from plsc.config import Config, class_tables
from plsc.config.checks import with_precision
from plsc.config.sections import AUTO
from plsc.devices import Units, low_precision_speed, low_precision_units, shared_units
from plsc.errors import UsageError
from plsc.files import atomic_write, read_json, write_json
from plsc.models.wrappers import TIMM_PREFIX
from plsc.parallel import Mesh
from plsc.parallel.collectives import all_gather_object, on_main
from plsc.parallel.gradient_compression import HOOKS
from plsc.parallel.rendezvous import agent_keeps_store, connect
from plsc.progress import counted
from plsc.train.checkpoint import CHECKPOINTS, CLASSES, CheckpointFolder
from plsc.train.checkpoint_reader import StoredCheckpoint, open_checkpoint, open_newest
from plsc.train.components import TrainComponents
from plsc.train.head_state import changed_tables
from plsc.train.metrics import METRICS
from plsc.train.same_data import changed_data
from plsc.train.state import changed_keys, left_out_features, stored_config
from plsc.train.tables import global_batch, peak_rates

CONFIG = "config.toml"
LAUNCH = "launch.json"  # the torchrun that the run was last begun or resumed by


def check_groups(config: Config, mesh: Mesh) -> None:
    """Raise UsageError where the mesh has other head groups than the configuration."""
    if mesh.head.world_size != (config.head_ranks or mesh.world_size):
        raise UsageError(
            f"head_ranks = {config.head_ranks}, but the mesh shards a class table over {mesh.head.world_size} of its "
            f"{mesh.world_size} ranks; give plsc.init(head_ranks={config.head_ranks})"
        )


def check_folder(out: Path, resume: str | None) -> None:
    """Raise UsageError where a run that is not resumed would write into the folder of another.

    A run that has ended before its first checkpoint and line of metrics has left nothing to lose.
    """
    has_checkpoints = any(not path.name.startswith(".") for path in (out / CHECKPOINTS).glob("*"))
    has_metrics = (out / METRICS).exists() and (out / METRICS).stat().st_size > 0
    if resume is None and (has_checkpoints or has_metrics):
        raise UsageError(f"{out} holds a run already; go on with it by --resume auto, or name another --out")


def was_begun(out: Path, config: Config) -> bool:
    """Return whether the same run was begun in ``out``, however far it came."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return (out / CONFIG).read_text(encoding="utf-8") == configuration.to_toml(config)
    return False


def find_checkpoint(out: Path, resume: str | None, checkpoints: CheckpointFolder) -> StoredCheckpoint | None:
    """Open the checkpoint that a run goes on from, and remove what a killed one left unfinished; every rank calls.

    Args:
        out: the run directory.
        resume: as :func:`plsc.train.train` takes it.
        checkpoints: those of ``out``.

    Returns:
        None where the run begins anew.

    Raises:
        UsageError: the run that ``resume`` names holds no finished checkpoint.
        IntegrityError: the checkpoint is corrupt.
    """
    mesh = checkpoints.mesh
    if mesh.is_main:
        for leftover in out.glob(".*.tmp"):
            leftover.unlink()
    checkpoints.clean()
    if resume is None:
        return None
    if resume == "auto":
        return open_newest(checkpoints)
    path = Path(resume)
    if not (path / CHECKPOINTS).is_dir():
        return open_checkpoint(path, mesh)
    stored = open_newest(CheckpointFolder(path / CHECKPOINTS, mesh))
    if stored is None:
        raise UsageError(f"{path} holds no finished checkpoint; --resume auto begins anew where there is none")
    return stored


def resolve_precision(config: Config, mesh: Mesh, stored: StoredCheckpoint | None) -> tuple[Config, str]:
    """Put a precision in the place of "auto", the same on all ranks; every rank calls.

    Args:
        config: of the run.
        mesh: all ranks, whose devices choose.
        stored: the checkpoint to go on from, whose precision stays.

    Returns:
        The configuration, and why "auto" is what it now says: "" where it was given.

    Raises:
        UsageError: another key does not go with it.
    """
    if config.precision != AUTO:
        return config, ""
    if stored is None:
        units = shared_units(mesh)
        return with_precision(config, units), units.reason
    kept = stored_config(stored.state["config"]).precision
    return with_precision(config, Units((kept,), "as in the checkpoint")), "as in the checkpoint"


def slow_precision(config: Config, device: torch.device) -> list[str]:
    """A line where the precision is slower than fp32, because ``device`` has no units for it; it is measured then."""
    units = low_precision_units(device)
    if config.precision in ("fp32", *units.precisions):
        return []
    speed = low_precision_speed(config.precision, device)
    if speed >= 1:
        return []
    name = "this CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)
    slower = f'precision = "{config.precision}" is {1 / speed:.1f} times slower than fp32 here'
    return [f"warning: {slower}: {name} has no units for it; leave it out for {units.best}"]


def start_text(config: Config, stored: StoredCheckpoint | None, restarted: bool) -> str:
    """What a run starts from, in words."""
    if stored is not None:
        ranks = counted(stored.state["world_size"], "rank")
        start = f"resumed from {stored.path} (step {stored.state['step']:,}, saved by {ranks})"
    elif config.init_weights:
        anew = "class head, optimizers and schedule begin anew"
        if config.backbone.startswith(TIMM_PREFIX):
            anew += "; where the weights are timm's own, the layers behind the trunk (fc, features) too"
        start = f"backbone from init_weights = {config.init_weights}; {anew}"
    else:
        start = f"random weights of seed {config.seed}"
    for table in class_tables(config):
        if stored is None and (source := table.config.head.init_rows):
            start += f"; class table {table.name}{' ' if table.name else ''}from head.init_rows = {source}"
    return f"restarted by torchrun: {start}" if restarted else start


def resumption_lines(
    stored: StoredCheckpoint, components: TrainComponents, superseded: Sequence[Path], steps_left: int
) -> list[str]:
    """The lines about a run that goes on: what has changed, was set aside or is not stored, and where no step is left.

    The main rank alone describes tables in another type than the checkpoint's.
    """
    changes = [*changed_keys(stored.state["config"], components.config), *_changed_batch(stored, components)]
    lines = [f"changed on resume: {change}" for change in changes]
    if components.mesh.is_main:
        lines += changed_tables(stored, components)
    before, data = stored.state["data"], components.data
    changed = changed_data(before, data)
    if changed == ["keys_sha256"]:
        lines.append("other data: pictures of the same classes and labels under other names")
    elif changed:
        now = f"{counted(data['images'], 'image')} of {counted(data['classes'], 'class')}"
        lines.append(f"other data: {now}, before {before['images']:,} of {before['classes']:,}; the epoch begins anew")
    lines += [f"left out: {what} of the checkpoint" for what in _dropped(stored, components)]
    lines += [f"set aside as superseded-{later.name}: it is of a later step" for later in superseded]
    if components.exchange.forgets:
        lines.append(f"not stored in checkpoints: {components.exchange.forgets}")
    if steps_left == 0:
        lines.append("no step is left to train: raise epochs or steps to go on")
    return lines


def _changed_batch(stored: StoredCheckpoint, components: TrainComponents) -> list[str]:
    """The global batch where it is another, as other ranks make it without a key's change, and the rate for it."""
    before, config, ranks = stored_config(stored.state["config"]), components.config, components.strategy.data_ranks
    ranks_before = before.parallel.strategy_options().data_ranks(stored.state["world_size"])
    was, now = global_batch(before, ranks_before), global_batch(config, ranks)
    if was == now:
        return []
    rate_was, rate = peak_rates(before, ranks_before)[0], peak_rates(config, ranks)[0]
    text = f"global batch = {now:,} (was {was:,}), with peak learning rate = {rate:g}"
    return [f"{text} ({'as before' if rate == rate_was else f'was {rate_was:g}'})"]


def _dropped(stored: StoredCheckpoint, components: TrainComponents) -> list[str]:
    """What the run had learned with, besides its weights, and has no use for in the present configuration."""
    exchanged = {name.split(".", 2)[-1] for name in stored.stored if name.startswith("exchange.")}
    kinds = {name.rpartition(".")[2] for name in exchanged - components.exchange.state().keys()}
    before = stored_config(stored.state["config"])
    told_of = [HOOKS[before.parallel.comm_hook].keeps, *(section.keeps for section in before.features_on)]
    dropped = [text for keeps in told_of for kind, text in keeps.items() if kind in kinds]
    dropped += left_out_features(stored, components)
    if components.average is None and any(name.startswith("average.") for name in stored.stored):
        dropped.append("the moving average of the weights (ema_decay)")
    if stored.state["scaler"] and not components.scaler.is_enabled():
        dropped.append("the loss scale (precision)")
    return dropped


def write_descriptions(out: Path, components: TrainComponents, launch: "Launch | None") -> None:
    """Write the complete configuration and the classes' names into ``out``, and note the launch that trains there."""
    with atomic_write(out / CONFIG) as tmp_path:
        tmp_path.write_text(configuration.to_toml(components.config), encoding="utf-8")
    components.dataset.save_label_map(out / CLASSES)
    if launch is not None:  # last: from here on a restart goes on with what this folder holds
        write_json(out / LAUNCH, dataclasses.asdict(launch))


@dataclass(frozen=True)
class Launch:
    """One call of torchrun on each machine, however often they restart their ranks.

    Attributes:
        name: in no other launch, and the same in every attempt as long as one agent keeps the ranks' store.
        process: the first rank, as HOST:PID; differs between attempts.
        agents: torchrun's processes that have started the ranks of this attempt, as HOST:PID:START. One lives as long
            as its machine takes part in the launch; the name does not, where the machine that keeps the store is lost.
    """

    name: str
    process: str
    agents: tuple[str, ...]


def current_launch(mesh: Mesh) -> Launch | None:
    """Return torchrun's launch that the ranks belong to; None without torchrun. Every rank calls."""
    agents = tuple(sorted(set(all_gather_object(_own_agent(), mesh))))

    def named() -> Launch | None:
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            return None
        name = uuid.uuid4().hex
        if agent_keeps_store():
            name = connect().compare_set("plsc/launch", "", name).decode()  # the first to come names it
        return Launch(name, f"{socket.gethostname()}:{os.getpid()}", agents)

    return on_main(named, mesh)


def after_restart(out: Path, resume: str | None, launch: Launch | None) -> tuple[bool, str | None]:
    """Return (True, "auto") in the place of (False, ``resume``) where torchrun's restart finds its own run in ``out``.

    An attempt before this one had begun or resumed the run then: the folder bears the launch's name, or an agent that
    takes part in this attempt. A folder that was there before the launch does not, and stays refused in every attempt.
    The restart count says neither that nor the truth on all machines, whose agents count their own failures only.
    """
    if launch is None or not (out / LAUNCH).exists():
        return False, resume
    mark = read_json(out / LAUNCH)
    is_own = mark["name"] == launch.name or not set(launch.agents).isdisjoint(mark.get("agents", ()))
    if not is_own or mark["process"] == launch.process:
        return False, resume
    return True, "auto" if resume is None or any((out / CHECKPOINTS).glob("step-*")) else resume


def _own_agent() -> str:
    parent, start = os.getppid(), ""
    with contextlib.suppress(OSError, IndexError):  # a system without /proc, where process numbers may come again
        start = Path(f"/proc/{parent}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    return f"{socket.gethostname()}:{parent}:{start}"
