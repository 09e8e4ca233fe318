"""IJB-B and IJB-C 1:1 verification: faces are pooled into templates, and pairs of templates are compared.

The release is a folder with ``meta/`` (lists of faces, templates and pairs) and ``loose_crop/`` (cropped images).
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from plsc.data.alignment import align_face
from plsc.data.codec import read_image
from plsc.embedding.columns import Float32, Float64, Int64, Mask
from plsc.embedding.pipeline import Embed, EmbeddedImages, embed_on_ranks
from plsc.errors import DataError, UsageError
from plsc.evaluation.pairs import unit_rows
from plsc.evaluation.roc import plot_data, roc_from_scores, roc_summary
from plsc.evaluation.search import no_retrieval
from plsc.models.preprocessing import ImageSize, Preprocessing, check_square
from plsc.parallel.collectives import on_main
from plsc.parallel.mesh import Mesh
from plsc.text_files import read_integers, text_lines

_FACES, _TEMPLATES, _PAIRS = "_name_5pts_score.txt", "_face_tid_mid.txt", "_template_pair_label.txt"
_UNDEFINED = ("accuracy", "accuracy_std", "threshold_cosine", "tar@far_folds", "rank1", "rank5", "open_set")
_TEMPLATES_AT_A_TIME = 512
_PAIRS_AT_A_TIME = 4096  # two chunks of 512 float32 fit a processor's cache


@dataclass(frozen=True)
class IjbFaces:
    """Aligned faces of a release, in the order of ``PREFIX_name_5pts_score.txt``: an image source.

    Attributes:
        folder: the release.
        image_size: side of the aligned faces in pixels.
        names: file names in ``folder``/loose_crop.
        landmarks: float64 (N, 5, 2) in pixels.
        scores: the detector's, float64 (N,).
        templates: the template of each face, int64 (N,).
        medias: the photo or video of each face, int64 (N,).
    """

    folder: Path
    image_size: int
    names: list[str]
    landmarks: Float64
    scores: Float64
    templates: Int64
    medias: Int64

    def __len__(self) -> int:
        return len(self.names)

    def picture(self, index: int) -> torch.Tensor:
        """Return face ``index``, aligned, as uint8 (3, image_size, image_size)."""
        crops = self.folder / "loose_crop"
        image = read_image(crops / self.names[index], below=crops.resolve())
        return align_face(image, self.landmarks[index], self.image_size, self.names[index])

    def key(self, index: int) -> str:
        """Return the image's file name."""
        return self.names[index]


@dataclass(frozen=True)
class TemplatePairs:
    """Pairs of templates to compare: ids ``first``, ``second`` int32 (P,), and the truth ``is_same`` (P,)."""

    first: npt.NDArray[np.int32]
    second: npt.NDArray[np.int32]
    is_same: Mask


def ijb(
    embed: Embed,
    folder: Path,
    *,
    image_size: ImageSize,
    mesh: Mesh,
    batch_size: int = 64,
    curves: bool = False,
    quiet: bool = False,
) -> dict[str, dict[str, Any]]:
    """Evaluate ``embed`` by the 1:1 protocol of IJB-B or IJB-C.

    The embeddings of each face and its mirror image are added and multiplied by the detector's score; the faces of a
    medium are averaged, the media of a template summed, and the sum L2-normalised. Pairs score by their cosine.

    Args:
        embed: maps images uint8 (B, 3, S, S) on the CPU to embeddings (B, D) on any device.
        folder: the folder IJBB or IJBC.
        image_size: side of the aligned faces in pixels; :class:`UsageError` if it is a pair.
        mesh: the ranks that share the work; all must call.
        batch_size: images per call of ``embed``.
        curves: add ``roc`` and ``scores``, for plotting.
        quiet: print no progress.

    Returns:
        ``{"ijbb" or "ijbc": {…}}`` with :func:`plsc.evaluation.evaluate`'s keys and "templates"; accuracy and ranks are
        None, because this protocol does not define them.

    Raises:
        UsageError: the folder is no such release.
        DataError: a list is missing or malformed, or too many images cannot be read.
    """
    prefix = find_prefix(folder)
    faces = read_faces(folder, prefix, check_square(image_size, "IJB's protocol aligns faces, which"))
    comparisons: list[TemplatePairs] = []  # read before the long work, so that errors show early; on the first rank
    on_main(lambda: comparisons.append(_checked_pairs(faces, prefix)), mesh)
    preprocessing = Preprocessing(image_size)
    embedded = embed_on_ranks(embed, faces, prefix, preprocessing, mesh, batch_size=batch_size, quiet=quiet)
    return {prefix: on_main(lambda: _score(faces, embedded, comparisons[0], curves), mesh)}


