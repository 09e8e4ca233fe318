"""The IJB-B and IJB-C folders as users hold them: lists of faces, templates and pairs, and cropped images."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from plsc.data.alignment import align_face
from plsc.errors import DataError, UsageError

_FACES, _TEMPLATES, _PAIRS = "_name_5pts_score.txt", "_face_tid_mid.txt", "_template_pair_label.txt"


@dataclass(frozen=True)
class IjbFaces:
    """The faces in the order of ``PREFIX_name_5pts_score.txt``; an image source of aligned faces.

    names: file names in ``folder``/loose_crop. landmarks: float64 (N, 5, 2) in pixels. scores: the
    detector's, float64 (N,). templates, medias: int64 (N,), the template and the photo or video that a face
    belongs to.
    """

    folder: Path
    image_size: int
    names: list[str]
    landmarks: NDArray[np.float64]
    scores: NDArray[np.float64]
    templates: NDArray[np.int64]
    medias: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.names)

    def image(self, index: int) -> torch.Tensor:
        """Face ``index``, aligned, as uint8 (3, image_size, image_size)."""
        from plsc.data.codec import read_image

        image = read_image(self.folder / "loose_crop" / self.names[index])
        return align_face(image, self.landmarks[index], self.image_size, self.names[index])

    def key(self, index: int) -> str:
        """The image's file name."""
        return self.names[index]


@dataclass(frozen=True)
class TemplatePairs:
    """Which templates are compared: ids ``first``, ``second`` int32 (P,), and the truth ``is_same`` (P,)."""

    first: NDArray[np.int32]
    second: NDArray[np.int32]
    is_same: NDArray[np.bool_]


def find_prefix(folder: Path) -> str:
    """``ijbb`` or ``ijbc``, whichever ``folder``/meta holds; :class:`UsageError` when not exactly one."""
    found = sorted(path.name.removesuffix(_TEMPLATES) for path in (folder / "meta").glob(f"*{_TEMPLATES}"))
    if len(found) != 1:
        raise UsageError(
            f"{folder / 'meta'} holds {len(found) or 'no'} lists *{_TEMPLATES}; "
            "--ijb takes the folder IJBB or IJBC, with meta/ and loose_crop/ in it"
        )
    return found[0]


def read_faces(folder: Path, prefix: str, image_size: int) -> IjbFaces:
    """Read the lists of faces and templates; :class:`DataError` names the file and the line that is wrong."""
    names, values = _read_rows(folder / "meta" / f"{prefix}{_FACES}", 11)
    members, places = _read_rows(folder / "meta" / f"{prefix}{_TEMPLATES}", 2)
    if members != names:
        places = places[_matching_rows(names, members, folder / "meta" / f"{prefix}{_TEMPLATES}")]
    templates, medias = places.astype(np.int64).T
    return IjbFaces(folder, image_size, names, values[:, :10].reshape(-1, 5, 2), values[:, 10], templates, medias)


def read_template_pairs(folder: Path, prefix: str) -> TemplatePairs:
    """Read ``tid tid label`` lines (15 million of them in IJB-C)."""
    path = folder / "meta" / f"{prefix}{_PAIRS}"
    if not path.is_file() or not path.stat().st_size:
        raise DataError(f"{path} is missing or empty; copy it from the release")
    try:
        table = np.loadtxt(path, dtype=np.int32, ndmin=2, comments=None)
    except ValueError as error:
        raise DataError(f"{path}: {error}; each line is: template template label") from None
    if table.shape[1] != 3 or not np.isin(table[:, 2], (0, 1)).all():
        raise DataError(f"{path} has other lines than: template template label, with label 0 or 1")
    return TemplatePairs(table[:, 0], table[:, 1], table[:, 2] == 1)


def _read_rows(path: Path, columns: int) -> tuple[list[str], NDArray[np.float64]]:
    """Lines of a name and ``columns`` numbers, separated by blanks."""
    names: list[str] = []
    values: list[list[float]] = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                name, *rest = line.split() or [""]
                values.append([float(field) for field in rest])
                names.append(name)
                if len(rest) != columns:
                    raise DataError(f"{path} line {number} has {len(rest)} numbers, not {columns}")
    except FileNotFoundError:
        raise DataError(f"{path} is missing; copy it from the release") from None
    except ValueError as error:
        raise DataError(f"{path} line {len(names) + 1}: {error}") from None
    if not names:
        raise DataError(f"{path} is empty; copy it from the release")
    return names, np.array(values)


def _matching_rows(names: list[str], members: list[str], path: Path) -> list[int]:
    rows = {name: row for row, name in enumerate(members)}
    missing = next((name for name in names if name not in rows), None)
    if missing is not None:
        raise DataError(f"{path} lacks {missing}, which the list of faces has; copy both from one release")
    return [rows[name] for name in names]
