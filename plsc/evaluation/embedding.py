"""Embedding a set's images on many ranks: the same rows, whatever the number of ranks."""

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from plsc.errors import DataError
from plsc.evaluation.sets import ImageSource
from plsc.parallel.collectives import all_gather_object, all_gather_rows
from plsc.parallel.mesh import Mesh
from plsc.progress import Progress

Embed = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class EmbeddedImages:
    """``rows`` float32 (N, D), not normalised; where ``readable`` (N,) is False the row means nothing."""

    rows: NDArray[np.float32]
    readable: NDArray[np.bool_]


def embed_images(
    embed: Embed,
    images: ImageSource,
    name: str,
    *,
    image_size: int,
    mesh: Mesh,
    batch_size: int,
    flip: bool = True,
    quiet: bool = False,
) -> EmbeddedImages:
    """The embedding of every image, with ``flip`` plus that of its mirror image; the same rows on every rank.

    Batches are cut alike for any number of ranks and each rank embeds whole ones, so that the result does not
    depend on the number of ranks. An unreadable image is reported by name.

    Raises :class:`DataError` when more than 1% of the images (and more than ten) cannot be read, or when an
    embedding is not finite.
    """
    total = -(-len(images) // batch_size)
    batches = range(mesh.rank * total // mesh.world_size, (mesh.rank + 1) * total // mesh.world_size)
    progress = Progress(f"embedding {name}", len(images), quiet=quiet or not mesh.is_main)
    parts: list[torch.Tensor] = []
    unreadable: list[tuple[int, str]] = []
    for batch in _batches(images, batches, batch_size, image_size, unreadable):
        with torch.no_grad():
            rows_here = embed(batch).float()
            parts.append((rows_here + embed(batch.flip(-1)).float() if flip else rows_here).to(mesh.device))
        # What this rank has done stands for the others: their shares differ by one batch at most.
        progress.advance(min(len(batch) * mesh.world_size, len(images) - progress.count))
    rows = all_gather_rows(_concatenated(parts, mesh), mesh).cpu().numpy()
    progress.advance(len(images) - progress.count)
    progress.finish()
    readable = _report(all_gather_object(unreadable, mesh), name, len(images), mesh)
    _check_finite(rows, readable, images, name)
    return EmbeddedImages(rows, readable)


def _concatenated(parts: list[torch.Tensor], mesh: Mesh) -> torch.Tensor:
    """This rank's rows; (0, D) on a rank that had no batch, which learns D from the others."""
    widths = all_gather_object(parts[0].shape[1] if parts else 0, mesh)
    return torch.cat(parts) if parts else torch.empty(0, max(widths), device=mesh.device)


def _batches(
    images: ImageSource, batches: range, batch_size: int, image_size: int, unreadable: list[tuple[int, str]]
) -> Iterator[torch.Tensor]:
    """Batches uint8 (b, 3, S, S), decoded by threads one batch ahead; an unreadable image becomes black."""

    def load(index: int) -> torch.Tensor:
        try:
            return images.image(index)
        except DataError as error:
            unreadable.append((index, str(error)))
            return torch.zeros(3, image_size, image_size, dtype=torch.uint8)

    threads = max(min(8, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))), 1)
    with ThreadPoolExecutor(threads) as pool:
        ahead = None
        for batch in batches:
            indices = range(batch * batch_size, min((batch + 1) * batch_size, len(images)))
            loading = [pool.submit(load, index) for index in indices]
            if ahead is not None:
                yield torch.stack([image.result() for image in ahead])
            ahead = loading
        if ahead is not None:
            yield torch.stack([image.result() for image in ahead])


def _report(found: list[list[tuple[int, str]]], name: str, total: int, mesh: Mesh) -> NDArray[np.bool_]:
    """Name the unreadable images, or give up when they are many; returns the mask of the readable ones."""
    unreadable = sorted(item for part in found for item in part)
    if len(unreadable) > max(10, total // 100) or len(unreadable) == total:
        raise DataError(
            f"{name}: {len(unreadable)} of {total} images cannot be read, the first: {unreadable[0][1]}; mend the set"
        )
    if mesh.is_main:
        for _, message in unreadable:
            print(f"warning: {name}: an image is left out: {message}", file=sys.stderr)
    readable = np.ones(total, dtype=bool)
    readable[[index for index, _ in unreadable]] = False
    return readable


def _check_finite(rows: NDArray[np.float32], readable: NDArray[np.bool_], images: ImageSource, name: str) -> None:
    bad = np.flatnonzero(readable & ~np.isfinite(rows).all(axis=1))
    if bad.size:
        raise DataError(
            f"{name}: {bad.size} embeddings are not finite, the first that of {images.key(int(bad[0]))}; "
            "the model has diverged, or its precision overflows"
        )
