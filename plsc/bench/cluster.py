"""Comparison of spherical k-means: ours and its baselines from the same first centres, in turn; CPU time and inertia.

``python -m plsc.bench.cluster TASK.json FOLDER`` is one turn of one of them. The rows are those of ``plsc bench
search``, clustered by identity; the first centres are rows drawn at random, the same for all.
"""

import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from plsc.bench.comparison import Contestant, VectorComparison, all_contestants, is_ours
from plsc.bench.harness import PeakMemory, Result, be_rank, failure, summary
from plsc.bench.search import make_search_data
from plsc.cluster.assignment import Assigner, Points
from plsc.cluster.kmeans import KMeans, KMeansOptions, State, write_state
from plsc.embedding.columns import Float32
from plsc.embedding.embedding_set import EmbeddingSet
from plsc.embedding.set_writer import write_embedding_set
from plsc.parallel.mesh import init

_FIGURES = ("cpu_s", "wall_s", "memory_mib", "inertia", "iterations")


def _ours(folder: Path, start: Float32, iterations: int, threads: int) -> tuple[Float32, int]:
    """plsc cluster's, with its states on disk, from ``start``; it ends where no centre changes any more."""
    with tempfile.TemporaryDirectory(prefix="plsc-kmeans-", dir=folder) as states:
        write_state(Path(states) / "run-000.npz", State(start))
        source, mesh = EmbeddingSet(folder / "set.emb"), init("cpu")
        options = KMeansOptions(len(start), iterations, tolerance=0.0)
        state = KMeans(Points(source), source, options, Path(states), mesh, quiet=True).fit()
    return state.centres, len(state.history)


CLUSTERINGS = {"plsc": Contestant("plsc cluster", _ours)}


def _measure(task: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(task["threads"])
    contestant = all_contestants("cluster", CLUSTERINGS, task["baselines"])[task["contestant"]]
    folder = Path(task["data"])
    start = np.load(folder / "start.npy", allow_pickle=False)
    source = folder if contestant.prepare is None else contestant.prepare(folder)
    peak, cpu, begin = PeakMemory(torch.device("cpu")), time.process_time(), time.perf_counter()
    centres, iterations = contestant.build(source, start, task["iterations"], task["threads"])
    figures = {"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - begin, "memory_mib": peak.above()}
    assigner = Assigner(Points(EmbeddingSet(folder / "set.emb")))  # of all, by one program, and not timed
    assigner.assign(np.ascontiguousarray(centres, dtype=np.float32))
    return {**figures, "inertia": float((2 - 2 * assigner.cosines).sum()), "iterations": iterations}


@dataclass(frozen=True)
class ClusterComparison(VectorComparison):
    """Request of a comparison; as :class:`plsc.bench.search.SearchComparison`'s, with ``k`` centres."""

    subject, ours = "cluster", CLUSTERINGS
    names: Sequence[str] = ()
    rows: int = 200_000
    dim: int = 256
    k: int = 10_000
    iterations: int = 25
    threads: int = 2
    rounds: int = 1
    limit: float = 3600.0
    baselines: str | None = None


def compare_clusterings(comparison: ClusterComparison, *, quiet: bool = False) -> dict[str, Any]:
    """Measure all in turn, ``comparison.rounds`` times over.

    Returns:
        ``rows``, one per contestant: environment, sizes, and medians over the rounds of ``cpu_s``, ``wall_s``,
        ``memory_mib``, ``inertia`` and ``iterations``; None where it failed. ``ratios``: for each of ours and each
        baseline ``cpu_times``, the baseline's CPU time by ours, and ``inertia_ratio``, ours by the baseline's.
    """
    with tempfile.TemporaryDirectory(prefix="plsc-cluster-") as name:
        folder = Path(name)
        rows = np.array(make_search_data(folder, comparison.rows, comparison.dim).rows)
        write_embedding_set(folder / "set.emb", rows, contract_id="benchmark")
        chosen = np.sort(np.random.default_rng(0).choice(len(rows), comparison.k, replace=False))
        np.save(folder / "start_rows.npy", chosen)
        np.save(folder / "start.npy", rows[chosen])
        rounds = comparison.measure(folder, quiet=quiet, iterations=comparison.iterations)
    return {"rows": [_row(comparison, name, rounds[name]) for name in rounds], "ratios": _ratios(rounds)}


def _row(comparison: ClusterComparison, name: str, results: Sequence[Result]) -> dict[str, Any]:
    failed = failure(results)
    figures = summary([] if failed is not None else list(results), _FIGURES, "cpu_s")
    about = comparison.about(name, "rows", "dim", "k", "threads", "rounds")
    return about | figures | {"failed": failed is not None, "note": failed or ""}


def _ratios(rounds: Mapping[str, Sequence[Result]]) -> list[dict[str, Any]]:
    good = {name: results for name, results in rounds.items() if failure(results) is None}
    ratios = []
    for ours in filter(is_ours, good):
        for other in (name for name in good if not is_ours(name)):
            pairs = list(zip(good[ours], good[other], strict=True))
            times = statistics.median(theirs["cpu_s"] / own["cpu_s"] for own, theirs in pairs)
            inertia = statistics.median(own["inertia"] / theirs["inertia"] for own, theirs in pairs)
            ratios.append({"ours": ours, "other": other, "cpu_times": times, "inertia_ratio": inertia})
    return ratios


if __name__ == "__main__":
    be_rank(_measure)
