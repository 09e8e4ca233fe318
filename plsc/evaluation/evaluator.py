"""Evaluation of an embedder on whole sets: all ranks embed, the first one scores, every one gets the result."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import adaptive_avg_pool2d

from plsc.data import decode_image, has_reader, names_shards, open_dataset, read_pairs
from plsc.embedding.columns import Float32, Int64, Mask
from plsc.embedding.pipeline import Embed, EmbeddedImages, ImageSource, embed_on_ranks
from plsc.errors import DataError
from plsc.evaluation.groups import group_rates
from plsc.evaluation.pairs import (
    alternating,
    check_finite,
    squared_distances,
    ten_folds,
    unit_rows_float32,
    verified_pairs,
)
from plsc.evaluation.roc import Roc, all_pairs_roc, plot_data, roc_summary, sample_identities
from plsc.evaluation.search import identification, no_retrieval, retrieval
from plsc.models.preprocessing import BILINEAR, ImageSize, Preprocessing
from plsc.parallel.collectives import all_gather_object, all_gather_rows, on_main
from plsc.parallel.mesh import Mesh, require_mesh

NOT_OF_PAIRS = dict.fromkeys(("rank1", "rank5", "open_set", "identities"))


@dataclass(frozen=True)
class PairImages:
    """The encoded images (2N) of a .bin set, decoded when read."""

    source: str
    encoded: Sequence[bytes]

    def __len__(self) -> int:
        return len(self.encoded)

    def picture(self, index: int) -> torch.Tensor:
        """Return image ``index`` as uint8 (3, H, W) in its stored size."""
        return decode_image(self.encoded[index], f"{self.key(index)} of {self.source}")

    def key(self, index: int) -> str:
        """Return ``image 7 (pair 3)``."""
        return f"image {index} (pair {index // 2})"


@dataclass(frozen=True)
class EvaluationSet:
    """Images with either ``is_same`` (N,), for 2N images in pairs, or ``labels`` (N,) and their names, for N images."""

    name: str
    images: ImageSource
    is_same: Mask | None = None
    labels: Int64 | None = None
    class_names: Sequence[str] = ()


def evaluate(
    embed: Embed,
    sets: Sequence[str | EvaluationSet],
    *,
    image_size: ImageSize,
    interpolation: str = BILINEAR,
    mesh: Mesh,
    batch_size: int = 64,
    seed: int = 0,
    flip: bool | None = None,
    curves: bool = False,
    quiet: bool = False,
    rocs: dict[str, Roc] | None = None,
    examine: Callable[[EvaluationSet, EmbeddedImages], None] | None = None,
    groups: Mapping[str, str] | None = None,
) -> dict[str, dict[str, Any]]:
    """Evaluate ``embed`` on every set, with the same result on every rank and for any number of ranks.

    A .bin set is scored on its own pairs. Labelled images are scored for accuracy on pairs sampled by ``seed`` (all
    same pairs up to 6,000, and as many different ones); for ``auc``, ``eer`` and ``tar@far`` on all pairs of all images
    (of those that :func:`plsc.evaluation.roc.sample_identities` takes if there are more than 10^8); by
    :func:`plsc.evaluation.identification`; and by :func:`plsc.evaluation.search.retrieval`.

    Args:
        embed: maps images uint8 (B, 3, H, W) on the CPU to embeddings (B, D) anywhere.
        sets: .bin files of pairs; folders, lists, .rec files and drawn sets of classes not trained on; or
            what :func:`open_set` returned for one.
        image_size: of the images that ``embed`` takes: the side of squares in pixels, or (height, width).
        interpolation: by which pictures are resized to it.
        mesh: the ranks that share the work; all must call.
        batch_size: images per call of ``embed``.
        seed: samples the pairs for accuracy, the identities unknown to the open set, and queries of more than 10^5.
        flip: add each image's mirror image to its embedding. None does so for .bin sets, as the LFW protocol has it,
            and not for labelled images, which are scored as they will be searched (a mirrored letter is another
            letter).
        curves: add ``roc`` ({"far", "tar"}) and ``scores`` (histograms of cosines), for plotting.
        quiet: print no progress.
        rocs: filled on the first rank with each set's exact ROC, for :func:`plsc.evaluation.calibration.calibrate`.
        examine: called on the first rank with each set and its embeddings; it raises nothing.
        groups: of identities by their names; labelled sets then have "by_group", of
            :func:`plsc.evaluation.groups.group_rates`.

    Returns:
        By the set's name (:func:`set_names`), in the order of ``sets``: {"accuracy", "accuracy_std",
        "threshold_cosine", "tar@far_folds", "auc", "eer", "tar@far", "impostor_pairs", "genuine_pairs", "rank1",
        "rank5", "open_set", "retrieval", "images", "identities", "unreadable"}, with None for what a set cannot give.

    Raises:
        UsageError, DataError: a set does not exist, is malformed or has too many unreadable images, an
            embedding is not finite, or nobody in a labelled set has a group.
    """
    results, preprocessing = {}, Preprocessing(image_size, interpolation=interpolation)
    names = set_names([data.name if isinstance(data, EvaluationSet) else data for data in sets])
    for source, name in zip(sets, names, strict=True):
        data = source if isinstance(source, EvaluationSet) else open_set(source, name, image_size)
        flips = data.is_same is not None if flip is None else flip
        embedded = embed_on_ranks(
            embed, data.images, name, preprocessing, mesh, batch_size=batch_size, flip=flips, quiet=quiet
        )
        exact: list[Roc] = []  # stays on the first rank: an exact ROC is large
        results[name] = on_main(partial(_score, data, embedded, seed, curves, exact, groups), mesh)
        if rocs is not None and exact:
            rocs[name] = exact[0]
        if examine is not None and mesh.is_main:
            examine(data, embedded)
    return results


def _score(
    data: EvaluationSet,
    embedded: EmbeddedImages,
    seed: int,
    curves: bool,
    exact: list[Roc],
    groups: Mapping[str, str] | None,
) -> dict[str, Any]:
    """Compute the set's results; append its exact ROC to ``exact``."""
    readable = embedded.readable
    if data.is_same is not None:
        complete = readable[0::2] & readable[1::2]
        results, roc = verified_pairs(embedded.rows[np.repeat(complete, 2)], data.is_same[complete])
        results |= {**NOT_OF_PAIRS, "retrieval": no_retrieval()}
    else:
        assert data.labels is not None
        rows, labels = embedded.rows[readable], data.labels[readable]
        results, roc = identified(rows, labels, seed)
        unit = unit_rows_float32(rows)
        results["retrieval"] = retrieval(unit, labels, seed=seed)
        if groups is not None:
            results["by_group"] = group_rates(unit, labels, data.class_names, groups, roc, seed)
    exact.append(roc)
    counts = {"images": len(data.images), "unreadable": int(np.sum(~readable))}
    return results | counts | (plot_data(roc) if curves else {})


