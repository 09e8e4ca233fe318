"""Checkpoints without ranks: what one holds, whether its files are whole, and its backbone.

A checkpoint stores each tensor in pieces with their places in the whole, whatever strategy and number of ranks wrote
it; one process puts together what it is asked for, and no more. It may come from anywhere: see
:mod:`plsc.train.checkpoint_reader`.
"""

import dataclasses
import stat
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from plsc.errors import DataError, PlscError, UsageError, first_line
from plsc.feature_config import keeper_of_tables
from plsc.files import check_output
from plsc.models import Backbone
from plsc.models.wrappers import RotationTTA
from plsc.parallel import Mesh
from plsc.train.checkpoint import CHECKPOINTS, describe_published
from plsc.train.checkpoint import find_checkpoints as find_checkpoints
from plsc.train.checkpoint_reader import StoredCheckpoint, check_files, listed_files
from plsc.train.components import make_backbone
from plsc.train.state import stored_config
from plsc.train.stored_table import described_tables, stored_dtypes

_ALONE = Mesh(0, 1, 0, torch.device("cpu"))
_CENTRES = "head.weight"  # of a run's only class table; "head.NAME.weight" of one of several


def verify_checkpoint(path: Path) -> dict[str, Any]:
    """Check every file against the manifest, and what the files say of themselves.

    Returns:
        ``checkpoint``, the number of ``files`` and their ``bytes`` by the manifest, and ``problems``: a line for each
        file that is missing, truncated or corrupt, or for what else no checkpoint holds; empty where it is sound.
    """
    problems: list[str] = []
    try:
        files = listed_files(path)
    except PlscError as error:
        return {"checkpoint": str(path), "files": 0, "bytes": 0, "problems": [str(error)]}
    for name in sorted(files):
        try:
            check_files(path, files, [name])
        except (PlscError, OSError) as error:
            problems.append(str(error))
    if not problems:
        try:
            describe_checkpoint(path)
        except PlscError as error:
            problems.append(str(error))
    nbytes = sum(entry["bytes"] for entry in files.values())
    return {"checkpoint": str(path), "files": len(files), "bytes": nbytes, "problems": problems}


def describe_checkpoint(path: Path) -> dict[str, Any]:
    """Return what a checkpoint holds; of its files, the small ones alone are checked against the manifest.

    Returns:
        ``checkpoint, run, saved_at`` (UTC), ``world_size, strategy, step, epoch``; ``accuracy``, of an evaluation after
        this step, and ``best``, {"step", "accuracy"} of the run so far, or None; ``backbone, image_size, embedding_dim,
        parameters`` (weights and running statistics), ``average`` (whether there is one), ``classes, centers, images,
        margin, weight_dtype``, ``state_dtypes`` (of the head's optimizer, by table), ``table_files`` (the placement of
        a table that lies in files of its own, and not in the checkpoint; or None), ``optimizer, bytes``, and ``files``,
        {"name", "bytes", "is_there"} of each. ``tables`` are several class tables, {"name", "classes", "margin",
        "weight_dtype", "state_dtypes"} of each; ``classes`` are theirs together then.

    Raises:
        IntegrityError, DataError: it is corrupt, or no checkpoint.
    """
    stored = StoredCheckpoint(path, _ALONE, prefixes=())
    tensors = stored.stored
    weights = [name for name in tensors if name.startswith("backbone.")]
    of_epoch = stored.state.get("epoch_samples")  # none in checkpoints of earlier versions
    images = max(of_epoch if isinstance(of_epoch, int) else stored.value("data.images", int), 1)
    epoch = stored.value("loader.epoch", int) + stored.value("loader.consumed", int) / images
    accuracy = stored.state.get("accuracy")
    return {
        "checkpoint": str(path),
        "run": _run_of(path),
        "saved_at": _utc(describe_published(path).saved_at),
        "world_size": stored.value("world_size", int),
        "strategy": _strategy(stored),
        "step": stored.value("step", int),
        "epoch": epoch,
        "accuracy": accuracy if isinstance(accuracy, float) else None,
        "best": _rated(stored.state.get("best")),
        "backbone": stored.value("config.backbone", str),
        "image_size": stored.value("config.data.image_size", object),
        "embedding_dim": stored.value("config.embedding_dim", int),
        "parameters": sum(tensors[name].size.numel() for name in weights),
        "average": any(name.startswith("average.") for name in tensors),
        "classes": stored.value("data.classes", int),
        "centers": stored.value("config.head.centers", int),
        "images": stored.value("data.images", int),
        "margin": stored.value("config.head.margin", str),
        "weight_dtype": next(iter(stored_dtypes(stored, _CENTRES).values()), None),
        "state_dtypes": stored_dtypes(stored, "head_optimizer."),
        "tables": described_tables(stored),
        "table_files": stored.value("config.head.placement", str) if keeper_of_tables(stored.state) else None,
        "optimizer": stored.value("config.optim.name", str),
        "bytes": sum(entry["bytes"] for entry in stored.files.values()),
        "files": [
            {"name": name, "bytes": entry["bytes"], "is_there": _is_there(path / name, entry["bytes"])}
            for name, entry in sorted(stored.files.items())
        ],
    }


