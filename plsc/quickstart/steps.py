"""Steps of the quickstart, each through the call that the command of its name makes."""

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, TypeVar

import numpy as np
import torch

from plsc import config as configuration
from plsc.embedding.embedder import EmbeddingModel, backbone_engine, open_embedder
from plsc.embedding.embedding_set import EmbeddingSet
from plsc.embedding.export import export_onnx
from plsc.embedding.pipeline import ImageSource
from plsc.errors import PlscError
from plsc.evaluation import evaluate, raw_pixels
from plsc.evaluation.evaluator import open_set
from plsc.evaluation.roc import Roc
from plsc.files import make_folder, read_json, write_json
from plsc.index import Index
from plsc.models import create, load_model
from plsc.parallel import Mesh
from plsc.parallel.launch import STOP_SIGNALS, launch
from plsc.progress import show
from plsc.quickstart import QuickstartPaths
from plsc.quickstart.gallery import clear_gallery, fill_gallery
from plsc.train.failures import Interrupted
from plsc.train.metrics import read_metrics

T = TypeVar("T")
Embed = Callable[[torch.Tensor], torch.Tensor]

_CPU_RANKS = 2
_MAX_GPU_RANKS = 2
_CURVES = ("roc", "scores")  # keys of an evaluation that the report draws and report.json leaves out


@dataclass(frozen=True)
class QuickstartResult:
    """Results of all steps: ``report`` is report.json's content, ``curves`` the evaluations with their curves."""

    report: dict[str, Any]
    curves: dict[str, dict[str, Any]]
    index: Index


def run_quickstart(paths: QuickstartPaths) -> QuickstartResult:
    """Run every step, printing its title and time.

    An earlier quickstart in the same folder is resumed where it was stopped, and started anew where it had finished.
    """
    start = time.monotonic()
    make_folder(paths.out)
    _clear_finished(paths)
    latest = _step("1/7 train on drawn identities", lambda: _train(paths))
    training = _of_all_starts(paths, latest)
    evaluating = "2/7 evaluate on identities never seen in training, and compare"
    curves, rocs = _step(evaluating, lambda: _evaluate(paths))
    embedding = ["embed", str(paths.run), "--data", paths.unseen, "--out", str(paths.embeddings), "--workers", "0"]
    _step("3/7 embed the unseen identities", lambda: _launch(embedding))
    build = partial(Index.build, [paths.embeddings], paths.index, quiet=True, overwrite=True)
    index = _step("4/7 build a search index", build)
    same = _step("5/7 search", lambda: _search(index))
    exported = _step("6/7 export to ONNX, and compare", lambda: _export(paths))
    gallery = _step("7/7 enrol the unseen identities in a gallery", lambda: _fill(paths, rocs["trained"]))
    report = {
        **{name: {key: result[key] for key in result if key not in _CURVES} for name, result in curves.items()},
        "seconds": round(time.monotonic() - start + training["seconds"] - latest["seconds"], 1),
        "images_per_second": round(training["images_per_second"], 1),
        "index": {**index.manifest["recall"], "kind": index.kind, "rows": len(index), "neighbour_is_same": same},
        "export": {key: exported[key] for key in ("format", "max_abs_error", "max_abs_value", "bytes")},
        "training": {key: training[key] for key in ("steps", "epochs", "classes", "seconds", "images", "loss")},
        "gallery": gallery,
    }
    write_json(paths.report, report)
    return QuickstartResult(report, curves, index)


def _step(title: str, action: Callable[[], T]) -> T:
    show("", f"== {title}")
    start = time.monotonic()
    result = action()
    show(f"   {time.monotonic() - start:.1f} s")
    return result


def _clear_finished(paths: QuickstartPaths) -> None:
    """Remove the outputs of a finished quickstart; a stopped one has no report yet, and its outputs are resumed."""
    if paths.report.exists():
        clear_gallery(paths)
        paths.report.unlink()
        for folder in (paths.run, paths.embeddings, paths.index, paths.queries):
            shutil.rmtree(folder, ignore_errors=True)


def _train(paths: QuickstartPaths) -> dict[str, Any]:
    """Run `plsc train CONFIG --nproc N --resume auto`, without its evaluation, which is the next step."""
    result_path = paths.out / "training.json"
    arguments = ["train", paths.config, "--out", str(paths.run), "--resume", "auto", "--json", str(result_path)]
    _launch([*arguments, "--eval.sets", "[]", *paths.overrides])
    training: dict[str, Any] = read_json(result_path)
    return training