def identified(rows: Float32, labels: Int64, seed: int, gallery: Float32 | None = None) -> tuple[dict[str, Any], Roc]:
    """The results of labelled embeddings but "retrieval", and their exact ROC.

    Args:
        rows: (N, D).
        labels: (N,).
        seed: as in :func:`evaluate`.
        gallery: what another model makes of the same images, which is searched and compared with; None: ``rows``.
    """
    enrolled = rows if gallery is None else gallery
    first, second, is_same = sample_pairs(labels, seed)
    distances = squared_distances(alternating(rows[first], enrolled[second]), is_same.size)
    sample = sample_identities(labels, seed)
    others = None if gallery is None else unit_rows_float32(gallery[sample])
    roc = all_pairs_roc(unit_rows_float32(rows[sample]), labels[sample], others)
    ranks = identification(rows, labels, seed=seed, gallery=gallery)
    results = ten_folds(distances, is_same) | roc_summary(roc)
    results |= {key: ranks[key] for key in ("rank1", "rank5", "open_set")}
    return results | {"identities": len(np.unique(labels))}, roc


def score(embeddings: torch.Tensor, labels: torch.Tensor, *, seed: int = 0) -> dict[str, Any]:
    """Score labelled embeddings as :func:`evaluate` scores those of a labelled set.

    Args:
        embeddings: (N, D), of any norm and device; the first of an identity is its picture in the gallery.
        labels: (N,) integers.
        seed: samples the pairs for accuracy, the identities unknown to the open set, and queries of more than 10^5.

    Returns:
        What :func:`evaluate` returns of a set, without "unreadable".

    Raises:
        DataError: the numbers of rows and labels differ, or a value is not finite.
    """
    rows, numbers = embeddings.detach().float().cpu().numpy(), labels.detach().long().cpu().numpy()
    if rows.ndim != 2 or numbers.shape != rows.shape[:1]:
        raise DataError(f"embeddings {rows.shape} and labels {numbers.shape} do not fit: give (N, D) and (N,)")
    check_finite(rows)
    found = retrieval(unit_rows_float32(rows), numbers, seed=seed)
    return identified(rows, numbers, seed)[0] | {"retrieval": found, "images": len(rows)}


