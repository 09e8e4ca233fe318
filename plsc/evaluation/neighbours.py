"""A picture of what an embedder finds alike: a few images of a set, and the nearest images to each."""

import io
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from plsc.embedding.columns import Int64
from plsc.embedding.pipeline import ImageSource
from plsc.evaluation.pairs import unit_rows_float32

SAME, DIFFERENT = (0, 114, 178), (213, 94, 0)  # RGB; blue and vermilion of Okabe and Ito, for all eyes
_TILE, _BORDER, _TEXT = 72, 3, 13  # pixels


@dataclass(frozen=True)
class Neighbours:
    """The nearest images to some of a set.

    Attributes:
        queries: numbers of the images (Q,), each of another class.
        nearest: numbers of the images nearest to each (Q, K), by falling cosine, itself left out.
        cosines: of these (Q, K), float32.
        same: whether they are of the query's class (Q, K).
    """

    queries: Int64
    nearest: Int64
    cosines: NDArray[np.float32]
    same: NDArray[np.bool_]


def find_neighbours(rows: NDArray[np.floating], labels: Int64, *, queries: int, count: int, seed: int) -> Neighbours:
    """Find the images nearest to one of each of ``queries`` classes, which ``seed`` draws.

    Args:
        rows: embeddings (N, D).
        labels: classes (N,); those of a single image are no queries where others have more.
        queries: at most; the same images at every evaluation of a set.
        count: K, at most N - 1.
        seed: draws the classes.
    """
    unit = unit_rows_float32(rows)
    _, first, sizes = np.unique(labels, return_index=True, return_counts=True)
    candidates = first[sizes > 1] if (sizes > 1).any() else first
    drawn = np.random.default_rng(seed).permutation(candidates)[:queries].astype(np.int64)
    cosines = unit[drawn] @ unit.T
    cosines[np.arange(len(drawn)), drawn] = -np.inf
    nearest = np.argsort(-cosines, axis=1, kind="stable")[:, : min(count, len(rows) - 1)]
    found = np.take_along_axis(cosines, nearest, axis=1)
    return Neighbours(drawn, nearest.astype(np.int64), found, labels[nearest] == labels[drawn][:, None])


def draw_neighbours(found: Neighbours, images: ImageSource) -> bytes:
    """Draw a row for each query, first itself, then its neighbours with their cosines, blue of its class, else orange.

    Returns:
        An encoded PNG.

    Raises:
        DataError: an image cannot be read.
    """
    step = _TILE + 2 * _BORDER
    height = step + _TEXT
    sheet = Image.new("RGB", (step * (1 + found.nearest.shape[1]), height * len(found.queries)), "white")
    draw = ImageDraw.Draw(sheet)
    for row, query in enumerate(found.queries):
        _place(sheet, images, int(query), (0, row * height), (255, 255, 255))
        for column, index in enumerate(found.nearest[row], start=1):
            x, y = column * step, row * height
            colour = SAME if found.same[row, column - 1] else DIFFERENT
            _place(sheet, images, int(index), (x, y), colour)
            draw.text((x + _BORDER, y + step), f"{found.cosines[row, column - 1]:.3f}", fill=colour)
    encoded = io.BytesIO()
    sheet.save(encoded, format="PNG")
    return encoded.getvalue()


def _place(
    sheet: Image.Image, images: ImageSource, index: int, corner: tuple[int, int], border: tuple[int, ...]
) -> None:
    picture = Image.fromarray(images.picture(index).permute(1, 2, 0).contiguous().numpy())
    framed = Image.new("RGB", (_TILE + 2 * _BORDER,) * 2, border)
    framed.paste(picture.resize((_TILE, _TILE)), (_BORDER, _BORDER))
    sheet.paste(framed, corner)
