"""The folder of a clustering: begun, resumed and completed as ``plsc cluster`` asks.

OUT/
  manifest.json        with its own digest: the settings, and the files when "complete" is true
  labels.npy           (N,) int64, the cluster of each row of the set, -1 for none: for data.labels
  centres.npy          (C, D) float32, of length 1; centres.emb is the same as an embedding set
  top_labels.npy, top_cosines.npy    (N, K) int64 and float32, with --top K: the nearest centres, best first
  report.json, report.png
  state/               of a run that is not complete
"""

import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from plsc.cluster.agreement import agreement
from plsc.cluster.assignment import Points, nearest, usable_rows
from plsc.cluster.balanced import balanced_labels
from plsc.cluster.given import GivenCentres, read_centres
from plsc.cluster.graph import Links, connected, hdbscan, neighbour_graph, read_links
from plsc.cluster.kmeans import KMeans, KMeansOptions
from plsc.cluster.means import Sums, inertia
from plsc.cluster.picture import draw_report
from plsc.cluster.scan import SearchDevice
from plsc.embedding.columns import Float32, Float64, Int64, save_array
from plsc.embedding.embedding_set import EmbeddingSet
from plsc.embedding.set_writer import sole_writer, write_embedding_set
from plsc.errors import DataError, UsageError
from plsc.files import (
    atomic_write,
    describe_files,
    describe_open_file,
    digest,
    make_folder,
    read_json,
    read_manifest,
    verify_files,
    write_json,
    write_manifest,
)
from plsc.parallel.collectives import all_gather_rows, on_main, raise_on_all_ranks
from plsc.parallel.mesh import Mesh
from plsc.progress import counted
from plsc.regular_files import open_regular

FORMAT = "plsc clusters"
VERSION = 1
LABELS_FILE = "labels.npy"


@dataclass(frozen=True)
class GraphOptions:
    """Of clusters whose number is not known.

    Attributes:
        method: "connected" or "hdbscan".
        threshold: the least cosine of an edge; of "connected".
        neighbours: edges of each point; hdbscan takes as many as its densities need, where these are too few.
        min_size: points of the smallest cluster; the points of smaller ones get no label.
        links: a file of pairs (:func:`plsc.cluster.graph.read_links`).
    """

    method: str
    threshold: float = 0.5
    neighbours: int = 32
    min_size: int = 2
    links: Path | None = None


@dataclass
class Clusters:
    """A finished clustering, of all N rows of the set; arrays on every rank.

    Attributes:
        labels: (N,) int64 in 0 … C - 1, -1 for none.
        cosines: (N,) float64 with the centre of the label, 0 without one.
        centres: (C, D) float32.
        top: labels (N, K) and cosines (N, K) of the nearest centres, where they were asked for.
        history: of k-means.
        inertia: the sum of squared distances of the labelled rows from their centres.
    """

    labels: Int64
    cosines: Float64
    centres: Float32
    top: tuple[Int64, Float32] | None
    history: list[dict[str, Any]]
    inertia: float


def cluster(
    source: EmbeddingSet,
    folder: Path,
    options: KMeansOptions | GivenCentres | GraphOptions,
    mesh: Mesh,
    *,
    top: int = 0,
    where: SearchDevice | None = None,
    overwrite: bool = False,
    quiet: bool = False,
) -> dict[str, Any]:
    """Cluster a set into ``folder``, or go on where an earlier call was stopped; all ranks call.

    ``where`` is the device that searches; None: the CPU. Only the graph of more than 200,000 points depends on it.

    Returns:
        The report: "rows", "clusters", "labelled", "inertia", "iterations", "sizes" ("least", "median", "most"),
        "agreement" with the classes of the set (:func:`plsc.cluster.agreement.agreement`), "history".

    Raises:
        UsageError: the folder holds something else, or a clustering with other settings; there are fewer points than
            centres; centres from elsewhere do not fit.
        DataError: a row is zero; what an earlier call has left is damaged.
    """
    settings = {"set": digest(source.manifest), "top": top, **asdict(options)}
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in settings.items()}
    if isinstance(options, GraphOptions) and options.links is not None:
        with open_regular(options.links) as links:
            settings["content of links"] = describe_open_file(links)["sha256"]
    _check(source, options, folder)
    if isinstance(options, GivenCentres):
        given = read_centres(options.centres, source.dim)
        with open_regular(options.centres) as file:
            settings["centres"] = describe_open_file(file)["sha256"]
    with ExitStack() as lock:
        if on_main(lambda: _begin(folder, settings, lock, overwrite), mesh):
            return on_main(lambda: dict(read_json(folder / "report.json")), mesh)
        points = raise_on_all_ranks(mesh, lambda: Points(source, mesh.rank, mesh.world_size, where))
        if isinstance(options, KMeansOptions):
            clusters = _by_means(source, points, folder / "state", options, mesh, top, quiet)
        elif isinstance(options, GivenCentres):
            clusters = _by_centres(source, points, given, mesh, top)
        else:
            clusters = _by_graph(source, points, options, mesh)
        return on_main(lambda: _finish(source, folder, settings, clusters), mesh)


