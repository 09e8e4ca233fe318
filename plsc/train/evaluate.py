"""Evaluation during training: on every set of [eval], with the weights that will be shipped; the best are kept."""

import io
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plsc.config import Config
from plsc.embedding.embedder import RUN_PROGRESS
from plsc.embedding.pipeline import EmbeddedImages
from plsc.evaluation.evaluator import EvaluationSet, evaluate, open_set, set_names
from plsc.files import atomic_write, write_json
from plsc.models.weights import serialize_model
from plsc.parallel.collectives import on_main, raise_on_all_ranks
from plsc.train.checkpoint_writer import write_errors
from plsc.train.components import TrainComponents
from plsc.train.feature import overriding
from plsc.train.metrics import MetricsLog, read_metrics
from plsc.train.state import Position

MODEL, BEST = "model.safetensors", "best.safetensors"
_QUERIES, _NEIGHBOURS = 8, 6  # of a picture of neighbours


class RunEvaluation:
    """Evaluates a run between its steps, and writes best.safetensors at each best mean accuracy so far.

    Args:
        components: of the run.
        position: of the run, which gets the accuracy after its step, and the best one.
        out: the run directory.
        metrics: takes the results of each set.
        report: takes a line.

    Attributes:
        results: the last ones, by the sets' names. A run that goes on right after an evaluation has what
            metrics.jsonl holds of it.
    """

    def __init__(
        self,
        components: TrainComponents,
        position: Position,
        out: Path,
        metrics: MetricsLog,
        report: Callable[[str], None],
    ) -> None:
        self._components, self._position, self._out = components, position, out
        self._metrics, self._report = metrics, report
        earlier = on_main(lambda: _evaluation_at(position.step, out), components.mesh)
        is_of_these = earlier.keys() == set(set_names(components.config.eval.sets))
        self.results: dict[str, dict[str, Any]] = earlier if is_of_these else {}
        self._evaluated_at = position.step if is_of_these else -1

    @property
    def is_done(self) -> bool:
        """True where there are no sets, and after an evaluation of the present step."""
        return not self._components.config.eval.sets or self._evaluated_at == self._position.step

    def run(self, epoch: float) -> None:
        """Evaluate after the present step, at ``epoch`` epochs; every rank calls."""
        step = self._evaluated_at = self._position.step
        with self._components.averaged():
            examine = partial(self._show_neighbours, step) if self._metrics.takes_pictures else None
            drawn = evaluate_sets(self._components, examine)
            self.results = {name: _without_curves(result) for name, result in drawn.items()}
            self._metrics.write(step, {"epoch": epoch, "eval": summary(self.results)})
            for name, result in self.results.items():
                self._report(f"step {step:,}: {name}: " + _format_result(result))
            self._position.accuracy = accuracy = mean_accuracy(self.results)
            if accuracy is not None and accuracy > self._position.best.get("accuracy", -1.0):
                self._position.best = {"step": step, "accuracy": accuracy}
                write = weights_writer(self._components, self._out / BEST)
                raise_on_all_ranks(self._components.mesh, write)
        self._metrics.picture(step, "eval/roc", partial(_draw_roc, drawn))

    def _show_neighbours(self, step: int, data: EvaluationSet, embedded: EmbeddedImages) -> None:
        """Report a picture of labelled images and those nearest to them."""
        if data.labels is not None:
            draw = partial(_draw_neighbours, data, embedded, self._components.config.seed)
            self._metrics.picture(step, f"eval/{data.name}/neighbours", draw)


def _without_curves(result: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in result.items() if key not in ("roc", "scores")}


def _draw_roc(results: dict[str, dict[str, Any]]) -> bytes:
    from plsc.evaluation.report import roc_figure

    encoded = io.BytesIO()
    roc_figure(results, encoded, image_format="png")
    return encoded.getvalue()


def _draw_neighbours(data: EvaluationSet, embedded: EmbeddedImages, seed: int) -> bytes:
    from plsc.evaluation.neighbours import draw_neighbours, find_neighbours

    assert data.labels is not None
    numbers = np.flatnonzero(embedded.readable)
    found = find_neighbours(
        embedded.rows[numbers], data.labels[numbers], queries=_QUERIES, count=_NEIGHBOURS, seed=seed
    )
    of_set = replace(found, queries=numbers[found.queries], nearest=numbers[found.nearest])
    return draw_neighbours(of_set, data.images)


def _evaluation_at(step: int, out: Path) -> dict[str, dict[str, Any]]:
    """The results of the evaluation after ``step`` that ``out`` holds; empty where there was none."""
    results = [line.get("eval") for line in read_metrics(out) if line["step"] == step]
    return next((each for each in reversed(results) if isinstance(each, dict)), {})


def check_sets(config: Config) -> None:
    """Open every set once, at the start: a wrong name should not cost a run its end."""
    sets = config.eval.sets
    for source, name in zip(sets, set_names(sets), strict=True):
        open_set(source, name, config.data.preprocessing.image_size)


def evaluate_sets(
    components: TrainComponents, examine: Callable[[EvaluationSet, EmbeddedImages], None] | None = None
) -> dict[str, dict[str, Any]]:
    """Evaluate on every set; results by the sets' names, the same on every rank. As :func:`evaluate` for the rest."""
    components.average_statistics()
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
            curves=examine is not None,
            quiet=True,
            examine=examine,
        )
    finally:
        model.train(was_training)
        for after_evaluation in overriding(components.features.values(), "after_evaluation"):
            after_evaluation()


def mean_accuracy(results: dict[str, dict[str, Any]]) -> float | None:
    """Return the mean accuracy over the sets that have one, by which "best" is chosen; None where none has."""
    accuracies = [result["accuracy"] for result in results.values() if result["accuracy"] is not None]
    return fmean(accuracies) if accuracies else None


def summary(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Pick the numbers of each result that a line of metrics holds."""
    names = ("accuracy", "auc", "tar@far", "rank1", "rank5")
    return {name: {key: result[key] for key in names if key in result} for name, result in results.items()}


def _format_result(result: dict[str, Any]) -> str:
    numbers = {"accuracy": result["accuracy"], "rank-1": result["rank1"]}
    return ", ".join(f"{name} {value:.4f}" for name, value in numbers.items() if value is not None)


def last_weights_writer(components: TrainComponents, out: Path, step: int, steps: int) -> Callable[[], None]:
    """Return a function that writes the weights after ``step`` of ``steps`` into the run ``out``, and which they are.

    As :func:`weights_writer`.
    """
    write_weights = weights_writer(components, out / MODEL)

    def write() -> None:
        write_weights()
        if components.mesh.is_main:
            with write_errors(str(out / RUN_PROGRESS)):
                write_json(out / RUN_PROGRESS, {"step": step, "steps": steps})

    return write


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
