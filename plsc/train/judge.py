"""Evaluation while a run goes on: on every set given, with the weights that will be shipped; the best are kept."""

from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from plsc.config import Config
from plsc.data.transforms import normalize
from plsc.evaluation.evaluator import evaluate, open_set, set_names
from plsc.files import atomic_write
from plsc.models import save_model
from plsc.train.agreement import on_every_rank
from plsc.train.parts import Parts
from plsc.train.state import average_buffers

MODEL, BEST = "model.safetensors", "best.safetensors"


def check_sets(config: Config) -> None:
    """Open every set once, at the start: a wrong name should not cost a run its end."""
    sets = config.eval.sets
    for source, name in zip(sets, set_names(sets), strict=True):
        open_set(source, name, config.data.image_size)


def judge(parts: Parts) -> dict[str, dict[str, Any]]:
    """Every set's result, by its name, the same on every rank."""
    average_buffers(parts)
    model, device = parts.judged, parts.mesh.device
    was_training = model.training

    @torch.no_grad()
    def embed(images: Tensor) -> Tensor:
        x = normalize(images.to(device))
        if parts.config.channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        with parts.autocast():
            embeddings: Tensor = model(x)
        return embeddings.float()

    model.eval()
    try:
        return evaluate(
            embed,
            parts.config.eval.sets,
            image_size=parts.config.data.image_size,
            mesh=parts.mesh,
            batch_size=parts.config.eval.batch_size,
            seed=parts.config.seed,
            quiet=True,
        )
    finally:
        model.train(was_training)


def score(results: dict[str, dict[str, Any]]) -> float | None:
    """What "best" means: the mean accuracy over the sets that have one."""
    accuracies = [result["accuracy"] for result in results.values() if result["accuracy"] is not None]
    return fmean(accuracies) if accuracies else None


def brief(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The numbers of a result that a line of metrics holds."""
    names = ("accuracy", "auc", "tar@far", "rank1", "rank5")
    return {name: {key: result[key] for key in names if key in result} for name, result in results.items()}


def save_weights(parts: Parts, path: Path) -> None:
    """Write the backbone alone, replacing ``path`` atomically; every rank calls, the main one writes."""

    def write() -> None:
        if parts.mesh.is_main:
            with atomic_write(path) as tmp_path:
                save_model(parts.judged, tmp_path)

    on_every_rank(parts.mesh, write)
