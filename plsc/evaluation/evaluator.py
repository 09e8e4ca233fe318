"""Evaluation of an embedder on whole sets: all ranks embed, the first one scores, every one gets the result."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from plsc.data import decode_image, open_dataset, read_pairs
from plsc.data.codec import resize_image
from plsc.errors import DataError
from plsc.evaluation.embedding import Embed, EmbeddedImages, ImageSource, embed_images
from plsc.evaluation.gallery import identification
from plsc.evaluation.pairs import (
    all_pairs_roc,
    roc_summary,
    sample_identities,
    sample_pairs,
    squared_distances,
    ten_folds,
    unit_rows_float32,
    verification,
)
from plsc.evaluation.retrieval import no_retrieval, retrieval
from plsc.evaluation.roc import Roc, roc_from_scores, sampled_curve
from plsc.models.preprocessing import BILINEAR, ImageSize
from plsc.parallel.collectives import on_main
from plsc.parallel.mesh import Mesh

T = TypeVar("T")


class PairImages:
    """The encoded images (2N) of a .bin set, decoded when read and resized to ``image_size``."""

    def __init__(self, source: str, encoded: Sequence[bytes], image_size: ImageSize) -> None:
        self.source, self.encoded, self.image_size = source, encoded, image_size

    def __len__(self) -> int:
        return len(self.encoded)

    def picture(self, index: int) -> torch.Tensor:
        """Return image ``index`` as uint8 (3, H, W) in its stored size."""
        return decode_image(self.encoded[index], f"{self.key(index)} of {self.source}")

    def image(self, index: int) -> torch.Tensor:
        """Return image ``index`` as uint8 (3, S, S)."""
        return resize_image(self.picture(index), self.image_size)

    def key(self, index: int) -> str:
        """Return ``image 7 (pair 3)``."""
        return f"image {index} (pair {index // 2})"


@dataclass(frozen=True)
class EvaluationSet:
    """Images with either ``is_same`` (N,), for 2N images in pairs, or ``labels`` (N,), for N images."""

    name: str
    images: ImageSource
    is_same: NDArray[np.bool_] | None = None
    labels: NDArray[np.int64] | None = None


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
    and by :func:`plsc.evaluation.retrieval.retrieval`.

    Args:
        embed: maps images uint8 (B, 3, H, W) on the CPU to embeddings (B, D) anywhere.
        sets: .bin files of pairs; folders, lists, .rec files and ``avatars:…`` of identities not trained on; or
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
        embedded = embed_images(
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
    counts = {"images": len(data.images), "unreadable": int(np.sum(~embedded.readable))}
    if data.is_same is not None:
        result, roc = _score_pairs(embedded, data.is_same)
    else:
        assert data.labels is not None
        result, roc = _score_identities(embedded, data.labels, seed)
    exact.append(roc)
    return result | counts | (plot_data(roc) if curves else {})


def _score_pairs(embedded: EmbeddedImages, is_same: NDArray[np.bool_]) -> tuple[dict[str, Any], Roc]:
    complete = embedded.readable[0::2] & embedded.readable[1::2]
    rows, truth = embedded.rows[np.repeat(complete, 2)], is_same[complete]
    result = verification(rows, truth)
    result |= {"rank1": None, "rank5": None, "open_set": None, "identities": None, "retrieval": no_retrieval()}
    return result, roc_from_scores(1.0 - squared_distances(rows, truth.size) / 2.0, truth)


def _score_identities(embedded: EmbeddedImages, all_labels: NDArray[np.int64], seed: int) -> tuple[dict[str, Any], Roc]:
    rows, labels = embedded.rows[embedded.readable], all_labels[embedded.readable]
    first, second, is_same = sample_pairs(labels, seed)
    pairs = np.stack([first, second], axis=1).reshape(-1)
    sample = sample_identities(labels, seed)
    unit = unit_rows_float32(rows)
    roc = all_pairs_roc(unit[sample], labels[sample])
    result = ten_folds(squared_distances(rows[pairs], is_same.size), is_same) | roc_summary(roc)
    ranks = identification(rows, labels, seed=seed)
    result |= {key: ranks[key] for key in ("rank1", "rank5", "open_set")}
    result |= {"identities": len(np.unique(labels)), "retrieval": retrieval(unit, labels, seed=seed)}
    return result, roc


def plot_data(roc: Roc, bins: int = 200) -> dict[str, Any]:
    """Return ``roc`` sampled for a logarithmic axis, and ``scores``: counts of same and different pairs by cosine."""
    edges = np.linspace(-1.0, 1.0, bins + 1)
    scores = np.clip(roc.thresholds, -1.0, 1.0)
    histogram = {"edges": edges.tolist()}
    for kind, accepted in (("same", roc.genuine), ("different", roc.impostors)):
        counts = np.histogram(scores, edges, weights=np.diff(accepted, prepend=0))[0]
        histogram[kind] = counts.astype(int).tolist()
    return {"roc": sampled_curve(roc), "scores": histogram}


def open_set(source: str, name: str, image_size: ImageSize) -> EvaluationSet:
    """Open a .bin set of pairs, or anything that :func:`plsc.data.open_dataset` opens, as images of ``image_size``.

    Raises:
        UsageError: ``source`` does not exist.
        DataError: it is empty or malformed.
    """
    if Path(source).suffix == ".bin":
        pairs = read_pairs(Path(source))
        is_same = np.asarray(pairs.is_same, dtype=bool)
        if len(pairs.images) != 2 * is_same.size or not is_same.size:
            raise DataError(f"{source} holds {len(pairs.images)} images for {is_same.size} pairs; each pair needs two")
        return EvaluationSet(name, PairImages(source, pairs.images, image_size), is_same=is_same)
    dataset = open_dataset(source, image_size=image_size)
    if not len(dataset):
        raise DataError(f"{source} holds no image")
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
    if source.startswith("avatars:"):
        return source
    path = Path(source)
    return (path.stem if path.suffix in (".bin", ".rec", ".txt", ".tsv", ".lst") else path.name) or source