def pool_templates(rows: Float32, scores: Float64, templates: Int64, medias: Int64) -> tuple[Int64, Float64]:
    """Pool faces into templates.

    Args:
        rows: embeddings (N, D) of faces, not normalised: the norm measures the quality of the face.
        scores: weights (N,) of the faces.
        templates: template id (N,) of each face.
        medias: photo or video id (N,) of each face.

    Returns:
        Template ids (T,), ascending, and their unit vectors (T, D).
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


def pair_cosines(vectors: Float32, first: Int64, second: Int64) -> Float32:
    """Return cosines (P,) between rows ``first`` and ``second`` (P,) of the unit ``vectors`` (T, D)."""
    cosines = np.empty(len(first), dtype=np.float32)
    for start in range(0, len(first), _PAIRS_AT_A_TIME):
        part = slice(start, start + _PAIRS_AT_A_TIME)
        cosines[part] = np.einsum("ij,ij->i", vectors[first[part]], vectors[second[part]])
    return cosines


def _checked_pairs(faces: IjbFaces, prefix: str) -> TemplatePairs:
    """Read the pairs of the release and check that every template in them has a face."""
    pairs = read_template_pairs(faces.folder, prefix)
    for side in (pairs.first, pairs.second):
        unknown = side[~np.isin(side, faces.templates)]
        if unknown.size:
            raise DataError(f"{prefix}: a pair names template {unknown[0]}, which has no face; correct the lists")
    return pairs


def _score(faces: IjbFaces, embedded: EmbeddedImages, pairs: TemplatePairs, curves: bool) -> dict[str, Any]:
    kept = embedded.readable
    names, vectors = pool_templates(embedded.rows[kept], faces.scores[kept], faces.templates[kept], faces.medias[kept])
    # An unreadable face may be its template's only one: the pairs of that template are left out.
    complete = np.isin(pairs.first, names) & np.isin(pairs.second, names)
    first, second = (np.searchsorted(names, side[complete]) for side in (pairs.first, pairs.second))
    cosines = pair_cosines(vectors.astype(np.float32), first, second)
    roc = roc_from_scores(cosines, pairs.is_same[complete])
    counts = {"images": len(faces), "identities": None, "templates": len(names)}
    counts["unreadable"] = int(np.sum(~kept))
    undefined = dict.fromkeys(_UNDEFINED) | {"retrieval": no_retrieval()}
    return undefined | roc_summary(roc) | counts | (plot_data(roc) if curves else {})


def find_prefix(folder: Path) -> str:
    """Return ``ijbb`` or ``ijbc``, whichever ``folder``/meta holds; :class:`UsageError` unless exactly one."""
    prefixes = sorted(path.name.removesuffix(_TEMPLATES) for path in (folder / "meta").glob(f"*{_TEMPLATES}"))
    if len(prefixes) != 1:
        raise UsageError(
            f"{folder / 'meta'} holds {len(prefixes) or 'no'} lists *{_TEMPLATES}; "
            "--ijb takes the folder IJBB or IJBC, with meta/ and loose_crop/ in it"
        )
    return prefixes[0]


def read_faces(folder: Path, prefix: str, image_size: int) -> IjbFaces:
    """Read the lists of faces and templates; :class:`DataError` names the file and the line that is wrong."""
    names, values = _read_rows(folder / "meta" / f"{prefix}{_FACES}", 11)
    members, ids = _read_rows(folder / "meta" / f"{prefix}{_TEMPLATES}", 2)
    if members != names:
        rows = {name: row for row, name in enumerate(members)}
        if missing := [name for name in names if name not in rows]:
            path = folder / "meta" / f"{prefix}{_TEMPLATES}"
            raise DataError(f"{path} lacks {missing[0]}, which the list of faces has; copy both from one release")
        ids = ids[[rows[name] for name in names]]
    templates, medias = ids.astype(np.int64).T
    return IjbFaces(folder, image_size, names, values[:, :10].reshape(-1, 5, 2), values[:, 10], templates, medias)


def read_template_pairs(folder: Path, prefix: str) -> TemplatePairs:
    """Read ``tid tid label`` lines (15 million of them in IJB-C)."""
    path = folder / "meta" / f"{prefix}{_PAIRS}"
    if not path.is_file() or not path.stat().st_size:
        raise DataError(f"{path} is missing or empty; copy it from the release")
    problem = DataError(f"{path} has other lines than: each line is template template label, with label 0 or 1")
    try:
        table = read_integers(path, 3)
    except DataError:
        raise problem from None
    if not np.isin(table[:, 2], (0, 1)).all() or np.any(table[:, :2] != table[:, :2].astype(np.int32)):
        raise problem
    return TemplatePairs(table[:, 0].astype(np.int32), table[:, 1].astype(np.int32), table[:, 2] == 1)


def _read_rows(path: Path, columns: int) -> tuple[list[str], Float64]:
    """Read lines of a name and ``columns`` numbers, separated by blanks."""
    names: list[str] = []
    values: list[list[float]] = []
    try:
        for number, line in text_lines(path):
            name, *rest = line.split() or [""]
            values.append([float(field) for field in rest])
            names.append(name)
            if not all(map(math.isfinite, values[-1])):
                raise DataError(f"{path} line {number} has a number that is not finite")
            if len(rest) != columns:
                raise DataError(f"{path} line {number} has {len(rest)} numbers, not {columns}")
    except FileNotFoundError:
        raise DataError(f"{path} is missing; copy it from the release") from None
    except ValueError as error:
        raise DataError(f"{path} line {len(names) + 1}: {error}") from None
    if not names:
        raise DataError(f"{path} is empty; copy it from the release")
    return names, np.array(values)
