"""Evaluation during training: on every set of [eval], with the weights that will be shipped."""

from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from plsc.config import Config
from plsc.evaluation.evaluator import evaluate, open_set, set_names
from plsc.files import atomic_write
from plsc.models.weights import serialize_model
from plsc.train.checkpoint_writer import write_errors
from plsc.train.components import TrainComponents
from plsc.train.failures import raise_on_all_ranks

MODEL, BEST = "model.safetensors", "best.safetensors"


def check_sets(config: Config) -> None:
    """Open every set once, at the start: a wrong name should not cost a run its end."""
    sets = config.eval.sets
    for source, name in zip(sets, set_names(sets), strict=True):
        open_set(source, name, config.data.preprocessing.image_size)


def evaluate_sets(components: TrainComponents) -> dict[str, dict[str, Any]]:
    """Evaluate on every set; results by the sets' names, the same on every rank."""
    with components.frozen.kept_statistics():
        components.strategy.average_buffers()
    model, device = components.shipped_model(), components.mesh.device
    was_training, contract = model.training, components.config.data.preprocessing

    @torch.no_grad()
    def embed(images: Tensor) -> Tensor:
        x = contract(images.to(device))
        if components.config.channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        with components.strategy.wrapping.autocast():
            embeddings: Tensor = model(x)
        return embeddings.float()

    model.eval()
    try:
        return evaluate(
            embed,
            components.config.eval.sets,
            image_size=contract.image_size,
            interpolation=contract.interpolation,
            mesh=components.mesh,
            batch_size=components.config.eval.batch_size,
            seed=components.config.seed,
            quiet=True,
        )
    finally:
        model.train(was_training)


def mean_accuracy(results: dict[str, dict[str, Any]]) -> float | None:
    """Return the mean accuracy over the sets that have one, by which "best" is chosen; None where none has."""
    accuracies = [result["accuracy"] for result in results.values() if result["accuracy"] is not None]
    return fmean(accuracies) if accuracies else None


def summary(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Pick the numbers of each result that a line of metrics holds."""
    names = ("accuracy", "auc", "tar@far", "rank1", "rank5")
    return {name: {key: result[key] for key in names if key in result} for name, result in results.items()}


def save_weights(components: TrainComponents, path: Path) -> None:
    """Write the backbone alone, replacing ``path`` atomically; every rank calls, the main one writes."""
    raise_on_all_ranks(components.mesh, weights_writer(components, path))


def weights_writer(components: TrainComponents, path: Path) -> Callable[[], None]:
    """Return a function that writes the backbone's weights as they are now; on other ranks it does nothing.

    Every rank calls.
    """
    model = components.shipped_model()
    content = serialize_model(model) if components.mesh.is_main else b""

    def write() -> None:
        if components.mesh.is_main:
            with write_errors(str(path)), atomic_write(path) as tmp_path:
                tmp_path.write_bytes(content)

    return write