def _of_all_starts(paths: QuickstartPaths, latest: dict[str, Any]) -> dict[str, Any]:
    """The figures of the whole training, by its metrics: ``latest`` has those since it was resumed."""
    lines = [line for line in read_metrics(paths.run) if line.get("loss") is not None]
    spans = np.diff([0, *(line["step"] for line in lines)]) * [line["time"]["step"] for line in lines]
    seconds, images = float(spans.sum()), float(spans @ [line["images_per_second"] for line in lines])
    whole = {"seconds": seconds, "images": round(images), "images_per_second": images / seconds}
    return {**latest, **whole, "loss": lines[-1]["loss"]}


def _launch(arguments: list[str]) -> None:
    """Run a plsc command on one rank per GPU, two at most; on two ranks without a GPU."""
    ranks = min(torch.cuda.device_count(), _MAX_GPU_RANKS) or _CPU_RANKS
    show(f"   plsc {' '.join(arguments)} --nproc {ranks}")
    code = launch(arguments, ranks)
    if code - 128 in STOP_SIGNALS:
        raise Interrupted("stopped; the same command goes on", code - 128)
    if code:
        raise PlscError(f"`plsc {arguments[0]}` failed, see above: fix it and run quickstart again, which resumes")


def _evaluate(paths: QuickstartPaths) -> tuple[dict[str, dict[str, Any]], dict[str, Roc]]:
    """Evaluate the trained backbone, the same one untrained, and raw pixels, all on the same pairs and probes.

    Returns:
        The results with their curves, and the exact ROCs, each by name.
    """
    trained = open_embedder(paths.run)
    config = configuration.load(paths.run / "config.toml")
    torch.manual_seed(config.seed)
    fresh = create(config.backbone, embedding_dim=config.embedding_dim, image_size=trained.image_size)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    untrained = EmbeddingModel(backbone_engine(fresh, device), "untrained")
    embedders: dict[str, Embed] = {"trained": trained, "untrained": untrained, "raw_pixels": raw_pixels}
    data = open_set(paths.unseen, paths.unseen, trained.image_size)
    data = replace(data, images=_DrawnOnce(data.images))
    curves: dict[str, dict[str, Any]] = {}
    rocs: dict[str, Roc] = {}
    single = Mesh(0, 1, 0, torch.device("cpu"))
    for name, embed in embedders.items():
        roc: dict[str, Roc] = {}
        evaluated = partial(evaluate, image_size=trained.image_size, mesh=single, curves=True, quiet=True, rocs=roc)
        result = evaluated(embed, [data])[data.name]
        curves[name], rocs[name] = result, roc[data.name]
        tar = result["tar@far"]["1e-3"]
        shown = "" if tar is None else f"   TAR at FAR 1e-3 {tar:.4f}"
        show(f"   {name:<11} accuracy {result['accuracy']:.4f}   rank-1 {result['rank1']:.4f}{shown}")
    return curves, rocs


class _DrawnOnce:
    """Images whose pictures are kept, for each of the three embedders to see."""

    def __init__(self, images: ImageSource) -> None:
        self._images, self.key, self.picture = images, images.key, cache(images.picture)

    def __len__(self) -> int:
        return len(self._images)


def _search(index: Index) -> float:
    """Return the share of images whose nearest other image shows the same identity."""
    rows = index.search(index.vectors, 2).rows
    # An image finds itself first, unless another is equal to it.
    others = np.where(rows[:, 0] == np.arange(len(index)), rows[:, 1], rows[:, 0])
    share = float((index.labels[others] == index.labels).mean())
    show(f"   {len(index):,} images, {index.kind} search: {share:.1%} have the same identity as their nearest other")
    return share


def _export(paths: QuickstartPaths) -> dict[str, Any]:
    result = export_onnx(load_model(paths.run / "model.safetensors"), paths.model)
    show(f"   {result['file']}: largest difference {result['max_abs_error']:.1e}")
    return result


def _fill(paths: QuickstartPaths, roc: Roc) -> dict[str, Any]:
    filled = fill_gallery(paths, EmbeddingSet(paths.embeddings), roc)
    show(
        f"   {filled['people']} people, {filled['faces']:,} faces; of {filled['tried']} pictures that were kept back, "
        f"{filled['passed']} find their person alone at the threshold {filled['threshold']:.3f}: "
        f"{filled['found']} of them are left to search by"
    )
    return filled
