"""The quickstart's steps, each the same call that the command of its name makes."""

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from plsc import config as configuration
from plsc.embed.embedder import Embedder, backbone_engine, open_embedder
from plsc.embed.export import export_onnx
from plsc.errors import PlscError
from plsc.evaluation import evaluate, raw_pixels
from plsc.files import make_folder, read_json, write_json
from plsc.index import Index
from plsc.models import create, load_model
from plsc.parallel import Mesh
from plsc.parallel.launch import launch

T = TypeVar("T")
Embed = Callable[[torch.Tensor], torch.Tensor]

RECIPE = "avatars_quickstart"  # a shipped configuration
UNSEEN = "avatars:400x6@1000000"  # identities far beyond those that any recipe trains on
RANKS_WITHOUT_GPU = 2


@dataclass(frozen=True)
class Course:
    """Where everything goes, and what is judged."""

    out: Path
    unseen: str = UNSEEN
    recipe: str = RECIPE
    overrides: tuple[str, ...] = ()

    @property
    def run(self) -> Path:
        """The training run."""
        return self.out / "run"

    @property
    def embeddings(self) -> Path:
        """The unseen identities' embedding set."""
        return self.out / "unseen.emb"

    @property
    def index(self) -> Path:
        """The index over it."""
        return self.out / "unseen.idx"

    @property
    def report(self) -> Path:
        """The figures, and beside them the page."""
        return self.out / "report.json"


@dataclass(frozen=True)
class Findings:
    """What the report is made of: ``report`` is report.json's content, ``curves`` the judged sets with their curves."""

    report: dict[str, Any]
    curves: dict[str, dict[str, Any]]
    index: Index


def follow(course: Course) -> Findings:
    """Run every step, saying what it does; an earlier quickstart in the same folder that was stopped goes on."""
    start = time.monotonic()
    make_folder(course.out)
    _clear_finished(course)
    training = _step("1/6 train on two thousand drawn identities", lambda: _train(course))
    curves = _step("2/6 judge it on identities it has never seen, beside two baselines", lambda: _judge(course))
    _step("3/6 embed the unseen identities", lambda: _embed(course))
    index = _step("4/6 build a search index", lambda: Index.build([course.embeddings], course.index, quiet=True))
    identified = _step("5/6 search", lambda: _search(index))
    exported = _step("6/6 export to ONNX, and compare", lambda: _export(course))
    report = {
        **{name: _figures(result) for name, result in curves.items()},
        "seconds": round(time.monotonic() - start, 1),
        "images_per_second": round(training["images_per_second"], 1),
        "index": {**index.manifest["recall"], "kind": index.kind, "rows": len(index), "neighbour_is_same": identified},
        "export": {key: exported[key] for key in ("format", "max_abs_error", "max_abs_value", "bytes")},
        "training": {key: training[key] for key in ("steps", "epochs", "classes", "seconds", "images", "loss")},
    }
    write_json(course.report, report)
    return Findings(report, curves, index)


def _step(title: str, action: Callable[[], T]) -> T:
    print(f"\n== {title}", flush=True)
    start = time.monotonic()
    result = action()
    print(f"   {time.monotonic() - start:.1f} s", flush=True)
    return result


def _clear_finished(course: Course) -> None:
    """A finished quickstart is done anew; a stopped one, which has no report yet, goes on where it stood."""
    if course.report.exists():
        course.report.unlink()
        for folder in (course.run, course.embeddings, course.index):
            shutil.rmtree(folder, ignore_errors=True)


def ranks() -> int:
    """One rank per GPU, two at most; two on a machine without."""
    return min(torch.cuda.device_count(), 2) or RANKS_WITHOUT_GPU


def _train(course: Course) -> dict[str, Any]:
    """Train on several ranks; what `plsc train RECIPE --nproc N --resume auto` does."""
    result = course.out / "training.json"
    arguments = ["train", course.recipe, "--out", str(course.run), "--resume", "auto", "--json", str(result)]
    _launched([*arguments, "--eval.sets", "[]", *course.overrides])  # the next step judges
    training: dict[str, Any] = read_json(result)
    return training


def _launched(arguments: list[str]) -> None:
    count = ranks()
    print(f"   plsc {' '.join(arguments)} --nproc {count}", flush=True)
    if launch(arguments, count):
        raise PlscError(f"`plsc {arguments[0]}` did not end well: see the line above; run quickstart again to go on")


def _judge(course: Course) -> dict[str, dict[str, Any]]:
    """The trained backbone, the same one untrained, and plain pixels, all on the same pairs and probes."""
    trained = open_embedder(course.run)
    config = configuration.load(course.run / "config.toml")
    torch.manual_seed(config.seed)
    fresh = create(config.backbone, embedding_dim=config.embedding_dim, image_size=config.data.image_size)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    untrained = Embedder(backbone_engine(fresh, device), "untrained")
    judged: dict[str, Embed] = {"trained": trained, "untrained": untrained, "raw_pixels": raw_pixels}
    curves = {name: _evaluated(embed, course.unseen, trained.image_size) for name, embed in judged.items()}
    for name, result in curves.items():
        print(
            f"   {name:<11} accuracy {result['accuracy']:.4f}   rank-1 {result['rank1']:.4f}   "
            f"TAR at FAR 1e-3 {result['tar@far']['1e-3']:.4f}"
        )
    return curves


def _evaluated(embed: Embed, unseen: str, image_size: int) -> dict[str, Any]:
    single = Mesh(0, 1, 0, torch.device("cpu"))
    results = evaluate(embed, [unseen], image_size=image_size, mesh=single, curves=True, quiet=True)
    return next(iter(results.values()))


def _embed(course: Course) -> None:
    _launched(["embed", str(course.run), "--data", course.unseen, "--out", str(course.embeddings), "--workers", "0"])


def _search(index: Index) -> float:
    """The share of pictures whose nearest other picture shows the same identity."""
    rows = index.search(index.vectors, 2).rows
    others = np.where(rows[:, 0] == np.arange(len(index)), rows[:, 1], rows[:, 0])
    share = float((index.labels[others] == index.labels).mean())
    print(f"   {len(index):,} pictures, {index.kind} search: {share:.1%} have the same identity as their nearest other")
    return share


def _export(course: Course) -> dict[str, Any]:
    result = export_onnx(load_model(course.run / "model.safetensors"), course.out / "model.onnx")
    print(f"   {result['file']}: largest difference {result['max_abs_error']:.1e}")
    return result


def _figures(result: dict[str, Any]) -> dict[str, Any]:
    """A result without the curves that are drawn."""
    return {key: value for key, value in result.items() if key not in ("roc", "scores")}
