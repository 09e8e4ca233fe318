"""The older models with which a run was trained to be compatible, as its export states them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from plsc.embedding.contracts import models_in
from plsc.embedding.embedder import FLIP_SUFFIX, EmbeddingModel, backbone_engine, open_embedder
from plsc.embedding.embedding_set import EmbeddingSet, is_embedding_set
from plsc.errors import UsageError
from plsc.features.compatible.class_centres import open_centres
from plsc.features.compatible.config import CompatibleConfig
from plsc.models import Backbone
from plsc.parallel import Mesh
from plsc.progress import note
from plsc.strict_toml import read_toml
from plsc.train.checkpoint import CHECKPOINTS, CheckpointFolder, find_checkpoints
from plsc.train.checkpoint_inspection import describe_checkpoint, read_backbone
from plsc.train.checkpoint_reader import StoredCheckpoint
from plsc.train.resumption import CONFIG

CPU = torch.device("cpu")
_ALONE = Mesh(0, 1, 0, CPU)


def compatible_models(run: str | Path, model: Backbone, olds: Sequence[str]) -> list[str]:
    """Return the contract ids of the models ``olds``, whose galleries the queries of ``model`` are said to search.

    What can be known without pictures is checked: that the run was trained with ``compatible.with``, that embeddings
    have one width, and that one of ``olds`` made the old centres: by the embedding set, or by the old run's checkpoint
    from which the run has them. Where neither is there still, or they are a table's file, a note says that nothing
    was compared. A file in int8 has an id of its own, which no centres tell.

    Args:
        run: the run's directory.
        model: its backbone.
        olds: run directories and model files.

    Raises:
        UsageError: any of that does not hold.
        PlscError: whatever opening a model raises.
    """
    source = _centres(Path(run))
    opened = [open_embedder(old, device=CPU) for old in olds]
    own = backbone_engine(model, CPU).contract_id
    for old in opened:
        if old.embedding_dim != model.embedding_dim or old.contract_id == own:
            what = "is the model itself" if old.contract_id == own else f"gives {old.embedding_dim} numbers"
            raise UsageError(
                f"--compatible-with {old.source} {what}, and {run} {model.embedding_dim}; name the model whose gallery "
                "is to be searched"
            )
    ids = dict.fromkeys(old.contract_id for old in opened)
    known = _makers(Path(source), _kept_centres(Path(run)))
    if not known:
        note(f"note: nothing here tells which model made {run}'s centres of {source}; {_named(opened)} is not checked")
    if known and known.isdisjoint(ids) and not any(old.precision == "int8" for old in opened):
        raise UsageError(
            f"{run} was trained among centres of {source}, which {_named(opened)} did not make "
            f"({', '.join(sorted(known))}, not {', '.join(ids)}); name the model that did"
        )
    return list(ids)


def _centres(run: Path) -> str:
    """What ``compatible.with`` names in the run's configuration."""
    config = read_toml(run / CONFIG) if (run / CONFIG).is_file() else {}
    section = config.get("compatible")
    source = section.get("with") if isinstance(section, dict) else None
    if not source:
        raise UsageError(
            f"--compatible-with: {run} is no run that was trained with compatible.with, so that nothing makes its "
            "embeddings comparable with another model's; leave it out, or train with [compatible]"
        )
    return str(source)


def _kept_centres(run: Path) -> dict[str, Any]:
    """What the run's newest checkpoint says of the centres that it is trained among; empty where there is none."""
    published = CheckpointFolder(run / CHECKPOINTS, _ALONE).published()
    state = StoredCheckpoint(published[-1], _ALONE, prefixes=()).state if published else {}
    kept = state.get("features", {}).get("compatible") or CompatibleConfig.former_state(state)
    return kept if isinstance(kept, dict) else {}


def _makers(source: Path, kept: Mapping[str, Any]) -> set[str]:
    """Contract ids of the models that made centres, with and without averaged weights; none where that is not known."""
    if is_embedding_set(source):
        return {model.removesuffix(FLIP_SUFFIX) for model in models_in(EmbeddingSet(source).contract_id)}
    try:
        found = find_checkpoints(source)
    except UsageError:  # a table's file, or nothing that is here
        return set()
    for checkpoint in reversed(found):  # the run that they are of may have gone on since, or begun anew
        with open_centres(str(checkpoint)) as centres:
            if centres.origin == kept.get("origin") and kept.get("digest") in (None, centres.digest()):
                averages = (False, True) if describe_checkpoint(checkpoint)["average"] else (False,)
                models = [read_backbone(checkpoint, average=average) for average in averages]
                return {backbone_engine(model, CPU).contract_id for model in models}
    return set()


def _named(opened: Sequence[EmbeddingModel]) -> str:
    return ", ".join(old.source for old in opened)
