"""Evaluation of an embedder on whole sets: all ranks embed, the first one scores, every one gets the result."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import adaptive_avg_pool2d

from plsc.data import decode_image, is_drawn, open_dataset, read_pairs
from plsc.embedding.columns import Int64, Mask
from plsc.embedding.pipeline import Embed, EmbeddedImages, ImageSource, embed_on_ranks
from plsc.evaluation.pairs import squared_distances, ten_folds, unit_rows_float32
from plsc.evaluation.roc import Roc, all_pairs_roc, plot_data, roc_from_scores, roc_summary, sample_identities
from plsc.evaluation.search import identification, no_retrieval, retrieval
from plsc.models.preprocessing import BILINEAR, ImageSize
from plsc.parallel.collectives import on_main
from plsc.parallel.mesh import Mesh


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
    """Images with either ``is_same`` (N,), for 2N images in pairs, or ``labels`` (N,), for N images."""

    name: str
    images: ImageSource
    is_same: Mask | None = None
    labels: Int64 | None = None


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
) -> dict[str, dict[str, Any]]:
    """Evaluate ``embed`` on every set, with the same result on every rank and for any number of ranks.

    A .bin set is scored on its own pairs. Labelled images are scored for accuracy on pairs sampled by ``seed`` (all
    same pairs up to 6,000, and as many different ones); for ``auc``, ``eer`` and ``tar@far`` on all pairs of all images
    (of whole identities sampled by ``seed`` if there are more than 10^8); by :func:`plsc.evaluation.identification`;
    and by :func:`plsc.evaluation.search.retrieval`.

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

    Returns:
        By the set's name (:func:`set_names`), in the order of ``sets``: {"accuracy", "accuracy_std",
        "threshold_cosine", "tar@far_folds", "auc", "eer", "tar@far", "impostor_pairs", "genuine_pairs", "rank1",
        "rank5", "open_set", "retrieval", "images", "identities", "unreadable"}, with None for what a set cannot give.

    Raises:
        UsageError, DataError: a set does not exist, is malformed or has too many unreadable images, or an
            embedding is not finite.
    """
    results = {}
    names = set_names([data.name if isinstance(data, EvaluationSet) else data for data in sets])
    for source, name in zip(sets, names, strict=True):
        data = source if isinstance(source, EvaluationSet) else open_set(source, name, image_size)
        embedded = embed_on_ranks(
            embed,
            data.images,
            name,
            image_size=image_size,
            interpolation=interpolation,
            mesh=mesh,
            batch_size=batch_size,
            quiet=quiet,
            flip=data.is_same is not None if flip is None else flip,
        )
        exact: list[Roc] = []  # stays on the first rank: an exact ROC is large
        results[name] = on_main(partial(_score, data, embedded, seed, curves, exact), mesh)
        if rocs is not None and exact:
            rocs[name] = exact[0]
    return results


def _score(data: EvaluationSet, embedded: EmbeddedImages, seed: int, curves: bool, exact: list[Roc]) -> dict[str, Any]:
    """Compute the set's results; append its exact ROC to ``exact``."""
    readable = embedded.readable
    searched: dict[str, Any]
    if data.is_same is not None:
        complete = readable[0::2] & readable[1::2]
        pairs, is_same = embedded.rows[np.repeat(complete, 2)], data.is_same[complete]
        distances = squared_distances(pairs, is_same.size)
        roc = roc_from_scores(1.0 - distances / 2.0, is_same)
        searched = {"rank1": None, "rank5": None, "open_set": None, "identities": None, "retrieval": no_retrieval()}
    else:
        assert data.labels is not None
        rows, labels = embedded.rows[readable], data.labels[readable]
        first, second, is_same = sample_pairs(labels, seed)
        distances = squared_distances(rows[np.stack([first, second], axis=1).reshape(-1)], is_same.size)
        sample, unit = sample_identities(labels, seed), unit_rows_float32(rows)
        roc = all_pairs_roc(unit[sample], labels[sample])
        ranks = identification(rows, labels, seed=seed)
        searched = {key: ranks[key] for key in ("rank1", "rank5", "open_set")}
        searched |= {"identities": len(np.unique(labels)), "retrieval": retrieval(unit, labels, seed=seed)}
    exact.append(roc)
    counts = {"images": len(data.images), "unreadable": int(np.sum(~readable))}
    return ten_folds(distances, is_same) | roc_summary(roc) | searched | counts | (plot_data(roc) if curves else {})


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
    return EvaluationSet(name, dataset, labels=dataset.labels)


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
    if is_drawn(source):
        return source
    path = Path(source)
    return (path.stem if path.suffix in (".bin", ".rec", ".txt", ".tsv", ".lst") else path.name) or source


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