def _check(source: EmbeddingSet, options: KMeansOptions | GivenCentres | GraphOptions, folder: Path) -> None:
    """Refuse what cannot be, before the folder is made."""
    count = len(usable_rows(source))
    if not count:
        raise DataError(f"{source.path} has no embedding without an error; embed it again")
    if isinstance(options, KMeansOptions) and options.k > count:
        raise UsageError(f"--k {options.k} is more than the {counted(count, 'embedding')} of {source.path}")
    if folder.resolve() == source.path.resolve():
        raise UsageError(f"--out {folder} is the embedding set itself; name another folder")


def _begin(folder: Path, settings: Mapping[str, Any], lock: ExitStack, overwrite: bool) -> bool:
    """Lock the folder; True if it holds the result already."""
    lock.enter_context(sole_writer(folder))
    if all(path.name.startswith(".") for path in folder.iterdir()):  # new, or left by an early kill
        _start(folder, settings)
        return False
    try:
        found = read_manifest(folder, FORMAT, VERSION)
    except DataError:
        raise UsageError(f"{folder} is not empty and holds no clusters; name another folder") from None
    if overwrite:
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        _start(folder, settings)
        return False
    other = next(
        (name for name in {**found["settings"], **settings} if found["settings"].get(name) != settings.get(name)), None
    )
    if other is not None:
        what = "another set" if other == "set" else f"{other} {found['settings'].get(other)}, now {settings.get(other)}"
        raise UsageError(f"{folder} was begun with {what}; name another folder, or give --overwrite to start anew")
    if found["complete"]:
        verify_files(folder, found["files"])
    return bool(found["complete"])


def _start(folder: Path, settings: Mapping[str, Any]) -> None:
    write_manifest(folder, {"format": FORMAT, "version": VERSION, "complete": False, "settings": dict(settings)})
    make_folder(folder / "state")


def _by_means(
    source: EmbeddingSet, points: Points, state: Path, options: KMeansOptions, mesh: Mesh, top: int, quiet: bool
) -> Clusters:
    best = KMeans(points, source, options, state, mesh, quiet=quiet).fit()
    clusters = _by_centres(source, points, best.centres, mesh, top, options.balanced)
    clusters.history = best.history
    return clusters


def _by_centres(
    source: EmbeddingSet, points: Points, every: Float32, mesh: Mesh, top: int, balanced: float | None = None
) -> Clusters:
    """The exact assignment to the centres ``every`` (k, D), of which those without points are left out."""
    width = min(max(top, 1), len(every))
    cosines, labels = nearest(points, every, width)
    own = labels[:, 0].copy()
    if balanced is not None:
        own = balanced_labels(points, every, balanced, mesh)
    used = np.unique(all_gather_rows(torch.from_numpy(np.unique(own)), mesh).numpy())
    centres = every[used]
    if len(used) < len(every):  # centres without points are no clusters
        own = np.searchsorted(used, own)
        cosines, labels = nearest(points, centres, min(width, len(used)))
    with_own = _own_cosines(points, centres, own)
    everything = [_whole(source, points, part, mesh) for part in (own, with_own, labels, cosines)]
    found = (everything[2], everything[3]) if top else None
    total = inertia(with_own, mesh)
    return Clusters(everything[0], everything[1], centres, found, [], total)