def read_backbone(path: Path, *, average: bool = False) -> Backbone:
    """Read the backbone, in evaluation mode, on the CPU; the files that hold none of it are not checked.

    Args:
        path: the checkpoint.
        average: the moving average of its weights (``ema_decay``).

    Raises:
        UsageError: there is no moving average.
        IntegrityError, DataError: the checkpoint is corrupt, or its weights are not those of its configuration.
    """
    prefix = "average." if average else "backbone."
    stored = StoredCheckpoint(path, _ALONE, prefixes=(prefix,))
    if average and not any(name.startswith(prefix) for name in stored.stored):
        raise UsageError(f"{path} holds no moving average (ema_decay is 0); leave --ema out")
    try:
        config = dataclasses.replace(stored_config(stored.value("config", dict)), recompute="none", init_weights="")
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    shapes = {name.removeprefix(prefix): entry.size for name, entry in stored.stored.items() if name.startswith(prefix)}
    try:
        with torch.device("meta"):  # first without memory: the sizes are the checkpoint's own
            own = {name: tensor.shape for name, tensor in make_backbone(config).state_dict().items()}
    except (UsageError, RuntimeError, TypeError) as error:
        raise DataError(f"{path} names a backbone that cannot be built: {first_line(error)}") from None
    if differing := sorted(name for name in own.keys() | shapes.keys() if own.get(name) != shapes.get(name)):
        raise DataError(f"{path} does not hold the {config.backbone} that it names: {differing[0]} differs, for one")
    model = make_backbone(config)
    model.load_state_dict(stored.read(prefix))
    return (RotationTTA(model) if config.rotation_tta else model).eval()


def check_outputs(*paths: Path | None, overwrite: bool) -> None:
    """Refuse to write where something is, before any work is done; None stands for nothing to write."""
    for path in filter(None, paths):
        if path.is_dir():
            raise UsageError(f"{path} is a folder; name a file")
        check_output(path, overwrite=overwrite)


def _rated(value: object) -> dict[str, Any] | None:
    """``{"step", "accuracy"}`` of the best evaluation, or None."""
    if not isinstance(value, dict):
        return None
    step, accuracy = value.get("step"), value.get("accuracy")
    return {"step": step, "accuracy": accuracy} if isinstance(step, int) and isinstance(accuracy, float) else None


def _strategy(stored: StoredCheckpoint) -> str:
    """Name the strategy, with the numbers of ranks by which tensors and stages were cut."""
    settings = stored.value("config.parallel", dict)
    numbers = {name: settings.get(name) for name in ("shard_ranks", "tp", "pp")}
    cuts = [f"{name} = {n}" for name, n in numbers.items() if isinstance(n, int) and n > 1]
    return ", ".join([stored.value("config.parallel.strategy", str), *cuts])


def _run_of(path: Path) -> str | None:
    run = path.absolute().parents[1]
    return str(path.parents[1]) if path.absolute().parent.name == CHECKPOINTS and run.is_dir() else None


def _utc(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return "at no known time"


def _is_there(path: Path, nbytes: int) -> bool:
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size == nbytes
