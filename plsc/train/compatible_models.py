"""The older models with which a run was trained to be compatible, as its export states them."""

from collections.abc import Sequence
from pathlib import Path

import torch

from plsc.embedding.contracts import models_in
from plsc.embedding.embedder import FLIP_SUFFIX, RUN_BEST, RUN_MODEL, Embedder, backbone_engine, open_embedder
from plsc.embedding.embedding_set import EmbeddingSet, is_embedding_set
from plsc.errors import UsageError
from plsc.models import Backbone, load_model
from plsc.strict_toml import read_toml
from plsc.train.resumption import CONFIG

CPU = torch.device("cpu")


def compatible_models(run: str | Path, model: Backbone, olds: Sequence[str]) -> list[str]:
    """Return the contract ids of the models ``olds``, whose galleries the queries of ``model`` are said to search.

    What can be known without pictures is checked: that the run was trained with ``compatible.with``, that embeddings
    have one width, and, where the old centres are there still, that one of ``olds`` made them. A file in int8 has an id
    of its own, which no centres tell.

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
    known = _makers(Path(source))
    if known and known.isdisjoint(ids) and not any(old.precision == "int8" for old in opened):
        raise UsageError(
            f"{run} was trained among centres of {source}, which {_named(opened)} did not make "
            f"({', '.join(sorted(known))}, not {', '.join(ids)}); name the model that did"
        )
    return list(ids)


def _centres(run: Path) -> str:
    """What ``compatible.with`` names in the run's configuration."""
    config = read_toml(run / CONFIG) if (run / CONFIG).is_file() else {}
    source = config.get("compatible", {}).get("with", "")
    if not source:
        raise UsageError(
            f"--compatible-with: {run} is no run that was trained with compatible.with, so that nothing makes its "
            "embeddings comparable with another model's; leave it out, or train with [compatible]"
        )
    return str(source)


def _makers(source: Path) -> set[str]:
    """Contract ids of the models that may have made centres; none where that is not known, or they are not there."""
    if is_embedding_set(source):
        return {model.removesuffix(FLIP_SUFFIX) for model in models_in(EmbeddingSet(source).contract_id)}
    runs = (source, *list(source.parents)[:2])  # of a run, its checkpoints, or one of them
    run = next((folder for folder in runs if (folder / RUN_MODEL).is_file()), None) if source.is_dir() else None
    files = [] if run is None else [run / name for name in (RUN_MODEL, RUN_BEST) if (run / name).is_file()]
    return {backbone_engine(load_model(file), CPU).contract_id for file in files}


def _named(opened: Sequence[Embedder]) -> str:
    return ", ".join(old.source for old in opened)
