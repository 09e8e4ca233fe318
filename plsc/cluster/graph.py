"""Clusters whose number is not known: connected parts, or dense parts, of the graph of nearest neighbours.

Links are pairs of rows that a person knows to belong together (must) or not (cannot). Edges join clusters from the
highest cosine down (single linkage), and one that would bring two rows of a cannot-link together is left out.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from plsc.cluster.assignment import Points
from plsc.cluster.scan import Scan
from plsc.embedding.columns import Float32, Int64
from plsc.embedding.embedding_set import EmbeddingSet
from plsc.errors import DataError, UsageError
from plsc.index import Index
from plsc.index.build import EXACT_UP_TO
from plsc.index.scan import AUTO
from plsc.text_files import text_lines

INSTALL = "pip install plsc-torch[cluster]"
_QUERIES = 4096
_LEAST_DISTANCE = 1e-6  # of two rows: sparse matrices take 0 for no edge
_FARTHEST = 2.0  # of two points on the sphere


@dataclass(frozen=True)
class Graph:
    """Edges between points: ``pairs`` (m, 2) int64, the lower first, each once; ``cosines`` (m,) float32."""

    count: int
    pairs: Int64
    cosines: Float32


@dataclass(frozen=True)
class Links:
    """Pairs (m, 2) int64 of points that belong together, and that do not."""

    must: Int64
    cannot: Int64

    def __len__(self) -> int:
        return len(self.must) + len(self.cannot)


def neighbour_graph(points: Points, neighbours: int) -> Graph:
    """Edges from each point to its ``neighbours`` nearest ones.

    They are exact on a GPU, and up to 200,000 points; a CPU finds those of more by an index.
    """
    rows, k = points.take(np.arange(len(points))), min(neighbours + 1, len(points))  # the point itself, or a copy of it
    scan = Scan(rows, k, len(points), points.where, AUTO)
    is_exact = scan.is_on_gpu or len(points) <= EXACT_UP_TO
    index = None if is_exact else Index.build(rows, quiet=True)
    pairs, cosines = [np.empty((0, 2), np.int64)], [np.empty(0, np.float32)]
    for at, vectors in points.blocks(size=_QUERIES):
        if index is None:
            scores, found = scan.search(vectors, k)
        else:
            near = index.search(vectors, k)
            scores, found = near.scores, near.ids
        own = np.broadcast_to(at[:, None], found.shape)
        pairs.append(np.stack([np.minimum(own, found), np.maximum(own, found)], axis=2).reshape(-1, 2))
        cosines.append(scores.reshape(-1))
    both, scores = np.concatenate(pairs), np.concatenate(cosines)
    _, first = np.unique(both[:, 0] * len(points) + both[:, 1], return_index=True)
    first = first[both[first, 0] != both[first, 1]]
    return Graph(len(points), both[first], scores[first])


def read_links(path: Path, source: EmbeddingSet, points: Points) -> Links:
    """Read lines ``key<TAB>key<TAB>must|cannot``, whose keys are those of the set.

    Raises:
        DataError: a line is of another form, or names a key that no point has; the message gives its number.
    """
    position = {source.keys[row]: at for at, row in enumerate(points.rows.tolist())}
    found: dict[str, list[tuple[int, int]]] = {"must": [], "cannot": []}
    for number, line in text_lines(path):
        fields = line.split("\t")
        if not line.strip():
            continue
        if len(fields) != 3 or fields[2].strip() not in found:
            raise DataError(f"{path} line {number} is {line[:80]!r}; each line is key<TAB>key<TAB>must|cannot")
        for key in fields[:2]:
            if key not in position:
                raise DataError(f"{path} line {number}: {source.path} has no embedding of {key[:80]!r}")
        found[fields[2].strip()].append((position[fields[0]], position[fields[1]]))
    must, cannot = (np.array(found[kind], dtype=np.int64).reshape(-1, 2) for kind in ("must", "cannot"))
    together = _parts(len(points), must)
    for first, second in cannot.tolist():
        if together[first] == together[second]:
            names = [source.keys[int(points.rows[at])] for at in (first, second)]
            raise DataError(f"{path}: {names[0]!r} and {names[1]!r} must be together by other lines, and cannot")
    return Links(must, cannot)


def connected(graph: Graph, threshold: float, links: Links) -> Int64:
    """Labels (n,): the parts that edges of cosine >= ``threshold``, and must-links, connect."""
    kept = graph.cosines >= threshold
    if not len(links.cannot):
        return _parts(graph.count, np.concatenate([links.must, graph.pairs[kept]]))
    order = np.argsort(-graph.cosines[kept], kind="stable")
    return _parts_apart(graph.count, np.concatenate([links.must, graph.pairs[kept][order]]), links.cannot)


def hdbscan(graph: Graph, least: int, links: Links) -> Int64:
    """Labels (n,) by HDBSCAN* (Campello et al., 2013) on the graph's distances, -1 for noise.

    Must-links are distances of 0; clusters that hold a cannot-link, and rows that must be together, are set right by
    single linkage within the clusters.

    Args:
        graph: of the points; each has ``least`` - 1 edges at least, or all that there are.
        least: points of the smallest cluster, and of the neighbourhood that a density is taken of, itself included.
        links: of the points.

    Raises:
        UsageError: scikit-learn is not installed.
    """
    try:
        from scipy.sparse import coo_array
        from sklearn.cluster import HDBSCAN
    except ImportError:
        raise UsageError(f"--method hdbscan needs the package scikit-learn: {INSTALL}") from None
    if graph.count < max(2, least):
        return np.full(graph.count, -1)
    distances = np.sqrt(np.maximum(2.0 - 2.0 * graph.cosines.astype(np.float64), 0.0))
    # One component is asked for: parts are chained by edges longer than any other.
    parts = np.unique(_parts(graph.count, np.concatenate([graph.pairs, links.must])), return_index=True)[1]
    chain = np.stack([parts[:-1], parts[1:]], axis=1)
    must = links.must[links.must[:, 0] != links.must[:, 1]]
    pairs = np.concatenate([must, graph.pairs, chain])  # the first of a pair counts
    lengths = np.concatenate([np.zeros(len(must)), distances, np.full(len(chain), _FARTHEST)])
    keys, first = np.unique(pairs.min(axis=1) * graph.count + pairs.max(axis=1), return_index=True)
    one, other = keys // graph.count, keys % graph.count
    values = np.maximum(lengths[first], _LEAST_DISTANCE)
    rows, columns = np.concatenate([one, other]), np.concatenate([other, one])
    matrix = coo_array((np.concatenate([values, values]), (rows, columns)), shape=(graph.count, graph.count)).tocsr()
    # A point counts as its own neighbour, and a sparse row does not hold it.
    model = HDBSCAN(min_cluster_size=max(2, least), min_samples=max(1, least - 1), metric="precomputed", copy=True)
    labels: Int64 = model.fit(matrix).labels_.astype(np.int64)
    return labels if not len(links) else _with_links(graph, labels, links)


def _with_links(graph: Graph, labels: Int64, links: Links) -> Int64:
    inside = (labels[graph.pairs[:, 0]] == labels[graph.pairs[:, 1]]) & (labels[graph.pairs[:, 0]] >= 0)
    within = Graph(graph.count, graph.pairs[inside], graph.cosines[inside])
    parts = connected(within, -2.0, links)
    kept = labels >= 0
    kept[links.must] = True
    return np.where(kept, parts, -1)


def _parts(count: int, pairs: Int64) -> Int64:
    """The connected parts that ``pairs`` (m, 2) make of ``count`` points: the least point of each one's part."""
    lowest = np.arange(count)
    while True:
        ends = lowest[pairs]
        least = ends.min(axis=1)
        joined = lowest.copy()
        for side in (0, 1):
            np.minimum.at(joined, ends[:, side], least)
        while not np.array_equal(jumped := joined[joined], joined):
            joined = jumped
        if np.array_equal(joined, lowest):
            return lowest
        lowest = joined


def _parts_apart(count: int, pairs: Int64, cannot: Int64) -> Int64:
    """:func:`_parts` by one pair after another, without those that would bring two points of ``cannot`` together."""
    parent = list(range(count))
    foes: dict[int, set[int]] = {}  # of a part's root: points that its points must not be with
    for first, second in cannot.tolist():
        foes.setdefault(first, set()).add(second)
        foes.setdefault(second, set()).add(first)

    def root(point: int) -> int:
        while parent[point] != point:
            parent[point] = parent[parent[point]]
            point = parent[point]
        return point

    for first, second in pairs.tolist():
        one, other = root(first), root(second)
        if one == other or any(root(foe) == other for foe in foes.get(one, ())):
            continue
        parent[other] = one
        if other in foes:
            foes.setdefault(one, set()).update(foes.pop(other))
    return np.array([root(point) for point in range(count)], dtype=np.int64)