class Evaluator:
    """Collects embeddings batch by batch and scores them, with the methods of torchmetrics' metrics.

    Args:
        mesh: ranks that each collect their share; None: this process collects all.
        seed: as :func:`score` takes it.
    """

    def __init__(self, mesh: Mesh | None = None, *, seed: int = 0) -> None:
        self._mesh = Mesh(0, 1, 0, torch.device("cpu")) if mesh is None else require_mesh(mesh)
        self._seed = seed
        self.reset()

    def reset(self) -> None:
        """Forget what was collected."""
        self._embeddings: list[torch.Tensor] = []
        self._labels: list[torch.Tensor] = []

    def update(self, embeddings: torch.Tensor, labels: torch.Tensor) -> None:
        """Collect a batch (b, D) with its labels (b,); an image that is given twice counts twice."""
        self._embeddings.append(embeddings.detach().float())
        self._labels.append(labels.detach().to(embeddings.device, torch.int64))

    def compute(self) -> dict[str, Any]:
        """Score what all ranks have collected, in the order of the ranks; all of them call, with a batch at least.

        Returns:
            What :func:`score` returns, the same on every rank.

        Raises:
            DataError: as :func:`score` does; a rank has collected nothing.
        """
        if not all(all_gather_object(bool(self._labels), self._mesh)):
            raise DataError("a rank has no embeddings to score: call update() on every rank before compute()")
        parts = (torch.cat(part).to(self._mesh.device) for part in (self._embeddings, self._labels))
        embeddings, labels = (all_gather_rows(part, self._mesh) for part in parts)
        return on_main(lambda: score(embeddings, labels, seed=self._seed), self._mesh)


def open_set(source: str, name: str, image_size: ImageSize) -> EvaluationSet:
    """Open a .bin set of pairs, or anything that :func:`plsc.data.open_dataset` opens, as images of ``image_size``.

    Raises:
        UsageError: ``source`` does not exist.
        DataError: it is empty or malformed.
    """
    if Path(source).suffix == ".bin":
        pairs = read_pairs(Path(source))
        return EvaluationSet(name, PairImages(source, pairs.images), is_same=pairs.is_same)
    dataset = open_dataset(source, image_size=image_size)
    return EvaluationSet(name, dataset, labels=dataset.labels, class_names=dataset.class_names)


def set_names(sources: Sequence[str]) -> list[str]:
    """Return a unique name for each source: its stem or folder's name, or the whole path if two share that."""
    names = [_short_name(source) for source in sources]
    counts = Counter(names)
    names = [source if counts[name] > 1 else name for source, name in zip(sources, names, strict=True)]
    seen: Counter[str] = Counter()
    for index, name in enumerate(names):
        seen[name] += 1
        if seen[name] > 1:
            names[index] = f"{name}#{seen[name]}"
    return names


def _short_name(source: str) -> str:
    if has_reader(source):
        return source
    path = Path(source)
    is_file = path.suffix in (".bin", ".txt", ".tsv", ".lst") or names_shards(source)
    return (path.stem if is_file and not path.is_dir() else path.name) or source


def sample_pairs(labels: Int64, seed: int, limit: int = 6000) -> tuple[Int64, Int64, Mask]:
    """Sample as many same as different pairs, at most ``limit`` of each kind, without repeats.

    Args:
        labels: (N,).
        seed: determines the sample.
        limit: pairs of each kind; all the same pairs are taken if there are no more.

    Returns:
        The images' indices ``first`` (P,) and ``second`` (P,), and ``is_same`` (P,), alternately same and different, so
        that every contiguous fold holds both kinds. P is 0 if one kind does not exist.
    """
    order = np.argsort(labels, kind="stable")
    ordered = labels[order]
    position = np.arange(len(labels), dtype=np.int64)
    end = np.searchsorted(ordered, ordered, side="right").astype(np.int64)  # one past the image's own class
    # In the order of labels, an image forms same pairs with the rest of its class, and different pairs with everything
    # after its class. So each unordered pair occurs once and has a number, and numbers are sampled: no list of pairs.
    same_count, different_count = end - position - 1, len(labels) - end
    size = min(limit, int(same_count.sum()), int(different_count.sum()))
    generator = np.random.default_rng(seed)
    same = _sampled_pairs(generator, size, position + 1, same_count)
    different = _sampled_pairs(generator, size, end, different_count)
    first, second = order[np.stack([same, different], axis=2).reshape(2, -1)]
    return first, second, np.tile([True, False], size)


def _sampled_pairs(generator: np.random.Generator, size: int, begin: Int64, count: Int64) -> Int64:
    """Sample ``size`` pairs (2, size), where image p is paired with images begin[p] … begin[p] + count[p] - 1."""
    ends = np.cumsum(count)
    numbers = generator.choice(int(count.sum()), size, replace=False)
    first = np.searchsorted(ends, numbers, side="right")
    return np.stack([first, begin[first] + numbers - (ends[first] - count[first])])


def raw_pixels(images: torch.Tensor) -> torch.Tensor:
    """Embed by pixels, without training: average to 32x32 and subtract the image's mean.

    A baseline that a trained embedder has to beat. ``images`` uint8 (B, 3, H, W); returns float32 (B, 3072).
    """
    small = adaptive_avg_pool2d(images.float(), 32).flatten(1)
    return small - small.mean(dim=1, keepdim=True)
