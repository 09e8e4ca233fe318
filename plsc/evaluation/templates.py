"""IJB-B and IJB-C 1:1 verification: faces are pooled into templates, and pairs of templates are judged."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plsc.errors import DataError
from plsc.evaluation.embedding import Embed, EmbeddedImages, embed_images
from plsc.evaluation.evaluator import drawn_curves, on_main
from plsc.evaluation.ijb_folder import (
    IjbFaces,
    TemplatePairs,
    find_prefix,
    read_faces,
    read_template_pairs,
)
from plsc.evaluation.pairs import roc_summary, unit_rows
from plsc.evaluation.roc import roc_from_scores
from plsc.parallel.mesh import Mesh

_UNDEFINED = ("accuracy", "accuracy_std", "threshold", "tar@far_folds", "rank1", "rank5", "open_set")
_TEMPLATES_AT_A_TIME = 512
_PAIRS_AT_A_TIME = 4096  # two chunks of 512 float32 fit a processor's cache


def ijb(
    embed: Embed,
    folder: Path,
    *,
    image_size: int,
    mesh: Mesh,
    batch_size: int = 64,
    curves: bool = False,
    quiet: bool = False,
) -> dict[str, dict[str, Any]]:
    """Judge ``embed`` by the 1:1 protocol of the IJB-B or IJB-C ``folder``; see :func:`evaluate`'s arguments.

    Each face's embedding and its mirror image's are added and multiplied by the detector's score; the faces
    of a medium are averaged, the media of a template summed, and the sum L2-normalised. Pairs score by their
    cosine.

    Returns ``{"ijbb" or "ijbc": {…}}`` with :func:`evaluate`'s keys and "templates"; the accuracy and the
    ranks are None, for this protocol does not define them.

    Raises UsageError or DataError when a list is missing or malformed, or too many images cannot be read.
    """
    prefix = find_prefix(folder)
    faces = read_faces(folder, prefix, image_size)
    comparisons: list[TemplatePairs] = []  # read on the first rank before the long work: faults show early
    on_main(lambda: comparisons.append(_checked_pairs(faces, prefix)), mesh)
    embedded = embed_images(embed, faces, prefix, image_size=image_size, mesh=mesh, batch_size=batch_size, quiet=quiet)
    return {prefix: on_main(lambda: _judge(faces, embedded, comparisons[0], curves), mesh)}


def pool_templates(
    rows: NDArray[np.float32],
    scores: NDArray[np.float64],
    templates: NDArray[np.int64],
    medias: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Template ids (T,), ascending, and their unit vectors (T, D), from embeddings ``rows`` (N, D) of faces.

    ``scores`` (N,) weigh the faces; ``templates`` and ``medias`` (N,) say where each belongs. Not normalised
    before the sum: the norm of a face's embedding tells how clear the face is.
    """
    order = np.lexsort((medias, templates))
    ordered, media = templates[order], medias[order]
    begins_media = np.append(True, (ordered[1:] != ordered[:-1]) | (media[1:] != media[:-1]))
    _, faces_of_medium = np.unique(np.cumsum(begins_media), return_counts=True)
    weights = scores[order] / np.repeat(faces_of_medium, faces_of_medium)
    names, starts = np.unique(ordered, return_index=True)
    pooled = np.empty((len(names), rows.shape[1]))
    edges = np.append(starts, len(order))
    for first in range(0, len(names), _TEMPLATES_AT_A_TIME):
        last = min(first + _TEMPLATES_AT_A_TIME, len(names))
        part = slice(edges[first], edges[last])
        weighted = rows[order[part]].astype(np.float64) * weights[part, None]
        pooled[first:last] = np.add.reduceat(weighted, starts[first:last] - edges[first], axis=0)
    return names, unit_rows(pooled)


def pair_cosines(
    vectors: NDArray[np.float32], first: NDArray[np.int64], second: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Cosines (P,) between rows ``first`` and ``second`` (P,) of the unit ``vectors`` (T, D)."""
    cosines = np.empty(len(first), dtype=np.float32)
    for start in range(0, len(first), _PAIRS_AT_A_TIME):
        part = slice(start, start + _PAIRS_AT_A_TIME)
        cosines[part] = np.einsum("ij,ij->i", vectors[first[part]], vectors[second[part]])
    return cosines


def _checked_pairs(faces: IjbFaces, prefix: str) -> TemplatePairs:
    """The pairs of the release, once it is sure that every template in them has a face."""
    pairs = read_template_pairs(faces.folder, prefix)
    for side in (pairs.first, pairs.second):
        strange = side[~np.isin(side, faces.templates)]
        if strange.size:
            raise DataError(f"{prefix}: a pair names template {strange[0]}, without a face; mend the lists")
    return pairs


def _judge(faces: IjbFaces, embedded: EmbeddedImages, pairs: TemplatePairs, curves: bool) -> dict[str, Any]:
    kept = embedded.readable
    names, vectors = pool_templates(embedded.rows[kept], faces.scores[kept], faces.templates[kept], faces.medias[kept])
    # An unreadable face may be its template's only one: the pairs of that template are left out.
    whole = np.isin(pairs.first, names) & np.isin(pairs.second, names)
    first, second = (np.searchsorted(names, side[whole]) for side in (pairs.first, pairs.second))
    cosines = pair_cosines(vectors.astype(np.float32), first, second)
    roc = roc_from_scores(cosines, pairs.is_same[whole])
    counts = {"images": len(faces), "identities": None, "templates": len(names)}
    counts["unreadable"] = int(np.sum(~kept))
    return dict.fromkeys(_UNDEFINED) | roc_summary(roc) | counts | (drawn_curves(roc) if curves else {})
