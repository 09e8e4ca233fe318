"""Clusters of unknown number beside scikit-learn's methods on the same graph: B-cubed F, each at its best settings.

    python benchmarks/unknown_clusters.py [--set EMB] [--rows 13233] [--identities 5749] [--cosine 0.6]

Without --set, rows are drawn as LFW has them: as many pictures and people, of whom most have one picture and few have
hundreds; --cosine is the mean of two pictures of one person. Every method is tried over a grid of its settings, and the
best F by the true labels is told: what the method could do, not what a user finds. Average linkage on the graph, which
scikit-learn has too, takes it minutes for one setting, and is left out. Needs plsc-torch[cluster].
"""

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from results_file import RESULTS, add_row, script_parser

from plsc.cluster.agreement import agreement
from plsc.cluster.assignment import Points
from plsc.cluster.graph import Graph, Links, connected, hdbscan, neighbour_graph
from plsc.embedding.columns import Int64
from plsc.embedding.embedding_set import EmbeddingSet

NEIGHBOURS = 32
THRESHOLDS = np.round(np.arange(0.3, 0.9, 0.02), 2)
NONE = Links(np.empty((0, 2), np.int64), np.empty((0, 2), np.int64))


def drawn(rows: int, identities: int, cosine: float, dim: int = 128) -> tuple[Points, Int64]:
    """Points around the centres of ``identities`` of sizes that fall as LFW's do, each at least 1."""
    random = np.random.default_rng(0)
    weights = 1 / np.arange(1, identities + 1) ** 1.2
    sizes = 1 + random.multinomial(rows - identities, weights / weights.sum())
    labels = np.repeat(np.arange(identities), sizes)
    centres = random.standard_normal((identities, dim))
    centres *= np.sqrt(cosine) / np.linalg.norm(centres, axis=1, keepdims=True)
    points = centres[labels] + random.standard_normal((rows, dim)) * np.sqrt((1 - cosine) / dim)
    return Points.of((points / np.linalg.norm(points, axis=1, keepdims=True)).astype(np.float32)), labels


def sparse(graph: Graph) -> Any:
    from scipy.sparse import coo_array

    one, other = graph.pairs.T
    values = np.tile(np.maximum(1 - graph.cosines.astype(np.float64), 1e-6), 2)
    ends = np.concatenate([one, other]), np.concatenate([other, one])
    return coo_array((values, ends), shape=(graph.count, graph.count)).tocsr()


def tried(graph: Graph) -> Iterator[tuple[str, str, Callable[[], Int64]]]:
    """(method, setting, what computes its labels)."""
    from sklearn.cluster import DBSCAN

    matrix = sparse(graph)
    for threshold in THRESHOLDS.tolist():
        yield "plsc connected", f"{threshold}", lambda at=threshold: connected(graph, at, NONE)  # type: ignore[misc]
    for least in (2, 3, 5):
        yield "plsc hdbscan", f"{least}", lambda at=least: hdbscan(graph, at, NONE)  # type: ignore[misc]
        for threshold in THRESHOLDS.tolist():
            model = DBSCAN(eps=1 - threshold, min_samples=least, metric="precomputed")
            yield "DBSCAN", f"{threshold}, {least}", lambda of=model: of.fit_predict(matrix)  # type: ignore[misc]


def main() -> None:
    parser = script_parser(__doc__, rows=13_233, identities=5_749, cosine=0.6)
    parser.add_argument("--set", type=Path, metavar="EMB", help="of labelled rows")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER", help="where unknown_clusters.csv is")
    args: argparse.Namespace = parser.parse_args()
    if args.set is not None:
        source = EmbeddingSet(args.set)
        points = Points(source)
        labels, data = np.asarray(source.labels)[points.rows], args.set.name
    else:
        points, labels = drawn(args.rows, args.identities, args.cosine)
        data = f"{args.rows} rows of {args.identities}, cosine {args.cosine}"
    graph = neighbour_graph(points, NEIGHBOURS)
    best: dict[str, dict[str, Any]] = {}
    for method, setting, compute in tried(graph):
        start = time.process_time()
        found = agreement(np.asarray(compute(), dtype=np.int64), labels)
        assert found is not None
        row = {"data": data, "method": method, "setting": setting, "cpu_s": time.process_time() - start, **found}
        if method not in best or row["bcubed_f"] > best[method]["bcubed_f"]:
            best[method] = row
    for row in best.values():
        print(f"{row['method']:<16} {row['setting']:>8}  F {row['bcubed_f']:.4f}  {row['cpu_s']:.2f} s")
        add_row("unknown_clusters", row, args.out)


if __name__ == "__main__":
    main()