def _by_graph(source: EmbeddingSet, points: Points, options: GraphOptions, mesh: Mesh) -> Clusters:
    links = Links(np.empty((0, 2), np.int64), np.empty((0, 2), np.int64))
    if options.links is not None:
        links = read_links(options.links, source, points)
    if options.method == "connected":
        parts = connected(neighbour_graph(points, options.neighbours), options.threshold, links)
    else:
        graph = neighbour_graph(points, max(options.neighbours, options.min_size - 1))
        parts = hdbscan(graph, options.min_size, links)
    numbers, own = np.unique(parts, return_inverse=True)
    own = np.where(parts < 0, -1, own.reshape(-1))
    sizes = np.bincount(own[own >= 0], minlength=len(numbers))
    kept = np.flatnonzero(sizes >= options.min_size)
    own = np.where((own >= 0) & (sizes[own] >= options.min_size), np.searchsorted(kept, own), -1).astype(np.int64)
    if not len(kept):
        lower = "--threshold or --min-size" if options.method == "connected" else "--min-size"
        raise DataError(f"no cluster has {options.min_size} points; lower {lower}, or give more --neighbours")
    sums, labelled = Sums(len(kept), points.dim), np.flatnonzero(own >= 0)
    sums.move(points, labelled, np.full(len(labelled), -1), own)
    centres = sums.centres(np.zeros((len(kept), points.dim), np.float32))
    cosines = _own_cosines(points, centres, own)
    whole = [_whole(source, points, part, mesh) for part in (own, cosines)]
    return Clusters(whole[0], whole[1], centres, None, [], inertia(cosines[labelled], mesh))


def _own_cosines(points: Points, centres: Float32, labels: Int64) -> Float64:
    cosines = np.zeros(len(points))
    for at, vectors in points.blocks(np.flatnonzero(labels >= 0)):
        cosines[at] = (vectors.astype(np.float64) * centres[labels[at]].astype(np.float64)).sum(axis=1)
    return cosines


def _whole(source: EmbeddingSet, points: Points, part: Any, mesh: Mesh) -> Any:
    """What every rank has of its points, for all rows of the set: -1, or 0 of cosines, for rows that are no points."""
    rows = all_gather_rows(torch.from_numpy(points.rows), mesh).numpy()
    gathered = all_gather_rows(torch.from_numpy(part), mesh).numpy()
    whole = np.full((len(source), *part.shape[1:]), -1 if part.dtype == np.int64 else 0, dtype=part.dtype)
    whole[rows] = gathered
    return whole


def _finish(source: EmbeddingSet, folder: Path, settings: Mapping[str, Any], clusters: Clusters) -> dict[str, Any]:
    """Write the files, then the manifest that says they are complete."""
    labels, sizes = clusters.labels, np.bincount(clusters.labels[clusters.labels >= 0])
    arrays: dict[str, Any] = {LABELS_FILE: labels, "centres.npy": clusters.centres}
    if clusters.top is not None:
        arrays |= {"top_labels.npy": clusters.top[0], "top_cosines.npy": clusters.top[1]}
    for name, array in arrays.items():
        with atomic_write(folder / name) as tmp_path:
            save_array(tmp_path, array)
    shutil.rmtree(folder / "centres.emb", ignore_errors=True)  # of a call that was killed here
    names, numbers = [str(label) for label in range(len(sizes))], np.arange(len(sizes))
    contract = source.contract_id
    write_embedding_set(
        folder / "centres.emb", clusters.centres, contract_id=contract, labels=numbers, class_names=names
    )
    report = {
        "rows": len(source),
        "clusters": len(sizes),
        "labelled": int(sizes.sum()),
        "inertia": clusters.inertia,
        "iterations": len(clusters.history),
        "sizes": {"least": int(sizes.min()), "median": float(np.median(sizes)), "most": int(sizes.max())},
        "agreement": agreement(labels, np.asarray(source.labels)),
        "history": clusters.history,
    }
    write_json(folder / "report.json", report)
    draw_report(folder / "report.png", source, labels, clusters.cosines, clusters.history)
    described = describe_files(folder, [*arrays, "report.json", "report.png"])
    head = {"format": FORMAT, "version": VERSION, "complete": True, "settings": dict(settings)}
    write_manifest(folder, {**head, "contract_id": contract, "files": described})
    shutil.rmtree(folder / "state", ignore_errors=True)
    return report
