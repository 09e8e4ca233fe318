"""Embedding of a set's images on many ranks, with rows that do not depend on the number of ranks."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import adaptive_avg_pool2d

from plsc.data.codec import resize_image
from plsc.embedding.preprocessing import picture_warnings, warning_summary
from plsc.errors import DataError
from plsc.models.preprocessing import BILINEAR, ImageSize, height_and_width
from plsc.parallel.collectives import all_gather_object, all_gather_rows
from plsc.parallel.mesh import Mesh
from plsc.progress import Progress, note

Embed = Callable[[torch.Tensor], torch.Tensor]


class ImageSource(Protocol):
    """Images in a fixed order."""

    def __len__(self) -> int: ...

    def picture(self, index: int) -> torch.Tensor:
        """Return image ``index`` as uint8 (3, H, W) in its stored size; :class:`DataError` names an unreadable one."""

    def key(self, index: int) -> str:
        """Return the readable id of image ``index``."""


@dataclass(frozen=True)
class EmbeddedImages:
    """Embeddings ``rows`` float32 (N, D), not normalised; rows where ``readable`` (N,) is False are meaningless."""

    rows: NDArray[np.float32]
    readable: NDArray[np.bool_]


def embed_images(
    embed: Embed,
    images: ImageSource,
    name: str,
    *,
    image_size: ImageSize,
    interpolation: str = BILINEAR,
    mesh: Mesh,
    batch_size: int,
    flip: bool = True,
    quiet: bool = False,
) -> EmbeddedImages:
    """Embed every image; every rank gets all rows.

    Batches are the same for any number of ranks and each rank embeds whole ones, so the result does not depend on the
    number of ranks. Unreadable images are reported by name, and pictures that do not look like aligned crops by their
    number, unless ``quiet``.

    Args:
        embed: maps images uint8 (B, 3, H, W) on the CPU to embeddings (B, D) on any device.
        images: the images to embed.
        name: the set's name, in messages.
        image_size: the side of squares in pixels, or (height, width).
        interpolation: by which pictures are resized to it.
        mesh: the ranks that share the work; all must call.
        batch_size: images per call of ``embed``.
        flip: add the embedding of each image's mirror image.
        quiet: print no progress.

    Raises:
        DataError: more than 1% of the images (and more than ten) cannot be read, or an embedding is not finite.
    """
    total = -(-len(images) // batch_size)
    batches = range(mesh.rank * total // mesh.world_size, (mesh.rank + 1) * total // mesh.world_size)
    progress = Progress(f"embedding {name}", len(images), quiet=quiet or not mesh.is_main)
    parts: list[torch.Tensor] = []
    unreadable: list[tuple[int, str]] = []
    warnings: list[tuple[int, str]] = []
    for batch in _batches(images, batches, batch_size, (image_size, interpolation), unreadable, warnings):
        with torch.no_grad():
            rows_here = embed(batch).float()
            parts.append((rows_here + embed(batch.flip(-1)).float() if flip else rows_here).to(mesh.device))
        # This rank's progress is taken for that of all: their shares differ by one batch at most.
        progress.advance(min(len(batch) * mesh.world_size, len(images) - progress.count))
    rows = all_gather_rows(_concatenated(parts, mesh), mesh).cpu().numpy()
    progress.advance(len(images) - progress.count)
    progress.finish()
    all_warnings = sorted(item for part in all_gather_object(warnings, mesh) for item in part)
    if all_warnings and mesh.is_main and not quiet:
        first, message = all_warnings[0]
        note(warning_summary(len(all_warnings), len(images), images.key(first), message))
    readable = _check_unreadable(all_gather_object(unreadable, mesh), name, len(images), mesh)
    _check_finite(rows, readable, images, name)
    return EmbeddedImages(rows, readable)


def _concatenated(parts: list[torch.Tensor], mesh: Mesh) -> torch.Tensor:
    """Concatenate this rank's rows; (0, D) on a rank without a batch, which gets D from the others."""
    widths = all_gather_object(parts[0].shape[1] if parts else 0, mesh)
    return torch.cat(parts) if parts else torch.empty(0, max(widths), device=mesh.device)


def _batches(
    images: ImageSource,
    batches: range,
    batch_size: int,
    resizing: tuple[ImageSize, str],
    unreadable: list[tuple[int, str]],
    warnings: list[tuple[int, str]],
) -> Iterator[torch.Tensor]:
    """Yield batches uint8 (b, 3, H, W), decoded by threads one batch ahead; an unreadable image becomes black.

    Appends (index, problem) to ``unreadable`` and to ``warnings``.
    """

    image_size, interpolation = resizing

    def load(index: int) -> torch.Tensor:
        try:
            picture = images.picture(index)
        except DataError as error:
            unreadable.append((index, str(error)))
            return torch.zeros(3, *height_and_width(image_size), dtype=torch.uint8)
        if found := picture_warnings(picture, image_size):
            warnings.append((index, found[0].message))
        return resize_image(picture, image_size, interpolation)

    threads = max(min(8, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))), 1)
    with ThreadPoolExecutor(threads) as pool:
        prefetched = None
        for batch in batches:
            indices = range(batch * batch_size, min((batch + 1) * batch_size, len(images)))
            loading = [pool.submit(load, index) for index in indices]
            if prefetched is not None:
                yield torch.stack([image.result() for image in prefetched])
            prefetched = loading
        if prefetched is not None:
            yield torch.stack([image.result() for image in prefetched])


def _check_unreadable(gathered: list[list[tuple[int, str]]], name: str, total: int, mesh: Mesh) -> NDArray[np.bool_]:
    """Warn of unreadable images by name, or raise if there are many; return the mask of the readable ones."""
    unreadable = sorted(item for part in gathered for item in part)
    if len(unreadable) > max(10, total // 100) or len(unreadable) == total:
        raise DataError(
            f"{name}: {len(unreadable)} of {total} images cannot be read, the first: {unreadable[0][1]}; repair the set"
        )
    if mesh.is_main:
        for _, message in unreadable:
            note(f"warning: {name}: an image is left out: {message}")
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


def raw_pixels(images: torch.Tensor) -> torch.Tensor:
    """Embed by pixels, without training: average to 32x32 and subtract the image's mean.

    A baseline that a trained embedder has to beat. ``images`` uint8 (B, 3, H, W); returns float32 (B, 3072).
    """
    small = adaptive_avg_pool2d(images.float(), 32).flatten(1)
    return small - small.mean(dim=1, keepdim=True)
